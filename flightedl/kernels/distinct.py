"""What trainers do with a batch's ids and gradients, for numba to compile: each id once, gradients added up."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from flightedl.kernels.intrinsics import copy

Ids = npt.NDArray[np.uint64]
Places = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MAGNITUDE = np.uint32(0x7FFFFFFF)
_INFINITY = np.uint32(0x7F800000)


def number_ids(ids: Ids, index: npt.NDArray[np.int32], distinct: Ids, places: Places) -> int:
    """Number ids as they come.

    Args:
        ids: (n,).
        index: As many numbers of -1 as a power of two, more than n.
        distinct: (n,), filled: each id once.
        places: (n,), filled: the number of each id.

    Returns:
        How many are distinct.
    """
    mask, count = index.size - 1, 0
    bits = 0
    while index.size >> bits > 1:
        bits += 1
    shift = np.uint64(64 - bits)
    for i in range(ids.size):
        row_id = ids[i]
        at = np.int64((row_id * _GOLDEN) >> shift)
        while True:
            place = np.int64(index[at])
            if place < 0:
                index[at] = count
                distinct[count] = row_id
                place = np.int64(count)
                count += 1
                break
            if distinct[place] == row_id:
                break
            at = (at + 1) & mask
        places[i] = place
    return count


def add_up(gradients: Floats, bits: npt.NDArray[np.uint32], places: Places, sums: Floats) -> int:
    """Add up gradients by the numbers of their ids.

    Args:
        gradients: (n, dim).
        bits: The same memory.
        places: (n,), as ``number_ids`` gives them.
        sums: (m, dim), filled.

    Returns:
        The first row that has NaN or infinity, where this ends; -1: none has.
    """
    dim, new = gradients.shape[1], 0
    for i in range(places.size):
        place = places[i]
        largest = np.uint32(0)
        if place == new:
            new += 1
            for j in range(dim):
                largest = max(largest, bits[i, j] & _MAGNITUDE)
                sums[place, j] = gradients[i, j]
        else:
            for j in range(dim):
                largest = max(largest, bits[i, j] & _MAGNITUDE)
                sums[place, j] += gradients[i, j]
        if largest >= _INFINITY:
            return i
    return -1


def spread(rows: Floats, places: Places, width: int, out: Floats) -> None:
    """Rows, ``width`` numbers each, by number, to ``out``."""
    for i in range(places.size):
        copy(out, i * width, rows, places[i] * width, width)
