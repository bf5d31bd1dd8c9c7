"""Curves drawn with Braille characters, each of which has two by four dots."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import click

from flightedl.curves.merging import Curve

_HEIGHT = 8
_BLANK = 0x2800
#: The bit of each dot in a character: by column, then by row from the top.
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))


def charts(panels: Mapping[str, Mapping[str, Curve]], x_label: str, width: int) -> Iterable[str]:
    """Yield the lines of the charts, one chart for each run and name. Charts with the same name have the same scale."""
    for name, curves in panels.items():
        points = [(x, y) for curve in curves.values() for x, y in curve if math.isfinite(y)]
        if not points:
            yield f"{name}: no finite values"
            continue
        low = min(x for x, _ in points), min(y for _, y in points)
        high = max(x for x, _ in points), max(y for _, y in points)
        for run, curve in curves.items():
            yield f"{click.style(name, bold=True)}  {run}: {curve[-1][1]:.6g} at the end"
            scale = [f"{high[1]:.4g}", *[""] * (_HEIGHT - 2), f"{low[1]:.4g}"]
            margin = max(map(len, scale))
            for mark, line in zip(scale, chart(curve, low, high, width - margin - 2, _HEIGHT), strict=True):
                yield f"{mark:>{margin}} {line}".rstrip()
            right = f"{high[0]:,.0f} {x_label}"
            yield " " * (margin + 1) + f"{low[0]:,.0f}" + right.rjust(width - margin - 2 - len(f"{low[0]:,.0f}"))


def chart(curve: Curve, low: tuple[float, float], high: tuple[float, float], width: int, height: int) -> Sequence[str]:
    """Return the lines of a chart.

    Args:
        curve: Its (x, y); adjacent points are connected. Values that are not finite are omitted.
        low: Lowest x and y of the chart.
        high: Highest x and y of the chart.
        width: Characters per line.
        height: Number of lines.
    """
    cells = [[0] * width for _ in range(height)]
    before: tuple[int, int] | None = None
    for x, y in curve:
        if not math.isfinite(y):
            before = None
            continue
        here = _place(x, low[0], high[0], width * 2), _place(y, low[1], high[1], height * 4)
        for column, row in _between(here if before is None else before, here):
            cells[height - 1 - row // 4][column // 2] |= _DOTS[column % 2][3 - row % 4]
        before = here
    return ["".join(chr(_BLANK + cell) for cell in line) for line in cells]


def _place(value: float, low: float, high: float, count: int) -> int:
    return 0 if high <= low else min(count - 1, max(0, round((value - low) / (high - low) * (count - 1))))


def _between(first: tuple[int, int], last: tuple[int, int]) -> Sequence[tuple[int, int]]:
    steps = max(abs(last[0] - first[0]), abs(last[1] - first[1]), 1)
    return [
        (
            first[0] + round((last[0] - first[0]) * step / steps),
            first[1] + round((last[1] - first[1]) * step / steps),
        )
        for step in range(steps + 1)
    ]
