"""Batches that are done when the user says so."""

from __future__ import annotations

import pytest

from flightedl.domain.trainer.acknowledged import AcknowledgedLoop, Done
from flightedl.domain.trainer.batches import Batch
from flightedl.domain.trainer.feed import AssignedTask
from flightedl.domain.trainer.readings import (
    Finished,
    HandBack,
    HandOut,
    Item,
    LoopStep,
    NeedItem,
    ReadBatch,
    ReadFailure,
    TaskEnd,
    Unreadable,
)
from flightedl.errors import UsageError

from .test_readings import Held, task_of


class Loop:
    """The loop, with a driver that passes its reports to ``held``."""

    def __init__(self, held: Held) -> None:
        self.held, self.core = held, AcknowledgedLoop()

    def accept(self, item: Item) -> LoopStep:
        return self._told(self.core.accept(item, self.held.numbers))

    def next_step(self) -> LoopStep:
        return self._told(self.core.next_step())

    def denied(self, batch: Batch) -> None:
        self._told(self.core.denied(batch, self.held.numbers))

    def done(self, batch: Batch) -> Done:
        for each in self.core.not_done:
            if each.batch == batch:
                self.held.batch_done(each.task, batch.number)
        done = self.core.done(batch, self.held.numbers)
        if done.report is not None:
            self._told(done.report)
        return done.outcome

    @property
    def not_done(self) -> list[Batch]:
        return [each.batch for each in self.core.not_done]

    def _told(self, step: LoopStep) -> LoopStep:
        if isinstance(step, Finished):
            self.held.finished(step.task, step.pservers)
        elif isinstance(step, HandBack):
            self.held.hand_back(step.task)
        self.core.check()
        return step


def loop_of(held: Held) -> Loop:
    return Loop(held)


def given(loop: Loop, task: AssignedTask, *numbers: int, ends: bool = True) -> list[Batch]:
    """Return batches that were read and handed out."""
    found: list[Batch] = []
    for number in numbers:
        step = loop.accept(ReadBatch.of(task, number))
        assert isinstance(step, HandOut)
        found.append(step.batch)
    if ends:
        loop.accept(TaskEnd(task))
    assert loop.next_step() == NeedItem()
    return found


def test_a_task_is_reported_when_all_its_batches_are_done_in_any_order() -> None:
    one, two = task_of(1), task_of(2)
    held = Held(one, two)
    loop = loop_of(held)
    first, second = given(loop, one, 0, 1)
    (third,) = given(loop, two, 0, ends=False)
    assert loop.not_done == [first, second, third]
    for handed in (third, second):
        loop.done(handed)
    assert held.done == []
    assert held.batches == [(2, 0), (1, 1)]
    loop.done(first)
    assert held.done == [(1, [])]
    (fourth,) = given(loop, two, 1)
    loop.done(fourth)
    assert held.done == [(1, []), (2, [])]
    assert loop.not_done == []


def test_a_batch_may_be_done_before_the_next_one_is_read() -> None:
    task = task_of(1)
    held = Held(task)
    loop = loop_of(held)
    for number in range(2):
        (handed,) = given(loop, task, number, ends=False)
        assert loop.done(handed) is Done.COUNTED
        with pytest.raises(UsageError, match="none of those"):
            loop.done(handed)
    assert held.done == []
    loop.accept(TaskEnd(task))
    assert held.done == [(1, [])]


def test_batches_of_a_revoked_task_do_not_count() -> None:
    task, other = task_of(1), task_of(2)
    held = Held(task, other)
    loop = loop_of(held)
    first, second = given(loop, task, 0, 1)
    held.tasks.remove(task)
    assert loop.done(first) is Done.TAKEN
    assert loop.done(second) is Done.TAKEN
    loop.accept(ReadBatch.of(task, 0))
    (third,) = given(loop, other, 0, ends=False)
    assert (held.done, held.returned, loop.not_done) == ([], [], [third])


def test_a_batch_of_a_revoked_task_keeps_its_turn_until_the_user_is_done_with_it() -> None:
    one, two = task_of(1), task_of(2)
    held = Held(one, two)
    loop = loop_of(held)
    first, second = given(loop, one, 0, 1)
    (third,) = given(loop, two, 0, ends=False)
    held.tasks.remove(one)
    (fourth,) = given(loop, two, 1)
    assert loop.not_done == [first, second, third, fourth]
    assert [loop.done(each) for each in (first, third, second)] == [Done.TAKEN, Done.COUNTED, Done.TAKEN]
    assert loop.not_done == [fourth]
    assert loop.done(fourth) is Done.COUNTED
    assert held.done == [(2, [])]
    assert held.batches == [(2, 0), (2, 1)], "batches of the revoked task are not reported"


def test_a_task_that_was_not_read_completely_is_returned() -> None:
    task = task_of(1)
    held = Held(task)
    loop = loop_of(held)
    (handed,) = given(loop, task, 1)
    loop.done(handed)
    assert (held.done, held.returned) == ([], [1])


def test_a_rejected_batch_is_returned_with_its_task() -> None:
    task = task_of(1)
    held = Held(task)
    loop = loop_of(held)
    step = loop.accept(ReadBatch.of(task, 0))
    assert isinstance(step, HandOut)
    loop.denied(step.batch)
    assert (held.returned, loop.not_done) == ([1], [])


def test_unreadable_data_is_reported() -> None:
    task = task_of(1)
    loop = loop_of(Held(task))
    failure = ReadFailure(task, 1, OSError())
    assert loop.accept(failure) == Unreadable(failure)
