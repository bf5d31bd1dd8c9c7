"""Read a rank's rounds. The rank reads a few lanes side by side, and decodes each of their chunks once.

Of each lane, the reader holds one window, whose records are in the order of the rounds, and the chunk that contains the
records after it (see ``domain.groups.lanes``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from flightedl.client.data.reading import report_skipped
from flightedl.domain.groups.incarnation import excluded
from flightedl.domain.groups.lanes import EpochOrder, GroupData, SourceOrder, SourcePiece
from flightedl.domain.groups.plan import Piece, Round
from flightedl.formats.chunk_index import ChunkIndex
from flightedl.formats.dataset_spec import DatasetSpec
from flightedl.formats.reader import ChunkReader, Decode, ReadCounts, are_consecutive, joined_tables, taken
from flightedl.formats.record_places import described, ranges_of
from flightedl.messages import groups
from flightedl.ports import Files

#: Most memory and number of the rounds that are read together.
_BLOCK_BYTES, _BLOCK_ROUNDS = 4 << 20, 256

#: Reads a chunk: its records that meet the conditions, and the row of each record, or -1.
_Load = Callable[[int], tuple[pa.Table, npt.NDArray[np.int64]]]


@dataclass(slots=True, eq=False)
class PieceReader:
    """Reader of rounds. Not thread-safe.

    Args:
        files: The dataset's files.
        index: Its chunks.
        data: Properties of its order.
        spec: Columns, filter and policy for corrupt records; the other fields are ignored.
        decode: See ``formats.reader``.
        skipped: Called with the number of corrupt records that were skipped.
    """

    _files: Files
    _index: ChunkIndex
    _data: GroupData
    _spec: DatasetSpec
    _decode: Decode | None
    _skipped: Callable[[int], None]
    _counts: ReadCounts = field(init=False, default_factory=ReadCounts)
    #: The order of the latest round's epoch, and the lanes that have been read, by source and number.
    _order: EpochOrder | None = field(init=False, default=None)
    _lanes: dict[tuple[int, int], _Lane] = field(init=False, default_factory=dict)
    #: Most bytes of decoded records that were held at a time, and number of records that were decoded.
    held_bytes: int = field(init=False, default=0)
    decoded_records: int = field(init=False, default=0)

    def read(self, steps: Sequence[Round]) -> Iterator[pa.RecordBatch]:
        """Yield the records of consecutive rounds of an epoch. A round without pieces has no records.

        Raises:
            DataError: a file cannot be read, has changed, or is corrupt. Earlier rounds have been yielded.
        """
        try:
            batches = self._batches(steps)
        except BaseException as error:
            # The rounds may be read again, which opens the files again.
            self._order = None
            if len(steps) == 1 or not isinstance(error, Exception):
                raise
        else:
            report_skipped(self._counts, self._skipped)
            yield from batches
            return
        for step in steps:
            yield from self.read([step])

    def rounds_at_once(self, row_count: int) -> int:
        """Return the number of rounds of ``row_count`` records to read together. Copying many small slices is slow."""
        records = max(int(self._data.records.sum()), 1)
        row_bytes = max(int(self._data.decoded_bytes.sum()) // records, 1)
        return min(max(_BLOCK_BYTES // (row_bytes * max(row_count, 1)), 1), _BLOCK_ROUNDS)

    def _batches(self, steps: Sequence[Round]) -> list[pa.RecordBatch]:
        order = self._opened(steps[0])
        runs, places = _runs_of(steps)
        tables, kept = self._read_runs(order, runs or [Piece(0, 0, 1)])
        rows = np.where(kept, np.cumsum(kept) - 1, -1)
        of_steps = [found[found >= 0] for found in (rows[each] for each in places)]
        table = joined_tables(tables)
        one = table.slice(0, 1)
        table = taken(table, np.concatenate(of_steps))
        finisher = self._reader_of([])
        bounds = list(pairwise(accumulate(map(len, of_steps), initial=0)))
        if self._decode is None:
            batch = finisher.finished(table)
            return [batch.slice(start, end - start) for start, end in bounds]
        # Without a record, the columns are unknown.
        found = [finisher.finished(table.slice(start, end - start) if start < end else one) for start, end in bounds]
        return [batch if start < end else batch.slice(0, 0) for batch, (start, end) in zip(found, bounds, strict=True)]

    def place(self, step: Round) -> str:
        order = EpochOrder(self._data, step.epoch, step.order)
        return described(ranges_of(self._index, order, step.pieces))

    def excluded(self, left_out: Collection[groups.Piece], step: Round) -> list[groups.Piece]:
        """Return records to be skipped as pieces of the order of this round's epoch."""
        return excluded(left_out, self._data, step.epoch, step.order)

    def _opened(self, step: Round) -> EpochOrder:
        if self._order is None or (self._order.epoch, self._order.order) != (step.epoch, step.order):
            self._lanes.clear()
            self._order = EpochOrder(self._data, step.epoch, step.order)
        return self._order

    def _read_runs(self, order: EpochOrder, runs: Sequence[Piece]) -> tuple[list[pa.Table], npt.NDArray[np.bool_]]:
        """Return the records of runs of lanes, and for each of them True if it meets the conditions."""
        tables: list[pa.Table] = []
        kept: list[npt.NDArray[np.bool_]] = []
        for run in runs:
            parts, places = order.parts(run)
            found = [each for part in parts for each in self._lane(order, part).take(part.records, self._hold)]
            if places is None:
                tables.extend(table for table, _ in found)
                kept.extend(is_kept for _, is_kept in found)
                continue
            # The sources' records follow one another. Move them to their places.
            is_kept = np.concatenate([each for _, each in found])
            rows = np.empty(len(is_kept), np.int64)
            rows[places] = np.where(is_kept, np.cumsum(is_kept) - 1, -1)
            tables.append(taken(joined_tables([table for table, _ in found]), rows[rows >= 0]))
            kept.append(rows >= 0)
        return tables, np.concatenate(kept)

    def _lane(self, order: EpochOrder, part: SourcePiece) -> _Lane:
        key = part.source, part.lane
        if key not in self._lanes:
            self._lanes[key] = _Lane(order.sources[part.source], part.lane, self._load, self._streamed)
        return self._lanes[key]

    def _load(self, chunk: int) -> tuple[pa.Table, npt.NDArray[np.int64]]:
        table, rows = self._reader_of([chunk]).load()
        self.decoded_records += len(rows)
        return table, rows

    def _streamed(self, chunks: Sequence[int]) -> ChunkReader:
        reader = self._reader_of(chunks)
        self.decoded_records += reader.record_count if reader.is_streamed else 0
        return reader

    def _reader_of(self, chunks: Sequence[int]) -> ChunkReader:
        found = [self._index.chunk(chunk) for chunk in chunks]
        return ChunkReader(self._files, found, self._spec, self._index.schema, self._decode, self._counts)

    def _hold(self, extra_bytes: int) -> None:
        held = sum(lane.held_bytes for lane in self._lanes.values())
        self.held_bytes = max(self.held_bytes, held + extra_bytes)


def _runs_of(steps: Sequence[Round]) -> tuple[list[Piece], list[npt.NDArray[np.int64]]]:
    """Join pieces of consecutive rounds. Return the joined pieces, and the places of each round's records in them."""
    runs: list[Piece] = []
    latest: dict[int, int] = {}
    #: For each piece of each round: the number of the joined piece, and its records in the joined piece.
    parts: list[list[tuple[int, int, int]]] = []
    for step in steps:
        parts.append([])
        for piece in step.pieces:
            number = latest.get(piece.lane, -1)
            if number < 0 or runs[number].end_record != piece.first_record:
                number = latest[piece.lane] = len(runs)
                runs.append(piece)
            first = runs[number].first_record
            runs[number] = Piece(piece.lane, first, piece.end_record)
            parts[-1].append((number, piece.first_record - first, piece.end_record - first))
    starts = list(accumulate((run.end_record - run.first_record for run in runs), initial=0))
    ranges = ([np.arange(starts[run] + first, starts[run] + end) for run, first, end in each] for each in parts)
    return runs, [np.concatenate([np.zeros(0, np.int64), *each]) for each in ranges]


class _Lane:
    """Reader of one lane of a source, whose records are usually read in order."""

    def __init__(self, order: SourceOrder, lane: int, load: _Load, reader: Callable[[list[int]], ChunkReader]) -> None:
        self._order = order
        self._lane = lane
        self._reader = reader
        self._load = load
        #: Records of the window, in their order, and the row of each of them or of the first one after it.
        self._window = range(0)
        self._table: pa.Table | None = None
        self._rows = np.zeros(1, np.int64)
        #: In stored order: the reader of the window's chunk, and the number of the window's first record in it.
        self._stream: tuple[ChunkReader, int] | None = None
        #: The last chunk of the window: its number, records, and the row of each record, or -1.
        self._chunk: tuple[int, pa.Table, npt.NDArray[np.int64]] | None = None
        self.held_bytes = 0

    def take(self, records: range, hold: Callable[[int], None]) -> list[tuple[pa.Table, npt.NDArray[np.bool_]]]:
        """Return the records of the lane, each with True if it meets the conditions, window by window."""
        found = []
        first = records.start
        while first < records.stop:
            if first not in self._window:
                self._open(first, hold)
            start, end = first - self._window.start, min(records.stop, self._window.stop) - self._window.start
            first = self._window.start + end
            if self._stream is not None:
                reader, skipped = self._stream
                tables = [
                    pa.Table.from_batches([each]) for each in reader.stream(range(skipped + start, skipped + end))
                ]
                self.held_bytes = sum(table.get_total_buffer_size() for table in tables)
                found.append((joined_tables(tables), np.ones(end - start, np.bool_)))
                hold(0)
                continue
            low, high = int(self._rows[start]), int(self._rows[end])
            assert self._table is not None
            found.append((self._table.slice(low, high - low), np.diff(self._rows[start : end + 1]) > 0))
        return found

    def _open(self, number: int, hold: Callable[[int], None]) -> None:
        self._table = None
        self._window = window = self._order.window(self._lane, number)
        positions = self._order.positions(self._lane, window)
        start, chunks = self._order.chunks(positions)
        if not self._order.is_shuffled and (reader := self._reader(chunks)).is_streamed:
            self._stream = reader, int(positions[0]) - start
            return
        tables, parts, count = [], [], 0
        for chunk in chunks:
            if self._chunk is None or self._chunk[0] != chunk:
                self._chunk = None
                self._chunk = (chunk, *self._load(chunk))
            _, table, numbers = self._chunk
            tables.append(table)
            parts.append(np.where(numbers < 0, -1, numbers + count))
            count += len(table)
        rows = np.concatenate(parts)[positions - start]
        kept = rows >= 0
        self._table = taken(joined_tables(tables), rows[kept])
        self._rows = np.concatenate([[0], np.cumsum(kept)])
        sizes = [table.get_total_buffer_size() for table in tables]
        is_shared = len(tables) == 1 and are_consecutive(rows[kept])
        self.held_bytes = sizes[-1] + (0 if is_shared else self._table.get_total_buffer_size())
        hold(sum(sizes[:-1]))
