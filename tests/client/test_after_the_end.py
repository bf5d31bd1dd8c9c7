"""Reads after the end of the job return the trained values, even if a pserver is replaced then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import pytest

from flightedl.client.participation import Participation
from flightedl.domain.consistency.modes import Async
from flightedl.domain.trainer.feed import Ask, Reports
from flightedl.errors import BegunAnewError, UnavailableError
from flightedl.messages.base import decode, encode
from flightedl.messages.tasks import TasksReply, TasksTicket

from .loop_bench import gradients, value_of
from .pserver_bench import Cluster, waiting

SHAPES = {"a": (4000,), "b": (4000,)}


def done(*pservers: int) -> TasksReply:
    return TasksReply(assignments=[], outcome="epochs_done", pservers=list(pservers))


ENDING = TasksReply(assignments=[], outcome="none_now", is_ending=True)
REOPENED = TasksReply(assignments=[], outcome="none_now")


class Registered:
    """A registration that never expires."""

    trainer, generation, witness = "t1", 1, "slot-1"

    def renewed(self) -> bool:
        return False


class Master:
    """Master with planned answers, the last of which it repeats; also the connection to itself."""

    address = "127.0.0.1:7000"
    life = 0

    def __init__(self) -> None:
        self.answers: list[TasksReply | Callable[[], TasksReply]] = []
        self.asked = 0

    def master(self) -> Self:
        """Return the connection to the master."""
        return self

    def ask(self, _connection: Self, request: bytes, *, timeout_s: float) -> bytes:
        ticket = decode(request, TasksTicket)
        assert (ticket.want, ticket.holding, timeout_s > 0) == (0, [], True)
        self.asked += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return encode(answer() if callable(answer) else answer)

    def close_idle(self) -> None:
        """Do nothing: no connection is open."""


class Trained:
    """A job with two pservers after one step, and a trainer whose loop has ended."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.master = cluster, Master()
        trainer = cluster.trainer()
        trainer.begin(0)
        trainer.step(0, gradients(cluster))
        self.participation = Participation(
            Registered(),  # type: ignore[arg-type]
            self.master,  # type: ignore[arg-type]
            waiting,
            lambda: None,
            lambda _records, _is_empty: None,
            lambda: self.master,  # type: ignore[arg-type, return-value]
        )
        self.parameters = cluster.parameters(self.participation, give_up_s=0.5)
        self.participation.set_model(self.parameters, cluster.mode)
        cluster.trainers.append(self)  # type: ignore[arg-type]

    def answer_with(self, *answers: TasksReply | Callable[[], TasksReply]) -> None:
        """Let the master give one answer at the end of the loop, and the others later."""
        self.master.answers = [*answers]
        self.participation.ask(self.master)  # type: ignore[arg-type]

    def do_again(self) -> None:
        """Push what the second pserver has lost, as another trainer."""
        other = self.cluster.trainer()
        other.begin(0)
        other.step(0, gradients(self.cluster))

    def pulled(self) -> list[float]:
        self.participation.loop_over()
        return [float(self.parameters[name][0]) for name in SHAPES]


def test_a_finished_loop_reads_the_last_updates_of_other_trainers() -> None:
    with Cluster(SHAPES, Async(), pservers=2, members=2) as cluster:
        job = Trained(cluster)
        job.parameters.pull()
        other = cluster.trainer(2)
        other.begin(1)
        other.step(1, gradients(cluster))
        job.answer_with(done(1, 1))
        assert [job.parameters[name][0] for name in SHAPES] == [1, 1]
        assert job.pulled() == [2, 2]


def test_a_finished_loop_of_a_job_without_a_model_reads_nothing() -> None:
    participation = Participation(
        Registered(),  # type: ignore[arg-type]
        Master(),  # type: ignore[arg-type]
        waiting,
        lambda: None,
        lambda _records, _is_empty: None,
        Master,  # type: ignore[arg-type]
    )
    participation.loop_over()


def test_a_replacement_after_the_end_is_read_once_the_master_has_checked_it() -> None:
    with Cluster(SHAPES, Async(), pservers=2) as cluster:
        job = Trained(cluster)
        job.answer_with(done(1, 1))
        cluster.replace(1, generation=7)

        def looked_at() -> TasksReply:
            assert value_of(cluster, "b") == 0, "the value has not been read before"
            job.do_again()
            return done(1, 7)

        job.master.answers = [ENDING, ENDING, looked_at, done(1, 7)]
        assert job.pulled() == [1, 1]
        asked = job.master.asked
        assert job.pulled() == [1, 1]
        assert job.master.asked == asked, "the answer is cached"


def test_a_trainer_does_not_wait_for_batches_that_it_must_repeat_itself() -> None:
    with Cluster(SHAPES, Async(), pservers=2) as cluster:
        job = Trained(cluster)
        job.answer_with(done(1, 1))
        cluster.replace(1, generation=7)
        job.master.answers = [ENDING, REOPENED]
        with pytest.raises(BegunAnewError, match=r"after the job's end.*restart this trainer"):
            job.pulled()


def test_a_replaced_process_is_not_read_while_its_successor_is_unknown() -> None:
    with Cluster(SHAPES, Async(), pservers=2) as cluster:
        job = Trained(cluster)
        job.answer_with(done(1, 7))
        with pytest.raises(UnavailableError, match="pserver 1 was replaced after the job's end"):
            job.pulled()
        cluster.replace(1, generation=7)
        job.do_again()
        assert job.pulled() == [1, 1]


def test_before_the_end_any_present_process_is_read() -> None:
    with Cluster(SHAPES, Async(), pservers=2) as cluster:
        job = Trained(cluster)
        job.answer_with(ENDING)
        cluster.replace(1, generation=7)
        assert job.pulled() == [1, 0]
        assert job.master.asked == 1


def test_the_end_of_an_evaluation_implies_nothing_about_the_pservers() -> None:
    with Cluster(SHAPES, Async(), pservers=2) as cluster:
        job = Trained(cluster)
        job.answer_with(done(1, 1))
        evaluation = TasksReply(assignments=[], outcome="epochs_done")
        job.master.answers = [evaluation]
        job.participation.fetch(job.master, Ask(Reports(), (), 0, 0.0, 0), "evaluation")  # type: ignore[arg-type]
        cluster.replace(1, generation=7)
        job.master.answers = [REOPENED]
        with pytest.raises(BegunAnewError):
            job.pulled()
