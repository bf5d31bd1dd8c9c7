"""Means of logged values over stretches of time, of one trainer. Pure; time is an argument.

A stretch lasts a tenth of a second at first, and a thousandth of the time since the beginning later on: the beginning
of a run, where values change most, is resolved well, and a week has no more than some ten thousand points. A value
counts as often as it was logged: a batch that a trainer does again, because its gradient came too late or a parameter
server was lost, is in the means twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

_SHORTEST_S = 0.1
_PART = 1e-3


class Point(NamedTuple):
    """The mean of a value over a stretch of time."""

    #: Seconds since 1970 at the end of the stretch.
    at: float
    #: Id of the trainer.
    trainer: str
    #: From 1.
    epoch: int
    #: That the trainer has worked through by then, since it began.
    batches: int
    records: int
    name: str
    value: float
    #: Sum of the weights of the values: records, as far as they were logged within a batch.
    weight: float


class Gathering:
    """What a trainer has logged. Not thread-safe.

    Args:
        trainer: Its id.
        now: The present, in seconds of a clock that never goes back.
    """

    def __init__(self, trainer: str, now: float) -> None:
        self._trainer = trainer
        self._began = self._since = now
        #: Of the stretch: (epoch from 1, name) -> sum of value times weight, sum of weights.
        self._sums: dict[tuple[int, str], tuple[float, float]] = {}
        #: When the newest value came, in seconds since 1970, and what was worked through by then.
        self._last = (0.0, 0, 0)
        self._points: list[Point] = []

    def add(
        self,
        values: Mapping[str, float],
        weight: float,
        epoch: int,
        now: float,
        wall_s: float,
        batches: int = 0,
        records: int = 0,
    ) -> None:
        """Add values that were logged now; ``epoch`` is counted from 1. See ``Point`` for the others."""
        self._end_stretch(now)
        for name, value in values.items():
            total, weights = self._sums.get((epoch, name), (0.0, 0.0))
            self._sums[epoch, name] = total + value * weight, weights + weight
        self._last = wall_s, batches, records

    def take(self, now: float, *, is_end: bool = False) -> list[Point]:
        """The stretches that are over since the last time; at the end also the one that is not."""
        self._end_stretch(now, is_end=is_end)
        points, self._points = self._points, []
        return points

    def _end_stretch(self, now: float, *, is_end: bool = False) -> None:
        if now - self._since < max(_SHORTEST_S, _PART * (now - self._began)) and not is_end:
            return
        sums, self._sums, self._since = self._sums, {}, now
        at, batches, records = self._last
        self._points += [
            Point(at, self._trainer, epoch, batches, records, name, total / weight, weight)
            for (epoch, name), (total, weight) in sums.items()
            if weight
        ]
