"""Conversion between a span's rows and the records of a file. A cut can be read while the rows change."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from flightedl.domain.tables.spec import TableSpec
from flightedl.errors import CorruptError
from flightedl.formats.row_batches import ROWS_OF, SKETCH_BY_BUCKET, TABLE, WAITING, StoredRows, StoredRowSpan
from flightedl.messages.control import SnapshotRequest
from flightedl.pserver.stores.row_span import RowSpan
from flightedl.rowstore.tables import ChangedSince, RowChunk


class CutRows:
    """The rows of a span as of a cut. The caller must hold the span's lock only while it creates this object.

    Args:
        span: Span of the rows.
        version: Version of the rows in the file.
        updates: Number of updates by the optimizer so far.
        command: Request for the checkpoint.
        is_base: True if the file is a base, False if it is an increment.
        copy: Changes since the previous copy for a standby; None if the rows are written to a file.
    """

    def __init__(
        self,
        span: RowSpan,
        version: int,
        updates: int,
        command: SnapshotRequest,
        *,
        is_base: bool,
        copy: ChangedSince | None = None,
    ) -> None:
        numbers = span.numbers
        self._lock, self._specs = span.lock, span.rows.specs
        if copy is None:
            self.cut = span.begin_cut(version, file=command.name, after=command.after, is_base=is_base)
        else:
            self.cut = span.rows.begin_copy(version, span.epoch, copy)
        complete: list[int] = []
        if not is_base:
            # If it is unknown which rows of a span have changed, all rows are written.
            complete = list(numbers) if self.cut.is_base else span.numbers_of(self.cut.complete)
        self.span = StoredRowSpan(numbers.start, len(numbers), version, updates, span.epoch, complete)
        #: Total size of the rows yielded so far.
        self.size_bytes = 0

    def stored(self) -> Iterator[StoredRows]:
        for rows in self._stored():
            columns = (rows.ids, rows.updates, rows.versions, rows.epochs, rows.slots, rows.values)
            self.size_bytes += sum(column.nbytes for column in columns)
            yield rows

    def _stored(self) -> Iterator[StoredRows]:
        nothing, no_rows = np.empty(0, np.uint32), np.empty((0, 0), np.float32)
        for number, table in enumerate(self.cut.tables):
            yield StoredRows(
                self.span.first,
                number,
                TABLE,
                table.removed,
                table.given_up.astype(np.uint32) if self._specs[number].bucket_limit else nothing,
                table.shifts.astype(np.int32).view(np.uint32),
                SKETCH_BY_BUCKET,
                no_rows,
                table.sketch,
                table.oldest,
            )
        while True:
            with self._lock:
                chunk = self.cut.next_rows()
            if chunk is None:
                break
            kind = WAITING if chunk.is_waiting else f"{ROWS_OF}{chunk.values.dtype.name}"
            yield StoredRows(
                self.span.first,
                chunk.table,
                kind,
                chunk.ids,
                chunk.updates,
                chunk.versions,
                chunk.epochs,
                chunk.slots,
                chunk.values,
            )

    def drop(self) -> None:
        with self._lock:
            self.cut.drop()


def chunk_of(spec: TableSpec, stored: StoredRows) -> RowChunk:
    """Convert rows from a file to the format of the store.

    Raises:
        CorruptError: the rows belong to another table or optimizer.
    """
    is_waiting = stored.kind == WAITING
    dtype = np.dtype(np.float32 if spec.dtype == "float32" else np.uint16)
    values, slots = stored.values, stored.slots
    if not is_waiting and (
        values.shape[1:] != (spec.dim,)
        or values.dtype != dtype
        or (slots.shape[1] if slots.size else 0) != spec.slot_count
    ):
        raise CorruptError(f"rows of table {spec.name!r} do not match this job's table and optimizer")
    if not slots.size:
        slots = np.empty((len(stored.ids), 0), np.float32)
    history = (stored.updates, stored.versions, stored.epochs)
    return RowChunk(stored.table, is_waiting, stored.ids, *history, slots, values)  # type: ignore[arg-type]
