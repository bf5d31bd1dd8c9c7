"""How the bench tells its processes when to run: a line with a number of steps and maybe their kind, answered by JSON.

Both sides of a comparison live all the time and take turns, so that neither has a warmer machine. A worker answers
``{"seconds": [...], "cpu_s": ...}``: each step's wall time, and the processor time of the process for all of them. The
end of the input ends it.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flightedl.errors import JobFailedError


def next_order() -> int:
    """How many steps to run now; 0: end."""
    return next_choice()[0]


def next_choice() -> tuple[int, int]:
    """How many steps to run now, and of which kind; 0 steps: end."""
    count, choice, *_ = *map(int, sys.stdin.readline().split()), 0, 0
    return count, choice


def ready(servers: Sequence[int] = ()) -> None:
    """Say that orders can be taken, and name the processes that serve this one, if it started them."""
    _say({"ready": True, "servers": list(servers)})


def report(seconds: Sequence[float], cpu_s: float) -> None:
    """Answer an order."""
    _say({"seconds": list(seconds), "cpu_s": cpu_s})


def serve(step: Callable[[], object], servers: Sequence[int] = ()) -> None:
    """Run steps as ordered until the input ends."""
    serve_choices([step], servers)


def serve_choices(steps: Sequence[Callable[[], object]], servers: Sequence[int] = ()) -> None:
    """The same with several kinds of steps, of which each order names one."""
    ready(servers)
    while True:
        count, choice = next_choice()
        if not count:
            return
        cpu_s = time.process_time()
        seconds = []
        for _ in range(count):
            begun = time.perf_counter()
            steps[choice]()
            seconds.append(time.perf_counter() - begun)
        report(seconds, time.process_time() - cpu_s)


def say_port(port: int) -> None:
    """Tell the bench where the server listens."""
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
        """Begin ``count`` steps, of one kind of several."""
        self._write(f"{count} {choice}\n")

    def answer(self) -> dict[str, Any]:
        """The answer to the order before."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise JobFailedError(f"a process of the bench ended with code {self.process.wait()}: see its output above")
        found: dict[str, Any] = json.loads(line)
        return found

    def line(self) -> str:
        """One line that is no JSON."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def _write(self, text: str) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(text)
            self.process.stdin.flush()


@contextlib.contextmanager
def worker(module: str, arguments: Sequence[object], environment: Mapping[str, str]) -> Iterator[Worker]:
    """Start ``python -m module arguments``; it ends with the block."""
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
