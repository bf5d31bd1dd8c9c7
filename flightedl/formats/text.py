"""Common parts of the text formats CSV and JSON lines, and of TFRecord, whose records are binary.

A chunk is a range of bytes that ends with a record. Its size is about ``text_chunk_bytes``, or less if the file would
otherwise have only a few chunks, so a single file can keep many trainers busy. A compressed file (``.gz``, ``.zst``)
cannot be read from the middle, so it is a single chunk; split or convert large compressed files.

Indexing parses each file once. This counts the records, detects damage before training starts, and guesses the types
of columns from *all* records (see ``inference``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from flightedl.domain.data_urls import path_of
from flightedl.errors import DataError
from flightedl.formats.chunks import Chunk, ChunkColumns, CorruptChunkError, FileIndex, IndexOptions, TextOptions
from flightedl.formats.cutting import Readable, pieces
from flightedl.formats.inference import joined_schemas
from flightedl.formats.records import ReadRequest, Records, require_columns, select
from flightedl.formats.schemas import require_unique_columns
from flightedl.formats.sources import WatchedFile, compression_of, opened, parsing, reason, until_damage
from flightedl.ports import Files, FileStat

#: Minimum number of chunks per file, unless chunks would become smaller than ``_WORTH_A_TASK_BYTES``.
_CHUNKS_OF_A_FILE = 32
_WORTH_A_TASK_BYTES = 16 << 10
_ASCII_END = 0x80
#: Byte order mark of UTF-8.
MARK = b"\xef\xbb\xbf"


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
    is_utf8: ClassVar[bool] = True
    #: Possible ends of a record. The first is appended to a last record without one when it is copied.
    line_ends: ClassVar[tuple[bytes, ...]] = (b"\n", b"\r")

    def compression(self, source: WatchedFile, url: str) -> str | None:
        """Return the compression of an entire file. The source is at its beginning, and remains there."""
        del source
        return compression_of(path_of(url))

    def records_end(self, text: bytes, options: TextOptions) -> int:
        """Return the length of the complete records in ``text``, which begins with a record; 0 if none is complete.

        Raises:
            ValueError: the first record is damaged such that nobody can find its end.
        """
        raise NotImplementedError

    def head(self, source: Readable, url: str, options: TextOptions) -> tuple[tuple[str, ...] | None, bytes, bytes]:
        """Return the column names, the header or the bytes to skip, and the bytes that were read beyond them."""
        del source, url, options
        return None, b"", b""

    def guess(self, text: bytes, names: tuple[str, ...] | None, options: IndexOptions) -> tuple[int, pa.Schema]:
        """Return the number of records in ``text``, and guesses for their columns, or the declared types.

        Raises:
            pa.ArrowInvalid: the text cannot be parsed.
            MixedTypesError: values of one column have no common type.
        """
        raise NotImplementedError

    def parse(self, text: Any, names: tuple[str, ...] | None, request: ReadRequest) -> pa.Table:
        """Parse the records in ``text``, in any kind of memory, with the types of ``request.schema``.

        Raises:
            pa.ArrowInvalid: the text cannot be parsed.
        """
        raise NotImplementedError

    def write(self, batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> Iterator[bytes]:
        raise NotImplementedError

    def index(self, files: Files, stat: FileStat, options: IndexOptions) -> FileIndex:
        records: list[int] = []
        offsets: list[int] = []
        sizes: list[int] = []
        hashes: list[int] = []
        skipped: list[str] = []
        schema: pa.Schema | None = None
        with (
            opened(files, stat.url) as source,
            _plain(source, compression := self.compression(source, stat.url)) as plain,
        ):
            names, head, ahead = self.head(plain, stat.url, options.text)
            offset = len(head)
            require_unique_columns(names or (), stat.url)
            digest = _digest(names, options.text)
            size_bytes = chunk_bytes(stat.size_bytes, options) if compression is None else options.text_chunk_bytes

            def records_end(text: bytes) -> int:
                with parsing(source, f"from byte {offset} on"):
                    return self.records_end(text, options.text)

            def texts() -> Iterator[bytes]:
                with until_damage(options if compression is None else IndexOptions()) as ended:
                    yield from pieces(_Ahead(ahead, plain), size_bytes, records_end)
                skipped.extend(ended)

            for text in texts():
                try:
                    with parsing(source, f"bytes {offset} to {offset + len(text)}"):
                        self._require_utf8(text)
                        count, found = self.guess(text, names, options)
                        self.require_declared(text, names, count, options, (stat.url, sum(records)))
                        joined = found if schema is None else joined_schemas(schema, found)
                except CorruptChunkError as error:
                    if not options.skip_corrupt or compression is not None:
                        raise
                    skipped.append(str(error))
                else:
                    schema = joined
                    records.append(count)
                    offsets.append(offset)
                    sizes.append(len(text))
                    hashes.append(_digest(names, options.text, text).intdigest())
                if compression is not None:
                    digest.update(text)
                offset += len(text)
        if schema is None:
            schema = pa.schema([pa.field(name, pa.null()) for name in names or ()])
        if compression is not None:
            records, offsets, sizes, hashes = [sum(records)], [0], [stat.size_bytes], [digest.intdigest()]
        plain_bytes = sizes if compression is None else [offset]
        chunks = ChunkColumns.of(records, offsets, sizes, hashes, plain_bytes)
        return FileIndex(stat, self.name, schema, chunks, tuple(skipped))

    def record_ends(self, text: bytes, options: TextOptions) -> npt.NDArray[np.int64]:
        """Return the ends of the records in ``text``, in bytes."""
        raise NotImplementedError

    def read(self, files: Files, chunk: Chunk, request: ReadRequest) -> Records:
        with self._loaded(files, chunk, request.text) as (names, _, text):
            table = self.parse(text, names, replace(request, records=chunk.records))
            if len(table) != chunk.records:
                raise ValueError(f"there are {len(table)} records, not {chunk.records}")
            table = with_missing(table, request)
            require_columns(table.schema, request, chunk.url)
            return select(table, request)

    def copied(
        self, files: Files, chunk: Chunk, records: range, options: TextOptions
    ) -> tuple[tuple[str, ...] | None, bytes, bytes]:
        """Return the column names and the header of a file, and some of the chunk's records as they are written.

        Raises:
            DataError: the records are not on lines of their own, or the file cannot be read.
        """
        with self._loaded(files, chunk, options) as (names, header, text):
            ends = np.append(0, self.record_ends(bytes(text), options))
            if len(ends) != chunk.records + 1:
                raise DataError(f"{chunk} has several records on a line, which cannot be copied: convert the dataset")
            found = bytes(text)[ends[records.start] : ends[records.stop]]
            is_ended = not found or found.endswith(self.line_ends)
            return names, header, found if is_ended else found + self.line_ends[0]

    @contextmanager
    def _loaded(
        self, files: Files, chunk: Chunk, options: TextOptions
    ) -> Iterator[tuple[tuple[str, ...] | None, bytes, Any]]:
        place = f"bytes {chunk.offset} to {chunk.offset + chunk.size_bytes}"
        with opened(files, chunk.url) as source, parsing(source, place):
            compression = self.compression(source, chunk.url)
            with _plain(source, compression) as plain:
                names, head, ahead = self.head(plain, chunk.url, options)
                if compression is not None:
                    text: Any = b"".join((ahead, *iter(lambda: plain.read(1 << 24), b"")))
                elif len(head) + len(ahead) >= chunk.offset + chunk.size_bytes:
                    text = ahead[chunk.offset - len(head) :][: chunk.size_bytes]
                else:
                    source.seek(chunk.offset)
                    text = source.buffer(chunk.size_bytes)
            chunk.require_hash(_digest(names, options, text).intdigest())
            self._require_utf8(text)
            yield names, head, text

    def _require_utf8(self, text: Any) -> None:
        if self.is_utf8:
            require_utf8(text)

    def require_declared(
        self, text: bytes, names: tuple[str, ...] | None, count: int, options: IndexOptions, place: tuple[str, int]
    ) -> None:
        """Raise DataError if a value does not fit its declared type. ``place``: the file, and the records before."""
        declared = {name: kind for name, kind in options.declared.items() if names is None or name in names}
        if not declared or not count:
            return
        request = ReadRequest(pa.schema(list(declared.items())), tuple(declared), records=count, text=options.text)
        try:
            self._require_held(text, names, request)
        except pa.ArrowInvalid as error:
            ends = self.record_ends(text, options.text)
            if len(ends) < 2:
                raise DataError(
                    f"{place[0]}, record {place[1] + 1}: a value does not fit the type given by types=: {reason(error)}"
                ) from None
            end = int(ends[len(ends) // 2 - 1])
            half, _ = self.guess(text[:end], names, options)
            self.require_declared(text[:end], names, half, options, place)
            self.require_declared(text[end:], names, count - half, options, (place[0], place[1] + half))

    def _require_held(self, text: bytes, names: tuple[str, ...] | None, request: ReadRequest) -> None:
        """Raise ArrowInvalid if a value does not fit, or if Arrow makes a number infinite that is too large."""
        import pyarrow.compute as pc

        table = self.parse(text, names, request)
        for field in request.schema:
            if not pa.types.is_floating(field.type) or not pc.any(infinite := pc.is_inf(table[field.name])).as_py():
                continue
            as_text = replace(request, schema=pa.schema([(field.name, pa.string())]), columns=(field.name,))
            for written in self.parse(text, names, as_text)[field.name].filter(infinite).to_pylist():
                if re.search(r"\d", written):
                    raise pa.ArrowInvalid(f"{written:.40} is too large for {field.type}")


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


def _digest(names: Sequence[str] | None, options: TextOptions, text: Any = b"") -> xxhash.xxh3_64:
    """Return the hash of a text, the names of its columns, and how it is parsed."""
    more = repr((options.delimiter, options.null_values)) if options != TextOptions(options.names) else ""
    digest = xxhash.xxh3_64(f"{names!r}{more}".encode())
    digest.update(text)
    return digest


def require_utf8(text: Any) -> None:
    """Raise ValueError if the text is not UTF-8. pyarrow would accept some invalid texts unchanged."""
    if np.frombuffer(text, np.uint8).max(initial=0) < _ASCII_END:
        return
    try:
        str(text, "utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} of it is not UTF-8: convert it") from None


def with_missing(table: pa.Table, request: ReadRequest) -> pa.Table:
    """Return the table with null columns added for the dataset's columns that it lacks."""
    needed, found = request.needed(), set(table.schema.names)
    for field in request.schema:
        if field.name not in found and (needed is None or field.name in needed):
            table = table.append_column(field, pa.nulls(len(table), field.type))
    return table
