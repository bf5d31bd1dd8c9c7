"""What a trainer knows of the job's end: recorded, and from a recording.

What is heard before the end changes nothing, and is recorded where it is something new; which processes may be read,
once there is an end.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import msgspec

from flightedl.domain.trainer.ending import JobEnd
from flightedl.errors import CorruptError, FlightedlError
from flightedl.messages.tasks import TasksReply
from flightedl.recording.values import by_name, decode
from flightedl.recording.writer import CoreRecorder


class _Event(msgspec.Struct, frozen=True):
    """What happens to a trainer's knowledge of the end."""


class _Told(_Event, frozen=True, omit_defaults=True):
    """What matters of the master's answer."""

    outcome: str
    pservers: list[int] = []
    is_ending: bool = False


class EndHeard(_Told, frozen=True):
    """As ``JobEnd.heard``."""


class ReadAsked(_Event, frozen=True):
    """As ``JobEnd.may_read``."""

    index: int
    generation: int


class EndRequired(_Told, frozen=True, kw_only=True):
    """As ``JobEnd.require``."""

    index: int
    generation: int


class MayRead(msgspec.Struct, frozen=True):
    """Whether a process may be read."""

    may: bool


_EVENTS = by_name((EndHeard, ReadAsked, EndRequired))


class RecordedEnd(JobEnd):
    """Records what happens to it.

    Args:
        recorder: Of the core.
    """

    def __init__(self, recorder: CoreRecorder) -> None:
        super().__init__()
        self._recorder = recorder
        self._lock = threading.RLock()
        self._said: EndHeard | None = None
        #: What asks once more is a part of that event.
        self._is_inside = False

    def heard(self, reply: TasksReply) -> None:
        outcome = reply.outcome if reply.outcome == "epochs_done" else "none_now"
        event = EndHeard(outcome, list(reply.pservers), reply.is_ending)
        with self._lock:
            super().heard(reply)
            if event != self._said:
                self._said = event
                self._recorder.record(self._recorder.now(), event)

    def may_read(self, index: int, generation: int) -> bool:
        with self._lock:
            found = super().may_read(index, generation)
            if self._final is not None and not self._is_inside:
                self._recorder.record(self._recorder.now(), ReadAsked(index, generation), [MayRead(found)])
        return found

    def require(self, reply: TasksReply, index: int, generation: int) -> None:
        event = EndRequired(reply.outcome, list(reply.pservers), reply.is_ending, index=index, generation=generation)
        with self._lock:
            self._is_inside = True
            try:
                super().require(reply, index, generation)
            except FlightedlError as error:
                self._recorder.raised(self._recorder.now(), event, error)
                raise
            finally:
                self._is_inside = False
            self._recorder.record(self._recorder.now(), event)


class EndPlayer:
    """Knowledge of the end to which recorded events happen."""

    def __init__(self) -> None:
        self._end = JobEnd()

    def play(self, _at: float, name: str, event: msgspec.Raw) -> Sequence[object]:
        """Let it happen; the effects."""
        if name not in _EVENTS:
            raise CorruptError(f"no event of a job's end: {name}")
        happened: Any = decode(event, _EVENTS[name])
        match happened:
            case EndHeard():
                self._end.heard(_reply(happened))
            case ReadAsked(index, generation):
                return (MayRead(self._end.may_read(index, generation)),)
            case EndRequired():
                self._end.require(_reply(happened), happened.index, happened.generation)
        return ()


def _reply(told: _Told) -> TasksReply:
    return TasksReply(assignments=[], outcome=told.outcome, pservers=told.pservers, is_ending=told.is_ending)
