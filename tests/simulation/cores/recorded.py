"""Recordings of simulated processes, in the same format as for real processes. Recording a run does not change it."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

from flightedl.recording.writer import SUFFIX, Recorder
from tests.simulation.cores.world import World


class _WorldClock:
    """A clock that returns simulated time, also as its wall time."""

    def __init__(self, world: World) -> None:
        self._world = world

    def now(self) -> float:
        return self._world.now

    def wall_time(self) -> float:
        return self._world.now

    def sleep(self, seconds: float) -> None:
        raise AssertionError(f"a simulated process must not sleep (for {seconds} s)")


class RunRecorder:
    """The recordings of one run. They are complete once this object has been closed.

    Args:
        directory: Directory for the files; created if it does not exist.
        world: The simulated world, which has the time.
    """

    def __init__(self, directory: Path, world: World) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._clock = _WorldClock(world)
        self._files: list[BinaryIO] = []

    def recorder(self, process: str, name: str) -> Recorder:
        """Return a recorder for a process that is starting. Several processes in succession may have the same name."""
        path = self._directory / f"{len(self._files):04d}-{name}{SUFFIX}"
        file = path.open("wb")
        self._files.append(file)

        def write(line: bytes) -> object:
            # The objects of a dead process may live until after the run.
            return False if file.closed else file.write(line)

        return Recorder(process, name, "job", self._clock, write, is_strict=True)

    def close(self) -> None:
        """Close the files at the end of the run."""
        for file in self._files:
            file.close()
