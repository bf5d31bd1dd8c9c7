"""Rates and means of the last seconds."""

from __future__ import annotations

import pytest

from flightedl.master.progress import JobProgress
from flightedl.messages.tasks import FailedTask, LogRequest


def test_trainers_own_models_are_counted_if_none_is_shared() -> None:
    progress = JobProgress()

    def say(trainer: str, model: str) -> int:
        progress.add(LogRequest(trainer=trainer, generation=1, model=model), 0.0)
        return progress.own_models

    assert [say("a", ""), say("a", "own"), say("a", "own")] == [0, 1, 1]
    progress.gone("a")
    assert say("a-again", "own") == 1, "it replaced the first one"
    assert say("b", "own") == 2
    progress.gone("b")
    assert progress.own_models == 2
    assert say("a-again", "common") == 0, "like a report that one trainer writes at the end"
    assert say("c", "own") == 0


def _report(records: int, loss: float | None = None, trainer: str = "a") -> LogRequest:
    metrics = {} if loss is None else {"loss": (loss * records, float(records))}
    return LogRequest(trainer=trainer, generation=1, records=records, metrics=metrics)


def test_the_rate_is_that_of_the_last_ten_seconds() -> None:
    progress = JobProgress()
    for second in range(30):
        progress.add(_report(100), float(second))
    assert progress.records_per_s(29.0) == pytest.approx(110, rel=0.01)
    assert progress.records_per_s(60.0) < 11


def test_metrics_are_means_over_records() -> None:
    progress = JobProgress()
    progress.add(_report(30, loss=1.0), 0.0)
    progress.add(_report(10, loss=3.0, trainer="b"), 1.0)
    assert progress.metrics(1.0) == {"loss": pytest.approx(1.5)}


def test_a_trainer_that_left_is_forgotten() -> None:
    progress = JobProgress()
    progress.add(_report(5), 0.0)
    progress.gone("a")
    assert progress.trainers == {}
    assert progress.records_per_s(0.0) == 5.0


def test_each_finished_batch_is_reported_once() -> None:
    progress = JobProgress()
    for trainer in ("a", "b", "c"):
        progress.add(LogRequest(trainer=trainer, generation=1), 10.0)
    progress.take_progressed()
    progress.add(LogRequest(trainer="a", generation=1, batches=1, batch_s=0.5), 15.0)
    progress.add(LogRequest(trainer="b", generation=1, batch_s=4.5), 15.0)
    progress.add(LogRequest(trainer="c", generation=1, batch_s=5.5), 15.0)
    progress.gone("a")
    assert progress.take_progressed() == ("b",), "b has finished a batch of an evaluation, which no counter shows"
    assert progress.take_progressed() == ()


def test_skipped_records_are_summed() -> None:
    progress = JobProgress()
    for trainer in ("a", "b"):
        progress.add(LogRequest(trainer=trainer, generation=1, skipped_records=7), 0.0)
    assert progress.skipped_records == 14


def _failed(batch: int, attempt: int, place: str = "KeyError at train.py:7") -> FailedTask:
    return FailedTask(epoch=0, position=3, attempt=attempt, error=f"KeyError: {batch}", batch=batch, place=place)


def test_errors_of_the_script_are_counted_by_place_and_batch() -> None:
    progress = JobProgress()
    progress.failed([_failed(1, 1), _failed(2, 2)], 0.0)
    # A repeated report, whose answer was lost, is not a second failure.
    progress.failed([_failed(2, 2), _failed(2, 3), _failed(9, 4, "ValueError at train.py:8")], 1.0)
    progress.failed([FailedTask(epoch=0, position=0, attempt=5, error="unreadable")], 1.0)
    first, second = progress.raised(1.0)
    assert (first.place, first.error, first.batches, first.repeated) == ("KeyError at train.py:7", "KeyError: 2", 2, 1)
    assert (second.batches, second.repeated) == (1, 0)


def test_rare_errors_are_forgotten() -> None:
    progress = JobProgress()
    progress.failed([_failed(1, 1)], 0.0)
    progress.failed([_failed(2, 2)], 500.0)
    assert [each.batches for each in progress.raised(601.0)] == [1]
    assert progress.raised(2_000.0) == []


def test_an_error_counts_the_trainers_that_raised_it_and_not_their_processes() -> None:
    progress = JobProgress()
    for attempt, witness in enumerate(("trainer-0", "trainer-0", "trainer-1")):
        report = FailedTask(epoch=0, position=attempt, attempt=attempt, error="odd", batch=0, place="a.py:3")
        progress.failed([report], 1.0, witness)
    (found,) = progress.raised(1.0)
    assert (found.batches, found.repeated, found.trainers) == (3, 0, 2)
