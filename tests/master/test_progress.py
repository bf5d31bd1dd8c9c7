"""Rates and means of the last seconds."""

from __future__ import annotations

import pytest

from flightedl.master.progress import JobProgress
from flightedl.wire.messages_work import LogRequest


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


def test_skipped_records_are_added_up() -> None:
    progress = JobProgress()
    for trainer in ("a", "b"):
        progress.add(LogRequest(trainer=trainer, generation=1, skipped_records=7), 0.0)
    assert progress.skipped_records == 14
