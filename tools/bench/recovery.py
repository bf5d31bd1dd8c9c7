"""``flightedl bench recovery``: how long a job stops when a process is killed or frozen.

In a real job in async mode (etcd, masters, pservers, and trainers with endless data and tasks of half a second), one
process at a time is killed with SIGKILL or frozen with SIGSTOP, each time after the job has recovered from the previous
fault. These times are measured:

* pserver: until its replacement has loaded the checkpoint and accepted a push
* trainer: until the master has returned its tasks to the queue
* master: until its successor reports another finished task, and the longest time between two accepted pushes of a
  trainer until then

The launcher notices when one of its child processes dies, and ends the process's leases immediately. A cluster may have
no launcher that does this. Trainers and masters are therefore also killed while the launcher does not end leases. The
master then notices the death of a trainer by its closed connections, but that of a master shows only when its lease
expires. A frozen process is also noticed only then, and leaves calls unanswered.

After that, periods of a minute with one kill are compared with periods without kills, by the number of finished tasks.
"""

from __future__ import annotations

import os
import signal
import statistics
import struct
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import click
import numpy as np

import flightedl as fe
from flightedl.errors import FlightedlError
from flightedl.examples.ledger import PARAMETERS, write_records
from flightedl.examples.prepared import prepared_directory
from flightedl.launch.cluster import LocalCluster
from flightedl.launch.policy import Limits
from flightedl.launch.programs import TrainerProgram
from flightedl.launch.status import JobStatus
from flightedl.launch.supervisor import explain
from flightedl.messages.base import decode
from flightedl.messages.status import PserverStatusReply, StatusReply
from flightedl.process import tuning as process_tuning
from flightedl.rpc.client import Connection
from flightedl.rpc.identity import Caller, ServerIdentity

from ..options import Number
from .workers import program_of

_T = TypeVar("_T")

_QUICK_S = 0.2
_POLL_S = 0.01
_PATIENCE_S = 90.0
_STANDBY_STARTS_S = 3.0
_JOB = "recovery"
#: Directory of the files with the times of accepted pushes.
_INSTANTS = "instants"
_INSTANT = struct.Struct("d")
_RECORDS, _RECORDS_PER_TASK = 20_000, 20
#: Simulated computing time of a batch (one record), so that a task of 20 batches takes about half a second.
_PAUSE_S = 0.02


@dataclass(frozen=True, slots=True)
class _Way:
    name: str
    signal: signal.Signals = signal.SIGKILL
    #: True if the launcher ends the leases of dead processes.
    revokes_leases: bool = True


_KILLED = _Way("killed")
_LEFT = _Way("killed, lease left alone", revokes_leases=False)
_FROZEN = _Way("frozen", signal.SIGSTOP)
_WHAT_ENDS_IT = {
    "pserver": "its successor accepts a push",
    "trainer": "its tasks are back in the queue",
    "master": "the next task is done",
}
_ROLES = tuple(_WHAT_ENDS_IT)
_MEASURED = [
    ("pserver", _KILLED),
    ("pserver", _FROZEN),
    ("trainer", _KILLED),
    ("trainer", _LEFT),
    ("master", _KILLED),
    ("master", _LEFT),
    ("master", _FROZEN),
]


def train(directory: str) -> None:
    """Train endlessly, and record the time at which each push was accepted.

    A push is accepted when every pserver has acknowledged it, which in async mode is when ``model.step`` returns. Times
    are taken from the machine's monotonic clock. Each trainer process writes its own file.
    """
    kind = f"ledger-{_RECORDS}-{_RECORDS_PER_TASK}"
    data = prepared_directory(
        Path(directory) / "data", kind, lambda folder: write_records(folder, _RECORDS, _RECORDS_PER_TASK), print
    )
    zeros = np.zeros(_RECORDS, np.float32)
    with fe.connect() as job:
        batches = job.dataset(str(data / "*.parquet"), batch_size=1, epochs=None, shuffle=True, seed=1)
        model = job.parameters(dict.fromkeys(PARAMETERS, zeros), optimizer=fe.SGD(lr=1.0), mode=fe.Async())
        with (Path(directory) / _INSTANTS / job.trainer).open("ab", buffering=0) as file:
            for batch in batches:
                gradient = zeros.copy()
                gradient[batch["k"].to_numpy()] = -1
                time.sleep(_PAUSE_S)
                model.step(dict.fromkeys(PARAMETERS, gradient))
                file.write(_INSTANT.pack(time.monotonic()))


def accepted_pushes(instants: Path) -> dict[str, list[float]]:
    """Return the times of accepted pushes by trainer, omitting trainers without accepted pushes."""
    found: dict[str, list[float]] = {}
    for path in instants.iterdir():
        data = path.read_bytes()
        size = len(data) - len(data) % _INSTANT.size
        if size:
            found[path.name] = [instant for (instant,) in _INSTANT.iter_unpack(data[:size])]
    return found


def longest_pause(pushes: list[float], began: float, ended: float) -> float:
    """Return the longest time between two accepted pushes that overlaps the period from ``began`` to ``ended``.

    Args:
        pushes: Ascending times of the pushes, the first of them before ``began``. The time after the last also counts.
        began: Start of the period.
        ended: End of the period.
    """
    edges = [*pushes, max(ended, pushes[-1])]
    return max(after - before for before, after in pairwise(edges) if after > began and before < ended)


class Watcher:
    """Observer of a running job, which also kills and freezes the job's processes."""

    def __init__(self, cluster: LocalCluster, status: JobStatus, instants: Path, stack: ExitStack) -> None:
        self._cluster = cluster
        self._status = status
        self._instants = instants
        self._stack = stack
        self._connections: dict[tuple[int, int], Connection] = {}

    def job(self, timeout_s: float = 1.0) -> StatusReply | None:
        """Return the job's status, or None if the master does not answer."""
        try:
            return self._status.read(timeout_s)
        except FlightedlError:
            return None

    def _seen_job(self) -> StatusReply:
        return self._until(self.job, "the master")

    def finished(self) -> int:
        """Return the number of finished tasks, including tasks of earlier epochs."""
        return _finished(self._seen_job())

    def _accepted(self) -> dict[int, tuple[int, int]]:
        """Return the generation and the number of accepted rows of each pserver that answers, by index."""
        job = self.job()
        found: dict[int, tuple[int, int]] = {}
        for each in [] if job is None else job.pservers:
            key = (each.index, each.generation)
            if key not in self._connections:
                identity = ServerIdentity(self._cluster.job, "pserver", *key)
                connection = Connection(each.address, expected=identity, caller=Caller("tool", "bench"))
                self._connections[key] = self._stack.enter_context(connection)
            try:
                reply = decode(self._connections[key].action("status", b"", timeout_s=0.5), PserverStatusReply)
            except FlightedlError:
                continue
            if reply.state == "serving":
                found[each.index] = (each.generation, reply.rows["accepted"])
        return found

    def _until(self, look: Callable[[], _T | None], what: str) -> _T:
        """Repeat a call until it returns an answer other than None. Raises TimeoutError if this takes too long."""
        deadline = time.monotonic() + _PATIENCE_S
        while (found := look()) is None:
            if (outcome := self._cluster.outcome()) is not None:
                raise TimeoutError(f"the job ended while it was watched: {explain(outcome)}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"no {what} within {_PATIENCE_S:.0f} s")
            time.sleep(_POLL_S)
        return found

    def settle(self) -> None:
        """Wait until all processes are working, and standby processes have had time to start."""
        time.sleep(_STANDBY_STARTS_S)

        def works() -> bool | None:
            before = self._accepted()
            time.sleep(0.3)
            after = self._accepted()
            is_working = len(after) == 2 and all(after[i][1] > before.get(i, (0, 1 << 60))[1] for i in after)
            return is_working or None

        self._until(works, "job that works")

    @contextmanager
    def _taken_out(self, pid: int, way: _Way) -> Iterator[float]:
        """Kill or freeze a process. Yields the time. A frozen process is resumed when the block ends."""
        self._cluster.revokes_leases = way.revokes_leases
        began = time.monotonic()
        os.kill(pid, way.signal)
        try:
            yield began
        finally:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
            self._cluster.revokes_leases = True

    def kill(self, role: str, index: int) -> None:
        if role == "trainer":
            self._cluster.kill("trainer", index)
            return
        job = self._seen_job()
        master = 0 if job.master is None else job.master.pid
        os.kill(master if role == "master" else self._pserver(index)[0], signal.SIGKILL)

    def _pserver(self, index: int) -> tuple[int, int]:
        def found() -> tuple[int, int] | None:
            job = self.job()
            return (
                None if job is None else next(((p.pid, p.generation) for p in job.pservers if p.index == index), None)
            )

        return self._until(found, f"pserver {index}")

    def without_pserver(self, index: int, way: _Way) -> float:
        """Return the seconds until the successor of a pserver has accepted a push."""
        pid, before = self._pserver(index)

        def is_back() -> bool | None:
            generation, rows = self._accepted().get(index, (0, 0))
            return (generation > before and rows > 0) or None

        with self._taken_out(pid, way) as began:
            self._until(is_back, "push to the new pserver")
            return time.monotonic() - began

    def without_trainer(self, index: int, way: _Way) -> float:
        """Return the seconds until the tasks of a trainer are back in the queue."""
        pid = self._cluster.pid("trainer", index)
        assert pid is not None, "the trainer is not running"

        def is_there() -> bool | None:
            job = self.job()
            return (job is not None and any(f"-{pid}-" in t.trainer and t.holding for t in job.trainers)) or None

        def is_gone() -> bool | None:
            job = self.job()
            return (job is not None and not any(f"-{pid}-" in t.trainer for t in job.trainers)) or None

        self._until(is_there, "trainer that works")
        with self._taken_out(pid, way) as began:
            self._until(is_gone, "return of a trainer's tasks")
            return time.monotonic() - began

    def without_master(self, way: _Way) -> tuple[float, float]:
        """Return the seconds until the next task is done, and the longest pause of a trainer up to then."""
        job = self._seen_job()
        assert job.master is not None, "the status names no master"
        generation = job.master.generation
        done_before: list[int] = []

        def goes_on() -> bool | None:
            seen = self.job(_QUICK_S)
            if seen is None or seen.master is None or seen.master.generation == generation:
                return None
            done_before.append(_finished(seen))
            return done_before[-1] > done_before[0] or None

        pushed = accepted_pushes(self._instants)
        working = {trainer for trainer, pushes in pushed.items() if time.monotonic() - pushes[-1] < 1.0}
        with self._taken_out(job.master.pid, way) as began:
            self._until(goes_on, "task under the new master")
            ended = time.monotonic()

            def all_pushed() -> dict[str, list[float]] | None:
                found = {each: pushes for each, pushes in accepted_pushes(self._instants).items() if each in working}
                return found if all(pushes[-1] > ended for pushes in found.values()) else None

            found = self._until(all_pushed, "push of each trainer")
            return ended - began, max(longest_pause(pushes, began, ended) for pushes in found.values())


def _finished(job: StatusReply) -> int:
    return job.epoch * job.tasks.total + job.tasks.done


@dataclass
class _Figures:
    seconds: dict[tuple[str, _Way], list[float]] = field(default_factory=lambda: {each: [] for each in _MEASURED})
    #: For each replacement of a master: longest time between two accepted pushes of a trainer.
    paused: list[float] = field(default_factory=list)

    def measure(self, watcher: Watcher, times: int, roles: Sequence[str], say: Callable[[str], None]) -> None:
        """Kill and freeze each kind of process ``times`` times. Let the job recover after each kill or freeze."""
        for number in range(times):
            for role, way in [each for each in _MEASURED if each[0] in roles]:
                watcher.settle()
                pause = ""
                if role == "pserver":
                    seconds = watcher.without_pserver(number % 2, way)
                elif role == "trainer":
                    seconds = watcher.without_trainer(number % 2, way)
                else:
                    seconds, paused = watcher.without_master(way)
                    self.paused.append(paused)
                    pause = f", pushes paused {paused:.2f} s"
                self.seconds[role, way].append(seconds)
                say(f"{role} {number + 1} of {times}, {way.name}: {seconds:.2f} s{pause}")

    def lines(self) -> Iterator[str]:
        for (role, way), seconds in self.seconds.items():
            what = f"{role} {way.name} -> {_WHAT_ENDS_IT[role]}"
            if seconds:
                highest = float(np.quantile(seconds, 0.99))
                text = f"p50 {statistics.median(seconds):6.2f} s  p99 {highest:6.2f} s  of {len(seconds)}"
            else:
                text = "not measured"
            yield f"{what:<56} {text}"
        if self.paused:
            often = f"of any trainer, {len(self.paused)} times, tasks of about 0.5 s"
            yield f"pushes paused at most {max(self.paused):.2f} s while there was no master ({often})"


def _goodput(watcher: Watcher, minutes: int, window_s: float, say: Callable[[str], None]) -> str:
    """Compare the numbers of tasks finished in periods with one kill and in periods without kills, in turn."""
    done = {False: 0, True: 0}
    for number in range(2 * minutes):
        has_kill = number % 2 == 1
        watcher.settle()
        began, before = time.monotonic(), watcher.finished()
        if has_kill:
            time.sleep(window_s / 4)
            watcher.kill(("pserver", "trainer", "master")[number // 2 % 3], number // 2 % 2)
        time.sleep(max(0.0, began + window_s - time.monotonic()))
        count = watcher.finished() - before
        done[has_kill] += count
        say(f"window {number + 1} of {2 * minutes}: {count} tasks{', one kill' if has_kill else ''}")
    ratio = done[True] / max(1, done[False])
    what = f"one kill each {window_s:.0f} s, of a pserver, a trainer, a master by turns"
    return f"goodput with {what}: {100 * ratio:.0f} % ({done[True]} against {done[False]} tasks)"


@click.command()
@click.option("--kills", type=click.IntRange(min=0), default=5, show_default=True, help="Kills per kind of process.")
@click.option(
    "--role", "roles", type=click.Choice(_ROLES), multiple=True, default=_ROLES, help="Only this role; may be repeated."
)
@click.option("--lease-ttl-s", type=Number(min=1), default=2.0, show_default=True, help="Time to live of all leases.")
@click.option("--standby/--no-standby", default=True, show_default=True, help="Run a standby master and pserver.")
@click.option("--minutes", type=click.IntRange(min=0), default=3, show_default=True, help="Windows with a kill.")
@click.option("--window-s", type=Number(min=1), default=60.0, show_default=True, help="Length of a window, seconds.")
def recovery(
    *, kills: int, roles: tuple[str, ...], lease_ttl_s: float, standby: bool, minutes: int, window_s: float
) -> None:
    """Measure the time from kill -9 until the job works again."""
    process_tuning.apply()
    began = time.monotonic()

    def say(text: str) -> None:
        click.echo(f"[{time.monotonic() - began:5.0f} s] {text}", err=True)

    figures = _Figures()
    lines: list[str] = []
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="flightedl-bench-")))
        (directory / _INSTANTS).mkdir()
        module, *given = program_of(train, str(directory))
        cluster = LocalCluster(
            2,
            job=_JOB,
            checkpoint=str(directory / "checkpoints"),
            trainers=TrainerProgram(module, tuple(given), 2),
            standby=standby,
            limits=Limits(long_run_s=1.0, restarts_limit=10_000),
            lease_ttl_s=lease_ttl_s,
            checkpoint_every_s=2.0,
        )
        status = stack.enter_context(stack.enter_context(cluster).status())
        watcher = Watcher(cluster, status, directory / _INSTANTS, stack)
        figures.measure(watcher, kills, roles, say)
        if minutes:
            lines.append(_goodput(watcher, minutes, window_s, say))
    kind = "with" if standby else "without"
    click.echo(f"leases of {lease_ttl_s:g} s, {kind} standby processes")
    for line in [*figures.lines(), *lines]:
        click.echo(line)
