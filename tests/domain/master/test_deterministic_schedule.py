"""Waiting of trainers for each other at the beginning of an epoch, so that runs are bit-identical."""

from __future__ import annotations

import pytest

from flightedl.domain.consistency.modes import Async, Sync
from flightedl.domain.master.deterministic_schedule import DeterministicSchedule
from flightedl.domain.queue.tasks import TaskQueue
from flightedl.domain.queue.values import QueueSettings, TaskGiven

ALIVE = {"a": 1, "b": 2, "c": 3}


@pytest.fixture
def queue() -> TaskQueue:
    return TaskQueue(QueueSettings(task_count=4, batch_counts=lambda _: 1, epochs=2, is_deduplicated=False))


def do(queue: TaskQueue, trainer: str, count: int) -> None:
    for _ in range(count):
        answer = queue.request(trainer, 0.0)
        assert isinstance(answer, TaskGiven)
        given = answer.assignment
        queue.finish(trainer, given.epoch, given.position, given.attempt, 0.0)


def test_it_is_active_for_deterministic_rounds_of_a_known_number_of_trainers() -> None:
    assert DeterministicSchedule(2).is_on(Sync(deterministic=True))
    assert not DeterministicSchedule(0).is_on(Sync(deterministic=True))
    assert not DeterministicSchedule(2).is_on(Sync())
    assert not DeterministicSchedule(2).is_on(Async())
    assert not DeterministicSchedule(2).is_on(None)


def test_an_epoch_begins_when_all_trainers_ask(queue: TaskQueue) -> None:
    schedule = DeterministicSchedule(2)
    assert not schedule.begins(queue, "a", ALIVE, 0.0)
    assert schedule.pieces_for(queue, "a", 5) == 0, "not all trainers have asked"
    assert not schedule.begins(queue, "a", ALIVE, 1.0), "the same trainer again"
    assert not schedule.begins(queue, "gone", ALIVE, 1.0), "its lease has ended"
    assert schedule.begins(queue, "b", ALIVE, 2.0)
    assert not schedule.begins(queue, "a", ALIVE, 2.0), "only once"


def test_a_trainer_gets_one_task_when_it_holds_none(queue: TaskQueue) -> None:
    schedule = DeterministicSchedule(1)
    assert schedule.begins(queue, "a", ALIVE, 0.0)
    assert not schedule.begins(queue, "a", ALIVE, 0.0), "the epoch has begun"
    assert [schedule.pieces_for(queue, "a", want) for want in (0, 1, 5)] == [0, 1, 1]
    queue.request("a", 0.0)
    assert schedule.pieces_for(queue, "a", 5) == 0, "it holds a task"
    assert schedule.pieces_for(queue, "b", 5) == 1
    for trainer in ("b", "c", "d"):
        queue.request(trainer, 0.0)
    assert schedule.pieces_for(queue, "e", 5) == 0, "no copies"


def test_all_trainers_begin_the_next_epoch_together(queue: TaskQueue) -> None:
    schedule = DeterministicSchedule(2)
    schedule.begins(queue, "a", ALIVE, 0.0)
    schedule.begins(queue, "b", ALIVE, 0.0)
    do(queue, "a", 4)
    assert not schedule.begins(queue, "b", ALIVE, 1.0)
    assert schedule.pieces_for(queue, "b", 1) == 0
    assert schedule.begins(queue, "a", ALIVE, 2.0)
    assert schedule.pieces_for(queue, "b", 1) == 1
    do(queue, "a", 4)
    assert queue.is_done
    assert not schedule.begins(queue, "a", ALIVE, 3.0)
    assert schedule.pieces_for(queue, "a", 3) == 3, "it asks until the job is over"


def test_a_trainer_with_a_task_begins_no_epoch(queue: TaskQueue) -> None:
    schedule = DeterministicSchedule(1)
    queue.request("a", 0.0)
    assert not schedule.begins(queue, "a", ALIVE, 0.0), "a former master assigned it"
    assert schedule.begins(queue, "b", ALIVE, 0.0)


def test_after_a_minute_an_epoch_begins_without_the_missing_trainers(queue: TaskQueue) -> None:
    schedule = DeterministicSchedule(2)
    assert not schedule.begins(queue, "a", ALIVE, 100.0)
    assert not schedule.begins(queue, "a", ALIVE, 160.0)
    assert schedule.begins(queue, "a", ALIVE, 160.1)
    do(queue, "a", 4)
    assert not schedule.begins(queue, "a", ALIVE, 300.0), "another minute for the next epoch"


def test_all_trainers_are_admitted_together(queue: TaskQueue) -> None:
    schedule = DeterministicSchedule(2)
    assert schedule.joins(queue, "a", 1, ALIVE, 0.0) == {}
    assert schedule.joins(queue, "b", 9, ALIVE, 0.0) == {}, "the registration is not alive"
    assert schedule.joins(queue, "b", 2, ALIVE, 0.0) == {"a": 1, "b": 2}
    assert schedule.joins(queue, "c", 3, ALIVE, 0.0) == {"c": 3}, "a later trainer is admitted at once"
    do(queue, "a", 4)
    assert schedule.joins(queue, "a", 1, ALIVE, 1.0) == {}
    assert schedule.joins(queue, "a", 1, ALIVE, 61.0) == {}
    assert schedule.joins(queue, "a", 1, ALIVE, 61.1) == {"a": 1}, "after a minute"


def test_at_most_one_trainer_per_task_is_awaited(queue: TaskQueue) -> None:
    schedule = DeterministicSchedule(9)
    alive = dict.fromkeys("abcd", 1)
    joined = [schedule.joins(queue, name, 1, alive, 0.0) for name in "abcd"]
    assert joined == [{}, {}, {}, alive]


def test_a_lost_task_of_an_earlier_epoch_is_assigned(queue: TaskQueue) -> None:
    schedule = DeterministicSchedule(1)
    do(queue, "a", 4)
    do(queue, "a", 3)
    last = queue.request("b", 0.0)
    queue.reopen(0, [(0, 2)])
    assert isinstance(last, TaskGiven)
    queue.finish("b", 1, last.assignment.position, last.assignment.attempt, 0.0)
    schedule.begins(queue, "a", ALIVE, 0.0)
    assert schedule.pieces_for(queue, "a", 1) == 1
    queue.request("a", 0.0)
    assert schedule.pieces_for(queue, "b", 1) == 1
    queue.request("b", 0.0)
    assert schedule.pieces_for(queue, "c", 1) == 0, "no copies"


def test_trainers_without_tasks_are_not_awaited(queue: TaskQueue) -> None:
    schedule = DeterministicSchedule(3)
    do(queue, "a", 2)
    for trainer in ("a", "b"):
        queue.request(trainer, 0.0)
    assert schedule.joins(queue, "a", 1, ALIVE, 0.0) == {}
    assert schedule.joins(queue, "b", 2, ALIVE, 0.0) == {"a": 1, "b": 2}
