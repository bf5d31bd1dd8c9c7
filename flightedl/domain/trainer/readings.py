"""What a trainer reads of a task, what of it is settled, and which batch the user's code gets next.

A *reading* is one pass over the batches of one :class:`~flightedl.domain.trainer.feed.AssignedTask`. A reader runs
ahead and passes on items, each with the task that it belongs to; :class:`BatchLoop` keeps a :class:`Reading` of the
task that the user's code is at. A batch is *settled* when every block of every pserver has it, and a task may be
reported as finished only when all of its batches were settled by the same reading: a reading that began in the midst,
or left a batch out, does not count. Such a task is handed back, whatever the reason was; what is done already is
answered "already applied".

A batch whose gradient came too late (the round had moved on, or this trainer had lost its membership) is handed out
*again*, under the same identity. So is a batch whose gradient was rejected, up to ``REJECTION_LIMIT`` times; then its
task is reported as failed at this batch.

Where gradients of several batches are pushed as one sum, their batches are kept until the sum is pushed; those that a
block could not take with the others are handed out again, sum by sum. A task is reported when its sums are pushed.

The driver asks the feed whether a task is held before it passes an item on, and before it hands a batch out again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from msgspec.structs import replace

from flightedl.domain.trainer.batches import Batch, BatchState
from flightedl.domain.trainer.feed import AssignedTask

#: A reading hands a batch out this often, if its gradient is rejected each time.
REJECTION_LIMIT = 3


class ReadBatch(msgspec.Struct, frozen=True):
    """A batch that was read."""

    task: AssignedTask
    #: The batch as it is handed out first.
    batch: Batch

    @classmethod
    def of(cls, task: AssignedTask, number: int, record_count: int = 1) -> ReadBatch:
        """Return the batch of a task that has this number within it."""
        given = task.assignment
        epoch, count = given.epoch, given.batch_count
        return cls(task, Batch(epoch, given.task, given.attempt, number, count, record_count, task.number))


class TaskEnd(msgspec.Struct, frozen=True):
    """All batches of a task were read."""

    task: AssignedTask


class ReadFailure(msgspec.Struct, frozen=True):
    """The batch of this number cannot be read or trained, and none after it."""

    task: AssignedTask
    number: int
    error: Exception


Item = ReadBatch | TaskEnd | ReadFailure


class Handed(msgspec.Struct, eq=False):
    """A batch that the user's code has or had, and its newest state."""

    batch: Batch
    state: BatchState
    rejection_count: int = 0

    @property
    def turn(self) -> tuple[int, int]:
        """Batches that are done again come by this: those of one sum after each other."""
        again, number = self.state.again, self.batch.number
        return (number if again is None else again.first, number)


class Reading(msgspec.Struct, eq=False):
    """One pass over a task, as the user's code works on it."""

    task: AssignedTask
    #: Batches handed out of which it is not known yet that every block has them.
    handed: list[Handed] = []
    #: The task was taken away, or is reported as failed.
    is_lost: bool = False
    #: All of its batches were read. Only ``AcknowledgedLoop`` uses it, which has several readings.
    is_at_end: bool = False
    #: Numbers of the batches of which that is known.
    _settled: set[int] = set()
    #: Pserver -> the oldest generation of it that has a batch of the task.
    _generations: dict[int, int] = {}

    def settle(self, number: int, generations: Mapping[int, int]) -> None:
        """Every block has this batch; ``generations``: of the pservers that said so, by index."""
        self._settled.add(number)
        for index, generation in generations.items():
            self._generations[index] = min(generation, self._generations.get(index, generation))

    def hand_out(self, batch: Batch) -> HandOut:
        """Return the step that hands a batch out, and wait for what becomes of the batch."""
        self.handed.append(Handed(batch, BatchState(batch.reading, batch.number)))
        return HandOut(self.task, batch)

    @property
    def is_settled(self) -> bool:
        """True if every batch of the task is settled."""
        assignment = self.task.assignment
        return self._settled.issuperset(range(assignment.first_batch, assignment.end_batch))

    def end(self) -> Finished | HandBack:
        """Return the report of this task, once every batch that was read has been handed out."""
        if not self.is_settled:
            return HandBack(self.task)
        generations = self._generations
        return Finished(self.task, [generations.get(index, 0) for index in range(max(generations, default=-1) + 1)])

    def check(self) -> None:
        """Assert the invariants."""
        assignment = self.task.assignment
        numbers = range(assignment.first_batch, assignment.end_batch)
        assert all(number in numbers for number in self._settled), "a batch of another task is settled"
        kept = [handed.batch.number for handed in self.handed]
        assert len(set(kept)) == len(kept), "a batch is kept twice"
        assert self._settled.isdisjoint(kept), "a batch that is settled is done again"


class NeedItem(msgspec.Struct, frozen=True):
    """Wait for what was read next, and ``take`` it."""


class HandOut(msgspec.Struct, frozen=True):
    """Open this batch, give it to the user's code, and close it; ``denied`` if it cannot be opened."""

    task: AssignedTask
    batch: Batch
    #: It was handed out before.
    is_again: bool = False


class PushSum(msgspec.Struct, frozen=True):
    """Push the sum of what was not pushed yet: no batch ``waits`` afterwards."""


class GiveUpSum(msgspec.Struct, frozen=True):
    """Forget the sum of what was not pushed yet: its batches are somebody else's now."""


class Unreadable(msgspec.Struct, frozen=True):
    """Report this task as failed at this batch, or end."""

    failure: ReadFailure


class Finished(msgspec.Struct, frozen=True):
    """Report this task as finished."""

    task: AssignedTask
    #: By index, the oldest generation that has a batch of the task; 0: the pserver was sent nothing.
    pservers: Sequence[int]


class HandBack(msgspec.Struct, frozen=True):
    """Hand this task back."""

    task: AssignedTask


class BatchDone(msgspec.Struct, frozen=True):
    """Tell the feed that this batch is done, because no pserver knows it."""

    task: AssignedTask
    number: int


LoopStep = NeedItem | HandOut | PushSum | GiveUpSum | Unreadable | Finished | HandBack | BatchDone
_NEED_ITEM = NeedItem()


class BatchLoop:
    """What the user's loop does next. Ask for the ``next_step`` when the one before is carried out."""

    def __init__(self) -> None:
        self._reading: Reading | None = None
        #: What comes first, before anything is settled.
        self._due: list[GiveUpSum | HandOut | Unreadable | BatchDone] = []
        #: The reading has had all of its batches.
        self._is_at_end = False

    @property
    def reading(self) -> Reading | None:
        """Of the task that the loop is at."""
        return self._reading

    def take(self, item: Item) -> LoopStep:
        """An item of a task that is held has come, in the order of reading; return the next step."""
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
        """Return the next step; ``states``: of batches that have changed since the last time."""
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
        """The batch's task was taken away. Only this task is lost: what was fetched since belongs to another one."""
        reading = self._reading
        assert reading is not None, "a batch was handed out"
        assert reading.task.number == batch.reading, "the batch is of the task that the loop is at"
        reading.is_lost = True
        for handed in reading.handed:
            if handed.batch.number == batch.number:
                handed.state = BatchState(batch.reading, batch.number, must_repeat=True)
        return HandBack(reading.task)

    def _settle(self, reading: Reading) -> HandOut | Unreadable | None:
        """Settle the batches that do not wait any more, unless one of them has to be done again: return that."""
        answered: list[Handed] = []
        again: Handed | None = None
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
        """Assert the invariants."""
        if self._reading is not None:
            self._reading.check()
