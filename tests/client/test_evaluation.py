"""A trainer's share of an evaluation: weighted sums of held tasks, and errors at their batch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from flightedl.client.data import evaluation
from flightedl.errors import UsageError


class Feed:
    """A feed that has some tasks."""

    def __init__(self, *tasks: Any) -> None:
        self.tasks = list(tasks)
        self.revoked: set[int] = set()
        self.finished_sums: list[tuple[int, dict[str, tuple[float, float]]]] = []
        self.failures: list[tuple[int, str, int, str]] = []
        self.trouble = ""

    def next(self, _timeout_s: float) -> Any:
        return self.tasks.pop(0) if self.tasks else None

    @property
    def is_done(self) -> bool:
        return not self.tasks

    def is_held(self, task: Any) -> bool:
        return task.number not in self.revoked

    def finished(self, task: Any, _pservers: object, sums: dict[str, tuple[float, float]]) -> None:
        self.finished_sums.append((task.number, sums))

    def failed(self, task: Any, error: str, number: int, *, fault: str) -> None:
        self.failures.append((task.number, error, number, fault))


def task(number: int, *sizes: int, first_batch: int = 0) -> Any:
    return SimpleNamespace(number=number, sizes=sizes, assignment=SimpleNamespace(first_batch=first_batch))


def run(feed: Feed, measure: Any) -> int:
    """Return the number of batches that were measured."""
    waiting: Any = SimpleNamespace(over=lambda: None)
    advanced: list[None] = []

    def read(given: Any) -> Any:
        return (pa.record_batch({"k": pa.array(range(size), pa.int64())}) for size in given.sizes)

    evaluation.run(feed, read, measure, waiting, lambda: advanced.append(None))  # type: ignore[arg-type]
    return len(advanced)


def size_of(batch: pa.RecordBatch) -> dict[str, float]:
    return {"size": float(batch.num_rows)}


def test_metrics_of_a_task_are_summed_with_the_numbers_of_records_as_weights() -> None:
    feed = Feed(task(1, 2, 0, 3), task(2, 1))
    assert run(feed, size_of) == 4
    assert feed.finished_sums == [(1, {"size": (13.0, 5)}), (2, {"size": (1.0, 1)})]


def test_a_revoked_task_is_neither_measured_further_nor_reported() -> None:
    feed = Feed(task(1, 2, 2, 2), task(2, 1))

    def measure(batch: pa.RecordBatch) -> dict[str, float]:
        if len(feed.tasks) == 1:
            feed.revoked.add(1)
        return size_of(batch)

    assert run(feed, measure) == 2
    assert [number for number, _ in feed.finished_sums] == [2], "another trainer measures the revoked task as well"


@pytest.mark.parametrize("problem", [ValueError("odd"), {"size": "large"}, {"size": float("nan")}])
def test_a_task_fails_at_the_batch_that_cannot_be_measured(problem: Any) -> None:
    feed = Feed(task(1, 1, 2, 3, first_batch=4), task(2, 1))

    def measure(batch: pa.RecordBatch) -> Any:
        if batch.num_rows < 2:
            return size_of(batch)
        if isinstance(problem, Exception):
            raise problem
        return problem

    with pytest.raises((ValueError, UsageError)):
        run(feed, measure)
    ((number, _, batch, fault),) = feed.failures
    assert (number, batch, fault) == (1, 5, "code")
    assert not feed.finished_sums
