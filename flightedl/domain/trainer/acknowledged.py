"""Loop whose batches are done when the user acknowledges them, for trainers without a model on the servers.

Batches are handed out in order, regardless of how many are unacknowledged. A task is reported when all of its batches
were handed out and are done. A task with a batch that is never acknowledged is eventually returned to the master.

A task may be revoked while the user's code holds some of its batches. These batches keep their places until they are
acknowledged, so that ``done`` without an argument never means a later batch. Acknowledging them returns ``Done.TAKEN``.
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

    #: This trainer has done the batch.
    COUNTED = "counted"
    #: The batch's task was revoked. Another trainer does the batch, so it must not count here.
    TAKEN = "taken"


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """Outcome of a batch that is done, with the report of its task if it was the last one."""

    outcome: Done
    report: Finished | HandBack | None = None


class AcknowledgedLoop:
    """The user's loop. ``held`` always contains the numbers of the tasks that the feed holds now."""

    def __init__(self) -> None:
        #: Readings of unreported tasks, and of revoked tasks with unfinished batches, in the order in which they began.
        self._readings: list[Reading] = []
        self._due: list[LoopStep] = []

    @property
    def not_done(self) -> list[HandOut]:
        """Unfinished batches that were handed out or are about to be handed out, oldest first."""
        return [HandOut(reading.task, handed.batch) for reading in self._readings for handed in reading.handed]

    def accept(self, item: Item, held: Collection[int]) -> LoopStep:
        """Accept the next item in reading order; return the next step."""
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
        """Acknowledge a batch, which the feed already knows to be done.

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
        """Drop revoked tasks whose batches are all acknowledged."""
        self._readings = [each for each in self._readings if each.handed or each.task.number in held]

    def check(self) -> None:
        for reading in self._readings:
            reading.check()
