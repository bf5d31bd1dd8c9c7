"""A trainer's loop over its batches, and its membership, that are recorded, and ones that are made from a recording.

What the loop reads of a batch besides (whether it waits in a sum, has to be done again, and who answered for it) is
changed by whoever pushes it, so it is a part of each event that looks at it, and so is what the feed said.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import msgspec

from flightedl.domain.exactly_once.accumulation import SumAgain
from flightedl.domain.trainer.batches import CurrentBatch
from flightedl.domain.trainer.feed import AssignedTask
from flightedl.domain.trainer.readings import (
    BatchLoop,
    Handed,
    HandOut,
    Holder,
    Item,
    LoopStep,
    ReadBatch,
    ReadFailure,
    TaskEnd,
    Unreadable,
)
from flightedl.errors import CorruptError, DataError, GradientError
from flightedl.recording.values import assignment_of, by_name, decode
from flightedl.recording.writer import Recorder

Records = TypeVar("Records")


class _Event(msgspec.Struct, frozen=True):
    """What happens to a loop; a task is the number that it was told under."""


class LoopBegun(_Event, frozen=True):
    """The first event."""

    trainer: str


class ItemTaken(_Event, frozen=True):
    """As ``BatchLoop.take``. ``kind``: batch, end or failure."""

    kind: str
    task: int
    #: Of the task: epoch, number, first batch, end batch, attempt.
    place: tuple[int, int, int, int, int]
    #: Of the batch.
    number: int
    held: list[bool]


class BatchState(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a batch is by now that the user's code had."""

    number: int
    waits: bool = False
    must_repeat: bool = False
    generations: dict[int, int] = {}
    #: (first batch, how many) of the sum that it has to be pushed in again; None: none.
    again: tuple[int, int] | None = None
    #: Times that its gradient was rejected; 0 if the newest gradient was not.
    rejections: int = 0


class LoopAsked(_Event, frozen=True, omit_defaults=True):
    """As ``BatchLoop.next_step``."""

    batches: list[BatchState] = []
    held: list[bool] = []


class BatchDenied(_Event, frozen=True):
    """As ``BatchLoop.denied``."""

    number: int


class LoopSaid(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the loop does next; with a batch, which one."""

    step: str
    epoch: int = 0
    task: int = 0
    batch: int | None = None


class TaskReported(msgspec.Struct, frozen=True):
    """A task is reported to the feed; ``pservers`` None: it is handed back."""

    task: int
    pservers: list[int] | None


_EVENTS = by_name(_Event.__subclasses__())


class HolderAnswers:
    """The feed as a loop sees it: remembers what it said, and what it was told."""

    def __init__(self, feed: Holder) -> None:
        self._feed = feed
        self.held: list[bool] = []
        self.reported: list[TaskReported] = []

    def clear(self) -> None:
        self.held, self.reported = [], []

    def is_held(self, task: AssignedTask) -> bool:
        self.held.append(self._feed.is_held(task))
        return self.held[-1]

    def finished(self, task: AssignedTask, pservers: Sequence[int]) -> None:
        self._feed.finished(task, pservers)
        self.reported.append(TaskReported(task.number, list(pservers)))

    def batch_done(self, task: AssignedTask, number: int) -> None:
        self._feed.batch_done(task, number)

    def hand_back(self, task: AssignedTask) -> None:
        self._feed.hand_back(task)
        self.reported.append(TaskReported(task.number, None))


def loop_said(step: LoopStep[Any]) -> LoopSaid:
    """What a loop does next, as it is recorded."""
    name = type(step).__name__
    if isinstance(step, HandOut):
        item = step.handed.item
        given = item.task.assignment
        return LoopSaid(name, given.epoch, given.task, item.number)
    return LoopSaid(name, batch=step.failure.number) if isinstance(step, Unreadable) else LoopSaid(name)


def item_taken(item: Item[Any], held: list[bool]) -> ItemTaken:
    """The event of an item that is taken, where the feed said this."""
    given = item.task.assignment
    place = given.epoch, given.task, given.first_batch, given.end_batch, given.attempt
    kind = {ReadBatch: "batch", TaskEnd: "end", ReadFailure: "failure"}[type(item)]
    return ItemTaken(kind, item.task.number, place, 0 if isinstance(item, TaskEnd) else item.number, held)


class RecordedLoop(BatchLoop[Records]):
    """Records what happens to it; arguments as of ``batch_loop``."""

    def __init__(
        self,
        recorder: Recorder,
        trainer: str,
        feed: Holder,
        current_of: Callable[[ReadBatch[Records]], CurrentBatch],
    ) -> None:
        self._answers = HolderAnswers(feed)
        super().__init__(self._answers, current_of)
        self._recorder = recorder.core("loop")
        self._now = recorder.now
        self._recorder.record(self._now(), LoopBegun(trainer))

    def take(self, item: Item[Records]) -> None:
        self._answers.clear()
        super().take(item)
        self._recorder.record(self._now(), item_taken(item, self._answers.held))

    def next_step(self) -> LoopStep[Records]:
        self._answers.clear()
        states = [] if self.reading is None else [_state(handed) for handed in self.reading.handed]
        step = super().next_step()
        event = LoopAsked(states, self._answers.held)
        self._recorder.record(self._now(), event, [*self._answers.reported, loop_said(step)])
        return step

    def denied(self, handed: Handed[Records]) -> None:
        self._answers.clear()
        super().denied(handed)
        self._recorder.record(self._now(), BatchDenied(handed.item.number), self._answers.reported)


def _state(handed: Handed[Any]) -> BatchState:
    current = handed.current
    again = None if current.again is None else (current.again.first, current.again.batch_count)
    rejections = 0 if current.rejection is None else current.rejection_count
    generations = dict(sorted(current.generations.items()))
    return BatchState(handed.item.number, current.waits, current.must_repeat, generations, again, rejections)


class HolderScript:
    """A feed that says what was recorded."""

    def __init__(self) -> None:
        self.held: list[bool] = []
        self.reported: list[TaskReported] = []

    def begin(self, held: Iterable[bool]) -> None:
        self.held, self.reported = list(held), []

    def is_held(self, _: AssignedTask) -> bool:
        # Asked more often than it was then, it differs already: what it says counts no more.
        return self.held.pop(0) if self.held else False

    def finished(self, task: AssignedTask, pservers: Sequence[int]) -> None:
        self.reported.append(TaskReported(task.number, list(pservers)))

    def batch_done(self, task: AssignedTask, number: int) -> None: ...

    def hand_back(self, task: AssignedTask) -> None:
        self.reported.append(TaskReported(task.number, None))


class ItemsAgain:
    """Items that were read, made again: those of one task come one after the other."""

    def __init__(self) -> None:
        #: Of the newest one.
        self._task: AssignedTask | None = None

    def item(self, taken: ItemTaken) -> Item[None]:
        """The item that was taken."""
        if self._task is None or self._task.number != taken.task:
            epoch, task, first, end, attempt = taken.place
            self._task = AssignedTask(assignment_of(epoch, task, attempt, end, first), taken.task)
        if taken.kind == "batch":
            return ReadBatch(self._task, taken.number, None)
        return TaskEnd(self._task) if taken.kind == "end" else ReadFailure(self._task, taken.number, DataError(""))


class LoopPlayer:
    """A loop to which recorded events happen."""

    def __init__(self) -> None:
        self._script = HolderScript()
        self._loop: BatchLoop[None] = BatchLoop(self._script, replayed_batch)
        self._items = ItemsAgain()

    def play(self, _at: float, name: str, event: msgspec.Raw) -> Sequence[object]:
        """Let it happen; the effects."""
        if name not in _EVENTS:
            raise CorruptError(f"no event of a trainer's loop: {name}")
        happened: Any = decode(event, _EVENTS[name])
        match happened:
            case ItemTaken(held=held):
                self._script.begin(held)
                self._loop.take(self._items.item(happened))
                return ()
            case LoopAsked(states, held):
                self._script.begin(held)
                self._set(states)
                step = self._loop.next_step()
                self._loop.check()
                return [*self._script.reported, loop_said(step)]
            case BatchDenied(number):
                self._script.begin(())
                self._loop.denied(self._handed(number))
                return self._script.reported
            case _:
                return ()

    def _handed(self, number: int) -> Handed[None]:
        handed = () if self._loop.reading is None else self._loop.reading.handed
        for each in handed:
            if each.item.number == number:
                return each
        raise LookupError(f"batch {number} was never handed out")

    def _set(self, states: Iterable[BatchState]) -> None:
        for state in states:
            current = self._handed(state.number).current
            current.waits, current.must_repeat = state.waits, state.must_repeat
            current.generations = dict(state.generations)
            current.again = None if state.again is None else SumAgain(*state.again, {})
            current.rejection = GradientError("") if state.rejections else None
            current.rejection_count = state.rejections


def replayed_batch(item: ReadBatch[None]) -> CurrentBatch:
    """What is pushed of a batch, without any records."""
    return CurrentBatch(item.task.assignment, item.number, 1)
