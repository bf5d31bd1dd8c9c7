"""A loop for jobs without a model, in which a batch is done when the user acknowledges it.

Batches are handed out in order, even if earlier batches are not acknowledged. A task is reported when all of its
batches have been handed out and are done. A task with a batch that is never acknowledged eventually goes back to the
master.

A task may be revoked while the user's code holds some of its batches. These batches keep their places until they are
acknowledged, so ``done`` without an argument never refers to a later batch. Acknowledging them returns ``Done.TAKEN``.
"""

from __future__ import annotations

import enum
from collections.abc import Collection
from dataclasses import dataclass

from flightedl.domain.trainer.batches import Batch
from flightedl.domain.trainer.readings import (
    Finished,
    HandBack,
    HandOut,
    Item,
    LoopStep,
    NeedItem,
    ReadFailure,
    Reading,
    TaskEnd,
    Unreadable,
)
from flightedl.errors import UsageError

NOT_GIVEN = "this batch is none of those that the loop gave and that are not done"


class Done(enum.Enum):
    """Outcome of acknowledging a batch."""

    #: This trainer has processed the batch.
    COUNTED = "counted"
    #: The batch's task was revoked. Another trainer processes the batch, so it must not count here.
    TAKEN = "taken"


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """Outcome of a batch that the user acknowledged, with the task's report if it was the task's last batch."""

    outcome: Done
    report: Finished | HandBack | None = None


class AcknowledgedLoop:
    """The user's loop. ``held`` always contains the numbers of the tasks that the feed holds at the moment."""

    def __init__(self) -> None:
        #: Readings of unreported tasks, and of revoked tasks with unfinished batches, in the order in which they began.
        self._readings: list[Reading] = []
        self._due: list[LoopStep] = []

    @property
    def not_done(self) -> list[HandOut]:
        """Unfinished batches that have been handed out or will be handed out next, oldest first."""
        return [HandOut(reading.task, handed.batch) for reading in self._readings for handed in reading.handed]

    def accept(self, item: Item, held: Collection[int]) -> LoopStep:
        """Accept the next item in reading order, and return the next step."""
        self._forget(held)
        if item.task.number in held:
            if not self._readings or item.task.number != self._readings[-1].task.number:
                self._readings.append(Reading(item.task))
            reading = self._readings[-1]
            if isinstance(item, TaskEnd):
                reading.is_at_end = True
                if (report := self._end(reading)) is not None:
                    self._due.append(report)
            elif isinstance(item, ReadFailure):
                self._due.append(Unreadable(item))
            else:
                self._due.append(reading.hand_out(item.batch))
        return self.next_step()

    def next_step(self) -> LoopStep:
        return self._due.pop(0) if self._due else NeedItem()

    def denied(self, batch: Batch, held: Collection[int]) -> LoopStep:
        """Record that the batch's task was revoked before the user's code received the batch."""
        reading = self._without(batch)
        self._forget(set(held) - {batch.reading})
        return HandBack(reading.task)

    def done(self, batch: Batch, held: Collection[int]) -> Acknowledged:
        """Acknowledge a batch that the feed has already recorded as done.

        Raises:
            UsageError: the batch is not among ``not_done``.
        """
        reading = self._without(batch)
        if batch.reading not in held:
            self._forget(held)
            return Acknowledged(Done.TAKEN)
        reading.settle(batch.number, {})
        return Acknowledged(Done.COUNTED, self._end(reading))

    def _without(self, batch: Batch) -> Reading:
        """Drop a batch and return its reading."""
        for reading in self._readings:
            for handed in reading.handed:
                if handed.batch == batch:
                    reading.handed.remove(handed)
                    return reading
        raise UsageError(NOT_GIVEN)

    def _end(self, reading: Reading) -> Finished | HandBack | None:
        if not reading.is_at_end or reading.handed:
            return None
        self._readings.remove(reading)
        return reading.end()

    def _forget(self, held: Collection[int]) -> None:
        """Drop revoked tasks once all of their batches are acknowledged."""
        self._readings = [each for each in self._readings if each.handed or each.task.number in held]

    def check(self) -> None:
        for reading in self._readings:
            reading.check()
