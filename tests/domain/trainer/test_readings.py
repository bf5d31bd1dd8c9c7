"""Which batch is next, which is handed out again, and when a task is done."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from flightedl.domain.exactly_once.accumulation import SumAgain
from flightedl.domain.trainer.batches import CurrentBatch
from flightedl.domain.trainer.feed import AssignedTask
from flightedl.domain.trainer.readings import (
    REJECTION_LIMIT,
    BatchLoop,
    GiveUpSum,
    Handed,
    HandOut,
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
    """Holds tasks, and remembers what is reported of them."""

    def __init__(self, *tasks: AssignedTask) -> None:
        self.tasks = list(tasks)
        self.done: list[tuple[int, list[int]]] = []
        self.returned: list[int] = []
        self.batches: list[tuple[int, int]] = []

    def is_held(self, task: AssignedTask) -> bool:
        return any(each is task for each in self.tasks)

    def finished(self, task: AssignedTask, pservers: Sequence[int]) -> None:
        self.tasks.remove(task)
        self.done.append((task.assignment.attempt, list(pservers)))

    def batch_done(self, task: AssignedTask, number: int) -> None:
        if self.is_held(task):
            self.batches.append((task.assignment.attempt, number))

    def hand_back(self, task: AssignedTask) -> None:
        self.tasks.remove(task)
        self.returned.append(task.assignment.attempt)


Loop = BatchLoop[str]


def loop_of(held: Held) -> Loop:
    return BatchLoop(held, lambda item: CurrentBatch(item.task.assignment, item.number, 1))


def task_of(attempt: int, batches: int = 2) -> AssignedTask:
    return AssignedTask(assignment(attempt, batches))


def handed(loop: Loop) -> Handed[str]:
    step = loop.next_step()
    loop.check()
    assert isinstance(step, HandOut)
    return step.handed


def answered(handed: Handed[str], generation: int = 5, pserver: int = 0) -> None:
    handed.current.note_answers({0: 1}, pserver, generation)


def needs_item(loop: Loop) -> bool:
    found = loop.next_step() == NeedItem()
    loop.check()
    return found


def test_batches_that_no_pserver_has_are_told_one_by_one() -> None:
    task = task_of(1, 3)
    held = Held(task)
    loop = loop_of(held)
    for number in range(3):
        loop.take(ReadBatch(task, number, "records"))
        current = handed(loop)
        if number == 1:
            answered(current)
        assert held.batches == ([] if number == 0 else [(1, 0)]), "not before the next one is asked for"
        assert needs_item(loop)
    assert held.batches == [(1, 0), (1, 2)]


def test_a_task_is_done_when_all_of_its_batches_are_settled() -> None:
    task = task_of(1)
    held = Held(task)
    loop = loop_of(held)
    for number, generation in ((0, 6), (1, 5)):
        loop.take(ReadBatch(task, number, "records"))
        answered(handed(loop), generation, 1)
        assert needs_item(loop)
    loop.take(TaskEnd(task))
    assert needs_item(loop)
    assert held.done == [(1, [0, 5])], "the oldest generation of each pserver, 0 of one that was sent nothing"


def test_a_batch_that_came_too_late_is_handed_out_again_before_the_next_one() -> None:
    task = task_of(1, 1)
    held = Held(task)
    loop = loop_of(held)
    loop.take(ReadBatch(task, 0, "records"))
    first = handed(loop)
    first.current.must_repeat = True
    again = handed(loop)
    assert again is first
    assert not again.current.must_repeat
    answered(again)
    loop.take(TaskEnd(task))
    assert needs_item(loop)
    assert held.done == [(1, [5])]


def test_a_batch_whose_gradient_was_rejected_fails_its_task_after_three_turns() -> None:
    task, error = task_of(1, 2), GradientError("it has NaN")
    held = Held(task)
    loop = loop_of(held)
    loop.take(ReadBatch(task, 0, "records"))
    batch = handed(loop)
    for _ in range(REJECTION_LIMIT - 1):
        batch.current.reject(error)
        assert handed(loop) is batch
    batch.current.reject(error)
    assert loop.next_step() == Unreadable(ReadFailure(task, 0, error))
    held.tasks.clear()
    assert needs_item(loop)
    loop.take(TaskEnd(task))
    assert needs_item(loop)
    assert held.done == []


def test_a_rejected_batch_that_succeeds_at_last_is_settled_as_any() -> None:
    task = task_of(1, 1)
    held = Held(task)
    loop = loop_of(held)
    loop.take(ReadBatch(task, 0, "records"))
    for _ in range(REJECTION_LIMIT - 1):
        handed(loop).current.reject(GradientError("it has NaN"))
    for _ in range(2):
        handed(loop).current.must_repeat = True
    answered(handed(loop))
    loop.take(TaskEnd(task))
    assert needs_item(loop)
    assert held.done == [(1, [5])]


def test_work_that_was_denied_goes_back_and_the_rest_of_it_is_passed_over() -> None:
    task, other = task_of(1), task_of(2, 1)
    held = Held(task, other)
    loop = loop_of(held)
    loop.take(ReadBatch(task, 0, "records"))
    loop.denied(handed(loop))
    assert needs_item(loop)
    for item in (ReadBatch(task, 1, "records"), TaskEnd(task)):
        loop.take(item)
        assert needs_item(loop)
    assert (held.returned, held.done, held.tasks) == ([1], [], [other])


def test_a_reading_that_began_in_the_midst_does_not_count() -> None:
    first, again = task_of(1), task_of(1)
    held = Held(again)
    loop = loop_of(held)
    loop.take(ReadBatch(first, 0, "records"))
    assert needs_item(loop), "it is another telling of the same attempt"
    loop.take(ReadBatch(again, 1, "records"))
    answered(handed(loop))
    loop.take(TaskEnd(again))
    assert needs_item(loop)
    assert (held.returned, held.done) == ([1], [])


def test_a_task_ends_when_its_sums_are_pushed() -> None:
    task = task_of(1)
    held = Held(task)
    loop = loop_of(held)
    batches = []
    for number in range(2):
        loop.take(ReadBatch(task, number, "records"))
        batches.append(handed(loop))
        batches[-1].current.waits = True
        assert needs_item(loop)
    loop.take(TaskEnd(task))
    assert loop.next_step() == PushSum()
    assert held.done == []
    together = CurrentBatch(task.assignment, 0, 2)
    together.note_answers({}, 0, 4)
    for each in batches:
        each.current.note_sum(together)
    assert needs_item(loop)
    assert held.done == [(1, [4])]


def test_what_a_sum_left_behind_is_handed_out_sum_by_sum() -> None:
    task = task_of(1, 4)
    held = Held(task)
    loop = loop_of(held)
    for number in range(4):
        loop.take(ReadBatch(task, number, "records"))
        handed(loop).current.waits = True
        assert needs_item(loop)
    assert loop.reading is not None
    first, second = SumAgain(0, 2, {}), SumAgain(1, 2, {})
    for each in loop.reading.handed:
        each.current.repeat(first if each.item.number in {0, 3} else second)
    order = []
    for _ in range(4):
        again = handed(loop)
        order.append(again.item.number)
        answered(again)
    assert order == [0, 3, 1, 2]


def test_the_sum_of_a_task_that_was_taken_away_is_given_up_for_the_next_task() -> None:
    task, other = task_of(1), task_of(2, 1)
    held = Held(task, other)
    loop = loop_of(held)
    loop.take(ReadBatch(task, 0, "records"))
    handed(loop).current.waits = True
    held.tasks.remove(task)
    loop.take(TaskEnd(task))
    assert needs_item(loop)
    loop.take(ReadBatch(other, 0, "records"))
    assert loop.next_step() == GiveUpSum()
    assert handed(loop).item.task is other


@pytest.mark.parametrize("is_held", [True, False])
def test_what_cannot_be_read_is_told_while_it_is_held(is_held: bool) -> None:
    task = task_of(1)
    loop = loop_of(Held(task) if is_held else Held())
    failure = ReadFailure(task, 0, ValueError("broken"))
    loop.take(failure)
    assert loop.next_step() == (Unreadable(failure) if is_held else NeedItem())
