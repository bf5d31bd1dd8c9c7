"""Recordings of simulated processes, as their real ones write them; none of it changes the run."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

from flightedl.recording.writer import SUFFIX, Recorder
from flightedl.testing.simulation.world import World


class _WorldClock:
    """Simulated time, also as that of the wall."""

    def __init__(self, world: World) -> None:
        self._world = world

    def now(self) -> float:
        return self._world.now

    def wall_time(self) -> float:
        return self._world.now

    def sleep(self, seconds: float) -> None:
        raise AssertionError(f"nobody sleeps for {seconds} s in a simulation")


class RunRecorder:
    """The files of one run; they are whole when it is closed.

    Args:
        directory: Where they go; is made.
        world: Whose time it is.
    """

    def __init__(self, directory: Path, world: World) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._clock = _WorldClock(world)
        self._files: list[BinaryIO] = []

    def recorder(self, process: str, name: str) -> Recorder:
        """Of a process that begins now; of the same name there may be several, one after the other."""
        path = self._directory / f"{len(self._files):04d}-{name}{SUFFIX}"
        file = path.open("wb")
        self._files.append(file)

        def write(line: bytes) -> object:
            # What a dead process has begun may be let go of after the run.
            return False if file.closed else file.write(line)

        return Recorder(process, name, "job", self._clock, write, is_strict=True)

    def close(self) -> None:
        """The run is over."""
        for file in self._files:
            file.close()
