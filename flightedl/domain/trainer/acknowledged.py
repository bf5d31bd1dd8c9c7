"""Batches that count as done when the user says so: for trainers that share data and have no model on servers.

Batches are handed out as they come, however many of them are not done. A task is reported when all of its batches were
handed out and are done; what is never done goes back with its task.

A task may be taken away while the user's code has batches of it. These batches stay in the user's order until the user
says that they are done, so that ``done`` without a batch never names a later one. Such a ``done`` is answered
``Done.TAKEN``.
"""

from __future__ import annotations

import enum
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
from flightedl.errors import UsageError

NOT_GIVEN = "this batch is none of those that the loop gave and that are not done"


class Done(enum.Enum):
    """Outcome of saying that a batch is done."""

    #: The batch is done by this trainer.
    COUNTED = "counted"
    #: The batch's task was taken from this trainer. Another trainer does the batch, so it must not count here.
    TAKEN = "taken"


class AcknowledgedLoop(Generic[Records]):
    """What the user's loop does next. Arguments: as of ``BatchLoop``."""

    def __init__(self, feed: Holder, current_of: Callable[[ReadBatch[Records]], CurrentBatch]) -> None:
        self._feed = feed
        self._current_of = current_of
        #: Of tasks that are not reported, and of those taken away of which batches are not done, in the order in which
        #: they were begun.
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
        """The work that this batch belongs to was taken away before the user's code had the batch."""
        self._feed.hand_back(handed.item.task)
        self._reading_of(handed).handed.remove(handed)
        self._forget()

    def done(self, handed: Handed[Records]) -> Done:
        """The user says that a batch is done.

        Raises:
            UsageError: the batch is not among ``not_done``.
        """
        reading = self._reading_of(handed)
        reading.handed.remove(handed)
        self._feed.batch_done(reading.task, handed.item.number)
        if not self._feed.is_held(reading.task):
            handed.current.must_repeat = True
            self._forget()
            return Done.TAKEN
        reading.settle(handed.item.number, {})
        self._end(reading)
        return Done.COUNTED

    def _reading_of(self, handed: Handed[Records]) -> Reading[Records]:
        for reading in self._readings:
            if handed in reading.handed:
                return reading
        raise UsageError(NOT_GIVEN)

    def _end(self, reading: Reading[Records]) -> None:
        if reading not in self._at_end or reading.handed:
            return
        self._readings.remove(reading)
        self._at_end.remove(reading)
        if reading.is_settled:
            self._feed.finished(reading.task, [])
        else:
            self._feed.hand_back(reading.task)

    def _forget(self) -> None:
        """Drop tasks that were taken away, once the user has said of all of their batches that they are done."""
        for reading in [each for each in self._readings if not (each.handed or self._feed.is_held(each.task))]:
            self._readings.remove(reading)
            if reading in self._at_end:
                self._at_end.remove(reading)

    def check(self) -> None:
        """Assert the invariants."""
        for reading in self._readings:
            reading.check()
        assert all(reading in self._readings for reading in self._at_end)
