"""Parquet: a chunk is a row group, or a part of a large row group.

Indexing reads only footers. Reading decodes only the requested columns. With conditions, it first checks the statistics
of the row group, and decodes nothing if they exclude every record. Otherwise it decodes the columns of the conditions,
and the other columns only if a record remains. Statistics of floating-point columns are used only for ``==`` and
ordering comparisons, because writers ignore NaN in statistics, and Arrow's ``is_in`` distinguishes 0.0 from -0.0.

To read a part of a row group (``max_records_per_chunk``), the row group must be decoded up to the end of that part. The
caller should therefore ``stream`` a row group, or ``read`` it as a whole, and keep the rest for the next part. Pages
with a checksum are verified.

Footers have no checksum. If the description of a column is damaged, requesting the column's metadata makes pyarrow
abort the process, whereas *reading* the column raises an exception. So ``Footer`` first tries to read the column
through a file object that cannot be read, to provoke that exception.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from flightedl.errors import DataError, UserCodeError
from flightedl.formats.chunks import Chunk, ChunkColumns, FileIndex, IndexOptions
from flightedl.formats.records import (
    Condition,
    ReadRequest,
    Records,
    conformed,
    empty,
    expression,
    filtering,
    require_columns,
    select,
)
from flightedl.formats.schemas import plain_schema, require_unique_columns
from flightedl.formats.sinks import written
from flightedl.formats.sources import WatchedFile, opened, parsing
from flightedl.ports import Files, FileStat

if TYPE_CHECKING:
    import pyarrow.compute as pc

#: Number of records to decode at a time when only a part of a row group is needed.
_DECODED_RECORDS = 65_536
#: About the uncompressed size of the records that are decoded at a time, and the bytes that are read of each column.
_STREAMED_BYTES, _BUFFER_BYTES = 32 << 20, 1 << 20
#: Number of bytes to read first from the end of a file. Most footers fit into them.
_TAIL_BYTES = 65_536
#: By default, INT96 becomes nanoseconds, which turn dates outside of 1677 to 2262 into other dates.
_OPTIONS: dict[str, Any] = {"coerce_int96_timestamp_unit": "us"}


class Parquet:
    """See ``formats.Format``."""

    name: ClassVar[str] = "parquet"
    suffixes: ClassVar[tuple[str, ...]] = (".parquet", ".pq", ".parq")

    def index(self, files: Files, stat: FileStat, options: IndexOptions) -> FileIndex:
        digest = xxhash.xxh3_64()
        with opened(files, stat.url, digest) as source:
            footer = Footer(source)
            schema = footer.schema
            require_unique_columns(schema.names, stat.url)
            numbers = range(footer.metadata.num_row_groups)
            records = [footer.metadata.row_group(number).num_rows for number in numbers]
            if min(records, default=0) < 0:
                raise ValueError(f"row group {records.index(min(records))} has {min(records)} records")
            leaves = footer.metadata.num_columns
            first = footer.metadata.schema.column(0).path if leaves else ""
            offsets = [footer.start(number, first) if leaves and records[number] else 0 for number in numbers]
            sizes = [end - start for start, end in pairwise([*offsets, stat.size_bytes])]
            plain = [max(footer.metadata.row_group(number).total_byte_size, 0) for number in numbers]
        chunks = ChunkColumns.of(records, offsets, [max(size, 0) for size in sizes], plain_bytes=plain)
        if options.max_records_per_chunk:
            chunks = chunks.split(options.max_records_per_chunk)
        return FileIndex(stat, self.name, schema, chunks, mark=digest.hexdigest())

    def written_schema(self, files: Files, stat: FileStat) -> pa.Schema:
        """Return the schema of the records with the metadata of their writer."""
        with opened(files, stat.url) as source:
            return Footer(source).written_schema

    def read(self, files: Files, chunk: Chunk, request: ReadRequest) -> Records:
        with opened(files, chunk.url) as source, parsing(source, _place(chunk)):
            footer = Footer(source)
            with _open(source, footer) as file:
                start = _start(file, chunk, request)
                schema, where = file.schema_arrow, expression(request.schema, request.conditions)
                bounded = [each for each in request.conditions if _is_bounded(schema.field(each[0]).type, each)]
                if bounded and footer.excludes(chunk.number, bounded):
                    return empty(request)
                if where is not None:
                    return _filtered(file, chunk, start, where, request)
                table = _part(file, chunk.number, request.needed(), start, chunk.records)
                return select(conformed(table, request, chunk), request)

    def stream(self, files: Files, chunk: Chunk, request: ReadRequest) -> Iterator[pa.RecordBatch]:
        """Yield the records of a row group, or a part of one, in order, about ``_STREAMED_BYTES`` at a time.

        ``request`` must not have conditions. Raises the same errors as ``read``, maybe after some records.
        """
        with opened(files, chunk.url) as source, parsing(source, _place(chunk)):
            footer, columns = Footer(source), request.needed()
            group = footer.metadata.row_group(chunk.number)
            rows = max(min(group.num_rows * _STREAMED_BYTES // max(group.total_byte_size, 1), _DECODED_RECORDS), 1)
            # Files elsewhere are requested as a whole, because each request has a latency.
            buffer_bytes = _BUFFER_BYTES if rows < group.num_rows and source.is_local else 0
            with _open(source, footer, buffer_bytes) as file:
                done = -_start(file, chunk, request)
                batches = file.iter_batches(rows, [chunk.number], columns, use_threads=False)
                while done < chunk.records and (batch := next(batches, None)) is not None:
                    first, done = done, done + batch.num_rows
                    if done > 0:
                        skipped = max(-first, 0)
                        count = min(batch.num_rows, chunk.records - first) - skipped
                        table = pa.Table.from_batches([batch.slice(skipped, count)]).replace_schema_metadata(None)
                        table = table if columns is None else table.select(columns)
                        table = conformed(table, request, chunk.part(max(first, 0), count))
                        yield from select(table, request).table.to_batches()
            if done < chunk.records:
                raise ValueError(f"it has {done} records, not {chunk.records}")

    def write(self, batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> Iterator[bytes]:
        def new(file: pa.PythonFile) -> pq.ParquetWriter:
            return pq.ParquetWriter(file, schema, compression="zstd", write_page_checksum=True)

        try:
            yield from written(batches, new)
        except pa.ArrowNotImplementedError as error:
            raise DataError(f"parquet cannot hold a column ({error}): leave it out, or write arrow") from None


class Footer:
    """Footer of a file, which is read only once. Raises pyarrow's exceptions if it is damaged."""

    def __init__(self, source: WatchedFile) -> None:
        source.seek(0, io.SEEK_END)
        size_bytes = source.tell()
        self._tail = _tail(source, size_bytes, _TAIL_BYTES)
        footer_bytes = int.from_bytes(self._tail[-8:-4], "little") + 8
        if len(self._tail) < footer_bytes <= size_bytes:
            self._tail = _tail(source, size_bytes, footer_bytes)
        self.metadata: pq.FileMetaData = pq.read_metadata(pa.BufferReader(self._tail))
        self._contents = _HiddenContents(size_bytes)
        self._contents_bytes = size_bytes - footer_bytes
        #: The entire file, if reading the footer has read all of it.
        self.small_file = pa.BufferReader(self._tail) if len(self._tail) == size_bytes else None

    @cached_property
    def _file(self) -> pq.ParquetFile:
        contents = pa.PythonFile(self._contents, mode="r")
        return pq.ParquetFile(contents, metadata=self.metadata, pre_buffer=False, **_OPTIONS)

    @property
    def written_schema(self) -> pa.Schema:
        """Schema of the records with the metadata of their writer."""
        return self._file.schema_arrow

    @property
    def schema(self) -> pa.Schema:
        """Schema of the records, without metadata."""
        return self.written_schema.remove_metadata()

    def start(self, number: int, column: str) -> int:
        """Return the offset of a column's first page in a row group. Raises pyarrow's error for a damaged footer."""
        self._contents.asked_at = None
        try:
            self._file.read_row_group(number, columns=[column], use_threads=False)
        except Exception:
            if self._contents.asked_at is None:
                raise
        start = self._contents.asked_at or 0
        if start >= self._contents_bytes:
            raise ValueError(f"column {column} of row group {number} starts at byte {start}, in the footer or after it")
        return start

    def excludes(self, number: int, conditions: Sequence[Condition]) -> bool:
        """True if the statistics show that no record of the row group meets all conditions."""
        columns = {column for column, _, _ in conditions}
        for column in columns:
            self.start(number, column)
        group, described = self.metadata.row_group(number), self.metadata.schema
        for leaf in range(self.metadata.num_columns):
            name, wanted = described.column(leaf).path, described.column(leaf).physical_type
            if name in columns and (found := group.column(leaf).physical_type) != wanted:
                raise ValueError(f"column {name} is {found} there and {wanted} in the schema")
        # Imported lazily: it imports pandas, if installed, which takes longer than all other imports of a trainer.
        import pyarrow.dataset as ds

        fragment = ds.ParquetFileFormat().make_fragment(pa.BufferReader(self._tail), row_groups=[number])
        schema = plain_schema(self.schema)
        try:
            with filtering(conditions):
                return not fragment.subset(filter=expression(schema, conditions), schema=schema).row_groups
        except (DataError, UserCodeError):
            return False  # The dataset's type represents the value, and the file's does not.


class _HiddenContents(io.RawIOBase):
    """File that has a size but cannot be read. Records the position of the most recent attempt to read it."""

    def __init__(self, size_bytes: int) -> None:
        super().__init__()
        self._size_bytes = size_bytes
        self._position = 0
        self.asked_at: int | None = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0, /) -> int:
        self._position = offset + (0, self._position, self._size_bytes)[whence]
        return self._position

    def tell(self) -> int:
        return self._position

    def read(self, size: int | None = -1, /) -> bytes:  # noqa: ARG002 - as files do
        self.asked_at = self._position
        return b""  # pyarrow raises an error, which takes less time than an exception here.


def _tail(source: WatchedFile, size_bytes: int, count: int) -> bytes:
    source.seek(max(size_bytes - count, 0))
    return source.exactly(min(size_bytes, count))


def _place(chunk: Chunk) -> str:
    return f"row group {chunk.number} at byte {chunk.offset}"


def _start(file: pq.ParquetFile, chunk: Chunk, request: ReadRequest) -> int:
    """Check that the file has the chunk and the columns. Return the number of records before it in its row group."""
    require_columns(file.schema_arrow, request, chunk.url)
    start: int = chunk.first_record - sum(file.metadata.row_group(number).num_rows for number in range(chunk.number))
    if start + chunk.records > file.metadata.row_group(chunk.number).num_rows:
        raise ValueError(f"it does not have {chunk.records} records, the number in the index")
    return start


def _open(source: WatchedFile, footer: Footer, buffer_bytes: int = 0) -> pq.ParquetFile:
    """Open the file. With ``buffer_bytes``, columns are read so many bytes at a time, and not as a whole."""
    return pq.ParquetFile(
        footer.small_file or pa.PythonFile(source, mode="r"),
        metadata=footer.metadata,
        pre_buffer=not buffer_bytes and footer.small_file is None,
        buffer_size=buffer_bytes,
        page_checksum_verification=True,
        **_OPTIONS,
    )


def _is_bounded(kind: pa.DataType, condition: Condition) -> bool:
    """True if the minimum and maximum of a row group exclude all of its records."""
    _, operator, value = condition
    return value is None or not pa.types.is_floating(kind) or operator not in ("!=", "in", "not in")


def _filtered(file: pq.ParquetFile, chunk: Chunk, start: int, where: pc.Expression, request: ReadRequest) -> Records:
    tested = request.tested
    shown = request.shown.names
    table = conformed(_part(file, chunk.number, tested, start, chunk.records), request, chunk)
    number = pa.array(np.arange(len(table), dtype=np.int64))
    with filtering(request.conditions):
        kept = table.append_column("", number).filter(where).column("")
    if not len(kept):
        return empty(request)
    others = [name for name in shown if name not in tested]
    if others:
        rest = conformed(_part(file, chunk.number, others, start, chunk.records), request, chunk)
        for name in others:
            table = table.append_column(rest.schema.field(name), rest.column(name))
    return Records(table.select(shown).take(kept), kept.to_numpy())


def _part(file: pq.ParquetFile, number: int, columns: list[str] | None, start: int, count: int) -> pa.Table:
    """Return ``count`` records of a row group, starting at ``start``. Later records are not decoded.

    Everything is decoded by this thread. Threads of Arrow would release memory of Python after the result is complete,
    and abort the process if Python exits at that moment.
    """
    end = start + count
    if end == file.metadata.row_group(number).num_rows:
        table = file.read_row_group(number, columns=columns, use_threads=False).slice(start)
        # With "a.b", pyarrow returns the field b of a struct a, too.
        return table if columns is None else table.select(columns)
    batches: list[pa.RecordBatch] = []
    decoded = 0
    for batch in file.iter_batches(min(end, _DECODED_RECORDS), [number], columns, use_threads=False):
        batches.append(batch)
        decoded += batch.num_rows
        if decoded >= end:
            break
    table = pa.Table.from_batches(batches).replace_schema_metadata(None).slice(start, count)
    return table if columns is None else table.select(columns)
