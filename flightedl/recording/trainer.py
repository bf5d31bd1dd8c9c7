"""A trainer's feed that is recorded, and one that is made from a recording.

Where its records lie is left out of an assignment: the feed does not look at it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from flightedl.domain.retries import is_transient
from flightedl.domain.trainer.feed import Ask, AssignedTask, Feed, LookAgain, NextStep
from flightedl.errors import CorruptError, FlightedlError, JobFailedError, UnavailableError
from flightedl.messages.tasks import TasksReply
from flightedl.recording.redaction import text_without
from flightedl.recording.values import by_name, decode
from flightedl.recording.writer import Recorder


class _Event(msgspec.Struct, frozen=True):
    """What happens to a feed; a task is the number that it was told under."""


class FeedBegun(_Event, frozen=True):
    """The first event. ``evaluation``: whose tasks they are; empty: of the training data."""

    cover_s: float
    trainer: str
    evaluation: str


class TaskBegun(_Event, frozen=True):
    """The reader takes the next task."""


class TaskFinished(_Event, frozen=True):
    """As ``Feed.finished``."""

    task: int
    pservers: list[int]
    metrics: dict[str, tuple[float, float]]


class BatchDone(_Event, frozen=True):
    """As ``Feed.batch_done``."""

    task: int
    number: int
    is_urgent: bool


class TaskFailed(_Event, frozen=True):
    """As ``Feed.failed``."""

    task: int
    error: str
    batch: int | None
    place: str


class TaskHandedBack(_Event, frozen=True):
    """As ``Feed.hand_back``."""

    task: int


class RegisteredAgain(_Event, frozen=True):
    """As ``Feed.registered_again``."""


class FeedRetired(_Event, frozen=True):
    """As ``Feed.retire``."""

    kept: int | None


class FeedClosed(_Event, frozen=True):
    """As ``Feed.close``."""


class StepAsked(_Event, frozen=True):
    """What there is to say to the master, where that is something."""


class MasterAnswered(_Event, frozen=True):
    """The answer to what was said last."""

    reply: TasksReply


class AskFailed(_Event, frozen=True):
    """What was said last did not get an answer."""

    error: str
    is_transient: bool


class TaskTaken(msgspec.Struct, frozen=True):
    """The effect of ``TaskBegun``: which one, and where it is in the epoch."""

    task: int
    epoch: int
    number: int
    attempt: int


_EVENTS = by_name(_Event.__subclasses__())


def _taken(task: AssignedTask) -> TaskTaken:
    return TaskTaken(task.number, task.assignment.epoch, task.assignment.task, task.assignment.attempt)


class RecordedFeed(Feed):
    """Records what happens to it; ``cover_s`` as of ``Feed``, the others as of ``trainer_feed``."""

    def __init__(self, recorder: Recorder, cover_s: float, trainer: str, evaluation: str) -> None:
        super().__init__(cover_s)
        self._recorder = recorder.core("feed")
        self._now = recorder.now
        self._record(FeedBegun(cover_s, trainer, evaluation))

    def _record(self, event: _Event, *effects: object, at: float | None = None) -> None:
        self._recorder.record(self._now() if at is None else at, event, effects)

    def begin(self) -> AssignedTask | None:
        task = super().begin()
        if task is not None:
            self._record(TaskBegun(), _taken(task))
        return task

    def finished(
        self,
        task: AssignedTask,
        pservers: Sequence[int],
        now: float,
        metrics: Mapping[str, tuple[float, float]] | None = None,
    ) -> None:
        super().finished(task, pservers, now, metrics)
        self._record(TaskFinished(task.number, list(pservers), dict(metrics or {})), at=now)

    def failed(self, task: AssignedTask, error: str, batch: int | None, now: float, place: str = "") -> None:
        super().failed(task, error, batch, now, place)
        self._record(TaskFailed(task.number, text_without(error), batch, text_without(place)), at=now)

    def batch_done(self, task: AssignedTask, number: int, *, is_urgent: bool = False) -> bool:
        is_news = super().batch_done(task, number, is_urgent=is_urgent)
        self._record(BatchDone(task.number, number, is_urgent))
        return is_news

    def hand_back(self, task: AssignedTask, now: float) -> None:
        super().hand_back(task, now)
        self._record(TaskHandedBack(task.number), at=now)

    def registered_again(self) -> None:
        super().registered_again()
        self._record(RegisteredAgain())

    def retire(self, kept: AssignedTask | None, now: float) -> None:
        super().retire(kept, now)
        self._record(FeedRetired(None if kept is None else kept.number), at=now)

    def close(self) -> None:
        super().close()
        self._record(FeedClosed())

    def next_step(self, now: float) -> NextStep:
        step = super().next_step(now)
        if not isinstance(step, LookAgain):
            self._record(StepAsked(), step, at=now)
        return step

    def answered(self, ask: Ask, reply: TasksReply, now: float) -> None:
        super().answered(ask, reply, now)
        given = [replace(assignment, chunks=[]) for assignment in reply.assignments]
        self._record(MasterAnswered(replace(reply, assignments=given)), at=now)

    def ask_failed(self, error: Exception, now: float) -> None:
        super().ask_failed(error, now)
        may_help = isinstance(error, FlightedlError) and is_transient(error)
        self._record(AskFailed(type(error).__name__, may_help), at=now)


class FeedPlayer:
    """A feed to which recorded events happen."""

    def __init__(self) -> None:
        self._feed: Feed | None = None
        self._asked: Ask | None = None
        #: By number, what it was told and is not over.
        self._tasks: dict[int, AssignedTask] = {}

    def play(self, at: float, name: str, event: msgspec.Raw) -> Sequence[object]:
        """Let it happen; the effects."""
        if name not in _EVENTS:
            raise CorruptError(f"no event of a trainer's feed: {name}")
        happened: Any = decode(event, _EVENTS[name])
        if isinstance(happened, FeedBegun):
            self._feed = Feed(happened.cover_s)
            return ()
        if self._feed is None:
            raise CorruptError("a feed that has not begun")
        effects = self._happens(self._feed, at, happened)
        self._feed.check()
        # What was taken away is still spoken of by a reader that has not noticed.
        self._tasks.update((task.number, task) for task in self._feed.held)
        return effects

    def _happens(self, feed: Feed, at: float, event: Any) -> Sequence[object]:  # noqa: C901 - a line for each event
        match event:
            case TaskBegun():
                task = feed.begin()
                return () if task is None else (_taken(task),)
            case TaskFinished(task, pservers, metrics):
                feed.finished(self._over(task), pservers, at, metrics)
            case TaskFailed(task, error, batch, place):
                feed.failed(self._over(task), error, batch, at, place)
            case BatchDone(task, number, is_urgent):
                feed.batch_done(self._over(task), number, is_urgent=is_urgent)
            case TaskHandedBack(task):
                feed.hand_back(self._over(task), at)
            case RegisteredAgain():
                feed.registered_again()
            case FeedRetired(kept):
                feed.retire(None if kept is None else self._tasks.get(kept), at)
            case FeedClosed():
                feed.close()
            case StepAsked():
                step = feed.next_step(at)
                if isinstance(step, Ask):
                    self._asked = step
                return (step,)
            case MasterAnswered(reply):
                feed.answered(self._last_ask(), reply, at)
            case AskFailed(_, may_help):
                feed.ask_failed(UnavailableError("") if may_help else JobFailedError(""), at)
        return ()

    def _over(self, task: int) -> AssignedTask:
        if task not in self._tasks:
            raise CorruptError(f"task {task} was never told")
        return self._tasks[task]

    def _last_ask(self) -> Ask:
        if self._asked is None:
            raise CorruptError("an answer to nothing")
        return self._asked
