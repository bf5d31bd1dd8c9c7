"""Read the batches of a task.

Rules:

* A task's records are the records of its chunks, numbered from 0. Batch b consists of the ``batch_size`` records from
  position b x batch_size on. Their order is the stored order or, with a seed, ``record_order(records, seed, epoch,
  task)``. So a batch never spans tasks, and contains the same records regardless of the process that reads it.
* **Columns and conditions do not affect how records are divided into batches.** A batch is a range of *unfiltered*
  positions, to which the conditions are then applied. So a batch may have fewer than ``batch_size`` records, or none,
  but the reader always yields exactly ``end_batch - first_batch`` batches.
* Skipped corrupt chunks do not affect the division into batches either: their records are missing from the batches, and
  are counted.
* A file that has changed since it was indexed is rejected, even if it changes while it is being read. If only its time
  or ETag differs, its content decides. Text and RecordIO have a hash of each chunk, which every read compares. In other
  formats, the mark of the file is compared once. Equal footers and headers do not prove that values are equal, so the
  file is rejected, too, unless ``data_moved`` says that it is a copy.
* ``decode`` converts the bytes of a RecordIO record or a line to a mapping from column names to values. The requested
  columns and the conditions then refer to the decoded columns, whose types pyarrow infers for each batch.
  ``json.loads`` and those of ``decode`` are formats instead, with one type for all batches.

In stored order, only the chunks of the requested batches are read, and one chunk is in memory at a time. Of a large row
group, only the latest records are in memory, and a task that begins where the previous one has ended goes on from
there. If a condition is set or damage is skipped, a row group is read as a whole.

In shuffled order, all chunks of the task are in memory. A chunk of which tasks contain only parts is decoded as a
whole, and kept for the next task (``DecodedChunks``).
"""

from __future__ import annotations

import contextlib
import sys
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from flightedl.domain.queue.batching import batch_count, batch_range, record_order
from flightedl.domain.retries import machine_error
from flightedl.errors import DataError, StoreError, UsageError, UserCodeError
from flightedl.formats.chunks import ChangedFileError, Chunk, CorruptChunkError, IndexOptions, merged
from flightedl.formats.dataset_spec import DatasetSpec
from flightedl.formats.indices import Indices
from flightedl.formats.lines import Svmlight
from flightedl.formats.parquet import Parquet
from flightedl.formats.recordio import SCHEMA as RECORD_SCHEMA
from flightedl.formats.recordio import UNDECODED, RecordIO
from flightedl.formats.records import LARGE_BYTES, ReadRequest, Records, empty, require_columns, select
from flightedl.formats.registry import named_format
from flightedl.formats.schemas import large_type
from flightedl.formats.sources import reason
from flightedl.formats.text import TextFormat
from flightedl.formats.topics import Topic
from flightedl.ports import Files, FileStat

#: Converts the bytes of a record to columns.
Decode = Callable[[bytes], Mapping[str, Any]]

T = TypeVar("T")

#: Formats whose chunks' parts are read by themselves.
_CUT = (Indices.name, Topic.name)

#: About the size of the shuffled records that are taken from the table of a task at a time.
_BLOCK_BYTES = 4 << 20

#: (URL, mark, version) of each copy whose mark this process has compared.
_COPIES: set[tuple[str, str, str]] = set()


@dataclass(slots=True)
class ReadCounts:
    """Number of records and chunks that a reader has skipped."""

    corrupt_chunks: int = 0
    corrupt_records: int = 0
    #: For each corrupt chunk, a sentence that describes the damage.
    sentences: list[str] = field(default_factory=list)


def read_task(
    files: Files,
    chunks: Sequence[Chunk],
    spec: DatasetSpec,
    seed: int | None,
    epoch: int,
    task: int,
    first_batch: int = 0,
    end_batch: int | None = None,
    *,
    schema: pa.Schema,
    decode: Decode | None = None,
    counts: ReadCounts | None = None,
    decoded: DecodedChunks | None = None,
) -> Iterator[pa.RecordBatch]:
    """Yield the batches ``first_batch`` (inclusive) to ``end_batch`` (exclusive) of a task, in order.

    Args:
        files: Access to the files.
        chunks: All chunks of the task, in order.
        spec: Batch size, columns, filter and policy for corrupt records; the other fields are ignored.
        seed: Seed for shuffling the records within the task; None for the stored order.
        epoch: Number of the epoch, which also determines the order.
        task: Number of the task, which also determines the order.
        first_batch: Number of the first batch to read.
        end_batch: Number of the batch after the last one; None to read all.
        schema: Schema of the dataset (``ChunkIndex.schema``).
        decode: Decodes the bytes of RecordIO or lines into columns.
        counts: Counters of skipped chunks.
        decoded: Chunks that previous tasks have decoded, of the same ``spec``, ``schema`` and ``decode``.

    Raises:
        CorruptChunkError: a chunk is corrupt, and ``on_corrupt`` is "fail".
        ChangedFileError: a file has changed since it was indexed.
        DataError: a file cannot be read or lacks a column, or ``decode`` failed.
    """
    if decode is not None and any(chunk.format not in UNDECODED for chunk in chunks):
        raise UsageError(
            'decode= applies to RecordIO and format="lines" only: the other formats have columns of their own'
        )
    reader = ChunkReader(files, chunks, spec, schema, decode, counts, decoded)
    order = None if seed is None else record_order(reader.record_count, seed, epoch, task)
    steps = spec.steps_per_batch
    count = steps * batch_count(reader.record_count, spec.batch_size)
    end = count if end_batch is None else end_batch
    if not 0 <= first_batch <= end <= count:
        raise UsageError(f"there are no batches {first_batch} to {end} in task {task}: it has {count}")
    for number in range(first_batch // steps, -(-end // steps)):
        positions = batch_range(reader.record_count, spec.batch_size, number)
        try:
            records = reader.range(positions) if order is None else reader.take(order, positions)
        except MemoryError as error:
            raise machine_error(error, f"batch {number} of task {task} cannot be read") or error from error
        for _ in range(max(first_batch, number * steps), min(end, (number + 1) * steps)):
            yield records


class DecodedChunks:
    """Decoded chunks of which only parts have been used. Not thread-safe.

    The least recently used ones are dropped when all of them exceed ``limit_bytes``, but the latest one is kept.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._kept: dict[Chunk, Records] = {}
        self._bytes = 0
        #: Schema of the latest batch that ``decode`` has made of records.
        self.schema: pa.Schema | None = None
        #: The latest chunk that was read in order, the thread that reads it, and its records.
        self._stream: tuple[Chunk, int, _Stream] | None = None

    def get(self, chunk: Chunk, read: Callable[[Chunk], Records]) -> Records:
        """Return the records of a chunk, which ``read`` decodes unless they are kept."""
        found = self._kept.pop(chunk, None)
        if found is None:
            found = read(chunk)
            self._bytes += found.table.nbytes
        self._kept[chunk] = found
        while len(self._kept) > 1 and self._bytes > self._limit_bytes:
            self._bytes -= self._kept.pop(next(iter(self._kept))).table.nbytes
        return found

    def in_order(self, chunk: Chunk, start: int, read: Callable[[Chunk], Iterator[pa.RecordBatch]]) -> _Stream:
        """Return the records of a chunk from number ``start`` on, where the latest range has ended if possible."""
        key = chunk, threading.get_ident()
        if self._stream is None or self._stream[:2] != key or self._stream[2].start > start:
            self._stream = None
            self._stream = *key, _Stream(read(chunk))
        return self._stream[2]


class _Stream:
    """Records of a chunk that are read in order. Earlier ones are dropped."""

    def __init__(self, batches: Iterator[pa.RecordBatch]) -> None:
        self._batches = batches
        self._batch: pa.RecordBatch | None = None
        #: Number of the first record of the current batch.
        self.start = 0

    def range(self, start: int, stop: int) -> Iterator[pa.RecordBatch]:
        while start < stop:
            if self._batch is None or start >= self.start + self._batch.num_rows:
                after = self.start + (0 if self._batch is None else self._batch.num_rows)
                # If reading fails, nobody goes on with this stream.
                self._batch, self.start = None, sys.maxsize
                self._batch, self.start = next(self._batches), after
                continue
            part = self._batch.slice(start - self.start, stop - start)
            start += part.num_rows
            yield part


class ChunkReader:
    """Reader of consecutive chunks, whose records are numbered from 0. Not thread-safe."""

    def __init__(
        self,
        files: Files,
        chunks: Sequence[Chunk],
        spec: DatasetSpec,
        schema: pa.Schema,
        decode: Decode | None = None,
        counts: ReadCounts | None = None,
        decoded: DecodedChunks | None = None,
    ) -> None:
        self._files = files
        self._chunks = merged(chunks)
        self._spec = spec
        self._request = spec.request(schema)
        #: Schema of the batches; None if only ``decode`` knows it.
        self._schema = self._request.shown if decode is None else None
        self._decode = decode
        self._counts = ReadCounts() if counts is None else counts
        self._decoded = DecodedChunks(0) if decoded is None else decoded
        is_parquet = all(chunk.format == Parquet.name for chunk in self._chunks)
        #: True if ``stream`` is possible: records need no condition, and damage ends the reading.
        self.is_streamed = is_parquet and not self._request.conditions and spec.on_corrupt != "skip"
        self._ends: list[int] = np.cumsum([chunk.records for chunk in self._chunks], dtype=np.int64).tolist()
        #: The latest chunk.
        self._current: tuple[int, Records] | None = None
        #: Records of ``_current`` as one batch, which is cheap to slice; None if they are not contiguous and complete.
        self._batch: pa.RecordBatch | None = None
        #: All chunks as one table, and the row of each record in it, or -1.
        self._table: tuple[pa.Table, npt.NDArray[np.int64]] | None = None
        #: Positions of a shuffled task whose records have been taken; these records, and their number before each one.
        self._block: Any = range(0)
        self._taken: tuple[pa.Table, list[int]] = pa.table({}), []

    @property
    def record_count(self) -> int:
        return self._ends[-1] if self._ends else 0

    def stream(self, numbers: range) -> Iterator[pa.RecordBatch]:
        """Yield the given records. Little more than the latest ones is in memory."""
        first = bisect_right(self._ends, numbers.start)
        for chunk, end in zip(self._chunks[first:], self._ends[first:], strict=True):
            start = end - chunk.records
            if start >= numbers.stop:
                break
            skipped = chunk.skipped - start
            begin, stop = max(numbers.start, start) + skipped, min(numbers.stop, end) + skipped
            yield from self._decoded.in_order(chunk.container, begin, self._streamed).range(begin, stop)

    def _streamed(self, chunk: Chunk) -> Iterator[pa.RecordBatch]:
        batches = Parquet().stream(self._files, chunk, self._request)
        try:
            while (batch := _checked(self._files, chunk, lambda: next(batches, None))) is not None:
                yield batch
        except CorruptChunkError as error:
            raise error.refused() from error

    def take(self, order: npt.NDArray[np.int64], positions: range) -> pa.RecordBatch:
        """Return the records at these positions of an order that meet the conditions. Loads all chunks."""
        if self._table is None:
            self._table = self.load()
        if positions.start not in self._block:
            # Take the next batches, too, because taking a few records has a high fixed cost.
            table, rows = self._table
            count = max(_BLOCK_BYTES * len(rows) // max(table.nbytes * len(positions), 1), 1)
            self._block = range(positions.start, min(positions.start + count * len(positions), len(order)))
            wanted = rows[order[self._block.start : self._block.stop]]
            self._taken = taken(table, wanted[wanted >= 0]), np.append(0, np.cumsum(wanted >= 0)).tolist()
        table, bounds = self._taken
        first = positions.start - self._block.start
        return self.finished(table.slice(bounds[first], bounds[first + len(positions)] - bounds[first]))

    def range(self, numbers: range) -> pa.RecordBatch:
        if self.is_streamed:
            batches = list(self.stream(numbers))
            if len(batches) == 1 and batches[0].schema == self._schema:
                return batches[0]
            tables = [pa.Table.from_batches([batch]) for batch in batches]
            return self.finished(joined_tables(tables or [self._request.shown.empty_table()]))
        parts = []
        first = bisect_right(self._ends, numbers.start)
        for chunk in range(first, len(self._chunks)):
            start = self._ends[chunk] - self._chunks[chunk].records
            if start >= numbers.stop:
                break
            if self._chunks[chunk].format == Topic.name:
                # Only the batch's own messages, so that deleted messages cost no other batch.
                first, stop = max(numbers.start, start), min(numbers.stop, self._ends[chunk])
                part = self._chunks[chunk].part(first - start, stop - first)
                parts.append(self._read(part).table)
                if self._decode is not None and self._decoded.schema is None and not len(parts[-1]):
                    with contextlib.suppress(DataError):  # Earlier messages show the columns.
                        self.finished(Topic().read(self._files, Topic.before(part), ReadRequest(RECORD_SCHEMA)).table)
                continue
            records = self._records(chunk)
            if self._batch is not None and start <= numbers.start and numbers.stop <= self._ends[chunk]:
                return self._batch.slice(numbers.start - start, len(numbers))
            skipped = max(numbers.start - start, 0)
            parts.append(_part(records, skipped, numbers.stop - start - skipped).table)
        return self.finished(joined_tables(parts))

    def load(self) -> tuple[pa.Table, npt.NDArray[np.int64]]:
        """Return the records of all chunks that meet the conditions, and the row of each record, or -1."""
        rows = np.full(self.record_count, -1, np.int64)
        parts = []
        row = 0
        for chunk in range(len(self._chunks)):
            records = self._read(self._chunks[chunk])
            start = self._ends[chunk] - self._chunks[chunk].records
            numbers = np.arange(len(records.table)) if records.numbers is None else records.numbers
            rows[start + numbers] = np.arange(row, row + len(numbers))
            row += len(numbers)
            parts.append(records.table)
        return joined_tables(parts).combine_chunks(), rows

    def _records(self, chunk: int) -> Records:
        if self._current is None or self._current[0] != chunk:
            self._current = self._batch = None
            records = self._read(self._chunks[chunk])
            self._current = (chunk, records)
            if records.numbers is None and self._decode is None:
                # Parsers return tables in pieces. Joining all pieces once is cheaper than joining them for each batch.
                batches = records.table.combine_chunks().to_batches()
                is_large = self._schema is not None and batches and batches[0].schema != self._schema
                self._batch = batches[0] if len(batches) == 1 and not is_large else None
        return self._current[1]

    def _read(self, chunk: Chunk) -> Records:
        request = self._request if self._decode is None else ReadRequest(RECORD_SCHEMA)
        read = partial(_read_unchanged, self._files, request=request)
        try:
            container = chunk.container
            if container.records == chunk.records or chunk.format in _CUT:
                return read(chunk)
            try:
                return _part(self._decoded.get(container, read), chunk.skipped, chunk.records)
            except CorruptChunkError:
                if chunk.format != Parquet.name:
                    raise
                # The corrupt page may follow this part.
                return read(chunk)
        except CorruptChunkError as error:
            if self._spec.on_corrupt != "skip":
                raise error.refused() from error
            self._counts.corrupt_chunks += 1
            self._counts.corrupt_records += chunk.records
            self._counts.sentences.append(str(error))
            return empty(request)

    def finished(self, table: pa.Table) -> pa.RecordBatch:
        """Return loaded records as a batch, decoded if they are to be. Without records, it has the latest columns."""
        if self._decode is None:
            return as_batch(table, self._schema)
        if not len(table) and self._decoded.schema is not None:
            return as_batch(self._decoded.schema.empty_table())
        batch = _decoded(table, self._decode, self._request, self._spec.index_options())
        self._decoded.schema = batch.schema if len(table) else None
        return batch


def as_batch(table: pa.Table, schema: pa.Schema | None = None) -> pa.RecordBatch:
    """Return the table as a single batch with this schema. If it consists of several pieces, it is copied."""
    try:
        if schema is not None and table.schema != schema:
            # Without offsets of the chunk's other records.
            table = table.take(pa.array(np.arange(len(table)))).cast(schema)
        batches = table.combine_chunks().to_batches()
    except pa.ArrowInvalid:
        batches = [None, None]
    if len(batches) == 1:
        return batches[0]
    if not batches:
        return pa.RecordBatch.from_arrays([pa.nulls(0, field.type) for field in table.schema], schema=table.schema)
    raise DataError(f"a batch of {len(table)} records has over 2 GiB of text in one column: use a smaller batch_size")


def _read_unchanged(files: Files, chunk: Chunk, request: ReadRequest) -> Records:
    """Read a chunk. Afterwards, check that its file still has the indexed version."""
    return _checked(files, chunk, lambda: named_format(chunk.format).read(files, chunk, request))


def _checked(files: Files, chunk: Chunk, read: Callable[[], T]) -> T:
    try:
        records = read()
    except DataError as error:
        _require_unchanged(files, chunk, is_read=not isinstance(error, CorruptChunkError))
        raise
    _require_unchanged(files, chunk, is_read=True)
    return records


def _require_unchanged(files: Files, chunk: Chunk, *, is_read: bool) -> None:
    found = files.stat(chunk.url)
    if found is None:
        raise StoreError(f"there is no file {chunk.url}: check the path")
    if found.version == chunk.file_version:
        return
    is_same = chunk.mark.partition("-")[0] == str(found.size_bytes)
    has_hash = isinstance(named_format(chunk.format), TextFormat | RecordIO)
    if has_hash and is_same and is_read:
        return
    known = (chunk.url, chunk.mark, found.version)
    advice = "training data must not change during a job; restart the job to use the new content"
    if not has_hash and is_same and (known in _COPIES or _mark(files, found, chunk) == chunk.mark):
        if found.is_copy:
            _COPIES.add(known)
            return
        advice = (
            "only its time or ETag differs, but its values may, too. If it is a copy of the indexed file, say so with "
            "--data-moved OLD=NEW or data_moved= (OLD and NEW may be the same folder); otherwise restart the job"
        )
    raise ChangedFileError(
        f"{chunk.url} has changed since it was indexed (version {chunk.file_version}, now {found.version}): {advice}"
    )


def _mark(files: Files, stat: FileStat, chunk: Chunk) -> str:
    try:
        found = named_format(chunk.format).index(files, stat, IndexOptions(skip_corrupt=True))
    except CorruptChunkError:
        return ""
    return f"{stat.size_bytes}-{found.mark}"


def _part(records: Records, start: int, count: int) -> Records:
    """Return ``count`` records of a chunk, from number ``start`` on, that meet the conditions."""
    numbers, first, stop = records.numbers, start, start + count
    if numbers is not None:
        first, stop = (int(place) for place in np.searchsorted(numbers, (start, stop)))
        numbers = numbers[first:stop] - start
    return Records(records.table.slice(first, max(stop - first, 0)), numbers)


def are_consecutive(rows: npt.NDArray[np.int64]) -> bool:
    """True if each row follows the one before it."""
    return len(rows) > 0 and bool((np.diff(rows) == 1).all())


def taken(table: pa.Table, rows: npt.NDArray[np.int64]) -> pa.Table:
    """Return these rows of a table. If they are consecutive, they share its memory, unless it consists of pieces."""
    if are_consecutive(rows):
        return table.slice(int(rows[0]), len(rows)).combine_chunks()
    # Taking rows from a table that consists of pieces is much slower.
    return table.combine_chunks().take(pa.array(rows))


def joined_tables(parts: Sequence[pa.Table]) -> pa.Table:
    """Return all records of these tables, in order. Requires at least one table."""
    joined = parts[0] if len(parts) == 1 else pa.concat_tables(parts, promote_options="permissive")
    if any(pa.types.is_dictionary(field.type) for field in joined.schema):
        joined = joined.unify_dictionaries()
    if all(column.nbytes <= LARGE_BYTES for column in joined.columns):
        return joined
    kinds = [
        large_type(field.type) if column.nbytes > LARGE_BYTES else field.type
        for field, column in zip(joined.schema, joined.columns, strict=True)
    ]
    return joined.cast(pa.schema(list(zip(joined.schema.names, kinds, strict=True))))


def _decoded(table: pa.Table, decode: Decode, request: ReadRequest, options: IndexOptions) -> pa.RecordBatch:
    rows, types = [], options.declared
    records = table.column(0).to_pylist()
    whole = decode if isinstance(decode, Svmlight) and records and None not in records else None
    for record in records if whole is None else ():
        try:
            row = decode(record)
            rows.append(dict(row))
        except Exception as error:
            if (lacking := machine_error(error, "decode= failed")) is not None:
                raise lacking from error
            text = f"decode= failed at a record of {len(record or b'')} bytes: {reason(error)}"
            raise UserCodeError(text) from error
    try:
        names = dict.fromkeys(name for row in rows for name in row)
        decoded = pa.table({name: [row.get(name) for row in rows] for name in names})
        decoded = decoded if whole is None else whole.table_of(records, options)
        for number, field in enumerate(decoded.schema):
            if field.name in types:
                kind = types[field.name]
                decoded = decoded.set_column(number, field.with_type(kind), decoded.column(number).cast(kind))
    except (pa.ArrowException, TypeError, ValueError) as error:
        if (lacking := machine_error(error, "decoded records do not form a batch")) is not None:
            raise lacking from error
        raise UserCodeError(f"decode= returned values that do not form columns: {reason(error)}") from error
    if not records:
        return as_batch(decoded)
    request = ReadRequest(decoded.schema, request.columns, request.conditions)
    require_columns(decoded.schema, request, "what decode= gives")
    return as_batch(select(decoded, request).table)


def first_records(
    files: Files, chunks: Sequence[Chunk], spec: DatasetSpec, count: int, *, schema: pa.Schema
) -> pa.RecordBatch:
    """Return at most ``count`` records from the first chunks, for display."""
    reader = ChunkReader(files, chunks, spec, schema)
    return reader.range(range(min(count, reader.record_count)))
