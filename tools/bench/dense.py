"""``flightedl bench dense``: a push, an optimizer step and a pull, compared with bare Flight in the same run."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from flightedl.config import INTEGRITIES, TrainerSettings, child_environment, settings
from flightedl.launch.cluster import LocalCluster

from ..options import Number
from .bare import OPTIMIZERS, run_client, run_server
from .sides import Measured, Side, begin, measuring, print_json, print_table, say, take_turns
from .trainer import MODES, Workload, train
from .workers import started

#: Number of records in each row group of the benchmark's dataset.
RECORDS_PER_TASK = 1 << 12
BY_TCP = "flightedl by TCP"
_IN_MEMORY = ("shared", "lent")
_PROCESSORS = Path("/proc/cpuinfo")

#: The standard table.
STANDARD: dict[str, Workload] = {
    "sgd": Workload(),
    "adam": Workload(optimizer="adam"),
    "sync": Workload(mode="sync", trainers=4, pservers=2),
    "small": Workload(mb=4),
    "tiny": Workload(mb=4000 * 1000 / (1 << 20), parameters=1000),
}


@dataclass(frozen=True, slots=True)
class Comparison:
    """A line of the table. Each throughput ratio is (median, lowest, highest) over all turns."""

    workload: Workload
    bare: Measured
    flightedl: Measured
    #: Ratio to bare Flight.
    ratio: tuple[float, float, float]
    #: Only with shared memory: the same job over TCP, its ratio to bare Flight, and the ratio of shared memory to TCP.
    by_tcp: Measured | None = None
    ratio_by_tcp: tuple[float, float, float] | None = None
    over_tcp: tuple[float, float, float] | None = None


def records(directory: Path, tasks: int = 16) -> Path:
    """Return a dataset with ``tasks`` tasks. It is written unless it exists."""
    path = directory / "records.parquet"
    if not path.exists():
        pq.write_table(pa.table({"k": np.arange(RECORDS_PER_TASK * tasks)}), path, row_group_size=RECORDS_PER_TASK)
    return path


@contextlib.contextmanager
def bare_side(workload: Workload) -> Iterator[Side]:
    """Run bare Flight with the same numbers of clients and servers."""
    count = sum(workload.shapes)
    shares = [len(share) for share in np.array_split(np.empty(count, np.bool_), workload.pservers)]
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(started(run_server, share, workload.optimizer)) for share in shares]
        addresses = [server.line() for server in servers]
        clients = begin(stack, run_client, count, addresses, count=workload.trainers)
        yield Side(clients, [server.process.pid for server in servers], 4 * count)


@contextlib.contextmanager
def flightedl_side(workload: Workload, directory: Path) -> Iterator[Side]:
    """Run a job with real processes."""
    path = records(directory)
    gradients = directory / "gradients"
    if not gradients.exists() or gradients.stat().st_size != workload.size_bytes:
        with gradients.open("wb") as file:
            np.random.default_rng(0).standard_normal(sum(workload.shapes), np.float32).tofile(file)
    same_host = "never" if workload.path == "tcp" else "auto"
    more: dict[str, Any] = {"integrity": workload.integrity, "same_host": same_host}
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(LocalCluster(workload.pservers, job="bench", **more))
        environment = child_environment(settings(TrainerSettings, etcd=cluster.etcd_address, job="bench", **more))
        given = workload, str(path), str(gradients)
        trainers = begin(stack, train, *given, count=workload.trainers, environment=environment)
        pids = [pid for index in range(workload.pservers) if (pid := cluster.pid("pserver", index)) is not None]
        others = {role: pid for role in ("master", "etcd") if (pid := cluster.pid(role)) is not None}
        yield Side(trainers, pids, workload.size_bytes, others)


def compare(workload: Workload, *, turns: int, steps: int, directory: Path) -> Comparison:
    """Measure all sides in turn, ``steps`` steps at a time."""
    is_shared = workload.path in _IN_MEMORY
    with contextlib.ExitStack() as stack:
        sides = [
            stack.enter_context(bare_side(workload)),
            stack.enter_context(flightedl_side(workload, directory)),
        ]
        if is_shared:
            sides.append(stack.enter_context(flightedl_side(replace(workload, path="tcp"), directory)))
        times = take_turns(sides, turns, [steps] * len(sides))
        bare, ours, *by_tcp = (side.measured() for side in sides)
    found = Comparison(workload, bare, ours, _ratio(times[0], times[1]))
    if not is_shared:
        return found
    return replace(
        found, by_tcp=by_tcp[0], ratio_by_tcp=_ratio(times[0], times[2]), over_tcp=_ratio(times[2], times[1])
    )


def _ratio(others: Sequence[float], ours: Sequence[float]) -> tuple[float, float, float]:
    found = [other / our for other, our in zip(others, ours, strict=True)]
    return statistics.median(found), min(found), max(found)


def rows_of(one: Comparison) -> list[tuple[str, ...]]:
    """Return the lines of the table for one workload."""
    found = [(str(one.workload), *_cells(one.bare, one.flightedl, one.ratio))]
    if one.by_tcp is not None and one.ratio_by_tcp is not None:
        found.append((f"  {BY_TCP}", *_cells(one.bare, one.by_tcp, one.ratio_by_tcp)))
    return found


def _cells(bare: Measured, other: Measured, ratio: tuple[float, float, float]) -> tuple[str, ...]:
    return (
        f"{bare.step_s * 1e3:.2f}",
        f"{other.step_s * 1e3:.2f}",
        f"{ratio[0]:.2f} ({ratio[1]:.2f} to {ratio[2]:.2f})",
        f"{bare.bytes_per_s / 1e9:.2f}",
        f"{other.bytes_per_s / 1e9:.2f}",
        f"{bare.cpu_s_per_gb:.2f} / {other.cpu_s_per_gb:.2f}",
        f"{other.server_bytes / 1e6:.0f}",
    )


def against_tcp(one: Comparison) -> str:
    """Return a message about the gain of shared memory over TCP, or an empty string if the gain was not measured."""
    if one.over_tcp is None or one.by_tcp is None:
        return ""
    ratio, least, most = one.over_tcp
    return (
        f"{one.workload}: {ratio:.2f} x as fast as by TCP ({least:.2f} to {most:.2f}), "
        f"with {one.flightedl.cpu_s_per_gb / one.by_tcp.cpu_s_per_gb:.2f} of its processor time for a GB"
    )


def processor_name() -> str:
    """Return the processor's name, as the operating system reports it."""
    names = re.findall(r"^model name\s*: (.+)$", _PROCESSORS.read_text(), re.MULTILINE)
    return names[0] if names else platform.machine()


@click.command()
@click.argument("workloads", nargs=-1, type=click.Choice([*STANDARD, "custom"]))
@click.option("--mb", type=Number(min=0.001), default=64.0, show_default=True, help="MiB of the model.")
@click.option("--parameters", type=click.IntRange(min=1), default=1, show_default=True, help="Number of equal arrays.")
@click.option("--trainers", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("--pservers", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("--optimizer", type=click.Choice(list(OPTIMIZERS)), default="sgd")
@click.option("--mode", type=click.Choice(list(MODES)), default="async", show_default=True)
@click.option("--wire", type=click.Choice(["", "bfloat16", "float16"]), default="", help="16-bit floats on the wire.")
@click.option("--integrity", type=click.Choice(INTEGRITIES), default="auto", help="Checksums of values [auto]")
@click.option(
    "--path",
    type=click.Choice(["auto", *_IN_MEMORY, "tcp"]),
    default="auto",
    help="Transport of values. Shared memory, also with model.lend_to, is compared with TCP. [auto: shared]",
)
@click.option("--steps", type=click.IntRange(min=0), default=0, help="Steps per turn [0: by size]")
@measuring(turns=5)
def dense(*, workloads: Sequence[str], steps: int, turns: int, wants_json: bool, **custom: Any) -> None:
    """Compare push, optimizer and pull with bare Flight.

    Runs the named standard WORKLOADS (sgd, adam, sync, small, tiny), or, for "custom", the workload that the options
    describe. Runs all standard workloads if none is named and no option is given. The sides run alternately.
    """
    path = custom["path"]
    chosen = [replace(STANDARD[name], path=path) for name in workloads if name != "custom"]
    own = Workload(**custom)
    if "custom" in workloads or (not chosen and own != Workload(path=path)):
        chosen.append(own)
    found = []
    with tempfile.TemporaryDirectory(prefix="flightedl-bench-") as directory:
        for workload in chosen or [replace(each, path=path) for each in STANDARD.values()]:
            say(str(workload))
            count = steps or default_steps(workload)
            found.append(compare(workload, turns=turns, steps=count, directory=Path(directory)))
    if wants_json:
        print_json(found)
        return
    title = f"push + optimizer + pull, {os.cpu_count()} cores of {processor_name()}, medians of alternated runs"
    columns = ("workload", "bare ms", "flightedl ms", "ratio", "bare GB/s", "flightedl GB/s", "cpu s/GB", "server MB")
    print_table(title, columns, [row for one in found for row in rows_of(one)])
    for line in filter(None, map(against_tcp, found)):
        click.echo(line)


def default_steps(workload: Workload) -> int:
    """Return the number of steps that take about a second."""
    return int(min(100, max(3, 1200 / workload.mb / workload.trainers)))
