"""Small things that compiled code and the Python around it say in the same way; numba is not imported for them."""

from __future__ import annotations

import numpy as np

#: Of the bits of a float32 number: all but its sign.
MAGNITUDE = np.uint32(0x7FFFFFFF)
#: From this magnitude on it is infinite or NaN.
INFINITY = np.uint32(0x7F800000)


def index_size(count: int) -> int:
    """Places of an index of ``count`` ids with open addressing: a power of two, and more than twice as many."""
    size = 1
    while size <= 2 * count:
        size *= 2
    return size
