"""Allocate the records of one table, and their index (see ``kernels.row_records``)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from flightedl.domain.tables.spec import TableSpec
from flightedl.kernels import row_records
from flightedl.rowstore.memory import reserved

_WORD_BYTES = 4
_SEGMENT_BYTES = row_records.LINES * 64
#: Number of segments of an empty index.
_FIRST_SEGMENTS = 2
_NO_COUNTS = np.empty(0, np.int32)
_VERSIONS_BYTES = 1 << 34
_EPOCHS_BYTES = 1 << 24


def new_table(
    layout: list[int],
    memory_bytes: int,
    shifts: npt.NDArray[np.int64],
    ages: npt.NDArray[np.int64],
    limit: int = 0,
    *,
    is_counted_by_age: bool,
) -> row_records.Table:
    """Return a table without records.

    Args:
        layout: Layout of a record.
        memory_bytes: Maximum memory of the records.
        shifts: Shifts of the store's buckets.
        ages: Ages of the table's buckets.
        limit: Maximum number of rows in a bucket; 0 for no limit. Always 0 for waiting ids.
        is_counted_by_age: True to count records by age, because they may expire.
    """
    words = reserved(memory_bytes, np.uint32, may_be_less=True)
    most = words.size // layout[row_records.STRIDE]
    lines = reserved(max(_FIRST_SEGMENTS, -(-most // 256)) * _SEGMENT_BYTES, np.uint64, may_be_less=True)
    segments = lines.size * 8 // _SEGMENT_BYTES
    bits = most // 8 + 8
    counts_bytes = (0 if limit else _VERSIONS_BYTES, _EPOCHS_BYTES) if is_counted_by_age else (0, 0)
    by_version, by_epoch = (
        reserved(size, np.int32) if size and layout[at] >= 0 else _NO_COUNTS
        for size, at in zip(counts_bytes, (row_records.AT_VERSION, row_records.AT_EPOCH), strict=True)
    )
    state = np.zeros(row_records.STATE_SIZE, np.int64)
    state[row_records.SEGMENTS] = _FIRST_SEGMENTS
    state[row_records.DEPTH] = 1
    state[row_records.RECORD_LIMIT] = most
    state[row_records.SEGMENT_LIMIT] = segments
    counts = reserved(segments * 8, np.int32)
    counts[1] = counts[3] = 1
    directory = reserved(_WORD_BYTES << row_records.MAX_DEPTH, np.uint32)
    directory[1] = 1
    return row_records.Table(
        words,
        lines,
        lines.view(np.uint32),
        directory,
        counts,
        reserved(bits, np.uint64),
        reserved(bits, np.uint64),
        np.zeros(row_records.MAX_CUTS * row_records.CUT_SIZE, np.int64),
        by_version,
        by_epoch,
        shifts,
        ages,
        _runs(limit),
        state,
        np.array(layout, np.int64),
        np.empty(row_records.SCRATCH_SIZE, np.uint64),
        np.empty(row_records.SCRATCH_SIZE, np.int64),
    )


def _runs(limit: int) -> npt.NDArray[np.uint32]:
    """Return memory for the runs. A bucket has at most ``limit + 1`` used and equally many empty runs."""
    if not limit:
        return np.empty(0, np.uint32)
    size = 2 * row_records.BUCKETS * (2 * limit + 4)
    return reserved(size * _WORD_BYTES, np.uint32)[:size]


def size_of(table: row_records.Table) -> int:
    """Return the size of the memory that a table has touched so far."""
    state = table.state.tolist()
    undone = int(table.cuts[row_records.UNDONE :: row_records.CUT_SIZE].sum())
    records = (state[row_records.HIGH] + undone) * int(table.layout[row_records.STRIDE]) * _WORD_BYTES
    index = state[row_records.SEGMENTS] * (_SEGMENT_BYTES + 8) + (_WORD_BYTES << state[row_records.DEPTH])
    return int(records + index + state[row_records.HIGH] // 4)


def layouts_of(spec: TableSpec, slot_words: int) -> tuple[list[int], list[int]]:
    """Return the layouts of two kinds of records: rows and waiting ids (see ``kernels.row_records``)."""
    at, layout, waiting, waiting_at = 2, [0], [0, 2], 3
    for place, has in enumerate(spec.history):
        layout.append(at if has else -1)
        at += has
        if place:
            waiting.append(waiting_at if has else -1)
            waiting_at += has
    layout += [at, at + slot_words]
    layout[0] = spec.row_words
    return layout, [waiting_at, *waiting[1:], waiting_at, waiting_at]
