"""``flightedl bench recovery``: how long a job stands still when a process is killed, and what a checkpoint costs.

A real job (etcd, masters, pservers, trainers that never finish, asynchronous) runs while its processes are killed with
SIGKILL, one at a time, each time when the job is well again:

* pserver: until the process that replaced it has accepted a push; the load of the checkpoint is part of it.
* trainer: until the master has taken its work back, ready for the next one who asks.
* master: until its successor counts a further finished task; and the longest time in which no push was accepted.

The launcher sees its children die, and ends their leases at once. On a cluster nobody may: so trainers and masters are
also killed while the launcher leaves the leases of the dead alone, and only their end tells that they are gone.

Then the tasks that are finished in some minutes with one kill each are compared with those of as many minutes without,
deposed processes try to write, and one shard is copied, written and read in this process.
"""

from __future__ import annotations

import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import click
import numpy as np

from flightedl.errors import FlightedlError
from flightedl.launch.cluster import LocalCluster, TrainerProgram, explain
from flightedl.launch.policy import Limits
from flightedl.launch.status import JobStatus
from flightedl.rpc import process_tuning
from flightedl.rpc.client import Connection
from flightedl.rpc.identity import Caller, ServerIdentity
from flightedl.wire.messages import PserverStatusReply, StatusReply, decode

from .shard import shard_figures
from .zombies import attempts

_T = TypeVar("_T")

_POLL_S = 0.01
_PATIENCE_S = 90.0
_STANDBY_STARTS_S = 3.0
_QUICK_S = 0.2
_ZOMBIES = 1000
_JOB = "recovery"


class _Watcher:
    """Looks at a running job from outside."""

    def __init__(self, cluster: LocalCluster, status: JobStatus) -> None:
        self._cluster = cluster
        self._status = status
        self._connections: dict[tuple[int, int], Connection] = {}

    def job(self, timeout_s: float = 1.0) -> StatusReply | None:
        """None: the master does not answer."""
        try:
            return self._status.read(timeout_s)
        except FlightedlError:
            return None

    def accepted(self) -> dict[int, tuple[int, int]]:
        """Index -> (generation, rows accepted) of the pservers that answer."""
        job = self.job()
        return {} if job is None else self.accepted_at({p.index: (p.address, p.generation) for p in job.pservers})

    def accepted_at(self, places: dict[int, tuple[str, int]]) -> dict[int, tuple[int, int]]:
        """The same, asked of the pservers directly."""
        found: dict[int, tuple[int, int]] = {}
        for index, (address, generation) in places.items():
            key = (index, generation)
            if key not in self._connections:
                identity = ServerIdentity(_JOB, "pserver", index, generation)
                self._connections[key] = Connection(address, expected=identity, caller=Caller("tool", "bench"))
            try:
                reply = decode(self._connections[key].action("status", b"", timeout_s=0.5), PserverStatusReply)
            except FlightedlError:
                continue
            if reply.state == "serving":
                found[index] = (generation, reply.rows_accepted)
        return found

    def places(self) -> dict[int, tuple[str, int]]:
        """Index -> (address, generation) of all pservers."""
        job = self.until(self.job, "the master")
        return {p.index: (p.address, p.generation) for p in job.pservers}

    def pid_of_pserver(self, index: int) -> int:
        """The process that holds an index."""

        def found() -> int | None:
            job = self.job()
            return None if job is None else next((p.pid for p in job.pservers if p.index == index), None)

        return self.until(found, f"pserver {index}")

    def until(self, look: Callable[[], _T | None], what: str) -> _T:
        """The first answer that is not None.

        Raises:
            TimeoutError: there is none in time.
        """
        deadline = time.monotonic() + _PATIENCE_S
        while (found := look()) is None:
            if (outcome := self._cluster.outcome()) is not None:
                raise TimeoutError(f"the job ended while it was watched: {explain(outcome)}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"no {what} within {_PATIENCE_S:.0f} s")
            time.sleep(_POLL_S)
        return found

    def settle(self) -> None:
        """Return when everybody works, and whoever stands by has had time to start."""
        time.sleep(_STANDBY_STARTS_S)

        def works() -> bool | None:
            before = self.accepted()
            time.sleep(0.3)
            after = self.accepted()
            return (
                True if len(after) == 2 and all(after[i][1] > before.get(i, (0, 1 << 60))[1] for i in after) else None
            )

        self.until(works, "job that works")

    def close(self) -> None:
        """End all connections."""
        for connection in self._connections.values():
            connection.close()


def _kill_pserver(watcher: _Watcher, number: int) -> float:
    before = {index: generation for index, (_, generation) in watcher.places().items()}
    pid = watcher.pid_of_pserver(number % 2)
    began = time.monotonic()
    os.kill(pid, signal.SIGKILL)

    def is_back() -> bool | None:
        new = {i: g for i, g in watcher.accepted().items() if g[0] > before[i]}
        return True if any(rows > 0 for _, rows in new.values()) else None

    watcher.until(is_back, "push to the new pserver")
    return time.monotonic() - began


def _kill_trainer(cluster: LocalCluster, watcher: _Watcher, number: int) -> float:
    pid = cluster.pid("trainer", number % 2)
    assert pid is not None, "a trainer that is not there"

    def is_there() -> bool | None:
        job = watcher.job()
        return True if job is not None and any(f"-{pid}-" in t.trainer and t.holding for t in job.trainers) else None

    watcher.until(is_there, "trainer that works")
    began = time.monotonic()
    os.kill(pid, signal.SIGKILL)

    def is_gone() -> bool | None:
        job = watcher.job()
        return None if job is None or any(f"-{pid}-" in t.trainer for t in job.trainers) else True

    watcher.until(is_gone, "taking back of a trainer's work")
    return time.monotonic() - began


def _kill_master(watcher: _Watcher) -> tuple[float, float]:
    job = watcher.until(watcher.job, "the master")
    places = watcher.places()
    assert job.master is not None, "a master that does not know itself"
    generation = job.master.generation
    done_before: list[int] = []
    rows, since, longest = -1, time.monotonic(), 0.0
    began = time.monotonic()
    os.kill(job.master.pid, signal.SIGKILL)

    def goes_on() -> bool | None:
        nonlocal rows, since, longest
        now_rows = sum(count for _, count in watcher.accepted_at(places).values())
        if now_rows != rows:
            rows, since = now_rows, time.monotonic()
        longest = max(longest, time.monotonic() - since)
        seen = watcher.job(_QUICK_S)
        if seen is None or seen.master is None or seen.master.generation == generation:
            return None
        done_before.append(seen.epoch * seen.tasks.total + seen.tasks.done)
        return True if done_before[-1] > done_before[0] else None

    watcher.until(goes_on, "task under the new master")
    return time.monotonic() - began, longest


def _line(what: str, seconds: list[float]) -> str:
    if not seconds:
        return f"{what:<52} not measured"
    highest = float(np.quantile(seconds, 0.99))
    return f"{what:<52} p50 {statistics.median(seconds):6.2f} s  p99 {highest:6.2f} s  of {len(seconds)}"


#: Whether the launcher ends the leases of the dead, and how that is called.
_WAYS = {True: "killed", False: "killed, lease left alone"}


@dataclass
class _Figures:
    """Seconds of each kill."""

    pserver: list[float] = field(default_factory=list)
    trainer: dict[bool, list[float]] = field(default_factory=lambda: {buries: [] for buries in _WAYS})
    master: dict[bool, list[float]] = field(default_factory=lambda: {buries: [] for buries in _WAYS})
    silent: list[float] = field(default_factory=list)

    def measure(self, cluster: LocalCluster, watcher: _Watcher, kills: int, say: Callable[[str], None]) -> None:
        """Kill each kind so often, each time when all is well."""
        for number in range(kills):
            watcher.settle()
            self.pserver.append(_kill_pserver(watcher, number))
            say(f"pserver {number + 1} of {kills}: {self.pserver[-1]:.2f} s")
            for buries, told in _WAYS.items():
                watcher.settle()
                cluster.buries = buries
                self.trainer[buries].append(_kill_trainer(cluster, watcher, number))
                cluster.buries = True
                say(f"trainer {number + 1} of {kills}, {told}: {self.trainer[buries][-1]:.2f} s")
                watcher.settle()
                cluster.buries = buries
                seconds, silent = _kill_master(watcher)
                cluster.buries = True
                self.master[buries].append(seconds)
                self.silent.append(silent)
                say(f"master {number + 1} of {kills}, {told}: {seconds:.2f} s")

    def lines(self) -> Iterator[str]:
        """For people."""
        yield _line("pserver killed -> its successor accepts a push", self.pserver)
        for buries, told in _WAYS.items():
            yield _line(f"trainer {told} -> its work is back", self.trainer[buries])
            yield _line(f"master {told} -> the next task is done", self.master[buries])
        yield _line("  longest time without an accepted push meanwhile", self.silent)


def _goodput(
    cluster: LocalCluster, watcher: _Watcher, minutes: int, window_s: float, say: Callable[[str], None]
) -> str:
    """Finished tasks in windows with one kill each, against windows without, by turns."""

    def finished() -> int:
        job = watcher.until(watcher.job, "the master")
        return job.epoch * job.tasks.total + job.tasks.done

    def kill(number: int) -> None:
        role = ("pserver", "trainer", "master")[number % 3]
        if role == "pserver":
            os.kill(watcher.pid_of_pserver(number % 2), signal.SIGKILL)
        elif role == "trainer":
            cluster.kill("trainer", number % 2)
        else:
            job = watcher.until(watcher.job, "the master")
            os.kill(0 if job.master is None else job.master.pid, signal.SIGKILL)

    done = {False: 0, True: 0}
    for number in range(2 * minutes):
        has_kill = number % 2 == 1
        watcher.settle()
        began, before = time.monotonic(), finished()
        if has_kill:
            time.sleep(window_s / 4)
            kill(number // 2)
        time.sleep(max(0.0, began + window_s - time.monotonic()))
        count = finished() - before
        done[has_kill] += count
        say(f"window {number + 1} of {2 * minutes}: {count} tasks{', one kill' if has_kill else ''}")
    ratio = done[True] / max(1, done[False])
    what = f"one kill each {window_s:.0f} s, of a pserver, a trainer, a master by turns"
    return f"goodput with {what}: {100 * ratio:.0f} % ({done[True]} against {done[False]} tasks)"


@click.command()
@click.option("--kills", type=click.IntRange(min=0), default=5, show_default=True, help="Of each kind of process.")
@click.option("--lease-ttl-s", type=float, default=2.0, show_default=True, help="Time to live of all leases.")
@click.option("--standby/--no-standby", default=True, show_default=True, help="With one more master and pserver.")
@click.option("--size-mb", type=click.IntRange(min=1), default=1024, show_default=True, help="Of the shard.")
@click.option("--minutes", type=click.IntRange(min=0), default=3, show_default=True, help="Of goodput under kills.")
@click.option("--window-s", type=float, default=60.0, show_default=True, help="Seconds of such a minute.")
def recovery(kills: int, lease_ttl_s: float, standby: bool, size_mb: int, minutes: int, window_s: float) -> None:
    """Measure kill -9 to working again, and what a checkpoint costs."""
    process_tuning.apply()
    began = time.monotonic()

    def say(text: str) -> None:
        click.echo(f"[{time.monotonic() - began:5.0f} s] {text}", err=True)

    figures = _Figures()
    lines: list[str] = []
    with (
        tempfile.TemporaryDirectory(prefix="flightedl-bench-") as directory,
        _cluster(directory, lease_ttl_s, standby=standby) as cluster,
        cluster.status() as status,
    ):
        watcher = _Watcher(cluster, status)
        figures.measure(cluster, watcher, kills, say)
        if minutes:
            lines.append(_goodput(cluster, watcher, minutes, window_s, say))
        watcher.settle()
        say("deposed processes try to write")
        tried, accepted = attempts(cluster.etcd_address, _JOB, status, _ZOMBIES)
        lines.append(f"writes of deposed processes accepted: {accepted.total()} of {tried.total()}")
        watcher.close()
    kind = "with" if standby else "without"
    click.echo(f"leases of {lease_ttl_s:g} s, {kind} standby processes")
    for line in [*figures.lines(), *lines]:
        click.echo(line)
    for line in shard_figures(size_mb << 20, say):
        click.echo(line)


def _cluster(directory: str, lease_ttl_s: float, *, standby: bool) -> LocalCluster:
    arguments = ("--mode", "async", "--epochs", "1000", "--records", "20000", "--per-task", "100")
    program = TrainerProgram(
        "flightedl.examples.ledger", (*arguments, "--pause", "0.01", "--data", f"{directory}/data"), 2
    )
    return LocalCluster(
        2,
        job=_JOB,
        checkpoint=str(Path(directory) / "checkpoints"),
        trainers=program,
        standby=standby,
        limits=Limits(long_run_s=1.0, restarts_limit=10_000),
        lease_ttl_s=lease_ttl_s,
        checkpoint_every_s=2.0,
    )
