"""Pull, push and optimizer between a trainer and a pserver, against other systems that do the like of it.

All sides live at the same time and take turns, workload by workload: so a ratio is of runs that were neighbours.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import shutil
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import click
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from rich.table import Table

from flightedl.config import TrainerSettings, child_environment, settings
from flightedl.errors import JobFailedError
from flightedl.launch.cluster import LocalCluster

from .. import processes
from ..orders import Worker, worker
from ..peers import PEER_ENVIRONMENT
from .workloads import Group, Workload, as_numbers

#: Seconds of a turn of one side with one workload.
_TURN_S = 0.4
_RECORDS = 1 << 16
_OURS, _AHEAD = "flightedl", "flightedl, rows asked ahead"


@dataclass(frozen=True, slots=True)
class RowPeer:
    """Another system: its program here, what it needs, and an option of it; none of a program that has its server."""

    name: str
    program: str
    package: str
    command: str = ""
    option: str = ""


PEERS = (
    RowPeer("Redis", "peer_redis", "redis", command="redis-server"),
    RowPeer("torch.distributed.rpc", "peer_rpc", "torch", option="-"),
    RowPeer("torch.distributed.rpc, TCP only", "peer_rpc", "torch", option="tcp"),
)


@dataclass(frozen=True, slots=True)
class Measured:
    """One side's steps of one workload."""

    side: str
    #: Median of the turns' medians.
    step_s: float
    #: Processor time of a step, trainer and server together: what other programs on the machine change least.
    cpu_s: float
    #: Ids a second, repetitions counted.
    ids_per_s: float
    #: Time of the side by flightedl's with the same workload, and by that with rows asked ahead; above 1: flightedl is
    #: faster. Medians of the turns.
    ratio: float
    ratio_ahead: float
    #: Of flightedl: the time by its time with another workload of the same number of ids.
    by_other: float | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """A workload, and what it took."""

    workload: Workload
    name: str
    sides: tuple[Measured, ...]
    #: What flightedl's time is compared with.
    other: str = ""


def missing(peers: Sequence[RowPeer] = PEERS) -> list[str]:
    """Why peers are not compared, a line for each."""
    found = []
    for peer in peers:
        if importlib.util.find_spec(peer.package) is None:
            found.append(f"{peer.name} is not compared: the Python package {peer.package} is not installed")
        elif peer.command and shutil.which(peer.command) is None:
            found.append(f"{peer.name} is not compared: there is no {peer.command} on PATH")
    return found


def available(peers: Sequence[RowPeer] = PEERS) -> list[RowPeer]:
    """Those that can run here."""
    return [peer for peer in peers if not missing([peer])]


@contextlib.contextmanager
def _own_side(workloads: Sequence[Workload], directory: Path) -> Iterator[tuple[Worker, int]]:
    path = directory / "records.parquet"
    if not path.exists():
        pq.write_table(pa.table({"k": np.arange(_RECORDS)}), path, row_group_size=_RECORDS // 16)
    options = {"data": str(path), "workloads": as_numbers(workloads)}
    with LocalCluster(1, job="bench") as cluster:
        environment = child_environment(settings(TrainerSettings, etcd=cluster.etcd_address, job="bench"))
        with worker("flightedl_tools.bench.tables.trainer", [json.dumps(options)], environment) as trainer:
            trainer.answer()
            pid = cluster.pid("pserver", 0)
            assert pid is not None, "it has answered"
            yield trainer, pid


@contextlib.contextmanager
def _peer_side(peer: RowPeer, workloads: Sequence[Workload]) -> Iterator[tuple[Worker, int]]:
    module, told = f"flightedl_tools.bench.tables.{peer.program}", json.dumps(as_numbers(workloads))
    environment = child_environment(**PEER_ENVIRONMENT)
    with contextlib.ExitStack() as stack:
        arguments, pids = [told], []
        if peer.option:
            server = stack.enter_context(worker(module, ["server", told, peer.option], environment))
            arguments, pids = ["client", told, peer.option, server.line()], [server.process.pid]
        client = stack.enter_context(worker(module, arguments, environment))
        pids += client.answer()["servers"]
        yield client, pids[0]


@dataclass(slots=True)
class _Side:
    name: str
    worker: Worker
    #: Numbers of the workloads that it does -> their place in its own list.
    places: dict[int, int]
    #: Process id of what holds the tables.
    server: int
    #: Workload -> steps of a turn, and each turn's median, and processor time.
    counts: dict[int, int] = field(default_factory=dict)
    medians: dict[int, list[float]] = field(default_factory=dict)
    cpu_s: dict[int, list[float]] = field(default_factory=dict)

    def warm_up(self, workload: int) -> None:
        self._run(workload, 3)
        self.counts[workload] = int(min(200, max(2, _TURN_S / self._run(workload, 2)[0])))
        self.medians[workload], self.cpu_s[workload] = [], []

    def take_turn(self, workload: int) -> None:
        median, cpu_s = self._run(workload, self.counts[workload])
        self.medians[workload].append(median)
        self.cpu_s[workload].append(cpu_s)

    def _run(self, workload: int, count: int) -> tuple[float, float]:
        before = processes.cpu_s(self.server)
        self.worker.order(count, self.places[workload])
        answer = self.worker.answer()
        cpu_s = processes.cpu_s(self.server) - before + answer["cpu_s"]
        return statistics.median(answer["seconds"]), cpu_s / count


def compare(
    wanted: Sequence[tuple[Workload, bool]], *, turns: int, directory: Path, peers: Sequence[RowPeer]
) -> list[Comparison]:
    """All workloads, turn by turn, and whether the peers do them, too."""
    workloads = [workload for workload, _ in wanted]
    shared = [number for number, (_, has_peers) in enumerate(wanted) if has_peers]
    with contextlib.ExitStack() as stack:
        click.echo(f"filling tables for {len(workloads)} workloads ...", err=True)
        ours, pid = stack.enter_context(_own_side(workloads, directory))
        count, server = len(workloads), pid
        sides = [
            _Side(_OURS, ours, {number: number for number in range(count)}, server),
            _Side(_AHEAD, ours, {number: number + count for number in range(count)}, server),
        ]
        for peer in peers if shared else ():
            click.echo(f"filling {peer.name} ...", err=True)
            try:
                other, pid = stack.enter_context(_peer_side(peer, [workloads[number] for number in shared]))
            except JobFailedError as error:
                click.echo(f"{peer.name} does not start here, so it is not compared: {error}", err=True)
                continue
            places = {number: place for place, number in enumerate(shared)}
            sides.append(_Side(peer.name, other, places, pid))
        _take_turns(sides, len(workloads), turns)
    return [_compared(number, workloads, sides) for number in range(len(workloads))]


def _take_turns(sides: Sequence[_Side], count: int, turns: int) -> None:
    for number in range(count):
        for side in sides:
            if number in side.places:
                side.warm_up(number)
    for turn in range(turns):
        click.echo(f"turn {turn + 1} of {turns} ...", err=True)
        # Who goes first alternates, so that a machine that slows down favours nobody.
        direction = 1 if turn % 2 == 0 else -1
        for number in range(count)[::direction]:
            for side in sides[::direction]:
                if number in side.places:
                    side.take_turn(number)


def _compared(number: int, workloads: Sequence[Workload], sides: Sequence[_Side]) -> Comparison:
    workload, other = workloads[number], _reference(number, workloads)
    measured = []
    for side in sides:
        if number in side.places:
            times = side.medians[number]
            step_s, cpu_s = statistics.median(times), statistics.median(side.cpu_s[number])
            ratios = [_ratio(times, own.medians[number]) for own in sides[:2]]
            by_other = None if other is None or side not in sides[:2] else _ratio(times, side.medians[other])
            measured.append(Measured(side.name, step_s, cpu_s, workload.ids / step_s, ratios[0], ratios[1], by_other))
    return Comparison(workload, str(workload), tuple(measured), "" if other is None else str(workloads[other]))


def _ratio(times: Sequence[float], others: Sequence[float]) -> float:
    return statistics.median(one / other for one, other in zip(times, others, strict=True))


def _reference(number: int, workloads: Sequence[Workload]) -> int | None:
    """Of many tables one of as many rows in all, of many rows the fewest; None: nothing is like it."""
    mine = workloads[number]
    alike = [
        place
        for place, other in enumerate(workloads)
        if (other.ids, other.is_skewed, other.group.dim, other.group.tables)
        == (mine.ids, mine.is_skewed, mine.group.dim, 1)
        and (other.group.rows == mine.group.rows if mine.group.tables > 1 else other.group.rows < mine.group.rows)
    ]
    return min(alike, key=lambda place: workloads[place].group.rows, default=None)


def standard(
    *, is_full: bool, rows: Sequence[int], dims: Sequence[int], ids: Sequence[int]
) -> list[tuple[Workload, bool]]:
    """Workloads, and whether the peers do them, too.

    Else than in full: peers at the fewest rows; many tables, and many rows, with uniform ids and the first dim.
    """
    fewest, most, first_dim = min(rows), max(rows), dims[0]
    found: dict[Workload, bool] = {}
    for dim in dims:
        for count in ids:
            for is_skewed in (False, True):
                found[Workload(Group(1, fewest, dim), count, is_skewed)] = True
                if is_full or (dim == first_dim and not is_skewed):
                    for tables in (26, 100):
                        found[Workload(Group(tables, fewest, dim), count, is_skewed)] = is_full
                    if most > fewest:
                        found[Workload(Group(1, most, dim), count, is_skewed)] = is_full
    return list(found.items())


def whole_table(found: Sequence[Comparison]) -> Table:
    """For people."""
    table = Table(title="pull + push + row-wise Adagrad, 1 trainer, 1 pserver, medians of alternated turns")
    for place, column in enumerate(
        ("workload", "side", "ms a step", "cpu ms", "M ids/s", "flightedl is faster", "asked ahead", "by one table")
    ):
        table.add_column(column, justify="left" if place < 2 else "right")
    for one in found:
        for place, side in enumerate(one.sides):
            growth = "" if side.by_other is None else f"{side.by_other:.2f} x the time"
            if growth and one.workload.group.tables == 1:
                growth += f" of {one.other.split(',')[1].split('x')[0].strip()}"
            table.add_row(
                "" if place else one.name,
                side.side,
                f"{side.step_s * 1e3:.2f}",
                f"{side.cpu_s * 1e3:.2f}",
                f"{side.ids_per_s / 1e6:.2f}",
                "" if side.side in {_OURS, _AHEAD} else f"{side.ratio:.1f} x",
                "" if side.side == _AHEAD else f"{side.ratio_ahead:.1f} x",
                growth,
            )
    return table
