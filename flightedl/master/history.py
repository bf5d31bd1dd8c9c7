"""Curves of a job's metrics since this master took over, with a bounded number of points."""

from __future__ import annotations

from collections.abc import Mapping

from flightedl.messages.status import StatusReply

#: Maximum number of points. When there are more, every second point is dropped, and the interval between new points is
#: doubled.
_POINTS = 240
_SPACING_S = 2.0
#: Maximum number of the script's metrics to sample.
_METRICS_LIMIT = 24


class History:
    """Metrics sampled over time. Not thread-safe."""

    def __init__(self) -> None:
        self._spacing_s = _SPACING_S
        self._points: list[tuple[float, dict[str, float]]] = []
        self._next_at: float | None = None

    def is_due(self, now: float) -> bool:
        return self._next_at is None or now >= self._next_at

    def add(self, status: StatusReply, now: float, wall_s: float) -> None:
        figures = {"progress": progress_of(status), "records per second": status.records_per_s}
        figures.update(sorted(status.metrics.items())[:_METRICS_LIMIT])
        self._points.append((wall_s, figures))
        if len(self._points) > _POINTS:
            self._points = self._points[::2]
            self._spacing_s *= 2
        self._next_at = now + self._spacing_s

    def curves(self) -> Mapping[str, list[tuple[float, float]]]:
        found: dict[str, list[tuple[float, float]]] = {}
        for at, figures in self._points:
            for name, value in figures.items():
                found.setdefault(name, []).append((at, value))
        return found


def progress_of(status: StatusReply) -> float:
    """Return the completed fraction of all epochs (0 to 1), or of the current epoch if training is endless."""
    tasks = status.tasks
    if status.state == "done":
        return 1.0
    in_epoch = (tasks.done + tasks.failed) / tasks.total if tasks.total else 0.0
    return in_epoch if not status.epochs else min((status.epoch + in_epoch) / status.epochs, 1.0)
