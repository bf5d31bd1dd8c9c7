"""The blocks that one pserver holds: their arrays, their rounds, and what is applied to them.

Rules:

* Each block has a lock. Under it: ask the round what to do with a row, do the arithmetic, mark the batch as applied,
  close the round when it is full. So a block's values, slots, version and applied batches always belong together.
* Nothing is touched before a row was checked: a block of this shard, the right number of bytes, finite.
* A version that has been reached wakes all waiters once per message (``announce_changes``), not once per block.
* Values leave as copies made under the block's lock, so what a reader gets is one version, never a mixture. In
  asynchronous mode the update writes the copy in its own pass over memory.
* A view changes all blocks at once, under all their locks.

Lock order: blocks by rising number, then the applied batches, then the change counter. No lock is held while waiting or
sending.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flightedl.domain.applied import AppliedBatches, Batch
from flightedl.domain.kernels import BlockKernels, Update, block_kernels, kernel_for
from flightedl.domain.membership import PserverView, View, ViewMember, ViewVerdict
from flightedl.domain.modes import Async, Mode, Sync
from flightedl.domain.optimizers import Optimizer
from flightedl.domain.rounds import Accumulate, Apply, Arrival, Arrived, BlockRounds, NotMember, Pull, Repeated, Stale
from flightedl.domain.sharding import Block, ShardPlan
from flightedl.errors import CorruptError, FencedError, GradientError, MessageError
from flightedl.formats.shard_files import StoredBlock
from flightedl.pserver.arena import Arena
from flightedl.pserver.snapshots import BlockCopies
from flightedl.wire.messages import PushHeader, ViewRequest
from flightedl.wire.rows import Outcome, Row

Array = npt.NDArray[np.generic]


@dataclass(slots=True)
class Counts:
    """What happened to rows since the start."""

    messages: int = 0
    accepted: int = 0
    repeated: int = 0
    refused: int = 0


@dataclass(frozen=True, slots=True)
class Pushed:
    """What became of a row. ``values``: a copy of the new values, where they came with the update."""

    outcome: Outcome
    version: int
    values: Array | None = None


_OUTCOMES: dict[type[Arrival], Outcome] = {
    Accumulate: Outcome.ACCEPTED,
    Apply: Outcome.ACCEPTED,
    Arrived: Outcome.ACCEPTED,
    Repeated: Outcome.ALREADY_APPLIED,
    Stale: Outcome.STALE,
    NotMember: Outcome.NOT_MEMBER,
}


class _Block:
    """One block's arrays and state; everything under ``lock``."""

    __slots__ = (
        "accumulator",
        "election",
        "kernels",
        "local",
        "lock",
        "number",
        "parameter",
        "place",
        "rounds",
        "slots",
        "update",
        "updates",
        "values",
    )

    def __init__(
        self,
        place: Block,
        local: int,
        parameter: str,
        values: Array,
        slots: Sequence[Array],
        rounds: BlockRounds,
        update: Update,
        kernels: BlockKernels,
    ) -> None:
        self.place = place
        self.number = place.number
        #: Its place among the blocks of this pserver.
        self.local = local
        self.parameter = parameter
        self.values = values
        self.slots = slots
        self.rounds = rounds
        self.update = update
        self.kernels = kernels
        self.lock = threading.Lock()
        #: Sum of the open round's gradients; made with the first one.
        self.accumulator: Array | None = None
        #: Times the optimizer ran.
        self.updates = 0
        #: The election whose first values these are; 0: there are none.
        self.election = 0


class ShardState:
    """The blocks of one pserver. Thread-safe."""

    def __init__(self, plan: ShardPlan, index: int, optimizer: Optimizer, mode: Mode) -> None:
        self.plan_hash = plan.hash
        self.counts = Counts()
        self._mode = mode
        self._is_mean = isinstance(mode, Sync) and mode.reduce == "mean"
        #: New values may leave with the update: nobody has to wait for anybody.
        self._hands_out = isinstance(mode, Async)
        self._scales_by_staleness = isinstance(mode, Async) and mode.staleness_scaled
        self._arena = Arena()
        self._blocks = self._build(plan, index, optimizer, mode)
        self._ordered = list(self._blocks.values())
        self._applied = AppliedBatches(len(self._blocks))
        self._applied_lock = threading.Lock()
        self._view = PserverView()
        #: The snapshot whose blocks are being copied; changed under all locks, read under any of them.
        self._copies: BlockCopies | None = None
        self._is_restored = False
        self._change = threading.Condition()
        self._change_count = 0

    def _build(self, plan: ShardPlan, index: int, optimizer: Optimizer, mode: Mode) -> dict[int, _Block]:
        layout = plan.blocks_of(index)
        blocks: dict[int, _Block] = {}
        for local, number in enumerate(layout.numbers.tolist()):
            block = plan.block(number)
            spec = plan.parameters[block.parameter]
            rule = optimizer.for_parameter(spec.name)
            blocks[number] = _Block(
                block,
                local,
                spec.name,
                self._arena.allocate(block.size, spec.storage_dtype),
                [self._arena.allocate(block.size, spec.storage_dtype, slot.initial) for slot in rule.slots],
                BlockRounds(mode),
                kernel_for(rule, spec.storage_dtype),
                block_kernels(spec.storage_dtype),
            )
        return blocks

    # what it is

    @property
    def numbers(self) -> list[int]:
        """The blocks' numbers, rising."""
        return list(self._blocks)

    @property
    def block_count(self) -> int:
        """Number of blocks."""
        return len(self._blocks)

    @property
    def size_bytes_total(self) -> int:
        """Bytes of values, slots and accumulators."""
        return self._arena.size_bytes

    def size_bytes(self, number: int) -> int:
        """Bytes of a block's values."""
        return self._owned(number).values.nbytes

    def version_range(self) -> tuple[int, int]:
        """Lowest and highest version."""
        versions = [block.rounds.version for block in self._ordered]
        return (min(versions), max(versions)) if versions else (0, 0)

    def highest_open_round(self) -> int:
        """What a member that joins now has to start at, or later."""
        return max((block.rounds.position for block in self._ordered), default=0)

    def _owned(self, number: int) -> _Block:
        block = self._blocks.get(number)
        if block is None:
            raise MessageError(f"block {number} does not lie on this pserver")
        return block

    # first values

    def initialize(self, election: int, row: Row) -> None:
        """First values of a block; a newer election's replace an older one's.

        Raises:
            MessageError: not a block of this pserver, or of another size.
            GradientError: not finite.
        """
        block = self._owned(row.block)
        values = self._array(block, row)
        with block.lock:
            if election >= block.election and block.updates == 0 and not self._is_restored:
                np.copyto(block.values, values)
                block.election = election

    def initialized_count(self, election: int) -> int:
        """Blocks that have the first values of this election, or of a checkpoint."""
        if self._is_restored:
            return self.block_count
        return sum(block.election == election for block in self._ordered)

    # pushes

    def push(self, header: PushHeader, row: Row) -> Pushed:
        """Take one row of a push.

        Returns:
            What became of it; the same row again is answered, never applied again.

        Raises:
            MessageError: a foreign block, a wrong size, or a base version from the future.
            GradientError: not finite.
        """
        block = self._owned(row.block)
        gradient = self._array(block, row) if len(row.values) else None
        weight = 0.0 if gradient is None else header.weight if self._is_mean else 1.0
        with block.lock:
            if not self._view.is_member(header.member, header.trainer, header.generation):
                self.counts.refused += 1
                return Pushed(Outcome.NOT_MEMBER, block.rounds.version)
            arrival, is_new = self._arrive(block, header, row.version, weight)
            copy = None
            if isinstance(arrival, Accumulate) and gradient is not None:
                self._accumulate(block, gradient, weight if self._is_mean else 1.0, arrival.is_first)
            elif isinstance(arrival, Apply) and gradient is not None:
                copy = np.empty_like(block.values) if header.pull and self._hands_out else None
                factor = 1.0 / (1.0 + arrival.staleness) if self._scales_by_staleness else 1.0
                block.update(block.values, gradient, block.slots, block.updates, 1.0, copy, factor)
                block.updates += 1
            self._close_rounds(block)
            if self._copies is not None:
                self._copies.look_at(block)
            version = block.rounds.version
        outcome = _OUTCOMES[type(arrival)]
        if outcome == Outcome.ACCEPTED and not is_new:
            outcome = Outcome.ALREADY_APPLIED
        self._count(outcome)
        return Pushed(outcome, version, copy)

    def _arrive(self, block: _Block, header: PushHeader, base_version: int, weight: float) -> tuple[Arrival, bool]:
        """Mark the batch and let it arrive, or neither. Also whether the block did not have it."""
        identity = header.identity
        batch = Batch(identity.epoch, identity.task, identity.batch)
        with self._applied_lock:
            is_new = self._applied.mark(block.local, batch, identity.batch_count)
            if is_new and self._copies is not None:
                self._copies.marked(block.local, batch, identity.batch_count)
        keep = False
        try:
            arrival = block.rounds.arrive(
                header.member,
                base_version,
                weight,
                already_applied=not is_new,
                batch=batch,
                batch_count=identity.batch_count,
                step=header.step,
            )
            keep = not isinstance(arrival, Stale | NotMember)
        finally:
            if is_new and not keep:
                with self._applied_lock:
                    self._applied.unmark(block.local, batch, identity.batch_count)
        return arrival, is_new

    def _accumulate(self, block: _Block, gradient: Array, weight: float, is_first: bool) -> None:
        if block.accumulator is None:
            block.accumulator = self._arena.allocate(block.values.size, block.values.dtype)
        add = block.kernels.accumulate_first if is_first else block.kernels.accumulate
        add(block.accumulator, gradient, weight)

    def _close_rounds(self, block: _Block) -> None:
        """Close what is full; the block's lock is held."""
        while block.rounds.closable():
            closing = block.rounds.close()
            if closing.has_update and block.accumulator is not None:
                scale = 1.0 / closing.total_weight if self._is_mean else 1.0
                block.update(block.values, block.accumulator, block.slots, block.updates, scale)
                block.updates += 1
            if self._copies is not None:
                self._copies.look_at(block)

    def _array(self, block: _Block, row: Row) -> Array:
        if len(row.values) != block.values.nbytes:
            raise MessageError(
                f"block {block.number} of {block.parameter!r} has {block.values.nbytes} bytes, not {len(row.values)}"
            )
        array = row.array(block.values.dtype)
        if not block.kernels.all_finite(array):
            raise GradientError(f"{block.parameter!r} has NaN or infinity in block {block.number}: nothing was applied")
        return array

    def _count(self, outcome: Outcome) -> None:
        if outcome == Outcome.ACCEPTED:
            self.counts.accepted += 1
        elif outcome == Outcome.ALREADY_APPLIED:
            self.counts.repeated += 1
        else:
            self.counts.refused += 1

    # pulls

    def version_after(self, base_version: int) -> int:
        """The version that the sender of a row of this base waits for."""
        return base_version + 1 if isinstance(self._mode, Sync) else 0

    def read(self, number: int, member: int, min_version: int) -> Pushed | None:
        """A copy of a block's values; None: not yet. Outcome NOT_MEMBER: the membership is gone, and no values."""
        block = self._owned(number)
        with block.lock:
            state = block.rounds.pull(member, min_version)
            if state is Pull.WAIT:
                return None
            version = block.rounds.version
            if state is Pull.NOT_MEMBER:
                return Pushed(Outcome.NOT_MEMBER, version)
            return Pushed(Outcome.NONE, version, block.values.copy())

    def is_readable(self, number: int, member: int, min_version: int) -> bool:
        """Whether ``read`` would answer now; may be out of date at once."""
        return self._owned(number).rounds.pull(member, min_version) is not Pull.WAIT

    # views

    def set_members(self, request: ViewRequest) -> ViewVerdict:
        """Take over a view, in all blocks at once."""
        members = tuple(ViewMember(m.trainer, m.generation, m.member, m.first_round) for m in request.members)
        with self._all_locks():
            verdict = self._view.consider(
                View(request.master_generation, request.serial, members),
                lambda first_round: all(block.rounds.can_admit(first_round) for block in self._ordered),
            )
            admit = {member.member_id: member.first_round for member in verdict.admit}
            if admit or verdict.remove:
                for block in self._ordered:
                    block.rounds.change(admit, verdict.remove)
                    self._close_rounds(block)
        return verdict

    @contextlib.contextmanager
    def _all_locks(self) -> Iterator[None]:
        with contextlib.ExitStack() as held:
            for block in self._ordered:
                held.enter_context(block.lock)
            yield

    # checkpoints

    @property
    def slot_count(self) -> int:
        """The most slots that any block has."""
        return max((len(block.slots) for block in self._ordered), default=0)

    def begin_copies(self, begin: Callable[[Sequence[int], int, threading.Lock], BlockCopies | None]) -> None:
        """Let ``begin`` decide, under all locks, whether blocks are to be copied from now on."""
        with self._all_locks():
            versions = [block.rounds.version for block in self._ordered]
            copies = begin(versions, self.highest_open_round(), self._applied_lock)
            if copies is not None:
                self._copies = copies

    def copy_due_blocks(self, copies: BlockCopies) -> None:
        """Copy every block that is due already."""
        for block in self._ordered:
            with block.lock:
                copies.look_at(block)

    def end_copies(self, copies: BlockCopies) -> AppliedBatches | None:
        """What is applied to complete copies; None: newer ones took their place."""
        with self._applied_lock:
            if self._copies is not copies:
                return None
            self._copies = None
            return copies.take_applied(self._applied)

    def applied(self) -> AppliedBatches:
        """What is applied now: a copy."""
        with self._applied_lock:
            return self._applied.copy()

    def restore_block(self, stored: StoredBlock) -> None:
        """Take a block over from a checkpoint, before anybody uses the shard.

        Raises:
            CorruptError: it is another block, or of another optimizer.
        """
        block = self._owned(stored.number)
        place = block.place
        sizes = [(slot.size, slot.dtype) for slot in block.slots]
        if (
            (stored.parameter, stored.start, stored.stop) != (place.parameter, place.start, place.stop)
            or (stored.values.size, stored.values.dtype) != (block.values.size, block.values.dtype)
            or [(slot.size, slot.dtype) for slot in stored.slots] != sizes
        ):
            raise CorruptError(f"block {stored.number} is not the one of this job's model and optimizer")
        np.copyto(block.values, stored.values)
        for slot, saved in zip(block.slots, stored.slots, strict=True):
            np.copyto(slot, saved)
        block.rounds = BlockRounds(self._mode, stored.version)
        block.updates = stored.updates

    def restored(self, applied: AppliedBatches) -> None:
        """All blocks were taken over; this is what is applied to them."""
        if applied.block_count != self.block_count:
            raise CorruptError(f"{applied.block_count} blocks were restored, not {self.block_count}")
        self._applied = applied
        self._is_restored = True

    # waiting

    def announce_changes(self) -> None:
        """Wake everybody who waits for a version."""
        with self._change:
            self._change_count += 1
            self._change.notify_all()

    def wait_for_change(self, seen: int, timeout_s: float) -> int:
        """Return the change count, at once when it is not ``seen``, else after a change or the time."""
        with self._change:
            if self._change_count == seen and timeout_s > 0:
                self._change.wait(timeout_s)
            return self._change_count

    def require_plan(self, plan_hash: str) -> None:
        """Raise FencedError unless the sender means this shard's plan."""
        if self.plan_hash != plan_hash:
            raise FencedError("the shard plan is another one: read the job's declaration again")
