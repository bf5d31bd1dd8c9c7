"""Faults of a storm: one strike, or two at the same moment, on the processes of a job.

Durations are multiples of a lease's TTL, because a waking process behaves according to the rest of its lease: by its
own clock, a process gives its lease up after two thirds of the TTL, and etcd ends the lease after the full TTL.
"""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

_MODULES = {
    "trainer": "flightedl.launch.trainer",
    "pserver": "flightedl.pserver",
    "master": "flightedl.master",
    "etcd": "etcd",
}
_BUSY_PROCESSES = 32


@dataclass
class Victims:
    """The processes of one running job, which are looked up for every strike."""

    launcher: int
    chance: random.Random
    lease_s: float
    started: float = field(default_factory=time.monotonic)
    #: Descriptions of all strikes, for a report.
    events: list[str] = field(default_factory=list)

    def note(self, what: str) -> None:
        """Record a strike with its time, both in seconds since the start and as in the logs."""
        now = time.strftime("%H:%M:%S")
        self.events.append(f"{time.monotonic() - self.started:7.2f} s ({now}): {what}")

    def of(self, role: str) -> list[psutil.Process]:
        """Return all processes of a role."""
        found = []
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.launcher).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    command = child.cmdline()
                    is_etcd = bool(command) and Path(command[0]).name == "etcd"
                    if is_etcd if role == "etcd" else _MODULES[role] in command:
                        found.append(child)
        return found

    def find(self, role: str) -> psutil.Process | None:
        """Return a random process of a role, or None if there is none at the moment."""
        found = self.of(role)
        return self.chance.choice(found) if found else None

    def kill(self, role: str) -> bool:
        """Kill a process of a role. Return False if there was none."""
        victim = self.find(role)
        return victim is not None and self._kill(victim, role)

    def kill_masters(self) -> bool:
        """Kill the master and its standby, so that there is no leader until the lock's lease has ended."""
        killed = [self._kill(victim, "master") for victim in self.of("master")]
        return any(killed)

    def _kill(self, victim: psutil.Process, role: str) -> bool:
        try:
            victim.kill()
        except psutil.NoSuchProcess:
            return False
        self.note(f"killed {role} {victim.pid}")
        return True

    def freeze(self, role: str, leases: float) -> Callable[[], None] | None:
        """Freeze a process. Return a function that waits for the end and thaws it, or None if there was no process."""
        victim = self.find(role)
        if victim is None:
            return None
        try:
            victim.suspend()
        except psutil.NoSuchProcess:
            return None
        until = time.monotonic() + leases * self.lease_s
        self.note(f"froze {role} {victim.pid} for {leases:.2f} leases, {leases * self.lease_s:.2f} s")

        def thaw() -> None:
            time.sleep(max(0.0, until - time.monotonic()))
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.resume()
                self.note(f"thawed {role} {victim.pid}")

        return thaw


def kill(victims: Victims, roles: Sequence[str]) -> str | None:
    """Kill a random process."""
    role = victims.chance.choice(roles)
    return f"kill {role}" if victims.kill(role) else None


def stop(victims: Victims, roles: Sequence[str]) -> str | None:
    """Freeze a random process for up to two and a half TTLs."""
    role = victims.chance.choice(roles)
    thaw = victims.freeze(role, victims.chance.uniform(0.1, 2.5))
    if thaw is None:
        return None
    thaw()
    return f"stop {role}"


def _frozen_while(victims: Victims, leases: float, then: Callable[[], object]) -> bool:
    """Freeze a trainer, do something at the same moment, and thaw the trainer."""
    thaw = victims.freeze("trainer", leases)
    if thaw is None:
        return False
    then()
    thaw()
    return True


def trainer_and_master(victims: Victims, _: Sequence[str]) -> str | None:
    """Let a trainer that has given up its lease wake before the lease ends, without a leader or with a new master."""
    leases, late = victims.chance.uniform(0.68, 0.9), victims.chance.uniform(0.0, 0.15)

    def late_kill() -> None:
        time.sleep(victims.lease_s * late)
        victims.kill_masters()

    return "trainer+master" if _frozen_while(victims, leases, late_kill) else None


def trainer_and_pserver(victims: Victims, _: Sequence[str]) -> str | None:
    """Let a trainer wake after a pserver was restored from a checkpoint."""
    leases = victims.chance.uniform(0.3, 1.4)
    return "trainer+pserver" if _frozen_while(victims, leases, lambda: victims.kill("pserver")) else None


def trainer_and_etcd(victims: Victims, _: Sequence[str]) -> str | None:
    """Stop etcd for half to two thirds of a TTL while a trainer is frozen."""

    def outage() -> None:
        thaw = victims.freeze("etcd", victims.chance.uniform(0.5, 0.67))
        if thaw is not None:
            thaw()

    leases = victims.chance.uniform(0.5, 0.9)
    return "trainer+etcd" if _frozen_while(victims, leases, outage) else None


def stall(victims: Victims, _: Sequence[str]) -> str | None:
    """Freeze a pserver so briefly that it keeps its lease. Steps wait for it, or fail if the script is impatient."""
    thaw = victims.freeze("pserver", victims.chance.uniform(0.55, 0.62))
    if thaw is None:
        return None
    thaw()
    return "stall"


def same_name(victims: Victims, _: Sequence[str]) -> str | None:
    """Let a trainer whose lease has ended return under its name while there is no leader."""

    def late_kill() -> None:
        time.sleep(victims.lease_s * late)
        victims.kill_masters()

    leases, late = victims.chance.uniform(1.02, 1.4), victims.chance.uniform(0.4, 0.95)
    return "same-name" if _frozen_while(victims, leases, late_kill) else None


def two(victims: Victims, roles: Sequence[str]) -> str | None:
    """Kill or freeze two random processes at the same moment."""
    chosen = [victims.chance.choice(roles) for _ in range(2)]
    done, thaws = [], []
    for role in chosen:
        if victims.chance.random() < 0.5:
            done.append(f"kill {role}" if victims.kill(role) else "")
        elif (thaw := victims.freeze(role, victims.chance.uniform(0.3, 1.5))) is not None:
            thaws.append(thaw)
            done.append(f"stop {role}")
    threads = [threading.Thread(target=thaw) for thaw in thaws]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return "two" if any(done) else None


def starve(victims: Victims, _: Sequence[str]) -> str | None:
    """Start many busy processes for one or two TTLs."""
    duration_s = victims.lease_s * victims.chance.uniform(1.0, 2.0)
    program = f"import time; end = time.monotonic() + {duration_s}\nwhile time.monotonic() < end: pass"
    victims.note(f"{_BUSY_PROCESSES} busy processes for {duration_s:.1f} s")
    busy = [subprocess.Popen([sys.executable, "-I", "-S", "-c", program]) for _ in range(_BUSY_PROCESSES)]
    for process in busy:
        process.wait()
    return "starve"


#: Strikes by name. Each returns a description of what it did, or None if there was no process to strike.
STRIKES: dict[str, Callable[[Victims, Sequence[str]], str | None]] = {
    "kill": kill,
    "stop": stop,
    "trainer+master": trainer_and_master,
    "trainer+pserver": trainer_and_pserver,
    "trainer+etcd": trainer_and_etcd,
    "stall": stall,
    "same-name": same_name,
    "two": two,
    "starve": starve,
}
