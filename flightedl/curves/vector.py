"""Curves as an SVG file, which every browser can show. Pure, and fast, because no plotting library is imported.

Each panel has its own scales, with round numbers at the grid lines. A curve has gaps where values are not finite. If a
curve has few points, each point is marked.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape

from flightedl.curves.merging import Curve

_WIDTH, _HEIGHT = 600, 400
#: Margins of a panel.
_LEFT, _RIGHT, _ABOVE, _BELOW = 72, 20, 34, 48
_TICKS = 6
#: If a curve has fewer points than this, each point is marked.
_FEW = 30
#: Colors that people with a color vision deficiency can distinguish too (Okabe and Ito).
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")


def svg(panels: Mapping[str, Mapping[str, Curve]], *, x_label: str) -> str:
    """Return the text of the file, with one panel per name. The arguments are the same as for ``drawing.draw``."""
    columns = min(len(panels), 3, math.ceil(math.sqrt(len(panels))))
    rows = math.ceil(len(panels) / columns)
    width, height = columns * _WIDTH, rows * _HEIGHT
    size = f'width="{width}" height="{height}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {width} {height}" font-family="sans-serif">',
        f'<rect {size} fill="white"/>',
    ]
    for place, (name, curves) in enumerate(panels.items()):
        row, column = divmod(place, columns)
        lines.append(f'<g transform="translate({column * _WIDTH} {row * _HEIGHT})">')
        lines += _panel(name, curves, x_label)
        lines.append("</g>")
    return "\n".join([*lines, "</svg>", ""])


def _panel(name: str, curves: Mapping[str, Curve], x_label: str) -> Iterator[str]:
    points = [point for curve in curves.values() for point in curve if math.isfinite(point[1])]
    x, y = (_Scale([point[axis] for point in points], *ends) for axis, ends in enumerate((_ACROSS, _UPWARDS)))
    left, right, bottom, top = *_ACROSS, *_UPWARDS
    yield _text((left + right) / 2, top - 12, name, "middle", size=15)
    for value in x.ticks:
        yield _line(x.at(value), bottom, x.at(value), top)
        yield _text(x.at(value), bottom + 18, _number(value), "middle")
    for value in y.ticks:
        yield _line(left, y.at(value), right, y.at(value))
        yield _text(left - 7, y.at(value) + 4, _number(value), "end")
    yield f'<rect x="{left}" y="{top}" width="{right - left}" height="{bottom - top}" fill="none" stroke="#555"/>'
    yield _text((left + right) / 2, bottom + 38, x_label, "middle")
    for number, (label, curve) in enumerate(curves.items()):
        color = _COLORS[number % len(_COLORS)]
        for stretch in _stretches(curve):
            places = [f"{x.at(each[0]):.1f},{y.at(each[1]):.1f}" for each in stretch]
            yield f'<polyline points="{" ".join(places)}" fill="none" stroke="{color}" stroke-width="1.6"/>'
            if len(curve) < _FEW or len(stretch) == 1:
                for place in places:
                    across, down = place.split(",")
                    yield f'<circle cx="{across}" cy="{down}" r="2.2" fill="{color}"/>'
        if len(curves) > 1:
            yield _text(right - 10, top + 20 + 18 * number, label, "end", color=color)


class _Scale:
    """A linear mapping from the values on an axis to the positions between its ends."""

    def __init__(self, values: Sequence[float], begin: float, end: float) -> None:
        low, high = min(values, default=0.0), max(values, default=1.0)
        margin = 0.04 * (high - low) or 0.5 * abs(low) or 0.5
        self._low, self._high = low - margin, high + margin
        self._begin, self._end = begin, end

    def at(self, value: float) -> float:
        return self._begin + (self._end - self._begin) * ((value - self._low) / (self._high - self._low))

    @property
    def ticks(self) -> Sequence[float]:
        """Return round numbers on the axis, at most ``_TICKS`` + 1 of them."""
        rough = (self._high - self._low) / _TICKS
        if not math.isfinite(rough):
            return ()
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
        first, last = math.ceil(self._low / step), math.floor(self._high / step)
        return [number * step for number in range(first, last + 1)]


_ACROSS = _LEFT, _WIDTH - _RIGHT
_UPWARDS = _HEIGHT - _BELOW, _ABOVE


def _stretches(curve: Curve) -> Iterator[Sequence[tuple[float, float]]]:
    """Yield the longest sequences of adjacent points with finite values."""
    stretch: list[tuple[float, float]] = []
    for x, y in curve:
        if math.isfinite(y):
            stretch.append((x, y))
        elif stretch:
            yield stretch
            stretch = []
    if stretch:
        yield stretch


def _number(value: float) -> str:
    large = abs(value) >= 1e4 and value == round(value) and abs(value) < 1e9
    return f"{value:,.0f}" if large else f"{value:.6g}"


def _text(x: float, y: float, text: str, anchor: str, *, size: int = 13, color: str = "#222") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{color}"'
    return f"<text {place}>{escape(text)}</text>"


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#ddd"/>'
