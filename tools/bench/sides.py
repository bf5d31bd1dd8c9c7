"""Sides of a comparison: their processes, their turns, and the output of the results."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

import click
from rich.console import Console
from rich.table import Table

from ..options import Decorator, together
from .workers import Worker, cpu_s, resident_bytes, started

#: Time limit for starting an interpreter.
_LOOPS_START_S = 0.2


@dataclass(frozen=True, slots=True)
class Measured:
    """Measurements of one side."""

    #: Median wall time of a trainer's step.
    step_s: float
    #: Bytes pushed and pulled per second by all trainers together.
    bytes_per_s: float
    #: Processor time of all trainers and servers per GB pushed and pulled.
    cpu_s_per_gb: float
    #: Largest resident memory of a server.
    server_bytes: int
    #: Processor time of a step in its trainer.
    trainer_cpu_s: float = 0.0
    #: Processor time of a step in all servers together.
    server_cpu_s: float = 0.0
    #: Steps per second of all trainers together.
    steps_per_s: float = 0.0


class Side:
    """The workers of one side, and the servers whose processor time is added to theirs.

    Args:
        workers: Processes that execute orders.
        servers: Ids of the server processes.
        size_bytes: Bytes of the values that a step pushes.
        others: Ids of other processes by role. Their processor time does not count.
        choice: Kind of the steps that this side orders.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        servers: Sequence[int],
        size_bytes: int,
        others: Mapping[str, int] | None = None,
        *,
        choice: int = 0,
    ) -> None:
        self._workers = workers
        self._choice = choice
        self.others = dict(others or {})
        self.server_pids = list(servers)
        self._size_bytes = size_bytes
        self.forget()
        self._server_bytes = 0

    def forget(self) -> None:
        """Discard all measurements, because they were made during the warm-up."""
        self._trainer_cpu_s: list[float] = []
        self._server_cpu_s: list[float] = []
        self._medians: list[float] = []
        #: Return the steps per second of all workers together, by run.
        self.rates: list[float] = []

    def wait_until_ready(self) -> None:
        """Wait until all workers are ready for orders."""
        for one in self._workers:
            one.answer()

    def run(self, step_count: int) -> float:
        """Run steps in all workers. Return the median time of a step."""
        before = sum(map(cpu_s, self.server_pids))
        for one in self._workers:
            one.order(step_count, self._choice)
        answers = [one.answer() for one in self._workers]
        used_s = sum(map(cpu_s, self.server_pids)) - before
        self._server_bytes = max([self._server_bytes, *map(resident_bytes, self.server_pids)])
        steps = step_count * len(self._workers)
        self._server_cpu_s.append(used_s / steps)
        self._trainer_cpu_s.append(sum(answer["cpu_s"] for answer in answers) / steps)
        self.rates.append(sum(_rate(answer["seconds"], answer["threads"]) for answer in answers))
        self._medians.append(statistics.median([second for answer in answers for second in answer["seconds"]]))
        return self._medians[-1]

    def measured(self) -> Measured:
        """Return the medians of all runs since the last ``forget``."""
        step_s = statistics.median(self._medians)
        moved = 2 * self._size_bytes
        each_s = map(sum, zip(self._trainer_cpu_s, self._server_cpu_s, strict=True))
        return Measured(
            step_s,
            moved * len(self._workers) / step_s,
            statistics.median(each_s) / (moved / 1e9),
            self._server_bytes,
            statistics.median(self._trainer_cpu_s),
            # The clock for processor time ticks only a few times per turn, so the mean is more precise than the median.
            statistics.fmean(self._server_cpu_s),
            statistics.median(self.rates),
        )


def _rate(seconds: Sequence[float], threads: int) -> float:
    return threads * len(seconds) / sum(seconds)


def begin(
    stack: contextlib.ExitStack,
    function: Callable[..., object],
    *arguments: object,
    count: int = 1,
    environment: Mapping[str, str] | None = None,
) -> list[Worker]:
    """Start ``count`` workers, and wait until they are ready for orders."""
    found = [stack.enter_context(started(function, *arguments, environment=environment)) for _ in range(count)]
    for each in found:
        each.answer()
    return found


def take_turns(sides: Sequence[Side], turns: int, steps: Sequence[int]) -> list[list[float]]:
    """Warm up all sides, then let them take turns. Return each side's seconds per step, by turn."""
    for side, count in zip(sides, steps, strict=True):
        side.run(max(2, count // 2))
        side.forget()
    times: list[list[float]] = [[] for _ in sides]
    for turn in range(turns):
        # Alternate the order of the sides, so that no side benefits if the machine becomes slower.
        order = list(zip(sides, times, steps, strict=True))
        for side, found, count in order if turn % 2 == 0 else reversed(order):
            found.append(side.run(count))
    return times


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and quartiles over several turns."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """Return the median and the quartiles of two or more values."""
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)

    def __str__(self) -> str:
        return f"{self.median:.3g} ({self.low:.3g} to {self.high:.3g})"


def ratio(times: Sequence[float], others: Sequence[float]) -> float:
    """Return the median ratio of one side's times to another's in the same turns."""
    return statistics.median(one / other for one, other in zip(times, others, strict=True))


@contextlib.contextmanager
def busy_cores() -> Iterator[None]:
    """Run a busy loop on each core until the block ends."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    try:
        time.sleep(_LOOPS_START_S)
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def measuring(turns: int, least: int = 1) -> Decorator:
    """Add the options that all benchmarks have: ``--turns`` and ``--json``."""
    kind, text = click.IntRange(min=least), "Turns of each side."
    return together(
        click.option("--json", "wants_json", is_flag=True, help="Print JSON."),
        click.option("--turns", type=kind, default=turns, show_default=True, help=text),
    )


def say(text: str) -> None:
    """Print the name of the current measurement on standard error."""
    click.echo(f"measuring {text} ...", err=True)


def print_json(found: Any) -> None:
    """Print dataclasses, or lists or dictionaries of dataclasses, as JSON."""
    click.echo(json.dumps(found, indent=2, default=asdict))


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> None:
    """Print a table. Columns whose indices are in ``left`` are left-aligned; all other columns are right-aligned."""
    Console(highlight=False, width=180).print(table_of(title, columns, rows, left))


def table_of(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> Table:
    """Return the table that ``print_table`` prints."""
    table = Table(title=title)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number in left else "right")
    for row in rows:
        table.add_row(*row)
    return table
