"""Hashes of a shard's file: of the bytes that were written, even if their memory is reused at once, and of metadata."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from typing import Any

import numpy as np
import xxhash

from flightedl.formats.shard_files import _hashed, _metadata_checksum


class LateFuture(Future[Any]):
    """A call that runs only when its result is asked for."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__()
        self._call = call

    def result(self, timeout: float | None = None) -> Any:
        return self._call()


class LateExecutor(Executor):
    """As late as a thread may be that has other work to do."""

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        return LateFuture(lambda: function(*arguments, **named))


def test_a_part_is_hashed_before_its_memory_is_reused() -> None:
    memory = np.empty(1 << 19, np.uint8)

    def parts() -> Iterator[memoryview]:
        for value in range(3):
            memory[:] = value
            yield memory.data

    digest = xxhash.xxh3_128()
    written = b"".join(bytes(part) for part in _hashed(parts(), digest, LateExecutor()))
    assert len(written) == 3 << 19
    assert digest.hexdigest() == xxhash.xxh3_128(written).hexdigest()


def test_the_checksum_of_metadata_covers_both_parts_and_their_border() -> None:
    found = {_metadata_checksum(*parts) for parts in ((b"ab", b"c"), (b"a", b"bc"), (b"ab", b"d"), (b"bb", b"c"))}
    assert len(found) == 4
