"""A trainer's steps to which recorded events happen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from flightedl import errors
from flightedl.domain.consistency.modes import Mode
from flightedl.domain.trainer.batches import CurrentBatch
from flightedl.domain.trainer.membership import Denied, Joined, NotYet
from flightedl.domain.trainer.steps import Done, Next, Steps
from flightedl.domain.trainer.transfers import Transfer
from flightedl.errors import CorruptError, FlightedlError, GradientError, JobFailedError, UnavailableError
from flightedl.messages.tasks import JoinReply
from flightedl.recording.step_values import (
    EVENTS,
    LOST,
    BatchAbandoned,
    BatchClosing,
    BatchOpening,
    CarriedOut,
    GradientsAdded,
    MembershipSaid,
    NotCarriedOut,
    PserverAsked,
    PullCalled,
    PushCalled,
    RefreshCalled,
    StepCalled,
    StepsBegun,
    SumGivenUp,
    SumPushed,
    TransferGivenUp,
    WorkEvent,
    asked,
    batch_now,
    batches_at,
    blocks_in,
    effect_said,
    returned,
    verdict_said,
)
from flightedl.recording.values import assignment_of, decode

#: The script says what followed from the master's answer.
_NO_REPLY = JoinReply(member=0)


class _Script:
    """A membership that says what was recorded."""

    def __init__(self) -> None:
        self._said = MembershipSaid()
        self.lost_count = 0

    def begin(self, said: MembershipSaid) -> None:
        self._said = msgspec.structs.replace(
            said, begun=list(said.begun), joined=list(said.joined), members=list(said.members)
        )
        self.lost_count = 0

    # Asked more often than it was then, it differs already: what it says counts no more.

    @property
    def member(self) -> int:
        return self._said.members.pop(0) if self._said.members else 0

    def begin_batch(self, current: CurrentBatch) -> bool:
        if not self._said.begun:
            raise LookupError("the membership was not asked to begin a batch")
        is_member, member, step = self._said.begun.pop(0)
        if is_member:
            current.member, current.step = member, step
        return is_member

    def join_answered(self, _: JoinReply) -> Joined | Denied | NotYet:
        if not self._said.joined:
            raise LookupError("the master's answer did not come then")
        name, mode = self._said.joined.pop(0)
        if name == Joined.__name__:
            return Joined(None if mode is None else Mode.from_json(mode))
        return Denied() if name == Denied.__name__ else NotYet("")

    def lost(self) -> None:
        self.lost_count += 1


class StepsPlayer:
    """Steps to which recorded events happen."""

    def __init__(self) -> None:
        self._script = _Script()
        self._steps: Steps | None = None
        self._is_under_way = False
        #: The batches that the operation may change.
        self._batches: list[CurrentBatch] = []
        self._transfer: Transfer | None = None
        self._current: CurrentBatch | None = None
        self._opened: dict[int, CurrentBatch] = {}
        self._names: list[str] = []

    def play(self, _at: float, name: str, event: msgspec.Raw) -> Sequence[object]:
        """Let it happen; the effects."""
        if name not in EVENTS:
            raise CorruptError(f"no event of a trainer's steps: {name}")
        happened: Any = decode(event, EVENTS[name])
        if isinstance(happened, StepsBegun):
            shards = [blocks_in(blocks) for blocks in happened.shards]
            self._steps = Steps(shards, self._script, Mode.from_json(happened.mode))
            return ()
        if self._steps is None:
            raise CorruptError("steps that have not begun")
        if isinstance(happened, PserverAsked | TransferGivenUp):
            return self._transferring(happened)
        self._script.begin(happened.said if isinstance(happened, WorkEvent) else MembershipSaid())
        effects = self._happens(self._steps, happened)
        if self._steps.sums is not None:
            self._steps.sums.check()
        return [*[LOST] * self._script.lost_count, *effects]

    def _happens(self, steps: Steps, event: Any) -> list[object]:
        match event:
            case CarriedOut():
                return self._advanced(self._under_way(steps).answered(_NO_REPLY))
            case NotCarriedOut(error):
                return self._advanced(self._under_way(steps).failed(_error(error)))
            case SumGivenUp():
                batches = batches_at(steps, None)
                steps.give_up_sum()
                return [*map(batch_now, batches)]
            case BatchAbandoned():
                batches = batches_at(steps, None)
                steps.abandon_batch()
                return [*map(batch_now, batches)]
            case GradientsAdded(names):
                self._names = self._names if names is None else names
                return [{"Weight": steps.add(self._at_hand(), self._names)}]
            case _:
                return self._begun(steps, event)

    def _begun(self, steps: Steps, event: Any) -> list[object]:
        """Let an operation begin."""
        current: CurrentBatch | None = None
        match event:
            case BatchOpening():
                current = self._current = self._opening(event)
            case BatchClosing(is_rejected=is_rejected):
                current = self._at_hand()
                current.rejection = GradientError("") if is_rejected else None
            case StepCalled() | PushCalled() | PullCalled(is_of_batch=True):
                current = self._at_hand()
        self._batches = batches_at(steps, current)
        return self._advanced(self._first(steps, event, current))

    def _first(self, steps: Steps, event: Any, current: CurrentBatch | None) -> Next:
        match event:
            case PullCalled(_, blocks, min_version):
                return steps.pull(current, blocks_in(blocks), min_version)
            case RefreshCalled():
                return steps.refresh()
            case SumPushed():
                return steps.push_sum()
        assert current is not None, "the others are about a batch"
        match event:
            case BatchOpening():
                return steps.open_batch(current)
            case StepCalled():
                return steps.step(current)
            case PushCalled(blocks):
                return steps.push(current, blocks_in(blocks))
            case _:
                return steps.close_batch(current)

    def _opening(self, event: BatchOpening) -> CurrentBatch:
        """The batch, which is begun by now."""
        if event.is_new:
            given = assignment_of(event.epoch, event.task, event.attempt, event.batch + 1)
            current = CurrentBatch(given, event.batch, event.records)
            self._opened = {
                number: each for number, each in self._opened.items() if each.assignment.attempt == event.attempt
            } | {event.batch: current}
        elif event.batch not in self._opened:
            raise LookupError(f"batch {event.batch} was never opened")
        current = self._opened[event.batch]
        current.begin()
        return current

    def _at_hand(self) -> CurrentBatch:
        if self._current is None:
            raise CorruptError("no batch was opened")
        return self._current

    def _under_way(self, steps: Steps) -> Steps:
        if not self._is_under_way:
            raise CorruptError("nothing was begun")
        return steps

    def _advanced(self, step: Next) -> list[object]:
        """Return the next effect of the operation, or how it ends."""
        self._is_under_way = not isinstance(step, Done)
        if isinstance(step, Done):
            return returned(step.is_open, step.error, self._batches)
        self._transfer = step if isinstance(step, Transfer) else None
        return [effect_said(step)]

    def _transferring(self, event: PserverAsked | TransferGivenUp) -> list[object]:
        if self._transfer is None:
            raise LookupError("nothing is transferred")
        if isinstance(event, TransferGivenUp):
            self._transfer.give_up()
            return []
        shard = self._transfer.shards[event.index]
        effects: list[object] = [] if event.generation is None else [asked(shard.next_call(event.generation))]
        for (begin, end), outcome, version, having in event.answers:
            shard.answered(range(begin, end), outcome, version, having)
        if event.error:
            error = UnavailableError("") if event.is_transient else JobFailedError("")
            effects.append(verdict_said(shard.failed(error)))
        elif event.is_through:
            effects.append(verdict_said(shard.ended()))
        return effects


def _error(name: str) -> BaseException:
    """One of this class, as far as it matters: which ones are told apart is said in ``errors``."""
    if name == KeyboardInterrupt.__name__:
        return KeyboardInterrupt()
    known: Any = getattr(errors, name, None)
    is_ours = isinstance(known, type) and issubclass(known, FlightedlError)
    found: BaseException = known("") if is_ours else type(name, (Exception,), {})("")
    return found
