"""Reads and updates of a pserver's rows, against NumPy on a plain array: no index, no history, just numbers."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from flightedl.domain.model.initial import Uniform
from flightedl.domain.tables.optimizers import RowAdagrad
from flightedl.domain.tables.spec import TableSpec
from flightedl.pserver.row_store import RowStore, TableGradients

Numbers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]

RATE, EPS = 0.05, 1e-8
#: Exponent of the skewed ids.
ZIPF = 1.05
#: New rows of one push while a store is filled.
FILL = 4096
_BATCHES = 16


@dataclass(frozen=True, slots=True)
class Speed:
    """One line of the table: million rows a second; ratios are medians of neighbouring calls', above 1 is faster."""

    rows: int
    dim: int
    ids: str
    ids_a_step: int
    #: Without repetitions, which both sides get.
    unique: int
    numpy_gather: float
    gather: float
    gather_ratio: float
    numpy_adagrad: float
    adagrad: float
    adagrad_ratio: float


class NumpyRows:
    """Row-wise Adagrad as one writes it in NumPy."""

    def __init__(self, rows: int, dim: int) -> None:
        self.values: Floats = np.full((rows, dim), 0.01, np.float32)
        self.sums: Floats = np.zeros(rows, np.float32)

    def read(self, ids: Numbers) -> Floats:
        """Fancy indexing."""
        return self.values[ids]

    def update(self, ids: Numbers, gradients: Floats) -> None:
        """One step."""
        total = self.sums[ids] + np.mean(gradients * gradients, axis=1)
        self.sums[ids] = total
        self.values[ids] -= RATE * gradients / (np.sqrt(total) + EPS)[:, None]


def new_store(dim: int) -> RowStore:
    """One table, all buckets."""
    return RowStore([TableSpec("bench", dim, RowAdagrad(lr=RATE, eps=EPS), Uniform(0.01))], range(1024))


def push(store: RowStore, ids: npt.NDArray[np.uint64], gradients: Floats) -> None:
    """Update rows, or make them."""
    store.update([TableGradients(0, ids, gradients)], version=1, epoch=0, number=0)


def fill(store: RowStore, start: int, stop: int, dim: int) -> list[tuple[float, float]]:
    """Make rows of these ids, a few thousand a push; the pushes' seconds, and those on the processor."""
    gradients = np.full((FILL, dim), 0.01, np.float32)
    seconds = []
    for first in range(start, stop, FILL):
        ids = np.arange(first, min(first + FILL, stop), dtype=np.uint64)
        begun, begun_cpu = time.perf_counter(), time.thread_time()
        push(store, ids, gradients[: ids.size])
        seconds.append((time.perf_counter() - begun, time.thread_time() - begun_cpu))
    return seconds


def batches(rows: int, count: int, *, is_skewed: bool) -> list[Numbers]:
    """Some steps' ids, each without repetitions, in any order."""
    random = np.random.default_rng(count)
    if not is_skewed:
        return [random.permutation(np.unique(random.integers(0, rows, count))) for _ in range(_BATCHES)]
    order = random.permutation(rows)
    power = 1 - ZIPF
    found = []
    for _ in range(_BATCHES):
        # The inverse of a bounded power law's distribution.
        ranks = ((random.random(count) * (rows**power - 1) + 1) ** (1 / power)).astype(np.int64)
        found.append(random.permutation(np.unique(order[np.clip(ranks, 1, rows) - 1])))
    return found


def speeds(rows: int, dim: int, counts: Sequence[int], turns: int) -> list[Speed]:
    """Both sides, taking turns call by call."""
    store, plain = new_store(dim), NumpyRows(rows, dim)
    fill(store, 0, rows, dim)
    found = []
    for is_skewed in (False, True):
        for count in counts:
            steps = batches(rows, count, is_skewed=is_skewed)
            found.append(_compare(store, plain, steps, count, "Zipf 1.05" if is_skewed else "uniform", turns))
    return found


def _compare(store: RowStore, plain: NumpyRows, steps: list[Numbers], count: int, kind: str, turns: int) -> Speed:
    rows, dim = plain.values.shape
    gradients = np.random.default_rng(0).standard_normal((count, dim), np.float32)
    out = np.empty((count, dim), np.float32)
    gathers: list[tuple[float, float]] = []
    adagrads: list[tuple[float, float]] = []
    for turn in range(turns):
        for ids in steps:
            own, some, target = ids.view(np.uint64), gradients[: ids.size], out[: ids.size]
            gathers.append((_seconds(plain.read, ids), _seconds(store.read, 0, own, 1, 0, target)))
            adagrads.append((_seconds(plain.update, ids, some), _seconds(push, store, own, some)))
        if turn == 0:
            gathers.clear()
            adagrads.clear()
    unique = statistics.mean(ids.size for ids in steps)

    def told(pairs: list[tuple[float, float]]) -> tuple[float, float, float]:
        theirs, ours = (unique / statistics.median(side) / 1e6 for side in zip(*pairs, strict=True))
        return theirs, ours, statistics.median(their / our for their, our in pairs)

    return Speed(rows, dim, kind, count, round(unique), *told(gathers), *told(adagrads))


def _seconds(call: Callable[..., Any], *arguments: Any) -> float:
    begun = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - begun
