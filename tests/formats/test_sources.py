"""Files of stores that return fewer bytes than requested, end too early, or fail."""

from __future__ import annotations

import errno
import io
from typing import Any

import pyarrow as pa
import pytest

from flightedl.errors import DataError, ExhaustedError, StoreError, UnavailableError, UnsupportedError
from flightedl.formats.chunks import CorruptChunkError
from flightedl.formats.dataset_spec import DatasetSpec
from flightedl.formats.index import build_index
from flightedl.formats.reader import ReadCounts, read_task
from flightedl.formats.registry import named_format
from flightedl.formats.sources import WatchedFile, parsing
from tests.support.memory import MemoryFiles

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
    ("failure", "kind"), [(TimeoutError("no answer"), UnavailableError), (PermissionError("denied"), StoreError)]
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


MACHINE_ERRORS = [
    (MemoryError(), ExhaustedError, "too little free memory"),
    (pa.ArrowMemoryError("malloc of size 320000000 failed"), ExhaustedError, "too little free memory .malloc of size"),
    (OSError(errno.EMFILE, "Too many open files"), ExhaustedError, "Too many open files"),
    (OSError(errno.ENFILE, "Too many open files in system"), ExhaustedError, "this machine's limits"),
    (OSError(errno.EIO, "Input/output error"), ExhaustedError, "disks prevent it"),
    (ModuleNotFoundError("No module named 'google_crc32c'"), UnsupportedError, "google_crc32c.*install it"),
    (pa.ArrowNotImplementedError("Support for codec 'lz4' not built"), UnsupportedError, "does not support it.*lz4"),
    (pa.ArrowCapacityError("array cannot contain more than 2147483646 bytes"), DataError, "exceeds a limit of Arrow"),
]


@pytest.mark.parametrize(
    ("failure", "kind", "text"), MACHINE_ERRORS, ids=lambda value: getattr(value, "__name__", None)
)
def test_what_a_machine_lacks_is_not_damage(failure: Exception, kind: type[DataError], text: str) -> None:
    with pytest.raises(kind, match=rf"a\.file.*{text}") as raised, parsing(watched(), "chunk 3"):
        raise failure
    assert not isinstance(raised.value, CorruptChunkError)
    assert raised.value.fault == ("machine" if kind is not DataError else "")


@pytest.mark.parametrize("failure", [MemoryError(), OSError(errno.EMFILE, "Too many open files")], ids=repr)
def test_a_read_that_this_machine_cannot_carry_out_is_not_a_failure_of_the_store(failure: Exception) -> None:
    source = watched()

    def fail(*_: object) -> bytes:
        raise failure

    source._file.read = fail  # type: ignore[method-assign]
    with pytest.raises(ExhaustedError), parsing(source, "chunk 3"):
        source.read(5)


@pytest.mark.parametrize(
    "failure", [pa.ArrowMemoryError("malloc failed"), pa.ArrowNotImplementedError("no such kernel")], ids=repr
)
@pytest.mark.parametrize("name", ["parquet", "arrow", "csv", "jsonl", "tar"])
def test_records_that_a_machine_cannot_decode_are_never_skipped(
    name: str, failure: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = named_format(name)
    table = pa.table({"x": pa.array([b"1", b"2"], pa.binary() if name == "tar" else pa.string())})
    files = MemoryFiles({"a": b"".join(kind.write(table.to_batches(), table.schema))})
    spec = DatasetSpec(("a",), format=name, on_corrupt="skip")
    index = build_index(files, spec)
    counts = ReadCounts()

    def fail(*_: object, **__: object) -> None:
        raise failure

    # The last step of each format's ``read``, inside its handler of damage.
    monkeypatch.setattr(f"{type(kind).read.__module__}.select", fail)
    with pytest.raises((ExhaustedError, UnsupportedError)):
        list(read_task(files, [index.chunk(0)], spec, None, 0, 0, schema=index.schema, counts=counts))
    assert counts == ReadCounts()
