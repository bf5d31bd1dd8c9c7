"""The loop over the batches that a trainer reads: which batch comes next, and when a task is finished.

A *reading* is one pass over the batches of one :class:`~flightedl.domain.trainer.feed.AssignedTask`. A reader works
ahead and passes on items, each with its task. :class:`BatchLoop` keeps the :class:`Reading` of the task that the user's
code is working on. A batch is *settled* when every block of every pserver has applied it.

A task may be reported as finished only if a single reading has settled all of its batches. If a reading began in the
middle or skipped a batch, its task is handed back. When the task is repeated, pservers answer "already applied" for the
batches that they have applied.

A batch whose gradient came too late is handed out *again* under the same identity. This happens if its round was over,
or if the trainer had lost its membership. A batch whose gradient was rejected is handed out again too, up to
``REJECTION_LIMIT`` times; then its task is reported as failed at this batch.

If several batches are pushed as one sum, they stay unsettled until the sum is pushed. If a block could not accept all
of them together, they are handed out again, sum by sum. The task is reported when its sums are pushed.

Before the driver passes on an item or hands out a batch again, it checks that the feed still holds the task.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from msgspec.structs import replace

from flightedl.domain.trainer.batches import PLACEMENT, Batch, BatchState
from flightedl.domain.trainer.feed import AssignedTask

#: Maximum number of times that a reading hands out a batch whose gradient is always rejected.
REJECTION_LIMIT = 3


class ReadBatch(msgspec.Struct, frozen=True):
    """A batch that was read."""

    task: AssignedTask
    #: The batch in the state in which it is first handed out.
    batch: Batch

    @classmethod
    def of(cls, task: AssignedTask, number: int, record_count: int = 1) -> ReadBatch:
        """Return the task's batch with this number."""
        given = task.assignment
        epoch, count = given.epoch, given.batch_count
        return cls(task, Batch(epoch, given.task, given.attempt, number, count, record_count, task.number))


class TaskEnd(msgspec.Struct, frozen=True):
    """All batches of a task have been read."""

    task: AssignedTask


class ReadFailure(msgspec.Struct, frozen=True):
    """The batch with this number and all later batches of the task can be neither read nor trained on."""

    task: AssignedTask
    number: int
    error: Exception


Item = ReadBatch | TaskEnd | ReadFailure


class HandedBatch(msgspec.Struct, eq=False):
    """A batch that has been handed out, and its newest state."""

    batch: Batch
    state: BatchState
    rejection_count: int = 0

    @property
    def turn(self) -> tuple[int, int]:
        """Sort key for batches to be repeated, which keeps the batches of a sum together."""
        again, number = self.state.again, self.batch.number
        return (number if again is None else again.first, number)


class Reading(msgspec.Struct, eq=False):
    """One pass of the user's code over the batches of a task."""

    task: AssignedTask
    #: Batches that have been handed out but are not settled.
    handed: list[HandedBatch] = []
    #: True if the task was revoked or reported as failed.
    is_lost: bool = False
    #: True if all batches were read. Used only by ``AcknowledgedLoop``, which has several readings.
    is_at_end: bool = False
    #: Numbers of the settled batches.
    _settled: set[int] = set()
    #: Pserver -> its oldest generation that has a batch of the task; ``PLACEMENT`` -> the oldest placement.
    _generations: dict[int, int] = {}

    def settle(self, number: int, generations: Mapping[int, int]) -> None:
        """Record that every block has this batch. ``generations`` maps pservers to the processes that answered."""
        self._settled.add(number)
        for index, generation in generations.items():
            self._generations[index] = min(generation, self._generations.get(index, generation))

    def hand_out(self, batch: Batch) -> HandOut:
        """Return the step that hands out a batch, and wait for its outcome."""
        self.handed.append(HandedBatch(batch, BatchState(batch.reading, batch.number)))
        return HandOut(self.task, batch)

    @property
    def is_settled(self) -> bool:
        assignment = self.task.assignment
        return self._settled.issuperset(range(assignment.first_batch, assignment.end_batch))

    def end(self) -> Finished | HandBack:
        """Return this task's report. Call this when all batches that were read have been handed out."""
        if not self.is_settled:
            return HandBack(self.task)
        generations = self._generations
        pservers = [generations.get(index, 0) for index in range(max(generations, default=-1) + 1)]
        return Finished(self.task, pservers, generations.get(PLACEMENT, 0))

    def check(self) -> None:
        assignment = self.task.assignment
        numbers = range(assignment.first_batch, assignment.end_batch)
        assert all(number in numbers for number in self._settled), "a batch of another task is settled"
        kept = [handed.batch.number for handed in self.handed]
        assert len(set(kept)) == len(kept), "a batch is kept twice"
        assert self._settled.isdisjoint(kept), "a settled batch is kept"


class NeedItem(msgspec.Struct, frozen=True):
    """Wait for the next item, then pass it to ``accept``."""


class HandOut(msgspec.Struct, frozen=True):
    """Open this batch, hand it to the user's code, and close it. Call ``denied`` if it cannot be opened."""

    task: AssignedTask
    batch: Batch
    #: True if the batch has been handed out before.
    is_again: bool = False


class PushSum(msgspec.Struct, frozen=True):
    """Push the sum of the unpushed batches. After that, no batch has ``waits`` set."""


class GiveUpSum(msgspec.Struct, frozen=True):
    """Drop the sum of the unpushed batches, because their task was revoked."""


class Unreadable(msgspec.Struct, frozen=True):
    """Report this task as failed at this batch, or end the loop."""

    failure: ReadFailure


class Finished(msgspec.Struct, frozen=True):
    """Report this task as finished."""

    task: AssignedTask
    #: Pserver -> its oldest generation that has a batch of the task; 0 if nothing was sent to this pserver.
    pservers: Sequence[int]
    #: Oldest placement with which a batch of the task was pushed; 0 if no placement is stored.
    placement: int = 0


class HandBack(msgspec.Struct, frozen=True):
    """Hand this task back."""

    task: AssignedTask


class BatchDone(msgspec.Struct, frozen=True):
    """Tell the feed that this batch is done, because no pserver records it."""

    task: AssignedTask
    number: int


LoopStep = NeedItem | HandOut | PushSum | GiveUpSum | Unreadable | Finished | HandBack | BatchDone
_NEED_ITEM = NeedItem()


class BatchLoop:
    """The user's loop. Call ``next_step`` after carrying out the previous step."""

    def __init__(self) -> None:
        self._reading: Reading | None = None
        #: Steps to carry out before any batch can be settled.
        self._due: list[GiveUpSum | HandOut | Unreadable | BatchDone] = []
        #: True if all batches of the reading have been handed out.
        self._is_at_end = False

    @property
    def reading(self) -> Reading | None:
        return self._reading

    def accept(self, item: Item) -> LoopStep:
        """Process the next item, in reading order, of a task that is held. Return the next step."""
        if self._reading is None or item.task.number != self._reading.task.number:
            if self._reading is not None and self._reading.handed:
                self._due.append(GiveUpSum())
            self._reading = Reading(item.task)
        if isinstance(item, TaskEnd):
            self._is_at_end = True
        elif isinstance(item, ReadFailure):
            self._due.append(Unreadable(item))
        else:
            self._due.append(self._reading.hand_out(item.batch))
        return self._due.pop(0) if self._due else self.next_step()

    def next_step(self, states: Sequence[BatchState] = ()) -> LoopStep:
        """Return the next step. ``states`` are the states of batches that have changed since the last call."""
        if (reading := self._reading) is None:
            return _NEED_ITEM
        for state in states:
            for handed in reading.handed:
                if (handed.batch.number, handed.batch.reading) == (state.number, state.reading):
                    handed.state = state
                    handed.rejection_count += state.rejection is not None
        if not self._due and (again := self._settle(reading)) is not None:
            return again
        if self._due:
            return self._due.pop(0)
        if not self._is_at_end:
            return _NEED_ITEM
        if reading.handed:
            return PushSum()
        self._is_at_end = False
        return reading.end()

    def denied(self, batch: Batch) -> LoopStep:
        """Record that the batch's task was revoked. Items read since then belong to other tasks and are kept."""
        reading = self._reading
        assert reading is not None, "a batch was handed out"
        assert reading.task.number == batch.reading, "the batch does not belong to the current task"
        reading.is_lost = True
        for handed in reading.handed:
            if handed.batch.number == batch.number:
                handed.state = BatchState(batch.reading, batch.number, must_repeat=True)
        return HandBack(reading.task)

    def _settle(self, reading: Reading) -> HandOut | Unreadable | None:
        """Settle the batches that no longer wait. If a batch must be repeated, return the step that does so instead."""
        answered: list[HandedBatch] = []
        again: HandedBatch | None = None
        for handed in reading.handed:
            if not handed.state.waits:
                answered.append(handed)
                if handed.state.must_repeat and (again is None or handed.turn < again.turn):
                    again = handed
        if again is not None and not reading.is_lost:
            if (error := again.state.rejection) is not None and again.rejection_count >= REJECTION_LIMIT:
                reading.is_lost = True
                return Unreadable(ReadFailure(reading.task, again.batch.number, error))
            return HandOut(reading.task, replace(again.batch, again=again.state.again), is_again=True)
        for handed in answered:
            reading.handed.remove(handed)
            state = handed.state
            if not state.must_repeat:
                reading.settle(state.number, state.generations)
                if not state.generations:
                    self._due.append(BatchDone(reading.task, state.number))
        return None

    def check(self) -> None:
        if self._reading is not None:
            self._reading.check()
