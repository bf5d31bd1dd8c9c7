"""Combines the points of several trainers into one curve. Pure.

Trainers log concurrently, and each trainer computes its own means. Points are sorted by time, and adjacent points are
combined into weighted averages until the curve has few enough points to be drawn.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from flightedl.curves.gathering import Point

#: "records": number of records that all trainers have processed; "seconds": time since the first point.
Axis = Literal["records", "seconds"]
#: Labels of the horizontal axis.
LABELS: Mapping[Axis, str] = {"records": "records of all trainers", "seconds": "seconds"}
Curve = Sequence[tuple[float, float]]


def curves_of(points: Iterable[Point], axis: Axis = "records", limit: int = 200) -> dict[str, Curve]:
    """Return name -> (x, y), ordered by time, with at most ``limit`` points per curve.

    Args:
        points: Points of all trainers, in any order.
        axis: Meaning of x.
        limit: Maximum number of points per curve.
    """
    known: dict[str, int] = {}
    first_at: float | None = None
    found: dict[str, list[tuple[float, float, float]]] = {}
    for point in sorted(points):
        first_at = point.at if first_at is None else first_at
        known[point.trainer] = max(point.records, known.get(point.trainer, 0))
        x = float(sum(known.values())) if axis == "records" else point.at - first_at
        found.setdefault(point.name, []).append((x, point.value, point.weight))
    return {name: _thinned(of_name, limit) for name, of_name in sorted(found.items())}


def _thinned(points: Sequence[tuple[float, float, float]], limit: int) -> Curve:
    size = -(-len(points) // limit)
    groups = (points[start : start + size] for start in range(0, len(points), size))
    return [(group[-1][0], _mean(group)) for group in groups]


def _mean(points: Sequence[tuple[float, float, float]]) -> float:
    return sum(value * weight for _, value, weight in points) / sum(weight for _, _, weight in points)


def by_name(runs: Mapping[str, Mapping[str, Curve]]) -> dict[str, dict[str, Curve]]:
    """Convert run -> name -> curve to name -> run -> curve, sorted by name."""
    found: dict[str, dict[str, Curve]] = {}
    for run, curves in runs.items():
        for name, curve in curves.items():
            found.setdefault(name, {})[run] = curve
    return dict(sorted(found.items()))
