"""Common parts of the text formats CSV and JSON lines.

A chunk is a range of bytes that ends with a record. Its size is about ``text_chunk_bytes``, or less if the file would
otherwise have only a few chunks, so a single file can keep many trainers busy. A compressed file (``.gz``, ``.zst``)
cannot be read from the middle, so it is a single chunk; split or convert large compressed files.

Indexing parses each file once. This counts the records, detects damage before training starts, and infers the types of
columns from *all* records. To read a chunk, pass the dataset's inferred schema (``ReadRequest.schema``). Without it,
types are inferred from the chunk alone and may differ between chunks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from flightedl.errors import DataError
from flightedl.formats.chunks import Chunk, ChunkColumns, CorruptChunkError, FileIndex, IndexOptions
from flightedl.formats.cutting import Readable, pieces
from flightedl.formats.records import ReadRequest, Records, require_columns, select
from flightedl.formats.schemas import Mismatch, require_unique_columns, widened_schema
from flightedl.formats.sources import WatchedFile, compression_of, opened, parsing
from flightedl.ports import Files, FileStat

#: Minimum number of chunks per file, unless chunks would become smaller than ``_WORTH_A_TASK_BYTES``.
_CHUNKS_OF_A_FILE = 32
_WORTH_A_TASK_BYTES = 16 << 10
_ASCII_END = 0x80


def chunk_bytes(size_bytes: int, options: IndexOptions) -> int:
    """Return the approximate size of a file's chunks. It depends only on the file's size and the options."""
    share = -(-size_bytes // _CHUNKS_OF_A_FILE)
    return min(options.text_chunk_bytes, max(share, _WORTH_A_TASK_BYTES))


class TextFormat:
    """Base class of the text formats. Each format defines how records end and how they are parsed."""

    name: ClassVar[str]
    suffixes: ClassVar[tuple[str, ...]]
    #: True if a column may be missing from some records.
    may_lack_columns: ClassVar[bool]

    def records_end(self, text: bytes) -> int:
        """Return the length of the complete records in ``text``, which begins with a record; 0 if none is complete."""
        raise NotImplementedError

    def head(self, source: Readable, url: str) -> tuple[tuple[str, ...] | None, int, bytes]:
        """Return the column names in the file's header, the header's size, and the bytes that were read beyond it."""
        raise NotImplementedError

    def parse(self, text: Any, names: tuple[str, ...] | None, request: ReadRequest) -> pa.Table:
        """Parse the records in ``text``. Column types come from ``request.schema``; other types are inferred.

        With a schema, the text is a chunk of an indexed file, in any kind of memory. Without one, it is ``bytes``.

        Raises:
            pa.ArrowInvalid: the text cannot be parsed.
        """
        raise NotImplementedError

    def write(self, batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> Iterator[bytes]:
        raise NotImplementedError

    def index(self, files: Files, stat: FileStat, options: IndexOptions) -> FileIndex:
        compression = compression_of(stat.url)
        records: list[int] = []
        offsets: list[int] = []
        sizes: list[int] = []
        skipped: list[str] = []
        schema: pa.Schema | None = None
        with opened(files, stat.url) as source, _plain(source, compression) as plain:
            names, offset, ahead = self.head(plain, stat.url)
            size_bytes = chunk_bytes(stat.size_bytes, options) if compression is None else options.text_chunk_bytes
            for text in pieces(_Ahead(ahead, plain), size_bytes, self.records_end):
                try:
                    with parsing(source, f"bytes {offset} to {offset + len(text)}"):
                        _require_utf8(text)
                        table = self.parse(text, names, ReadRequest())
                        guess = self._joined(schema, table.schema, stat.url, offset)
                except CorruptChunkError as error:
                    if not options.skip_corrupt or compression is not None:
                        raise
                    skipped.append(str(error))
                else:
                    schema = guess
                    records.append(len(table))
                    offsets.append(offset)
                    sizes.append(len(text))
                offset += len(text)
        if schema is None:
            schema = pa.schema([pa.field(name, pa.null()) for name in names or ()])
        require_unique_columns(schema, stat.url)
        if compression is not None:
            records, offsets, sizes = [sum(records)], [0], [stat.size_bytes]
        return FileIndex(stat, self.name, schema, ChunkColumns.of(records, offsets, sizes), tuple(skipped))

    def schema(self, files: Files, stat: FileStat) -> pa.Schema:
        """Return the schema inferred from all records."""
        return self.index(files, stat, IndexOptions()).schema

    def read(self, files: Files, chunk: Chunk, request: ReadRequest) -> Records:
        compression = compression_of(chunk.url)
        place = f"bytes {chunk.offset} to {chunk.offset + chunk.size_bytes}"
        with opened(files, chunk.url) as source, parsing(source, place):
            with _plain(source, compression) as plain:
                names, head_bytes, ahead = self.head(plain, chunk.url)
                if compression is not None:
                    text = b"".join((ahead, *iter(lambda: plain.read(1 << 24), b"")))
                elif head_bytes + len(ahead) >= chunk.offset + chunk.size_bytes:
                    text = ahead[chunk.offset - head_bytes :][: chunk.size_bytes]
                else:
                    source.seek(chunk.offset)
                    text = (
                        source.exactly(chunk.size_bytes) if request.schema is None else source.buffer(chunk.size_bytes)
                    )
            _require_utf8(text)
            table = self.parse(text, names, replace(request, records=chunk.records))
            if len(table) != chunk.records:
                raise ValueError(f"there are {len(table)} records, not {chunk.records}")
            table = _with_missing(table, request)
            require_columns(table.schema, request, chunk.url)
            return select(table, request)

    def _joined(self, schema: pa.Schema | None, found: pa.Schema, url: str, offset: int) -> pa.Schema:
        if schema is None:
            return found
        joined = widened_schema(schema, found, may_lack=self.may_lack_columns)
        if isinstance(joined, Mismatch):
            raise DataError(f"{url} mixes types: from byte {offset} on {joined.text} as before it")
        return joined


class _Ahead:
    def __init__(self, ahead: bytes, source: Readable) -> None:
        self._ahead = ahead
        self._source = source

    def read(self, size: int, /) -> bytes:
        if not self._ahead:
            return self._source.read(size)
        taken, self._ahead = self._ahead[:size], self._ahead[size:]
        return taken


@contextmanager
def _plain(source: WatchedFile, compression: str | None) -> Iterator[Readable]:
    if compression is None:
        yield source
        return
    with pa.CompressedInputStream(pa.PythonFile(source, mode="r"), compression) as stream:
        yield stream


def _require_utf8(text: Any) -> None:
    """Raise ValueError if the text is not UTF-8. pyarrow would accept some invalid texts unchanged."""
    if np.frombuffer(text, np.uint8).max(initial=0) < _ASCII_END:
        return
    try:
        str(text, "utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} of it is not UTF-8") from None


def _with_missing(table: pa.Table, request: ReadRequest) -> pa.Table:
    """Return the table with null columns added for the dataset's columns that it lacks."""
    if request.schema is None:
        return table
    needed = request.needed()
    for field in request.schema:
        if field.name not in table.schema.names and (needed is None or field.name in needed):
            table = table.append_column(field, pa.nulls(len(table), field.type))
    return table
