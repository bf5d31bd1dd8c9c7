"""Adapter between pyarrow's writers, which write to a file, and ``Storage.publish``, which takes parts."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pyarrow as pa


class PartsSink(io.RawIOBase):
    """A write-only file that collects the written bytes until they are fetched.

    Args:
        is_copied: False to keep the memory that the writer passes, which must not change until it is fetched.
    """

    def __init__(self, *, is_copied: bool = True) -> None:
        super().__init__()
        self._is_copied = is_copied
        self._parts: list[bytes | memoryview] = []
        self._size_bytes = 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._size_bytes

    def write(self, data: bytes | bytearray | memoryview, /) -> int:  # type: ignore[override]
        view = memoryview(data).cast("B")
        self._parts.append(bytes(view) if self._is_copied else view)
        self._size_bytes += len(view)
        return len(view)

    def take(self) -> bytes:
        return b"".join(self.take_parts())

    def take_parts(self) -> list[bytes | memoryview]:
        """Return the bytes written since the last call, as separate parts. Intended for large files."""
        parts, self._parts = self._parts, []
        return parts


def written(batches: Iterable[pa.RecordBatch], writer_of: Callable[[pa.PythonFile], Any]) -> Iterator[bytes]:
    """Yield the parts of a file written by a pyarrow writer: one part per batch, and one for the end."""
    sink = PartsSink()
    with writer_of(pa.PythonFile(sink, mode="w")) as writer:
        for batch in batches:
            writer.write_batch(batch)
            yield sink.take()
    yield sink.take()
