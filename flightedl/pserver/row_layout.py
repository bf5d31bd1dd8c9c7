"""The memory of one table's records and their index, see ``kernels.rows``."""

from __future__ import annotations

import numpy as np

from flightedl.domain.tables.spec import TableSpec
from flightedl.kernels import rows
from flightedl.pserver.row_memory import reserved

_WORD_BYTES = 4
_SEGMENT_BYTES = rows.LINES * 64
_NO_COUNTS = np.empty(0, np.int32)
_NO_BITS = np.empty(0, np.uint64)
_NO_WORDS = np.empty(0, np.uint32)
_VERSIONS_BYTES = 1 << 34
_EPOCHS_BYTES = 1 << 24


def new_table(layout: list[int], memory_bytes: int, *, is_counted_by_age: bool) -> rows.Table:
    """Memory for records of this layout: as much as ``memory_bytes`` could hold."""
    words = reserved(memory_bytes, np.uint32, may_be_less=True)
    most = words.size // layout[rows.STRIDE]
    lines = reserved(-(-most // 256) * _SEGMENT_BYTES, np.uint64, may_be_less=True)
    segments = lines.size * 8 // _SEGMENT_BYTES
    bits = most // 8 + 8
    ages = (_VERSIONS_BYTES, _EPOCHS_BYTES) if is_counted_by_age else (0, 0)
    by_version, by_epoch = (
        reserved(size, np.int32) if size and layout[at] >= 0 else _NO_COUNTS
        for size, at in zip(ages, (rows.AT_VERSION, rows.AT_EPOCH), strict=True)
    )
    state = np.zeros(rows.STATE_SIZE, np.int64)
    state[rows.SEGMENTS] = 2
    state[rows.DEPTH] = 1
    state[rows.RECORD_LIMIT] = most
    state[rows.SEGMENT_LIMIT] = segments
    counts = reserved(segments * 8, np.int32)
    counts[1] = counts[3] = 1
    directory = reserved(_WORD_BYTES << rows.MAX_DEPTH, np.uint32)
    directory[1] = 1
    return rows.Table(
        words,
        lines,
        lines.view(np.uint32),
        directory,
        counts,
        reserved(bits, np.uint64),
        reserved(bits, np.uint64),
        _NO_BITS,
        _NO_WORDS,
        by_version,
        by_epoch,
        state,
        np.array(layout, np.int64),
        np.empty(rows.SCRATCH_SIZE, np.uint64),
        np.empty(rows.SCRATCH_SIZE, np.int64),
    )


def size_of(table: rows.Table) -> int:
    """Bytes that it has touched."""
    state = table.state.tolist()
    records = (state[rows.HIGH] + state[rows.UNDO]) * int(table.layout[rows.STRIDE]) * _WORD_BYTES
    index = state[rows.SEGMENTS] * (_SEGMENT_BYTES + 8) + (_WORD_BYTES << state[rows.DEPTH])
    return int(records + index + state[rows.HIGH] // 4)


def layouts_of(spec: TableSpec, slot_words: int) -> tuple[list[int], list[int]]:
    """Where the fields of a record are, see ``kernels.rows``: of rows, and of ids that wait."""
    evict = spec.evict
    history = (
        spec.counts_updates,
        evict is not None and evict.goes_by_version,
        evict is not None and evict.goes_by_epoch,
    )
    at, layout, waiting, waiting_at = 2, [0], [0, 2], 3
    for place, has in enumerate(history):
        layout.append(at if has else -1)
        at += has
        if place:
            waiting.append(waiting_at if has else -1)
            waiting_at += has
    layout += [at, at + slot_words]
    layout[0] = spec.row_words
    return layout, [waiting_at, *waiting[1:], waiting_at, waiting_at]
