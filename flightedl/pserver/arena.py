"""The one place that allocates memory for blocks: aligned, contiguous per kind, page-touched once.

Everything that lives as long as a block (values, slots, accumulators) comes from here, so that a later allocator, such
as one in shared memory, has one place to be.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

ALIGNMENT_BYTES = 64


class Arena:
    """Hands out aligned arrays. Not thread-safe: used while a shard is built, then under a block's lock."""

    def __init__(self) -> None:
        self.size_bytes = 0

    def allocate(self, element_count: int, dtype: npt.DTypeLike, fill: float = 0.0) -> npt.NDArray[np.generic]:
        """An aligned (element_count,) array filled with ``fill``."""
        kind = np.dtype(dtype)
        array = self._aligned(element_count, kind)
        array.fill(fill)
        self.size_bytes += array.nbytes
        return array

    def copy(self, array: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
        """An aligned copy that takes the array's place: it is not counted, because the array will be freed."""
        copied = self._aligned(array.size, array.dtype)
        np.copyto(copied, array)
        return copied

    @staticmethod
    def _aligned(element_count: int, kind: np.dtype[np.generic]) -> npt.NDArray[np.generic]:
        raw = np.empty(element_count * kind.itemsize + ALIGNMENT_BYTES, np.uint8)
        start = -raw.ctypes.data % ALIGNMENT_BYTES
        return raw[start : start + element_count * kind.itemsize].view(kind)
