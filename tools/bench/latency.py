"""``flightedl bench latency``: what people wait for with small models and short jobs, and how long it may take.

Every figure stands beside one of something else that was taken in the same run, by turns: gloo's all-reduce, TCP
sockets, bare Flight, the same loop in plain NumPy, the import of the libraries that nobody can do without.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from flightedl.config import child_environment
from flightedl.process.importing import require

from . import starts
from .dense import STANDARD, Workload, compare, default_steps, flightedl_side
from .orders import worker
from .peers import PEER_ENVIRONMENT, PEERS, peer_side
from .sides import Side

#: Of the digits' softmax: 64 x 10 weights and 10 biases.
_SMALL = 650
_SMALL_MB = 4 * _SMALL / (1 << 20)
_STEPS = 200
_DIGITS_EPOCHS = 20


@dataclass(frozen=True, slots=True)
class Bar:
    """A figure, what it is compared with, and what it has to be."""

    what: str
    ours: str
    other: str
    value: float
    limit: float
    #: Whether it has to be the limit or above it; else or below.
    is_at_least: bool = False

    @property
    def is_met(self) -> bool:
        """Whether it is as it has to be."""
        return self.value >= self.limit if self.is_at_least else self.value <= self.limit

    @property
    def wanted(self) -> str:
        """What it has to be, for people."""
        return f"{'≥' if self.is_at_least else '≤'} {self.limit:g}"


@contextlib.contextmanager
def allreduce_side(element_count: int, trainers: int) -> Iterator[Side]:
    """All-reduce of gloo between so many processes."""
    module, environment = "flightedl_tools.bench.peer_allreduce", child_environment(**PEER_ENVIRONMENT)
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(worker(module, [element_count, 0, trainers, 0], environment))
        port = first.line()
        others = [
            stack.enter_context(worker(module, [element_count, rank, trainers, port], environment))
            for rank in range(1, trainers)
        ]
        members = [first, *others]
        for member in members:
            member.answer()
        yield Side(members, [], 4 * element_count)


def by_turns(ours: Side, other: Side, turns: int) -> tuple[float, float, float]:
    """Medians of the seconds of a step of both, and of the other's over ours of neighbouring turns."""
    sides = (ours, other)
    for side in sides:
        side.run(_STEPS)
    found: list[tuple[float, float]] = []
    for turn in range(turns):
        if turn % 2 == 0:
            found.append((ours.run(_STEPS), other.run(_STEPS)))
        else:
            last = other.run(_STEPS)
            found.append((ours.run(_STEPS), last))
    ours_s, other_s = (statistics.median(column) for column in zip(*found, strict=True))
    return ours_s, other_s, statistics.median(other / own for own, other in found)


def sync_steps(directory: Path, turns: int) -> list[Bar]:
    """A synchronous round of two trainers."""
    workload = Workload(mb=_SMALL_MB, trainers=2, mode="sync")
    with flightedl_side(workload, directory) as ours, allreduce_side(_SMALL, 2) as gloo:
        ours_s, other_s, ratio = by_turns(ours, gloo, turns)
    told = f"{1 / ours_s:,.0f} steps/s", f"gloo all-reduce {1 / other_s:,.0f} steps/s"
    return [Bar(f"{_SMALL} parameters, sync, 2 trainers: x of the other's steps/s", *told, ratio, 0.9, True)]


def async_steps(directory: Path, turns: int) -> list[Bar]:
    """A step of one trainer."""
    workload = Workload(mb=_SMALL_MB)
    with flightedl_side(workload, directory) as ours, peer_side(PEERS[0], _SMALL) as sockets:
        ours_s, other_s, _ = by_turns(ours, sockets, turns)
    told = f"{1e3 * ours_s:.2f} ms", f"{PEERS[0].name} {1e3 * other_s:.2f} ms"
    return [Bar(f"{_SMALL} parameters, async, 1 trainer: ms a step", *told, 1e3 * ours_s, 0.5)]


def many_parameters(directory: Path, turns: int) -> list[Bar]:
    """A thousand little parameters."""
    workload = STANDARD["tiny"]
    found = compare(workload, turns=turns, steps=default_steps(workload), directory=directory)
    told = f"{1e3 * found.flightedl.step_s:.2f} ms", f"bare Flight {1e3 * found.bare.step_s:.2f} ms"
    return [Bar("1,000 parameters of 1,000, async: x of the other's speed", *told, found.ratio, 0.85, True)]


def first_batches(directory: Path, turns: int) -> list[Bar]:
    """The trivial script, and how long its trainers wait for tasks of three batches."""
    starts.first_batch(directory)
    found = [starts.first_batch(directory) for _ in range(turns)]
    libraries_s = statistics.median(starts.import_s(starts.BARE_IMPORT, directory) for _ in range(turns))
    first_s = statistics.median(one.first_s for one in found)
    waiting = statistics.median(one.waiting for one in found)
    whole_s = statistics.median(one.whole_s for one in found)
    told = f"{first_s:.2f} s", f"import of numpy, pyarrow, grpc {libraries_s:.2f} s"
    return [
        Bar("flightedl run, 2 trainers, 2 pservers: s until the first batch", *told, first_s, 2.0),
        Bar(
            "tasks of 3 batches: share of the loop between a step and the next batch",
            f"{waiting:.1%}",
            f"whole command {whole_s:.2f} s",
            waiting,
            0.05,
        ),
    ]


def digits(directory: Path, turns: int) -> list[Bar]:
    """The example as people run it, against its loop alone."""
    found = [starts.digits_s(directory, _DIGITS_EPOCHS) for _ in range(turns)]
    ours_s, other_s = (statistics.median(column) for column in zip(*found, strict=True))
    ratio = statistics.median(ours / other for ours, other in found)
    told = f"{ours_s:.2f} s", f"NumPy loop {other_s:.2f} s"
    return [Bar(f"digits, {_DIGITS_EPOCHS} epochs, whole command: x of the other's time", *told, ratio, 2.5)]


def imports(directory: Path, turns: int) -> list[Bar]:
    """A trainer that reads Parquet."""
    starts.import_s(starts.TRAINER_IMPORT, directory)
    pairs = [
        (starts.import_s(starts.TRAINER_IMPORT, directory), starts.import_s(starts.BARE_IMPORT, directory))
        for _ in range(turns)
    ]
    ours_s, other_s = (statistics.median(column) for column in zip(*pairs, strict=True))
    told = f"{ours_s:.2f} s", f"import of numpy, pyarrow, grpc {other_s:.2f} s"
    return [Bar("import of a trainer: s of the processor", *told, ours_s, 0.54)]


MEASURES: dict[str, Callable[[Path, int], list[Bar]]] = {
    "sync": sync_steps,
    "async": async_steps,
    "many": many_parameters,
    "start": first_batches,
    "digits": digits,
    "import": imports,
}
#: Measure -> the module that it needs, and the extra that brings it.
_NEEDED = {
    "sync": ("torch", "torch"),
    "async": ("torch", "torch"),
    "digits": ("sklearn", "examples"),
}


def as_table(bars: Sequence[Bar]) -> Table:
    """For people."""
    table = Table(title="what people wait for, medians of alternated runs")
    for number, column in enumerate(("what", "flightedl", "beside it", "", "wanted", "")):
        table.add_column(column, justify="right" if number in {1, 3, 4} else "left")
    for bar in bars:
        table.add_row(bar.what, bar.ours, bar.other, f"{bar.value:.2f}", bar.wanted, "yes" if bar.is_met else "no")
    return table


@click.command()
@click.argument("measures", nargs=-1, type=click.Choice(list(MEASURES)))
@click.option("--turns", type=click.IntRange(min=1), default=5, show_default=True, help="Turns of each side.")
@click.option("--json", "wants_json", is_flag=True, help="Print JSON.")
def latency(*, measures: Sequence[str], turns: int, wants_json: bool) -> None:
    """Small models, short tasks, short jobs: what people wait for.

    Runs the MEASURES, all of them if none is named. "sync" and "async" need PyTorch beside them, "digits" scikit-learn.
    """
    found: list[Bar] = []
    for name in _NEEDED.keys() & (measures or MEASURES):
        require(_NEEDED[name][0], f"the measure {name}", _NEEDED[name][1])
    with tempfile.TemporaryDirectory(prefix="flightedl-bench-") as directory:
        for name in measures or MEASURES:
            if not wants_json:
                click.echo(f"measuring {name} ...", err=True)
            found += MEASURES[name](Path(directory), turns)
    if wants_json:
        click.echo(json.dumps([asdict(bar) | {"is_met": bar.is_met} for bar in found], indent=2))
        return
    Console(highlight=False, width=180).print(as_table(found))
