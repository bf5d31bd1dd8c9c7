"""Plots of curves: SVG files drawn by ``vector``, or PNG files drawn by matplotlib, an optional dependency.

Used at the end of a run, by ``flightedl plot``, and by examples that draw their own curves. Importing matplotlib takes
a second.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flightedl.curves.merging import Curve
from flightedl.curves.vector import svg
from flightedl.errors import UsageError
from flightedl.process.importing import require

_WIDTH_INCHES = 5.0
_HEIGHT_INCHES = 3.4
_DOTS_PER_INCH = 120


def can_draw() -> bool:
    """True if matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(path: Path, panels: Mapping[str, Mapping[str, Curve]], *, x_label: str) -> Path:
    """Draw curves, with one panel per name. Return ``path``.

    Args:
        path: Path of the file, which is replaced atomically: SVG if it ends in .svg, otherwise PNG.
        panels: Name of a value -> label of a curve -> its (x, y). Values that are not finite are omitted.
        x_label: Label of the x axis.

    Raises:
        UsageError: matplotlib is missing for PNG, there is nothing to draw, or the file cannot be written.
    """
    if not panels:
        raise UsageError("there are no curves to draw")
    part = path.with_name(f".{path.name}")
    try:
        if path.suffix.lower() == ".svg":
            part.write_text(svg(panels, x_label=x_label), "utf-8")
        else:
            _draw_png(part, panels, x_label)
        part.replace(path)
    except OSError as error:
        raise UsageError(f"the curves cannot be written to {path}: {error.strerror}") from None
    return path


def _draw_png(path: Path, panels: Mapping[str, Mapping[str, Curve]], x_label: str) -> None:
    require("matplotlib", "a picture of curves that is not named .svg", "plot")
    from matplotlib.figure import Figure

    columns = min(len(panels), 3, math.ceil(math.sqrt(len(panels))))
    rows = math.ceil(len(panels) / columns)
    # Avoid pyplot, which would keep state in the process and look for a display.
    figure = Figure(figsize=(columns * _WIDTH_INCHES, rows * _HEIGHT_INCHES), layout="constrained")
    for place, (name, curves) in enumerate(panels.items(), start=1):
        _panel(figure.add_subplot(rows, columns, place), name, curves, x_label)
    figure.savefig(path, format="png", dpi=_DOTS_PER_INCH)


def _panel(axes: Any, name: str, curves: Mapping[str, Curve], x_label: str) -> None:
    for label, curve in curves.items():
        points = [(x, y) for x, y in curve if math.isfinite(y)]
        style = {"marker": "o", "markersize": 3} if len(points) < 30 else {}
        axes.plot([x for x, _ in points], [y for _, y in points], label=label, linewidth=1.4, **style)
    axes.set_title(name, fontsize="medium")
    axes.set_xlabel(x_label)
    axes.grid(visible=True, alpha=0.3)
    if len(curves) > 1:
        axes.legend(fontsize="small")
