"""Content of a departing unit. Rows are copied while pushes continue, dense blocks only after the unit is frozen.

Every push changes all elements of a dense block, so copying the block before it is frozen would save nothing. A push
changes only few rows of a table. So all rows are copied first, and then, repeatedly, the rows that have changed since.
When few of these are left, the unit is frozen.

A span's lock is held while one megabyte of rows is copied.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from flightedl.domain.tables.placement import buckets_of
from flightedl.errors import UnavailableError
from flightedl.pserver.moving.parcels import BlockState, Parcel, SketchState, SomeRows, SpanState
from flightedl.pserver.shard import Shard
from flightedl.pserver.stores.row_span import RowSpan
from flightedl.rowstore.tables import ChangedSince, RowCut, RowTables

_CHUNK_BYTES = 1 << 20


class Departure:
    """Content of adjacent blocks, or of adjacent buckets. Used by one thread.

    Args:
        shard: The shard that has the blocks.
        numbers: Numbers of the blocks.
    """

    def __init__(self, shard: Shard, numbers: range) -> None:
        self._shard = shard
        self._numbers = numbers
        #: For each span with buckets of the unit: its tables, the numbers of these buckets, and the changes in the
        #: tables.
        self._copies: list[tuple[RowTables, range, ChangedSince]] = []
        if numbers.start >= shard.first_bucket:
            self._copies = [(span.rows, part, ChangedSince()) for span, part in self._parts()]
        shard.rows.copying += 1

    def _parts(self) -> list[tuple[RowSpan, range]]:
        return [
            (span, range(max(span.numbers.start, self._numbers.start), min(span.numbers.stop, self._numbers.stop)))
            for span in self._shard.spans_in(self._numbers)
            if isinstance(span, RowSpan)
        ]

    @property
    def size_bytes(self) -> int:
        """Estimated size of the rows."""
        return sum(rows.size_bytes * len(part) // max(1, len(rows.buckets)) for rows, part, _ in self._copies)

    @property
    def changed_rows(self) -> int:
        """Number of rows that have changed since they were copied, in all buckets of the unit's spans."""
        with self._shard.rows.lock:
            return sum(rows.changed_count(changed) for rows, _, changed in self._copies)

    def copy(self) -> Iterator[Parcel]:
        """Yield the rows, or the rows that have changed since the previous call.

        Raises:
            UnavailableError, MemoryError: The rows cannot be copied at the moment.
        """
        for rows, part, changed in self._copies:
            is_first = changed.records is None
            with self._shard.rows.lock:
                if any(isinstance(span, RowSpan) and span.rows is not rows for span in self._shard.spans_in(part)):
                    raise UnavailableError("the tables were split or joined while they were copied")
                span = self._shard.rows.span(part.start)
                version = self._shard.version(part.start)
                cut = rows.begin_copy(version, span.epoch, changed)
            try:
                if is_first:
                    yield from self._states(part)
                yield from self._rows(rows, part, cut)
            finally:
                with self._shard.rows.lock:
                    cut.drop()

    def rest(self) -> Iterator[Parcel]:
        """Yield all content that has not been sent yet. The unit must be frozen."""
        yield from self.copy()
        yield from self._states(self._numbers)

    def _rows(self, rows: RowTables, part: range, cut: RowCut) -> Iterator[Parcel]:
        first, lock = self._shard.first_bucket, self._shard.rows.lock
        while True:
            with lock:
                chunk = cut.next_rows(_CHUNK_BYTES)
            if chunk is None:
                return
            found = buckets_of(chunk.ids, rows.specs[chunk.table].salt) + first
            chunk = chunk.chosen((found >= part.start) & (found < part.stop))
            if chunk.ids.size:
                yield Parcel(SomeRows(part.start, chunk.table, chunk.is_waiting), chunk[2:])

    def _states(self, numbers: range) -> Iterator[Parcel]:
        shard = self._shard
        for state in shard.states_of(numbers):
            applied = np.frombuffer(state.applied, np.uint8)
            if state.numbers.start < shard.first_bucket:
                yield Parcel(SpanState.of(state), [applied])
                for block in shard.dense.blocks_of(state):
                    place = (block.number, block.parameter, block.start, block.stop)
                    yield Parcel(BlockState(*place, block.version, block.updates), [block.values, *block.slots])
                continue
            with shard.rows.lock:
                span = shard.rows.span(state.numbers.start)
                moved = span.rows.state_of(span.buckets_of(state.numbers), state.version, span.epoch)
            yield Parcel(SpanState.of(state, moved.epoch), [applied, moved.versions, moved.given_up, moved.counters])
            for table, sketch in enumerate(moved.sketches):
                if sketch.size:
                    yield Parcel(SketchState(state.numbers.start, table), [sketch])

    def end(self) -> None:
        self._shard.rows.copying -= 1
        with self._shard.rows.lock:
            for rows, _, changed in self._copies:
                rows.end_copy(changed)
