"""What one pserver holds: spans of blocks and of rows with their locks, what is decided about them, their copies.

Lock order: spans by rising number, then what they share. What a pserver is asked is ``shard``'s business.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields

import numpy as np
import numpy.typing as npt

from flightedl.domain.consistency.modes import Mode
from flightedl.domain.exactly_once.applied import AppliedBatches
from flightedl.domain.model.optimizers import Optimizer
from flightedl.domain.model.sharding import ShardPlan, runs_of
from flightedl.domain.pserver.block_values import BlocksDue, CopyBlocks, Effect, EmptyRound, Extent, Split
from flightedl.domain.pserver.blocks import BlockProtocol
from flightedl.domain.tables.spec import TableSpec
from flightedl.errors import CorruptError, MessageError, UnavailableError
from flightedl.formats.row_batches import StoredRows, StoredRowSpan
from flightedl.formats.shard_files import StoredBlock
from flightedl.process.shared_memory import NONCE_BYTES, SharedMemory, host_mark
from flightedl.pserver.arena import ALIGNMENT_BYTES, Arena
from flightedl.pserver.building import rows_of, spans_of
from flightedl.pserver.rows.memory import RowMemory
from flightedl.pserver.rows.restoring import RestoredRows
from flightedl.pserver.rows.span import ReceivedRows, RowSpan
from flightedl.pserver.rows.store import RowCounts
from flightedl.pserver.snapshots import SnapshotCopier
from flightedl.pserver.soundness import Soundness
from flightedl.pserver.spans import ArraySpan, BlockArrays
from flightedl.recording.recorded import recorded
from flightedl.recording.writer import Recorder

Array = npt.NDArray[np.generic]
HeldSpan = ArraySpan | RowSpan


class HeldBlocks:
    """All blocks of one pserver. Thread-safe.

    Args:
        plan: Where every block lies.
        index: Of the pserver.
        optimizer: Of the model.
        mode: That it begins in.
        wire: "bfloat16" or "float16" where float32 elements travel as such.
        on_lost: Told why when the blocks do not belong together any more: ends the process.
        recorder: Records what happens to them; None: nothing does.
        generation: Of the pserver's process, for that.
        row_bytes: Memory that rows may have; 0: what is there.
        shares_memory: Whether values lie in memory that trainers of the same host map.
    """

    def __init__(
        self,
        plan: ShardPlan,
        index: int,
        optimizer: Optimizer,
        mode: Mode,
        wire: str = "",
        on_lost: Callable[[str], None] = lambda _: None,
        recorder: Recorder | None = None,
        generation: int = 0,
        row_bytes: int = 0,
        *,
        shares_memory: bool = False,
    ) -> None:
        self.plan_hash = plan.hash
        self._soundness = Soundness(on_lost)
        self._plan = plan
        self._index = index
        #: In which the values lie, as long as there is room; None: they lie in memory of this process alone.
        self.store = _store_of(plan, index) if shares_memory else None
        self._arena = Arena(None if self.store is None else self.store.values)
        blocks = spans_of(plan, index, optimizer, wire, self._arena)
        self._numbers = [number for span in blocks for number in span.numbers]
        #: Numbers of the buckets, which lie behind the blocks.
        self.buckets = plan.buckets_of(index)
        spans: list[HeldSpan] = [*blocks, *rows_of(plan, index, len(self._numbers), RowMemory(row_bytes))]
        self._locks = [span.lock for span in spans]
        #: Block number -> its span. Unless its lock is held, the span may be split by the time that it is looked at.
        self._spans = {number: span for span in spans for number in span.numbers}
        #: Held while the protocol decides, which changes what all spans share.
        self._deciding = threading.Lock()
        extents = [Extent(span.numbers, isinstance(span, RowSpan)) for span in spans]
        self._protocol = recorded(recorder, {"pserver": index, "generation": generation}, BlockProtocol, extents, mode)
        #: By number of the cut, those whose blocks are being copied. Each brings the memory of its copies.
        self._copies: dict[int, SnapshotCopier] = {}
        #: Block number -> (version, updates) of blocks taken over from a checkpoint.
        self._restored: dict[int, tuple[int, int]] = {}
        self._restored_rows = RestoredRows(spans[-1] if self.buckets else None)  # type: ignore[arg-type]

    # what they are

    @property
    def tables(self) -> Sequence[TableSpec]:
        """Whose rows lie in the buckets, by number."""
        return self._plan.tables

    @property
    def numbers(self) -> list[int]:
        """The blocks' numbers, rising; without buckets."""
        return self._numbers

    @property
    def block_count(self) -> int:
        """Number of blocks, without buckets."""
        return len(self._numbers)

    @property
    def size_bytes_total(self) -> int:
        """Bytes of values, slots and accumulators, and of rows."""
        return self._arena.size_bytes + sum(span.store.size_bytes for span in self.row_spans())

    def blocks(self) -> list[BlockArrays]:
        """Every block with its state, as it lies in memory; for a caller who knows that nobody pushes."""
        return [self._block(self._span(number), number) for number in self._numbers]

    def _block(self, span: ArraySpan, number: int) -> BlockArrays:
        state = self._protocol.span(number)
        return span.block(self._plan.block(number), state.rounds, state.updates)

    def spans(self) -> list[HeldSpan]:
        """All spans as they are now, by position."""
        return list(dict.fromkeys(self._spans.values()))

    def row_spans(self) -> list[RowSpan]:
        """The spans of rows as they are now."""
        return [self._row_span(number) for number in dict.fromkeys(self._spans[n].numbers.start for n in self.buckets)]

    def row_counts(self) -> list[RowCounts]:
        """Figures of each table, by number."""
        found = []
        for number in range(len(self.tables)):
            counts = []
            for span in self.row_spans():
                with span.lock:
                    counts.append(span.store.counts(number))
            names = [field.name for field in fields(RowCounts)]
            found.append(RowCounts(**{name: sum(getattr(count, name) for count in counts) for name in names}))
        return found

    def version_range(self) -> tuple[int, int]:
        """Lowest and highest version."""
        return self._protocol.version_range()

    def waits_for(self) -> tuple[int, list[int]]:
        """The lowest version at which others wait for somebody, and the members that they wait for; none: nobody is."""
        waits: list[tuple[int, list[int]]] = []
        for span in self.spans():
            with span.lock:
                rounds = self._protocol.span(span.numbers.start).rounds
                if members := rounds.holds_up():
                    waits.append((rounds.version, members))
        return min(waits, default=(0, []))

    @contextlib.contextmanager
    def _locked(self, number: int) -> Iterator[ArraySpan]:
        """The span that has a block, with its lock held.

        Raises:
            MessageError: the block is not of this pserver.
        """
        span = self._span(number)
        with span.lock:
            self._soundness.require()
            # It may have been split before the lock was taken; its parts share the lock.
            yield self._span(number) if span.is_split else span

    def _span(self, number: int) -> ArraySpan:
        span = self._spans.get(number)
        if not isinstance(span, ArraySpan):
            raise MessageError(f"block {number} does not lie on this pserver")
        return span

    def _row_span(self, number: int) -> RowSpan:
        span = self._spans.get(number)
        assert isinstance(span, RowSpan), "buckets have rows"
        return span

    @contextlib.contextmanager
    def _all_locks(self) -> Iterator[None]:
        with contextlib.ExitStack() as held:
            for lock in self._locks:
                held.enter_context(lock)
            self._soundness.require()
            yield

    # what is decided about them

    def _split(self, split: Split, version: int) -> None:
        """Split arrays as the protocol has split their span, which has this version; its lock is held."""
        if len(split.into) == 1:
            return
        span = self._spans[split.span]
        parts = span.parts(split.into) if isinstance(span, ArraySpan) else span.parts(split.into, version)
        span.is_split = True
        self._spans.update((number, part) for part in parts for number in part.numbers)

    def _carry_out(
        self,
        span: HeldSpan,
        effects: Sequence[Effect],
        pushed: Array | ReceivedRows | None = None,
        *,
        has_checksum: bool = False,
    ) -> None:
        """Do what the protocol decided; the span's lock is held."""
        for effect in effects:
            if isinstance(effect, CopyBlocks):
                self._copy(span, effect)
            elif isinstance(effect, BlocksDue):
                if (copies := self._copies.get(effect.cut)) is not None:
                    copies.note_due(effect.local)
            elif isinstance(effect, EmptyRound):
                pass
            elif isinstance(span, ArraySpan):
                assert not isinstance(pushed, ReceivedRows), "blocks get no rows"
                span.carry_out(effect, pushed, has_checksum=has_checksum)
            else:
                assert not isinstance(pushed, np.ndarray), "rows get no blocks"
                span.carry_out(effect, pushed)

    def _copy(self, span: HeldSpan, copy: CopyBlocks) -> None:
        """Copy blocks of the span for a snapshot, before they change; the span's lock is held."""
        # They may be complete, and dropped by the thread that writes them, at any moment.
        copies = self._copies.get(copy.cut)
        if copies is None:
            return
        try:
            if isinstance(span, RowSpan):
                copies.copy_rows(span, copy.version, copy.updates)
                return
            for local in copy.local:
                number = span.numbers[local - span.local.start]
                copies.copy(self._block(span, number), copy.version, copy.updates)
        except MemoryError:
            # Training goes on without them.
            self.drop_copies(copies)
            copies.give_up("there is no memory for the copies of its blocks and rows")

    # checkpoints

    @property
    def slot_count(self) -> int:
        """The most slots that any block has."""
        return max((len(span.slots) for span in self.spans() if isinstance(span, ArraySpan)), default=0)

    def begin_copies(self, begin: Callable[[Sequence[int], int], SnapshotCopier | None]) -> None:
        """Let ``begin`` decide, under all locks, whether blocks are to be copied from now on."""
        with self._all_locks():
            copies = begin(self._protocol.versions(), self._protocol.highest_open_round())
            if copies is not None:
                with self._deciding:
                    if copies.replaces is not None:
                        self._copies.pop(copies.replaces.cut, None)
                        self._protocol.drop_cut(copies.replaces.cut)
                        copies.replaces = None
                    copies.cut, due = self._protocol.begin_cut(copies.at_round)
                    self._copies[copies.cut] = copies
                copies.note_due(due)

    def has_changes_since(self, file: str) -> bool:
        """Whether all rows know what has changed since the cut that this file was made of; under all locks."""
        spans = self.row_spans()
        return bool(spans) and all(span.store.knows(file) for span in spans)

    def copy_due_blocks(self, copies: SnapshotCopier) -> None:
        """Copy every block that is due now, unless these copies were dropped."""
        self._soundness.require()
        while (local := copies.next_due()) is not None:
            if not self.copy_one(copies, local):
                return

    def copy_one(self, copies: SnapshotCopier, local: int) -> bool:
        """Copy a block unless it was copied since; False: these copies were dropped."""
        if local >= len(self._numbers):
            # Spans of rows are split while they are restored: nobody copies them then.
            number = self.buckets[local - len(self._numbers)]
            rows = self._row_span(number)
            with rows.lock:
                self._soundness.require()
                copy = self._due_copy(copies, number)
                if copy is not None:
                    copies.copy_rows(rows, copy.version, copy.updates)
                return self._copies.get(copies.cut) is copies
        number = self._numbers[local]
        with self._locked(number) as span:
            copy = self._due_copy(copies, number)
            if copy is not None:
                copies.copy(self._block(span, number), copy.version, copy.updates, lead=0)
            return self._copies.get(copies.cut) is copies

    def _due_copy(self, copies: SnapshotCopier, number: int) -> CopyBlocks | None:
        with self._deciding:
            return self._protocol.copy(copies.cut, number)

    def visit(self, look: Callable[[BlockArrays], None]) -> None:
        """Show every block, each under its lock."""
        for number in self._numbers:
            with self._locked(number) as span:
                look(self._block(span, number))

    def end_copies(self, copies: SnapshotCopier) -> AppliedBatches | None:
        """What is applied to complete copies; None: they were dropped."""
        with self._deciding:
            self._copies.pop(copies.cut, None)
            return None if self._soundness.is_lost else self._protocol.end_cut(copies.cut)

    def drop_copies(self, copies: SnapshotCopier) -> None:
        """Copy nothing more for these."""
        with self._deciding:
            self._copies.pop(copies.cut, None)
            self._protocol.drop_cut(copies.cut)

    def begin_restore(self) -> None:
        """Another checkpoint is going to be taken over; of one before that was damaged, nothing stays."""
        self._restored.clear()
        self._restored_rows.begin()

    def restore(self, stored: StoredBlock | StoredRows | StoredRowSpan) -> None:
        """Take over what a checkpoint has, before anybody uses the shard.

        Raises:
            CorruptError: it is of other blocks, tables or optimizers.
        """
        if isinstance(stored, StoredBlock):
            self.restore_block(stored)
        else:
            self._restored_rows.take(stored)

    def restore_block(self, stored: StoredBlock) -> None:
        """Take a block over from a checkpoint, before anybody uses the shard.

        Raises:
            CorruptError: it is another block, or of another optimizer.
        """
        span = self._span(stored.number)
        place, at = self._plan.block(stored.number), span.part(stored.number)
        if (
            (stored.parameter, stored.start, stored.stop) != (place.parameter, place.start, place.stop)
            or (stored.values.size, stored.values.dtype) != (place.size, span.values.dtype)
            or [(slot.size, slot.dtype) for slot in stored.slots] != [(place.size, slot.dtype) for slot in span.slots]
        ):
            raise CorruptError(f"block {stored.number} is not the one of this job's model and optimizer")
        np.copyto(span.values[at], stored.values)
        for slot, saved in zip(span.slots, stored.slots, strict=True):
            np.copyto(slot[at], saved)
        self._restored[stored.number] = (stored.version, stored.updates)

    def restored(self, applied: AppliedBatches) -> None:
        """All blocks and rows were taken over; this is what is applied to them.

        Raises:
            CorruptError: they are not all blocks.
        """
        for split in self._protocol.restore(applied, self._restored | self._restored_rows.positions):
            self._split(split, 0)
        self._restored_rows.finish(self.row_spans())


def _store_of(plan: ShardPlan, index: int) -> SharedMemory | None:
    """Memory for all values of a pserver, and as many again: those that change while somebody reads them are moved."""
    if not host_mark():
        return None
    blocks = [plan.block(number) for run in runs_of(plan, index) for number in run]
    sizes = (block.size * np.dtype(plan.parameters[block.parameter].storage_dtype).itemsize for block in blocks)
    size_bytes = 2 * (sum(sizes) + ALIGNMENT_BYTES * len(blocks))
    try:
        return SharedMemory.create(secrets.token_bytes(NONCE_BYTES), size_bytes, "flightedl-model")
    except UnavailableError:
        return None
