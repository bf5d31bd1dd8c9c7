"""Compiled code for trainers that deduplicates a batch's ids and sums their gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba.extending import register_jitable

from flightedl.kernels.intrinsics import copy
from flightedl.kernels.plain import INFINITY, MAGNITUDE, index_size

Ids = npt.NDArray[np.uint64]
Places = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_index_size = register_jitable(index_size)


@register_jitable
def _number_ids(ids: Any, index: Any, distinct: Any, places: Any) -> Any:
    """Number a table's distinct ids in order of appearance. ``index`` is scratch memory of a power of two elements."""
    mask, count = index.size - 1, 0
    bits = 0
    while index.size >> bits > 1:
        bits += 1
    shift = np.uint64(64 - bits)
    index[:] = -1
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


def number_ids(ids: Ids, counts: Places, index: npt.NDArray[np.int32], distinct: Ids, places: Places) -> int:
    """Number the distinct ids of several tables in order of appearance, separately for each table.

    Args:
        ids: (n,) ids of all tables, one table after the other.
        counts: (tables,) number of ids of each table. Replaced by the numbers of distinct ids.
        index: Scratch memory with ``index_size`` elements for the largest count.
        distinct: (n,) Filled with the distinct ids, one table after the other.
        places: (n,) Filled with the number of each id.

    Returns:
        The total number of distinct ids of all tables.
    """
    at = total = 0
    for table in range(counts.size):
        count = counts[table]
        end, size = at + count, _index_size(count)
        found = _number_ids(ids[at:end], index[:size], distinct[total:], places[at:end])
        counts[table] = found
        at, total = end, total + found
    return total


def add_up(gradients: Floats, bits: npt.NDArray[np.uint32], places: Places, sums: Floats) -> int:
    """Sum the gradients of each id, given the ids' numbers. Stop at the first row with NaN or infinity.

    Args:
        gradients: (n, dim).
        bits: The same memory, as bits.
        places: (n,) output of ``number_ids``.
        sums: (m, dim) Filled with the sums.

    Returns:
        The index of the first row with NaN or infinity, or -1 if there is none.
    """
    dim, new = gradients.shape[1], 0
    for i in range(places.size):
        place = places[i]
        largest = np.uint32(0)
        if place == new:
            new += 1
            for j in range(dim):
                largest = max(largest, bits[i, j] & MAGNITUDE)
                sums[place, j] = gradients[i, j]
        else:
            for j in range(dim):
                largest = max(largest, bits[i, j] & MAGNITUDE)
                sums[place, j] += gradients[i, j]
        if largest >= INFINITY:
            return i
    return -1


def spread(rows: Floats, places: Places, width: int, out: Floats) -> None:
    """Copy rows of ``width`` elements to ``out``, in the order of ``places``."""
    for i in range(places.size):
        copy(out, i * width, rows, places[i] * width, width)


_spread = register_jitable(spread)


def spread_tables(rows: Floats, starts: Places, widths: Places, counts: Places, places: Places, out: Floats) -> None:
    """Copy rows of several tables to ``out``; see ``spread``.

    Args:
        rows: Flattened rows of all tables.
        starts: (tables,) offset in ``rows`` of each table's first row.
        widths: (tables,) number of elements in a row.
        counts: (tables,) number of ``places`` of each table.
        places: (n,) row numbers, one table after the other.
        out: Filled with the rows, one table after the other.
    """
    at = target = 0
    for table in range(counts.size):
        end, width = at + counts[table], widths[table]
        _spread(rows[starts[table] :], places[at:end], width, out[target:])
        target += (end - at) * width
        at = end


def are_equal(ids: Ids, others: Ids) -> bool:
    """True if the ids are equal and in the same order."""
    if ids.size != others.size:
        return False
    difference = np.uint64(0)
    for i in range(ids.size):
        difference |= ids[i] ^ others[i]
    return bool(difference == np.uint64(0))


def first_not_finite(bits: npt.NDArray[np.uint32], width: int) -> int:
    """Return the index of the first row that contains NaN or infinity, or -1 if none does.

    Args:
        bits: (n * width,) float32 numbers, as bits.
        width: Number of elements in a row.
    """
    largest = np.uint32(0)
    for i in range(bits.size):
        largest = max(largest, bits[i] & MAGNITUDE)
    if largest < INFINITY:
        return -1
    for i in range(bits.size):
        if bits[i] & MAGNITUDE >= INFINITY:
            return i // width
    return -1
