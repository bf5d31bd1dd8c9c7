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
* A file whose version differs from the indexed version is rejected, even if it changes while it is being read.
* ``decode`` converts the bytes of a RecordIO record to a mapping from column names to values. The requested columns and
  the conditions then refer to the decoded columns, whose types pyarrow infers for each batch.

In stored order, only the chunks of the requested batches are read, and one chunk is in memory at a time. In shuffled
order, all chunks of the task are in memory.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from flightedl.domain.queue.batching import batch_count, batch_range, record_order
from flightedl.errors import DataError, FlightedlError, UsageError
from flightedl.formats.chunks import ChangedFileError, Chunk, CorruptChunkError, merged
from flightedl.formats.dataset_spec import DatasetSpec
from flightedl.formats.recordio import RecordIO
from flightedl.formats.records import ReadRequest, Records, require_columns, select
from flightedl.formats.registry import named_format
from flightedl.formats.sources import reason
from flightedl.ports import Files

#: Converts the bytes of a record to columns.
Decode = Callable[[bytes], Mapping[str, Any]]


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
    schema: pa.Schema | None = None,
    decode: Decode | None = None,
    counts: ReadCounts | None = None,
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
        schema: Schema of the dataset (``ChunkIndex.schema``), which text formats need for their types.
        decode: Decodes the bytes of RecordIO into columns.
        counts: Counters of skipped chunks.

    Raises:
        CorruptChunkError: a chunk is corrupt, and ``on_corrupt`` is "fail".
        ChangedFileError: a file has changed since it was indexed.
        DataError: a file cannot be read or lacks a column, or ``decode`` failed.
    """
    if decode is not None and any(chunk.format != RecordIO.name for chunk in chunks):
        raise UsageError("decode= applies to RecordIO only: the other formats have columns of their own")
    reader = ChunkReader(files, chunks, spec, schema, decode, counts)
    order = None if seed is None else record_order(reader.record_count, seed, epoch, task)
    steps = spec.steps_per_batch
    count = steps * batch_count(reader.record_count, spec.batch_size)
    end = count if end_batch is None else end_batch
    if not 0 <= first_batch <= end <= count:
        raise UsageError(f"there are no batches {first_batch} to {end} in task {task}: it has {count}")
    for number in range(first_batch // steps, -(-end // steps)):
        positions = batch_range(reader.record_count, spec.batch_size, number)
        records = reader.range(positions) if order is None else reader.take(order[positions.start : positions.stop])
        for _ in range(max(first_batch, number * steps), min(end, (number + 1) * steps)):
            yield records


class ChunkReader:
    """Reader of consecutive chunks, whose records are numbered from 0. Not thread-safe."""

    def __init__(
        self,
        files: Files,
        chunks: Sequence[Chunk],
        spec: DatasetSpec,
        schema: pa.Schema | None = None,
        decode: Decode | None = None,
        counts: ReadCounts | None = None,
    ) -> None:
        self._files = files
        self._chunks = merged(chunks)
        self._spec = spec
        self._request = spec.request(schema)
        self._decode = decode
        self._counts = ReadCounts() if counts is None else counts
        self._ends: list[int] = np.cumsum([chunk.records for chunk in self._chunks], dtype=np.int64).tolist()
        #: The latest chunk.
        self._current: tuple[int, Records] | None = None
        #: Records of ``_current`` as one batch, which is cheap to slice; None if they are not contiguous and complete.
        self._batch: pa.RecordBatch | None = None
        #: All chunks as one table, and the row of each record in it, or -1.
        self._table: tuple[pa.Table, npt.NDArray[np.int64]] | None = None
        self._empty: pa.Table | None = None

    @property
    def record_count(self) -> int:
        return self._ends[-1] if self._ends else 0

    def range(self, numbers: range) -> pa.RecordBatch:
        parts = []
        first = bisect_right(self._ends, numbers.start)
        for chunk in range(first, len(self._chunks)):
            start = self._ends[chunk] - self._chunks[chunk].records
            if start >= numbers.stop:
                break
            records = self._records(chunk)
            if self._batch is not None and start <= numbers.start and numbers.stop <= self._ends[chunk]:
                return self._batch.slice(numbers.start - start, len(numbers))
            parts.append(_slice(records, max(numbers.start - start, 0), numbers.stop - start))
        return self._finished(_joined(parts))

    def take(self, numbers: npt.NDArray[np.int64]) -> pa.RecordBatch:
        """Return the given records that meet the conditions, in the given order. Loads all chunks."""
        if self._table is None:
            self._table = self._read_file()
        table, rows = self._table
        wanted = rows[numbers]
        return self._finished(table.take(pa.array(wanted[wanted >= 0])))

    def _read_file(self) -> tuple[pa.Table, npt.NDArray[np.int64]]:
        rows = np.full(self.record_count, -1, np.int64)
        parts = []
        row = 0
        for chunk in range(len(self._chunks)):
            records = self._read(chunk)
            start = self._ends[chunk] - self._chunks[chunk].records
            numbers = np.arange(len(records.table)) if records.numbers is None else records.numbers
            rows[start + numbers] = np.arange(row, row + len(numbers))
            row += len(numbers)
            parts.append(records.table)
        return _joined(parts), rows

    def _records(self, chunk: int) -> Records:
        if self._current is None or self._current[0] != chunk:
            self._current = self._batch = None
            records = self._read(chunk)
            self._current = (chunk, records)
            if records.numbers is None and self._decode is None:
                # Parsers return tables in pieces. Joining all pieces once is cheaper than joining them for each batch.
                batches = records.table.combine_chunks().to_batches()
                self._batch = batches[0] if len(batches) == 1 else None
        return self._current[1]

    def _read(self, number: int) -> Records:
        chunk = self._chunks[number]
        request = ReadRequest(schema=None) if self._decode is not None else self._request
        try:
            records = _read_unchanged(self._files, chunk, request)
        except CorruptChunkError as error:
            if self._spec.on_corrupt != "skip":
                raise error.refused() from error
            self._counts.corrupt_chunks += 1
            self._counts.corrupt_records += chunk.records
            self._counts.sentences.append(str(error))
            return Records(self._none(chunk, request), np.zeros(0, np.int64))
        self._empty = records.table.slice(0, 0)
        return records

    def _none(self, chunk: Chunk, request: ReadRequest) -> pa.Table:
        schema = request.schema
        if self._empty is not None:
            return self._empty
        if schema is None:
            others = {other.url: other for other in self._chunks}
            for url, other in others.items():
                try:
                    if (stat := self._files.stat(url)) is not None:
                        schema = named_format(other.format).schema(self._files, stat)
                        break
                except CorruptChunkError:
                    continue
        if schema is None:
            raise DataError(f"all chunks of this task are corrupt, and the columns of {chunk.url} are unknown")
        return pa.schema([schema.field(name) for name in request.shown(schema)]).empty_table()

    def _finished(self, table: pa.Table) -> pa.RecordBatch:
        if self._decode is None:
            return as_batch(table)
        return _decoded(table, self._decode, self._request)


def as_batch(table: pa.Table) -> pa.RecordBatch:
    """Return the table as a single batch. If it consists of several pieces, it is copied."""
    batches = table.combine_chunks().to_batches()
    if len(batches) == 1:
        return batches[0]
    if not batches:
        return pa.RecordBatch.from_arrays([pa.array([], field.type) for field in table.schema], schema=table.schema)
    raise DataError(f"a batch of {len(table)} records has over 2 GiB of text in one column: use a smaller batch_size")


def joined(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    """Return all records of these batches, in order. Requires at least one batch."""
    return batches[0] if len(batches) == 1 else as_batch(_joined([pa.Table.from_batches([each]) for each in batches]))


def _read_unchanged(files: Files, chunk: Chunk, request: ReadRequest) -> Records:
    """Read a chunk. Afterwards, check that its file still has the indexed version."""
    try:
        records = named_format(chunk.format).read(files, chunk, request)
    except FlightedlError:
        _require_unchanged(files, chunk)
        raise
    _require_unchanged(files, chunk)
    return records


def _require_unchanged(files: Files, chunk: Chunk) -> None:
    found = files.stat(chunk.url)
    if found is None:
        raise DataError(f"there is no file {chunk.url}: check the path")
    if found.version != chunk.version:
        raise ChangedFileError(
            f"{chunk.url} has changed since it was indexed (version {chunk.version}, now {found.version}): "
            "training data must not change during a job; restart the job to use the new content"
        )


def _slice(records: Records, start: int, stop: int) -> pa.Table:
    if records.numbers is not None:
        start, stop = (int(place) for place in np.searchsorted(records.numbers, (start, stop)))
    return records.table.slice(start, max(stop - start, 0))


def _joined(parts: Sequence[pa.Table]) -> pa.Table:
    if len(parts) == 1:
        return parts[0]
    joined = pa.concat_tables(parts, promote_options="permissive")
    return joined.unify_dictionaries() if any(pa.types.is_dictionary(part.type) for part in joined.schema) else joined


def _decoded(table: pa.Table, decode: Decode, request: ReadRequest) -> pa.RecordBatch:
    rows = []
    for record in table.column(0).to_pylist():
        try:
            row = decode(record)
            rows.append(dict(row))
        except Exception as error:
            raise DataError(f"decode= failed at a record of {len(record)} bytes: {reason(error)}") from error
    try:
        decoded = pa.Table.from_pylist(rows)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise DataError(f"decode= returned values that do not form columns: {reason(error)}") from error
    if not rows:
        return as_batch(decoded)
    request = ReadRequest(request.columns, request.conditions)
    require_columns(decoded.schema, request, "what decode= gives")
    return as_batch(select(decoded, request).table)


def first_records(
    files: Files, chunks: Sequence[Chunk], spec: DatasetSpec, count: int, **options: Any
) -> pa.RecordBatch:
    """Return at most ``count`` records from the first chunks, for display. For ``options`` see ``ChunkReader``."""
    reader = ChunkReader(files, chunks, spec, **options)
    return reader.range(range(min(count, reader.record_count)))
