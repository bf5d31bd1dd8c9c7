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
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from flightedl.domain.trainer.batches import CurrentBatch
from flightedl.domain.trainer.feed import AssignedTask

Records = TypeVar("Records")

#: A reading hands a batch out this often, if its gradient is rejected each time.
REJECTION_LIMIT = 3


@dataclass(frozen=True, slots=True)
class ReadBatch(Generic[Records]):
    """A batch that was read."""

    task: AssignedTask
    #: Within its task.
    number: int
    records: Records


@dataclass(frozen=True, slots=True)
class TaskEnd:
    """All batches of a task were read."""

    task: AssignedTask


@dataclass(frozen=True, slots=True)
class ReadFailure:
    """The batch of this number cannot be read or trained, and none after it."""

    task: AssignedTask
    number: int
    error: Exception


Item = ReadBatch[Records] | TaskEnd | ReadFailure


@dataclass(eq=False, slots=True)
class Handed(Generic[Records]):
    """A batch that the user's code has or had."""

    item: ReadBatch[Records]
    current: CurrentBatch


@dataclass(eq=False, slots=True)
class Reading(Generic[Records]):
    """One pass over a task, as the user's code works on it."""

    task: AssignedTask
    #: Batches handed out of which it is not known yet that every block has them.
    handed: list[Handed[Records]] = field(default_factory=list)
    #: Numbers of the batches of which that is known.
    _settled: set[int] = field(default_factory=set)
    #: Pserver -> the oldest generation of it that has a batch of the task.
    _generations: dict[int, int] = field(default_factory=dict)

    def settle(self, number: int, generations: Mapping[int, int]) -> None:
        """Every block has this batch; ``generations``: of the pservers that said so, by index."""
        self._settled.add(number)
        for index, generation in generations.items():
            self._generations[index] = min(generation, self._generations.get(index, generation))

    @property
    def is_settled(self) -> bool:
        """Whether every batch of the task is settled."""
        assignment = self.task.assignment
        return self._settled.issuperset(range(assignment.first_batch, assignment.end_batch))

    def generation_list(self) -> list[int]:
        """By index; 0: of a pserver that was sent nothing."""
        return [self._generations.get(index, 0) for index in range(max(self._generations, default=-1) + 1)]

    def check(self) -> None:
        """Assert the invariants."""
        assignment = self.task.assignment
        numbers = range(assignment.first_batch, assignment.end_batch)
        assert all(number in numbers for number in self._settled), "a batch of another task is settled"
        kept = [handed.item.number for handed in self.handed]
        assert len(set(kept)) == len(kept), "a batch is kept twice"
        assert self._settled.isdisjoint(kept), "a batch that is settled is done again"


class Holder(Protocol):
    """What the loop needs of the feed."""

    def is_held(self, task: AssignedTask) -> bool:
        """As ``Feed.is_held``."""
        ...

    def finished(self, task: AssignedTask, pservers: Sequence[int]) -> None:
        """As ``Feed.finished``."""
        ...

    def batch_done(self, task: AssignedTask, number: int) -> object:
        """As ``Feed.batch_done``."""
        ...

    def hand_back(self, task: AssignedTask) -> None:
        """As ``Feed.hand_back``."""
        ...


@dataclass(frozen=True, slots=True)
class NeedItem:
    """Wait for what was read next, and ``take`` it."""


@dataclass(frozen=True, slots=True)
class HandOut(Generic[Records]):
    """Open this batch, give it to the user's code, and close it; ``denied`` if it cannot be opened."""

    handed: Handed[Records]


@dataclass(frozen=True, slots=True)
class PushSum:
    """Push the sum of what was not pushed yet: no batch ``waits`` afterwards."""


@dataclass(frozen=True, slots=True)
class GiveUpSum:
    """Forget the sum of what was not pushed yet: its batches are somebody else's now."""


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Report this task as failed at this batch, or end."""

    failure: ReadFailure


LoopStep = NeedItem | HandOut[Records] | PushSum | GiveUpSum | Unreadable


class BatchLoop(Generic[Records]):
    """What the user's loop does next. Ask for the ``next_step`` when the one before is carried out.

    Args:
        feed: Holds the tasks.
        current_of: Makes the batch's identity, as it is pushed.
    """

    def __init__(self, feed: Holder, current_of: Callable[[ReadBatch[Records]], CurrentBatch]) -> None:
        self._feed = feed
        self._current_of = current_of
        self._reading: Reading[Records] | None = None
        #: What comes first, before anything is settled.
        self._due: list[GiveUpSum | HandOut[Records] | Unreadable] = []
        #: The reading has had all of its batches.
        self._is_at_end = False

    @property
    def reading(self) -> Reading[Records] | None:
        """Of the task that the loop is at."""
        return self._reading

    def take(self, item: Item[Records]) -> None:
        """What was read comes, in its order."""
        if not self._feed.is_held(item.task):
            return
        if self._reading is None or item.task is not self._reading.task:
            if self._reading is not None and self._reading.handed:
                self._due.append(GiveUpSum())
            self._reading = Reading(item.task)
        if isinstance(item, TaskEnd):
            self._is_at_end = True
        elif isinstance(item, ReadFailure):
            self._due.append(Unreadable(item))
        else:
            handed = Handed(item, self._current_of(item))
            self._reading.handed.append(handed)
            self._due.append(HandOut(handed))

    def next_step(self) -> LoopStep[Records]:
        """What to do now."""
        if self._due:
            return self._begun(self._due.pop(0))
        if self._reading is not None:
            if (again := self._settle(self._reading)) is not None:
                rejection = again.current.rejection
                if rejection is not None and again.current.rejection_count >= REJECTION_LIMIT:
                    return Unreadable(ReadFailure(again.item.task, again.item.number, rejection))
                return self._begun(HandOut(again))
            if self._is_at_end:
                if self._reading.handed:
                    return PushSum()
                self._is_at_end = False
                self._end(self._reading)
        return NeedItem()

    def _begun(self, step: GiveUpSum | HandOut[Records] | Unreadable) -> LoopStep[Records]:
        if isinstance(step, HandOut):
            step.handed.current.begin()
        return step

    def denied(self, handed: Handed[Records]) -> None:
        """The work that this batch belongs to was taken away: this task only, what was fetched since is another."""
        handed.current.must_repeat = True
        self._feed.hand_back(handed.item.task)

    def _settle(self, reading: Reading[Records]) -> Handed[Records] | None:
        """Note what has the batches that do not wait any more; the next one that has to be done again."""
        answered: list[Handed[Records]] = []
        again: Handed[Records] | None = None
        for handed in reading.handed:
            current = handed.current
            if not current.waits:
                answered.append(handed)
                if current.must_repeat and (again is None or current.turn < again.current.turn):
                    again = handed
        if again is not None and self._feed.is_held(reading.task):
            return again
        for handed in answered:
            reading.handed.remove(handed)
            if not handed.current.must_repeat:
                reading.settle(handed.item.number, handed.current.generations)
                if not handed.current.generations:
                    self._feed.batch_done(reading.task, handed.item.number)
        return None

    def _end(self, reading: Reading[Records]) -> None:
        """All batches of a task were handed out that were read of it."""
        if reading.is_settled:
            self._feed.finished(reading.task, reading.generation_list())
        else:
            self._feed.hand_back(reading.task)

    def check(self) -> None:
        """Assert the invariants."""
        if self._reading is not None:
            self._reading.check()
