"""A simulated cluster: starts the product's own processes, and restarts those that end, as a launcher does."""

from __future__ import annotations

import logging
import random
import sys
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import fsspec.implementations.memory

from tests.simulation import flight, scheduler
from tests.simulation.etcd import Etcd, set_etcd
from tests.simulation.files import Store, set_store
from tests.simulation.network import Network
from tests.simulation.ranks import Launcher, PeerError, Start
from tests.simulation.scenario import Scenario
from tests.simulation.scheduler import AbandonedError, Pace, Process, Scheduler

_SERVERS = ("master", "pserver", "standby")
#: Exit code of a process that cannot continue until somebody helps.
_JOB_FAILED = 3
#: Names of threads for whose end no process waits, or not for long.
_STAYING = (
    "flightedl-export",
    "flightedl-indexing",
    "flightedl-leaving",
    "flightedl-progress",
    "flightedl-snapshot",
    "signal",
)
#: Roles of processes that a launcher starts again.
RESTARTED = (*_SERVERS, "trainer")
_RESTART_S = 0.2
#: Seconds between two looks at the number of pservers.
_SUPERVISE_S = 1.0
#: Virtual seconds that servers have for their end.
_ENDING_S = 60.0


class PoisonError(Exception):
    """Raised by a script for a record that it cannot use."""


class Started(Process):
    """A process of the job."""

    def __init__(self, role: str, index: int, pid: int) -> None:
        super().__init__(f"{role}-{index}.{pid}", pid, f"{role}-{index}")
        self.role = role
        self.index = index
        #: Exit code, or what its main thread raised; None while it runs, and after a kill.
        self.result: object = None
        self.said = ""
        #: The start of a group to which this rank belongs.
        self.group_start: Start | None = None


@dataclass(slots=True)
class Told:
    """Everything that the processes of a simulation have said and done."""

    lines: list[str] = field(default_factory=list)
    #: Tracebacks of threads and processes that ended with an error which is a bug.
    crashes: list[str] = field(default_factory=list)
    #: Each process that has ended by itself.
    ends: list[Started] = field(default_factory=list)
    #: Threads of processes that have ended with 0, and what they did.
    left: list[str] = field(default_factory=list)


class _Log(logging.Handler):
    """Writes the product's logs."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(logging.INFO)
        self._cluster = cluster

    def emit(self, record: logging.LogRecord) -> None:
        running = scheduler.running()
        if running is not None and running.current is not None:
            text = record.getMessage()
            if record.exc_info:
                text += "\n" + "".join(traceback.format_exception(*record.exc_info))
            if record.levelno >= logging.ERROR and isinstance(running.current.process, Started):
                running.current.process.said = record.getMessage()
            self._cluster.say(record.levelname, f"{record.name.removeprefix('flightedl.')}: {text}")


class _Output:
    """Standard output and error of the processes."""

    encoding = "utf-8"

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def write(self, text: str) -> int:
        running = scheduler.running()
        if text.strip() and running is not None and running.current is not None:
            process = running.current.process
            if isinstance(process, Started):
                process.said = text.strip()
            self._cluster.say("SAID", text.strip())
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return False


class Cluster:
    """The processes of one simulated job.

    Args:
        scenario: The job.
        programs: Role -> function that runs such a process, and returns its exit code.
        is_verbose: True to print what happens.
        keeps_history: See ``Scheduler``.
    """

    def __init__(
        self,
        scenario: Scenario,
        programs: dict[str, Callable[[Started], object]],
        *,
        is_verbose: bool = False,
        keeps_history: bool = False,
    ) -> None:
        self.scenario = scenario
        presence = sys.modules["flightedl.coordination.presence"]
        vars(presence)["STREAMS"] = 2 if scenario.has_presence else 0
        self.told = Told()
        self.scheduler = Scheduler(
            scenario.seed, Pace(nap=scenario.nap, nap_s=scenario.nap_s), keeps_history=keeps_history
        )
        scheduler.set_running(self.scheduler)
        self.network = Network(self.scheduler)
        weather = self.network.weather
        weather.tail, weather.tail_s = scenario.tail, scenario.tail_s
        weather.breaks, weather.losses, weather.doubles = scenario.breaks, scenario.losses, scenario.doubles
        flight.set_network(self.network)
        self.etcd = Etcd()
        set_etcd(self.etcd)
        self.store = Store(is_disk=scenario.is_disk, delay_s=scenario.store_s)
        set_store(self.store)
        self.processes: list[Started] = []
        self.is_ending = False
        #: What starts the ranks of a group; None if trainers are independent.
        self.launcher = None if scenario.group is None else Launcher(self, scenario.group)
        #: True if etcd was restored from a backup.
        self.has_gone_back = False
        #: The servers that were alive when the job was done.
        self.last_servers: list[Started] = []
        #: Key in etcd of the number of pservers.
        self.pserver_count_key = ""
        self._programs = programs
        self._is_verbose = is_verbose
        self._pids = 100
        self._streams = sys.stdout, sys.stderr
        fsspec.implementations.memory.MemoryFileSystem.store.clear()
        log = logging.getLogger("flightedl")
        log.handlers, log.propagate = [_Log(self)], False
        log.setLevel(logging.INFO)

    def say(self, level: str, text: str) -> None:
        """Add a line to the log."""
        current = self.scheduler.current
        name = "-" if current is None else current.process.name
        line = f"{self.scheduler.now:9.4f} {name:14s} {level:7s} {text}"
        self.told.lines.append(line)
        if self._is_verbose:
            self._streams[0].write(line + "\n")

    def chance(self, name: str) -> random.Random:
        """Return a source of chance for a script."""
        return self.scheduler.stream(name)

    # processes

    def start(self, role: str, index: int, group_start: Start | None = None) -> Started:
        """Start a process."""
        self._pids += 1
        process = Started(role, index, self._pids)
        process.group_start = group_start
        process.on_death.append(lambda: self.network.ended(process))
        process.excepthook = self._thread_died
        self.processes.append(process)

        def run() -> None:
            try:
                process.result = self._programs[role](process)
            except AbandonedError:
                raise
            except SystemExit as error:
                process.result = error.code
            except BaseException as error:  # noqa: BLE001 - the end of a process, whatever it is
                process.result = self._code_of(process, error)
            self.say("END", f"{process.name} -> {process.result!r}")
            self.told.ends.append(process)
            # The process exits: its other threads stop, its sockets close.
            self.scheduler.after(0.0, lambda: self._exit(process))

        self.scheduler.spawn(process, "main", run)
        return process

    def _code_of(self, process: Started, error: BaseException) -> int:
        """Return the exit code of a script that has ended with this error."""
        from flightedl.errors import FlightedlError, JobFailedError, exit_code_of

        # A launcher ends a job that has failed, unless its operator continues it.
        is_helped = self.has_gone_back or self.store.has_damage
        is_failed = isinstance(error, JobFailedError) and process.role == "trainer" and not is_helped
        if isinstance(error, FlightedlError | PoisonError | PeerError) and not is_failed:
            self.say("ERROR", f"{type(error).__name__}: {error}")
        else:
            self._crash("".join(traceback.format_exception(error)))
        process.said = f"{type(error).__name__}: {error}"
        return exit_code_of(error)

    def _thread_died(self, died: Any) -> None:
        if not self.scheduler.is_over and died.exc_type not in {AbandonedError, SystemExit}:
            self._crash("".join(traceback.format_exception(died.exc_type, died.exc_value, died.exc_traceback)))

    def _crash(self, text: str) -> None:
        self.say("CRASH", text)
        self.told.crashes.append(text)

    def _exit(self, process: Started) -> None:
        if process.result == 0:
            left = [each for each in self.scheduler.threads if each.process is process and not each.is_done]
            # Idle threads of pools are outside of the product.
            self.told.left += [
                f"{each} at {place}" for each in left if each.name not in _STAYING and (place := scheduler.places(each))
            ]
        self.scheduler.kill(process)
        if process.role == "pserver" and process.result == _JOB_FAILED and self.store.mend():
            self.say("MEND", "damaged files are restored")
        is_done = process.role == "trainer" and process.result == 0 and self.launcher is None
        is_wanted = process.role in RESTARTED and not is_done
        if is_wanted and not self.is_ending:
            self.scheduler.after(_RESTART_S, lambda: self._restart(process))

    def _restart(self, process: Started) -> None:
        if self.launcher is not None and process.role == "trainer":
            self.launcher.ended(process)
        elif not self.is_ending and (process.role != "pserver" or len(self.alive("pserver")) < self._pserver_count()):
            self.start(process.role, process.index)

    def _pserver_count(self) -> int:
        """Return the number of pservers that the job wants."""
        entry = self.etcd.store.entries.get(self.pserver_count_key)
        return self.scenario.pservers if entry is None else int(entry.value)

    def scale(self, count: int) -> None:
        """Ask for another number of pservers, as ``flightedl scale`` does, and start those that are missing."""
        for index in range(len(self.alive("pserver")), count):
            self.start("pserver", index)
        self.start("admin", count)
        self.scheduler.after(_SUPERVISE_S, self._supervise)

    def _supervise(self) -> None:
        if not self.is_ending:
            if len(self.alive("pserver")) < self._pserver_count():
                self.start("pserver", len(self.alive("pserver")))
            self.scheduler.after(_SUPERVISE_S, self._supervise)

    def kill(self, process: Started, restart_s: float) -> None:
        """End a process as SIGKILL does. The launcher starts another one after a while."""
        self.say("KILL", process.name)
        self.scheduler.kill(process)
        self.scheduler.after(restart_s, lambda: self._restart(process))

    def terminate(self, process: Started) -> None:
        """Ask a server to end, as SIGTERM does."""
        if process.is_alive and process.on_termination is not None:
            ask = process.on_termination
            self.scheduler.spawn(process, "signal", lambda: ask("terminated"))

    def alive(self, role: str) -> list[Started]:
        """Return the processes of a role that have not ended."""
        return [each for each in self.processes if each.role == role and each.is_alive]

    # the run

    def run(self) -> None:
        """Run the job to its end, and end its servers. Raises HangsError if it does not end."""
        output: Any = _Output(self)
        sys.stdout = sys.stderr = output
        try:
            scenario = self.scenario
            counts = {
                "master": scenario.masters,
                "pserver": scenario.pservers if self.launcher is None else 0,
                "standby": scenario.standbys,
                "trainer": scenario.trainers if self.launcher is None else 0,
                "watcher": int(scenario.is_watched),
                "follower": int(scenario.is_followed),
            }
            for role, count in counts.items():
                for index in range(count):
                    self.start(role, index)
            if self.launcher is not None:
                self.launcher.begin()
                self.launcher.plan_resizes()
            self.scheduler.run(self._is_done, scenario.limit_s)
            self.is_ending = True
            self.last_servers = [each for role in _SERVERS for each in self.alive(role)]
            for process in self.last_servers:
                self.scheduler.thaw(process)
                if process.role == "standby" and not self._has_index(process):
                    # Otherwise, it would take over from the first pserver that ends.
                    self.scheduler.kill(process)
                self.terminate(process)
            until_s = self.scheduler.now + _ENDING_S
            self.scheduler.run(lambda: not any(self.alive(role) for role in _SERVERS), until_s)
        finally:
            self.is_ending = True
            sys.stdout, sys.stderr = self._streams

    def _has_index(self, process: Started) -> bool:
        mark = f'"pid":{process.pid},'.encode()
        return any("/ps/" in key and mark in entry.value for key, entry in self.etcd.store.entries.items())

    def _is_done(self) -> bool:
        if self.told.crashes:
            return True
        if self.launcher is not None:
            return self.launcher.is_done and not self.alive("trainer")
        done = {each.index for each in self.processes if each.role == "trainer" and each.result == 0}
        return len(done) == self.scenario.trainers and not self.alive("trainer")

    def close(self) -> int:
        """End all threads that are left. Return how many would not end."""
        for process in self.processes:
            process.excepthook = lambda *_: None
        left = self.scheduler.abandon()
        scheduler.set_running(None)
        return left
