"""``flightedl bench torch``: a step of a PyTorch module on a job, against the same module alone and with DDP.

One trainer against the module alone, with torch's fused Adam; two trainers against two processes of DDP with gloo. Each
job has one pserver, each process one thread; network and batch are the same. All take turns.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

import flightedl as fe
from flightedl.config import TrainerSettings, child_environment, settings
from flightedl.process.importing import require

from ..options import Number
from .dense import records
from .orders import worker
from .sides import Side, Spread, measuring, print_json, print_table, say, take_turns

_MODULE = "flightedl_tools.bench.module_worker"
#: Settings of processes that use gloo.
TORCH_ENVIRONMENT = {"GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore", "TORCH_CPP_LOG_LEVEL": "ERROR"}


@dataclass(frozen=True, slots=True)
class ModuleSteps:
    """Milliseconds of a step of a model of ``mb`` MiB. Ratios are of our time: below 1 we are faster.

    One trainer is compared with the module alone, two trainers with DDP of two processes.
    """

    mb: float
    alone_ms: Spread
    flightedl_ms: Spread
    ddp_ms: Spread
    flightedl_2_ms: Spread
    by_alone: Spread
    by_ddp: Spread


@contextlib.contextmanager
def _side(mb: float, count: int, environment: Mapping[str, str], **options: object) -> Iterator[Side]:
    """Run ``count`` processes; the first of several of DDP says where they meet."""
    with contextlib.ExitStack() as stack:
        workers = []
        for rank in range(count):
            given = json.dumps({"mb": mb, "rank": rank, **options})
            workers.append(stack.enter_context(worker(_MODULE, [given], environment)))
            if options["kind"] == "ddp" and not rank:
                options["port"] = int(workers[0].line())
        yield Side(workers, [], int(mb * (1 << 20)))


def measure(mb: float, *, turns: int, steps: int, directory: Path) -> ModuleSteps:
    """Let all sides take turns."""
    plain = child_environment(**TORCH_ENVIRONMENT)
    with contextlib.ExitStack() as stack:
        jobs = [stack.enter_context(fe.local(job=f"bench-{count}")) for count in (1, 2)]
        chosen = [settings(TrainerSettings, etcd=job.etcd_address, job=job.job) for job in jobs]
        one, two = (child_environment(each, **TORCH_ENVIRONMENT) for each in chosen)
        data = str(records(directory))
        sides = [
            stack.enter_context(_side(mb, 1, plain, kind="alone")),
            stack.enter_context(_side(mb, 1, one, kind="job", data=data)),
            stack.enter_context(_side(mb, 2, plain, kind="ddp")),
            stack.enter_context(_side(mb, 2, two, kind="job", data=data)),
        ]
        # Importing PyTorch takes seconds, so all processes start at the same time.
        for side in sides:
            side.wait_until_ready()
        times = take_turns(sides, turns, [steps] * len(sides))
    ratios = [[a / b for a, b in zip(times[at + 1], times[at], strict=True)] for at in (0, 2)]
    return ModuleSteps(mb, *(Spread.of([1e3 * each for each in found]) for found in times), *map(Spread.of, ratios))


@click.command()
@click.option("--mb", "sizes", type=Number(min=0.01), multiple=True, help="MiB of the model [1, 10, 100]")
@click.option("--steps", type=click.IntRange(min=0), default=0, help="Steps of a turn [0: by the size]")
@measuring(turns=7, least=2)
def torch(*, sizes: Sequence[float], steps: int, turns: int, wants_json: bool) -> None:
    """A step of a PyTorch module on a job, against DDP and against none.

    Needs PyTorch.
    """
    require("torch", "this benchmark", "torch")
    found = []
    for mb in sizes or (1.0, 10.0, 100.0):
        say(f"a model of {mb:g} MiB")
        with tempfile.TemporaryDirectory(prefix="flightedl-bench-") as directory:
            count = steps or int(min(50, max(3, 200 / mb)))
            found.append(measure(mb, turns=turns, steps=count, directory=Path(directory)))
    if wants_json:
        print_json(found)
        return
    title = f"a step of a module, Adam, {os.cpu_count()} cores: median of alternated turns, and where half of them lie"
    columns = ("MiB", "alone ms", "flightedl ms", "DDP x 2 ms", "flightedl x 2 ms", "by alone", "by DDP")
    rows = [
        (
            f"{one.mb:g}",
            *map(str, (one.alone_ms, one.flightedl_ms, one.ddp_ms, one.flightedl_2_ms, one.by_alone, one.by_ddp)),
        )
        for one in found
    ]
    print_table(title, columns, rows, left=())
