"""Rows from a checkpoint's files, on the same or another number of pservers, on their way into a span."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from flightedl.errors import CorruptError
from flightedl.formats.row_batches import TABLE, WAITING, StoredRows, StoredRowSpan
from flightedl.pserver.row_span import RowSpan
from flightedl.pserver.row_store import CutTable, RowChunk


class RestoredRows:
    """What was taken over so far.

    Args:
        span: Of all buckets of this pserver; None: it has none.
    """

    def __init__(self, span: RowSpan | None) -> None:
        self._span = span
        #: Position -> (version, updates), of the buckets that were taken over.
        self.positions: dict[int, tuple[int, int]] = {}
        #: Position -> the highest epoch of the batches in its rows.
        self._epochs: dict[int, int] = {}
        #: By the first position of a span in a chain of files, and by table: what the last file says of it.
        self._tables: dict[tuple[int, int], CutTable] = {}
        #: The positions of each such span.
        self._stored: dict[int, range] = {}

    def begin(self) -> None:
        """A checkpoint is going to be taken over: what came of another one, which was damaged, does not count."""
        if self._span is not None:
            self._span.begin_restore()
        for known in (self.positions, self._epochs, self._tables, self._stored):
            known.clear()

    def take(self, stored: StoredRows | StoredRowSpan) -> None:
        """Take some over; rows of other pservers' buckets are left out.

        Raises:
            CorruptError: they are of other tables or optimizers.
        """
        span = self._span
        if span is None:
            raise CorruptError("a file has rows of tables, and the job has none")
        if isinstance(stored, StoredRowSpan):
            self._stored[stored.first] = stored.numbers
            for number in stored.numbers:
                if number in span.numbers:
                    self.positions[number] = (stored.version, stored.updates)
                    self._epochs[number] = stored.epoch
        elif stored.table >= len(span.store.specs):
            raise CorruptError(f"there is no table of number {stored.table}")
        elif stored.kind == TABLE:
            span.store.restore_removed(stored.table, stored.ids)
            found = CutTable(stored.oldest, 0, stored.ids, stored.values)  # type: ignore[arg-type]
            self._tables[stored.span, stored.table] = found
        elif len(stored.ids):
            span.store.restore(_chunk(span, stored))

    def finish(self, spans: Sequence[RowSpan]) -> None:
        """All was taken over, and lies in these spans now."""
        for span in spans:
            span.epoch = max((self._epochs.get(number, 0) for number in span.numbers), default=0)
            for table, spec in enumerate(span.store.specs):
                oldest_epoch = spec.oldest_epoch(span.epoch)
                found = [
                    (numbers, self._tables[first, table])
                    for first, numbers in self._stored.items()
                    if (first, table) in self._tables
                    and numbers.start < span.numbers.stop
                    and span.numbers.start < numbers.stop
                ]
                for numbers, cut in found:
                    buckets = span.buckets_of(numbers)
                    span.store.restore_table(table, replace(cut, oldest_epoch=oldest_epoch), buckets)
                # What one file gave up is gone now; rows of another one may be older, and exist.
                span.store.restore_oldest(table, min((cut.oldest for _, cut in found), default=0))


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
