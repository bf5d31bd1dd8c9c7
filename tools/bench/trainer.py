"""Trainer of the benchmarks: a user's loop with steps of a given size, in a job with real processes.

A step is a complete iteration of the loop: getting the batch, pushing, pulling, and closing the batch. Gradients are in
the trainer's own memory, as a real model's would be. If they do not fit, all trainers map one file of gradients.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

import flightedl as fe
from flightedl.domain.consistency.modes import Async, Bounded, Mode, Sync

from .bare import OPTIMIZERS
from .workers import next_order, ready, report

MODES: dict[str, Mode] = {
    "async": Async(),
    "sync": Sync(),
    "sync-sum": Sync(reduce="sum"),
    "bounded": Bounded(staleness=2),
    "backup": Sync(backup=1),
    "deterministic": Sync(deterministic=True),
}
#: If all trainers' gradients together are at most this large, each trainer has its own copy.
_OWN_GRADIENTS_BYTES = 2 << 30


@dataclass(frozen=True, slots=True)
class Workload:
    """The workload of a comparison: ``parameters`` float32 arrays of equal size, with ``mb`` MiB in total."""

    mb: float = 64.0
    parameters: int = 1
    trainers: int = 1
    pservers: int = 1
    optimizer: str = "sgd"
    mode: str = "async"
    wire: str = ""
    integrity: str = "auto"
    #: Transport of the values. "shared" is memory that both sides map, "lent" is shared memory without a copy in the
    #: trainer, "tcp" is a network stream, and "auto" is the job's default, which is shared memory here.
    path: str = "auto"

    @property
    def shapes(self) -> list[int]:
        """Elements of each parameter."""
        return [max(1, round(self.mb * (1 << 20) / 4 / self.parameters))] * self.parameters

    @property
    def size_bytes(self) -> int:
        """Bytes of the values."""
        return 4 * sum(self.shapes)

    def __str__(self) -> str:
        pieces = "" if self.parameters == 1 else f" in {self.parameters}"
        wire = f", {self.wire} wire" if self.wire else ""
        checked = "" if self.integrity == "auto" else f", integrity {self.integrity}"
        by = "" if self.path == "auto" else f", {self.path}"
        shape = f"{self.trainers} x {self.pservers}"
        return f"{self.mb:g} MB{pieces}, {self.optimizer}, {self.mode}{wire}{checked}, {shape}{by}"


def train(workload: Workload, dataset: str, gradients_file: str) -> None:
    """Run the requested steps."""
    line: np.ndarray[tuple[int], np.dtype[np.float32]] = np.memmap(gradients_file, np.float32, "r")
    if workload.trainers * workload.size_bytes <= _OWN_GRADIENTS_BYTES:
        line = np.array(line)
    gradients = {f"p{i}": part for i, part in enumerate(np.split(line, np.cumsum(workload.shapes)[:-1]))}
    with fe.connect() as job:
        data = job.dataset(dataset, batch_size=1, epochs=None)
        model = job.parameters(
            {name: np.zeros(gradient.shape, np.float32) for name, gradient in gradients.items()},
            optimizer=OPTIMIZERS[workload.optimizer],
            mode=MODES[workload.mode],
            wire=workload.wire,
        )
        if workload.path == "lent":
            model.lend_to(lambda _name, _start, _values: None)
        ready()
        # Each order has its own loop. Otherwise an idle trainer would remain a member, and the rounds of trainers with
        # remaining steps would wait for it.
        while count := next_order()[0]:
            report(*run_steps(data, partial(model.step, gradients), count))


def run_steps(data: fe.Dataset, step: Callable[[], object], count: int) -> tuple[list[float], float]:
    """Run ``count`` iterations, then leave the loop. Return their durations in seconds, and their total CPU time."""
    seconds: list[float] = []
    begun, cpu_s = 0.0, time.process_time()
    for _ in data:
        now = time.perf_counter()
        if begun:
            seconds.append(now - begun)
        else:
            cpu_s = time.process_time()
        if len(seconds) == count:
            break
        begun = now
        step()
    cpu_s = time.process_time() - cpu_s
    data.close()
    return seconds, cpu_s
