"""The cost of a step in each process, and predictions for larger jobs.

python -m benchmarks.scale --help

The constants of a cost model are fitted to measurements of small jobs. Its predictions for larger jobs are compared
with measurements on this machine, and the load of the job given by the options is computed.

The model is linear (see ``docs/scale.md``): the cost of a trainer's step has a constant part, a part per parameter
server, and a part per byte. The master's cost grows with the number of requests, and etcd's with the number of
processes that hold a lease.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np

from flightedl.domain.tenure import RENEWALS_PER_TTL
from flightedl.master.progress import report_every_s
from flightedl_tools.bench.dense import RECORDS_PER_TASK, default_steps, flightedl_side
from flightedl_tools.bench.sides import measuring, print_json, print_table, say
from flightedl_tools.bench.trainer import Workload
from flightedl_tools.bench.workers import cpu_s
from flightedl_tools.options import Number

MB, GB = 1 << 20, 1e9


@dataclass(frozen=True, slots=True)
class Shape:
    """Numbers of a job's processes, and the bytes that a trainer pushes and pulls per step, to and from all servers."""

    trainers: int
    pservers: int
    step_bytes: int

    @property
    def moved_gb(self) -> float:
        """GB pushed and pulled by one trainer's step."""
        return 2 * self.step_bytes / GB

    def __str__(self) -> str:
        return f"{self.trainers} x {self.pservers}, {self.step_bytes / (1 << 20):g} MiB"


@dataclass(frozen=True, slots=True)
class Seen:
    """Processor time that a job uses, in seconds."""

    shape: Shape
    #: Time of a step in its trainer.
    trainer_s: float
    #: Time of a step in all parameter servers together.
    servers_s: float
    #: Processor time per second of the master and of etcd.
    master_s: float
    etcd_s: float
    #: Steps per second, and requests to the master per second, of all trainers together.
    steps_per_s: float
    requests_per_s: float


@dataclass(frozen=True, slots=True)
class Constants:
    """Constants of the linear model, in seconds of processor time."""

    #: Constants of a trainer: per step, per server in a step, per GB pushed and pulled.
    step_s: float
    step_server_s: float
    trainer_gb_s: float
    #: Constants of a server: per message from a trainer, per GB pushed and pulled.
    message_s: float
    server_gb_s: float
    #: Master: per second, per request.
    master_s: float
    request_s: float
    #: Constants of etcd: per second, and per second for each process with a lease.
    etcd_s: float
    etcd_process_s: float

    def trainer_cpu_s(self, shape: Shape) -> float:
        """Return the time of a step in its trainer."""
        return self.step_s + self.step_server_s * shape.pservers + self.trainer_gb_s * shape.moved_gb

    def servers_cpu_s(self, shape: Shape) -> float:
        """Return the time of a step in all servers together."""
        return self.message_s * shape.pservers + self.server_gb_s * shape.moved_gb

    def master_cpu_s(self, requests: float) -> float:
        """Return the time per second in the master, at ``requests`` requests per second."""
        return self.master_s + self.request_s * requests

    def etcd_cpu_s(self, processes: int) -> float:
        return self.etcd_s + self.etcd_process_s * processes


def fitted(seen: Sequence[Seen], more: Sequence[Seen] = ()) -> Constants:
    """Return the non-negative constants that fit the measurements best.

    Args:
        seen: Measurements of shapes with different numbers of servers and bytes.
        more: Measurements that count only for the master and etcd, which have little load with few trainers.
    """
    shapes = [each.shape for each in seen]
    servers = [float(shape.pservers) for shape in shapes]
    moved = [shape.moved_gb for shape in shapes]
    every = [*seen, *more]
    requests = [each.requests_per_s for each in every]
    processes = [float(processes_of(each.shape)) for each in every]
    return Constants(
        *_least_squares([[1.0] * len(seen), servers, moved], [each.trainer_s for each in seen]),
        *_least_squares([servers, moved], [each.servers_s for each in seen]),
        *_least_squares([[1.0] * len(every), requests], [each.master_s for each in every]),
        *_least_squares([[1.0] * len(every), processes], [each.etcd_s for each in every]),
    )


def requests_per_s(trainers: int, task_s: float) -> float:
    """Return the rate of requests to the master, which are requests for tasks and reports of progress."""
    return trainers * (1 / task_s + 1 / report_every_s(trainers))


def processes_of(shape: Shape) -> int:
    """Return the number of processes with a lease: the trainers, the servers and a master."""
    return shape.trainers + shape.pservers + 1


def _least_squares(columns: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """Return the non-negative coefficients that minimize the relative errors."""
    weights = 1 / np.maximum(np.asarray(values), 1e-9)
    left = np.asarray(columns).T * weights[:, None]
    found = np.zeros(len(columns))
    kept = list(range(len(columns)))
    while kept:
        found[:] = 0
        found[kept] = np.linalg.lstsq(left[:, kept], np.ones(len(values)), rcond=None)[0]
        if (found >= 0).all():
            break
        kept.remove(int(np.argmin(found)))
    return [float(each) for each in found]


@dataclass(frozen=True, slots=True)
class Machines:
    """The machines of a predicted job. All numbers of cores are per process."""

    trainer_cores: float = 2.0
    server_cores: float = 8.0
    #: The master uses at most one core, because Python runs one thread at a time.
    master_cores: float = 1.0
    etcd_cores: float = 4.0
    #: Network bandwidth of each machine, in each direction.
    network_bytes_per_s: float = 25e9 / 8
    #: Rate at which a server writes to the checkpoint store.
    store_bytes_per_s: float = 200e6


@dataclass(frozen=True, slots=True)
class Load:
    """Utilization of a resource. ``text`` describes the resource, which is overloaded above 1."""

    what: str
    text: str
    part: float


@dataclass(frozen=True, slots=True)
class Job:
    """A job whose load is predicted."""

    shape: Shape
    #: Bytes of the model, including the optimizer's slots.
    stored_bytes: float
    #: Time from the beginning of a trainer's step to the beginning of its next step.
    step_s: float
    task_s: float
    ttl_s: float = 5.0


def loads(job: Job, cost: Constants, machines: Machines) -> list[Load]:
    """Return the utilization of all resources, busiest first.

    The load of a server's Python code is an upper bound, because it includes gRPC's share of the time for a message.
    """
    shape = job.shape
    steps_per_s = shape.trainers / job.step_s
    server_bytes = steps_per_s * shape.step_bytes / shape.pservers
    messages = steps_per_s
    server_cpu = steps_per_s * cost.servers_cpu_s(shape) / shape.pservers
    trainer_cpu = cost.trainer_cpu_s(shape) / job.step_s
    trainer_bytes = shape.step_bytes / job.step_s
    requests = requests_per_s(shape.trainers, job.task_s)
    renewals = processes_of(shape) * RENEWALS_PER_TTL / job.ttl_s
    written_s = job.stored_bytes / shape.pservers / machines.store_bytes_per_s
    each_way = "/s in each direction"
    etcd_s = cost.etcd_cpu_s(processes_of(shape))
    of_etcd = (
        f"{renewals:,.0f} renewals/s of {processes_of(shape):,} leases, {shape.trainers / job.task_s:,.0f} tasks/s"
    )
    written = f"{_bytes(job.stored_bytes)}, {written_s:,.0f} s at each server, during training"
    master_s = cost.master_cpu_s(requests)
    found = [
        Load("a server's network", _bytes(server_bytes) + each_way, server_bytes / machines.network_bytes_per_s),
        Load("a server's cores", f"{server_cpu:.2f} busy", server_cpu / machines.server_cores),
        Load("a server's Python", f"{messages:,.0f} messages/s, one at a time", messages * cost.message_s),
        Load("a trainer's network", _bytes(trainer_bytes) + each_way, trainer_bytes / machines.network_bytes_per_s),
        Load("a trainer's cores", f"{trainer_cpu:.2f} busy besides its own work", trainer_cpu / machines.trainer_cores),
        Load("the master", f"{requests:,.0f} requests/s, {master_s:.2f} cores", master_s / machines.master_cores),
        Load("etcd", f"{of_etcd} in groups, {etcd_s:.2f} cores", etcd_s / machines.etcd_cores),
        Load("a checkpoint per hour", written, written_s / 3600),
    ]
    return sorted(found, key=lambda load: -load.part)


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


#: Shapes of the measured jobs to which the constants are fitted.
SMALL = (Shape(1, 1, MB // 16), Shape(1, 4, MB // 16), Shape(4, 1, MB // 16), Shape(1, 1, 64 * MB))
#: Shapes of the jobs whose measurements are compared with the predictions.
LARGE = (Shape(2, 1, 64 * MB), Shape(2, 2, 16 * MB), Shape(4, 2, 64 * MB), Shape(8, 4, MB), Shape(8, 4, 64 * MB))


def seen(shape: Shape, turns: int, directory: Path) -> Seen:
    """Measure a job of this shape with SGD in async mode, over TCP as between machines."""
    workload = Workload(mb=shape.step_bytes / MB, trainers=shape.trainers, pservers=shape.pservers, path="tcp")
    steps = max(default_steps(workload), 20)
    with flightedl_side(workload, directory) as side:
        side.run(max(2, steps // 2))
        side.forget()
        others = side.others["master"], side.others["etcd"]
        began, before = time.monotonic(), [*map(cpu_s, others)]
        while turns > 0 or time.monotonic() - began < 3.0:
            side.run(steps)
            turns -= 1
        wall_s = time.monotonic() - began
        master_s, etcd_s = ((cpu_s(each) - then) / wall_s for each, then in zip(others, before, strict=True))
        found = side.measured()
    steps_per_s = shape.trainers / found.step_s
    return Seen(
        shape,
        found.trainer_cpu_s,
        found.server_cpu_s,
        master_s,
        etcd_s,
        steps_per_s,
        requests_per_s(shape.trainers, shape.trainers * RECORDS_PER_TASK / steps_per_s),
    )


def print_constants(cost: Constants) -> None:
    """Print the constants."""
    step = f"{cost.step_s * 1e6:.0f} us + {cost.step_server_s * 1e6:.0f} us"
    rows = (
        ("trainer: per step + per server", step),
        ("trainer: per GB pushed and pulled", f"{cost.trainer_gb_s:.2f} s"),
        ("server: per message, per GB", f"{cost.message_s * 1e6:.0f} us, {cost.server_gb_s:.2f} s"),
        ("master: per second + per request", f"{cost.master_s * 1e3:.1f} ms + {cost.request_s * 1e3:.2f} ms"),
        ("etcd: per second + per process", f"{cost.etcd_s * 1e3:.1f} ms + {cost.etcd_process_s * 1e3:.2f} ms"),
    )
    print_table("processor time", ("work", "time"), rows)


def print_tried(tried: Sequence[Seen], cost: Constants) -> None:
    """Print predictions and measurements."""
    cores, rows = os.cpu_count() or 1, []
    for each in tried:
        trainer_s, servers_s = cost.trainer_cpu_s(each.shape), cost.servers_cpu_s(each.shape)
        rows.append(
            (
                str(each.shape),
                f"{trainer_s * 1e3:.2f} / {each.trainer_s * 1e3:.2f}",
                f"{servers_s * 1e3:.2f} / {each.servers_s * 1e3:.2f}",
                f"{cores / (trainer_s + servers_s):,.0f} / {each.steps_per_s:,.0f}",
            )
        )
    columns = ("trainers x servers", "trainer ms/step", "servers ms/step", "total steps/s")
    print_table(f"larger jobs: predicted / measured, {cores} cores", columns, rows)


def print_paper(found: Sequence[Load], job: Job) -> None:
    """Print the utilization of each resource in the predicted job."""
    shape = job.shape
    title = f"predicted: {shape.trainers:,} trainers x {shape.pservers} servers, {job.stored_bytes / GB:,.0f} GB, "
    rows = [(load.what, load.text, f"{load.part:,.0%}") for load in found]
    title += f"{2 * shape.step_bytes / 1e6:,.1f} MB per step of {job.step_s:g} s"
    print_table(title, ("resource", "load", "utilization"), rows, left=(0, 1))


@click.command()
@click.option("--trainers", type=click.IntRange(min=1), default=1000, show_default=True, help="In the predicted job.")
@click.option("--pservers", type=click.IntRange(min=1), default=64, show_default=True, help="In the predicted job.")
@click.option("--gb", type=Number(min=0.001), default=100.0, show_default=True, help="Model with optimizer slots.")
@click.option(
    "--step-mb",
    type=Number(min=0.0001),
    default=20.0,
    show_default=True,
    help="Values that a step pushes: all of a dense model, some rows of tables.",
)
@click.option("--step-s", type=Number(min=0.0001), default=0.2, show_default=True, help="Time between two steps.")
@click.option("--task-s", type=Number(min=0.001), default=30.0, show_default=True, help="Duration of a task.")
@click.option("--gbit", type=Number(min=0.001), default=25.0, show_default=True, help="Network per machine.")
@click.option("--cores", type=Number(min=0.1), default=8.0, show_default=True, help="Cores per server.")
@measuring(turns=3)
def scale(*, turns: int, wants_json: bool, **paper: Any) -> None:
    """Measure the cost of a step in each process, and predict the load of a large job.

    Measures small jobs (SGD, async, over TCP as between machines), compares predictions for larger jobs with
    measurements, and prints the utilization of each resource in the job that the options describe, with the busiest
    resource first.
    """
    found: list[Seen] = []
    with tempfile.TemporaryDirectory(prefix="flightedl-bench-") as directory:
        for shape in (*SMALL, *LARGE):
            say(str(shape))
            found.append(seen(shape, turns, Path(directory)))
    cost = fitted(found[: len(SMALL)], found[len(SMALL) :])
    shape = Shape(paper["trainers"], paper["pservers"], int(paper["step_mb"] * 1e6))
    job = Job(shape, paper["gb"] * GB, paper["step_s"], paper["task_s"])
    busy = loads(job, cost, Machines(server_cores=paper["cores"], network_bytes_per_s=paper["gbit"] * 1e9 / 8))
    if wants_json:
        print_json({"seen": found, "constants": cost, "loads": busy})
        return
    print_constants(cost)
    print_tried(found[len(SMALL) :], cost)
    print_paper(busy, job)


if __name__ == "__main__":
    from benchmarks.scale import scale as command

    command()
