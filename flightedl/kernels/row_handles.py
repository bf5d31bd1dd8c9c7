"""Access to tables by number, for loops that process the rows of many tables in one call.

Each array argument makes a call to compiled code slower, and a table has many arrays. So the store has a *handle* for
each table, which contains the addresses and sizes of its arrays, and the settings that every call needs. A table's
arrays do not move. When one of them is replaced, the handle is written again.

The *work* of a call has one line of numbers for each section of the request. The line locates the section's table, ids
and values.
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

# A handle contains the address and size of each array of ``Table`` and of a second thread's scratch memory. These are
# followed by the salt, the number of elements in a row, and the number of words that a row's values take.
SALT = 38
DIM = 39
VALUE_WORDS = 40
HANDLE_SIZE = 41

# Positions in a handle of ``tags`` and ``places``, for the calling thread and for the second thread.
_SCRATCH = 30
_BESIDE = 34

# A line of a call's work describes one section of the request. ``FIRST`` is the position of the section's first id,
# ``COUNT`` the number of its ids, and ``VALUES`` the position of its first value. Rows with versions below
# ``OLDEST_VERSION`` or epochs below ``OLDEST_EPOCH`` are expired. ``CONSTANTS`` is the index of the optimizer's
# constants, and the call sets ``MISSED`` to the number of ids without a row.
TABLE = 0
FIRST = 1
COUNT = 2
VALUES = 3
OLDEST_VERSION = 4
OLDEST_EPOCH = 5
CONSTANTS = 6
MISSED = 7
WORK_SIZE = 8


def write_handle(
    handle: Handles, table: Table, beside: tuple[npt.NDArray[Any], npt.NDArray[Any]], salt: int, dim: int, words: int
) -> None:
    """Write the handle of a table.

    Args:
        handle: (HANDLE_SIZE,) Filled with the handle.
        table: The table. Its arrays must outlive the handle.
        beside: ``tags`` and ``places`` of the second thread.
        salt: Salt of the table's ids.
        dim: Number of elements in a row.
        words: Number of words that a row's values take.
    """
    arrays = [*(getattr(table, name) for name in Table._fields), *beside]
    handle[:SALT] = [number for array in arrays for number in (array.ctypes.data, array.size)]
    handle[SALT : SALT + 1].view(np.uint64)[0] = salt
    handle[DIM], handle[VALUE_WORDS] = dim, words


@register_jitable
def table_at(handles: Handles, number: Any, is_beside: Any) -> Any:
    """Return a table by its number. ``is_beside`` selects the second thread's scratch memory."""
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
