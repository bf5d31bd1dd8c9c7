"""Constants and sizes shared by compiled code and plain Python. Does not import numba."""

from __future__ import annotations

import numpy as np

#: Mask that selects a float32's bits without the sign.
MAGNITUDE = np.uint32(0x7FFFFFFF)
#: Lowest bits, without the sign, of an infinite float32 or NaN.
INFINITY = np.uint32(0x7F800000)


def index_size(count: int) -> int:
    """Return the size of an open-addressing index for ``count`` ids: a power of two, greater than ``2 * count``."""
    size = 1
    while size <= 2 * count:
        size *= 2
    return size
