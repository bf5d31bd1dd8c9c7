"""A trainer's membership that is recorded, and one that is made from a recording.

Several threads speak of it; what is recorded is said one after the other.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import msgspec

from flightedl.domain.consistency.modes import Mode
from flightedl.domain.trainer.batches import CurrentBatch
from flightedl.domain.trainer.membership import Denied, Joined, NotYet, TrainerMembership
from flightedl.errors import CorruptError
from flightedl.messages.tasks import JoinReply, TasksReply
from flightedl.recording.values import assignment_of, by_name, decode
from flightedl.recording.writer import Recorder


class _Event(msgspec.Struct, frozen=True):
    """What happens to a membership."""


class MembershipBegun(_Event, frozen=True):
    """The first event."""

    trainer: str


class ModelKnown(_Event, frozen=True):
    """As ``TrainerMembership.has_model``."""

    mode: dict[str, Any]


class MembershipLost(_Event, frozen=True):
    """As ``TrainerMembership.lost``."""


class BatchOpened(_Event, frozen=True):
    """As ``TrainerMembership.begin_batch``."""

    epoch: int
    task: int
    batch: int


class JoinAnswered(_Event, frozen=True):
    """As ``TrainerMembership.join_answered``."""

    reply: JoinReply


class MemberTold(_Event, frozen=True):
    """As ``TrainerMembership.tasks_answered``: what the master says of it in passing."""

    member_then: int
    member: int


class AllDone(_Event, frozen=True):
    """As ``TrainerMembership.all_done``."""


class MemberNow(msgspec.Struct, frozen=True):
    """What the membership is afterwards."""

    member: int
    epoch: int


class Opened(msgspec.Struct, frozen=True):
    """How a batch is opened; not ``is_member``: the trainer has to join first."""

    is_member: bool
    member: int
    step: int


_EVENTS = by_name(_Event.__subclasses__())


def _joined(found: Joined | Denied | NotYet) -> object:
    if not isinstance(found, Joined):
        return {type(found).__name__: {}}
    return {"Joined": {"new_mode": None if found.new_mode is None else found.new_mode.to_json()}}


class RecordedMembership(TrainerMembership):
    """Records what happens to it.

    Args:
        recorder: Of the process.
        trainer: Its id.
    """

    def __init__(self, recorder: Recorder, trainer: str) -> None:
        super().__init__()
        self._lock = threading.RLock()
        self._recorder = recorder.core("membership")
        self._now = recorder.now
        self._record(MembershipBegun(trainer))

    def _record(self, event: _Event, *effects: object) -> None:
        self._recorder.record(self._now(), event, [*effects, MemberNow(self.member, self.epoch)])

    def has_model(self, mode: Mode) -> None:
        with self._lock:
            super().has_model(mode)
            self._record(ModelKnown(mode.to_json()))

    def lost(self) -> None:
        with self._lock:
            super().lost()
            self._record(MembershipLost())

    def begin_batch(self, current: CurrentBatch) -> bool:
        given = current.assignment
        with self._lock:
            is_member = super().begin_batch(current)
            opened = Opened(is_member, current.member if is_member else 0, current.step if is_member else 0)
            self._record(BatchOpened(given.epoch, given.task, current.number), opened)
        return is_member

    def join_answered(self, reply: JoinReply) -> Joined | Denied | NotYet:
        with self._lock:
            found = super().join_answered(reply)
            self._record(JoinAnswered(reply), _joined(found))
        return found

    def tasks_answered(self, member_then: int, reply: TasksReply) -> None:
        with self._lock:
            super().tasks_answered(member_then, reply)
            self._record(MemberTold(member_then, reply.member))

    def all_done(self) -> None:
        with self._lock:
            super().all_done()
            self._record(AllDone())


class MembershipPlayer:
    """A membership to which recorded events happen."""

    def __init__(self) -> None:
        self._membership = TrainerMembership()

    def play(self, _at: float, name: str, event: msgspec.Raw) -> Sequence[object]:
        """Let it happen; the effects."""
        if name not in _EVENTS:
            raise CorruptError(f"no event of a trainer's membership: {name}")
        effects = self._happens(decode(event, _EVENTS[name]))
        return [*effects, MemberNow(self._membership.member, self._membership.epoch)]

    def _happens(self, event: Any) -> list[object]:
        membership = self._membership
        match event:
            case ModelKnown(mode):
                membership.has_model(Mode.from_json(mode))
            case MembershipLost():
                membership.lost()
            case BatchOpened(epoch, task, batch):
                return [self._opened(epoch, task, batch)]
            case JoinAnswered(reply):
                return [_joined(membership.join_answered(reply))]
            case MemberTold(member_then, member):
                membership.tasks_answered(member_then, TasksReply(assignments=[], outcome="", member=member))
            case AllDone():
                membership.all_done()
        return []

    def _opened(self, epoch: int, task: int, batch: int) -> Opened:
        current = CurrentBatch(assignment_of(epoch, task, 0, batch + 1), batch, 1)
        is_member = self._membership.begin_batch(current)
        return Opened(is_member, current.member if is_member else 0, current.step if is_member else 0)
