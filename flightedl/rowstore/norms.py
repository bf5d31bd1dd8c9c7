"""Search for rows with a small norm, which a cut then removes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from flightedl.kernels import row_cuts, row_records
from flightedl.kernels.compiled_rows import row_kernel
from flightedl.rowstore.values import either_bits

if TYPE_CHECKING:
    from flightedl.rowstore.table import RowTable

#: Number of records whose norms are computed together; a multiple of 64.
TOGETHER = 1 << 14
#: Approximate number of records that the search examines per cut.
A_CUT = 1 << 20

Records = npt.NDArray[np.int64]


class SmallRows:
    """A search for rows with a small norm, repeated at each cut.

    A search examines rows that have changed since they were last examined. It examines a limited number of rows, so
    that pushes do not wait long. The next cut examines the remaining rows.

    Args:
        norm_below: Minimum Euclidean norm of a row.
    """

    def __init__(self, norm_below: float) -> None:
        self._norm_below = norm_below
        #: One bit per record, set if the record has changed since its norm was computed.
        self._unseen = np.empty(0, np.uint64)

    def found(self, measured: RowTable, oldest: tuple[int, int]) -> Records:
        """Return the records of unexpired rows with a small norm. ``oldest``: lowest unexpired version and epoch."""
        table = measured.rows
        size = -(-int(table.state[row_records.HIGH]) // TOGETHER) * (TOGETHER >> 6)
        unseen = np.zeros(size, np.uint64)
        known = either_bits(self._unseen, measured.changed(is_waiting=False))
        unseen[: known.size] = known
        self._unseen = unseen
        small, looked_at = [np.empty(0, np.int64)], 0
        for start in range(0, size << 6, TOGETHER):
            bits = slice(start >> 6, (start + TOGETHER) >> 6)
            changed = table.used[bits] & unseen[bits]
            if not changed.any():
                continue
            if looked_at > A_CUT:
                break
            unseen[bits] = 0
            records = start + np.flatnonzero(np.unpackbits(changed.view(np.uint8), bitorder="little"))
            looked_at += records.size
            values = measured.floats_of(records)
            norms = np.sqrt(np.einsum("ij,ij->i", values, values, dtype=np.float64))
            if (few := records[norms < self._norm_below]).size:
                there = np.empty(TOGETHER, np.int64)
                there = there[: row_kernel(row_cuts.existing)(table, measured.salt, *oldest, start, there)]
                small.append(np.intersect1d(few, there, assume_unique=True))
        return np.concatenate(small)
