"""Order and repetition of batches, and the end of a task."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from flightedl.domain.exactly_once.accumulation import SumAgain
from flightedl.domain.trainer.batches import Batch, BatchState
from flightedl.domain.trainer.feed import AssignedTask
from flightedl.domain.trainer.readings import (
    REJECTION_LIMIT,
    BatchDone,
    BatchLoop,
    Finished,
    GiveUpSum,
    HandBack,
    HandOut,
    Item,
    LoopStep,
    NeedItem,
    PushSum,
    ReadBatch,
    ReadFailure,
    TaskEnd,
    Unreadable,
)
from flightedl.errors import GradientError

from .test_feed import assignment


class Held:
    """The held tasks, with their reports."""

    def __init__(self, *tasks: AssignedTask) -> None:
        self.tasks = list(tasks)
        self.done: list[tuple[int, list[int]]] = []
        self.returned: list[int] = []
        self.batches: list[tuple[int, int]] = []

    def is_held(self, task: AssignedTask) -> bool:
        return task in self.tasks

    @property
    def numbers(self) -> list[int]:
        return [task.number for task in self.tasks]

    def finished(self, task: AssignedTask, pservers: Sequence[int]) -> None:
        self.tasks.remove(task)
        self.done.append((task.assignment.attempt, list(pservers)))

    def batch_done(self, task: AssignedTask, number: int) -> None:
        if self.is_held(task):
            self.batches.append((task.assignment.attempt, number))

    def hand_back(self, task: AssignedTask) -> None:
        if self.is_held(task):
            self.tasks.remove(task)
            self.returned.append(task.assignment.attempt)


class Loop:
    """The loop, with a driver that carries out its reports."""

    def __init__(self, held: Held) -> None:
        self._held = held
        self.core = BatchLoop()
        self._step: LoopStep | None = None

    def accept(self, item: Item) -> None:
        if self._held.is_held(item.task):
            self._step = self._reported(self.core.accept(item))

    def next_step(self, *states: BatchState) -> LoopStep:
        step, self._step = self._step, None
        self.core.check()
        return step or self._reported(self.core.next_step(states))

    def denied(self, batch: Batch) -> None:
        self._step = self._reported(self.core.denied(batch))

    def _reported(self, step: LoopStep) -> LoopStep:
        held = self._held
        while True:
            match step:
                case Finished(task, pservers):
                    held.finished(task, pservers)
                case HandBack(task):
                    held.hand_back(task)
                case BatchDone(task, number):
                    held.batch_done(task, number)
                case HandOut(task, batch, is_again=True) if not held.is_held(task):
                    step = self.core.denied(batch)
                    continue
                case _:
                    return step
            step = self.core.next_step()


def loop_of(held: Held) -> Loop:
    return Loop(held)


def task_of(attempt: int, batches: int = 2, number: int | None = None) -> AssignedTask:
    return AssignedTask(assignment(attempt, batches), attempt if number is None else number)


def handed(loop: Loop, *states: BatchState) -> Batch:
    step = loop.next_step(*states)
    loop.core.check()
    assert isinstance(step, HandOut)
    return step.batch


def state(batch: Batch, **more: Any) -> BatchState:
    return BatchState(batch.reading, batch.number, **more)


def answered(batch: Batch, generation: int = 5, pserver: int = 0) -> BatchState:
    return state(batch, generations={pserver: generation})


def needs_item(loop: Loop, *states: BatchState) -> bool:
    found = loop.next_step(*states) == NeedItem()
    loop.core.check()
    return found


def test_batches_without_a_pserver_are_reported_one_by_one() -> None:
    task = task_of(1, 3)
    held = Held(task)
    loop = loop_of(held)
    for number in range(3):
        loop.accept(ReadBatch.of(task, number))
        current = handed(loop)
        assert held.batches == ([] if number == 0 else [(1, 0)]), "not before the next batch is requested"
        assert needs_item(loop, *([answered(current)] if number == 1 else []))
    assert held.batches == [(1, 0), (1, 2)]


def test_a_task_is_done_when_all_its_batches_are_settled() -> None:
    task = task_of(1)
    held = Held(task)
    loop = loop_of(held)
    for number, generation in ((0, 6), (1, 5)):
        loop.accept(ReadBatch.of(task, number))
        assert needs_item(loop, answered(handed(loop), generation, 1))
    loop.accept(TaskEnd(task))
    assert needs_item(loop)
    assert held.done == [(1, [0, 5])], "the oldest generation of each pserver, 0 for one without blocks"


def test_a_late_batch_is_repeated_before_the_next_one() -> None:
    task = task_of(1, 1)
    held = Held(task)
    loop = loop_of(held)
    loop.accept(ReadBatch.of(task, 0))
    first = handed(loop)
    again = handed(loop, state(first, must_repeat=True))
    assert again == first
    assert needs_item(loop, answered(again))
    loop.accept(TaskEnd(task))
    assert needs_item(loop)
    assert held.done == [(1, [5])]


def test_a_batch_whose_gradient_was_rejected_fails_its_task_after_three_turns() -> None:
    task, error = task_of(1, 2), GradientError("it has NaN")
    held = Held(task)
    loop = loop_of(held)
    loop.accept(ReadBatch.of(task, 0))
    batch = handed(loop)
    rejected = state(batch, must_repeat=True, rejection=error)
    for _ in range(REJECTION_LIMIT - 1):
        assert handed(loop, rejected) == batch
    assert loop.next_step(rejected) == Unreadable(ReadFailure(task, 0, error))
    held.tasks.clear()
    assert needs_item(loop)
    loop.accept(TaskEnd(task))
    assert needs_item(loop)
    assert held.done == []


def test_a_rejected_batch_that_finally_succeeds_is_settled_like_any_other() -> None:
    task = task_of(1, 1)
    held = Held(task)
    loop = loop_of(held)
    loop.accept(ReadBatch.of(task, 0))
    batch = handed(loop)
    for _ in range(REJECTION_LIMIT - 1):
        batch = handed(loop, state(batch, must_repeat=True, rejection=GradientError("it has NaN")))
    for _ in range(2):
        batch = handed(loop, state(batch, must_repeat=True))
    assert needs_item(loop, answered(batch))
    loop.accept(TaskEnd(task))
    assert needs_item(loop)
    assert held.done == [(1, [5])]


def test_rejected_work_is_returned_and_the_rest_of_it_is_skipped() -> None:
    task, other = task_of(1), task_of(2, 1)
    held = Held(task, other)
    loop = loop_of(held)
    loop.accept(ReadBatch.of(task, 0))
    loop.denied(handed(loop))
    assert needs_item(loop)
    for item in (ReadBatch.of(task, 1), TaskEnd(task)):
        loop.accept(item)
        assert needs_item(loop)
    assert (held.returned, held.done, held.tasks) == ([1], [], [other])


def test_a_reading_that_began_in_the_middle_does_not_count() -> None:
    first, again = task_of(1), task_of(1, number=9)
    held = Held(again)
    loop = loop_of(held)
    loop.accept(ReadBatch.of(first, 0))
    assert needs_item(loop), "it is a repetition of the same attempt"
    loop.accept(ReadBatch.of(again, 1))
    assert needs_item(loop, answered(handed(loop)))
    loop.accept(TaskEnd(again))
    assert needs_item(loop)
    assert (held.returned, held.done) == ([1], [])


def test_the_state_of_another_reading_is_not_that_of_a_batch() -> None:
    first, again = task_of(1, 1), task_of(1, 1, number=9)
    held = Held(first)
    loop = loop_of(held)
    loop.accept(ReadBatch.of(first, 0))
    old = handed(loop)
    assert needs_item(loop, state(old, waits=True))
    held.tasks = [again]
    loop.accept(ReadBatch.of(again, 0))
    assert loop.next_step() == GiveUpSum()
    new = handed(loop, state(old, must_repeat=True))
    assert needs_item(loop, answered(new))
    loop.accept(TaskEnd(again))
    assert needs_item(loop)
    assert held.done == [(1, [5])]


def test_a_task_ends_when_its_sums_are_pushed() -> None:
    task = task_of(1)
    held = Held(task)
    loop = loop_of(held)
    batches = []
    for number in range(2):
        loop.accept(ReadBatch.of(task, number))
        batches.append(handed(loop))
        assert needs_item(loop, state(batches[-1], waits=True))
    loop.accept(TaskEnd(task))
    assert loop.next_step() == PushSum()
    assert held.done == []
    assert needs_item(loop, *(answered(batch, 4) for batch in batches))
    assert held.done == [(1, [4])]


def test_the_rest_of_sums_is_repeated_sum_by_sum() -> None:
    task = task_of(1, 4)
    held = Held(task)
    loop = loop_of(held)
    batches = []
    for number in range(4):
        loop.accept(ReadBatch.of(task, number))
        batches.append(handed(loop))
        assert needs_item(loop, state(batches[-1], waits=True))
    first, second = SumAgain(0, 2, {}), SumAgain(1, 2, {})
    sums = [first if batch.number in {0, 3} else second for batch in batches]
    states = [state(batch, must_repeat=True, again=again) for batch, again in zip(batches, sums, strict=True)]
    order = []
    for _ in range(4):
        again = handed(loop, *states)
        assert again.again is sums[again.number]
        order.append(again.number)
        states = [answered(again)]
    assert order == [0, 3, 1, 2]


def test_the_sum_of_a_revoked_task_is_dropped_for_the_next_task() -> None:
    task, other = task_of(1), task_of(2, 1)
    held = Held(task, other)
    loop = loop_of(held)
    loop.accept(ReadBatch.of(task, 0))
    assert needs_item(loop, state(handed(loop), waits=True))
    held.tasks.remove(task)
    loop.accept(TaskEnd(task))
    assert needs_item(loop)
    loop.accept(ReadBatch.of(other, 0))
    assert loop.next_step() == GiveUpSum()
    assert handed(loop).reading == other.number


@pytest.mark.parametrize("is_held", [True, False])
def test_unreadable_data_is_reported_while_its_task_is_held(is_held: bool) -> None:
    task = task_of(1)
    loop = loop_of(Held(task) if is_held else Held())
    failure = ReadFailure(task, 0, ValueError("broken"))
    loop.accept(failure)
    assert loop.next_step() == (Unreadable(failure) if is_held else NeedItem())
