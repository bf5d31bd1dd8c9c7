"""This trainer's share of an evaluation: it fetches tasks, measures their batches, and reports sums.

One thread reads and measures batches while the feed fetches the next task. The master adds up all trainers' sums.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import SupportsFloat

import pyarrow as pa

from flightedl.client.arguments import metrics_of
from flightedl.client.data.feed import TaskFeed
from flightedl.client.waiting import Waiting
from flightedl.domain.retries import fault_of
from flightedl.domain.trainer.feed import AssignedTask
from flightedl.errors import UsageError
from flightedl.messages.tasks import TasksReply

#: Returns the metrics of a batch. Each metric is a mean over the batch's records.
Measure = Callable[[pa.RecordBatch], Mapping[str, SupportsFloat]]
_Read = Callable[[AssignedTask], Iterator[pa.RecordBatch]]

_SLICE_S = 0.5


def run(
    feed: TaskFeed,
    read: _Read,
    measure: Measure,
    waiting: Waiting,
    advanced: Callable[[], None],
) -> None:
    """Measure this trainer's tasks. Return when all trainers' tasks are done. ``advanced`` is called after each batch.

    Raises:
        Exception: ``measure`` raised it. The task is reported as failed at that batch.
    """
    while True:
        task = feed.next(_SLICE_S)
        if task is not None:
            waiting.over()
            _do(feed, task, read, measure, advanced)
        elif feed.is_done:
            waiting.over()
            return
        elif trouble := feed.trouble:
            waiting.because(trouble)
        else:
            waiting.patiently(feed.waits_for or "the other trainers to finish their part of the evaluation")


def _do(feed: TaskFeed, task: AssignedTask, read: _Read, measure: Measure, advanced: Callable[[], None]) -> None:
    sums: dict[str, tuple[float, float]] = {}
    number = task.assignment.first_batch
    try:
        for batch in read(task):
            if not feed.is_held(task):
                return
            weight = batch.num_rows
            for name, value in _measured(measure, batch).items() if weight else ():
                total, weights = sums.get(name, (0.0, 0.0))
                sums[name] = (total + value * weight, weights + weight)
            number += 1
            advanced()
    except Exception as error:
        feed.failed(task, f"{type(error).__name__}: {error}", number, fault=fault_of(error) or "code")
        raise
    feed.finished(task, (), sums)


def _measured(measure: Measure, batch: pa.RecordBatch) -> dict[str, float]:
    found = metrics_of(measure(batch), "the result of measure")
    for name, value in found.items():
        if not math.isfinite(value):
            raise UsageError(f"the metric {name!r:.80} is {value}, which has no mean: leave it out of the result")
    return found


def result(name: str, reply: TasksReply) -> dict[str, float]:
    """Return the merged metrics. Print a warning to stderr if tasks failed and are not included."""
    if reply.failed:
        text = f"{reply.failed} tasks of the evaluation {name!r} failed and are not in its result"
        sys.stderr.write(f"flightedl: {text}\n")
    return dict(reply.metrics)
