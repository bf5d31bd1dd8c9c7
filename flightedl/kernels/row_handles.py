"""Access to tables by number, for loops that process rows of many tables in one call.

Every array that is passed to compiled code makes the call slower, and each table has many arrays. So the store keeps a
*handle* for each table: the addresses and sizes of its arrays and the settings that every call needs. A table's arrays
never move; when one of them is replaced, the handle is written again.

The *work* of a call has a line of numbers for each section of the request, which locates its table, ids and values.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba.extending import register_jitable

from flightedl.kernels.intrinsics import counts_at, longs_at, numbers_at, words_at
from flightedl.kernels.row_records import Table

Handles = npt.NDArray[np.int64]
Work = npt.NDArray[np.int64]

# handle: address and size of each array of ``Table`` and of a second thread's scratch memory; then the following
SALT = 38
DIM = 39
VALUE_WORDS = 40  # words of a row's values
HANDLE_SIZE = 41

_SCRATCH = 30  # place of ``tags`` and ``places``
_BESIDE = 34  # place of the second thread's ``tags`` and ``places``

# work: a section's
TABLE = 0
FIRST = 1  # place of its first id among all ids
COUNT = 2  # number of ids
VALUES = 3  # place of its first value among all values
OLDEST_VERSION = 4  # rows of lower versions have expired
OLDEST_EPOCH = 5  # rows of lower epochs have expired
CONSTANTS = 6  # index of the optimizer's constants
MISSED = 7  # filled with the number of ids without a row
WORK_SIZE = 8


def write_handle(
    handle: Handles, table: Table, beside: tuple[npt.NDArray[Any], npt.NDArray[Any]], salt: int, dim: int, words: int
) -> None:
    """Write the handle of a table.

    Args:
        handle: (HANDLE_SIZE,), filled.
        table: The table; its arrays must outlive the handle.
        beside: ``tags`` and ``places`` of a second thread.
        salt: Salt of the table's ids.
        dim: Elements of a row.
        words: Words of a row's values.
    """
    arrays = [*(getattr(table, name) for name in Table._fields), *beside]
    handle[:SALT] = [number for array in arrays for number in (array.ctypes.data, array.size)]
    handle[SALT : SALT + 1].view(np.uint64)[0] = salt
    handle[DIM], handle[VALUE_WORDS] = dim, words


@register_jitable
def table_at(handles: Handles, number: Any, is_beside: Any) -> Any:
    """Return a table by number; ``is_beside`` selects the scratch memory of the second thread."""
    at = number * HANDLE_SIZE
    scratch = at + (_BESIDE if is_beside else _SCRATCH)
    return Table(
        words_at(handles, at),
        longs_at(handles, at + 2),
        words_at(handles, at + 4),
        words_at(handles, at + 6),
        counts_at(handles, at + 8),
        longs_at(handles, at + 10),
        longs_at(handles, at + 12),
        numbers_at(handles, at + 14),
        counts_at(handles, at + 16),
        counts_at(handles, at + 18),
        numbers_at(handles, at + 20),
        numbers_at(handles, at + 22),
        words_at(handles, at + 24),
        numbers_at(handles, at + 26),
        numbers_at(handles, at + 28),
        longs_at(handles, scratch),
        numbers_at(handles, scratch + 2),
    )
