"""Save rows to checkpoints, and restore them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.extending import register_jitable

from flightedl.kernels.intrinsics import copy, longs_at, trailing_zeros
from flightedl.kernels.row_index import find, in_bucket, made_record, mixed_id, remove_record
from flightedl.kernels.row_records import (
    CURSOR,
    CUT_SIZE,
    END,
    HIGH,
    STRIDE,
    WANTED,
    Ids,
    Records,
    Table,
    Words,
    bucket_of,
    change,
    count_touch,
    exists,
    id_at,
    is_young,
)

_U1 = np.uint64(1)
_ZERO = np.uint64(0)


@register_jitable
def _bucket(t: Table, record: Any, salt: Any) -> Any:
    return bucket_of(mixed_id(id_at(t.words, record * t.layout[STRIDE]), salt))


def those_in(t: Table, bucket: int, salt: int, records: Records) -> int:
    """Write the records of a bucket to ``records``. Return their number."""
    return int(in_bucket(t, bucket, salt, records))


def look_up(t: Table, ids: Ids, salt: int, records: Records) -> None:
    """Write the records of the ids to ``records``, with -1 for ids that have no record."""
    for i in range(ids.size):
        records[i] = find(t, ids[i], mixed_id(ids[i], salt))


def remove(t: Table, records: Records, salt: int) -> None:
    """Remove records. An entry of -1 is skipped."""
    for i in range(records.size):
        if records[i] >= 0:
            remove_record(t, records[i], salt)


def place(t: Table, ids: Ids, salt: int, records: Records) -> None:
    """Find or create records for a checkpoint's ids; -1 if there is no room. ``count_touches`` counts them by age."""
    for i in range(ids.size):
        mixed = mixed_id(ids[i], salt)
        record = find(t, ids[i], mixed)
        if record < 0:
            record = made_record(t, ids[i], mixed, salt)
        else:
            change(t, record)
            count_touch(t, record, bucket_of(mixed), -1)
        records[i] = record


def count_touches(t: Table, records: Records, salt: int) -> None:
    """Count records by age, once their content is complete. An entry of -1 is skipped."""
    for i in range(records.size):
        if records[i] >= 0:
            count_touch(t, records[i], _bucket(t, records[i], salt), 1)


def scatter(words: Words, stride: int, at: int, width: int, records: Records, source: Words) -> None:
    """Write ``width`` words of each record, starting at word ``at``. An entry of -1 is skipped."""
    for i in range(records.size):
        if records[i] >= 0:
            copy(words, records[i] * stride + at, source, i * width, width)


def collect(words: Words, stride: int, at: int, width: int, records: Records, out: Words) -> None:
    """Read ``width`` words of each record, starting at word ``at``."""
    for i in range(records.size):
        copy(out, i * width, words, records[i] * stride + at, width)


def next_wanted(t: Table, salt: int, line: int, oldest: Records, oldest_epoch: int, records: Records) -> int:
    """Find the next records of a cut that have not changed since it began. Return their number; 0 at the end.

    ``line`` is the index of the cut's line in ``cuts``, and ``oldest`` contains one version per bucket. The cursor
    moves past the records, so they are not copied when they change later. The caller must copy them before it releases
    the lock.
    """
    found, cursor, end = 0, line * CUT_SIZE + CURSOR, t.cuts[line * CUT_SIZE + END]
    wanted = longs_at(t.cuts, line * CUT_SIZE + WANTED)
    while found < records.size and t.cuts[cursor] < end:
        at = t.cuts[cursor] >> 6
        left = wanted[at] & ~t.dirty[at] & ~((_U1 << np.uint64(t.cuts[cursor] & 63)) - _U1)
        t.cuts[cursor] = min((at + 1) << 6, end)
        while left != _ZERO:
            record = (at << 6) + trailing_zeros(left)
            if found == records.size:
                t.cuts[cursor] = record
                break
            left &= left - _U1
            if is_young(t, record, oldest[_bucket(t, record, salt)], oldest_epoch):
                records[found] = record
                found += 1
    return found


def existing(t: Table, salt: int, oldest_version: int, oldest_epoch: int, start: int, records: Records) -> int:
    """Find the existing rows among ``records.size`` records, beginning at ``start``. Return their number."""
    found = 0
    for record in range(start, min(start + records.size, t.state[HIGH])):
        is_used = t.used[record >> 6] >> np.uint64(record & 63) & _U1 != _ZERO
        if is_used and exists(t, record, _bucket(t, record, salt), oldest_version, oldest_epoch):
            records[found] = record
            found += 1
    return found
