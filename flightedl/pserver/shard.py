"""The blocks that one pserver holds: their arrays, their rounds, and what is applied to them.

Rules:

* Neighbouring blocks with the same history are one *unit* (see ``units``), which has a lock. Under it: get all memory
  that a push may take, mark the batch as applied, ask the round what to do with it, do the arithmetic, close the round
  when it is full. So a block's values, slots, version and applied batches always belong together. What fails between
  the mark and the end is the end of this shard (see ``soundness``).
* Nothing is touched before a row was checked: a block of this shard, the right number of bytes, finite.
* A version that has been reached wakes all waiters once per message (``announce_changes``), not once per block.
* Values leave as they lie in memory, lent under the unit's lock: what a reader gets is one version, never a mixture.
* A view changes all blocks at once, under all their locks.

Lock order: units by rising number, then the applied batches, then the change counter. No lock is held while waiting or
sending.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from flightedl.domain.consistency.modes import Async, Mode, Sync
from flightedl.domain.consistency.rounds import BlockRounds
from flightedl.domain.consistency.rounds_values import (
    Accumulate,
    Apply,
    Arrival,
    Arrived,
    NotMember,
    Pull,
    Repeated,
    Stale,
)
from flightedl.domain.consistency.views import PserverView, ViewVerdict, view_of
from flightedl.domain.exactly_once.accumulation import having_bits
from flightedl.domain.exactly_once.applied import AppliedBatches
from flightedl.domain.exactly_once.batches import Batch
from flightedl.domain.model.optimizers import LAMB, Optimizer
from flightedl.domain.model.sharding import ShardPlan, runs_of
from flightedl.domain.pserver.first_values import FirstValues
from flightedl.errors import BusyError, CorruptError, FencedError, GradientError, MessageError
from flightedl.formats.shard_files import StoredBlock
from flightedl.kernels.compiled import Update, block_kernels, half_kernels, kernel_for
from flightedl.messages.control import ViewRequest
from flightedl.messages.parameters import Outcome, PushHeader
from flightedl.pserver.arena import Arena
from flightedl.pserver.snapshots import BlockCopies
from flightedl.pserver.soundness import Soundness
from flightedl.pserver.units import Unit, UnitBlock
from flightedl.wire.parts import Part
from flightedl.wire.rows import Piece, Row, Rows

Array = npt.NDArray[np.generic]
#: The batches of a push, each with the number of batches of its task.
Batches = Sequence[tuple[Batch, int]]


@dataclass(slots=True)
class Counts:
    """What happened to rows since the start."""

    messages: int = 0
    accepted: int = 0
    repeated: int = 0
    refused: int = 0


class Wanted(NamedTuple):
    """Neighbouring blocks whose values somebody waits for, at or above a version."""

    blocks: range
    min_version: int


class Pushed(NamedTuple):
    """What became of neighbouring rows: the answer, and what is still to come."""

    piece: Piece
    wanted: Wanted | None


_OUTCOMES: dict[type[Arrival], Outcome] = {
    Accumulate: Outcome.ACCEPTED,
    Apply: Outcome.ACCEPTED,
    Arrived: Outcome.ACCEPTED,
    Repeated: Outcome.ALREADY_APPLIED,
    Stale: Outcome.STALE,
    NotMember: Outcome.NOT_MEMBER,
}


_ANSWERED = frozenset({Outcome.ACCEPTED, Outcome.ALREADY_APPLIED})


class ShardState:
    """The blocks of one pserver. Thread-safe.

    Args:
        plan: Where every block lies.
        index: Of the pserver.
        optimizer: Of the model.
        mode: That it begins in.
        wire: "bfloat16" or "float16" where float32 elements travel as such.
        on_lost: Told why when the blocks do not belong together any more: ends the process.
    """

    def __init__(
        self,
        plan: ShardPlan,
        index: int,
        optimizer: Optimizer,
        mode: Mode,
        wire: str = "",
        on_lost: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.plan_hash = plan.hash
        self._soundness = Soundness(on_lost)
        self.counts = Counts()
        self._plan = plan
        self._index = index
        self._set_mode(mode)
        self._arena = Arena()
        #: In order; replaced, never changed, when one is split.
        self._units = self._build(plan, index, optimizer, mode, wire)
        self._structure = threading.Lock()
        self._locks = [unit.lock for unit in self._units]
        #: Block number -> its unit.
        self._unit_of = {number: unit for unit in self._units for number in unit.numbers}
        self._first_values = FirstValues()
        self._applied = AppliedBatches(len(self._unit_of))
        self._applied_lock = threading.Lock()
        self._view = PserverView(mode)
        #: The snapshot whose blocks are being copied; changed under all locks, read under any of them.
        self._copies: BlockCopies | None = None
        self._is_restored = False
        #: Block number -> (version, updates) of blocks taken over from a checkpoint.
        self._restored: dict[int, tuple[int, int]] = {}
        self._change = threading.Condition()
        self._change_count = 0
        #: Something has changed that others may wait for, and was not announced.
        self._has_news = False

    def _set_mode(self, mode: Mode) -> None:
        self._mode = mode
        self._is_mean = isinstance(mode, Sync) and mode.reduce == "mean"
        self._is_synchronous = isinstance(mode, Sync)
        self._is_deterministic = isinstance(mode, Sync) and mode.deterministic
        self._scales_by_staleness = isinstance(mode, Async) and mode.staleness_scaled

    def _build(self, plan: ShardPlan, index: int, optimizer: Optimizer, mode: Mode, wire: str) -> list[Unit]:
        if wire or any(spec.short_kind for spec in plan.parameters):
            half_kernels(wire)
        updates: dict[tuple[Optimizer, str], Update] = {}
        units: list[Unit] = []
        local = 0
        for run in runs_of(plan, index):
            for numbers in self._of_one_rule(plan, run, optimizer):
                spec = plan.parameters[plan.block(numbers.start).parameter]
                rule, dtype = optimizer.for_parameter(spec.name), spec.storage_dtype
                update = next((known for (r, d), known in updates.items() if (r, d) == (rule, dtype)), None)
                if update is None:
                    update = kernel_for(rule, dtype)
                    updates[rule, dtype] = update
                sizes = [plan.block(number).size for number in numbers]
                total = sum(sizes)
                units.append(
                    Unit(
                        numbers,
                        range(local, local + len(numbers)),
                        sizes,
                        self._arena.allocate(total, dtype),
                        [self._arena.allocate(total, dtype, slot.initial) for slot in rule.slots],
                        BlockRounds(mode),
                        update,
                        block_kernels(dtype),
                        self._arena,
                        threading.Lock(),
                        spec.short_kind or wire,
                    )
                )
                local += len(numbers)
        return units

    @staticmethod
    def _of_one_rule(plan: ShardPlan, run: range, optimizer: Optimizer) -> Iterator[range]:
        """The parts of a run whose blocks can be updated by one kernel call."""
        if isinstance(optimizer, LAMB):
            # Its norms are those of a block.
            yield from (range(number, number + 1) for number in run)
            return
        if not optimizer.overrides:
            yield run
            return
        rules = [optimizer.for_parameter(plan.parameters[plan.block(n).parameter].name) for n in run]
        start = 0
        for place in range(1, len(run) + 1):
            if place == len(run) or rules[place] != rules[start]:
                yield run[start:place]
                start = place

    # what it is

    @property
    def numbers(self) -> list[int]:
        """The blocks' numbers, rising."""
        return list(self._unit_of)

    @property
    def block_count(self) -> int:
        """Number of blocks."""
        return len(self._unit_of)

    @property
    def size_bytes_total(self) -> int:
        """Bytes of values, slots and accumulators."""
        return self._arena.size_bytes

    def blocks(self) -> list[UnitBlock]:
        """Every block with its state, as it lies in memory; for who knows that nobody pushes."""
        return [unit.block(self._plan.block(number)) for unit in self._units for number in unit.numbers]

    def version_range(self) -> tuple[int, int]:
        """Lowest and highest version."""
        versions = [unit.rounds.version for unit in self._units]
        return (min(versions), max(versions)) if versions else (0, 0)

    def highest_open_round(self) -> int:
        """What a member that joins now has to start at, or later."""
        return max((unit.rounds.position for unit in self._units), default=0)

    @contextlib.contextmanager
    def _locked(self, number: int) -> Iterator[Unit]:
        """The unit that has a block, with its lock held.

        Raises:
            MessageError: the block is not of this pserver.
        """
        unit = self._unit(number)
        with unit.lock:
            self._soundness.require()
            # It may have been split before the lock was taken; its parts share the lock.
            yield self._unit_of[number] if unit.is_split else unit

    def _unit(self, number: int) -> Unit:
        unit = self._unit_of.get(number)
        if unit is None:
            raise MessageError(f"block {number} does not lie on this pserver")
        return unit

    def _split(self, unit: Unit) -> None:
        """Give every block a unit of its own; the unit's lock is held."""
        if len(unit.numbers) == 1 or unit.is_split:
            return
        with self._soundness, self._structure:
            parts = unit.split()
            at = self._units.index(unit)
            self._units = [*self._units[:at], *parts, *self._units[at + 1 :]]
            self._unit_of.update((part.numbers.start, part) for part in parts)

    # first values

    def initialize(self, election: int, row: Row) -> None:
        """First values of a block; a newer election's replace an older one's.

        Raises:
            MessageError: not a block of this pserver, or of another size.
            GradientError: not finite.
        """
        unit = self._unit(row.block)
        place = self._plan.block(row.block)
        spec = self._plan.parameters[place.parameter]
        size_bytes = place.size * spec.seen_item_bytes
        if len(row.values) != size_bytes:
            raise MessageError(
                f"block {row.block} of {self._name(row.block)!r} has {size_bytes} bytes, not {len(row.values)}"
            )
        sent = unit.incoming(row.values) if spec.short_kind else row.array(unit.values.dtype)
        values = self._finite(unit, range(row.block, row.block + 1), sent)
        with self._locked(row.block) as unit:
            if unit.updates == 0 and not self._is_restored and self._first_values.may_take(row.block, election):
                unit.writable()[unit.part(row.block)] = values
                self._first_values.took(row.block, election)

    def initialized_count(self, election: int) -> int:
        """Blocks that have the first values of this election."""
        return self._first_values.count(election)

    # pushes

    def push(self, header: PushHeader, rows: Rows) -> list[Pushed]:
        """Take the rows of one message of a push, one after the other.

        Returns:
            What became of them; the same row again is answered, never applied again.

        Raises:
            MessageError: a foreign block, a wrong size, or a base version from the future. Rows before it were taken.
                A sum of several batches in another mode than async.
            GradientError: not finite; likewise.
        """
        batches = self._batches(header)
        found: list[Pushed] = []
        position = 0
        while position < len(rows):
            unit = self._unit(rows.blocks[position])
            stop = position + len(unit.numbers)
            if not _covers(unit, rows, position, stop):
                number = rows.blocks[position]
                if len(data := rows.bytes_of(position, position + 1)):
                    self._checked(unit, range(number, number + 1), data)
                with unit.lock:
                    self._split(unit)
            elif (
                pushed := self._push(header, batches, unit, rows.versions[position], rows.bytes_of(position, stop))
            ) is not None:
                found.append(pushed)
                position = stop
        return found

    def push_parts(self, header: PushHeader, parts: Sequence[Part]) -> list[Pushed]:
        """Likewise with the parts of one message of a step. A part is mostly a unit: then nothing is done per block."""
        batches = self._batches(header)
        if len(parts) > 1 and sum(len(part.blocks) for part in parts) > len(self._unit_of):
            raise MessageError("a message names more blocks than there are")
        found: list[Pushed] = []
        for part in parts:
            blocks, version, _, data = part
            unit = self._unit(blocks.start)
            pushed = None
            if blocks == unit.numbers and (len(data) == unit.offsets[-1] or not data):
                pushed = self._push(header, batches, unit, version, data)
            if pushed is not None:
                found.append(pushed)
            else:
                found.extend(self.push(header, self._rows_of(part)))
        return found

    def _rows_of(self, part: Part) -> Rows:
        """A part's blocks one by one. MessageError: a foreign block, or another number of bytes than theirs."""
        offsets = [0]
        for number in part.blocks:
            unit = self._unit(number)
            at = number - unit.numbers.start
            size_bytes = unit.offsets[at + 1] - unit.offsets[at] if part.data else 0
            offsets.append(offsets[-1] + size_bytes)
        if offsets[-1] != len(part.data):
            first = part.blocks[0]
            raise MessageError(
                f"{len(part.blocks)} blocks from block {first} of {self._name(first)!r} have {offsets[-1]} bytes, "
                f"not {len(part.data)}"
            )
        count = len(part.blocks)
        return Rows(list(part.blocks), [part.version] * count, [0] * count, offsets, part.data)

    def _batches(self, header: PushHeader) -> Batches:
        named = (header.identity, *header.further) if header.further else (header.identity,)
        if len(named) > 1 and not isinstance(self._mode, Async):
            raise MessageError("sums of several batches are taken in async mode only: push each batch for itself")
        return [(Batch(one.epoch, one.task, one.batch), one.batch_count) for one in named]

    def _push(
        self, header: PushHeader, batches: Batches, unit: Unit, base_version: int, data: memoryview
    ) -> Pushed | None:
        """All blocks of a unit; None: it was split meanwhile."""
        numbers = unit.numbers
        gradient = self._checked(unit, numbers, data) if len(data) else None
        with unit.lock:
            if unit.is_split:
                return None
            if not self._view.is_member(header.member, header.trainer, header.generation):
                self.counts.refused += len(numbers)
                return Pushed(Piece(numbers, unit.rounds.version, Outcome.NOT_MEMBER, None, unit.offsets), None)
            weight = 0.0 if gradient is None else header.weight if self._is_mean else 1.0
            kept = self._get_memory(unit, header.member, base_version, gradient)
            with self._soundness:
                is_new = self._mark(unit, batches)
                if is_new is None:
                    return None
                if isinstance(is_new, bytes):
                    return self._refuse_sum(unit, is_new)
                arrival = self._arrive(unit, header, batches, base_version, weight, is_new=is_new)
                if gradient is not None:
                    self._take(unit, batches[0][0], arrival, gradient if kept is None else kept, weight, header)
                self._close_rounds(unit)
                self._note_version(unit)
            if not self._is_synchronous:
                self._has_news = True
            outcome = _OUTCOMES[type(arrival)]
            if outcome == Outcome.ACCEPTED and not is_new:
                outcome = Outcome.ALREADY_APPLIED
            pushed = self._answer(unit, header, outcome, base_version)
        self._count(outcome, len(numbers))
        return pushed

    def _get_memory(self, unit: Unit, member: int, base_version: int, gradient: Array | None) -> Array | None:
        """Have all memory that a push may take, before it is marked; the unit's lock is held.

        Returns:
            The gradient, where it is to be kept until the round closes.

        Raises:
            BusyError: there is none.
        """
        self._soundness.require()
        try:
            if unit.rounds.may_update(member, base_version):
                self._copy_if_due(unit)
                unit.writable()
            if gradient is not None and self._is_synchronous:
                unit.have_accumulator()
                if self._is_deterministic:
                    return unit.copy_of(gradient)
        except MemoryError:
            raise BusyError(
                f"pserver {self._index} has no memory left for a gradient of {self._name(unit.numbers.start)!r}: "
                "give it more, or the job more pservers"
            ) from None
        return None

    def _answer(self, unit: Unit, header: PushHeader, outcome: Outcome, base_version: int) -> Pushed:
        """What became of a push to all blocks of a unit, with the values that follow it if they can leave."""
        numbers, wanted = unit.numbers, None
        if header.pull and outcome in _ANSWERED:
            min_version = self.version_after(base_version)
            if unit.rounds.pull(header.member, min_version) is Pull.READY:
                return Pushed(unit.piece(numbers, outcome, is_for_many=self._is_synchronous), None)
            wanted = Wanted(numbers, min_version)
        return Pushed(Piece(numbers, unit.rounds.version, outcome, None, unit.offsets), wanted)

    def _mark(self, unit: Unit, batches: Batches) -> bool | bytes | None:
        """Mark the batches as applied, if no block has any of them.

        Returns:
            False: all blocks have all. None: blocks differ, and the unit was split. Bytes: which ones all blocks have.
        """
        with self._applied_lock:
            if len(unit.local) == 1 and len(batches) == 1:
                batch, batch_count = batches[0]
                having = [0 if self._applied.mark(unit.local.start, batch, batch_count) else 1]
            else:
                having = self._applied.mark_together(unit.local, batches)
            if not any(having):
                if self._copies is not None:
                    for place in unit.local:
                        for batch, batch_count in batches:
                            self._copies.marked(place, batch, batch_count)
                return True
        if any(0 < count < len(unit.local) for count in having):
            self._split(unit)
            return None
        return False if all(having) else having_bits(map(bool, having))

    def _refuse_sum(self, unit: Unit, bits: bytes) -> Pushed:
        """Every block of the unit has some of a sum's batches: these bits."""
        count = len(unit.numbers)
        self.counts.refused += count
        offsets = list(range(0, (count + 1) * len(bits), len(bits)))
        values = np.frombuffer(bits * count, np.uint8)
        return Pushed(Piece(unit.numbers, unit.rounds.version, Outcome.PARTLY_APPLIED, values, offsets), None)

    def _arrive(
        self, unit: Unit, header: PushHeader, batches: Batches, base_version: int, weight: float, *, is_new: bool
    ) -> Arrival:
        """Let the marked batches arrive, or take their marks back."""
        keep = False
        try:
            arrival = unit.rounds.arrive(
                header.member,
                base_version,
                weight,
                already_applied=not is_new,
                batch=batches[0][0],
                batch_count=batches[0][1],
                step=header.step,
            )
            keep = not isinstance(arrival, Stale | NotMember)
        finally:
            if is_new and not keep:
                with self._applied_lock:
                    for place in unit.local:
                        for batch, batch_count in batches:
                            self._applied.unmark(place, batch, batch_count)
        return arrival

    def _take(
        self, unit: Unit, batch: Batch, arrival: Arrival, gradient: Array, weight: float, header: PushHeader
    ) -> None:
        """Do with a gradient what its arrival says."""
        if isinstance(arrival, Accumulate):
            if self._is_deterministic:
                unit.keep(batch, gradient, weight)
            else:
                unit.accumulate(gradient, weight, is_first=arrival.is_first)
        elif isinstance(arrival, Apply):
            rate_factor = 1.0 / (1.0 + arrival.staleness) if self._scales_by_staleness else 1.0
            unit.run_optimizer(gradient, 1.0, rate_factor, is_sent_next=header.pull)

    def _close_rounds(self, unit: Unit) -> None:
        """Close what is full; the unit's lock is held."""
        while unit.rounds.closable():
            self._copy_if_due(unit)
            closing = unit.rounds.close()
            if closing.has_update:
                unit.add_kept()
                assert unit.accumulator is not None, "a round has contributions but no sum"
                scale = 1.0 / closing.total_weight if self._is_mean else 1.0
                unit.run_optimizer(unit.accumulator, scale, is_sent_next=True)
            self._note_version(unit)
            self._has_news = True

    def _copy_if_due(self, unit: Unit) -> None:
        """Let a snapshot copy the unit's blocks before they change; the unit's lock is held."""
        # They may be complete, and dropped by the thread that writes them, at any moment.
        copies = self._copies
        if copies is not None:
            try:
                for number in unit.numbers:
                    copies.look_at(unit.block(self._plan.block(number)))
            except MemoryError:
                # Training goes on without them.
                self.drop_copies(copies)
                copies.give_up("there is no memory for the copies of its blocks")

    def _note_version(self, unit: Unit) -> None:
        """Tell a snapshot that the unit's blocks may be due from now on; the unit's lock is held."""
        copies = self._copies
        if copies is not None:
            for local in unit.local:
                copies.note_version(local, unit.rounds.version)

    def _checked(self, unit: Unit, numbers: range, data: memoryview) -> Array:
        """The elements of neighbouring blocks of a unit."""
        first = unit.numbers.start
        start, stop = (unit.offsets[number - first] for number in (numbers.start, numbers.stop))
        if len(data) != stop - start:
            raise MessageError(
                f"block {numbers.start} of {self._name(numbers.start)!r} has {stop - start} bytes, not {len(data)}"
            )
        return self._finite(unit, numbers, unit.incoming(data))

    def _finite(self, unit: Unit, numbers: range, array: Array) -> Array:
        if not unit.kernels.all_finite(array):
            first = unit.numbers.start
            wrong = int(np.flatnonzero(~np.isfinite(array))[0])
            number = next(n for n in numbers if wrong < unit.bounds[n + 1 - first] - unit.bounds[numbers.start - first])
            raise GradientError(
                f"{self._name(number)!r} has NaN or infinity in block {number}: nothing of it was applied"
            )
        return array

    def _name(self, number: int) -> str:
        return self._plan.parameters[self._plan.block(number).parameter].name

    def _count(self, outcome: Outcome, count: int) -> None:
        if outcome == Outcome.ACCEPTED:
            self.counts.accepted += count
        elif outcome == Outcome.ALREADY_APPLIED:
            self.counts.repeated += count
        else:
            self.counts.refused += count

    # pulls

    def version_after(self, base_version: int) -> int:
        """The version that the sender of a row of this base waits for."""
        return base_version + 1 if self._is_synchronous else 0

    def wanted(self, blocks: Iterable[int], min_versions: Sequence[int]) -> list[Wanted]:
        """The blocks, neighbours of one unit and one version together.

        Args:
            blocks: Numbers; rising ones are found together.
            min_versions: One for each block, or a single one for all.

        Raises:
            MessageError: a foreign block.
        """
        found: list[Wanted] = []
        last: Unit | None = None
        for place, number in enumerate(blocks):
            unit = self._unit(number)
            version = min_versions[place if len(min_versions) > 1 else 0]
            if unit is last and found[-1].blocks.stop == number and found[-1].min_version == version:
                found[-1] = Wanted(range(found[-1].blocks.start, number + 1), version)
            else:
                found.append(Wanted(range(number, number + 1), version))
            last = unit
        return found

    def read(self, wanted: Wanted, member: int) -> tuple[list[Piece], list[Wanted]]:
        """What is there of the wanted blocks, and what is not yet there.

        Outcome NOT_MEMBER: the membership is gone, and there are no values.
        """
        pieces: list[Piece] = []
        rest: list[Wanted] = []
        number, end, version = wanted.blocks.start, wanted.blocks.stop, wanted.min_version
        while number < end:
            with self._locked(number) as unit:
                numbers = range(number, min(unit.numbers.stop, end))
                state = unit.rounds.pull(member, version)
                if state is Pull.WAIT:
                    rest.append(Wanted(numbers, version))
                elif state is Pull.NOT_MEMBER:
                    pieces.append(Piece(numbers, unit.rounds.version, Outcome.NOT_MEMBER, None, ()))
                else:
                    pieces.append(unit.piece(numbers, Outcome.NONE, is_for_many=self._is_synchronous))
            number = numbers.stop
        return pieces, rest

    # views

    @property
    def members(self) -> list[int]:
        """Whom the blocks know."""
        return [member.member_id for member in self._view.members]

    def set_members(self, request: ViewRequest) -> ViewVerdict:
        """Take over a view, in all blocks at once."""
        view = view_of(request)
        with self._all_locks(), self._soundness:
            if (first_mode := self._view.begins_in(view)) is not None:
                self._begin_in(first_mode)
            verdict = self._view.consider(
                view,
                lambda first_round: all(unit.rounds.can_admit(first_round) for unit in self._units),
                lambda at_round: all(unit.rounds.can_switch(at_round) for unit in self._units),
            )
            admit = {member.member_id: member.first_round for member in verdict.admit}
            if verdict.switch is not None:
                self._switch(verdict.switch, verdict.switch_round, verdict.remove)
                self._change_members(admit, ())
            elif admit or verdict.remove:
                self._change_members(admit, verdict.remove)
            self._has_news = True
        return verdict

    def _change_members(self, admit: Mapping[int, int], remove: Sequence[int]) -> None:
        for unit in self._units:
            unit.rounds.change(admit, remove)
            self._close_rounds(unit)

    def _begin_in(self, mode: Mode) -> None:
        """Nobody has been a member here: the blocks begin in this mode."""
        self._set_mode(mode)
        for unit in self._units:
            unit.rounds = BlockRounds(mode, unit.rounds.version)

    def _switch(self, mode: Mode, at_round: int, remove: Sequence[int]) -> None:
        """Close under the old mode what is open, then begin all blocks at one round under the new one."""
        self._change_members({}, remove)
        self._set_mode(mode)
        for unit in self._units:
            unit.rounds.switch(mode, at_round)
            self._close_rounds(unit)
            self._note_version(unit)

    def highest_version(self) -> int:
        """The lowest round at which the mode can change, once there are no members."""
        return max((unit.rounds.version for unit in self._units), default=0)

    @contextlib.contextmanager
    def _all_locks(self) -> Iterator[None]:
        with contextlib.ExitStack() as held:
            for lock in self._locks:
                held.enter_context(lock)
            self._soundness.require()
            yield

    # checkpoints

    @property
    def slot_count(self) -> int:
        """The most slots that any block has."""
        return max((len(unit.slots) for unit in self._units), default=0)

    def begin_copies(self, begin: Callable[[Sequence[int], int, threading.Lock], BlockCopies | None]) -> None:
        """Let ``begin`` decide, under all locks, whether blocks are to be copied from now on."""
        with self._all_locks():
            versions = [unit.rounds.version for unit in self._units for _ in unit.numbers]
            copies = begin(versions, self.highest_open_round(), self._applied_lock)
            if copies is not None:
                self._copies = copies

    def copy_due_blocks(self, copies: BlockCopies) -> None:
        """Copy every block that is due now, unless other copies have taken the place of these."""
        self._soundness.require()
        numbers = self.numbers
        while (local := copies.next_due()) is not None:
            with self._locked(numbers[local]) as unit:
                if self._copies is not copies:
                    return
                copies.look_at(unit.block(self._plan.block(numbers[local])), lead=0)

    def visit(self, look: Callable[[UnitBlock], None]) -> None:
        """Show every block, each under its lock."""
        for number in self.numbers:
            with self._locked(number) as unit:
                look(unit.block(self._plan.block(number)))

    def end_copies(self, copies: BlockCopies) -> AppliedBatches | None:
        """What is applied to complete copies; None: newer ones took their place."""
        with self._applied_lock:
            if self._copies is not copies or self._soundness.is_lost:
                return None
            self._copies = None
            return copies.take_applied(self._applied)

    def drop_copies(self, copies: BlockCopies) -> None:
        """Copy nothing more for these, unless newer ones took their place."""
        with self._applied_lock:
            if self._copies is copies:
                self._copies = None

    def seal(self, epochs: Iterable[tuple[int, int]]) -> None:
        """(epoch, tasks) of epochs that get no more tasks, see ``AppliedBatches.seal``.

        Raises:
            MessageError: the epoch has more tasks than that.
        """
        with self._applied_lock:
            for epoch, task_count in epochs:
                self._applied.seal(epoch, task_count)

    def applied(self) -> AppliedBatches:
        """What is applied now: a copy."""
        with self._applied_lock:
            self._soundness.require()
            return self._applied.copy()

    def restore_block(self, stored: StoredBlock) -> None:
        """Take a block over from a checkpoint, before anybody uses the shard.

        Raises:
            CorruptError: it is another block, or of another optimizer.
        """
        unit = self._unit(stored.number)
        place, at = self._plan.block(stored.number), unit.part(stored.number)
        if (
            (stored.parameter, stored.start, stored.stop) != (place.parameter, place.start, place.stop)
            or (stored.values.size, stored.values.dtype) != (place.size, unit.values.dtype)
            or [(slot.size, slot.dtype) for slot in stored.slots] != [(place.size, slot.dtype) for slot in unit.slots]
        ):
            raise CorruptError(f"block {stored.number} is not the one of this job's model and optimizer")
        np.copyto(unit.values[at], stored.values)
        for slot, saved in zip(unit.slots, stored.slots, strict=True):
            np.copyto(slot[at], saved)
        self._restored[stored.number] = (stored.version, stored.updates)

    def restored(self, applied: AppliedBatches) -> None:
        """All blocks were taken over; this is what is applied to them."""
        if applied.block_count != self.block_count or len(self._restored) != self.block_count:
            raise CorruptError(f"{applied.block_count} blocks were restored, not {self.block_count}")
        for unit in self._units:
            if len({self._restored[number] for number in unit.numbers}) > 1:
                with unit.lock:
                    self._split(unit)
        for unit in self._units:
            version, unit.updates = self._restored[unit.numbers.start]
            unit.rounds = BlockRounds(self._mode, version)
        self._applied = applied
        self._is_restored = True

    # waiting

    def announce_changes(self) -> None:
        """Wake everybody who waits for a version, if there is news for them."""
        if not self._has_news:
            return
        # Before they are woken, so that whatever changes from here on is announced anew.
        self._has_news = False
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


def _covers(unit: Unit, rows: Rows, start: int, stop: int) -> bool:
    """Whether these rows are all blocks of the unit, at one version, all with values or all without."""
    if stop - start == 1:
        return True
    versions = rows.versions[start:stop]
    if rows.blocks[start:stop] != unit.number_list or versions.count(versions[0]) != len(versions):
        return False
    offsets = rows.offsets_of(start, stop)
    return offsets == unit.offsets or offsets[-1] == 0
