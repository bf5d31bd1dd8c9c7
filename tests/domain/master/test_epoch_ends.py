"""State of trainers at the ends of epochs; test_core tests the rules as a whole."""

from __future__ import annotations

import pytest

from flightedl.domain.master.epoch_ends import EpochEnds
from flightedl.domain.queue.tasks import TaskQueue
from flightedl.domain.queue.values import QueueSettings
from flightedl.messages.tasks import Assignment, TasksTicket

A, B = 11, 12


def ticket(trainer: str, generation: int, round_: int = 0) -> TasksTicket:
    return TasksTicket(trainer=trainer, generation=generation, round=round_)


def work(position: int, epoch: int = 1) -> Assignment:
    piece = {"first_batch": 0, "end_batch": 2, "batch_count": 2}
    return Assignment(epoch=epoch, position=position, task=position, attempt=1, seed=None, **piece)


@pytest.mark.parametrize(
    ("generation", "given", "joins"),
    [(A, work(3), True), (A, work(4), False), (A, work(3, epoch=2), False), (A + 1, work(3), False)],
)
def test_a_trainer_joins_with_a_promised_task(generation: int, given: Assignment, joins: bool) -> None:
    ends = EpochEnds()
    ends.promised(ticket("a", A), [work(3)])
    ends.promised(ticket("a", A), [])
    assert ends.joins_with(ticket("b", B), work(3)) is False
    assert ends.joins_with(ticket("a", generation), given) is joins
    assert ends.joins_with(ticket("a", A), work(3)) is False, "a promise is valid for one beginning"


def at_the_last_piece(ends: EpochEnds) -> TaskQueue:
    """Return a queue without unassigned tasks, in which "b" holds the last piece of two batches, at its round 5."""
    queue = TaskQueue(QueueSettings(task_count=1, batch_counts=lambda _: 2, epochs=2))
    queue.request("b", 0.0)
    ends.asked(ticket("b", B, 5))
    return queue


@pytest.mark.parametrize(("round_", "stays"), [(6, False), (7, True), (8, True)])
def test_a_trainer_that_has_done_the_remaining_rounds_stays(round_: int, stays: bool) -> None:
    ends = EpochEnds()
    queue = at_the_last_piece(ends)
    assert ends.should_stay(queue, ticket("a", A, round_), 1.0) is stays


def test_a_departed_trainer_is_forgotten() -> None:
    ends = EpochEnds()
    queue = at_the_last_piece(ends)
    ends.promised(ticket("b", B), [work(3)])
    ends.gone("b")
    ends.gone("b")
    assert not ends.should_stay(queue, ticket("a", A, 8), 1.0), "its round is unknown"
    assert not ends.joins_with(ticket("b", B), work(3))
