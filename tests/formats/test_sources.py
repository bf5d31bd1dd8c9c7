"""Files of stores that return fewer bytes than requested, end too early, or fail."""

from __future__ import annotations

import io
from typing import Any

import pytest

from flightedl.errors import DataError, UnavailableError
from flightedl.formats.chunks import CorruptChunkError
from flightedl.formats.sources import WatchedFile, parsing

DATA = bytes(range(100))


class Trickle(io.RawIOBase):
    """A file that returns at most seven bytes at a time."""

    def __init__(self, data: bytes = DATA) -> None:
        super().__init__()
        self._file = io.BytesIO(data)

    def read(self, size: int | None = -1, /) -> bytes:
        return self._file.read(7 if size is None or size < 0 else min(size, 7))

    def readinto(self, buffer: Any, /) -> int:
        return self._file.readinto(memoryview(buffer)[:7])


def watched(data: bytes = DATA) -> WatchedFile:
    file: Any = Trickle(data)
    return WatchedFile(file, "a.file")


@pytest.mark.parametrize("size", [0, 1, 7, 8, 50, 100])
def test_short_reads_are_continued(size: int) -> None:
    assert watched().exactly(size) == DATA[:size]
    assert watched().buffer(size).to_pybytes() == DATA[:size]
    assert watched().buffer(size, b"head").to_pybytes() == b"head" + DATA[:size]


def test_a_file_that_ends_too_early_is_corrupt() -> None:
    for read in (lambda file: file.exactly(101), lambda file: file.buffer(101), lambda file: file.buffer(101, b"h")):
        source = watched()
        expected = pytest.raises(
            CorruptChunkError, match=r"a\.file is corrupt, chunk 3: the file ends 1 bytes too early"
        )
        with expected, parsing(source, "chunk 3"):
            read(source)


@pytest.mark.parametrize(
    ("failure", "kind"), [(TimeoutError("no answer"), UnavailableError), (PermissionError("denied"), DataError)]
)
def test_a_failure_of_the_store_is_not_damage(failure: Exception, kind: type[Exception]) -> None:
    """A parser converts it to an error of its own."""
    source = watched()

    def fail(*_: object) -> bytes:
        raise failure

    def parse() -> None:
        try:
            source.read(5)
        except OSError:
            raise ValueError("truncated") from None

    source._file.read = fail  # type: ignore[method-assign]
    with pytest.raises(kind, match="cannot be read") as raised, parsing(source, "chunk 3"):
        parse()
    assert not isinstance(raised.value, CorruptChunkError)
