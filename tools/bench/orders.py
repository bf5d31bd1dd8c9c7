"""Orders to the processes of a benchmark: a line with a number of steps and their kind, answered by a line of JSON.

The sides of a comparison run all the time and take turns, so neither has a warmer machine. A worker answers
``{"seconds": [...], "cpu_s": ...}``: the wall time of each step, and the processor time of its process for all of them.
The end of the input ends the worker.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flightedl.errors import JobFailedError


def next_order() -> tuple[int, int]:
    """Return the number of steps to run and their kind; 0 steps end the worker."""
    count, choice, *_ = *map(int, sys.stdin.readline().split()), 0, 0
    return count, choice


def ready(servers: Sequence[int] = ()) -> None:
    """Say that orders are accepted, and name the server processes that this worker started."""
    _say({"ready": True, "servers": list(servers)})


def report(seconds: Sequence[float], cpu_s: float) -> None:
    """Answer an order."""
    _say({"seconds": list(seconds), "cpu_s": cpu_s})


def serve(*steps: Callable[[], object], servers: Sequence[int] = ()) -> None:
    """Run steps as ordered until the input ends. With several kinds of steps each order names one."""
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


def serve_batches(data: Iterable[object], step: Callable[[int], object], begin: Callable[[int], object] = int) -> None:
    """Run steps as ordered within one loop over batches, where a step is a whole turn of the loop.

    Args:
        data: Batches without end.
        step: Run one step of a kind.
        begin: Prepare for an order of a kind.
    """
    seconds: list[float] = []
    left = choice = 0
    cpu_s = begun = 0.0
    for _ in data:
        now = time.perf_counter()
        if left:
            seconds.append(now - begun)
            left -= 1
        if not left:
            if seconds:
                report(seconds, time.process_time() - cpu_s)
            seconds = []
            left, choice = next_order()
            if not left:
                return
            begin(choice)
            cpu_s = time.process_time()
            now = time.perf_counter()
        begun = now
        step(choice)


def say_port(port: object) -> None:
    """Tell the benchmark where this server listens."""
    sys.stdout.write(f"{port}\n")
    sys.stdout.flush()


def _say(message: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


@dataclass(frozen=True, slots=True)
class Worker:
    """A process that takes orders."""

    process: subprocess.Popen[str]

    def order(self, count: int, choice: int = 0) -> None:
        """Begin ``count`` steps of a kind."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(f"{count} {choice}\n")
            self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """Return the answer to the previous order."""
        line = self.line()
        if not line:
            raise JobFailedError(f"a process of the bench ended with code {self.process.wait()}: see its output above")
        found: dict[str, Any] = json.loads(line)
        return found

    def line(self) -> str:
        """Return the next line of output."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


@contextlib.contextmanager
def worker(module: str, arguments: Sequence[object], environment: Mapping[str, str]) -> Iterator[Worker]:
    """Run ``python -m module arguments`` until the block ends."""
    with subprocess.Popen(
        [sys.executable, "-m", module, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=dict(environment),
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
