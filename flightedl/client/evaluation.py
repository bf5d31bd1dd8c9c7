"""This trainer's part of an evaluation: fetch pieces, let the user's function measure their batches, report sums.

One thread reads and measures; the feed fetches the next piece meanwhile. The master adds the sums up.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import SupportsFloat

import pyarrow as pa

from flightedl.client.arguments import metrics_of
from flightedl.client.feed import Piece, TaskFeed
from flightedl.client.waiting import Waiting
from flightedl.messages.tasks import TasksReply

#: Metrics of a batch; the mean is weighted by the batch's records.
Measure = Callable[[pa.RecordBatch], Mapping[str, SupportsFloat]]

_SLICE_S = 0.5


def run(
    feed: TaskFeed,
    read: Callable[[Piece], Iterator[pa.RecordBatch]],
    measure: Measure,
    waiting: Waiting,
) -> None:
    """Work until every piece is done, by whichever trainer.

    Raises:
        Exception: what ``measure`` raised; the piece is reported as failed at that batch.
    """
    while True:
        piece = feed.next(_SLICE_S)
        if piece is not None:
            waiting.over()
            _do(feed, piece, read, measure)
        elif feed.is_done:
            waiting.over()
            return
        elif trouble := feed.trouble:
            waiting.because(trouble)
        else:
            waiting.patiently("the other trainers to finish their part of the evaluation")


def _do(feed: TaskFeed, piece: Piece, read: Callable[[Piece], Iterator[pa.RecordBatch]], measure: Measure) -> None:
    sums: dict[str, tuple[float, float]] = {}
    number = piece.assignment.first_batch
    try:
        for batch in read(piece):
            if not feed.is_held(piece):
                return
            weight = batch.num_rows
            for name, value in metrics_of(measure(batch), "the result of measure").items() if weight else ():
                total, weights = sums.get(name, (0.0, 0.0))
                sums[name] = (total + value * weight, weights + weight)
            number += 1
    except Exception as error:
        feed.failed(piece, f"{type(error).__name__}: {error}", number)
        raise
    feed.finished(piece, (), sums)


def result(name: str, reply: TasksReply) -> dict[str, float]:
    """The merged metrics; says so when they lack something."""
    if reply.failed:
        text = f"{reply.failed} tasks of the evaluation {name!r} failed and are not in its result"
        sys.stderr.write(f"flightedl: {text}\n")
    return dict(reply.metrics)
