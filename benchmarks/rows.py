"""Reads and updates of a pserver's rows against NumPy on a plain array, and a table as it grows tenfold.

python -m benchmarks.rows [speed] [growth] [ROWS] [DIM]        # 1,000,000 rows of 16
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from flightedl.domain.model.initial import Uniform
from flightedl.domain.tables.optimizers import RowAdagrad
from flightedl.domain.tables.spec import TableSpec
from flightedl.pserver.rows.tables import RowCut, RowTables, TableGradients
from flightedl_tools.bench.processes import resident_bytes
from flightedl_tools.bench.sides import print_table, ratio
from flightedl_tools.bench.table_work import EPS, RATE, skewed

Numbers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
#: New rows of one push while a store is filled, and ids of a step of a growing table.
FILL = 4096
TURNS, BATCHES = 5, 16
COUNTS = (4096, 65536)


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


def new_store(dim: int) -> RowTables:
    """One table, all buckets."""
    return RowTables([TableSpec("bench", dim, RowAdagrad(lr=RATE, eps=EPS), Uniform(0.01))], range(1024))


def push(store: RowTables, ids: npt.NDArray[np.uint64], gradients: Floats) -> None:
    """Update rows, or make them."""
    store.update([TableGradients(0, ids, gradients)], version=1, epoch=0, number=0)


def fill(store: RowTables, start: int, stop: int, dim: int) -> list[tuple[float, float]]:
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
    """Return the ids of some steps, each without repetitions, in random order."""
    random = np.random.default_rng(count)
    order = random.permutation(rows)
    return [
        random.permutation(np.unique(skewed(random, order, count) if is_skewed else random.integers(0, rows, count)))
        for _ in range(BATCHES)
    ]


def seconds_of(call: Callable[..., Any], *arguments: Any) -> float:
    """Return the seconds of one call."""
    begun = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - begun


def print_speed(rows: int, dim: int, counts: tuple[int, ...] = COUNTS) -> None:
    """Let both sides take turns call by call."""
    store, plain = new_store(dim), NumpyRows(rows, dim)
    fill(store, 0, rows, dim)
    found = []
    for is_skewed in (False, True):
        for count in counts:
            gradients, out = np.full((count, dim), 0.01, np.float32), np.empty((count, dim), np.float32)
            times: list[list[float]] = [[], [], [], []]
            steps = batches(rows, count, is_skewed=is_skewed)
            for ids in steps * TURNS:
                own, some = ids.view(np.uint64), gradients[: ids.size]
                times[0].append(seconds_of(plain.read, ids))
                times[1].append(seconds_of(store.read, 0, own, 1, 0, out[: ids.size]))
                times[2].append(seconds_of(plain.update, ids, some))
                times[3].append(seconds_of(push, store, own, some))
            unique = statistics.mean(ids.size for ids in steps)
            warm = [each[BATCHES:] for each in times]
            rates = [f"{unique / statistics.median(each) / 1e6:.1f}" for each in warm]
            kind = f"{rows / 1e6:g} M x {dim}, {'Zipf 1.05' if is_skewed else 'uniform'}"
            ratios = f"{ratio(warm[0], warm[1]):.2f}", f"{ratio(warm[2], warm[3]):.2f}"
            found.append((kind, f"{count:,}", *rates[:2], ratios[0], *rates[2:], ratios[1]))
    columns = ("rows", "ids a step", "NumPy read", "read", "ratio", "NumPy row-wise Adagrad", "ours", "ratio")
    print_table("million rows a second of one pserver, medians of alternated calls", columns, found)


def step_s(store: RowTables, rows: int, dim: int) -> float:
    """Return the median seconds of reading and updating rows."""
    gradients, out = np.full((FILL, dim), 0.01, np.float32), np.empty((FILL, dim), np.float32)
    seconds = []
    for ids in batches(rows, FILL, is_skewed=False) * 8:
        own = ids.view(np.uint64)
        taken = seconds_of(store.read, 0, own, 1, 0, out[: ids.size])
        seconds.append((taken + seconds_of(push, store, own, gradients[: ids.size])) / ids.size * FILL)
    return statistics.median(seconds)


def begin(store: RowTables, *, is_base: bool) -> tuple[float, RowCut]:
    """Begin a cut, and return how long that takes."""
    begun = time.perf_counter()
    cut = store.begin_cut(1, 0, file="base" if is_base else "increment", after="" if is_base else "base")
    return time.perf_counter() - begun, cut


def read(cut: RowCut) -> tuple[float, int, float]:
    """Return seconds and bytes of all rows of a cut, and the seconds of its longest chunk."""
    seconds, size_bytes = [], 0
    while True:
        begun = time.perf_counter()
        chunk = cut.next_rows()
        seconds.append(time.perf_counter() - begun)
        if chunk is None:
            return sum(seconds), size_bytes, max(seconds)
        size_bytes += chunk.ids.nbytes + chunk.values.nbytes + chunk.slots.nbytes


def print_growth(rows: int, dim: int) -> None:
    """Fill a store, measuring on the way, and cut a base and an increment of it."""
    fill(new_store(dim), 0, 1 << 14, dim)  # Compiles the loops.
    before, store = resident_bytes(os.getpid()), new_store(dim)
    fill(store, 0, rows // 10, dim)
    small = step_s(store, rows // 10, dim)
    begun = time.perf_counter()
    pushes = fill(store, rows // 10, rows, dim)
    made_per_s = (rows - rows // 10) / (time.perf_counter() - begun)
    memory, limit = resident_bytes(os.getpid()) - before, 1.3 * rows * (dim + 1) * 4 + 200e6
    step = step_s(store, rows, dim)
    cut_s, cut = begin(store, is_base=True)
    base_s, base_bytes, longest = read(cut)
    touched = np.random.default_rng(2).choice(rows, rows // 100, replace=False).astype(np.uint64)
    for some in np.array_split(touched, -(-touched.size // FILL)):
        push(store, some, np.full((some.size, dim), 0.01, np.float32))
    began_s, increment = begin(store, is_base=False)
    more_s, more_bytes, longest_of_more = read(increment)
    of_pushes = max(s for s, _ in pushes), max(s for _, s in pushes), statistics.median(s for s, _ in pushes)
    found = (
        ("a step of 4,096 ids, by the time with a tenth of the rows", f"{step / small:.2f} x, {step * 1e3:.2f} ms"),
        ("rows made a second", f"{made_per_s / 1e6:.1f} M"),
        (
            "a push that makes 4,096 rows: longest, longest on the processor, median",
            ", ".join(f"{each * 1e3:.1f} ms" for each in of_pushes),
        ),
        ("memory, by 1.3 x (values + slots) + 200 MB", f"{memory / 1e6:.0f} MB, {limit / 1e6:.0f} MB"),
        (
            "pushes wait for a checkpoint: at its beginning, for a chunk",
            f"{max(cut_s, began_s) * 1e3:.1f} ms, {max(longest, longest_of_more) * 1e3:.1f} ms",
        ),
        ("a base: copied in, bytes", f"{(base_s + cut_s) * 1e3:.0f} ms, {base_bytes / 1e6:.0f} MB"),
        (
            "an increment, 1 % of the rows updated: by a base's time, by its bytes",
            f"{(more_s + began_s) / (base_s + cut_s):.1%}, {more_bytes / base_bytes:.1%}",
        ),
    )
    print_table(f"{rows / 1e6:g} M x {dim} float32, row-wise Adagrad", ("what", "measured"), found)


def main(*arguments: str) -> None:
    """Measure the parts that are named, else both."""
    parts = [each for each in arguments if not each.isdecimal()] or ["speed", "growth"]
    rows, dim, *_ = *[int(each) for each in arguments if each.isdecimal()], 1_000_000, 16
    if "growth" in parts:
        print_growth(rows, dim)
    if "speed" in parts:
        print_speed(rows, dim, tuple(count for count in COUNTS if count <= rows))


if __name__ == "__main__":
    main(*sys.argv[1:])
