"""The one place that allocates memory for blocks: aligned, in slabs, page-touched once.

Everything that lives as long as a block (values, slots, accumulators) comes from here, so that a later allocator, such
as one in shared memory, has one place to be. It is cut from slabs that are big enough for the kernel's huge pages, for
which NumPy asks from 4 MiB on: passes over 4 KiB pages spend a good part of their time on looking addresses up.

Values may lie in memory that trainers of the same host map (``values``), as long as there is room; slots never do.

Slabs are never freed. Memory that values were moved out of, or that belonged to blocks which have left (``release``),
is used for the next arrays of the same size, as soon as nobody reads it any more.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from flightedl.wire.shared_values import copy_past_cache

Array = npt.NDArray[np.generic]

ALIGNMENT_BYTES = 64
#: Untouched ends of slabs take no memory but for part of a huge page.
_SLAB_BYTES = 32 << 20


class Arena:
    """Hands out aligned arrays. Thread-safe.

    Args:
        values: (n,) aligned bytes for values; None: they lie where everything does.
    """

    def __init__(self, values: Array | None = None) -> None:
        #: What is left of it.
        self._values: Array = np.empty(0, np.uint8) if values is None else values
        self.size_bytes = 0
        self._lock = threading.Lock()
        self._slab: Array = np.empty(0, np.uint8)
        #: What values were moved out of, with its readers.
        self._left: list[tuple[Array, Sequence[weakref.ref[Array]]]] = []
        #: Other arrays of blocks that have left.
        self._released: list[Array] = []

    def allocate(
        self, element_count: int, dtype: npt.DTypeLike, fill: float = 0.0, *, is_values: bool = False
    ) -> Array:
        """An aligned (element_count,) array filled with ``fill``."""
        kind = np.dtype(dtype)
        size_bytes = element_count * kind.itemsize
        with self._lock:
            array = self._values_of(size_bytes, kind) if is_values else self._other_of(size_bytes, kind)
            self.size_bytes += size_bytes
        array.fill(fill)
        return array

    def release(self, values: Array, readers: Sequence[weakref.ref[Array]], others: Sequence[Array]) -> None:
        """Take back the arrays of blocks that leave; the values are still read as long as one of ``readers`` lives."""
        with self._lock:
            self._left.append((values, readers))
            self._released += others
            self.size_bytes -= values.nbytes + sum(array.nbytes for array in others)

    def move(self, values: Array, readers: Sequence[weakref.ref[Array]]) -> Array:
        """A copy that takes the place of ``values``, which are still read as long as one of ``readers`` lives."""
        with self._lock:
            target = self._values_of(values.nbytes, values.dtype)
        copy_past_cache(target.view(np.uint8), values.view(np.uint8))
        # Not before: its readers may end meanwhile, and other values of that size would be moved to where these are
        # still copied from.
        with self._lock:
            self._left.append((values, readers))
        return target

    def copy(self, array: Array) -> Array:
        """An aligned copy that is freed when it is dropped, and not counted."""
        copied = self._aligned(array.nbytes).view(array.dtype)
        np.copyto(copied, array)
        return copied

    def _values_of(self, size_bytes: int, dtype: np.dtype[Any]) -> Array:
        for place, (array, readers) in enumerate(self._left):
            if (array.nbytes, array.dtype) == (size_bytes, dtype) and all(reader() is None for reader in readers):
                del self._left[place]
                return array
        return self._cut_values(size_bytes).view(dtype)

    def _other_of(self, size_bytes: int, dtype: np.dtype[Any]) -> Array:
        for place, array in enumerate(self._released):
            if (array.nbytes, array.dtype) == (size_bytes, dtype):
                del self._released[place]
                return array
        return self._cut(size_bytes).view(dtype)

    def _cut_values(self, size_bytes: int) -> Array:
        """Where values lie, if there is room left."""
        whole_bytes = -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        if whole_bytes > self._values.size:
            return self._cut(size_bytes)
        array, self._values = self._values[:size_bytes], self._values[whole_bytes:]
        return array

    def _cut(self, size_bytes: int) -> Array:
        whole_bytes = -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        if whole_bytes > self._slab.size:
            self._slab = self._aligned(max(whole_bytes, _SLAB_BYTES))
        array = self._slab[:size_bytes]
        self._slab = self._slab[whole_bytes:]
        return array

    @staticmethod
    def _aligned(size_bytes: int) -> Array:
        raw = np.empty(size_bytes + ALIGNMENT_BYTES, np.uint8)
        start = -raw.ctypes.data % ALIGNMENT_BYTES
        return raw[start : start + size_bytes]
