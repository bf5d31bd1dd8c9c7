"""``flightedl bench recovery``: how long a job stands still when a process is killed or frozen.

A real job (etcd, masters, pservers, trainers that never finish, asynchronous, tasks of half a second) runs while its
processes are killed with SIGKILL or frozen with SIGSTOP, one at a time, each time when the job is well again:

* pserver: until the process that replaced it has accepted a push; the load of the checkpoint is part of it.
* trainer: until the master has taken its work back, ready for the next one who asks.
* master: until its successor counts a further finished task; and the longest time from one accepted push of a trainer
  to its next meanwhile.

The launcher sees its children die, and ends their leases at once. On a cluster nobody may: so trainers and masters are
also killed while the launcher leaves the leases of the dead alone, and only their end tells that they are gone. It is
the same for a process that is frozen, which also holds the calls that are under way to it.

Then the tasks finished in some minutes with one kill each are compared with those of as many minutes without.
"""

from __future__ import annotations

import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import click
import numpy as np

from flightedl.launch.cluster import LocalCluster
from flightedl.launch.policy import Limits
from flightedl.launch.programs import TrainerProgram
from flightedl.process import tuning as process_tuning

from ..options import Number
from .steady import accepted_pushes, longest_pause
from .watcher import Watcher

_QUICK_S = 0.2
_JOB = "recovery"
#: Directory in which the trainers write down when their pushes were accepted.
_INSTANTS = "instants"


@dataclass(frozen=True, slots=True)
class _Way:
    """How a process is taken out of its job."""

    told: str
    signal: signal.Signals = signal.SIGKILL
    #: Whether the launcher ends the leases of the dead.
    revokes_leases: bool = True


_KILLED = _Way("killed")
_LEFT = _Way("killed, lease left alone", revokes_leases=False)
_FROZEN = _Way("frozen", signal.SIGSTOP)


@contextmanager
def _taken_out(cluster: LocalCluster, pid: int, way: _Way) -> Iterator[float]:
    """Take a process out, and tell when; one that was frozen wakes at the end, and finds itself replaced."""
    cluster.revokes_leases = way.revokes_leases
    began = time.monotonic()
    os.kill(pid, way.signal)
    try:
        yield began
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
        cluster.revokes_leases = True


def _without_pserver(cluster: LocalCluster, watcher: Watcher, number: int, way: _Way) -> float:
    before = {index: generation for index, (_, generation) in watcher.places().items()}
    index = number % 2

    def is_back() -> bool | None:
        new = watcher.accepted().get(index, (0, 0))
        return True if new[0] > before[index] and new[1] > 0 else None

    with _taken_out(cluster, watcher.pid_of_pserver(index), way) as began:
        watcher.until(is_back, "push to the new pserver")
        return time.monotonic() - began


def _without_trainer(cluster: LocalCluster, watcher: Watcher, number: int, way: _Way) -> float:
    pid = cluster.pid("trainer", number % 2)
    assert pid is not None, "a trainer that is not there"

    def is_there() -> bool | None:
        job = watcher.job()
        return True if job is not None and any(f"-{pid}-" in t.trainer and t.holding for t in job.trainers) else None

    def is_gone() -> bool | None:
        job = watcher.job()
        return None if job is None or any(f"-{pid}-" in t.trainer for t in job.trainers) else True

    watcher.until(is_there, "trainer that works")
    with _taken_out(cluster, pid, way) as began:
        watcher.until(is_gone, "taking back of a trainer's work")
        return time.monotonic() - began


def _without_master(cluster: LocalCluster, watcher: Watcher, way: _Way, instants: Path) -> tuple[float, float]:
    """Seconds until the next task is done, and the longest that any trainer's pushes paused meanwhile."""
    job = watcher.until(watcher.job, "the master")
    assert job.master is not None, "a master that does not know itself"
    generation = job.master.generation
    done_before: list[int] = []

    def goes_on() -> bool | None:
        seen = watcher.job(_QUICK_S)
        if seen is None or seen.master is None or seen.master.generation == generation:
            return None
        done_before.append(seen.epoch * seen.tasks.total + seen.tasks.done)
        return True if done_before[-1] > done_before[0] else None

    working = {trainer for trainer, pushes in accepted_pushes(instants).items() if time.monotonic() - pushes[-1] < 1.0}
    with _taken_out(cluster, job.master.pid, way) as began:
        watcher.until(goes_on, "task under the new master")
        ended = time.monotonic()

        def all_pushed() -> dict[str, list[float]] | None:
            found = {trainer: pushes for trainer, pushes in accepted_pushes(instants).items() if trainer in working}
            return found if all(pushes[-1] > ended for pushes in found.values()) else None

        found = watcher.until(all_pushed, "push of each trainer")
        return ended - began, max(longest_pause(pushes, began, ended) for pushes in found.values())


def _line(what: str, seconds: list[float]) -> str:
    if not seconds:
        return f"{what:<56} not measured"
    highest = float(np.quantile(seconds, 0.99))
    return f"{what:<56} p50 {statistics.median(seconds):6.2f} s  p99 {highest:6.2f} s  of {len(seconds)}"


_WHAT_ENDS_IT = {
    "pserver": "its successor accepts a push",
    "trainer": "its work is back",
    "master": "the next task is done",
}
_MEASURED = [
    ("pserver", _KILLED),
    ("pserver", _FROZEN),
    ("trainer", _KILLED),
    ("trainer", _LEFT),
    ("master", _KILLED),
    ("master", _LEFT),
    ("master", _FROZEN),
]


@dataclass
class _Figures:
    """Seconds of each time that a process was taken out."""

    seconds: dict[tuple[str, _Way], list[float]] = field(default_factory=lambda: {each: [] for each in _MEASURED})
    #: The longest time from one accepted push of a trainer to its next, each time that there was no master.
    paused: list[float] = field(default_factory=list)

    def measure(
        self,
        cluster: LocalCluster,
        watcher: Watcher,
        times: int,
        roles: Sequence[str],
        instants: Path,
        say: Callable[[str], None],
    ) -> None:
        """Take out each kind in each way so often, each time when all is well."""
        for number in range(times):
            for role, way in [each for each in _MEASURED if each[0] in roles]:
                watcher.settle()
                if role == "pserver":
                    seconds = _without_pserver(cluster, watcher, number, way)
                elif role == "trainer":
                    seconds = _without_trainer(cluster, watcher, number, way)
                else:
                    seconds, paused = _without_master(cluster, watcher, way, instants)
                    self.paused.append(paused)
                self.seconds[role, way].append(seconds)
                pause = f", pushes paused {self.paused[-1]:.2f} s" if role == "master" else ""
                say(f"{role} {number + 1} of {times}, {way.told}: {seconds:.2f} s{pause}")

    def lines(self) -> Iterator[str]:
        """For people."""
        for (role, way), seconds in self.seconds.items():
            yield _line(f"{role} {way.told} -> {_WHAT_ENDS_IT[role]}", seconds)
        if self.paused:
            often = f"of any trainer, {len(self.paused)} times, tasks of about 0.5 s"
            yield f"pushes paused at most {max(self.paused):.2f} s while there was no master ({often})"


def _goodput(cluster: LocalCluster, watcher: Watcher, minutes: int, window_s: float, say: Callable[[str], None]) -> str:
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


_ROLES = tuple(_WHAT_ENDS_IT)


@click.command()
@click.option("--kills", type=click.IntRange(min=0), default=5, show_default=True, help="Of each kind of process.")
@click.option(
    "--role", "roles", type=click.Choice(_ROLES), multiple=True, default=_ROLES, help="Only this kind; may be repeated."
)
@click.option("--lease-ttl-s", type=Number(min=1), default=2.0, show_default=True, help="Time to live of all leases.")
@click.option("--standby/--no-standby", default=True, show_default=True, help="With one more master and pserver.")
@click.option("--minutes", type=click.IntRange(min=0), default=3, show_default=True, help="Of goodput under kills.")
@click.option("--window-s", type=Number(min=1), default=60.0, show_default=True, help="Seconds of such a minute.")
def recovery(
    *,
    kills: int,
    roles: tuple[str, ...],
    lease_ttl_s: float,
    standby: bool,
    minutes: int,
    window_s: float,
) -> None:
    """Measure the time from kill -9 to working again."""
    process_tuning.apply()
    began = time.monotonic()

    def say(text: str) -> None:
        click.echo(f"[{time.monotonic() - began:5.0f} s] {text}", err=True)

    figures = _Figures()
    lines: list[str] = []
    with (
        tempfile.TemporaryDirectory(prefix="flightedl-bench-") as directory,
        _cluster(Path(directory), lease_ttl_s, standby=standby) as cluster,
        cluster.status() as status,
    ):
        watcher = Watcher(cluster, status)
        figures.measure(cluster, watcher, kills, roles, Path(directory) / _INSTANTS, say)
        if minutes:
            lines.append(_goodput(cluster, watcher, minutes, window_s, say))
        watcher.close()
    kind = "with" if standby else "without"
    click.echo(f"leases of {lease_ttl_s:g} s, {kind} standby processes")
    for line in [*figures.lines(), *lines]:
        click.echo(line)


def _cluster(directory: Path, lease_ttl_s: float, *, standby: bool) -> LocalCluster:
    (directory / _INSTANTS).mkdir()
    program = TrainerProgram("flightedl_tools.bench.steady", (f"{directory}/data", f"{directory}/{_INSTANTS}"), 2)
    return LocalCluster(
        2,
        job=_JOB,
        checkpoint=str(directory / "checkpoints"),
        trainers=program,
        standby=standby,
        limits=Limits(long_run_s=1.0, restarts_limit=10_000),
        lease_ttl_s=lease_ttl_s,
        checkpoint_every_s=2.0,
    )
