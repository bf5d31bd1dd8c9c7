"""A pserver's rows while they become many, and what a checkpoint of them costs: time, pauses, memory, bytes."""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import dataclass

import numpy as np

from flightedl.pserver.row_store import RowCut, RowStore

from ..processes import resident_bytes
from .speed import batches, fill, new_store, push

#: Of the steps that are compared.
_IDS_A_STEP = 4096


@dataclass(frozen=True, slots=True)
class Growth:
    """What one store went through."""

    rows: int
    dim: int
    #: Read and update of the same number of ids, with a tenth of the rows and with all.
    small_step_s: float
    step_s: float
    #: Rows made a second.
    made_per_s: float
    #: The longest of the pushes that made rows: by the clock, where a busy machine counts, and by the processor; the
    #: median.
    longest_push_s: float
    longest_push_cpu_s: float
    push_s: float
    #: Resident memory that came with the rows, and that of their values and slots alone.
    memory_bytes: int
    numbers_bytes: int
    #: Pushes wait for the beginning of a checkpoint, and for each chunk of it.
    cut_s: float
    longest_chunk_s: float
    base_s: float
    base_bytes: int
    #: When one row in a hundred was updated.
    increment_s: float
    increment_bytes: int

    @property
    def step_ratio(self) -> float:
        """Time of a step with all rows by that with a tenth."""
        return self.step_s / self.small_step_s

    @property
    def memory_limit_bytes(self) -> float:
        """1.3 times values and slots, and 200 MB."""
        return 1.3 * self.numbers_bytes + 200e6


def measure(rows: int, dim: int) -> Growth:
    """Fill a store to ``rows`` rows, with measurements on the way."""
    fill(new_store(dim), 0, 1 << 14, dim)  # Machine code is there now.
    before = resident_bytes(os.getpid())
    store = new_store(dim)
    fill(store, 0, rows // 10, dim)
    small = _step_s(store, rows // 10, dim)
    begun = time.perf_counter()
    seconds = fill(store, rows // 10, rows, dim)
    made_per_s = (rows - rows // 10) / (time.perf_counter() - begun)
    memory = resident_bytes(os.getpid()) - before
    step = _step_s(store, rows, dim)
    cut_s, cut = _begin(store, is_base=True)
    base_s, base_bytes, longest = _read(cut)
    touched = np.random.default_rng(2).choice(rows, rows // 100, replace=False).astype(np.uint64)
    for some in np.array_split(touched, -(-touched.size // _IDS_A_STEP)):
        push(store, some, np.full((some.size, dim), 0.01, np.float32))
    began_s, increment = _begin(store, is_base=False)
    increment_s, increment_bytes, longest_of_increment = _read(increment)
    return Growth(
        rows,
        dim,
        small,
        step,
        made_per_s,
        max(push_s for push_s, _ in seconds),
        max(cpu_s for _, cpu_s in seconds),
        statistics.median(push_s for push_s, _ in seconds),
        memory,
        rows * (dim + 1) * 4,
        max(cut_s, began_s),
        max(longest, longest_of_increment),
        base_s + cut_s,
        base_bytes,
        increment_s + began_s,
        increment_bytes,
    )


def _step_s(store: RowStore, rows: int, dim: int) -> float:
    gradients = np.full((_IDS_A_STEP, dim), 0.01, np.float32)
    out = np.empty((_IDS_A_STEP, dim), np.float32)
    seconds = []
    for _ in range(8):
        for ids in batches(rows, _IDS_A_STEP, is_skewed=False):
            own = ids.view(np.uint64)
            begun = time.perf_counter()
            store.read(0, own, 1, 0, out[: ids.size])
            push(store, own, gradients[: ids.size])
            seconds.append((time.perf_counter() - begun) / ids.size * _IDS_A_STEP)
    return statistics.median(seconds)


def _begin(store: RowStore, *, is_base: bool) -> tuple[float, RowCut]:
    begun = time.perf_counter()
    cut = store.begin_cut(1, 0, file="base" if is_base else "increment", after="" if is_base else "base")
    return time.perf_counter() - begun, cut


def _read(cut: RowCut) -> tuple[float, int, float]:
    """Seconds and bytes of all rows, and the seconds of the longest chunk."""
    seconds, size_bytes, longest = 0.0, 0, 0.0
    while True:
        begun = time.perf_counter()
        chunk = cut.next_rows()
        took = time.perf_counter() - begun
        seconds, longest = seconds + took, max(longest, took)
        if chunk is None:
            return seconds, size_bytes, longest
        size_bytes += chunk.ids.nbytes + chunk.values.nbytes + chunk.slots.nbytes
