"""Constants and sizes that compiled code and plain Python share. Does not import numba."""

from __future__ import annotations

import numpy as np

#: Mask for all bits of a float32 except the sign.
MAGNITUDE = np.uint32(0x7FFFFFFF)
#: Bits of the smallest float32 magnitude that is infinite or NaN.
INFINITY = np.uint32(0x7F800000)
#: Kinds of lists in a ``tf.train.Feature``: the numbers of its fields.
BYTES, FLOATS, INTEGERS = 1, 2, 3


def index_size(count: int) -> int:
    """Return the size of an open-addressing index for ``count`` ids: a power of two that exceeds ``2 * count``."""
    size = 1
    while size <= 2 * count:
        size *= 2
    return size
