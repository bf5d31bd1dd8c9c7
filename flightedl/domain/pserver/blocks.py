"""Protocol of a pserver's blocks: pushes, pulls, views, snapshots and moves.

The blocks form *spans* of adjacent blocks with the same history. A push that covers complete spans, as in normal
training, is decided once per span. A push that covers only part of a span, or finds that its blocks differ, splits the
span into spans of identical blocks; this only costs speed. ``join`` joins spans of buckets that have become identical.

A span is identified by its first block, and a cut by its number. The caller keeps the arrays, which are divided into
the same spans. It carries out each ``Split`` before its next call for these blocks.

**A push** to a span takes these steps:

* ``prepare`` returns what the caller must do first: copy blocks that are about to change but that a cut still needs,
  and allocate memory. Anything that can fail fails here, before the push has any effect. In async modes without a cut
  in progress, only memory for an update is needed.
* ``push`` decides. It rejects senders that are not members. If the blocks have applied none of the batches, it marks
  all batches as applied. If they have applied all batches, the sender only arrives at the round. If they have applied
  only some, ``push`` rejects the sum.
* For a new batch, ``push`` then asks ``rounds``. If ``rounds`` rejects the batch, the marks are removed. Rounds in
  which all members have arrived are closed.
* Finally, the caller carries out the effects in order.

The span's lock is held during all of these steps, so values, versions and applied batches always agree.

**A cut** copies each block once, in the state in which the block became due: immediately, or when the checkpoint's
round opens. A due block must be copied before it changes. Several cuts may be in progress; a block that is about to
change is copied for each cut that has not copied it yet.

**Blocks move** between pservers at the edge of a round, while no cut is in progress. ``release`` removes them along
with their protocol state, and ``adopt`` adds them to a pserver that has the same view.

**The caller does the locking.** It holds a span's lock during each call for the span *and* while it carries out the
effects. It holds the locks of all spans during ``apply_view``, ``begin_cut``, ``release`` and ``adopt``.

Calls that change state also need a lock shared by all spans, but only during the call. These are ``prepare``, ``push``,
``split``, ``join``, ``initialize``, and the calls for views, cuts, moves and applied batches.
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
from flightedl.domain.exactly_once.accumulation import applied_bits
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
    Joined,
    Needs,
    Push,
    Pushed,
    ReleasedBlocks,
    Restored,
    SpanPlace,
    Split,
    Unmovable,
    Update,
    ViewApplied,
)
from flightedl.errors import CorruptError, MessageError
from flightedl.marks import sometimes
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
#: Election number of moved blocks that were restored from a checkpoint. Higher than the number of any real election.
_RESTORED = (1 << 63) - 1
#: ``Needs`` of a push without a gradient: without an update, and with one.
_NEEDS_OF_ARRIVALS = (_NOTHING_NEEDED, Needs(has_update=True))


class BlockSpan(SpanPlace):
    """State of adjacent blocks with the same history: they have one version, one open round and the same batches."""

    __slots__ = ("is_behind", "is_copied_at_once", "rounds", "updates")

    def __init__(self, numbers: range, rounds: BlockRounds, *, is_copied_at_once: bool) -> None:
        super().__init__(numbers)
        self.rounds = rounds
        self.is_copied_at_once = is_copied_at_once
        #: Number of updates to the blocks' values so far.
        self.updates = 0
        #: True if buckets may receive batches of an epoch before they have all batches of earlier ones. Epochs are
        #: barriers, so this happens only after a restore, when trainers hold batches of the epoch of the loss.
        self.is_behind = False

    def is_like(self, other: BlockSpan) -> bool:
        """True if cuts copy both spans together, and the spans' histories differ only in the applied batches."""
        return (
            self.is_copied_at_once
            and other.is_copied_at_once
            and self.updates == other.updates
            and self.rounds.is_like(other.rounds)
        )


class BlockProtocol:
    """State machine of the blocks of one pserver.

    Args:
        extents: Extents of all spans, in ascending order.
        mode: Initial mode.
    """

    def __init__(self, extents: Sequence[Extent], mode: Mode) -> None:
        #: Spans in ascending order. A split replaces this sequence and never modifies it.
        self.spans: Sequence[BlockSpan] = [
            BlockSpan(numbers, BlockRounds(mode), is_copied_at_once=is_copied_at_once)
            for numbers, is_copied_at_once in extents
        ]
        self._span_of = {number: span for span in self.spans for number in span.numbers}
        self._applied = AppliedBatches(self._span_of)
        self._view = PserverView(mode)
        #: (member, trainer, generation) of each member of the view.
        self._senders: frozenset[tuple[int, str, int]] = frozenset()
        #: Block number -> election (its create_revision) that gave the block its first values.
        self._elections: dict[int, int] = {}
        self._is_restored = False
        #: First epoch of which the master may have tasks. Those of earlier epochs are done or were set aside.
        self._open_epoch = 0
        #: Cuts in progress, by number.
        self._cuts: dict[int, SnapshotCut] = {}
        self._next_cut = 0
        self._set_mode(mode)

    def _set_mode(self, mode: Mode) -> None:
        self.mode = mode
        self.is_synchronous = isinstance(mode, Sync)
        #: True if pulls never wait.
        self._is_free = isinstance(mode, Async)
        self._is_mean = isinstance(mode, Sync) and mode.reduce == "mean"
        self._is_deterministic = isinstance(mode, Sync) and mode.deterministic
        self._scales_by_staleness = isinstance(mode, Async) and mode.staleness_scaled
        #: True if one push may contain the summed gradients of several batches.
        self._accepts_sums = isinstance(mode, Async) or (isinstance(mode, Sync) and mode.push_every > 1)
        #: ``Needs`` of a push with a gradient: without an update, and with one. Created once, because every push uses
        #: them.
        self._needs = tuple(
            Needs((), has_update, self.is_synchronous, self._is_deterministic) for has_update in (False, True)
        )

    # state

    @property
    def block_count(self) -> int:
        """Number of blocks."""
        return len(self._span_of)

    @property
    def members(self) -> list[int]:
        """Members of the current view."""
        return [member.member for member in self._view.members]

    @property
    def view(self) -> tuple[int, int]:
        """Number of the current view."""
        return self._view.number

    def span(self, number: int) -> BlockSpan:
        """Return the span that contains a block. The caller holds the span's lock while it reads the span."""
        return self._span_of[number]

    def version(self, number: int) -> int:
        return self._span_of[number].rounds.version

    def versions(self) -> dict[int, int]:
        """Return block number -> version, in ascending order of the numbers."""
        return {number: span.rounds.version for span in self.spans for number in span.numbers}

    def version_range(self) -> tuple[int, int]:
        """Return the lowest and the highest version of the blocks."""
        versions = [span.rounds.version for span in self.spans]
        return (min(versions), max(versions)) if versions else (0, 0)

    def highest_open_round(self) -> int:
        """Return the earliest round at which a member that joins now could start."""
        return max((span.rounds.position for span in self.spans), default=0)

    def split(self, first: int, into: Sequence[range]) -> Split:
        """Replace a span with smaller spans.

        Args:
            first: First block of the span.
            into: Block numbers of each new span, ascending. Together they are the numbers of the replaced span.
        """
        span = self._span_of[first]
        assert [number for part in into for number in part] == list(span.numbers), "a split loses or doubles blocks"
        if len(into) > 1:
            parts = []
            for numbers in into:
                part = BlockSpan(numbers, span.rounds.copy(), is_copied_at_once=span.is_copied_at_once)
                part.updates = span.updates
                part.is_behind = span.is_behind
                parts.append(part)
            at = self.spans.index(span)
            self.spans = [*self.spans[:at], *parts, *self.spans[at + 1 :]]
            self._span_of.update((number, part) for part in parts for number in part.numbers)
        return Split(first, into)

    def join(self, number: int, most: int) -> Joined | None:
        """Join a span with the preceding one if their states have become equal and cuts copy both spans as a whole.

        Args:
            number: First block of the span.
            most: Largest number of blocks of the shorter span that join the longer one now; the others remain a span.

        Returns:
            None if nothing was changed.
        """
        second, first = self._span_of[number], self._span_of.get(number - 1)
        if first is None or self._cuts or not first.is_like(second) or not self._applied.are_alike(number - 1, number):
            return None
        self._applied.merge()
        start, stop = first.numbers.start, second.numbers.stop
        if len(first.numbers) < len(second.numbers):
            kept, moved = second, range(max(start, number - most), number)
            border = moved.start
        else:
            kept, moved = first, range(number, min(stop, number + most))
            border = moved.stop
        spans = [span for span in self.spans if span not in (first, second)]
        for numbers in filter(None, (range(start, border), range(border, stop))):
            span = BlockSpan(numbers, first.rounds.copy(), is_copied_at_once=True)
            span.updates, span.is_behind = first.updates, first.is_behind and second.is_behind
            self._span_of.update(dict.fromkeys(numbers, span))
            spans.append(span)
        self.spans = sorted(spans, key=lambda known: known.numbers.start)
        return Joined(kept.numbers.start, moved)

    # first values

    def initialize(self, number: int, election: int) -> bool:
        """Return True if a block accepts an election's first values. The caller then writes the values.

        An elected trainer may die before it has sent all values. The values of a newer election therefore replace those
        of an older one block by block, and never the other way round. The model is valid once the values of all blocks
        come from a single completed election.
        """
        if self._span_of[number].updates or self._is_restored or election < self._elections.get(number, 0):
            return False
        self._elections[number] = election
        return True

    def initialized_count(self, election: int) -> int:
        """Return the number of blocks with first values of this election."""
        return sum(known == election for known in self._elections.values())

    # pushes

    def prepare(self, first: int, push: Push, base_version: int, *, has_gradient: bool) -> Needs:
        """Return the copies and the memory that ``push`` will need. This changes only the state of cuts."""
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

        A repeated push is answered but not applied again.

        Returns:
            The result, or ``Split`` if the blocks differ. In that case the caller pushes to each new span.

        Raises:
            MessageError: The base version is in the future, the mode allows no sums of several batches, or a batch is
                invalid. The state is unchanged.
        """
        span = self._span_of[first]
        rounds, batches = span.rounds, push.batches
        if (push.member, push.trainer, push.generation) not in self._senders:
            return Pushed(Outcome.NOT_MEMBER, rounds.version)
        if len(batches) > 1 and not self._accepts_sums:
            raise MessageError("the mode accepts no sums of several batches: push each batch separately")
        having = self._applied.mark_together(span.numbers, batches)
        is_new = not any(having)
        if not is_new:
            sometimes("a repeated gradient was recognized")
            if any(0 < count < len(span.numbers) for count in having):
                sometimes("a push found blocks with different batches")
                return self.split(first, self._alike(span))
            if not all(having):
                return self._refuse_sum(span, push, base_version, applied_bits(map(bool, having)))
        for cut in self._cuts.values() if is_new else ():
            cut.marked(span.numbers, batches)
        weight = (push.weight if self._is_mean else 1.0) if has_gradient else 0.0
        arrival = self._arrive(span, push, base_version, weight, is_new=is_new)
        effects: list[Effect] = []
        self._apply(span, push, arrival, weight, effects)
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
        """Reject a sum, because the blocks already have some of its batches.

        In sync mode the sender still arrives at the round. Other blocks may have accepted the sum and opened the next
        round. Without arriving here, a sender would take part in two rounds at the same time, and two such senders
        could wait for each other forever.
        """
        if not self.is_synchronous:
            return Pushed(Outcome.PARTLY_APPLIED, span.rounds.version, (), having)
        effects: list[Effect] = []
        self._arrive(span, push, base_version, 0.0, is_new=False)
        is_news = self._close_rounds(span, effects)
        return Pushed(Outcome.PARTLY_APPLIED, span.rounds.version, effects, having, is_news=is_news)

    def _alike(self, span: BlockSpan) -> list[range]:
        return self._applied.alike(span.numbers)

    def _unmark(self, span: BlockSpan, batches: Batches) -> None:
        for batch, batch_count in batches:
            self._applied.unmark(span.numbers, batch, batch_count)

    def _arrive(self, span: BlockSpan, push: Push, base_version: int, weight: float, *, is_new: bool) -> Arrival:
        (batch, batch_count), *others = push.batches
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
                others=others,
            )
            keep = not isinstance(arrival, Stale | NotMember)
        finally:
            if is_new and not keep:
                self._unmark(span, push.batches)
        return arrival

    def _apply(self, span: BlockSpan, push: Push, arrival: Arrival, weight: float, effects: list[Effect]) -> None:
        if isinstance(arrival, Apply):
            versions = (span.rounds.version - 1, span.rounds.version)
            rate_factor = 1.0 / (1.0 + arrival.staleness) if self._scales_by_staleness else 1.0
            update = Update(*versions, span.updates, push.batches, is_of_round=False, rate_factor=rate_factor)
            effects.append(self._dated(span, update) if span.is_behind else update)
            span.updates += 1
            if self._cuts:
                self._note_due(span, effects)
        elif isinstance(arrival, Accumulate):
            effects.append(AddGradient(push.batches[0][0], weight, arrival.is_first, self._is_deterministic))

    def _dated(self, span: BlockSpan, update: Update) -> Update:
        """Return an update of a span that is behind, with the first epoch of which the span may lack batches."""
        epochs = range(self._open_epoch, max(batch.epoch for batch, _ in update.batches))
        found = (epoch for epoch in epochs if not self._applied.is_finished(span.numbers, epoch))
        return replace(update, open_epoch=next(found, None))

    # rounds

    def _close_rounds(self, span: BlockSpan, effects: list[Effect]) -> bool:
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
                effects.append(self._dated(span, update) if span.is_behind else update)
                span.updates += 1
            else:
                effects.append(EmptyRound(closing.round, rounds.version))
            self._note_due(span, effects)
        return True

    # pulls

    def pull(self, number: int, member: int, min_version: int) -> Pull:
        """Return READY if a block's values can be read now. Pass 0 as ``member`` for clients that only read."""
        return self._span_of[number].rounds.pull(member, min_version)

    # views

    def apply_view(self, request: ViewRequest) -> ViewApplied:
        """Apply a view to all blocks.

        Raises:
            UsageError: The mode is unknown.
            MessageError: The view contradicts the previous one. The state is unchanged.
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
        # Whoever the members are, a mode may only start at a round that no block has reached.
        highest = self.version_range()[1] if verdict.refuses_mode else self.highest_open_round()
        return ViewApplied(verdict, verdict.reply(request.serial, highest), effects)

    def _begin_in(self, mode: Mode) -> None:
        self._set_mode(mode)
        for span in self.spans:
            span.rounds = BlockRounds(mode, span.rounds.version)

    def _change_members(
        self, span: BlockSpan, admit: Mapping[int, int], remove: Sequence[int], effects: list[Effect]
    ) -> None:
        span.rounds.change(admit, remove)
        self._close_rounds(span, effects)

    def _switch(self, span: BlockSpan, verdict: ViewVerdict, effects: list[Effect]) -> None:
        assert verdict.switch is not None, "the view does not change the mode"
        self._change_members(span, {}, verdict.remove, effects)
        span.rounds.switch(verdict.switch, verdict.switch_round)
        self._close_rounds(span, effects)
        self._note_due(span, effects)

    # cuts

    def begin_cut(self, at_round: int | None) -> CutBegun:
        """Begin a cut, which copies each block once: now if ``at_round`` is None, otherwise when that round opens."""
        versions = self.versions()
        cut = SnapshotCut(versions, at_round)
        self._next_cut += 1
        self._cuts[self._next_cut] = cut
        return CutBegun(self._next_cut, [number for number, version in versions.items() if cut.is_due(number, version)])

    def copy(self, cut: int, number: int) -> CopyBlocks | None:
        """Copy a block, or its span if spans are copied as a whole. Return None if the block need not be copied now."""
        known, span = self._cuts.get(cut), self._span_of[number]
        if known is None or not known.is_due(number, span.rounds.version):
            return None
        return self._copied(span, cut, span.numbers if span.is_copied_at_once else (number,))

    def end_cut(self, cut: int) -> AppliedBatches | None:
        """End a complete cut. Return the batches in its copies, or None if the cut was dropped."""
        known = self._cuts.pop(cut, None)
        return None if known is None else known.applied(self._applied)

    def drop_cut(self, cut: int) -> None:
        """Abandon a cut. No more blocks are copied for it."""
        self._cuts.pop(cut, None)

    def _copies_due(self, span: BlockSpan) -> list[CopyBlocks]:
        return [self._copied(span, cut, due) for cut, known in self._cuts.items() if (due := self._due(span, known))]

    @staticmethod
    def _due(span: BlockSpan, cut: SnapshotCut) -> Sequence[int]:
        version = span.rounds.version
        if span.is_copied_at_once:
            return span.numbers if cut.is_due(span.numbers.start, version) else ()
        return [number for number in span.numbers if cut.is_due(number, version)]

    def _copied(self, span: BlockSpan, cut: int, numbers: Sequence[int]) -> CopyBlocks:
        kept = self._cuts[cut].cut(numbers, span.rounds.version, span.rounds.held)
        return CopyBlocks(cut, numbers, kept, span.updates)

    def _note_due(self, span: BlockSpan, effects: list[Effect]) -> None:
        effects += [BlocksDue(cut, due) for cut, known in self._cuts.items() if (due := self._due(span, known))]

    # blocks that move to another pserver

    def release(self, numbers: range) -> ReleasedBlocks | Split | Unmovable:
        """Remove adjacent blocks and return their state. After a ``Split`` (the span has other blocks), call again.

        Raises:
            MessageError: The blocks are not in one span of this pserver.
        """
        span = self._span_of.get(numbers.start)
        if span is None or numbers.stop > span.numbers.stop:
            raise MessageError(f"the blocks {numbers} are not in one span of this pserver")
        if self._cuts:
            return Unmovable.COPIED
        if not span.rounds.is_at_edge:
            return Unmovable.IN_ROUND
        if numbers != span.numbers:
            return self.split(span.numbers.start, around(span.numbers, numbers))
        released = self._state(numbers, self._applied.release(numbers))
        self.spans = [other for other in self.spans if other is not span]
        for number in numbers:
            self._elections.pop(number, None)
            del self._span_of[number]
        return released

    def is_at_edge(self, numbers: range) -> bool:
        """True if the blocks may be released now. The caller holds the locks of their spans."""
        spans = dict.fromkeys(self._span_of[number] for number in numbers)
        return not self._cuts and all(span.rounds.is_at_edge for span in spans)

    def state_of(self, numbers: range) -> ReleasedBlocks:
        """Return the state of adjacent blocks of one span at the edge of a round, as ``release`` does."""
        return self._state(numbers, self._applied.encoded(numbers))

    def _state(self, numbers: range, applied: bytes) -> ReleasedBlocks:
        span = self._span_of[numbers.start]
        rounds = span.rounds
        elections = {number: self._elections.get(number, 0) for number in numbers}
        if self._is_restored:
            elections = dict.fromkeys(numbers, _RESTORED)
        return ReleasedBlocks(
            numbers,
            rounds.version,
            span.updates,
            applied,
            self._view.number,
            rounds.members,
            rounds.clocks,
            elections,
            span.is_copied_at_once,
            span.is_behind,
        )

    def unadoptable(self, released: ReleasedBlocks) -> Unmovable | None:
        """Return the reason why these blocks cannot be adopted at the moment, or None."""
        if self._cuts:
            return Unmovable.COPIED
        return None if released.view == self._view.number else Unmovable.VIEW

    def adopt(self, released: ReleasedBlocks) -> Unmovable | None:
        """Add blocks that another pserver has released. If this returns ``Unmovable``, nothing has changed.

        Raises:
            CorruptError, MessageError: As ``AppliedBatches.adopt``.
        """
        if (unmovable := self.unadoptable(released)) is not None:
            return unmovable
        numbers = released.numbers
        self._applied.adopt(numbers, released.applied)
        rounds = BlockRounds.moved(self.mode, released.version, released.members, released.clocks)
        span = BlockSpan(numbers, rounds, is_copied_at_once=released.is_copied_at_once)
        span.updates = released.updates
        if released.is_behind:
            # What the master has said of this pserver is not true of these blocks.
            span.is_behind, self._open_epoch = True, 0
        self.spans = sorted([*self.spans, span], key=lambda known: known.numbers.start)
        self._span_of.update(dict.fromkeys(numbers, span))
        self._elections.update(released.elections)
        return None

    # applied batches

    def applied(self) -> AppliedBatches:
        return self._applied.copy()

    def set_task_counts(self, epochs: Sequence[tuple[int, int]], open_epoch: int = 0) -> None:
        """Set the numbers of tasks in epochs, given as (epoch, tasks); see ``AppliedBatches.set_task_count``.

        Args:
            epochs: All epochs that have ended, or the last of them.
            open_epoch: No tasks of earlier epochs remain: each was done here or was set aside.

        Raises:
            MessageError: An epoch has more tasks.
        """
        for epoch, task_count in epochs:
            self._applied.set_task_count(epoch, task_count)
        self._open_epoch = open_epoch
        if all(epoch < open_epoch for epoch, _ in epochs):
            for span in self.spans:
                span.is_behind = False

    def restore(self, applied: AppliedBatches, blocks: Restored) -> Sequence[Split]:
        """Restore the state of all blocks from a checkpoint, before clients can see the blocks.

        Args:
            applied: Batches that the blocks contain.
            blocks: Versions and updates of the blocks.

        Returns:
            The splits of spans whose blocks have different histories.

        Raises:
            CorruptError: Blocks are missing or unknown.
        """
        if not applied.numbers == sorted(blocks) == sorted(self._span_of):
            raise CorruptError(f"restored {len(blocks)} blocks, which are not the {self.block_count} of this pserver")
        splits = [self.split(span.numbers.start, _neighbors_with_same(blocks, span.numbers)) for span in self.spans]
        self._applied = applied
        splits += [self.split(span.numbers.start, self._alike(span)) for span in self.spans if span.is_copied_at_once]
        for span in self.spans:
            version, span.updates = blocks[span.numbers.start]
            span.rounds = BlockRounds(self.mode, version)
            span.is_behind = span.is_copied_at_once
        self._is_restored = True
        return [split for split in splits if len(split.into) > 1]

    def check(self) -> None:
        """Assert every invariant."""
        self._applied.check()
        numbers = [number for span in self.spans for number in span.numbers]
        assert numbers == self._applied.numbers == sorted(self._span_of), "a block is in no span, or in several"
        for span in self.spans:
            span.rounds.check()
            assert all(self._span_of[number] is span for number in span.numbers), "a block is mapped to another span"
            assert span.rounds.mode == self.mode, "a block's mode differs from the others"
            for batch, _ in span.rounds.held:
                having = self._applied.count_having(span.numbers, batch)
                assert having == len(span.numbers), "a round holds a gradient whose batch is not marked"


def around(blocks: range, part: range) -> list[range]:
    """Divide a range of blocks into those before ``part``, ``part`` itself, and those after it; omit empty ranges."""
    ranges = (range(blocks.start, part.start), part, range(part.stop, blocks.stop))
    return [numbers for numbers in ranges if numbers]


def _neighbors_with_same(restored: Restored, numbers: range) -> list[range]:
    bounds = [number for number in numbers[1:] if restored[number] != restored[number - 1]]
    return [range(start, stop) for start, stop in pairwise([numbers.start, *bounds, numbers.stop])]
