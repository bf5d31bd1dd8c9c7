"""``flightedl bench torch``: a step of a PyTorch module on a job, against the same module alone and with DDP.

One process alone and one trainer on a job; two processes of DDP with gloo and two trainers on a job, which has one
pserver: all with Adam, PyTorch's fused one where it runs in the process, one thread for each process, the same network
and batch. They take turns.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import click
import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table

import flightedl as fe
from flightedl.config import TrainerSettings, child_environment, settings
from flightedl.process.importing import require

from ..options import Number
from .orders import Worker, worker
from .sides import Side

_MODULE = "flightedl_tools.bench.module_worker"
_ENVIRONMENT = {"GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore", "TORCH_CPP_LOG_LEVEL": "ERROR"}
_RECORDS = 10_000


@dataclass(frozen=True, slots=True)
class Spread:
    """Of what several turns measured: half of them lie between ``low`` and ``high``."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """Of two turns or more."""
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)

    def __str__(self) -> str:
        return f"{self.median:.3g} ({self.low:.3g} to {self.high:.3g})"


@dataclass(frozen=True, slots=True)
class ModuleSteps:
    """Milliseconds of a step of a model of so many MiB, and ours by the others': below 1 is faster.

    One trainer is compared with the module alone, two are compared with the two of DDP.
    """

    mb: float
    alone_ms: Spread
    flightedl_ms: Spread
    ddp_ms: Spread
    flightedl_2_ms: Spread
    by_alone: Spread
    by_ddp: Spread


@contextlib.contextmanager
def _ddp(mb: float) -> Iterator[Side]:
    environment = child_environment(**_ENVIRONMENT)
    with contextlib.ExitStack() as stack:
        options: dict[str, Any] = {"kind": "ddp", "mb": mb, "rank": 0}
        first = stack.enter_context(worker(_MODULE, [json.dumps(options)], environment))
        options |= {"rank": 1, "port": int(first.line())}
        second = stack.enter_context(worker(_MODULE, [json.dumps(options)], environment))
        yield _side([first, second], mb)


@contextlib.contextmanager
def _job(mb: float, trainers: int, directory: Path) -> Iterator[Side]:
    data = directory / f"{trainers}.parquet"
    pq.write_table(pa.table({"n": range(_RECORDS)}), data, row_group_size=1000)
    with fe.local() as cluster:
        chosen = settings(TrainerSettings, etcd=cluster.etcd_address, job=cluster.job)
        options = {"kind": "job", "mb": mb, "data": str(data)}
        environment = child_environment(chosen, **_ENVIRONMENT)
        with contextlib.ExitStack() as stack:
            started = [
                stack.enter_context(worker(_MODULE, [json.dumps(options)], environment)) for _ in range(trainers)
            ]
            yield _side(started, mb)


@contextlib.contextmanager
def _alone(mb: float) -> Iterator[Side]:
    with worker(_MODULE, [json.dumps({"kind": "alone", "mb": mb})], child_environment(**_ENVIRONMENT)) as process:
        yield _side([process], mb)


def _side(workers: Sequence[Worker], mb: float) -> Side:
    for each in workers:
        each.answer()
    return Side(workers, [], int(mb * (1 << 20)))


def measure(mb: float, *, turns: int, steps: int, directory: Path) -> ModuleSteps:
    """All four, taking turns."""
    with contextlib.ExitStack() as stack:
        made = (_alone(mb), _job(mb, 1, directory), _ddp(mb), _job(mb, 2, directory))
        sides = [stack.enter_context(each) for each in made]
        for side in sides:
            side.run(max(2, steps // 2))
        times: list[list[float]] = [[] for _ in sides]
        for turn in range(turns):
            order = list(zip(sides, times, strict=True))
            for side, found in order if turn % 2 == 0 else reversed(order):
                found.append(side.run(steps))
        ratios = [
            Spread.of([o / t for o, t in zip(ours, theirs, strict=True)]) for theirs, ours in (times[:2], times[2:])
        ]
        return ModuleSteps(mb, *(Spread.of([1e3 * each for each in found]) for found in times), *ratios)


@click.command()
@click.option("--mb", "sizes", type=Number(min=0.01), multiple=True, help="MiB of the model [1, 10, 100]")
@click.option("--steps", type=click.IntRange(min=0), default=0, help="Steps of a turn [0: by the size]")
@click.option("--turns", type=click.IntRange(min=2), default=7, show_default=True, help="Turns of each side.")
@click.option("--json", "wants_json", is_flag=True, help="Print JSON.")
def torch(*, sizes: Sequence[float], steps: int, turns: int, wants_json: bool) -> None:
    """A step of a PyTorch module on a job, against DDP and against none.

    Needs PyTorch.
    """
    require("torch", "this benchmark", "torch")
    found = []
    for mb in sizes or (1.0, 10.0, 100.0):
        click.echo(f"measuring a model of {mb:g} MiB ...", err=True)
        with tempfile.TemporaryDirectory(prefix="flightedl-bench-") as directory:
            count = steps or int(min(50, max(3, 200 / mb)))
            found.append(measure(mb, turns=turns, steps=count, directory=Path(directory)))
    if wants_json:
        click.echo(json.dumps([asdict(one) for one in found], indent=2))
        return
    cores = os.cpu_count()
    table = Table(
        title=f"a step of a module, fused Adam, {cores} cores: median of alternated turns, and where half of them lie"
    )
    for name in ("MiB", "alone ms", "a trainer ms", "by alone", "DDP x 2 ms", "2 trainers ms", "by DDP"):
        table.add_column(name, justify="right")
    for one in found:
        values = (one.alone_ms, one.flightedl_ms, one.by_alone, one.ddp_ms, one.flightedl_2_ms, one.by_ddp)
        table.add_row(f"{one.mb:g}", *map(str, values))
    Console(highlight=False, width=150).print(table)
