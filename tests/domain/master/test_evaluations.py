"""Evaluations: begun once, counted once, kept for a while, and stored."""

from __future__ import annotations

from typing import Any

import pytest

from flightedl.domain.master.effects import Outbox
from flightedl.domain.master.evaluations import KEPT, Evaluation, Evaluations
from flightedl.domain.queue.values import QueueSettings
from flightedl.errors import BegunAnewError, NotFoundError
from flightedl.messages.declarations import DatasetDeclaration, DeclaredDataset
from flightedl.messages.tasks import FinishedTask, TasksTicket

ALIVE = {"a": 20}


@pytest.fixture
def evaluations() -> Evaluations:
    return Evaluations(Outbox())


def begin(evaluations: Evaluations, name: str = "test", task_count: int = 2, **settings: Any) -> Evaluation:
    declared = DeclaredDataset(
        index_hash="i",
        task_count=task_count,
        record_count=task_count,
        schema="",
        declaration=DatasetDeclaration(urls=["file:///x"], batch_size=1),
    )
    tasks = QueueSettings(task_count=task_count, batch_counts=lambda _: 1, **settings)
    return evaluations.begin(name, declared, tasks, ALIVE, 0.0)


def do(evaluations: Evaluations, found: Evaluation, count: int = 1, total: float = 3.0) -> None:
    for _ in range(count):
        assert found.work is not None
        (given,), _, _ = found.work.hand_out(TasksTicket(trainer="a", generation=20), 0.0, 1)
        report = FinishedTask(
            epoch=0, position=given.position, attempt=given.attempt, pservers=[], metrics={"loss": (total, 2.0)}
        )
        found.work.apply_reports(TasksTicket(trainer="a", generation=20, finished=[report]), 0.0)
        evaluations.settle(found)


def test_a_finished_evaluation_has_a_result_and_no_queue(evaluations: Evaluations) -> None:
    assert not evaluations
    found = begin(evaluations)
    assert evaluations
    do(evaluations, found)
    assert (found.is_done, found.metrics) == (False, {"loss": 1.5})
    assert evaluations.encode_results() is None
    assert begin(evaluations) is found, "it is running"
    (status,) = evaluations.status()
    assert (status.is_done, status.tasks.todo, status.tasks.done, status.tasks.total) == (False, 1, 1, 2)
    do(evaluations, found, total=5.0)
    assert (found.is_done, found.work, found.metrics) == (True, None, {"loss": 2.0})
    evaluations.settle(found)
    assert begin(evaluations).work is None, "it does not begin again"
    (status,) = evaluations.status()
    assert (status.is_done, status.tasks.done, status.tasks.failed) == (True, 2, 0)


def test_an_undeclared_name_is_not_found(evaluations: Evaluations) -> None:
    begin(evaluations)
    assert evaluations.known("test") is evaluations.find("test")
    assert evaluations.known("other") is None
    with pytest.raises(NotFoundError, match="other"):
        evaluations.find("other")


def test_metrics_without_weight_are_left_out(evaluations: Evaluations) -> None:
    found = begin(evaluations)
    found.add({"none": (0.0, 0.0), "loss": (4.0, 2.0)})
    found.add({"loss": (2.0, 1.0)})
    assert found.metrics == {"loss": 2.0}


def test_the_result_is_the_mean_over_records(evaluations: Evaluations) -> None:
    found = begin(evaluations)
    found.add({"loss": (4.0, 2.0)})
    found.add({"loss": (5.0, 1.0)})
    assert found.metrics == {"loss": 3.0}


def test_the_metrics_of_a_repeated_report_are_counted_once(evaluations: Evaluations) -> None:
    found = begin(evaluations)
    assert found.work is not None
    (given,), _, _ = found.work.hand_out(TasksTicket(trainer="a", generation=20), 0.0, 1)
    report = FinishedTask(epoch=0, position=0, attempt=given.attempt, pservers=[], metrics={"loss": (3.0, 2.0)})
    for _ in range(2):
        found.work.apply_reports(TasksTicket(trainer="a", generation=20, finished=[report]), 0.0)
        evaluations.settle(found)
    do(evaluations, found, total=5.0)
    assert found.metrics == {"loss": 2.0}


def test_running_evaluations_and_the_newest_results_are_kept(evaluations: Evaluations) -> None:
    begin(evaluations, "running")
    names = [f"n{number}" for number in range(KEPT + 2)]
    for name in names:
        do(evaluations, begin(evaluations, name, task_count=1))
    begin(evaluations, "last")
    assert [each.name for each in evaluations.status()] == ["running", *names[2:], "last"]


def test_a_successor_continues_running_evaluations_and_knows_results(evaluations: Evaluations) -> None:
    do(evaluations, begin(evaluations, "through", task_count=1))
    do(evaluations, begin(evaluations, "running"))
    later = Evaluations(Outbox())
    later.recover(evaluations.encode())
    assert [(each.name, each.is_done, each.tasks.done) for each in later.status()] == [
        ("through", True, 1),
        ("running", False, 0),
    ]
    assert later.encode() == evaluations.encode()
    found = begin(later, "running")
    assert found.work is not None
    assert found.work.queue.counts().done == 1
    do(later, found, total=5.0)
    assert found.metrics == {"loss": 2.0}, "both tasks count"
    results = Evaluations(Outbox())
    restored = evaluations.encode_results()
    assert restored is not None
    results.recover(restored)
    assert [each.name for each in results.status()] == ["through"], "running evaluations begin again"


def test_pieces_of_a_departed_trainer_are_assigned_again(evaluations: Evaluations) -> None:
    do(evaluations, begin(evaluations, "through", task_count=1))
    found = begin(evaluations, task_count=1, attempts_limit=1, confirmations=0)
    assert found.work is not None
    found.work.hand_out(TasksTicket(trainer="a", generation=20), 0.0, 1)
    evaluations.trainer_departed("a", 1.0, is_graceful=True)
    assert not found.is_done
    found.work.hand_out(TasksTicket(trainer="a", generation=20), 1.0, 1)
    evaluations.trainer_departed("a", 2.0)
    assert (found.is_done, found.record.failed) == (True, 1), "its only task has failed"
    status = evaluations.status()[-1]
    assert (status.tasks.done, status.tasks.failed) == (0, 1)


def test_expired_pieces_are_taken_back(evaluations: Evaluations) -> None:
    do(evaluations, begin(evaluations, "through", task_count=1))
    found = begin(evaluations, task_count=1, attempts_limit=1, confirmations=0)
    assert found.work is not None
    found.work.hand_out(TasksTicket(trainer="a", generation=20), 0.0, 1)
    assert not evaluations.tick(1.0)
    assert not found.is_done
    assert evaluations.tick(10_000.0)
    assert found.is_done


def test_results_belong_to_a_life_of_the_model(evaluations: Evaluations) -> None:
    assert not evaluations.enter(7)
    do(evaluations, begin(evaluations), 2)
    successor = Evaluations(Outbox())
    successor.recover(evaluations.encode())
    for each in (evaluations, successor):
        assert not each.enter(7)
        assert each.find("test").metrics == {"loss": 1.5}
        assert each.enter(9), "another trainer has initialized the model again"
        assert each.known("test") is None
        with pytest.raises(BegunAnewError):
            each.enter(7)


def test_an_ended_life_is_not_evaluated(evaluations: Evaluations) -> None:
    evaluations.enter(7)
    begin(evaluations)
    evaluations.reinitialize(7)
    assert evaluations, "this is stored"
    assert evaluations.known("test") is None
    successor = Evaluations(Outbox())
    successor.recover(evaluations.encode())
    with pytest.raises(BegunAnewError):
        successor.enter(7)


def test_results_in_a_checkpoint_belong_to_the_resumed_life(evaluations: Evaluations) -> None:
    evaluations.enter(7)
    do(evaluations, begin(evaluations), 2)
    results = evaluations.encode_results()
    assert results is not None
    resumed = Evaluations(Outbox())
    resumed.recover(results)
    assert not resumed.enter(3), "another etcd counts from the beginning"
    assert resumed.find("test").is_done
