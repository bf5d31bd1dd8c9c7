"""A table of a pserver as it grows tenfold, and its checkpoints.

python -m benchmarks.rows [ROWS] [DIM]        # 1,000,000 rows of 16
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
from flightedl.rowstore.tables import RowCut, RowTables, TableGradients
from flightedl_tools.bench.sides import print_table
from flightedl_tools.bench.tables import EPS, RATE
from flightedl_tools.bench.workers import resident_bytes

Floats = npt.NDArray[np.float32]
#: New rows of one push while a store is filled, and ids of a step of a growing table.
FILL = 4096
BATCHES = 16


def new_store(dim: int) -> RowTables:
    """One table, all buckets."""
    return RowTables([TableSpec("bench", dim, RowAdagrad(lr=RATE, eps=EPS), Uniform(0.01))], range(1024))


def push(store: RowTables, ids: npt.NDArray[np.uint64], gradients: Floats) -> None:
    """Update rows, or create them."""
    store.update([TableGradients(0, ids, gradients)], version=1, epoch=0)


def fill(store: RowTables, start: int, stop: int, dim: int) -> list[tuple[float, float]]:
    """Create rows with these ids, a few thousand per push. Return the pushes' seconds of wall time and of CPU time."""
    gradients = np.full((FILL, dim), 0.01, np.float32)
    seconds = []
    for first in range(start, stop, FILL):
        ids = np.arange(first, min(first + FILL, stop), dtype=np.uint64)
        begun, begun_cpu = time.perf_counter(), time.thread_time()
        push(store, ids, gradients[: ids.size])
        seconds.append((time.perf_counter() - begun, time.thread_time() - begun_cpu))
    return seconds


def seconds_of(call: Callable[..., Any], *arguments: Any) -> float:
    """Return the seconds of one call."""
    begun = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - begun


def step_s(store: RowTables, rows: int, dim: int) -> float:
    """Return the median seconds of reading and updating rows."""
    gradients, out = np.full((FILL, dim), 0.01, np.float32), np.empty((FILL, dim), np.float32)
    seconds = []
    random = np.random.default_rng(0)
    for ids in [np.unique(random.integers(0, rows, FILL)) for _ in range(BATCHES)] * 8:
        own = random.permutation(ids).view(np.uint64)
        taken = seconds_of(store.read, 0, own, 1, 0, out[: ids.size])
        seconds.append((taken + seconds_of(push, store, own, gradients[: ids.size])) / ids.size * FILL)
    return statistics.median(seconds)


def begin(store: RowTables, *, is_base: bool) -> tuple[float, RowCut]:
    """Begin a cut, and return how long that takes."""
    begun = time.perf_counter()
    cut = store.begin_cut(1, 0, file="base" if is_base else "increment", after="" if is_base else "base")
    return time.perf_counter() - begun, cut


def read(cut: RowCut) -> tuple[float, int, float]:
    """Read all rows of a cut. Return the seconds, the bytes, and the seconds of the slowest chunk."""
    seconds, size_bytes = [], 0
    while True:
        begun = time.perf_counter()
        chunk = cut.next_rows()
        seconds.append(time.perf_counter() - begun)
        if chunk is None:
            return sum(seconds), size_bytes, max(seconds)
        size_bytes += chunk.ids.nbytes + chunk.values.nbytes + chunk.slots.nbytes


def main(rows: int = 1_000_000, dim: int = 16) -> None:
    """Measure a store while it is filled, then a base and an increment of it."""
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


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
