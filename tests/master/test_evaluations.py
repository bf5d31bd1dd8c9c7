"""Evaluations: their own tasks, sums that count each piece once, results that outlive the master."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from flightedl.domain.master.effects import Outbox
from flightedl.domain.master.evaluations import Evaluation, Evaluations
from flightedl.domain.queue.values import QueueSettings
from flightedl.errors import DataError, DeclarationError, NotFoundError, UsageError
from flightedl.master.evaluations import EvaluationDatasets
from flightedl.messages.declarations import DatasetDeclaration, DeclaredDataset, EvaluationDeclaration
from flightedl.messages.tasks import Assignment, FinishedTask, TasksTicket

from .job_of_twins import DATASET, Job, until_ready

DECLARED = DeclaredDataset(
    index_hash="",
    task_count=3,
    record_count=12,
    schema="",
    declaration=DatasetDeclaration(urls=["a.parquet"], batch_size=2),
)


def evaluations() -> Evaluations:
    return Evaluations(Outbox())


def begun(known: Evaluations, name: str = "e") -> Evaluation:
    return known.begin(name, DECLARED, QueueSettings(3, lambda _: 2), {"x": 1, "y": 1}, 0.0)


def ask(found: Evaluation, trainer: str, finished: list[FinishedTask], want: int = 1) -> list[Assignment]:
    ticket = TasksTicket(trainer=trainer, generation=1, finished=finished, want=want)
    assert found.work is not None
    found.work.apply_reports(ticket, 0.0)
    found.add_up()
    return found.work.hand_out(ticket, 0.0, 1)[0]


def done(a: Assignment, total: float, weight: float) -> FinishedTask:
    return FinishedTask(epoch=a.epoch, position=a.position, attempt=a.attempt, metrics={"loss": (total, weight)})


def test_means_are_weighted_and_a_piece_counts_once() -> None:
    known = evaluations()
    found = begun(known)
    (first,) = ask(found, "x", [])
    (second,) = ask(found, "y", [])
    (third,) = ask(found, "x", [done(first, 8.0, 4.0)])
    ask(found, "x", [done(first, 8.0, 4.0)], want=0)
    ask(found, "y", [done(second, 4.0, 4.0), done(third, 100.0, 4.0)], want=0)
    ask(found, "x", [done(third, 12.0, 4.0)], want=0)
    known.settle(found)
    assert found.is_done
    assert found.metrics == {"loss": pytest.approx(2.0)}
    (status,) = known.status()
    assert (status.tasks.done, status.tasks.total, status.is_done) == (3, 3, True)


def test_a_successor_continues_an_evaluation() -> None:
    known = evaluations()
    found = begun(known)
    (first,) = ask(found, "x", [])
    (second,) = ask(found, "x", [done(first, 4.0, 4.0)])
    successor = evaluations()
    successor.recover(known.encode())
    assert successor.find("e").work is None
    taken = begun(successor)
    assert taken.metrics == {"loss": 1.0}
    (third,) = ask(taken, "x", [done(second, 8.0, 4.0)])
    ask(taken, "x", [done(third, 12.0, 4.0)], want=0)
    successor.settle(taken)
    last = evaluations()
    last.recover(successor.encode())
    assert last.find("e").is_done
    assert last.find("e").metrics == {"loss": 2.0}


def test_a_name_is_one_evaluation(make_job: Callable[..., Job]) -> None:
    job = make_job()
    master = job.start_master()
    a = job.start_trainer("a")
    tasks = master.service.tasks
    request = EvaluationDeclaration(name="e", dataset=DATASET)
    declared = until_ready(lambda: tasks.declare_evaluation(request))
    assert tasks.declare_evaluation(request) == declared
    other = EvaluationDeclaration(name="e", dataset=msgspec.structs.replace(DATASET, batch_size=3))
    with pytest.raises(DeclarationError, match="dataset of the evaluation 'e'"):
        tasks.declare_evaluation(other)
    with pytest.raises(NotFoundError, match="no evaluation 'other'"):
        master.work("a", a, evaluation="other")


def test_pieces_of_a_dead_trainer_go_to_another() -> None:
    known = evaluations()
    found = begun(known)
    held = ask(found, "x", [], want=2)
    known.trainer_departed("x", 0.0)
    again = ask(found, "y", [], want=2)
    assert {a.position for a in again} == {a.position for a in held}


def test_a_checkpoint_has_the_results_of_finished_evaluations() -> None:
    known = evaluations()
    through, under_way = begun(known, "through"), begun(known, "under way")
    assert known.encode_results() is None
    pieces = ask(through, "x", [])
    while pieces:
        pieces = ask(through, "x", [done(piece, 4.0, 4.0) for piece in pieces])
    known.settle(through)
    ask(under_way, "x", [])
    stored = known.encode_results()
    assert stored is not None
    restored = evaluations()
    restored.recover(stored)
    assert restored.find("through").metrics == {"loss": 1.0}
    assert restored.find("through").is_done
    with pytest.raises(NotFoundError):
        restored.find("under way")


def test_an_evaluation_of_files_that_have_changed_since_it_began_is_refused() -> None:
    """A successor indexes the files again."""
    indexed = SimpleNamespace(reply=msgspec.structs.replace(DECLARED, index_hash="new"))
    indexing: Any = SimpleNamespace(index=lambda _: indexed)
    datasets = EvaluationDatasets(lambda: indexing, lambda **_: QueueSettings(1, lambda _: 1))
    with pytest.raises(DataError, match="have changed since it began"):
        datasets.index("e", msgspec.structs.replace(DECLARED, index_hash="old"))
    assert datasets.index("e", msgspec.structs.replace(DECLARED, index_hash="new")) is indexed
    for growing in ({"follow": True}, {"urls": ["kafka://a:9092/t"]}):
        following = msgspec.structs.replace(DECLARED.declaration, **growing)
        with pytest.raises(UsageError, match="cannot follow"):
            datasets.index("f", EvaluationDeclaration(name="f", dataset=following))
