"""``flightedl bench scale``: what a step costs whom, predictions for larger jobs, and a job on paper.

Constants come from small jobs, see ``costs``; what they predict for larger ones is compared with what these take on
this machine, and the job that the options describe is worked out.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import click

from ..options import Number
from .costs import GB, Constants, Job, Load, Machines, Seen, Shape, fitted, loads, requests_per_s
from .dense import RECORDS_PER_TASK, Workload, default_steps, flightedl_side
from .processes import cpu_s
from .sides import measuring, print_json, print_table, say

MB = 1 << 20
#: What the constants come from, and what they are tried on.
SMALL = (Shape(1, 1, MB // 16), Shape(1, 4, MB // 16), Shape(4, 1, MB // 16), Shape(1, 1, 64 * MB))
LARGE = (Shape(2, 1, 64 * MB), Shape(2, 2, 16 * MB), Shape(4, 2, 64 * MB), Shape(8, 4, MB), Shape(8, 4, 64 * MB))


def seen(shape: Shape, turns: int, directory: Path) -> Seen:
    """What a job of this shape takes: SGD, async, by TCP, as between machines."""
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
    """Print the constants for people."""
    step = f"{cost.step_s * 1e6:.0f} us + {cost.step_server_s * 1e6:.0f} us"
    rows = (
        ("trainer: a step, and each server in it", step),
        ("trainer: a GB pushed and pulled", f"{cost.trainer_gb_s:.2f} s"),
        ("server: a message, a GB", f"{cost.message_s * 1e6:.0f} us, {cost.server_gb_s:.2f} s"),
        ("master: a second, and each request in it", f"{cost.master_s * 1e3:.1f} ms + {cost.request_s * 1e3:.2f} ms"),
        ("etcd: a second, and each process in it", f"{cost.etcd_s * 1e3:.1f} ms + {cost.etcd_process_s * 1e3:.2f} ms"),
    )
    print_table("what costs how much of a processor", ("what", "seconds"), rows)


def print_tried(tried: Sequence[Seen], cost: Constants) -> None:
    """Print predictions beside measurements."""
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
    columns = ("trainers x servers", "trainer ms a step", "servers ms a step", "steps/s of all")
    print_table(f"larger jobs: predicted and measured, {cores} cores", columns, rows)


def print_paper(found: Sequence[Load], job: Job) -> None:
    """Print the job on paper."""
    shape = job.shape
    title = f"on paper: {shape.trainers:,} trainers x {shape.pservers} servers, {job.stored_bytes / GB:,.0f} GB, "
    rows = [(load.what, load.told, f"{load.part:,.0%}") for load in found]
    title += f"{2 * shape.step_bytes / 1e6:,.1f} MB a step of {job.step_s:g} s"
    print_table(title, ("what", "does", "of what it can"), rows, left=(0, 1))


@click.command()
@click.option("--trainers", type=click.IntRange(min=1), default=1000, show_default=True, help="Of the job on paper.")
@click.option("--pservers", type=click.IntRange(min=1), default=64, show_default=True)
@click.option("--gb", type=Number(min=0.001), default=100.0, show_default=True, help="Of it, with slots.")
@click.option(
    "--step-mb",
    type=Number(min=0.0001),
    default=20.0,
    show_default=True,
    help="That a step touches and pushes: all of a dense model, some rows of tables.",
)
@click.option("--step-s", type=Number(min=0.0001), default=0.2, show_default=True, help="From step to step.")
@click.option("--task-s", type=Number(min=0.001), default=30.0, show_default=True, help="A task lasts.")
@click.option("--gbit", type=Number(min=0.001), default=25.0, show_default=True, help="Network a machine.")
@click.option("--cores", type=Number(min=0.1), default=8.0, show_default=True, help="Cores of a server.")
@measuring(turns=3)
def scale(
    *,
    trainers: int,
    pservers: int,
    gb: float,
    step_mb: float,
    step_s: float,
    task_s: float,
    gbit: float,
    cores: float,
    turns: int,
    wants_json: bool,
) -> None:
    """What a step costs whom, and what a large job would cost.

    Measures small jobs (SGD, async, by TCP as between machines), predicts larger ones beside what they take here, then
    works out the job that the options describe: what is how busy, the busiest first.
    """
    found: list[Seen] = []
    with tempfile.TemporaryDirectory(prefix="flightedl-bench-") as directory:
        for shape in (*SMALL, *LARGE):
            say(str(shape))
            found.append(seen(shape, turns, Path(directory)))
    cost = fitted(found[: len(SMALL)], found[len(SMALL) :])
    job = Job(Shape(trainers, pservers, int(step_mb * 1e6)), gb * GB, step_s, task_s)
    machines = Machines(server_cores=cores, network_bytes_per_s=gbit * 1e9 / 8)
    busy = loads(job, cost, machines)
    if wants_json:
        print_json({"seen": found, "constants": cost, "loads": busy})
        return
    print_constants(cost)
    print_tried(found[len(SMALL) :], cost)
    print_paper(busy, job)
