"""One side of a comparison: the processes that step, those that serve them, and what they took."""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from . import processes
from .orders import Worker


@dataclass(frozen=True, slots=True)
class Measured:
    """One side of a comparison."""

    #: Median wall time of a step of one trainer.
    step_s: float
    #: Bytes pushed and pulled a second, by all trainers together.
    bytes_per_s: float
    #: Processor time of all trainers and servers for a GB pushed and pulled.
    cpu_s_per_gb: float
    #: Largest resident memory of one server.
    server_bytes: int
    #: Of ``cpu_s_per_gb``'s, what a step of one trainer takes of itself, and of all that hold the model together.
    trainer_cpu_s: float = 0.0
    server_cpu_s: float = 0.0


class Side:
    """The workers of one side, and the servers whose processor time counts.

    Args:
        workers: Take orders.
        servers: Their process ids.
        size_bytes: Of the values that a step pushes.
        others: Further processes.
        rests: Stop all of them while others run, because they are busy also when they have nothing to do.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        servers: Sequence[int],
        size_bytes: int,
        others: Mapping[str, int] | None = None,
        *,
        rests: bool = False,
    ) -> None:
        self._rests = rests
        self._workers = workers
        #: Pids of further processes by what they are, whose processor time does not count.
        self.others = dict(others or {})
        #: Process ids of those that hold the model.
        self.server_pids = list(servers)
        self._size_bytes = size_bytes
        self._trainer_cpu_s: list[float] = []
        self._server_cpu_s: list[float] = []
        self._medians: list[float] = []
        self._server_bytes = 0

    def run(self, step_count: int) -> float:
        """Let all workers step; the median step's time."""
        self._signal(signal.SIGCONT)
        try:
            return self._run(step_count)
        finally:
            self._signal(signal.SIGSTOP)

    def wake(self) -> None:
        """Nobody is stopped any more: they are about to end."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        if not self._rests:
            return
        for pid in [*(worker.process.pid for worker in self._workers), *self.server_pids]:
            for each in processes.with_descendants(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(each, number)

    def _run(self, step_count: int) -> float:
        before = sum(map(processes.cpu_s, self.server_pids))
        for one in self._workers:
            one.order(step_count)
        answers = [one.answer() for one in self._workers]
        cpu_s = sum(map(processes.cpu_s, self.server_pids)) - before
        self._server_bytes = max([self._server_bytes, *map(processes.resident_bytes, self.server_pids)])
        steps = step_count * len(self._workers)
        self._server_cpu_s.append(cpu_s / steps)
        self._trainer_cpu_s.append(sum(answer["cpu_s"] for answer in answers) / steps)
        median = float(statistics.median([second for answer in answers for second in answer["seconds"]]))
        self._medians.append(median)
        return median

    def measured(self) -> Measured:
        """Of all runs but those before ``forget``."""
        step_s = statistics.median(self._medians)
        moved = 2 * self._size_bytes
        each_s = map(sum, zip(self._trainer_cpu_s, self._server_cpu_s, strict=True))
        return Measured(
            step_s,
            moved * len(self._workers) / step_s,
            statistics.median(each_s) / (moved / 1e9),
            self._server_bytes,
            statistics.median(self._trainer_cpu_s),
            statistics.median(self._server_cpu_s),
        )

    def forget(self) -> None:
        """What came before was the warm-up."""
        self._medians.clear()
        self._trainer_cpu_s.clear()
        self._server_cpu_s.clear()
