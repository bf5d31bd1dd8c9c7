"""Means of a trainer's logged values over intervals of time. Pure; time is an argument.

At first an interval lasts a tenth of a second, later a thousandth of the time since the start. So the resolution is
high at the start of a run, where values change most, and even a run of a week has only about ten thousand points. A
value counts as often as it was logged: if a trainer repeats a batch, because its gradient came too late or a parameter
server was lost, the batch's values count twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

_SHORTEST_S = 0.1
_PART = 1e-3


class Point(NamedTuple):
    """Mean of a value over an interval of time."""

    #: Time at the end of the interval, in seconds since 1970.
    at: float
    trainer: str
    #: Number of the epoch, counted from 1.
    epoch: int
    #: Number of batches, and number of records, that the trainer has processed since it started.
    batches: int
    records: int
    name: str
    value: float
    #: Sum of the values' weights. A weight is the number of records in the batch for which the value was logged.
    weight: float


class Gathering:
    """Collects the values that one trainer logs. Not thread-safe.

    Args:
        trainer: Id of the trainer.
        now: Current time, in seconds of a clock that never goes back.
    """

    def __init__(self, trainer: str, now: float) -> None:
        self._trainer = trainer
        self._started_at = self._since = now
        #: Sums over the current interval: (epoch from 1, name) -> sum of value times weight, sum of weights.
        self._sums: dict[tuple[int, str], tuple[float, float]] = {}
        #: Time of the latest value, in seconds since 1970, and the numbers of batches and records processed until then.
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
        """Add values logged at ``now``. ``epoch`` is counted from 1. For the other arguments see ``Point``."""
        self._end_stretch(now)
        for name, value in values.items():
            total, weights = self._sums.get((epoch, name), (0.0, 0.0))
            self._sums[epoch, name] = total + value * weight, weights + weight
        self._last = wall_s, batches, records

    def take(self, now: float, *, is_end: bool = False) -> list[Point]:
        """Return the points of the intervals completed since the last call and, at the end, of the current interval."""
        self._end_stretch(now, is_end=is_end)
        points, self._points = self._points, []
        return points

    def _end_stretch(self, now: float, *, is_end: bool = False) -> None:
        if now - self._since < max(_SHORTEST_S, _PART * (now - self._started_at)) and not is_end:
            return
        sums, self._sums, self._since = self._sums, {}, now
        at, batches, records = self._last
        self._points += [
            Point(at, self._trainer, epoch, batches, records, name, total / weight, weight)
            for (epoch, name), (total, weight) in sums.items()
            if weight
        ]
