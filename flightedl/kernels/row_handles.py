"""Access to tables by number, for loops that process the rows of many tables in one call.

Each array that is passed to compiled code makes a call slower, and a table has many arrays. So the store has a *handle*
for each table, which contains the addresses and sizes of its arrays, and the settings that every call needs. A table's
arrays do not move. When one of them is replaced, the handle is written again.

The *work* of a call has one line of numbers for each section of the request: the section's table, ids and values.
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

# A handle contains the address and size of each array of ``Table`` and of a second thread's scratch memory, and then:
SALT = 38
DIM = 39
VALUE_WORDS = 40  # number of words of a row's values
HANDLE_SIZE = 41

_SCRATCH = 30  # position of ``tags`` and ``places``,
_BESIDE = 34  # and of the second thread's ``tags`` and ``places``

# Numbers of a section in a call's work:
TABLE = 0
FIRST = 1  # Position of the section's first id.
COUNT = 2  # Number of its ids.
VALUES = 3  # Position of its first value.
OLDEST_VERSION = 4  # Rows with lower versions are expired.
OLDEST_EPOCH = 5  # Rows with lower epochs are expired.
CONSTANTS = 6  # Index of the optimizer's constants.
MISSED = 7  # Result: the number of ids without a row.
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
