"""Store for embedding tables: the rows of a pserver's buckets, in spans. It also validates incoming rows.

A message about rows names adjacent buckets. Buckets that come from different checkpoint files or from another pserver
have different histories, so they are in different spans, and each span answers separately. Spans are joined when their
histories have become equal.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from flightedl.domain.model.sharding import ShardPlan
from flightedl.domain.pserver.block_values import Joined, ReleasedBlocks
from flightedl.domain.pserver.blocks import around
from flightedl.domain.tables.placement import BUCKETS
from flightedl.domain.tables.restoring import FileBuckets, RestoredSpans
from flightedl.domain.tables.spec import TableSpec
from flightedl.errors import BusyError, CorruptError, FlightedlError, MessageError, StalePlacementError
from flightedl.formats.row_batches import TABLE, StoredRows, StoredRowSpan
from flightedl.messages.status import TableCounts
from flightedl.pserver.stores.incoming_rows import IncomingRows
from flightedl.pserver.stores.interface import distinct
from flightedl.pserver.stores.row_span import ReceivedRows, RowSpan
from flightedl.pserver.stores.stored_rows import chunk_of
from flightedl.rowstore.memory import RowMemory
from flightedl.rowstore.tables import CutTable, RowTables
from flightedl.wire.parts import ReceivedBlocks

#: Bytes of rows that one push moves while spans are being joined. Moving them takes about 10 ms.
_JOINED_BYTES = 2 << 20


class RowStore:
    """The rows of all tables in the buckets of one pserver.

    Args:
        plan: Plan of the job, with the owners of all buckets.
        index: Index of the pserver.
        row_bytes: Memory limit of the rows; 0 to use the memory of the machine.
    """

    def __init__(self, plan: ShardPlan, index: int, row_bytes: int = 0) -> None:
        #: The tables, by number.
        self.tables: Sequence[TableSpec] = plan.tables
        #: The lock of all spans.
        self.lock = threading.Lock()
        self.spans: dict[int, RowSpan] = {}
        #: Tables that still have rows of buckets that have moved to another pserver, with these buckets.
        self._leftovers: list[tuple[RowTables, list[int]]] = []
        #: Number of units whose rows are being copied to other pservers.
        self.copying = 0
        #: Position of the plan's first bucket. The plan lists all parameter blocks before the buckets.
        self._first = plan.block_count
        self._is_placed = plan.placement > 0
        self._incoming = IncomingRows(plan.tables)
        self._memory = RowMemory(row_bytes)
        self._taken: RestoredSpans[CutTable] = RestoredSpans()
        #: ``FileBuckets`` of the file that is being restored, and a (buckets,) array that marks them.
        self._counting, self._is_newest = np.zeros(BUCKETS, np.bool_), True
        if numbers := plan.buckets_of(index):
            rows = RowTables(plan.tables, self._buckets(numbers), self._memory)
            self.spans = dict.fromkeys(numbers, RowSpan(numbers, self._first, rows, self.lock))

    def _buckets(self, numbers: range) -> range:
        return range(numbers.start - self._first, numbers.stop - self._first)

    @property
    def numbers(self) -> list[int]:
        return list(self.spans)

    @property
    def size_bytes(self) -> int:
        return sum(span.rows.size_bytes for span in distinct(self.spans))

    def counts(self) -> list[TableCounts]:
        found = [TableCounts(name=table.name) for table in self.tables]
        for span in distinct(self.spans):
            with span.lock:
                found = [counts.plus(span.rows.counts(number)) for number, counts in enumerate(found)]
        return found

    def knows(self, file: str) -> bool:
        """True if the changes since this file's cut are known, so that an increment would be smaller than a base."""
        return any(span.rows.knows(file) for span in distinct(self.spans))

    # messages

    def span(self, number: int) -> RowSpan:
        """Return the span of a bucket. Raises the same errors as ``pushed`` if the bucket is not on this pserver."""
        span = self.spans.get(number)
        if span is None:
            raise self._misplaced(range(number, number + 1))
        return span

    def _misplaced(self, blocks: range) -> FlightedlError:
        if self._is_placed:
            return StalePlacementError(f"the buckets {blocks} are not all here: read the job's placement again")
        return MessageError(f"a message must cover all buckets of a pserver, but {blocks} do not")

    def asked(self, part: ReceivedBlocks) -> ReceivedRows:
        """Return the ids of a lookup. Raises the same errors as ``pushed``."""
        self.span(part.blocks.start)
        return self._incoming.asked(part.data, self._buckets(part.blocks))

    def pushed(self, part: ReceivedBlocks) -> ReceivedRows:
        """Return the content of a push.

        Raises:
            StalePlacementError: a bucket is not here, or the push covers only a part of a span.
            MessageError: likewise, in a job without a stored placement; or an error of ``IncomingRows.pushed``.
            GradientError: the gradients contain NaN or infinity.
        """
        for _ in self._spans_in(part.blocks):
            pass
        return self._incoming.pushed(part.data, self._buckets(part.blocks), is_finite=part.is_finite)

    def by_span(self, blocks: range, received: ReceivedRows) -> Iterator[tuple[RowSpan, ReceivedRows]]:
        """Yield each span of these buckets with its part of the content. If a span has been split, yield its parts."""
        for span in self._spans_in(blocks):
            yield span, received if span.numbers == blocks else received.within(span.buckets, self.tables)

    def _spans_in(self, blocks: range) -> Iterator[RowSpan]:
        number = blocks.start
        while number < blocks.stop:
            span = self.span(number)
            if span.numbers.start < blocks.start or span.numbers.stop > blocks.stop:
                raise self._misplaced(blocks)
            yield span
            if not span.is_split:
                number = span.numbers.stop

    # moving buckets, and joining spans

    def drop(self, released: ReleasedBlocks) -> None:
        """Remove adjacent buckets of one span, which have moved to another pserver.

        If the buckets are at either end of the span, their rows remain in memory until ``discard_some`` has removed
        them. The caller holds the locks of all spans.
        """
        numbers = released.numbers
        span = self.spans[numbers.start]
        ranges = around(span.numbers, numbers)
        ranges.remove(numbers)
        sent = span.rows.sent.pop(self._buckets(numbers).start, np.zeros((), np.int64))
        if len(ranges) == 2:
            middle = ranges[0], numbers, ranges[1]
            before, dropped, after = span.parts(middle, released.version)
            span.is_split, kept = True, [before, after]
            before.rows.moved += dropped.rows.counters - sent
            dropped.release()
        elif ranges:
            kept = [RowSpan(ranges[0], self._first, span.rows, self.lock)]
            kept[0].epoch, span.rows.buckets, span.is_split = span.epoch, kept[0].buckets, True
            span.rows.moved -= sent
            self._leftovers.append((span.rows, [*self._buckets(numbers)]))
            span.rows.foreign[self._leftovers[-1][1]] = True
        else:
            kept = []
            span.release()
        others = {number: other for number, other in self.spans.items() if other is not span}
        others.update((number, part) for part in kept for number in part.numbers)
        self.spans = dict(sorted(others.items()))

    @property
    def has_leftovers(self) -> bool:
        """True while rows of buckets that have moved to another pserver are still in memory."""
        return bool(self._leftovers)

    def discard_some(self) -> None:
        """Remove the rows of one bucket that has moved to another pserver."""
        with self.lock:
            if self._leftovers:
                rows, buckets = self._leftovers[0]
                rows.discard(buckets.pop())
                if not buckets:
                    del self._leftovers[0]

    def staged(self, numbers: range) -> RowTables:
        """Return tables for rows of buckets that are being copied from another pserver."""
        return RowTables(self.tables, self._buckets(numbers), RowMemory())

    def require_room(self, size_bytes: int) -> None:
        """Raise BusyError unless there is room for ``size_bytes`` of rows."""
        with self.lock:
            room_bytes = self._memory.room_bytes()
        if room_bytes < size_bytes:
            raise BusyError(
                f"there is no memory for {size_bytes >> 20} MB of rows that move here, only for {room_bytes >> 20} MB: "
                "increase --table-memory-mb"
            )

    def arrived(self, numbers: range, rows: RowTables) -> RowSpan:
        """Return a span with staged rows. It is invisible until ``adopt``."""
        rows.staged()
        span = RowSpan(numbers, self._first, rows, self.lock)
        span.epoch = rows.epoch
        return span

    def adopt(self, span: RowSpan) -> None:
        """Add a span that ``arrived`` returned. The caller holds the locks of all spans."""
        span.rows.charge(self._memory)
        self.spans = dict(sorted([*self.spans.items(), *((number, span) for number in span.numbers)]))

    def borders(self, blocks: range) -> list[int]:
        """Return the start buckets of all spans after the first, up to the first bucket missing on this pserver."""
        found: list[int] = []
        # Joined tables could contain the rows of a bucket twice, or rows that a copy lacks.
        span = None if self._leftovers or self.copying else self.spans.get(blocks.start)
        while span and (number := span.numbers.stop) < blocks.stop and (span := self.spans.get(number)):
            found.append(number)
        return found

    def joined_at_once(self) -> int:
        """Return the number of buckets that one call may move to another span."""
        return max(1, _JOINED_BYTES * len(self.spans) // max(1, self.size_bytes))

    def join(self, joined: Joined, version: int) -> None:
        """Move the rows of buckets that join another span of the same version. The caller holds ``lock``."""
        moved, kept, other = joined.moved, self.spans[joined.kept], self.spans[joined.moved.start]
        epoch = max(kept.epoch, other.epoch)
        kept.rows.take(other.rows.release(self._buckets(moved), version, epoch), version)
        whole = range(min(kept.numbers.start, moved.start), max(kept.numbers.stop, moved.stop))
        is_end = moved.stop == other.numbers.stop
        rest = range(other.numbers.start, moved.start) if is_end else range(moved.stop, other.numbers.stop)
        kept.is_split = other.is_split = True
        if not rest:
            other.release()
        for numbers, rows in ((whole, kept.rows), (rest, other.rows)):
            span = RowSpan(numbers, self._first, rows, self.lock)
            span.epoch, rows.buckets = epoch, span.buckets
            self.spans.update(dict.fromkeys(numbers, span))

    # checkpoints

    def begin_restore(self) -> None:
        self._taken.clear()
        for span in distinct(self.spans):
            span.begin_restore()

    def begin_changes(self) -> None:
        """Prepare for the changes that follow a restored base. Each of them describes all spans again."""
        self._taken.clear()

    @property
    def restored(self) -> Mapping[int, tuple[int, int]]:
        """Bucket number -> (version, updates) of the restored buckets."""
        return self._taken.positions

    def restore(self, stored: FileBuckets | StoredRows | StoredRowSpan) -> None:
        """Restore one record of a checkpoint. In each file, ``FileBuckets`` precede the rows.

        Must be called before the store is used.

        Raises:
            CorruptError: The record does not match the tables.
        """
        if not self.spans:
            raise CorruptError("a file has rows of tables, but the job has no tables")
        (span,) = distinct(self.spans)
        if isinstance(stored, FileBuckets):
            self._counting = np.zeros(BUCKETS, np.bool_)
            self._counting[[number - self._first for number in stored.numbers & self.spans.keys()]] = True
            self._is_newest = stored.is_newest
        elif isinstance(stored, StoredRowSpan):
            self._taken.span(stored.numbers, span.numbers, stored.version, stored.updates, stored.epoch)
        elif stored.table >= len(self.tables):
            raise CorruptError(f"there is no table number {stored.table}")
        elif stored.kind == TABLE:
            span.rows.restore_removed(stored.table, stored.ids, self._counting)
            if self._is_newest:
                span.rows.restore_shifts(stored.shifts, self._counting)
                found = CutTable(stored.oldest, 0, stored.ids, stored.sketch, stored.shifts, stored.given_up)  # type: ignore[arg-type]
                self._taken.table(stored.span, stored.table, found)
        elif len(stored.ids):
            span.rows.restore(chunk_of(self.tables[stored.table], stored), self._counting)

    def finish_restore(self) -> None:
        """Remove rows that had already expired when the restored cuts were made."""
        for span in distinct(self.spans):
            span.epoch = self._taken.epoch_of(span.numbers)
            for table, spec in enumerate(self.tables):
                oldest_epoch = spec.oldest_epoch(span.epoch)
                for numbers, cut in self._taken.cuts_of(table, span.numbers):
                    buckets = span.buckets_of(numbers)
                    span.rows.restore_table(table, replace(cut, oldest_epoch=oldest_epoch), buckets)
