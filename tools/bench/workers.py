"""Processes of a benchmark: starts them, gives them orders, and measures their processor time and memory.

``started`` runs a function in a separate process. Some of these processes are workers. An order to a worker is a line
with a number of steps and their kind. The worker answers with a line of JSON that contains the wall time of each step,
the process's processor time for all steps, and the number of threads that run steps concurrently. A worker ends when
its standard input ends.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

import msgspec

from flightedl.config import child_environment
from flightedl.errors import JobFailedError, UsageError

_PROC = Path("/proc")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = resource.getpagesize()
#: Indices of fields in ``/proc/PID/stat``, counted from the field after the name of the program.
_USER_TICKS, _SYSTEM_TICKS, _RESIDENT_PAGES = 11, 12, 21


def print_line(value: object) -> None:
    """Send a line to the benchmark, such as the port of this server."""
    sys.stdout.write(f"{value}\n")
    sys.stdout.flush()


def ready(servers: Sequence[int] = ()) -> None:
    """Report that this worker is ready for orders, and which server processes it has started."""
    print_line(json.dumps({"servers": list(servers)}))


def next_order() -> tuple[int, int]:
    """Wait for an order. Return the number of steps and their kind; an order of 0 steps ends the worker."""
    count, choice, *_ = *map(int, sys.stdin.readline().split()), 0, 0
    return count, choice


def report(seconds: Sequence[float], cpu_s: float, threads: int = 1) -> None:
    """Answer an order."""
    print_line(json.dumps({"seconds": list(seconds), "cpu_s": cpu_s, "threads": threads}))


def serve(*steps: Callable[[], object], servers: Sequence[int] = ()) -> None:
    """Run the requested steps until standard input ends. Each request selects one of the functions."""
    ready(servers)
    while True:
        count, choice = next_order()
        if not count:
            return
        cpu_s = time.process_time()
        seconds = []
        for _ in range(count):
            begun = time.perf_counter()
            steps[choice]()
            seconds.append(time.perf_counter() - begun)
        report(seconds, time.process_time() - cpu_s)


@dataclass(frozen=True, slots=True)
class Worker:
    """A process that runs one function of a benchmark."""

    process: subprocess.Popen[str]

    def order(self, count: int, choice: int = 0) -> None:
        """Order ``count`` steps of a kind."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(f"{count} {choice}\n")
            self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """Wait for the answer to the last order, or for the report that the process is ready."""
        line = self.line()
        if not line:
            raise JobFailedError(f"a benchmark process ended with code {self.process.wait()}: see its output above")
        found: dict[str, Any] = json.loads(line)
        return found

    def line(self) -> str:
        """Wait for the next line of output."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


def program_of(function: Callable[..., object], *arguments: object) -> list[str]:
    """Return the command line of an interpreter that calls a function of a module, with the arguments as JSON."""
    return [__name__, function.__module__, function.__name__, msgspec.json.encode(arguments).decode()]


@contextlib.contextmanager
def started(
    function: Callable[..., object], *arguments: object, environment: Mapping[str, str] | None = None
) -> Iterator[Worker]:
    """Run a function in a separate process until the block ends."""
    with subprocess.Popen(
        [sys.executable, "-m", *program_of(function, *arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=child_environment() if environment is None else dict(environment),
    ) as process:
        try:
            yield Worker(process)
        finally:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


def cpu_s(pid: int) -> float:
    """Return the processor time that a process has used, in seconds."""
    fields = _stat(pid)
    return (int(fields[_USER_TICKS]) + int(fields[_SYSTEM_TICKS])) / _TICKS_PER_S


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process."""
    return int(_stat(pid)[_RESIDENT_PAGES]) * _PAGE_BYTES


def peak_bytes(pid: int) -> int:
    """Return the peak resident memory of a process."""
    (line,) = [text for text in _read(_PROC / str(pid) / "status").splitlines() if text.startswith("VmHWM:")]
    return int(line.split()[1]) << 10


def _stat(pid: int) -> list[str]:
    # The program's name is in parentheses, but may itself contain spaces and parentheses.
    return _read(_PROC / str(pid) / "stat").rpartition(")")[2].split()


def _read(place: Path) -> str:
    if not _PROC.joinpath("self").exists():
        raise UsageError(
            "benchmarks need /proc to measure processes, which this system does not have: run them on Linux"
        )
    return place.read_text()


def _run(module: str, name: str, text: str) -> None:
    function = getattr(importlib.import_module(module), name)
    hints = get_type_hints(function)
    wanted = [hints[each] for each in function.__code__.co_varnames[: function.__code__.co_argcount]]
    function(*(msgspec.convert(value, kind) for value, kind in zip(json.loads(text), wanted, strict=True)))


if __name__ == "__main__":
    _run(*sys.argv[1:])
