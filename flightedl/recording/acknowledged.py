"""A trainer's loop over batches that the user says are done: recorded, and from a recording."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from flightedl.domain.trainer.acknowledged import AcknowledgedLoop, Done
from flightedl.domain.trainer.batches import CurrentBatch
from flightedl.domain.trainer.readings import Handed, Holder, Item, LoopStep, ReadBatch, Records
from flightedl.errors import CorruptError
from flightedl.recording.loops import (
    HolderAnswers,
    HolderScript,
    ItemsAgain,
    ItemTaken,
    LoopBegun,
    item_taken,
    loop_said,
    replayed_batch,
)
from flightedl.recording.values import by_name, decode
from flightedl.recording.writer import Recorder


class StepAsked(msgspec.Struct, frozen=True):
    """As ``AcknowledgedLoop.next_step``."""


class BatchDone(msgspec.Struct, frozen=True):
    """As ``AcknowledgedLoop.done``; a task is the number that the loop was told it under."""

    task: int
    number: int
    held: list[bool]


class BatchDenied(msgspec.Struct, frozen=True):
    """As ``AcknowledgedLoop.denied``."""

    task: int
    number: int
    held: list[bool]


_EVENTS = by_name((LoopBegun, ItemTaken, StepAsked, BatchDone, BatchDenied))


class RecordedAcknowledgedLoop(AcknowledgedLoop[Records]):
    """Records what happens to it; arguments as of ``acknowledged_loop``."""

    def __init__(
        self,
        recorder: Recorder,
        trainer: str,
        feed: Holder,
        current_of: Callable[[ReadBatch[Records]], CurrentBatch],
    ) -> None:
        self._answers = HolderAnswers(feed)
        super().__init__(self._answers, current_of)
        self._recorder = recorder.core("acknowledged")
        self._record(LoopBegun(trainer))

    def _record(self, event: msgspec.Struct, *effects: object) -> None:
        self._recorder.record(self._recorder.now(), event, [*self._answers.reported, *effects])

    def take(self, item: Item[Records]) -> None:
        self._answers.clear()
        super().take(item)
        self._record(item_taken(item, self._answers.held))

    def next_step(self) -> LoopStep[Records]:
        self._answers.clear()
        step = super().next_step()
        self._record(StepAsked(), loop_said(step))
        return step

    def done(self, handed: Handed[Records]) -> Done:
        self._answers.clear()
        outcome = super().done(handed)
        self._record(BatchDone(handed.item.task.number, handed.item.number, self._answers.held))
        return outcome

    def denied(self, handed: Handed[Records]) -> None:
        self._answers.clear()
        super().denied(handed)
        self._record(BatchDenied(handed.item.task.number, handed.item.number, self._answers.held))


class AcknowledgedPlayer:
    """A loop to which recorded events happen."""

    def __init__(self) -> None:
        self._script = HolderScript()
        self._items = ItemsAgain()
        self._loop: AcknowledgedLoop[None] = AcknowledgedLoop(self._script, replayed_batch)

    def play(self, _at: float, name: str, event: msgspec.Raw) -> Sequence[object]:
        """Let it happen; the effects."""
        if name not in _EVENTS:
            raise CorruptError(f"no event of a loop over batches that are said to be done: {name}")
        happened: Any = decode(event, _EVENTS[name])
        self._script.begin(getattr(happened, "held", ()))
        said: list[object] = []
        match happened:
            case ItemTaken():
                self._loop.take(self._items.item(happened))
            case StepAsked():
                said.append(loop_said(self._loop.next_step()))
            case BatchDone(task, number):
                self._loop.done(self._handed(task, number))
            case BatchDenied(task, number):
                self._loop.denied(self._handed(task, number))
        self._loop.check()
        return [*self._script.reported, *said]

    def _handed(self, task: int, number: int) -> Handed[None]:
        for each in self._loop.not_done:
            if (each.item.task.number, each.item.number) == (task, number):
                return each
        raise LookupError(f"batch {number} was never handed out")
