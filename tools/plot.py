"""``flightedl plot``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import click
import msgspec
from rich.console import Console

from flightedl.curves.drawing import draw
from flightedl.curves.files import read_points
from flightedl.curves.merging import LABELS, Axis, Curve, by_name, curves_of
from flightedl.curves.terminal import charts
from flightedl.errors import NotFoundError

from .options import json_option

_WIDEST = 100


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN...", type=click.Path(path_type=Path))
@click.option("--metric", "names", multiple=True, metavar="NAME", help="Draw only this value; may be repeated [all]")
@click.option(
    "--by", "axis", type=click.Choice(["records", "seconds"]), default="records", help="Horizontal axis [records]"
)
@click.option(
    "--output", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Write an SVG or PNG file."
)
@json_option("The points of all curves as one JSON object.")
def plot(runs: tuple[Path, ...], names: tuple[str, ...], axis: Axis, output: Path | None, as_json: bool) -> None:
    """Draw the values that scripts logged in one or more runs.

    RUN is the output directory of a finished or running `flightedl run`, or one of the metric files in it.
    """
    found = {label: _chosen(curves_of(read_points(run), axis), names, run) for label, run in labelled(runs).items()}
    if output is not None:
        draw(output, by_name(found), x_label=LABELS[axis])
        click.echo(f"flightedl: wrote {output}", err=True)
    if as_json:
        click.echo(msgspec.json.encode({"by": axis, "runs": found}))
    elif output is None:
        width = min(Console().width, _WIDEST)
        for line in charts(by_name(found), LABELS[axis], width):
            click.echo(line)


def labelled(runs: Iterable[Path]) -> dict[str, Path]:
    """Map the shortest unique suffix of each run's path to the run."""
    paths = list(dict.fromkeys(run.absolute() for run in runs))
    deepest = max(len(path.parts) for path in paths)
    for count in range(1, deepest + 1):
        found = {"/".join(path.parts[-count:]): path for path in paths}
        if len(found) == len(paths):
            return found
    return {str(path): path for path in paths}


def _chosen(curves: Mapping[str, Curve], names: tuple[str, ...], run: Path) -> dict[str, Curve]:
    if missing := [name for name in names if name not in curves]:
        raise NotFoundError(f"{run} has no values named {', '.join(missing)}; it has {', '.join(curves)}")
    return {name: curve for name, curve in curves.items() if not names or name in names}
