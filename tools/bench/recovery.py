"""``flightedl bench recovery``: how long a job stands still when a process is killed, and what a checkpoint costs.

A real job (etcd, a master, two pservers, trainers that never finish, asynchronous) runs while its processes are killed
with SIGKILL, one at a time, each time when the job is well again:

* pserver: until the process that replaced it has accepted a push; the load of the checkpoint is part of it.
* trainer: until the master has taken its work back, ready for the next one who asks.
* master: until its successor counts a further finished task; and the longest time in which no push was accepted.

Then one shard of the size asked for is copied, written and read in this process.
"""

from __future__ import annotations

import itertools
import os
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import click
import numpy as np

from flightedl.adapters.clock import SystemClock
from flightedl.adapters.storage import open_storage
from flightedl.domain.checkpoints_manifest import Manifest, manifest_name
from flightedl.domain.checkpoints_values import OrderNumber, SnapshotOrder
from flightedl.domain.modes import Async
from flightedl.domain.optimizers import Adam
from flightedl.domain.parameters import ParameterSpec
from flightedl.domain.sharding import ShardPlan, plan_shards
from flightedl.errors import FlightedlError
from flightedl.launch.cluster import LocalCluster, TrainerProgram, explain
from flightedl.launch.policy import Limits
from flightedl.launch.status import JobStatus
from flightedl.pserver.restoring import load_newest
from flightedl.pserver.shard import ShardState
from flightedl.pserver.snapshots import Snapshots
from flightedl.rpc import process_tuning
from flightedl.rpc.client import Connection
from flightedl.rpc.identity import Caller, ServerIdentity
from flightedl.wire.messages import (
    BatchIdentity,
    PserverStatusReply,
    PushHeader,
    StatusReply,
    ViewMemberMessage,
    ViewRequest,
    decode,
)
from flightedl.wire.rows import Rows

_T = TypeVar("_T")

_POLL_S = 0.01
_PATIENCE_S = 90.0
_STANDBY_STARTS_S = 3.0
_SNAPSHOTS = 5
_JOB = "recovery"


class _Watcher:
    """Looks at a running job from outside."""

    def __init__(self, cluster: LocalCluster, status: JobStatus) -> None:
        self._cluster = cluster
        self._status = status
        self._connections: dict[tuple[int, int], Connection] = {}

    def job(self) -> StatusReply | None:
        """None: the master does not answer."""
        try:
            return self._status.read(1.0)
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
    began = time.monotonic()
    cluster.kill("trainer", number % 2)

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
        seen = watcher.job()
        if seen is None or seen.master is None or seen.master.generation == generation:
            return None
        done_before.append(seen.epoch * seen.tasks.total + seen.tasks.done)
        return True if done_before[-1] > done_before[0] else None

    watcher.until(goes_on, "task under the new master")
    return time.monotonic() - began, longest


class _Pusher:
    """Pushes all blocks of a shard one batch after the other, as a trainer's stream does, and times each push."""

    def __init__(self, shard: ShardState, plan: ShardPlan) -> None:
        self._shard = shard
        sizes = [4 * plan.block(number).size for number in shard.numbers]
        self._offsets = [0, *itertools.accumulate(sizes)]
        self._gradient = memoryview(np.full(self._offsets[-1] // 4, 1e-3, np.float32)).cast("B")
        self._stop = threading.Event()
        #: (began at, seconds) of each push of all blocks.
        self.taken: list[tuple[float, float]] = []
        members = [ViewMemberMessage(trainer="t", generation=1, member=1, first_round=0)]
        shard.set_members(ViewRequest(master_generation=1, serial=1, members=members))
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> _Pusher:
        self._thread.start()
        while len(self.taken) < 3 and self._thread.is_alive():
            time.sleep(0.01)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        numbers = self._shard.numbers
        batch = 0
        while not self._stop.is_set():
            identity = BatchIdentity(epoch=0, task=batch >> 10, batch=batch & 1023, batch_count=1024)
            header = PushHeader(
                trainer="t",
                generation=1,
                plan_hash=self._shard.plan_hash,
                member=1,
                identity=identity,
                weight=1.0,
                rows=len(numbers),
                pull=False,
            )
            began = time.monotonic()
            self._shard.push(header, Rows(numbers, [0] * len(numbers), [0] * len(numbers), self._offsets, self._gradient))
            self.taken.append((began, time.monotonic() - began))
            batch += 1

    def stall_s(self, began: float, ended: float) -> float:
        """How much longer than usual the longest push took that overlaps with this time."""
        usual = statistics.median(seconds for at, seconds in self.taken if at + seconds < began)
        during = [seconds for at, seconds in self.taken if at <= ended and at + seconds >= began]
        return max(during) - usual


def _shard_figures(size_bytes: int, say: Callable[[str], None]) -> list[str]:
    """Copy, write and read one shard with Adam's slots, while batches are pushed to it."""
    element_count = size_bytes // 12
    specs = [ParameterSpec("w", (element_count,))]
    plan = plan_shards(specs, 1)
    clock = SystemClock()
    stalls: list[float] = []
    copied: list[float] = []
    with tempfile.TemporaryDirectory(prefix="flightedl-bench-") as directory:
        storage = open_storage(directory)
        shard = ShardState(plan, 0, Adam(lr=1e-3), Async())
        snapshots = Snapshots(shard, storage, _JOB, 0, 1, 1, clock)
        snapshots.prepare()
        file = None
        with _Pusher(shard, plan) as pusher:
            for number in range(1, _SNAPSHOTS + 1):
                say(f"checkpoint {number} of {_SNAPSHOTS} of one shard")
                name = f"c-{number}/shard.arrow"
                began = time.monotonic()
                snapshots.order(SnapshotOrder(OrderNumber(1, number, 1), None, name))
                while (progress := snapshots.progress) is None or progress.state == "waiting":
                    time.sleep(0.001)
                taken = time.monotonic()
                time.sleep(0.2)
                stalls.append(pusher.stall_s(began, taken))
                copied.append(snapshots.copied_s)
                while (progress := snapshots.progress) is None or progress.state not in {"written", "failed"}:
                    time.sleep(0.001)
                file = progress.file
        assert file is not None, "the snapshot failed"
        manifest = Manifest(
            job=_JOB,
            number=_SNAPSHOTS,
            plan_hash=plan.hash,
            pserver_count=1,
            cut_for=1,
            round=None,
            created_s=0.0,
            shards=(file,),
        )
        storage.publish(manifest_name(_SNAPSHOTS), [manifest.encode()])
        say("restoring it")
        began = time.monotonic()
        restored = load_newest(storage, _JOB, specs, plan, 0, shard)
        restore_s = time.monotonic() - began
        assert restored.number == _SNAPSHOTS, restored.skipped
    kept = file.size_bytes / 1e6
    return [
        f"one shard of {kept:,.0f} MB, a third of it values, the rest Adam's slots; {_SNAPSHOTS} checkpoints under pushes",
        f"  training stood still for the copy    at most {max(stalls):6.3f} s, median {statistics.median(stalls):6.3f} s"
        f"  (all copied after {statistics.median(copied):.3f} s)",
        f"  written to local disk, fsynced       {snapshots.written_s:8.3f} s  {kept / snapshots.written_s:8,.0f} MB/s",
        f"  restored, all checksums compared     {restore_s:8.3f} s  {kept / restore_s:8,.0f} MB/s",
    ]


def _line(what: str, seconds: list[float]) -> str:
    if not seconds:
        return f"{what:<52} not measured"
    highest = float(np.quantile(seconds, 0.99))
    return f"{what:<52} p50 {statistics.median(seconds):6.2f} s  p99 {highest:6.2f} s  of {len(seconds)}"


@click.command()
@click.option("--kills", type=click.IntRange(min=0), default=5, show_default=True, help="Of each kind of process.")
@click.option("--lease-ttl-s", type=float, default=2.0, show_default=True, help="Time to live of all leases.")
@click.option("--standby/--no-standby", default=True, show_default=True, help="With one more master and pserver.")
@click.option("--size-mb", type=click.IntRange(min=1), default=1024, show_default=True, help="Of the shard.")
def recovery(kills: int, lease_ttl_s: float, standby: bool, size_mb: int) -> None:
    """Measure kill -9 to working again, and what a checkpoint costs."""
    process_tuning.apply()
    pserver_s: list[float] = []
    trainer_s: list[float] = []
    master_s: list[float] = []
    silent_s: list[float] = []
    with tempfile.TemporaryDirectory(prefix="flightedl-bench-") as directory:
        arguments = ("--mode", "async", "--epochs", "1000", "--records", "20000", "--per-task", "100")
        program = TrainerProgram(
            "flightedl.examples.ledger", (*arguments, "--pause", "0.01", "--data", f"{directory}/data"), 2
        )
        limits = Limits(long_run_s=1.0, restarts_limit=10_000)
        cluster = LocalCluster(
            2,
            job=_JOB,
            checkpoint=str(Path(directory) / "checkpoints"),
            trainers=program,
            standby=standby,
            limits=limits,
            lease_ttl_s=lease_ttl_s,
            checkpoint_every_s=2.0,
        )
        with cluster, cluster.status() as status:
            watcher = _Watcher(cluster, status)
            for number in range(kills):
                watcher.settle()
                pserver_s.append(_kill_pserver(watcher, number))
                watcher.settle()
                trainer_s.append(_kill_trainer(cluster, watcher, number))
                watcher.settle()
                seconds, silent = _kill_master(watcher)
                master_s.append(seconds)
                silent_s.append(silent)
            watcher.close()
    kind = "with" if standby else "without"
    click.echo(f"leases of {lease_ttl_s:g} s, {kind} standby processes; SIGKILL, which the launcher here sees")
    click.echo(_line("pserver killed -> its successor accepts a push", pserver_s))
    click.echo(_line("trainer killed -> its work is back in the queue", trainer_s))
    click.echo(_line("master killed -> the next task is done", master_s))
    click.echo(_line("  longest time without an accepted push meanwhile", silent_s))
    for line in _shard_figures(size_mb << 20, say):
        click.echo(line)
