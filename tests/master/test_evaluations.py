"""Evaluations: their own tasks, sums that count each piece once, results that outlive the master."""

from __future__ import annotations

import pyarrow as pa
import pytest

from flightedl.errors import DeclarationError, NotFoundError, NotReadyError
from flightedl.formats.registry import named_format
from flightedl.master.evaluations import Evaluation, Evaluations
from flightedl.master.indexing import DatasetIndexing
from flightedl.messages.declarations import DatasetDeclaration, EvaluationDeclaration
from flightedl.messages.tasks import Assignment, FinishedTask, TasksTicket
from flightedl.testing.clock import FakeClock
from flightedl.testing.memory import MemoryFiles


@pytest.fixture
def files() -> MemoryFiles:
    batches = pa.table({"k": range(12)}).to_batches(max_chunksize=4)
    return MemoryFiles({"a.parquet": b"".join(named_format("parquet").write(batches, batches[0].schema))})


def request(name: str = "e", batch_size: int = 2) -> EvaluationDeclaration:
    return EvaluationDeclaration(name=name, dataset=DatasetDeclaration(urls=["a.parquet"], batch_size=batch_size))


def evaluations(files: MemoryFiles) -> Evaluations:
    return Evaluations(lambda: DatasetIndexing(files, FakeClock()), 3)


def begun(known: Evaluations, name: str = "e") -> Evaluation:
    while True:
        try:
            indexed = known.index(name, request(name))
        except NotReadyError:
            continue
        known.begin(name, indexed, {"x": 1, "y": 1}, 0.0)
        return known.find(name)


def ask(found: Evaluation, trainer: str, finished: list[FinishedTask], want: int = 1) -> list[Assignment]:
    ticket = TasksTicket(trainer=trainer, generation=1, finished=finished, want=want)
    assert found.dispatch is not None
    found.dispatch.take_reports(ticket, 0.0)
    return found.dispatch.hand_out(ticket, 0.0, 1)[0]


def done(a: Assignment, total: float, weight: float) -> FinishedTask:
    return FinishedTask(epoch=a.epoch, position=a.position, attempt=a.attempt, metrics={"loss": (total, weight)})


def test_means_are_weighted_and_a_piece_counts_once(files: MemoryFiles) -> None:
    known = evaluations(files)
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


def test_a_successor_takes_it_up(files: MemoryFiles) -> None:
    known = evaluations(files)
    found = begun(known)
    (first,) = ask(found, "x", [])
    (second,) = ask(found, "x", [done(first, 4.0, 4.0)])
    successor = evaluations(files)
    successor.recover(known.encode())
    assert successor.find("e").dispatch is None
    taken = begun(successor)
    assert taken.metrics == {"loss": 1.0}
    (third,) = ask(taken, "x", [done(second, 8.0, 4.0)])
    ask(taken, "x", [done(third, 12.0, 4.0)], want=0)
    successor.settle(taken)
    last = evaluations(files)
    last.recover(successor.encode())
    assert last.find("e").is_done
    assert last.find("e").metrics == {"loss": 2.0}


def test_a_name_is_one_evaluation(files: MemoryFiles) -> None:
    known = evaluations(files)
    assert known.declared(request()) is None
    begun(known)
    assert known.declared(request()) is not None
    with pytest.raises(DeclarationError, match="dataset of the evaluation 'e'"):
        known.declared(request(batch_size=3))
    with pytest.raises(NotFoundError, match="no evaluation 'other'"):
        known.find("other")


def test_what_a_dead_trainer_held_goes_to_another(files: MemoryFiles) -> None:
    known = evaluations(files)
    found = begun(known)
    held = ask(found, "x", [], want=2)
    known.trainer_gone("x", 0.0)
    again = ask(found, "y", [], want=2)
    assert {a.position for a in again} == {a.position for a in held}


def test_a_checkpoint_has_the_results_of_those_that_are_through(files: MemoryFiles) -> None:
    known = evaluations(files)
    through, under_way = begun(known, "through"), begun(known, "under way")
    assert known.encode_results() is None
    pieces = ask(through, "x", [])
    while pieces:
        pieces = ask(through, "x", [done(piece, 4.0, 4.0) for piece in pieces])
    known.settle(through)
    ask(under_way, "x", [])
    stored = known.encode_results()
    assert stored is not None
    restored = evaluations(files)
    restored.recover(stored)
    assert restored.find("through").metrics == {"loss": 1.0}
    assert restored.find("through").is_done
    with pytest.raises(NotFoundError):
        restored.find("under way")
