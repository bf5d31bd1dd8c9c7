"""The protocol of a pserver's blocks: what pushes, pulls, views and snapshots do to them.

The blocks lie in *spans*, neighbours with the same history. While every push covers a span wholly, as training does, it
is decided once for all of its blocks. A push that covers only some of them, or finds that they differ, splits the span,
for good, into spans whose blocks are alike; nothing is lost by that but speed.

Values go in and values come out: a span is named by its first block, a cut by its number. The arrays lie with the
caller, in the same spans: it carries out each ``Split`` before it asks anything else about these blocks.

**A push** of one span:

1. ``prepare`` returns what has to be done before: blocks that a cut still has to copy are copied before they change,
   and all memory is got. What may fail fails here, and nothing has happened. Unless the mode is
   synchronous or a cut is under way, a push needs nothing but what an update takes.
2. ``push`` decides. A stranger is refused. The batches are marked as applied if the blocks have none of them; if the
   blocks have all, their sender only arrives; if they have some of a sum's, nothing is taken. The rounds say what
   becomes of a batch that is new; where they refuse it, its marks are taken back. What is full closes.
3. The caller carries out its effects, in their order.

All of it happens under one hold of the span's lock: values, versions and applied batches always belong together.

**A cut** copies each block once, as it was when its turn came: at once, or when the round of the checkpoint opens. A
block whose turn has come may be copied at any time until it changes, and is copied then at the latest. Several cuts may
be under way; none knows of the others, and a block that is about to change is copied for each that still lacks it.

**Blocks move** between pservers at the edge of a round, while no cut is under way: ``release`` takes them out with all
that the protocol knows of them, and ``adopt`` puts them in where the same view is known.

**Locks** are the caller's. It holds the lock of a span around each call about it *and* around its effects; the locks of
all spans around ``take_view``, ``begin_cut``, ``release`` and ``adopt``. Calls that change something also need one lock
that all spans share, only while they decide: ``prepare``, ``push``, ``split``, ``initialize``, the views, the cuts, the
moves, the applied batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from msgspec.structs import replace

from flightedl.domain.checkpoint.snapshot import SnapshotCut
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
from flightedl.domain.consistency.views import PserverView, ViewVerdict
from flightedl.domain.exactly_once.accumulation import having_bits
from flightedl.domain.exactly_once.applied import AppliedBatches
from flightedl.domain.pserver.block_values import (
    ANSWERED,
    AddGradient,
    Batches,
    BlocksDue,
    CopyBlocks,
    CutBegun,
    Effect,
    EmptyRound,
    Extent,
    Needs,
    Push,
    Pushed,
    ReleasedBlocks,
    Restored,
    SpanPlace,
    Split,
    Unmovable,
    Update,
    ViewTaken,
)
from flightedl.errors import CorruptError, MessageError
from flightedl.messages.control import ViewRequest
from flightedl.messages.parameters import Outcome

_OUTCOMES: Mapping[type[Arrival], Outcome] = {
    Accumulate: Outcome.ACCEPTED,
    Apply: Outcome.ACCEPTED,
    Arrived: Outcome.ACCEPTED,
    Repeated: Outcome.ALREADY_APPLIED,
    Stale: Outcome.STALE,
    NotMember: Outcome.NOT_MEMBER,
}
_NOTHING_NEEDED = Needs()
#: Election of blocks that were restored before they moved: newer than any.
_RESTORED = (1 << 63) - 1
#: Without and with an update.
_NEEDS_OF_ARRIVALS = (_NOTHING_NEEDED, Needs(has_update=True))


class BlockSpan(SpanPlace):
    """The state of neighbouring blocks with the same history: one version, one open round, the same batches."""

    __slots__ = ("is_copied_whole", "rounds", "updates")

    def __init__(self, numbers: range, rounds: BlockRounds, *, is_copied_whole: bool) -> None:
        super().__init__(numbers)
        self.rounds = rounds
        self.is_copied_whole = is_copied_whole
        #: How often their values were updated.
        self.updates = 0


class BlockProtocol:
    """The blocks of one pserver.

    Args:
        extents: Of all spans, by rising number.
        mode: That they begin in.
    """

    def __init__(self, extents: Sequence[Extent], mode: Mode) -> None:
        #: By rising number; replaced, never changed, when one is split.
        self.spans: Sequence[BlockSpan] = [
            BlockSpan(numbers, BlockRounds(mode), is_copied_whole=is_copied_whole)
            for numbers, is_copied_whole in extents
        ]
        self._span_of = {number: span for span in self.spans for number in span.numbers}
        self._applied = AppliedBatches(self._span_of)
        self._view = PserverView(mode)
        #: (member, trainer, generation) of everybody in the view.
        self._senders: frozenset[tuple[int, str, int]] = frozenset()
        #: Block number -> the election (its create_revision) whose first values it has.
        self._elections: dict[int, int] = {}
        self._is_restored = False
        #: By number, the cuts whose blocks are being copied.
        self._cuts: dict[int, SnapshotCut] = {}
        self._next_cut = 0
        self._set_mode(mode)

    def _set_mode(self, mode: Mode) -> None:
        self.mode = mode
        self.is_synchronous = isinstance(mode, Sync)
        #: No pull waits for anything.
        self._is_free = isinstance(mode, Async)
        self._is_mean = isinstance(mode, Sync) and mode.reduce == "mean"
        self._is_deterministic = isinstance(mode, Sync) and mode.deterministic
        self._scales_by_staleness = isinstance(mode, Async) and mode.staleness_scaled
        #: Of some batches that were pushed together; where rounds keep gradients apart, they are those of one batch.
        self._takes_sums = isinstance(mode, Async) or (isinstance(mode, Sync) and mode.push_every > 1)
        #: Of gradients, without and with an update: made once, since they are wanted for each message.
        self._needs = tuple(
            Needs((), has_update, self.is_synchronous, self._is_deterministic) for has_update in (False, True)
        )

    # what there is

    @property
    def block_count(self) -> int:
        """Number of blocks."""
        return len(self._span_of)

    @property
    def members(self) -> list[int]:
        """Whom the blocks know."""
        return [member.member for member in self._view.members]

    def span(self, number: int) -> BlockSpan:
        """The state of the span that has a block, to be read under its lock."""
        return self._span_of[number]

    def version(self, number: int) -> int:
        """Of the span that has a block."""
        return self._span_of[number].rounds.version

    def versions(self) -> dict[int, int]:
        """Return the version of each block, by rising number."""
        return {number: span.rounds.version for span in self.spans for number in span.numbers}

    def version_range(self) -> tuple[int, int]:
        """Lowest and highest version."""
        versions = [span.rounds.version for span in self.spans]
        return (min(versions), max(versions)) if versions else (0, 0)

    def highest_open_round(self) -> int:
        """What a member that joins now has to start at, or later."""
        return max((span.rounds.position for span in self.spans), default=0)

    def split(self, first: int, into: Sequence[range]) -> Split:
        """Let other spans take a span's place.

        Args:
            first: Its first block.
            into: The block numbers of each of them, rising; together they are those of the span.
        """
        span = self._span_of[first]
        assert [number for part in into for number in part] == list(span.numbers), "a split loses or doubles blocks"
        if len(into) > 1:
            parts = []
            for numbers in into:
                part = BlockSpan(numbers, span.rounds.copy(), is_copied_whole=span.is_copied_whole)
                part.updates = span.updates
                parts.append(part)
            at = self.spans.index(span)
            self.spans = [*self.spans[:at], *parts, *self.spans[at + 1 :]]
            self._span_of.update((number, part) for part in parts for number in part.numbers)
        return Split(first, into)

    # first values

    def initialize(self, number: int, election: int) -> bool:
        """Return True if a block takes first values of this election now; the caller has them ready, and writes them.

        An elected trainer may die on the way: a newer election's values replace an older one's, block by block, and
        never the other way round. They count when all blocks have those of one election that is done.
        """
        if self._span_of[number].updates or self._is_restored or election < self._elections.get(number, 0):
            return False
        self._elections[number] = election
        return True

    def initialized_count(self, election: int) -> int:
        """Blocks that have the first values of this election."""
        return sum(known == election for known in self._elections.values())

    # pushes

    def prepare(self, first: int, push: Push, base_version: int, *, has_gradient: bool) -> Needs:
        """Return what has to be done before ``push``; nothing is taken yet."""
        if (push.member, push.trainer, push.generation) not in self._senders:
            return _NOTHING_NEEDED
        span = self._span_of[first]
        has_update = span.rounds.may_update(push.member, base_version)
        needs = (self._needs if has_gradient else _NEEDS_OF_ARRIVALS)[has_update]
        if has_update and self._cuts and (copies := self._copies_due(span)):
            return needs._replace(copies=copies)
        return needs

    def push(self, first: int, push: Push, base_version: int, *, has_gradient: bool) -> Pushed | Split:
        """Push to all blocks of a span.

        Returns:
            The answer; the same again is answered, never applied again. ``Split`` if the blocks differ: push to each
            part.

        Raises:
            MessageError: a base version from the future; a sum of several batches in a mode that has none; a batch
                that cannot be. Nothing was done.
        """
        span = self._span_of[first]
        rounds, batches = span.rounds, push.batches
        if (push.member, push.trainer, push.generation) not in self._senders:
            return Pushed(Outcome.NOT_MEMBER, rounds.version)
        if len(batches) > 1 and not self._takes_sums:
            raise MessageError("the mode takes no sums of several batches: push each batch for itself")
        having = self._applied.mark_together(span.numbers, batches)
        is_new = not any(having)
        if not is_new:
            if any(0 < count < len(span.numbers) for count in having):
                return self.split(first, self._alike(span))
            if not all(having):
                return self._refuse_sum(span, push, base_version, having_bits(map(bool, having)))
        for cut in self._cuts.values() if is_new else ():
            cut.marked(span.numbers, batches)
        weight = (push.weight if self._is_mean else 1.0) if has_gradient else 0.0
        arrival = self._arrive(span, push, base_version, weight, is_new=is_new)
        effects: list[Effect] = []
        self._take(span, push, arrival, weight, effects)
        is_news = not self.is_synchronous or self._close_rounds(span, effects)
        outcome = _OUTCOMES[type(arrival)]
        if not is_new and outcome is Outcome.ACCEPTED:
            outcome = Outcome.ALREADY_APPLIED
        if outcome not in ANSWERED:
            return Pushed(outcome, rounds.version, effects, is_news=is_news)
        if self._is_free:
            return Pushed(outcome, rounds.version, effects, b"", 0, is_ready=True, is_news=is_news)
        follows = self.mode.version_after(base_version)
        is_ready = rounds.pull(push.member, follows) is Pull.READY
        return Pushed(outcome, rounds.version, effects, b"", follows, is_ready, is_news)

    def _refuse_sum(self, span: BlockSpan, push: Push, base_version: int, having: bytes) -> Pushed:
        """Take nothing of a sum of which the blocks have some batches.

        In synchronous mode its sender arrives all the same. Other blocks may have taken the sum, and theirs is the next
        round: where its sender had not arrived, it would be in two rounds at once, and two such trainers could wait for
        each other for ever.
        """
        if not self.is_synchronous:
            return Pushed(Outcome.PARTLY_APPLIED, span.rounds.version, (), having)
        effects: list[Effect] = []
        self._arrive(span, push, base_version, 0.0, is_new=False)
        is_news = self._close_rounds(span, effects)
        return Pushed(Outcome.PARTLY_APPLIED, span.rounds.version, effects, having, is_news=is_news)

    def _alike(self, span: BlockSpan) -> list[range]:
        """The blocks of a span in neighbours that have the same batches."""
        return self._applied.alike(span.numbers)

    def _unmark(self, span: BlockSpan, batches: Batches) -> None:
        """Take marks back that were made just now."""
        for batch, batch_count in batches:
            self._applied.unmark(span.numbers, batch, batch_count)

    def _arrive(self, span: BlockSpan, push: Push, base_version: int, weight: float, *, is_new: bool) -> Arrival:
        """Let the marked batches arrive, or take their marks back."""
        (batch, batch_count), *further = push.batches
        keep = False
        try:
            arrival = span.rounds.arrive(
                push.member,
                base_version,
                weight,
                already_applied=not is_new,
                batch=batch,
                batch_count=batch_count,
                step=push.step,
                further=further,
            )
            keep = not isinstance(arrival, Stale | NotMember)
        finally:
            if is_new and not keep:
                self._unmark(span, push.batches)
        return arrival

    def _take(self, span: BlockSpan, push: Push, arrival: Arrival, weight: float, effects: list[Effect]) -> None:
        """Add what an arrival does with its gradient to ``effects``."""
        if isinstance(arrival, Apply):
            version = span.rounds.version
            rate_factor = 1.0 / (1.0 + arrival.staleness) if self._scales_by_staleness else 1.0
            effects.append(
                Update(version - 1, version, span.updates, push.batches, is_of_round=False, rate_factor=rate_factor)
            )
            span.updates += 1
            if self._cuts:
                self._note_due(span, effects)
        elif isinstance(arrival, Accumulate):
            effects.append(AddGradient(push.batches[0][0], weight, arrival.is_first, self._is_deterministic))

    # rounds

    def _close_rounds(self, span: BlockSpan, effects: list[Effect]) -> bool:
        """Close what is full; whether anything was."""
        rounds = span.rounds
        if not rounds.closable():
            return False
        while rounds.closable():
            effects += self._copies_due(span)
            closing = rounds.close()
            if closing.has_update:
                versions = (closing.round, rounds.version)
                update = Update(*versions, span.updates, closing.held, is_of_round=True)
                if self._is_mean:
                    update = replace(update, is_mean=True, scale=1.0 / closing.total_weight)
                effects.append(update)
                span.updates += 1
            else:
                effects.append(EmptyRound(closing.round, rounds.version))
            self._note_due(span, effects)
        return True

    # pulls

    def pull(self, number: int, member: int, min_version: int) -> Pull:
        """Whether the values of a block's span may be read now; ``member`` 0 is anybody who only reads."""
        return self._span_of[number].rounds.pull(member, min_version)

    # views

    def take_view(self, request: ViewRequest) -> ViewTaken:
        """Take over a view, in all blocks at once.

        Raises:
            UsageError: its mode is none of ours.
            MessageError: it contradicts the one before; nothing was done.
        """
        if (first_mode := self._view.begins_in(request)) is not None:
            self._begin_in(first_mode)
        verdict = self._view.consider(
            request,
            lambda first_round: all(span.rounds.can_admit(first_round) for span in self.spans),
            lambda at_round: all(span.rounds.can_switch(at_round) for span in self.spans),
        )
        admit = {member.member: member.first_round for member in verdict.admit}
        effects: list[tuple[int, Sequence[Effect]]] = []
        for span in self.spans if admit or verdict.remove or verdict.switch is not None else ():
            found: list[Effect] = []
            if verdict.switch is not None:
                self._switch(span, verdict, found)
                self._change_members(span, admit, (), found)
            else:
                self._change_members(span, admit, verdict.remove, found)
            effects.append((span.numbers.start, found))
        if verdict.switch is not None:
            self._set_mode(verdict.switch)
        self._senders = frozenset((m.member, m.trainer, m.generation) for m in self._view.members)
        # A mode begins at a round that no block has reached, whoever is a member.
        highest = self.version_range()[1] if verdict.refuses_mode else self.highest_open_round()
        return ViewTaken(verdict, verdict.reply(request.serial, highest), effects)

    def _begin_in(self, mode: Mode) -> None:
        """Nobody has been a member here: the blocks begin in this mode."""
        self._set_mode(mode)
        for span in self.spans:
            span.rounds = BlockRounds(mode, span.rounds.version)

    def _change_members(
        self, span: BlockSpan, admit: Mapping[int, int], remove: Sequence[int], effects: list[Effect]
    ) -> None:
        """Wait for others, and close what waited for those that go."""
        span.rounds.change(admit, remove)
        self._close_rounds(span, effects)

    def _switch(self, span: BlockSpan, verdict: ViewVerdict, effects: list[Effect]) -> None:
        """Close under the old mode what is open, then begin at the round of the view under the new one."""
        assert verdict.switch is not None, "the mode stays"
        self._change_members(span, {}, verdict.remove, effects)
        span.rounds.switch(verdict.switch, verdict.switch_round)
        self._close_rounds(span, effects)
        self._note_due(span, effects)

    # cuts

    def begin_cut(self, at_round: int | None) -> CutBegun:
        """Copy each block once from now on: at once, or when this round of it opens."""
        versions = self.versions()
        cut = SnapshotCut(versions, at_round)
        self._next_cut += 1
        self._cuts[self._next_cut] = cut
        return CutBegun(self._next_cut, [number for number, version in versions.items() if cut.is_due(number, version)])

    def copy(self, cut: int, number: int) -> CopyBlocks | None:
        """Copy a block now, if it is due, with its span where that is copied whole; None: not due, or copied before."""
        known, span = self._cuts.get(cut), self._span_of[number]
        if known is None or not known.is_due(number, span.rounds.version):
            return None
        return self._copied(span, cut, span.numbers if span.is_copied_whole else (number,))

    def end_cut(self, cut: int) -> AppliedBatches | None:
        """What is applied to complete copies; None: the cut was dropped."""
        known = self._cuts.pop(cut, None)
        return None if known is None else known.applied(self._applied)

    def drop_cut(self, cut: int) -> None:
        """Copy nothing more for this cut."""
        self._cuts.pop(cut, None)

    def _copies_due(self, span: BlockSpan) -> list[CopyBlocks]:
        """Copy the blocks that are due, because they are about to change."""
        return [self._copied(span, cut, due) for cut, known in self._cuts.items() if (due := self._due(span, known))]

    @staticmethod
    def _due(span: BlockSpan, cut: SnapshotCut) -> Sequence[int]:
        """Return the numbers of the blocks that are due."""
        version = span.rounds.version
        if span.is_copied_whole:
            return span.numbers if cut.is_due(span.numbers.start, version) else ()
        return [number for number in span.numbers if cut.is_due(number, version)]

    def _copied(self, span: BlockSpan, cut: int, numbers: Sequence[int]) -> CopyBlocks:
        kept = self._cuts[cut].cut(numbers, span.rounds.version, span.rounds.held)
        return CopyBlocks(cut, numbers, kept, span.updates)

    def _note_due(self, span: BlockSpan, effects: list[Effect]) -> None:
        """The version has changed: blocks may be due from now on."""
        effects += [BlocksDue(cut, due) for cut, known in self._cuts.items() if (due := self._due(span, known))]

    # blocks that move to another pserver

    def release(self, numbers: range) -> ReleasedBlocks | Split | Unmovable:
        """Remove adjacent blocks, and return them. Returns ``Split`` if their span has others; call again after it.

        Raises:
            MessageError: the blocks are not in one span of this pserver.
        """
        span = self._span_of.get(numbers.start)
        if span is None or numbers.stop > span.numbers.stop:
            raise MessageError(f"the blocks {numbers} do not lie together on this pserver")
        if self._cuts:
            return Unmovable.COPIED
        rounds = span.rounds
        if not rounds.is_at_edge:
            return Unmovable.IN_ROUND
        if numbers != span.numbers:
            return self.split(span.numbers.start, around(span.numbers, numbers))
        self.spans = [other for other in self.spans if other is not span]
        elections = {number: self._elections.pop(number, 0) for number in numbers}
        if self._is_restored:
            elections = dict.fromkeys(numbers, _RESTORED)
        for number in numbers:
            del self._span_of[number]
        return ReleasedBlocks(
            numbers,
            rounds.version,
            span.updates,
            self._applied.release(numbers),
            self._view.number,
            rounds.members,
            rounds.clocks,
            elections,
            span.is_copied_whole,
        )

    def adopt(self, released: ReleasedBlocks) -> Unmovable | None:
        """Put blocks in that another pserver has released; ``Unmovable``: nothing was done.

        Raises:
            CorruptError, MessageError: as ``AppliedBatches.adopt``.
        """
        if self._cuts:
            return Unmovable.COPIED
        if released.view != self._view.number:
            return Unmovable.VIEW
        numbers = released.numbers
        self._applied.adopt(numbers, released.applied)
        rounds = BlockRounds.moved(self.mode, released.version, released.members, released.clocks)
        span = BlockSpan(numbers, rounds, is_copied_whole=released.is_copied_whole)
        span.updates = released.updates
        self.spans = sorted([*self.spans, span], key=lambda known: known.numbers.start)
        self._span_of.update(dict.fromkeys(numbers, span))
        self._elections.update(released.elections)
        return None

    # what is applied

    def applied(self) -> AppliedBatches:
        """What is applied now: a copy."""
        return self._applied.copy()

    def seal(self, epochs: Sequence[tuple[int, int]]) -> None:
        """(epoch, tasks) of epochs that get no more tasks, see ``AppliedBatches.seal``.

        Raises:
            MessageError: the epoch has more tasks than that.
        """
        for epoch, task_count in epochs:
            self._applied.seal(epoch, task_count)

    def restore(self, applied: AppliedBatches, blocks: Restored) -> Sequence[Split]:
        """All blocks were taken over from a checkpoint, before anybody has seen them.

        Args:
            applied: What is applied to them.
            blocks: Their versions and updates.

        Returns:
            The spans whose blocks have different histories.

        Raises:
            CorruptError: they are not all blocks.
        """
        if not applied.numbers == sorted(blocks) == sorted(self._span_of):
            raise CorruptError(f"{len(blocks)} blocks were restored, and not the {self.block_count} of this pserver")
        splits = [self.split(span.numbers.start, _neighbours_with_same(blocks, span.numbers)) for span in self.spans]
        self._applied = applied
        splits += [self.split(span.numbers.start, self._alike(span)) for span in self.spans if span.is_copied_whole]
        for span in self.spans:
            version, span.updates = blocks[span.numbers.start]
            span.rounds = BlockRounds(self.mode, version)
        self._is_restored = True
        return [split for split in splits if len(split.into) > 1]

    def check(self) -> None:
        """Assert every invariant."""
        self._applied.check()
        numbers = [number for span in self.spans for number in span.numbers]
        assert numbers == self._applied.numbers == sorted(self._span_of), "a block lies in no span, or in several"
        for span in self.spans:
            span.rounds.check()
            assert all(self._span_of[number] is span for number in span.numbers), "a block is looked for elsewhere"
            assert span.rounds.mode == self.mode, "a block has another mode than the others"
            for batch, _ in span.rounds.held:
                having = self._applied.count_having(span.numbers, batch)
                assert having == len(span.numbers), "a gradient waits in a round, and its batch is not marked"


def around(whole: range, part: range) -> list[range]:
    """``part`` of a stretch of blocks, with what lies before and behind it."""
    stretches = (range(whole.start, part.start), part, range(part.stop, whole.stop))
    return [stretch for stretch in stretches if stretch]


def _neighbours_with_same(restored: Restored, numbers: range) -> list[range]:
    """Stretches of blocks that have the same version and as many updates."""
    bounds = [number for number in numbers[1:] if restored[number] != restored[number - 1]]
    return [range(start, stop) for start, stop in pairwise([numbers.start, *bounds, numbers.stop])]
