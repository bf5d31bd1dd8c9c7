"""Blocks of a simulated pserver: the product's protocol, a ledger, and simulated time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

from flightedl.domain.checkpoint.changes import increment_on
from flightedl.domain.checkpoint.restoring import FilePart, applied_of
from flightedl.domain.checkpoint.snapshot import PserverSnapshots
from flightedl.domain.consistency.modes import Mode, Sync
from flightedl.domain.consistency.rounds_values import Pull
from flightedl.domain.exactly_once.accumulation import missing_places
from flightedl.domain.exactly_once.applied import AppliedBatches
from flightedl.domain.exactly_once.batches import Batch
from flightedl.domain.model.sharding import ShardPlan
from flightedl.domain.pserver.block_values import (
    ANSWERED,
    AddGradient,
    BlocksDue,
    CopyBlocks,
    Effect,
    EmptyRound,
    Pushed,
    ReleasedBlocks,
    Split,
    Update,
)
from flightedl.domain.pserver.block_values import Push as BlockPush
from flightedl.domain.pserver.blocks import BlockProtocol, around
from flightedl.messages.control import OrderNumber, SnapshotReply, SnapshotRequest, ViewReply, ViewRequest
from flightedl.messages.parameters import Outcome
from flightedl.recording.recorded import recorded
from flightedl.recording.writer import Recorder
from tests.simulation.cores.job import Gradient, JobShape
from tests.simulation.cores.ledger import Block, BucketSpan, LedgerSpan
from tests.simulation.cores.rows import Moment, SpanRows, StoredTable
from tests.simulation.cores.store import UNCHANGED, StoredShard
from tests.simulation.cores.world import Process, Reply, Violation

_PULL_S = 1.0
#: Maximum time between the copies of two blocks.
_COPY_S = 0.03


class MovedSpan(NamedTuple):
    """Content of adjacent blocks that move to another pserver."""

    released: ReleasedBlocks
    blocks: Sequence[Block]
    #: Rows of buckets; None for other blocks.
    rows: SpanRows | None = None


@dataclass(slots=True, eq=False)
class _Cut:
    """Copies of the blocks for the newest cut of its kind."""

    number: int = -1
    #: Order of the cut, and the file or copy whose changes it contains; empty if it contains everything.
    command: SnapshotRequest | None = None
    after: str = ""
    is_copying: bool = False
    #: Numbers of the blocks that remain to be copied.
    due: set[int] = field(default_factory=set)
    #: Block -> (version, updates, values, slot, history of rows).
    copies: dict[int, tuple[int, int, tuple[int, ...], int, tuple[Moment, ...]]] = field(default_factory=dict)
    #: First block of a span -> its rows.
    tables: dict[int, StoredTable] = field(default_factory=dict)


class Shard:
    """Carries out the protocol's decisions, copies blocks for snapshots, and makes pulls wait.

    Args:
        process: The pserver.
        plan: The job's plan.
        index: The pserver's index.
        shape: The job's shape.
        mode: The first mode of the blocks.
        publish: Writes a snapshot: called with the order, the file's name and the content.
    """

    def __init__(
        self,
        process: Process,
        plan: ShardPlan,
        index: int,
        shape: JobShape,
        mode: Mode,
        publish: Callable[[OrderNumber, str, StoredShard], None],
        recorder: Recorder | None,
        pserver: tuple[int, int],
    ) -> None:
        self._process = process
        self._shape = shape
        self._publish = publish
        #: Called for each gradient that is added to a sum, with its member and its round.
        self.contributed: Callable[[int, int], None] = lambda _member, _round: None
        #: By rising number.
        self.blocks: list[Block] = []
        buckets = shape.buckets(plan, index)
        about = {"pserver": pserver[0], "generation": pserver[1]}
        extents = shape.extents(plan, index)
        self.protocol = recorded(recorder, about, BlockProtocol, extents, mode)
        for numbers, is_of_buckets in extents:
            blocks = [Block(number, [0] * shape.element_count) for number in numbers]
            kind = BucketSpan if is_of_buckets else LedgerSpan
            kind(numbers, self.protocol, blocks, shape)
            self.blocks += blocks
        self._block_of = {block.number: block for block in self.blocks}
        #: Adjacent blocks that accept no pushes after the end of their open round, because they leave.
        self._freezing: list[range] = []
        #: Called with the numbers of blocks that are about to be updated.
        self.updated: Callable[[range], None] = lambda _numbers: None
        #: Member for which the blocks wait -> its first round.
        self._first_rounds: dict[int, int] = {}
        self._newest_view = (0, 0)
        self.snapshots = recorded(recorder, {}, PserverSnapshots)
        #: Random generator that decides when blocks are copied. It is separate, so that its draws do not affect others.
        self._copying = Random(f"{process.world.seed} {process.name}")
        #: Copies of the blocks for a checkpoint, and for a standby.
        self._for_file, self._for_standby = _Cut(), _Cut()
        self._copied: Callable[[StoredShard], None] = lambda _: None
        self._waiting: list[tuple[int, Sequence[tuple[int, int]], Reply, float]] = []
        if later := buckets[1:]:
            # Split the buckets as if files with different histories contained them, so that cuts copy the parts
            # separately.
            at = self._copying.choice(later)
            self._split(self.protocol.split(buckets.start, [range(buckets.start, at), range(at, buckets.stop)]))

    def _split(self, split: Split) -> None:
        """Split the ledger in the same way as the protocol has split its span."""
        if len(split.into) > 1:
            self._span(split.span).parts(split.into)

    def _bucket_spans(self) -> list[BucketSpan]:
        spans = dict.fromkeys(block.span for block in self.blocks)
        return [span for span in spans if isinstance(span, BucketSpan)]

    @property
    def newest_master(self) -> int:
        """Generation of the master that sent the view."""
        return self._newest_view[0]

    def _span(self, number: int) -> LedgerSpan:
        return self._block_of[number].span

    # initial values, and values from a checkpoint

    def initialize(self, block: Block, election: int, model: tuple[int, int]) -> None:
        """Set a block's first values."""
        if self.protocol.initialize(block.number, election):
            block.model = model

    def restore(self, found: list[tuple[FilePart, StoredShard]]) -> None:
        """Load the blocks from files."""
        sets = {part.file.name: AppliedBatches.decode(shard.applied, shard.blocks) for part, shard in found}
        self.fill(applied_of([part for part, _ in found], sets), [(part.blocks, shard) for part, shard in found])

    def fill(self, applied: AppliedBatches, found: Sequence[tuple[Sequence[int], StoredShard]]) -> None:
        """Set the content of all blocks. ``found`` has the numbers of blocks, and the content in which they are."""
        restored: dict[int, tuple[int, int]] = {}
        for numbers, shard in found:
            for number in numbers:
                block, place = self._block_of[number], shard.blocks.index(number)
                block.values, block.slot, block.model = list(shard.values[place]), shard.slots[place], shard.model
                block.updates, block.updated_to = shard.updates[place], shard.versions[place]
                block.history = list(shard.histories[place]) if shard.histories else []
                restored[number] = (shard.versions[place], block.updates)
        for split in self.protocol.restore(applied, restored):
            self._split(split)
        for span in self._bucket_spans():
            span.rows.restore([shard.chain for _, shard in found])

    def require_sound_rows(self) -> None:
        """Raise Violation unless all rows are correct."""
        for span in self._bucket_spans():
            span.require_sound(self._process.name)

    # decisions
    def apply_view(self, request: ViewRequest) -> ViewReply:
        """Accept a master's view."""
        mode = self.protocol.mode
        taken = self.protocol.apply_view(request)
        for member in taken.verdict.remove:
            self._first_rounds.pop(member, None)
        self._first_rounds.update((member.member, member.first_round) for member in taken.verdict.admit)
        number = (request.master_generation, request.serial)
        if not taken.reply.outdated and number < self._newest_view:
            raise Violation(f"{self._process.name} took view {number} after {self._newest_view}")
        self._newest_view = max(number, self._newest_view)
        for first, effects in taken.effects:
            self._change(self._span(first), effects, mode)
        # Rounds without expected members are skipped.
        at_round = taken.verdict.switch_round
        first = min((member.first_round for member in taken.verdict.admit), default=at_round)
        if taken.verdict.switch is not None and {block.rounds.version for block in self.blocks} - {at_round, first}:
            raise Violation(f"{self._process.name} does not begin {taken.verdict.switch} at {at_round} in all blocks")
        return taken.reply

    def _change(
        self, span: LedgerSpan, effects: Sequence[Effect], mode: Mode, gradients: Sequence[Gradient] = (), base: int = 0
    ) -> None:
        """Carry out effects decided in ``mode``. ``gradients`` of version ``base`` were pushed to each block."""
        for effect in effects:
            match effect:
                case AddGradient():
                    span.add(effect, gradients)
                case Update():
                    self.updated(span.numbers)
                    span.update(effect, mode, gradients, base)
                case CopyBlocks():
                    self._copy(effect)
                case BlocksDue(number, numbers):
                    self._cut_of(number).due.update(numbers)
                    self._go_on_copying(self._cut_of(number))
            if isinstance(effect, EmptyRound) or (isinstance(effect, Update) and effect.is_of_round):
                span.round_over(effect, self._first_rounds, mode.backup if isinstance(mode, Sync) else 0)

    def _push_span(self, span: LedgerSpan, push: BlockPush, base: int, gradients: Sequence[Gradient]) -> Pushed | None:
        """Push to all blocks of a span; arrivals have no gradient. Return None if the span was split instead."""
        first, has_gradient, mode = span.numbers.start, bool(gradients[0]), self.protocol.mode
        for copy in self.protocol.prepare(first, push, base, has_gradient=has_gradient).copies:
            self._copy(copy)
        before = self.protocol.version(first)
        pushed = self.protocol.push(first, push, base, has_gradient=has_gradient)
        if isinstance(pushed, Split):
            self._split(pushed)
            return None
        has_refused_sum = pushed.outcome is Outcome.PARTLY_APPLIED and isinstance(mode, Sync)
        if base == before and (pushed.outcome in ANSWERED or has_refused_sum):
            span.arrived.add(push.member)
        self._change(span, pushed.effects, mode, gradients, base)
        if isinstance(mode, Sync) and not mode.backup and any(isinstance(e, AddGradient) for e in pushed.effects):
            self.contributed(push.member, before)
        return pushed

    # moves

    def freeze(self, numbers: range) -> bool:
        """Accept no more pushes to adjacent blocks after the end of their open round. Return True if it has ended."""
        if numbers not in self._freezing:
            self._freezing.append(numbers)
        return self.protocol.is_at_edge(numbers)

    def thaw(self, numbers: range) -> None:
        """Undo ``freeze`` of adjacent blocks if the first of these blocks is in ``numbers``."""
        self._freezing = [other for other in self._freezing if other.start not in numbers]

    def _is_frozen(self, span: LedgerSpan) -> bool:
        numbers = span.numbers
        is_freezing = any(numbers.start < other.stop and other.start < numbers.stop for other in self._freezing)
        return is_freezing and self.protocol.is_at_edge(numbers)

    def moved(self, numbers: range) -> list[MovedSpan]:
        """Return the content of frozen blocks."""
        content, number = list[MovedSpan](), numbers.start
        while number < numbers.stop:
            part = range(number, min(self._span(number).numbers.stop, numbers.stop))
            blocks, span = [self._block_of[each].copy() for each in part], self._span(number)
            rows = span.rows.part(part) if isinstance(span, BucketSpan) else None
            content.append(MovedSpan(self.protocol.state_of(part), blocks, rows))
            number = part.stop
        return content

    def adopt(self, content: MovedSpan) -> None:
        """Add blocks that have moved to this pserver."""
        if (unmovable := self.protocol.adopt(content.released)) is not None:
            raise Violation(f"{self._process.name} cannot adopt blocks that it has acknowledged: {unmovable}")
        blocks, numbers = [block.copy() for block in content.blocks], content.released.numbers
        if content.rows is None:
            LedgerSpan(numbers, self.protocol, blocks, self._shape)
        else:
            BucketSpan(numbers, self.protocol, blocks, self._shape).rows = content.rows.part(numbers)
        self._set_blocks([*self.blocks, *blocks])

    def drop(self, numbers: range) -> None:
        """Remove adjacent frozen blocks, which another pserver owns now."""
        while numbers:
            some = range(numbers.start, min(self._span(numbers.start).numbers.stop, numbers.stop))
            released = self.protocol.release(some)
            if isinstance(released, Split):
                self._split(released)
            elif isinstance(released, ReleasedBlocks):
                self._set_blocks([block for block in self.blocks if block.number not in some])
                numbers = range(some.stop, numbers.stop)
            else:
                raise Violation(f"{self._process.name} cannot release frozen blocks: {released}")

    def _set_blocks(self, blocks: Iterable[Block]) -> None:
        self.blocks = sorted(blocks, key=lambda block: block.number)
        self._block_of = {block.number: block for block in self.blocks}

    # snapshots

    def take_order(self, order: SnapshotRequest) -> SnapshotReply:
        """Begin a snapshot if the order is newer than all earlier ones. Return the newest order's progress."""
        protocol = self.protocol
        if self.snapshots.take(order, list(protocol.versions().values()), protocol.highest_open_round()):
            spans = self._bucket_spans()
            knows = all(span.rows.changes.knows(order.after) for span in spans) if spans else False
            after = increment_on(order.after, lambda _: knows, is_base=order.is_base)
            self._begin_cut(self._for_file, order, after)
        progress = self.snapshots.progress
        assert progress is not None
        return progress

    def begin_copy(self, order: SnapshotRequest, *, is_increment: bool, done: Callable[[StoredShard], None]) -> None:
        """Begin a copy for a standby, which replaces the previous one. ``done`` is called when it is complete."""
        self._copied = done
        self._begin_cut(self._for_standby, order, "the previous copy" if is_increment else "")

    def knows_changed_rows(self) -> bool:
        """True if it is known which rows have changed since the newest copy for a standby."""
        return all(span.rows.uncopied is not None for span in self._bucket_spans())

    def drop_copy(self) -> None:
        """Abandon the copy for a standby, if it is not complete."""
        self._for_standby.due.clear()
        self.protocol.drop_cut(self._for_standby.number)

    def _begin_cut(self, cut: _Cut, order: SnapshotRequest, after: str) -> None:
        self.protocol.drop_cut(cut.number)
        cut.number, due = self.protocol.begin_cut(order.round)
        cut.copies, cut.due, cut.tables, cut.command, cut.after = {}, set(due), {}, order, after
        self._go_on_copying(cut)
        if not self.blocks:
            number = cut.number
            self._process.later(0.0, lambda: self._save(cut, number, order))

    def _cut_of(self, number: int) -> _Cut:
        return self._for_file if self._for_file.number == number else self._for_standby

    def _go_on_copying(self, cut: _Cut) -> None:
        if cut.due and not cut.is_copying:
            cut.is_copying = True
            self._process.later(_COPY_S * self._copying.random(), lambda: self._copy_next(cut))

    def _copy_next(self, cut: _Cut) -> None:
        """Copy one of the due blocks. A push to a block that is still due copies the block first."""
        cut.is_copying = False
        if cut.due:
            number = self._copying.choice(sorted(cut.due))
            copy = self.protocol.copy(cut.number, number)
            if copy is None:
                raise Violation(f"{self._process.name} must copy block {number}, and may not")
            self._copy(copy)
            self._go_on_copying(cut)

    def _copy(self, copy: CopyBlocks) -> None:
        cut = self._cut_of(copy.cut)
        command = cut.command
        assert command is not None, "blocks are copied for a snapshot"
        span = self._span(copy.numbers[0])
        changed = None
        if isinstance(span, BucketSpan) and cut is self._for_standby:
            cut.tables[span.numbers.start] = span.rows.copied(copy.version, copy.updates, is_increment=bool(cut.after))
        elif isinstance(span, BucketSpan):
            changed, cut.tables[span.numbers.start] = span.cut(command, copy, is_increment=bool(cut.after))
            if cut.after and changed is None:
                raise Violation(f"{self._process.name} has forgotten the changes in {span.numbers}")
        wanted = changed.elements if cut.after and changed is not None else None
        for number in copy.numbers:
            block = self._block_of[number]
            if block.updates != copy.updates or block.updated_to > copy.version:
                made = (block.updates, block.updated_to)
                raise Violation(f"block {block.number} is copied as {copy}, but has (updates, version) {made}")
            values = tuple(
                value if wanted is None or (block.number, element) in wanted else UNCHANGED
                for element, value in enumerate(block.values)
            )
            cut.copies[number] = (copy.version, copy.updates, values, block.slot, tuple(block.history))
            cut.due.discard(number)
        if len(cut.copies) == len(self.blocks):
            self._process.later(_COPY_S * self._copying.random(), lambda: self._save(cut, copy.cut, command))

    def _save(self, cut: _Cut, number: int, command: SnapshotRequest) -> None:
        """Write the file, or send the copy, once all blocks have been copied."""
        applied = self.protocol.end_cut(number)
        if applied is None or (cut is self._for_file and not self.snapshots.taken(command.order)):
            return
        copies = [cut.copies[block.number] for block in self.blocks]
        shard = StoredShard(
            blocks=tuple(block.number for block in self.blocks),
            versions=tuple(copy[0] for copy in copies),
            updates=tuple(copy[1] for copy in copies),
            values=tuple(copy[2] for copy in copies),
            slots=tuple(copy[3] for copy in copies),
            histories=tuple(copy[4] for copy in copies),
            tables=tuple(cut.tables[first] for first in sorted(cut.tables)),
            applied=applied.encode(),
            model=next((block.model for block in self.blocks), None),
            after=cut.after,
        )
        if cut is self._for_standby:
            self._copied(shard)
        else:
            self._publish(command.order, command.name, shard)

    # trainers

    def push(
        self,
        trainer: tuple[str, int, int],
        batches: Iterable[tuple[Batch, int]],
        rows: Sequence[tuple[int, int, Gradient]],
        weight: float,
        step: int,
    ) -> tuple[tuple[tuple[int, Outcome, Sequence[int]], ...], bool]:
        """Apply the rows of a push from a trainer, given as (name, generation, member).

        Each row is (block, base version, gradient). The gradient of an arrival is empty.

        Returns:
            For each row, (block, outcome, places of the batches that the block lacks of a rejected sum); and True if
            the rows end early at a block that is frozen or on another pserver.
        """
        name, generation, member = trainer
        named = list(batches)
        outcomes: list[tuple[int, Outcome, Sequence[int]]] = []
        while len(outcomes) < len(rows):
            number, base, gradient = rows[len(outcomes)]
            if number not in self._block_of or self._is_frozen(span := self._span(number)):
                return tuple(outcomes), True
            alike = [base, bool(gradient)]
            stop = number + 1
            rest = rows[len(outcomes) + 1 : len(outcomes) + span.numbers.stop - number]
            for other, other_base, other_gradient in rest:
                if other != stop or [other_base, bool(other_gradient)] != alike:
                    break
                stop += 1
            if range(number, stop) != span.numbers:
                if isinstance(span, BucketSpan):
                    # The sender does not know yet that buckets have arrived here.
                    return tuple(outcomes), True
                self._split(self.protocol.split(span.numbers.start, around(span.numbers, range(number, stop))))
                continue
            push = BlockPush(name, generation, member, named, weight, step)
            if (pushed := self._push_span(span, push, base, [gradient, *(row[2] for row in rest)])) is not None:
                lacking = missing_places(pushed.having, len(named)) if pushed.having else ()
                outcomes += [(number, pushed.outcome, lacking) for number in span.numbers]
        return tuple(outcomes), False

    def pull(self, member: int, wanted: Sequence[tuple[int, int]], reply: Reply) -> None:
        """Reply when all blocks have reached the wanted version, or, after the time limit, with those that have."""
        if not self._answer(member, wanted, reply, is_last=False):
            self._waiting.append((member, wanted, reply, self._process.world.now + _PULL_S))
            self._process.later(_PULL_S, self.serve_waiting)

    def _answer(self, member: int, wanted: Sequence[tuple[int, int]], reply: Reply, *, is_last: bool) -> bool:
        ready = []
        for number, version in wanted:
            if number not in self._block_of:
                reply(("moved",))
                return True
            state = self.protocol.pull(number, member, version)
            if state is Pull.NOT_MEMBER:
                reply(("not member",))
                return True
            if state is Pull.READY:
                ready.append((number, self.protocol.version(number)))
        if len(ready) < len(wanted) and not is_last:
            return False
        reply(("pulled", tuple(ready)))
        return True

    def serve_waiting(self) -> None:
        """Answer waiting pulls after a change."""
        waiting, self._waiting = self._waiting, []
        for member, wanted, reply, deadline in waiting:
            if not self._answer(member, wanted, reply, is_last=self._process.world.now >= deadline - 1e-9):
                self._waiting.append((member, wanted, reply, deadline))
