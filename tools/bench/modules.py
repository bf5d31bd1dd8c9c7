"""``flightedl bench torch``: a step of a PyTorch module in a job, compared with the module alone and with DDP.

One trainer is compared with the module alone, using PyTorch's fused Adam, and two trainers with two DDP processes over
gloo. Each job has one pserver, and each process uses one thread. All sides have the same network and batches, and take
turns.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

import flightedl as fe
from flightedl.config import TrainerSettings, child_environment, settings
from flightedl.process.importing import require

from ..options import Number
from .dense import records
from .sides import Side, Spread, measuring, print_json, print_table, say, take_turns
from .trainer import run_steps
from .workers import next_order, print_line, ready, report, serve, started

#: Environment variables of processes that use gloo.
TORCH_ENVIRONMENT = {"GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore", "TORCH_CPP_LOG_LEVEL": "ERROR"}
_IMAGES = 32
_FLAT = 32 * 3 * 3
_DIGITS = 10
#: Learning rate of the all-reduce.
_RATE = 0.01


@dataclass(frozen=True, slots=True)
class ModuleSteps:
    """Times, in ms, of a step of a model of ``mb`` MiB, and ratios: flightedl's time divided by the reference's.

    One trainer is compared with the module alone, and two trainers with two DDP processes.
    """

    mb: float
    alone_ms: Spread
    flightedl_ms: Spread
    ddp_ms: Spread
    flightedl_2_ms: Spread
    by_alone: Spread
    by_ddp: Spread


def network(mb: float) -> Any:
    """Return a small convolutional network whose last layers are wide enough for a total of ``mb`` MiB."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    torch.set_num_threads(1)
    width = max(1, round(mb * (1 << 20) / 4 / (_FLAT + _DIGITS)))
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(_FLAT, width),
        nn.ReLU(),
        nn.Linear(width, _DIGITS),
    )


def _step_of(module: Any, optimizer: Any = None) -> Callable[[], None]:
    import torch

    images, digits = torch.randn(_IMAGES, 1, 8, 8), torch.randint(_DIGITS, (_IMAGES,))
    chosen = torch.optim.Adam(module.parameters(), fused=True) if optimizer is None else optimizer

    def step() -> None:
        chosen.zero_grad()
        torch.nn.functional.cross_entropy(module(images), digits).backward()
        chosen.step()

    return step


def train_alone(mb: float) -> None:
    """Run the requested steps of the module alone."""
    serve(_step_of(network(mb)))


def train_parallel(mb: float, rank: int, world: int, port: int) -> None:
    """Run the requested steps as one DDP process."""
    from torch import nn

    net = network(mb)
    join_gloo(rank, world, port)
    serve(_step_of(nn.parallel.DistributedDataParallel(net)))


def train_on_a_job(mb: float, dataset: str) -> None:
    """Run steps as ordered. The time of a step includes getting its batch."""
    net = network(mb)
    with fe.connect() as job:
        step = _step_of(net, fe.torch.Optimizer(net, job, fe.Adam(), mode=fe.Sync()))
        data = job.dataset(dataset, batch_size=1, epochs=None)
        ready()
        # Run a separate loop for each order, because otherwise other trainers' rounds would wait for an idle trainer.
        while count := next_order()[0]:
            report(*run_steps(data, step, count))


def all_reduce(element_count: int, rank: int, world: int, port: int) -> None:
    """Run steps as ordered: average the gradients with gloo, and run plain SGD in each process."""
    import torch

    torch.set_num_threads(1)
    join_gloo(rank, world, port)
    gradient, values = torch.randn(element_count), torch.zeros(element_count)

    def step() -> None:
        total = gradient.clone()
        torch.distributed.all_reduce(total)
        values.add_(total, alpha=_RATE / world)

    serve(step)


def join_gloo(rank: int, world: int, port: int) -> None:
    """Join the gloo group at a port that the first process chooses and prints."""
    from torch import distributed

    store = distributed.TCPStore("127.0.0.1", port, world, is_master=not rank, wait_for_workers=False)
    if not rank:
        print_line(store.port)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=world)


def gloo_side(function: Callable[..., None], size: float, world: int, stack: contextlib.ExitStack) -> Side:
    """Start the processes of a gloo group, without waiting for them. They run ``function(size, rank, world, port)``."""
    environment = child_environment(**TORCH_ENVIRONMENT)
    workers = [stack.enter_context(started(function, size, 0, world, 0, environment=environment))]
    port = int(workers[0].line())
    others = (started(function, size, rank, world, port, environment=environment) for rank in range(1, world))
    workers += map(stack.enter_context, others)
    return Side(workers, [], int(4 * size))


def measure(mb: float, *, turns: int, steps: int, directory: Path) -> ModuleSteps:
    """Measure all sides alternately."""
    plain = child_environment(**TORCH_ENVIRONMENT)
    with contextlib.ExitStack() as stack:
        jobs = [stack.enter_context(fe.local(job=f"bench-{count}")) for count in (1, 2)]
        chosen = [settings(TrainerSettings, etcd=job.etcd_address, job=job.job) for job in jobs]
        one, two = (child_environment(each, **TORCH_ENVIRONMENT) for each in chosen)
        data, size = str(records(directory)), int(mb * (1 << 20))
        alone = started(train_alone, mb, environment=plain)
        ours = [started(train_on_a_job, mb, data, environment=each) for each in (one, two, two)]
        sides = [
            Side([stack.enter_context(alone)], [], size),
            Side([stack.enter_context(ours[0])], [], size),
            gloo_side(train_parallel, mb, 2, stack),
            Side([stack.enter_context(each) for each in ours[1:]], [], size),
        ]
        # Start all processes at the same time, because importing PyTorch takes seconds.
        for side in sides:
            side.wait_until_ready()
        times = take_turns(sides, turns, [steps] * len(sides))
    ratios = [[a / b for a, b in zip(times[at + 1], times[at], strict=True)] for at in (0, 2)]
    return ModuleSteps(mb, *(Spread.of([1e3 * each for each in found]) for found in times), *map(Spread.of, ratios))


@click.command()
@click.option("--mb", "sizes", type=Number(min=0.01), multiple=True, help="MiB of the model [1, 10, 100]")
@click.option("--steps", type=click.IntRange(min=0), default=0, help="Steps per turn [0: by size]")
@measuring(turns=7, least=2)
def torch(*, sizes: Sequence[float], steps: int, turns: int, wants_json: bool) -> None:
    """Compare a step of a PyTorch module in a job with the module alone and with DDP.

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
    title = f"a step of a module, Adam, {os.cpu_count()} cores: median and quartiles of alternated turns"
    columns = ("MiB", "alone ms", "flightedl ms", "DDP x 2 ms", "flightedl x 2 ms", "by alone", "by DDP")
    rows = [
        (
            f"{one.mb:g}",
            *map(str, (one.alone_ms, one.flightedl_ms, one.ddp_ms, one.flightedl_2_ms, one.by_alone, one.by_ddp)),
        )
        for one in found
    ]
    print_table(title, columns, rows, left=())
