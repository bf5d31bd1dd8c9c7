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
        #: By table, what each file says of it.
        self._tables: dict[int, list[CutTable]] = {}

    def take(self, stored: StoredRows | StoredRowSpan) -> None:
        """Take some over; rows of other pservers' buckets are left out.

        Raises:
            CorruptError: they are of other tables or optimizers.
        """
        span = self._span
        if span is None:
            raise CorruptError("a file has rows of tables, and the job has none")
        if isinstance(stored, StoredRowSpan):
            for number in stored.numbers:
                if number in span.numbers:
                    self.positions[number] = (stored.version, stored.updates)
                    self._epochs[number] = stored.epoch
        elif stored.table >= len(span.store.specs):
            raise CorruptError(f"there is no table of number {stored.table}")
        elif stored.kind == TABLE:
            found = CutTable(stored.oldest, stored.ids, stored.values)  # type: ignore[arg-type]
            self._tables.setdefault(stored.table, []).append(found)
        elif len(stored.ids):
            span.store.restore(_chunk(span, stored))

    def finish(self, spans: Sequence[RowSpan]) -> None:
        """All was taken over, and lies in these spans now."""
        for span in spans:
            span.epoch = max((self._epochs.get(number, 0) for number in span.numbers), default=0)
            for table, found in self._tables.items():
                # Rows of a file that were given up are not in it; those of another file may be older.
                oldest = min(each.oldest for each in found)
                for each in found:
                    span.store.restore_table(table, replace(each, oldest=oldest))


def _chunk(span: RowSpan, stored: StoredRows) -> RowChunk:
    spec = span.store.specs[stored.table]
    is_waiting = stored.kind == WAITING
    slot_count = sum(spec.dim if slot.per_element else 1 for slot in spec.optimizer.slots)
    dtype = np.dtype(np.float32 if spec.dtype == "float32" else np.uint16)
    values, slots = stored.values, stored.slots
    if not is_waiting and (
        values.shape[1:] != (spec.dim,) or values.dtype != dtype or (slots.shape[1] if slots.size else 0) != slot_count
    ):
        raise CorruptError(f"rows of table {spec.name!r} are not those of this job's table and optimizer")
    if not slots.size:
        slots = np.empty((len(stored.ids), 0), np.float32)
    history = (stored.updates, stored.versions, stored.epochs)
    return RowChunk(stored.table, is_waiting, stored.ids, *history, slots, values)  # type: ignore[arg-type]
