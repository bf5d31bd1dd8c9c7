"""Memory allocator for the blocks' arrays: values, optimizer slots and accumulators.

Arrays are aligned, and cut from slabs. A slab is large enough for huge pages, which NumPy requests for arrays of 4 MiB
or more; with 4 KiB pages, address translation would take much of the time of a pass over the arrays. As long as there
is room, values are placed in memory that trainers on the same host can map (``values``). Slots are always in private
memory.

Slabs are never freed. Memory of moved values or released blocks is reused for arrays of the same size when it has no
readers left.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from flightedl.wire.rows import Array, Dtype
from flightedl.wire.shared_values import copy_past_cache

ALIGNMENT_BYTES = 64
#: The unused end of a slab is never touched, so it occupies at most a part of a huge page.
_SLAB_BYTES = 32 << 20


class Arena:
    """Allocator of aligned arrays. Thread-safe.

    Args:
        values: (n,) aligned bytes for values; None to allocate values from slabs, too.
    """

    def __init__(self, values: Array | None = None) -> None:
        #: Unused rest of ``values``.
        self._values: Array = np.empty(0, np.uint8) if values is None else values
        self.size_bytes = 0
        self._lock = threading.Lock()
        #: The unused part of the newest slab.
        self._slab: Array = np.empty(0, np.uint8)
        #: Former arrays of values, each with the readers that may still use the array.
        self._left: list[tuple[Array, Sequence[weakref.ref[Array]]]] = []
        #: Arrays of slots and accumulators that belonged to released blocks.
        self._released: list[Array] = []

    def allocate(
        self, element_count: int, dtype: npt.DTypeLike, fill: float = 0.0, *, is_values: bool = False
    ) -> Array:
        """Return an aligned (element_count,) array filled with ``fill``."""
        kind = np.dtype(dtype)
        size_bytes = element_count * kind.itemsize
        with self._lock:
            array = self._values_of(size_bytes, kind) if is_values else self._other_of(size_bytes, kind)
            self.size_bytes += size_bytes
        array.fill(fill)
        return array

    def release(self, values: Array, readers: Sequence[weakref.ref[Array]], others: Sequence[Array]) -> None:
        """Make the arrays of released blocks reusable; the values, only after all ``readers`` have been freed."""
        with self._lock:
            self._left.append((values, readers))
            self._released += others
            self.size_bytes -= values.nbytes + sum(array.nbytes for array in others)

    def move(self, values: Array, readers: Sequence[weakref.ref[Array]]) -> Array:
        """Return a copy that replaces ``values``. The old values may still be read until all ``readers`` are dead."""
        with self._lock:
            target = self._values_of(values.nbytes, values.dtype)
        copy_past_cache(target.view(np.uint8), values.view(np.uint8))
        # Release the old values only after copying them. Otherwise their readers might end, and another move could
        # overwrite the values during the copy.
        with self._lock:
            self._left.append((values, readers))
        return target

    def copy(self, array: Array) -> Array:
        """Return an aligned copy that does not count toward ``size_bytes`` and is freed with its last reference."""
        copied = self._aligned(array.nbytes).view(array.dtype)
        np.copyto(copied, array)
        return copied

    def _values_of(self, size_bytes: int, dtype: Dtype) -> Array:
        for place, (array, readers) in enumerate(self._left):
            if (array.nbytes, array.dtype) == (size_bytes, dtype) and all(reader() is None for reader in readers):
                del self._left[place]
                return array
        return self._cut_values(size_bytes).view(dtype)

    def _other_of(self, size_bytes: int, dtype: Dtype) -> Array:
        for place, array in enumerate(self._released):
            if (array.nbytes, array.dtype) == (size_bytes, dtype):
                del self._released[place]
                return array
        return self._cut(size_bytes).view(dtype)

    def _cut_values(self, size_bytes: int) -> Array:
        padded_bytes = -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        if padded_bytes > self._values.size:
            return self._cut(size_bytes)
        array, self._values = self._values[:size_bytes], self._values[padded_bytes:]
        return array

    def _cut(self, size_bytes: int) -> Array:
        padded_bytes = -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        if padded_bytes > self._slab.size:
            self._slab = self._aligned(max(padded_bytes, _SLAB_BYTES))
        array = self._slab[:size_bytes]
        self._slab = self._slab[padded_bytes:]
        return array

    @staticmethod
    def _aligned(size_bytes: int) -> Array:
        raw = np.empty(size_bytes + ALIGNMENT_BYTES, np.uint8)
        start = -raw.ctypes.data % ALIGNMENT_BYTES
        return raw[start : start + size_bytes]
