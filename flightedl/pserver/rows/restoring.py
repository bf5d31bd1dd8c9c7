"""Rows from a checkpoint's files, on the same or another number of pservers, on their way into a span."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from flightedl.domain.tables.restoring import TakenSpans
from flightedl.errors import CorruptError
from flightedl.formats.row_batches import TABLE, WAITING, StoredRows, StoredRowSpan
from flightedl.pserver.rows.span import RowSpan
from flightedl.pserver.rows.store import CutTable, RowChunk


class RestoredRows:
    """What was taken over so far.

    Args:
        span: Of all buckets of this pserver; None: it has none.
    """

    def __init__(self, span: RowSpan | None) -> None:
        self._span = span
        self._taken: TakenSpans[CutTable] = TakenSpans()

    def begin(self) -> None:
        """A checkpoint is going to be taken over: what came of another one, which was damaged, does not count."""
        if self._span is not None:
            self._span.begin_restore()
        self._taken.clear()

    @property
    def positions(self) -> dict[int, tuple[int, int]]:
        """Position -> (version, updates), of the buckets that were taken over."""
        return self._taken.positions

    def take(self, stored: StoredRows | StoredRowSpan) -> None:
        """Take some over; rows of other pservers' buckets are left out.

        Raises:
            CorruptError: they are of other tables or optimizers.
        """
        span = self._span
        if span is None:
            raise CorruptError("a file has rows of tables, and the job has none")
        if isinstance(stored, StoredRowSpan):
            self._taken.span(stored.numbers, span.numbers, stored.version, stored.updates, stored.epoch)
        elif stored.table >= len(span.store.specs):
            raise CorruptError(f"there is no table of number {stored.table}")
        elif stored.kind == TABLE:
            span.store.restore_removed(stored.table, stored.ids)
            found = CutTable(stored.oldest, 0, stored.ids, stored.values)  # type: ignore[arg-type]
            self._taken.table(stored.span, stored.table, stored.oldest, found)
        elif len(stored.ids):
            span.store.restore(_chunk(span, stored))

    def finish(self, spans: Sequence[RowSpan]) -> None:
        """All was taken over, and lies in these spans now."""
        for span in spans:
            span.epoch = self._taken.epoch_of(span.numbers)
            for table, spec in enumerate(span.store.specs):
                oldest_epoch = spec.oldest_epoch(span.epoch)
                for numbers, cut in self._taken.cuts_of(table, span.numbers):
                    buckets = span.buckets_of(numbers)
                    span.store.restore_table(table, replace(cut, oldest_epoch=oldest_epoch), buckets)
                span.store.restore_oldest(table, self._taken.oldest_of(table, span.numbers))


def _chunk(span: RowSpan, stored: StoredRows) -> RowChunk:
    spec = span.store.specs[stored.table]
    is_waiting = stored.kind == WAITING
    dtype = np.dtype(np.float32 if spec.dtype == "float32" else np.uint16)
    values, slots = stored.values, stored.slots
    if not is_waiting and (
        values.shape[1:] != (spec.dim,)
        or values.dtype != dtype
        or (slots.shape[1] if slots.size else 0) != spec.slot_count
    ):
        raise CorruptError(f"rows of table {spec.name!r} are not those of this job's table and optimizer")
    if not slots.size:
        slots = np.empty((len(stored.ids), 0), np.float32)
    history = (stored.updates, stored.versions, stored.epochs)
    return RowChunk(stored.table, is_waiting, stored.ids, *history, slots, values)  # type: ignore[arg-type]
