"""A queue as trainers see it: reports in, assignments out, also in a stopped job."""

from __future__ import annotations

from typing import Any

import pytest

from flightedl.domain.master.effects import Outbox, QueueNews
from flightedl.domain.master.work import Work
from flightedl.domain.queue.tasks import TaskQueue
from flightedl.domain.queue.values import EpochFinished, QueueSettings
from flightedl.messages.tasks import Assignment, DoneBatches, FinishedTask, ReturnedTask, TasksTicket

A, B = 20, 21


@pytest.fixture
def work() -> Work:
    return work_of(6)


def work_of(task_count: int, **settings: Any) -> Work:
    queue = TaskQueue(QueueSettings(**({"task_count": task_count, "batch_counts": lambda _: 1} | settings)))
    return Work(queue, Outbox())


def ticket(trainer: str = "a", generation: int = A, **more: Any) -> TasksTicket:
    return TasksTicket(trainer=trainer, generation=generation, **more)


def take(work: Work, count: int, trainer: str = "a", generation: int = A) -> list[Assignment]:
    """Ask for ``count`` pieces more than the trainer holds."""
    holding = [each.attempt for each in work.queue.holders().get(trainer, ())]
    given, outcome, _ = work.hand_out(ticket(trainer, generation, want=count, holding=holding), 0.0, 1)
    assert (len(given), outcome) == (count, "given")
    return given


def finished(*done: Assignment) -> list[FinishedTask]:
    return [FinishedTask(epoch=each.epoch, position=each.position, attempt=each.attempt, pservers=[]) for each in done]


def test_a_trainer_must_drop_tasks_that_it_no_longer_holds(work: Work) -> None:
    mine, lost = take(work, 2)
    work.trainer_departed("a", 0.0)
    (again,) = take(work, 1)
    holding = [mine.attempt, lost.attempt, again.attempt]
    assert [each.attempt for each in work.apply_reports(ticket(holding=holding), 0.0)] == holding[:2]


def test_reports_are_counted_by_outcome(work: Work) -> None:
    done, returned = take(work, 2)
    back = ReturnedTask(epoch=0, position=returned.position, attempt=returned.attempt)
    work.apply_reports(ticket(finished=finished(done), returned=[back]), 0.0)
    work.apply_reports(ticket(finished=finished(done)), 0.0)
    work.apply_reports(ticket(finished=finished(returned)), 0.0)
    assert {name: count for name, count in work.reports.items() if count} == {
        "finished": 1,
        "returned": 1,
        "repeated": 1,
        "outdated": 1,
    }


def test_done_batches_of_a_returned_piece_are_not_assigned_again() -> None:
    work = work_of(1, batch_counts=lambda _: 4, is_deduplicated=False)
    (given,) = take(work, 1)
    done = [DoneBatches(attempt=given.attempt, stretches=[(0, 3)])]
    back = ReturnedTask(epoch=0, position=given.position, attempt=given.attempt)
    assert work.apply_reports(ticket(done=done, returned=[back]), 0.0) == []
    (again,) = take(work, 1, "b", B)
    assert (again.first_batch, again.end_batch) == (3, 4)


def test_a_completely_done_piece_that_is_returned_ends_the_epoch() -> None:
    outbox = Outbox()
    work = Work(TaskQueue(QueueSettings(1, lambda _: 1, is_deduplicated=False)), outbox, "e")
    (given,) = take(work, 1)
    back = ReturnedTask(epoch=0, position=given.position, attempt=given.attempt)
    work.apply_reports(ticket(done=[DoneBatches(attempt=given.attempt, stretches=[(0, 1)])], returned=[back]), 0.0)
    assert outbox.take() == [QueueNews("e", EpochFinished(0))]
    assert work.queue.is_over


def test_only_work_of_past_epochs_counts_as_repeated() -> None:
    work = work_of(2, epochs=2)
    first, second = take(work, 2)
    assert work.apply_reports(ticket(finished=finished(first, second)), 0.0) == []
    assert (len(work.take_finished()), work.take_finished(), work.repeated_count) == (2, [], 0)
    work.queue.reopen(0, [(0, 1)])
    work.apply_reports(ticket(finished=finished(*take(work, 1))), 0.0)
    assert (len(work.take_finished()), work.repeated_count) == (1, 1)


def test_a_stopped_job_takes_back_assignments_whose_reply_was_lost() -> None:
    work = work_of(40)
    attempts = [each.attempt for each in take(work, 2)]
    (unheard,) = take(work, 1)
    assert work.take_back_unstarted(ticket(holding=attempts), 0.0) == []
    work.queue.stop()
    assert work.take_back_unstarted(ticket(holding=attempts, want=0), 0.0) == [], "it does not list all that it holds"
    lost = work.take_back_unstarted(ticket(holding=attempts), 0.0)
    assert lost == [ReturnedTask(epoch=0, position=2, attempt=unheard.attempt)]
    assert [each.attempt for each in work.queue.holders()["a"]] == attempts
    assert work.take_back_unstarted(ticket(generation=A + 1), 0.0) == [], "another registration holds it"


def test_a_trainer_of_a_stopped_job_keeps_the_running_task_and_the_next_one() -> None:
    work = work_of(40)
    attempts = [each.attempt for each in take(work, 4)]
    work.queue.stop()
    lost = work.take_back_unstarted(ticket(holding=attempts), 0.0)
    assert [each.attempt for each in lost] == attempts[2:]
    assert work.hand_out(ticket(holding=attempts[:2]), 0.0, 1) == ([], "none_now", 0.1)
    for each in work.queue.holders()["a"]:
        work.queue.finish("a", each.epoch, each.position, each.attempt, 0.0, generation=A)
    assert work.queue.is_over
    assert work.hand_out(ticket(), 0.0, 1)[:2] == ([], "epochs_done")


def test_a_ticket_that_only_reports_learns_whether_the_job_is_over(work: Work) -> None:
    assert work.hand_out(ticket(want=0), 0.0, 1) == ([], "none_now", 0.0)
    work.apply_reports(ticket(finished=finished(*take(work, 2))), 0.0)
    while not work.queue.is_over:
        work.apply_reports(ticket(finished=finished(*take(work, 1))), 0.0)
    assert work.hand_out(ticket(want=0), 0.0, 1) == ([], "epochs_done", 0.0)


@pytest.mark.parametrize(
    ("alive", "is_graceful", "has_failed"),
    [({}, False, True), ({}, True, False), ({"a": A + 1}, False, False)],
    ids=["dead", "not known", "registered again"],
)
def test_only_trainers_known_to_have_died_are_blamed(alive, is_graceful, has_failed) -> None:
    work = work_of(1, attempts_limit=1, confirmations=0)
    take(work, 1)
    assert not work.forget_the_dead({"a": A}, 0.0)
    assert work.forget_the_dead(alive, 0.0, is_graceful=is_graceful)
    assert bool(work.queue.failed.details) == has_failed


def test_expired_pieces_are_reported(work: Work) -> None:
    take(work, 1)
    assert not work.tick(1.0)
    assert work.tick(10_000.0)
