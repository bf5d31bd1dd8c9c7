"""``flightedl bench dense``: push + optimizer + pull, against bare Flight on the same machine in the same run."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table

from flightedl.config import INTEGRITIES, TrainerSettings, child_environment, settings
from flightedl.domain.consistency.modes import Async, Bounded, Mode, Sync
from flightedl.errors import JobFailedError
from flightedl.launch.cluster import LocalCluster

from ..options import Number
from .orders import worker
from .peers import Peer, installed, missing_line, peer_side
from .sides import Measured, Side

MODES: dict[str, Mode] = {
    "async": Async(),
    "sync": Sync(),
    "sync-sum": Sync(reduce="sum"),
    "bounded": Bounded(staleness=2),
    "backup": Sync(backup=1),
    "deterministic": Sync(deterministic=True),
}
#: Records of the benched dataset; a task is a row group of it.
_RECORDS = 1 << 16
RECORDS_PER_TASK = 1 << 12
BY_TCP = "flightedl by TCP"
_IN_MEMORY = ("shared", "lent")
_PROCESSORS = Path("/proc/cpuinfo")
#: Of all trainers together; beyond they share one file.
_OWN_GRADIENTS_BYTES = 2 << 30


@dataclass(frozen=True, slots=True)
class Workload:
    """What is measured. ``parameters`` arrays of equal size, ``mb`` MiB of float32 together."""

    mb: float = 64.0
    parameters: int = 1
    trainers: int = 1
    pservers: int = 1
    optimizer: str = "sgd"
    mode: str = "async"
    wire: str = ""
    integrity: str = "auto"
    #: What values travel by: memory that both sides map, "shared", the same without a copy in the trainer, "lent", or
    #: "tcp"; "auto": as it comes, which is shared here.
    path: str = "auto"

    @property
    def shapes(self) -> list[int]:
        """Elements of each parameter."""
        return [max(1, round(self.mb * (1 << 20) / 4 / self.parameters))] * self.parameters

    @property
    def size_bytes(self) -> int:
        """Bytes of the values."""
        return 4 * sum(self.shapes)

    def __str__(self) -> str:
        pieces = "" if self.parameters == 1 else f" in {self.parameters}"
        wire = f", {self.wire} wire" if self.wire else ""
        checked = "" if self.integrity == "auto" else f", integrity {self.integrity}"
        by = "" if self.path == "auto" else f", {self.path}"
        shape = f"{self.trainers} x {self.pservers}"
        return f"{self.mb:g} MB{pieces}, {self.optimizer}, {self.mode}{wire}{checked}, {shape}{by}"


#: The standard table.
STANDARD: dict[str, Workload] = {
    "sgd": Workload(),
    "adam": Workload(optimizer="adam"),
    "sync": Workload(mode="sync", trainers=4, pservers=2),
    "small": Workload(mb=4),
    "tiny": Workload(mb=4000 * 1000 / (1 << 20), parameters=1000),
}


@dataclass(frozen=True, slots=True)
class PeerComparison:
    """Another system's line below a workload's."""

    name: str
    measured: Measured
    #: Of throughput, as in ``Comparison``.
    ratio: float
    spread: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Comparison:
    """One line of the table, and those of its peers."""

    workload: Workload
    bare: Measured
    flightedl: Measured
    #: Of throughput: 1 is as fast as bare Flight. The median of the ratios of neighbouring runs.
    ratio: float
    peers: tuple[PeerComparison, ...] = ()
    #: The least and the most of these ratios.
    spread: tuple[float, float] = (0.0, 0.0)
    #: Of throughput: shared memory against the same by TCP, where both were measured; median, least and most.
    over_tcp: tuple[float, float, float] | None = None


@contextlib.contextmanager
def bare_side(workload: Workload) -> Iterator[Side]:
    """Bare Flight in the same shape."""
    environment = child_environment()
    module = "flightedl_tools.bench.bare"
    count = sum(workload.shapes)
    shares = [part.size for part in np.array_split(np.empty(count, np.bool_), workload.pservers)]
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(worker(module, ["server", share, workload.optimizer], environment)) for share in shares
        ]
        addresses = [f"127.0.0.1:{server.line()}" for server in servers]
        clients = [
            stack.enter_context(worker(module, ["client", count, *addresses], environment))
            for _ in range(workload.trainers)
        ]
        for client in clients:
            client.answer()
        yield Side(clients, [server.process.pid for server in servers], 4 * count)


@contextlib.contextmanager
def flightedl_side(workload: Workload, directory: Path) -> Iterator[Side]:
    """A job of real processes."""
    path = directory / "records.parquet"
    if not path.exists():
        table = pa.table({"k": np.arange(_RECORDS)})
        pq.write_table(table, path, row_group_size=RECORDS_PER_TASK)
    gradients = directory / "gradients"
    if not gradients.exists() or gradients.stat().st_size != workload.size_bytes:
        with gradients.open("wb") as file:
            np.random.default_rng(0).standard_normal(sum(workload.shapes), np.float32).tofile(file)
    options = {
        "shapes": workload.shapes,
        "data": str(path),
        "gradients": str(gradients),
        "optimizer": workload.optimizer,
        "mode": MODES[workload.mode].to_json(),
        "more": {"wire": workload.wire} if workload.wire else {},
        "lends": workload.path == "lent",
        "own_gradients": workload.trainers * workload.size_bytes <= _OWN_GRADIENTS_BYTES,
    }
    same_host = "never" if workload.path == "tcp" else "auto"
    more: dict[str, Any] = {"integrity": workload.integrity, "same_host": same_host}
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(LocalCluster(workload.pservers, job="bench", **more))
        environment = child_environment(settings(TrainerSettings, etcd=cluster.etcd_address, job="bench", **more))
        trainers = [
            stack.enter_context(worker("flightedl_tools.bench.trainer", [json.dumps(options)], environment))
            for _ in range(workload.trainers)
        ]
        for trainer in trainers:
            trainer.answer()
        pids = [pid for index in range(workload.pservers) if (pid := cluster.pid("pserver", index)) is not None]
        others = {role: pid for role in ("master", "etcd") if (pid := cluster.pid(role)) is not None}
        yield Side(trainers, pids, workload.size_bytes, others)


def compare(workload: Workload, *, turns: int, steps: int, directory: Path, peers: Sequence[Peer] = ()) -> Comparison:
    """All sides, taking turns of ``steps`` steps each."""
    with contextlib.ExitStack() as stack:
        bare = stack.enter_context(bare_side(workload))
        ours = stack.enter_context(flightedl_side(workload, directory))
        others: list[tuple[str, Side]] = []
        if workload.path in _IN_MEMORY:
            others.append((BY_TCP, stack.enter_context(flightedl_side(replace(workload, path="tcp"), directory))))
        for peer in peers:
            try:
                others.append((peer.name, stack.enter_context(peer_side(peer, sum(workload.shapes)))))
            except JobFailedError as error:
                click.echo(f"{peer.name} does not start here, so it is not compared: {error}", err=True)
        sides = [bare, ours, *(side for _, side in others)]
        for side in sides:
            side.run(max(2, steps // 2))
            side.forget()
        times: list[list[float]] = [[] for _ in sides]
        for turn in range(turns):
            # Who goes first alternates, so that a machine that slows down favours nobody.
            order = list(zip(sides, times, strict=True))
            for side, found in order if turn % 2 == 0 else reversed(order):
                found.append(side.run(steps))
        ratios = [_ratio(times[0], found) for found in times]
        return Comparison(
            workload,
            bare.measured(),
            ours.measured(),
            ratios[1][0],
            tuple(
                PeerComparison(name, side.measured(), ratio, (least, most))
                for (name, side), (ratio, least, most) in zip(others, ratios[2:], strict=True)
            ),
            ratios[1][1:],
            _ratio(times[2], times[1]) if workload.path in _IN_MEMORY else None,
        )


def _ratio(others: Sequence[float], ours: Sequence[float]) -> tuple[float, float, float]:
    """How many times as fast: the median of neighbouring runs, the least, and the most."""
    found = [other / our for other, our in zip(others, ours, strict=True)]
    return statistics.median(found), min(found), max(found)


def has_peers(workload: Workload) -> bool:
    """Whether the peers' programs do the like of it."""
    alone = workload.parameters == workload.trainers == workload.pservers == 1
    return alone and workload.optimizer == "sgd" and workload.mode == "async" and not workload.wire


def as_json(comparisons: Sequence[Comparison]) -> str:
    """Everything measured."""
    return json.dumps([asdict(comparison) for comparison in comparisons], indent=2)


def as_table(comparisons: Sequence[Comparison]) -> Table:
    """For people."""
    title = f"push + optimizer + pull, {os.cpu_count()} cores of {processor_name()}, medians of alternated runs"
    table = Table(title=title)
    shows_peers = any(one.peers for one in comparisons)
    # With peers, one column is for several systems.
    name = "" if shows_peers else "flightedl "
    columns = ("workload", "bare ms", f"{name}ms", "ratio", "bare GB/s", f"{name}GB/s", "cpu s/GB", "server MB")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right")
    for one in comparisons:
        label = f"{one.workload}: flightedl" if shows_peers else str(one.workload)
        table.add_row(label, *_cells(one.bare, one.flightedl, one.ratio, one.spread))
        for peer in one.peers:
            table.add_row(f"  {peer.name}", *_cells(one.bare, peer.measured, peer.ratio, peer.spread))
    return table


def _cells(bare: Measured, other: Measured, ratio: float, spread: tuple[float, float]) -> list[str]:
    return [
        f"{bare.step_s * 1e3:.2f}",
        f"{other.step_s * 1e3:.2f}",
        f"{ratio:.2f} ({spread[0]:.2f} to {spread[1]:.2f})" if any(spread) else f"{ratio:.2f}",
        f"{bare.bytes_per_s / 1e9:.2f}",
        f"{other.bytes_per_s / 1e9:.2f}",
        f"{bare.cpu_s_per_gb:.2f} / {other.cpu_s_per_gb:.2f}",
        f"{other.server_bytes / 1e6:.0f}",
    ]


def against_tcp(one: Comparison) -> str:
    """What shared memory gains over the same job by TCP, for people; empty: that was not measured."""
    if one.over_tcp is None:
        return ""
    by_tcp = next(peer.measured for peer in one.peers if peer.name == BY_TCP)
    ratio, least, most = one.over_tcp
    return (
        f"{one.workload}: {ratio:.2f} x as fast as by TCP ({least:.2f} to {most:.2f}), "
        f"with {one.flightedl.cpu_s_per_gb / by_tcp.cpu_s_per_gb:.2f} of its processor time for a GB"
    )


def processor_name() -> str:
    """As the system calls it."""
    try:
        for line in _PROCESSORS.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


@click.command()
@click.argument("workloads", nargs=-1, type=click.Choice([*STANDARD, "custom"]))
@click.option("--mb", type=Number(min=0.001), default=64.0, show_default=True, help="MiB of the model.")
@click.option("--parameters", type=click.IntRange(min=1), default=1, show_default=True, help="Equal arrays it is of.")
@click.option("--trainers", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("--pservers", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("--optimizer", type=click.Choice(["sgd", "momentum", "adagrad", "adam"]), default="sgd")
@click.option("--mode", type=click.Choice(list(MODES)), default="async", show_default=True)
@click.option("--wire", type=click.Choice(["", "bfloat16", "float16"]), default="", help="16-bit floats on the wire.")
@click.option("--integrity", type=click.Choice(INTEGRITIES), default="auto", help="Checksums of values [auto]")
@click.option(
    "--path",
    type=click.Choice(["auto", *_IN_MEMORY, "tcp"]),
    default="auto",
    help="What values travel by; shared memory, and with model.lend_to, stands beside TCP [auto: shared]",
)
@click.option("--steps", type=click.IntRange(min=0), default=0, help="Steps of a turn [0: by the size]")
@click.option("--turns", type=click.IntRange(min=1), default=5, show_default=True, help="Turns of each side.")
@click.option("--peers", "wants_peers", is_flag=True, help="Compare also with what is installed of other systems.")
@click.option("--json", "wants_json", is_flag=True, help="Print JSON.")
def dense(
    *, workloads: Sequence[str], steps: int, turns: int, wants_peers: bool, wants_json: bool, **custom: Any
) -> None:
    """Push + optimizer + pull against bare Flight.

    Runs the standard WORKLOADS (sgd, adam, sync, small, tiny), all of them if none is named and no option is given, or
    with "custom" the one that the options describe. Both sides' processes live side by side and take turns.

    Peers (TCP sockets, torch.distributed.rpc, gloo, Ray) do the like of one trainer, one pserver, one parameter, SGD,
    async, a float32 wire: they stand below such workloads, "sgd" and "small" of the standard ones.
    """
    path = custom["path"]
    chosen = [replace(STANDARD[name], path=path) for name in workloads if name != "custom"]
    own = Workload(**custom)
    if "custom" in workloads or (not chosen and own != Workload(path=path)):
        chosen.append(own)
    console = Console(highlight=False, width=180)
    peers = installed() if wants_peers else []
    with tempfile.TemporaryDirectory(prefix="flightedl-bench-") as directory:
        found = []
        for workload in chosen or [replace(each, path=path) for each in STANDARD.values()]:
            if not wants_json:
                click.echo(f"measuring {workload} ...", err=True)
            found.append(
                compare(
                    workload,
                    turns=turns,
                    steps=steps or default_steps(workload),
                    directory=Path(directory),
                    peers=peers if has_peers(workload) else (),
                )
            )
    if wants_json:
        click.echo(as_json(found))
    else:
        console.print(as_table(found))
        for line in filter(None, map(against_tcp, found)):
            click.echo(line)
    if wants_peers and (line := missing_line(peers)):
        click.echo(line, err=wants_json)


def default_steps(workload: Workload) -> int:
    """Steps of a turn, about a second of them."""
    return int(min(100, max(3, 1200 / workload.mb / workload.trainers)))
