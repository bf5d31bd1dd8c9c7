"""Batches that count as done when the user says so: for trainers that share data and have no model on servers.

Batches are handed out as they come, however many of them are not done. A task is reported when all of its batches were
handed out and are done; what is never done goes back with its task. Nothing is handed out again here: a batch is done
or it is not, and if not, some trainer gets its task again as a whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic

from flightedl.domain.trainer.batches import CurrentBatch
from flightedl.domain.trainer.readings import (
    Handed,
    HandOut,
    Holder,
    Item,
    LoopStep,
    NeedItem,
    ReadBatch,
    ReadFailure,
    Reading,
    Records,
    TaskEnd,
    Unreadable,
)


class AcknowledgedLoop(Generic[Records]):
    """What the user's loop does next. Arguments: as of ``BatchLoop``."""

    def __init__(self, feed: Holder, current_of: Callable[[ReadBatch[Records]], CurrentBatch]) -> None:
        self._feed = feed
        self._current_of = current_of
        #: Of tasks that are not reported, in the order in which they were begun.
        self._readings: list[Reading[Records]] = []
        #: Those of them that have had all of their batches.
        self._at_end: list[Reading[Records]] = []
        self._due: list[HandOut[Records] | Unreadable] = []

    @property
    def not_done(self) -> list[Handed[Records]]:
        """Batches that were handed out, or are about to be, and are not done; the oldest first."""
        return [handed for reading in self._readings for handed in reading.handed]

    def take(self, item: Item[Records]) -> None:
        """What was read comes, in its order."""
        self._forget()
        if not self._feed.is_held(item.task):
            return
        if not self._readings or item.task is not self._readings[-1].task:
            self._readings.append(Reading(item.task))
        reading = self._readings[-1]
        if isinstance(item, TaskEnd):
            self._at_end.append(reading)
            self._end(reading)
        elif isinstance(item, ReadFailure):
            self._due.append(Unreadable(item))
        else:
            handed = Handed(item, self._current_of(item))
            reading.handed.append(handed)
            self._due.append(HandOut(handed))

    def next_step(self) -> LoopStep[Records]:
        """What to do now."""
        if self._due:
            step = self._due.pop(0)
            if isinstance(step, HandOut):
                step.handed.current.begin()
            return step
        return NeedItem()

    def denied(self, handed: Handed[Records]) -> None:
        """The work that this batch belongs to was taken away."""
        self._feed.hand_back(handed.item.task)
        self._forget()

    def done(self, handed: Handed[Records]) -> None:
        """This batch is done; of a task that was taken away meanwhile it does not count."""
        for reading in self._readings:
            if handed in reading.handed:
                reading.handed.remove(handed)
                reading.settle(handed.item.number, {})
                self._end(reading)
                return

    def _end(self, reading: Reading[Records]) -> None:
        if reading not in self._at_end or reading.handed:
            return
        self._readings.remove(reading)
        self._at_end.remove(reading)
        if not self._feed.is_held(reading.task):
            return
        if reading.is_settled:
            self._feed.finished(reading.task, [])
        else:
            self._feed.hand_back(reading.task)

    def _forget(self) -> None:
        """What is somebody else's now."""
        for reading in [each for each in self._readings if not self._feed.is_held(each.task)]:
            self._readings.remove(reading)
            if reading in self._at_end:
                self._at_end.remove(reading)

    def check(self) -> None:
        """Assert the invariants."""
        for reading in self._readings:
            reading.check()
        assert all(reading in self._readings for reading in self._at_end)
