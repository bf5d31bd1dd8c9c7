"""The store of embedding tables: the rows of a pserver's buckets, in spans, and the checks of what comes.

What a message says about rows is about all buckets of the pserver; where they are several spans, since they came from
files of different histories, each span answers for its own.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace

from flightedl.domain.model.sharding import ShardPlan
from flightedl.domain.tables.restoring import TakenSpans
from flightedl.domain.tables.spec import TableSpec
from flightedl.errors import CorruptError, MessageError, StalePlacementError
from flightedl.formats.row_batches import TABLE, StoredRows, StoredRowSpan
from flightedl.pserver.rows.incoming import IncomingRows
from flightedl.pserver.rows.memory import RowMemory
from flightedl.pserver.rows.span import ReceivedRows, RowSpan
from flightedl.pserver.rows.stored import chunk_of
from flightedl.pserver.rows.tables import CutTable, RowTables
from flightedl.pserver.rows.values import RowCounts
from flightedl.pserver.stores import distinct
from flightedl.wire.parts import ReceivedBlocks


class RowStore:
    """The rows of all tables in one pserver's buckets.

    Args:
        plan: Places of all buckets.
        index: Of the pserver.
        row_bytes: Memory that rows may have; 0: what is there.
    """

    def __init__(self, plan: ShardPlan, index: int, row_bytes: int = 0) -> None:
        #: By number.
        self.tables: Sequence[TableSpec] = plan.tables
        #: Numbers of the buckets, behind those of all blocks.
        self.numbers = plan.buckets_of(index)
        self._is_placed = plan.placement > 0
        self._incoming = IncomingRows(plan, index)
        self.spans: dict[int, RowSpan] = {}
        if self.numbers:
            first = plan.block_count
            buckets = range(self.numbers.start - first, self.numbers.stop - first)
            rows = RowTables(plan.tables, buckets, RowMemory(row_bytes))
            self.spans = dict.fromkeys(self.numbers, RowSpan(self.numbers, first, rows, threading.Lock()))
        self._taken: TakenSpans[CutTable] = TakenSpans()

    @property
    def size_bytes(self) -> int:
        """Memory of all rows."""
        return sum(span.rows.size_bytes for span in distinct(self.spans))

    def name_of(self, number: int) -> str:
        del number
        return "rows"

    def counts(self) -> list[RowCounts]:
        """Return the figures of each table, by number."""
        found = []
        spans, names = distinct(self.spans), [field.name for field in fields(RowCounts)]
        for number in range(len(self.tables)):
            counts = []
            for span in spans:
                with span.lock:
                    counts.append(span.rows.counts(number))
            found.append(RowCounts(**{name: sum(getattr(count, name) for count in counts) for name in names}))
        return found

    def knows(self, file: str) -> bool:
        """Return True if all rows know what has changed since the cut that this file was made of."""
        spans = distinct(self.spans)
        return bool(spans) and all(span.rows.knows(file) for span in spans)

    # what comes

    def asked(self, part: ReceivedBlocks) -> ReceivedRows:
        """Return the ids of a lookup. Errors as ``pushed``."""
        self._require_all(part.blocks)
        return self._incoming.asked(part.data)

    def pushed(self, part: ReceivedBlocks) -> ReceivedRows:
        """Return the content of a push.

        Raises:
            StalePlacementError: not of the buckets that are here.
            MessageError: not of all buckets, in a job without a stored placement; damaged, of an unknown table, of
                foreign ids, or of one id twice.
            GradientError: NaN or infinity.
        """
        self._require_all(part.blocks)
        return self._incoming.pushed(part.data, is_finite=part.is_finite)

    def _require_all(self, blocks: range) -> None:
        if blocks != self.numbers and self._is_placed:
            raise StalePlacementError(f"the buckets here are not {blocks}: read the job's placement again")
        if blocks != self.numbers:
            raise MessageError(f"the buckets of a pserver, {self.numbers} here, come together, and not {blocks}")

    def by_span(self, received: ReceivedRows) -> Iterator[tuple[RowSpan, ReceivedRows]]:
        """Yield each span with its part of what came for all buckets; a span that is split meanwhile comes again."""
        number = self.numbers.start
        while number < self.numbers.stop:
            span = self.spans[number]
            yield span, received if span.numbers == self.numbers else received.within(span.buckets, self.tables)
            if not span.is_split:
                number = span.numbers.stop

    # from checkpoints

    def begin_restore(self) -> None:
        self._taken.clear()
        for span in distinct(self.spans):
            span.begin_restore()

    @property
    def restored(self) -> Mapping[int, tuple[int, int]]:
        """Number -> (version, updates), of buckets that were restored."""
        return self._taken.positions

    def restore(self, stored: StoredRows | StoredRowSpan) -> None:
        """Take over a record of a checkpoint; rows of other pservers' buckets are left out."""
        if not self.spans:
            raise CorruptError("a file has rows of tables, and the job has none")
        (span,) = distinct(self.spans)
        if isinstance(stored, StoredRowSpan):
            self._taken.span(stored.numbers, span.numbers, stored.version, stored.updates, stored.epoch)
        elif stored.table >= len(self.tables):
            raise CorruptError(f"there is no table of number {stored.table}")
        elif stored.kind == TABLE:
            span.rows.restore_removed(stored.table, stored.ids)
            span.rows.restore_shifts(stored.shifts)
            found = CutTable(stored.oldest, 0, stored.ids, stored.sketch, stored.shifts, stored.given_up)  # type: ignore[arg-type]
            self._taken.table(stored.span, stored.table, found)
        elif len(stored.ids):
            span.rows.restore(chunk_of(self.tables[stored.table], stored))

    def finish_restore(self) -> None:
        """Remove what had expired at the cuts that were restored."""
        for span in distinct(self.spans):
            span.epoch = self._taken.epoch_of(span.numbers)
            for table, spec in enumerate(self.tables):
                oldest_epoch = spec.oldest_epoch(span.epoch)
                for numbers, cut in self._taken.cuts_of(table, span.numbers):
                    buckets = span.buckets_of(numbers)
                    span.rows.restore_table(table, replace(cut, oldest_epoch=oldest_epoch), buckets)
