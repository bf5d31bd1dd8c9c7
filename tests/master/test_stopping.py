"""A trainer ends the job before all its data is trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from flightedl.domain.master.effects import Outbox
from flightedl.domain.master.work import Work
from flightedl.domain.queue.tasks import TaskQueue
from flightedl.domain.queue.values import QueueSettings
from flightedl.errors import NotReadyError
from flightedl.messages.tasks import Assignment, FinishedTask, ReturnedTask, StopRequest, TasksTicket
from tests.support.contracts.coordinator import eventually

from .job_of_twins import TASKS, Job, Master


class Trainer:
    """Requests of one trainer."""

    def __init__(self, work: Work, name: str) -> None:
        self.work, self.name = work, name
        self.held: list[Assignment] = []

    def ask(self, want: int, finished: Sequence[Assignment] = ()) -> str:
        """Report, drop lost tasks, add new ones; return the outcome."""
        reports = [FinishedTask(epoch=a.epoch, position=a.position, attempt=a.attempt) for a in finished]
        self.held = [a for a in self.held if a not in finished]
        ticket = self.ticket(want, finished=reports)
        lost = self.work.apply_reports(ticket, 0.0) + self.work.take_back_unstarted(ticket, 0.0)
        self.drop(lost)
        given, outcome, _ = self.work.hand_out(self.ticket(want), 0.0, 1)
        self.held += given
        return outcome

    def drop(self, lost: Sequence[ReturnedTask]) -> None:
        attempts = {each.attempt for each in lost}
        self.held = [a for a in self.held if a.attempt not in attempts]

    def ticket(self, want: int, **more: object) -> TasksTicket:
        holding = [a.attempt for a in self.held]
        return TasksTicket(trainer=self.name, generation=1, want=want, holding=holding, **more)  # type: ignore[arg-type]


@pytest.fixture
def work() -> Work:
    return Work(TaskQueue(QueueSettings(8, lambda _: 1, epochs=2)), Outbox())


def test_started_tasks_are_finished_and_no_others_are_assigned(work: Work) -> None:
    first, second = Trainer(work, "a"), Trainer(work, "b")
    first.ask(5)
    second.ask(1)
    work.queue.stop()
    assert first.ask(1) == "none_now"
    assert len(first.held) == 2
    assert not work.queue.is_over
    assert second.ask(1, second.held) == "none_now"
    assert first.ask(1, first.held) == "epochs_done"
    assert work.queue.is_over
    assert second.ask(1) == "epochs_done"
    assert second.ask(0) == "epochs_done"
    counts = work.queue.counts()
    assert (counts.done, counts.todo, counts.pending) == (3, 5, 0)


def test_an_assignment_whose_reply_was_lost_does_not_keep_a_stopped_job_open(work: Work) -> None:
    trainer = Trainer(work, "a")
    trainer.ask(1)
    trainer.held.clear()
    work.queue.stop()
    # A ticket that requests no tasks does not list what it holds.
    assert trainer.ask(0) == "none_now"
    assert trainer.ask(1) == "epochs_done"


def test_a_trainer_that_dies_does_not_keep_a_stopped_job_open(work: Work) -> None:
    trainer = Trainer(work, "a")
    trainer.ask(2)
    work.queue.stop()
    work.trainer_departed("a", 0.0)
    assert work.queue.is_over


@pytest.mark.parametrize("is_kept", [True, False], ids=["checkpoints", "none"])
def test_a_stopped_job_ends_after_its_last_checkpoint_even_after_a_takeover(
    make_job: Callable[..., Job], is_kept: bool
) -> None:
    job = make_job(is_kept=is_kept)
    pserver = job.start_pserver(0)
    master = job.start_master()
    master.declare()
    a = job.start_trainer("a")
    done = master.take("a", a)
    pserver.take(done)
    master.service.ask(StopRequest(trainer="a", generation=a, reason="a test"))
    assert master.work("a", a, holding=[done.attempt]).outcome == "none_now", "it first finishes what it has begun"
    master.report("a", a, done, by=[pserver.generation])
    eventually(lambda: master.says_done("a", a))
    job.end_master()
    successor = job.start_master()
    eventually(lambda: is_answered_with_the_end(successor, a))
    status = successor.service.status()
    assert (status.state, status.is_stopped) == ("done", True)
    assert (status.tasks.done, status.tasks.todo) == (1, TASKS - 1)
    assert bool(status.checkpoint) is is_kept


def is_answered_with_the_end(master: Master, generation: int) -> bool:
    try:
        return master.says_done("a", generation)
    except NotReadyError:
        return False
