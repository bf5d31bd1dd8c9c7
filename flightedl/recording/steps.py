"""A trainer's steps that are recorded, with their transfers and sums; ``step_values`` says as what."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any

import msgspec

from flightedl.domain.consistency.modes import Mode
from flightedl.domain.retries import is_transient
from flightedl.domain.trainer.batches import CurrentBatch
from flightedl.domain.trainer.membership import Denied, Joined, NotYet
from flightedl.domain.trainer.steps import Done, Membership, Next, Steps
from flightedl.domain.trainer.transfers import Call, ShardTransfer, Transfer, Verdict
from flightedl.errors import FlightedlError
from flightedl.messages.tasks import JoinReply
from flightedl.recording.step_values import (
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
    Range,
    RefreshCalled,
    StepCalled,
    StepEvent,
    StepsBegun,
    SumGivenUp,
    SumPushed,
    TransferGivenUp,
    WorkEvent,
    asked,
    batch_now,
    batches_at,
    effect_said,
    ranges,
    returned,
    verdict_said,
)
from flightedl.recording.writer import CoreRecorder, Recorder


class _Listener:
    """The membership as the steps see it: remembers what it said."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._begun: list[tuple[bool, int, int]] = []
        self._joined: list[tuple[str, dict[str, Any] | None]] = []
        self._members: list[int] = []
        self.lost_count = 0

    def take(self) -> MembershipSaid:
        """What it has said since the last time."""
        said = MembershipSaid(self._begun, self._joined, self._members)
        self._begun, self._joined, self._members = [], [], []
        return said

    @property
    def member(self) -> int:
        self._members.append(self._membership.member)
        return self._members[-1]

    def begin_batch(self, current: CurrentBatch) -> bool:
        is_member = self._membership.begin_batch(current)
        self._begun.append((is_member, current.member, current.step) if is_member else (False, 0, 0))
        return is_member

    def join_answered(self, reply: JoinReply) -> Joined | Denied | NotYet:
        found = self._membership.join_answered(reply)
        mode = found.new_mode.to_json() if isinstance(found, Joined) and found.new_mode is not None else None
        self._joined.append((type(found).__name__, mode))
        return found

    def lost(self) -> None:
        self._membership.lost()
        self.lost_count += 1

    def take_lost(self) -> list[object]:
        """As many effects as it was lost since the last time."""
        count, self.lost_count = self.lost_count, 0
        return [LOST] * count


class _RecordedShard(ShardTransfer):
    """Records each call of its pserver when that is over."""

    __slots__ = ("_answers", "_call", "_is_asked")

    def __init__(self, index: int, whole: Transfer, pushes: set[int], pulls: dict[int, int]) -> None:
        super().__init__(index, whole, pushes, pulls)
        self._is_asked = False
        self._call: list[object] = []
        self._answers: list[tuple[Range, int, int | None, bytes]] = []

    def next_call(self, generation: int) -> Call:
        self.flush()
        call = super().next_call(generation)
        self._is_asked, self._call = True, [asked(call)]
        return call

    def answered(self, blocks: range, outcome: int, version: int | None = None, having: bytes = b"") -> None:
        super().answered(blocks, outcome, version, having)
        answer = ((blocks.start, blocks.stop), int(outcome), version, having)
        if self._answers and self._answers[-1][1:] == answer[1:] and self._answers[-1][0][1] == blocks.start:
            answer = ((self._answers.pop()[0][0], blocks.stop), *answer[1:])
        self._answers.append(answer)

    def ended(self) -> Verdict:
        with self._recorded.lock:
            verdict = super().ended()
            self._write(PserverAsked(self.index, self._generation, self._answers, is_through=True), verdict)
        return verdict

    def failed(self, error: FlightedlError) -> Verdict:
        with self._recorded.lock:
            verdict = super().failed(error)
            event = PserverAsked(
                self.index,
                self._generation,
                self._answers,
                error=type(error).__name__,
                is_transient=is_transient(error),
            )
            self._write(event, verdict)
        return verdict

    def flush(self) -> None:
        """What was asked last did not end, and nobody waits for it."""
        if self._is_asked:
            self._write(PserverAsked(self.index, self._generation, self._answers), None)

    @property
    def _generation(self) -> int | None:
        return self.generation if self._is_asked else None

    @property
    def _recorded(self) -> _RecordedTransfer:
        assert isinstance(self._whole, _RecordedTransfer)
        return self._whole

    def _write(self, event: PserverAsked, verdict: Verdict | None) -> None:
        effects = self._call if verdict is None else [*self._call, verdict_said(verdict)]
        self._recorded.record(event, effects)
        self._is_asked, self._call, self._answers = False, [], []


class _RecordedTransfer(Transfer):
    """A transfer whose parts are recorded; arguments as of ``Transfer``, after who records it."""

    __slots__ = ("_is_over", "_recorder", "lock")

    of_shard = _RecordedShard

    def __init__(self, recorder: CoreRecorder, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._recorder = recorder
        self._is_over = False
        #: Parts are recorded in the order in which they end, which is that in which it is given up.
        self.lock = threading.RLock()

    def record(self, event: StepEvent, effects: Sequence[object] = ()) -> None:
        """Unless nothing of it counts any more."""
        with self.lock:
            if not self._is_over:
                self._recorder.record(self._recorder.now(), event, effects)

    def give_up(self) -> None:
        with self.lock:
            super().give_up()
            self.record(TransferGivenUp())

    def close(self) -> None:
        """It was carried out, or nobody waits for it: what comes now is of no account."""
        with self.lock:
            for shard in self.shards:
                assert isinstance(shard, _RecordedShard)
                shard.flush()
            self._is_over = True


class RecordedSteps(Steps):
    """Records what happens to it; arguments as of ``trainer_steps``."""

    def __init__(
        self,
        recorder: Recorder,
        trainer: str,
        shards: Sequence[Collection[int]],
        membership: Membership,
        mode: Mode,
    ) -> None:
        self._listener = _Listener(membership)
        super().__init__(shards, self._listener, mode)
        self._recorder = recorder.core("steps")
        self.transfers = partial(_RecordedTransfer, self._recorder)
        #: The batch that was opened last, and others that may be opened again: those of its task.
        self._current: CurrentBatch | None = None
        self._opened: list[CurrentBatch] = []
        self._names: list[str] = []
        #: Of the operation that is under way: its transfer, and the batches that it may change.
        self._transfer_at_hand: _RecordedTransfer | None = None
        self._batches: list[CurrentBatch] = []
        #: What is called meanwhile is a part of the event that happens.
        self._is_inside = False
        self._record(StepsBegun(trainer, [ranges(blocks) for blocks in shards], mode.to_json()))

    def _record(self, event: StepEvent, effects: Sequence[object] = ()) -> None:
        self._recorder.record(self._recorder.now(), event, [*self._listener.take_lost(), *effects])

    def _begun(self, event: WorkEvent, begin: Callable[[], Next], current: CurrentBatch | None) -> Next:
        """Begin an operation, and record it up to its first effect."""
        self.drop()
        self._batches = batches_at(self, current)
        return self._advanced(event, begin)

    def _advanced(self, happened: WorkEvent, advance: Callable[[], Next]) -> Next:
        """Record an operation up to its next effect, or its end."""
        self._is_inside = True
        try:
            step = advance()
        except BaseException as error:
            self._end(happened, returned(None, error, self._batches))
            raise
        finally:
            self._is_inside = False
        if isinstance(step, Done):
            self._end(happened, returned(step.is_open, step.error, self._batches))
        else:
            self._transfer_at_hand = step if isinstance(step, _RecordedTransfer) else None
            self._end(happened, [effect_said(step)])
        return step

    def _close_transfer(self) -> None:
        transfer, self._transfer_at_hand = self._transfer_at_hand, None
        if transfer is not None:
            transfer.close()

    def _end(self, happened: WorkEvent, effects: Sequence[object]) -> None:
        self._record(msgspec.structs.replace(happened, said=self._listener.take()), effects)

    def answered(self, answer: JoinReply | None = None) -> Next:
        self._close_transfer()
        return self._advanced(CarriedOut(), partial(super().answered, answer))

    def failed(self, error: BaseException) -> Next:
        self._close_transfer()
        return self._advanced(NotCarriedOut(type(error).__name__), partial(super().failed, error))

    def open_batch(self, current: CurrentBatch) -> Next:
        given = current.assignment
        is_new = all(each is not current for each in self._opened)
        if is_new:
            attempt = given.attempt
            self._opened = [each for each in self._opened if each.assignment.attempt == attempt] + [current]
        self._current = current
        event = BatchOpening(given.epoch, given.task, given.attempt, current.number, current.record_count, is_new)
        return self._begun(event, partial(super().open_batch, current), current)

    def close_batch(self, current: CurrentBatch) -> Next:
        event = BatchClosing(is_rejected=current.rejection is not None)
        return self._begun(event, partial(super().close_batch, current), current)

    def step(self, current: CurrentBatch) -> Next:
        return self._begun(StepCalled(), partial(super().step, current), current)

    def push(self, current: CurrentBatch, blocks: Collection[int]) -> Next:
        return self._begun(PushCalled(ranges(blocks)), partial(super().push, current, blocks), current)

    def pull(self, current: CurrentBatch | None, blocks: Iterable[int], min_version: int = 0) -> Next:
        wanted = list(blocks)
        event = PullCalled(current is not None, ranges(wanted), min_version)
        return self._begun(event, partial(super().pull, current, wanted, min_version), current)

    def refresh(self) -> Next:
        return self._begun(RefreshCalled(), super().refresh, None)

    def push_sum(self) -> Next:
        return self._begun(SumPushed(), partial(super().push_sum), None)

    def give_up_sum(self) -> None:
        batches = batches_at(self, None)
        super().give_up_sum()
        if not self._is_inside:
            self._record(SumGivenUp(), [*map(batch_now, batches)])

    def abandon_batch(self) -> None:
        batches = batches_at(self, None)
        self._is_inside = True
        try:
            super().abandon_batch()
        finally:
            self._is_inside = False
        self._record(BatchAbandoned(), [*map(batch_now, batches)])

    def add(self, current: CurrentBatch, names: Collection[str]) -> int:
        given = list(names)
        event = GradientsAdded(None if given == self._names else given)
        self._names = given
        try:
            weight = super().add(current, names)
        except Exception as error:
            self._recorder.raised(self._recorder.now(), event, error)
            raise
        self._record(event, [{"Weight": weight}])
        return weight
