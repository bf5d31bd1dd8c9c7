"""``flightedl bench growth``: bytes a second by the size of the model and the number of trainers, and its picture."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from .dense import Workload, default_steps, flightedl_side

SIZES_MB = (4, 64, 256, 1024)
TRAINERS = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class Cell:
    """One workload: bytes pushed and pulled a second by all trainers together."""

    mb: int
    trainers: int
    bytes_per_s: float
    cpu_s_per_gb: float


def measured(mb: int, trainers: int, turns: int, directory: Path) -> Cell:
    """A job of one pserver, SGD, async."""
    workload = Workload(mb=mb, trainers=trainers)
    steps = default_steps(workload)
    with flightedl_side(workload, directory) as side:
        side.run(max(2, steps // 2))
        side.forget()
        for _ in range(turns):
            side.run(steps)
        found = side.measured()
    return Cell(mb, trainers, found.bytes_per_s, found.cpu_s_per_gb)


def picture(cells: Sequence[Cell]) -> str:
    """An SVG: one line for each number of trainers, model size to the right, GB/s up."""
    width, height, left, bottom, top, right = 640, 360, 60, 50, 20, 120
    best = max(cell.bytes_per_s for cell in cells) / 1e9
    step = next(size for size in (0.1, 0.2, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0) if best / size <= 6)
    ceiling = math.ceil(best / step) * step
    sizes = sorted({cell.mb for cell in cells})
    colours = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")

    def x(mb: float) -> float:
        low, high = math.log2(sizes[0]), math.log2(max(sizes[-1], 2 * sizes[0]))
        return left + (math.log2(mb) - low) / (high - low) * (width - left - right)

    def y(gb_per_s: float) -> float:
        return height - bottom - gb_per_s / ceiling * (height - bottom - top)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">',
        "<style>text {font-size: 12px}</style>",
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for number in range(round(ceiling / step) + 1):
        at = y(number * step)
        parts.append(f'<line x1="{left}" x2="{width - right}" y1="{at:.1f}" y2="{at:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 8}" y="{at + 4:.1f}" text-anchor="end">{number * step:g}</text>')
    parts.extend(f'<text x="{x(mb):.1f}" y="{height - bottom + 18}" text-anchor="middle">{mb:g}</text>' for mb in sizes)
    middle = (left + width - right) / 2
    parts.append(f'<text x="{middle}" y="{height - 10}" text-anchor="middle">MB of float32 parameters</text>')
    parts.append(
        f'<text transform="translate(16 {height / 2}) rotate(-90)" text-anchor="middle">GB/s pushed and pulled</text>'
    )
    for place, trainers in enumerate(sorted({cell.trainers for cell in cells})):
        colour = colours[place % len(colours)]
        line = sorted((cell.mb, cell.bytes_per_s / 1e9) for cell in cells if cell.trainers == trainers)
        points = " ".join(f"{x(mb):.1f},{y(speed):.1f}" for mb, speed in line)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.extend(f'<circle cx="{x(mb):.1f}" cy="{y(speed):.1f}" r="3" fill="{colour}"/>' for mb, speed in line)
        at = top + 16 + 18 * place
        name = f"{trainers} trainer{'s' if trainers > 1 else ''}"
        parts.append(f'<circle cx="{width - right + 16}" cy="{at - 4}" r="4" fill="{colour}"/>')
        parts.append(f'<text x="{width - right + 26}" y="{at}">{name}</text>')
    return "\n".join([*parts, "</svg>", ""])


_POSITIVE = click.IntRange(min=1)


@click.command()
@click.option(
    "--sizes",
    "sizes_mb",
    type=click.IntRange(min=1),
    multiple=True,
    default=SIZES_MB,
    show_default=True,
    help="MiB; repeat.",
)
@click.option(
    "--trainers",
    "counts",
    type=click.IntRange(min=1),
    multiple=True,
    default=TRAINERS,
    show_default=True,
    help="Repeat.",
)
@click.option("--turns", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Write an SVG there.")
@click.option("--json", "wants_json", is_flag=True, help="Print JSON.")
def growth(*, sizes_mb: Sequence[int], counts: Sequence[int], turns: int, plot: Path | None, wants_json: bool) -> None:
    """Bytes a second by the model's size and the number of trainers.

    One pserver, SGD, async; all processes share this machine, so that more trainers than cores compete for them.
    """
    cells = []
    with (
        tempfile.TemporaryDirectory(prefix="flightedl-bench-") as directory,
        Progress(console=Console(stderr=True), transient=True) as progress,
    ):
        task = progress.add_task("measuring", total=len(sizes_mb) * len(counts))
        for mb in sizes_mb:
            for count in counts:
                progress.update(task, description=f"{mb} MB, {count} trainers")
                cells.append(measured(mb, count, turns, Path(directory)))
                progress.advance(task)
    if plot is not None:
        plot.write_text(picture(cells))
    if wants_json:
        click.echo(json.dumps([asdict(cell) for cell in cells], indent=2))
        return
    table = Table(title="GB/s pushed and pulled by all trainers together (processor seconds for a GB)")
    table.add_column("model")
    for count in counts:
        table.add_column(f"{count} trainer{'s' if count > 1 else ''}", justify="right")
    found = {(cell.mb, cell.trainers): cell for cell in cells}
    for mb in sizes_mb:
        row = [found[mb, count] for count in counts]
        table.add_row(f"{mb} MB", *[f"{cell.bytes_per_s / 1e9:.2f} ({cell.cpu_s_per_gb:.2f})" for cell in row])
    Console(highlight=False, width=100).print(table)
