"""Content of a unit that arrives at this pserver. It is invisible to clients until the unit is adopted."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from flightedl.domain.pserver.block_values import ReleasedBlocks
from flightedl.errors import CorruptError, NotReadyError
from flightedl.formats.row_batches import AnyArray
from flightedl.formats.shard_files import StoredBlock
from flightedl.pserver.moving.parcels import BlockState, Digest, Parcel, SketchState, SomeRows, SpanState
from flightedl.pserver.shard import Shard
from flightedl.pserver.stores.held import AnySpan
from flightedl.rowstore.tables import RowChunk, RowTables
from flightedl.rowstore.values import MovedBuckets


class Arrival:
    """Staged content of adjacent blocks or buckets. Thread-safe.

    Args:
        shard: The shard that will adopt the blocks.
        numbers: Numbers of the blocks.
        size_bytes: Size of the rows, as stated by the source.

    Raises:
        BusyError: There is not enough memory for the rows.
    """

    def __init__(self, shard: Shard, numbers: range, size_bytes: int) -> None:
        shard.rows.require_room(size_bytes)
        self._shard = shard
        self._numbers = numbers
        self.digest = Digest()
        self.lock = threading.Lock()
        #: First bucket of a span -> its rows.
        self._rows: dict[int, RowTables] = {}
        #: First block of a span -> its newest state.
        self._states: dict[int, ReleasedBlocks] = {}
        self._blocks: dict[int, StoredBlock] = {}
        #: Complete spans, not yet visible to clients; empty until all content has arrived.
        self._ready: list[tuple[ReleasedBlocks, AnySpan]] = []

    def add(self, parcel: Parcel) -> None:
        """Add a part of the content. The caller holds ``lock``.

        Raises:
            CorruptError: The content does not belong to the unit.
        """
        content, arrays = parcel
        match content:
            case SomeRows(first, table, is_waiting) if first in self._rows and len(arrays) == 6:
                self._rows[first].stage(RowChunk(table, is_waiting, *arrays))
            case SpanState() if set(content.numbers) <= set(self._numbers):
                self._add_state(content, arrays)
            case SketchState(first, table) if first in self._rows:
                rows = self._rows[first]
                rows.stage_sketch(table, arrays[0])
            case BlockState() if content.number in self._numbers:
                place = (content.number, content.parameter, content.start, content.stop)
                block = StoredBlock(*place, content.version, content.updates, arrays[0], tuple(arrays[1:]))
                self._blocks[content.number] = block
            case _:
                raise CorruptError(f"a part of a moving block does not belong to the blocks {self._numbers}")

    def _add_state(self, state: SpanState, arrays: Sequence[AnyArray]) -> None:
        self._states[state.first] = released = state.released(arrays[0].tobytes())
        if state.first < self._shard.first_bucket:
            return
        rows, buckets = self._rows.get(state.first), tuple(self._shard.buckets_of(released.numbers))
        moved = MovedBuckets(buckets, arrays[1], state.epoch, arrays[2], (), (), arrays[3])
        if rows is None:
            rows = self._rows[state.first] = self._shard.rows.staged(released.numbers)
        rows.stage_state(moved, state.version)

    def prepare(self) -> None:
        """Build the unit's spans from the complete content. The caller holds ``lock``.

        Raises:
            NotReadyError: The source has a different view of the members, or a cut is copying the blocks here.
            CorruptError: Blocks are missing.
            BusyError, MemoryError: There is not enough memory for the blocks.
        """
        self.drop()
        states = [self._states[first] for first in sorted(self._states)]
        if [number for state in states for number in state.numbers] != [*self._numbers]:
            raise CorruptError(f"some of the blocks {self._numbers} have not arrived")
        for state in states:
            if (unmovable := self._shard.unadoptable(state)) is not None:
                raise NotReadyError(str(unmovable))
        for state in states:
            if state.numbers.start >= self._shard.first_bucket:
                rows = self._rows[state.numbers.start]
                self._shard.rows.require_room(rows.size_bytes)
                self._ready.append((state, self._shard.rows.arrived(state.numbers, rows)))
            else:
                blocks = [self._blocks[number] for number in state.numbers if number in self._blocks]
                self._ready.append((state, self._shard.dense.prepared(state, blocks)))

    def adopt(self) -> None:
        """Make the complete content visible."""
        with self.lock:
            ready, self._ready = self._ready, []
            for released, span in ready:
                unmovable = self._shard.adopt(released, span)
                assert unmovable is None, f"blocks that were acknowledged cannot be adopted: {unmovable}"

    def drop(self) -> None:
        """Free the memory of prepared blocks. The caller holds ``lock``, unless no more content can arrive."""
        ready, self._ready = self._ready, []
        for released, span in ready:
            if released.numbers.start < self._shard.first_bucket:
                span.release()
