"""``flightedl bench memory``: the most resident memory that a pserver ever had, with many trainers pushing."""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from flightedl.rpc.same_host import TRAINERS_MEMORY

from ..options import Number
from .dense import Workload, flightedl_side
from .processes import peak_bytes

#: What a pserver may need beside its arrays.
_SPARE_BYTES = 256 << 20
#: Arrays of the model's size that Adam needs, by mode; synchronous rounds add one that gathers.
_ARRAYS = {"async": 3, "sync": 4}


@dataclass(frozen=True, slots=True)
class Memory:
    """One line of the table."""

    mode: str
    model_bytes: int
    #: Largest resident memory of the one pserver since its start, without what trainers share of their own.
    peak_bytes: int
    #: That, which it maps: it is the trainers', and a container that limits memory counts it there.
    trainers_bytes: int
    #: Values, slots and sums, and 256 MiB.
    bar_bytes: int


def peak_of(workload: Workload, steps: int, directory: Path) -> Memory:
    """Let all trainers step, then ask the kernel."""
    with flightedl_side(workload, directory) as side:
        side.run(steps)
        (pid,) = side.server_pids
        theirs = _mapped_bytes(pid, TRAINERS_MEMORY)
        peak = peak_bytes(pid) - theirs
    size = workload.size_bytes
    return Memory(workload.mode, size, peak, theirs, _ARRAYS[workload.mode] * size + _SPARE_BYTES)


def _mapped_bytes(pid: int, name: str) -> int:
    """Resident memory that a process maps under this name."""
    found_kib, is_it = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        first, *rest = line.split()
        if not first.endswith(":"):
            is_it = name in line
        elif is_it and first == "Rss:":
            found_kib += int(rest[0])
    return found_kib << 10


@click.command()
@click.option("--mb", type=Number(min=1), default=1024.0, show_default=True, help="MiB of the model.")
@click.option("--trainers", type=click.IntRange(min=1), default=8, show_default=True)
@click.option("--steps", type=click.IntRange(min=1), default=6, show_default=True, help="Of each trainer.")
@click.option(
    "--path",
    type=click.Choice(["shared", "tcp"]),
    default="shared",
    show_default=True,
    help="What values travel by.",
)
@click.option("--json", "wants_json", is_flag=True, help="Print JSON.")
def memory(*, mb: float, trainers: int, steps: int, path: str, wants_json: bool) -> None:
    """Peak memory of one pserver with Adam, async and sync.

    The bar is the arrays that the mode needs and 256 MiB. What trainers share of their own memory, with which the
    pserver has nothing to do but to read it, stands beside. A model of 1 GB and 8 trainers take about 14 GB altogether.
    """
    found = []
    with tempfile.TemporaryDirectory(prefix="flightedl-bench-") as directory:
        for mode in _ARRAYS:
            workload = Workload(mb=mb, trainers=trainers, optimizer="adam", mode=mode, path=path)
            if not wants_json:
                click.echo(f"measuring {workload} ...", err=True)
            found.append(peak_of(workload, steps, Path(directory)))
    if wants_json:
        click.echo(json.dumps([asdict(one) for one in found], indent=2))
        return
    table = Table(title=f"peak memory of one pserver, Adam, {trainers} trainers, {path}")
    for name in ("mode", "model MB", "peak MB", "bar MB", "peak / model", "trainers' MB"):
        table.add_column(name, justify="left" if name == "mode" else "right")
    for one in found:
        sizes = [f"{size / 1e6:.0f}" for size in (one.model_bytes, one.peak_bytes, one.bar_bytes)]
        table.add_row(one.mode, *sizes, f"{one.peak_bytes / one.model_bytes:.2f}", f"{one.trainers_bytes / 1e6:.0f}")
    Console(highlight=False).print(table)
