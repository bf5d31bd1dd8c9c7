"""Promises of the next epoch, which are not assignments before that epoch begins."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from flightedl.domain.queue.tasks import TaskQueue
from flightedl.domain.queue.values import Assignment, NoTaskNow, QueueSettings, TaskGiven

Make = Callable[..., TaskQueue]


@pytest.fixture
def make() -> Iterator[Make]:
    queues: list[TaskQueue] = []

    def queue(task_count: int = 6, **settings: Any) -> TaskQueue:
        counts = {"batch_counts": lambda task: task % 3 + 1, "epochs": 3, "shuffle": True, "seed": 5}
        queues.append(TaskQueue(QueueSettings(task_count=task_count, **(counts | settings))))
        return queues[-1]

    yield queue
    for each in queues:
        each.check()


def finish(queue: TaskQueue, *taken: tuple[str, Assignment]) -> None:
    for trainer, a in taken:
        queue.finish(trainer, a.epoch, a.position, a.attempt, 1.0)


def at_the_end(queue: TaskQueue, *trainers: str) -> list[tuple[str, Assignment]]:
    """Return a queue near the end of an epoch: each trainer holds one piece."""
    taken = []
    while queue.counts().todo:
        for trainer in trainers:
            answer = queue.request(trainer, 0.0)
            assert isinstance(answer, TaskGiven)
            taken.append((trainer, answer.assignment))
        if queue.counts().todo:
            finish(queue, *taken[-len(trainers) :])
    return taken[-len(trainers) :]


def given(queue: TaskQueue, trainer: str) -> Assignment:
    answer = queue.request(trainer, 2.0)
    assert isinstance(answer, TaskGiven)
    return answer.assignment


def test_promised_tasks_are_assigned_when_the_epoch_begins(make: Make) -> None:
    queue = make()
    last = at_the_end(queue, "a", "b")
    promised = {trainer: queue.promise(trainer) for trainer in ("b", "a")}
    assert [(each.epoch, each.position, each.attempt) for each in promised["b"]] == [(1, 0, 0), (1, 1, 0)]
    assert [each.position for each in promised["a"]] == [2, 3]
    finish(queue, *last)
    for trainer in ("a", "b"):
        for each in promised[trainer]:
            answer = given(queue, trainer)
            assert replace(answer, attempt=0) == each
            assert answer.attempt > 0
    assert queue.counts().todo == 2


def test_promised_tasks_are_not_held(make: Make) -> None:
    queue = make()
    last = at_the_end(queue, "a", "b")
    revision, stored = queue.revision, queue.encode()
    queue.promise("a")
    assert (queue.revision, queue.encode()) == (revision, stored)
    assert queue.held_count("a") == 1
    assert isinstance(queue.request("a", 0.0), NoTaskNow), "epochs are a barrier"
    finish(queue, last[0])
    assert not queue.holds("a")
    queue.promise("a")
    assert not queue.holds("a")
    assert queue.epoch == 0


def test_repeated_requests_get_the_same_promises(make: Make) -> None:
    queue = make()
    at_the_end(queue, "a", "b")
    assert queue.promise("a") == queue.promise("a")
    assert not {each.task for each in queue.promise("a")} & {each.task for each in queue.promise("b")}


def test_every_task_is_done_once_whichever_trainer_gets_promised_ones(make: Make) -> None:
    queue = make(epochs=2)
    last = at_the_end(queue, "a", "b")
    for trainer in ("a", "b", "c"):
        queue.promise(trainer)
    finish(queue, *last)
    tasks: list[int] = []
    while isinstance(answer := queue.request("a", 2.0), TaskGiven):
        tasks.append(answer.assignment.task)
        finish(queue, ("a", answer.assignment))
        queue.check()
    assert sorted(tasks) == list(range(6))
    assert queue.is_done


def test_others_get_promised_tasks_last_unless_their_trainer_has_departed(make: Make) -> None:
    queue = make(8)
    last = at_the_end(queue, "a", "b")
    queue.promise("a")
    queue.promise("b")
    finish(queue, *last)
    assert [given(queue, "c").position for _ in range(2)] == [4, 5]
    queue.trainer_departed("a", 2.0)
    assert given(queue, "d").position == 0
    assert given(queue, "b").position == 2


def test_a_promised_task_that_was_assigned_is_not_assigned_again(make: Make) -> None:
    queue = make(4, epochs=2)
    last = at_the_end(queue, "a", "b")
    queue.promise("a")
    queue.promise("b")
    finish(queue, *last)
    taken = [given(queue, name) for name in ("c", "d", "e")]
    assert [each.position for each in taken] == [0, 1, 2]
    assert given(queue, "a").position == 3, "its own two are assigned, the other's last one is not yet"
    assert isinstance(queue.request("b", 2.0), NoTaskNow)


@pytest.mark.parametrize("settings", [{"epochs": 1}, {"follow": True}])
def test_an_epoch_that_may_never_begin_or_may_change_has_no_promises(make: Make, settings: dict[str, Any]) -> None:
    queue = make(**settings)
    at_the_end(queue, "a", "b")
    assert queue.promise("a") == ()


def test_nothing_is_promised_while_tasks_are_left(make: Make) -> None:
    queue = make(7)
    first = given(queue, "a")
    assert queue.promise("a") == ()
    finish(queue, ("a", first))
    last = at_the_end(queue, "a", "b")
    queue.give_back("a", last[0][1].epoch, last[0][1].position, last[0][1].attempt, 1.0)
    assert queue.promise("a") == ()


def test_a_new_master_has_no_promises_and_loses_no_task(make: Make) -> None:
    queue = make(4, epochs=2)
    last = at_the_end(queue, "a", "b")
    queue.promise("a")
    finish(queue, *last)
    again = TaskQueue.decode(queue.encode(), queue.settings)
    positions = []
    while isinstance(answer := again.request("b", 2.0), TaskGiven):
        positions.append(answer.assignment.position)
        finish(again, ("b", answer.assignment))
    assert positions == [0, 1, 2, 3]
    assert again.is_done


def test_an_idle_trainer_stays_only_while_the_others_should_finish(make: Make) -> None:
    queue = make(batch_counts=lambda _: 4, is_deduplicated=False, epochs=2)

    def hand_out(trainer: str, now: float) -> Assignment:
        answer = queue.request(trainer, now)
        assert isinstance(answer, TaskGiven)
        return answer.assignment

    for now in (0.0, 10.0):
        pair = [(trainer, hand_out(trainer, now)) for trainer in ("a", "b")]
        assert not queue.should_end_now(now + 100.0), "some are still unassigned"
        for trainer, a in pair:
            queue.finish(trainer, a.epoch, a.position, a.attempt, now + 8.0)
    last_a, last_b = hand_out("a", 20.0), hand_out("b", 21.5)
    queue.finish("a", last_a.epoch, last_a.position, last_a.attempt, 28.0)
    assert not queue.should_end_now(28.4), "more than half a batch of four, at 8 s, is missing"
    assert queue.should_end_now(28.5)
    queue.give_back("b", last_b.epoch, last_b.position, last_b.attempt, 28.6)
    assert not queue.should_end_now(50.0), "it waits for another trainer"


def test_the_end_of_an_epoch_is_unknown_before_the_first_finished_task(make: Make) -> None:
    queue = make(1)
    queue.request("a", 0.0)
    assert not queue.should_end_now(1000.0)
