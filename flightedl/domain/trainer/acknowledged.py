"""Batches that count as done when the user says so: for trainers that share data and have no model on servers.

Batches are handed out as they come, however many of them are not done. A task is reported when all of its batches were
handed out and are done; what is never done goes back with its task.

A task may be taken away while the user's code has batches of it. These batches stay in the user's order until the user
says that they are done, so that ``done`` without a batch never names a later one. Such a ``done`` is answered
``Done.TAKEN``.
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
    """Outcome of saying that a batch is done."""

    #: The batch is done by this trainer.
    COUNTED = "counted"
    #: The batch's task was taken from this trainer. Another trainer does the batch, so it must not count here.
    TAKEN = "taken"


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """A batch is done: with this outcome, and with the report of its task if it was the last one."""

    outcome: Done
    report: Finished | HandBack | None = None


class AcknowledgedLoop:
    """What the user's loop does next. ``held``: numbers of the tasks that the feed holds by now."""

    def __init__(self) -> None:
        #: Of tasks that are not reported, and of those taken away of which batches are not done, in the order in which
        #: they were begun.
        self._readings: list[Reading] = []
        self._due: list[LoopStep] = []

    @property
    def not_done(self) -> list[HandOut]:
        """Batches that were handed out, or are about to be, and are not done; the oldest first."""
        return [HandOut(reading.task, handed.batch) for reading in self._readings for handed in reading.handed]

    def take(self, item: Item, held: Collection[int]) -> LoopStep:
        """An item has come, in the order of reading; return the next step."""
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
        """Return the next step."""
        return self._due.pop(0) if self._due else NeedItem()

    def denied(self, batch: Batch, held: Collection[int]) -> LoopStep:
        """The work that this batch belongs to was taken away before the user's code had the batch."""
        reading = self._without(batch)
        self._forget(set(held) - {batch.reading})
        return HandBack(reading.task)

    def done(self, batch: Batch, held: Collection[int]) -> Acknowledged:
        """The user says that a batch is done, and the feed was told so.

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
        """Drop a batch, and return the reading that it was of."""
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
        """Drop tasks that were taken away, once the user has said of all of their batches that they are done."""
        self._readings = [each for each in self._readings if each.handed or each.task.number in held]

    def check(self) -> None:
        """Assert the invariants."""
        for reading in self._readings:
            reading.check()
