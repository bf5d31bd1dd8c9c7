"""Tables by number, for loops that go through the rows of many of them in one call.

A call of compiled code takes the longer the more arrays it is given, and each table has many. So the store that has the
tables keeps a line of numbers for each, its *handle*: the addresses and sizes of its arrays, and what else is asked
of it at each call. A table's arrays never move; where one is replaced, its handle is written again.

What a call is about is a line of numbers for each section, the *work*: of which table, which ids, which values.
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

# handle: an address and a size of each array of ``Table``, the scratch memory of a second thread, and
SALT = 38  # of the table
DIM = 39
VALUE_WORDS = 40  # of a row's values
HANDLE_SIZE = 41

_SCRATCH = 30  # where those of ``tags`` and ``places`` are
_BESIDE = 34  # and those of the second thread

# work
TABLE = 0
FIRST = 1  # of its ids among all
COUNT = 2
VALUES = 3  # where its values begin among all
OLDEST_VERSION = 4  # older rows have expired
OLDEST_EPOCH = 5
CONSTANTS = 6  # which of the optimizer's
MISSED = 7  # filled: how many ids have no row
WORK_SIZE = 8


def write_handle(
    handle: Handles, table: Table, beside: tuple[npt.NDArray[Any], npt.NDArray[Any]], salt: int, dim: int, words: int
) -> None:
    """Say where a table is.

    Args:
        handle: Filled, (HANDLE_SIZE,).
        table: Whose arrays outlive the handle.
        beside: ``tags`` and ``places`` of a second thread.
        salt: Of the table.
        dim: Likewise.
        words: Of a row's values.
    """
    arrays = [*(getattr(table, name) for name in Table._fields), *beside]
    handle[:SALT] = [number for array in arrays for number in (array.ctypes.data, array.size)]
    handle[SALT : SALT + 1].view(np.uint64)[0] = salt
    handle[DIM], handle[VALUE_WORDS] = dim, words


@register_jitable
def table_at(handles: Handles, number: Any, is_beside: Any) -> Any:
    """The table of this number; ``is_beside``: for a second thread, which has scratch memory of its own."""
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
