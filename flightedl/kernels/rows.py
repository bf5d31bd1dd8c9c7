"""Reads of rows, and all steps of a push except the updates, which are in ``row_updates``."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba.extending import register_jitable

from flightedl.kernels.intrinsics import copy
from flightedl.kernels.plain import INFINITY, MAGNITUDE, index_size
from flightedl.kernels.row_handles import (
    COUNT,
    FIRST,
    HANDLE_SIZE,
    MISSED,
    OLDEST_EPOCH,
    OLDEST_VERSION,
    SALT,
    TABLE,
    VALUE_WORDS,
    VALUES,
    Handles,
    Work,
    table_at,
)
from flightedl.kernels.row_index import ask_for, find, found, made_record, mixed_id, remove_record
from flightedl.kernels.row_records import (
    AT_EPOCH,
    AT_UPDATES,
    AT_VALUES,
    AT_VERSION,
    BUCKETS,
    CREATED,
    DEPTH,
    EVICTED,
    GROUP,
    HEAD,
    HIGH,
    LIVE,
    LIVING,
    NOT_ADMITTED,
    OLDEST,
    REFUSED,
    STRIDE,
    SWEPT,
    TAIL,
    Ids,
    Records,
    Table,
    Words,
    bucket_of,
    change,
    count_touch,
    exists,
    give_up_run,
    id_at,
    retouch,
    touch,
)

_U1 = np.uint64(1)
_ZERO = np.uint64(0)
# Kinds of sections, see ``wire.table_rows``.
GRADIENTS, WANTED = np.uint32(1), np.uint32(2)


def gather(handles: Handles, work: Work, ids: Ids, out: Words, missing: npt.NDArray[np.int64], is_beside: bool) -> int:
    """Read the values of rows from several tables.

    Args:
        handles: Handles of all tables.
        work: (sections, WORK_SIZE). ``VALUES`` is a position in ``out``. ``MISSED`` is filled.
        ids: Ids of all sections.
        out: Filled with the values, as words. Ids without a row leave gaps.
        missing: Filled, from each section's ``FIRST`` on, with the positions of ids without a row; as long as ``ids``.
        is_beside: True in the second of two threads that work at the same time. It has its own scratch memory.

    Returns:
        The number of ids without a row.
    """
    total = 0
    for section in range(work.shape[0]):
        number, first, size, target = (
            work[section, TABLE],
            work[section, FIRST],
            work[section, COUNT],
            work[section, VALUES],
        )
        t = table_at(handles, number, is_beside)
        salt, width = np.uint64(handles[number * HANDLE_SIZE + SALT]), handles[number * HANDLE_SIZE + VALUE_WORDS]
        oldest_version, oldest_epoch = work[section, OLDEST_VERSION], work[section, OLDEST_EPOCH]
        stride, at_values = t.layout[STRIDE], t.layout[AT_VALUES]
        has_age = t.layout[AT_VERSION] >= 0 or t.layout[AT_EPOCH] >= 0
        shift = np.uint64(64 - t.state[DEPTH])
        missed = 0
        for start in range(first, first + size, GROUP):
            count = min(GROUP, first + size - start)
            ask_for(t, ids, start, count, salt, shift, stride)
            for i in range(count):
                record = found(t, ids[start + i], i, stride, has_age, oldest_version, oldest_epoch)
                if record < 0:
                    missing[first + missed] = start + i
                    missed += 1
                else:
                    copy(out, target + (start - first + i) * width, t.words, record * stride + at_values, width)
        work[section, MISSED] = missed
        total += missed
    return total


def count_in_sketch(
    t: Table, sketch: npt.NDArray[np.uint8], ids: Ids, salt: int, admit_after: int, places: npt.NDArray[np.int64]
) -> int:
    """Count pushes in a count-min sketch, by conservative update (Estan & Varghese 2002).

    Args:
        t: The table, which counts pushes of ids that have not been admitted.
        sketch: Four rows of counters for each bucket.
        ids: Ids of the push.
        salt: Salt of the table.
        admit_after: Number of the push with which an id is admitted.
        places: Positions in ``ids`` of the ids to count. Reduced to the ids admitted now, a few of them too early.

    Returns:
        The number of admitted ids.
    """
    width, found = sketch.size // (4 * BUCKETS), 0
    mask = np.uint64(width - 1)
    for place in places:
        mixed = mixed_id(ids[place], salt)
        low, first = np.uint8(255), bucket_of(mixed) * 4 * width
        for row in range(4):
            low = min(low, sketch[first + row * width + np.int64(mixed_id(mixed, np.uint64(row + 1)) & mask)])
        if np.int64(low) + 1 >= admit_after:
            places[found] = place
            found += 1
            continue
        t.state[NOT_ADMITTED] += 1
        for row in range(4):
            at = first + row * width + np.int64(mixed_id(mixed, np.uint64(row + 1)) & mask)
            sketch[at] = max(sketch[at], np.uint8(low + 1))
    return found


def wait(
    w: Table,
    ids: Ids,
    salt: int,
    version: int,
    epoch: int,
    oldest_version: int,
    oldest_epoch: int,
    admit_after: int,
    places: npt.NDArray[np.int64],
) -> int:
    """Count exactly how often each id that is waiting for admission has been pushed.

    Args:
        w: The table of waiting ids.
        ids: Ids of the push.
        salt: Salt of the table.
        version: Version after the push.
        epoch: Epoch of the push.
        oldest_version: Waiting ids with lower versions have expired.
        oldest_epoch: Waiting ids with lower epochs have expired.
        admit_after: Number of the push with which an id is admitted.
        places: Positions in ``ids`` of the ids to count. Reduced to the ids that are admitted now.

    Returns:
        The number of admitted ids.
    """
    found, at_updates = 0, w.layout[AT_UPDATES]
    for place in places:
        mixed = mixed_id(ids[place], salt)
        record = find(w, ids[place], mixed)
        if record < 0:
            record = made_record(w, ids[place], mixed, salt)
            if record < 0:
                w.state[REFUSED] += 1
                continue
            touch(w, record, bucket_of(mixed), version, epoch)
        else:
            change(w, record)
            if not exists(w, record, bucket_of(mixed), oldest_version, oldest_epoch):
                w.words[record * w.layout[STRIDE] + at_updates] = 0
            retouch(w, record, bucket_of(mixed), version, epoch)
        at = record * w.layout[STRIDE] + at_updates
        w.words[at] += np.uint32(1)
        if np.int64(w.words[at]) >= admit_after:
            remove_record(w, record, salt)
            places[found] = place
            found += 1
        else:
            w.state[NOT_ADMITTED] += 1
    return found


def make(
    t: Table, ids: Ids, salt: int, version: int, epoch: int, places: npt.NDArray[np.int64], records: Records
) -> int:
    """Create rows for ids whose row is missing or has expired.

    Args:
        t: The table.
        ids: Ids of the push.
        salt: Salt of the table.
        version: Version after the push.
        epoch: Epoch of the push.
        places: Positions in ``ids`` of the ids that need a row. Reduced to the ids for which there was room.
        records: Filled with the records of the new rows. The caller must fill their slots and values.

    Returns:
        The number of new rows.
    """
    state, made = t.state, 0
    for place in places:
        mixed = mixed_id(ids[place], salt)
        expired = find(t, ids[place], mixed)
        if expired >= 0:
            remove_record(t, expired, salt)
            state[EVICTED] += 1
        record = made_record(t, ids[place], mixed, salt)
        if record < 0:
            state[REFUSED] += 1
            continue
        touch(t, record, bucket_of(mixed), version, epoch)
        count_touch(t, record, bucket_of(mixed), 1)
        records[made] = record
        places[made] = place
        made += 1
    state[CREATED] += made
    return made


def advance(t: Table, oldest: int) -> None:
    """Raise ``OLDEST``, and subtract the number of rows that thereby expire from ``LIVE``."""
    state = t.state
    while state[OLDEST] < oldest:
        state[LIVE] -= t.by_version[state[OLDEST]]
        state[OLDEST] += 1


def give_up(t: Table, version: int, oldest: Records, most: int, limit: int) -> None:
    """Evict the oldest rows of the buckets; see ``ReferenceTable``.

    Args:
        t: The table.
        version: Version of the store. Only buckets with rows of this version are limited, and these rows remain.
        oldest: (buckets,) lowest version of each bucket's existing rows. Rows with lower versions are evicted.
        most: Buckets with at most this many rows are skipped.
        limit: Maximum number of rows in a bucket. The oldest versions are evicted until it is met.
    """
    size = t.runs.size // (2 * BUCKETS)
    for bucket in range(BUCKETS):
        if t.ages[LIVING + bucket] <= most:
            continue
        newest, last = version + t.shifts[bucket], 2 * (bucket * size + t.ages[TAIL + bucket] - 1)
        is_limited = t.ages[HEAD + bucket] < t.ages[TAIL + bucket] and np.int64(t.runs[last]) == newest
        while t.ages[HEAD + bucket] < t.ages[TAIL + bucket]:
            updated = np.int64(t.runs[2 * (bucket * size + t.ages[HEAD + bucket])])
            is_too_many = is_limited and t.ages[LIVING + bucket] > limit and updated < newest
            if updated >= oldest[bucket] and not is_too_many:
                break
            give_up_run(t, bucket, size)


def sweep(
    t: Table, salt: int, oldest_version: int, oldest_epoch: int, first_bucket: int, end_bucket: int, count: int
) -> None:
    """Search the next ``count`` records for expired rows of these buckets, and remove them. Wraps around at the end."""
    state = t.state
    for _ in range(min(count, state[HIGH])):
        if state[SWEPT] >= state[HIGH]:
            state[SWEPT] = 0
        record = state[SWEPT]
        state[SWEPT] += 1
        is_used = t.used[record >> 6] >> np.uint64(record & 63) & _U1 != _ZERO
        if is_used:
            bucket = bucket_of(mixed_id(id_at(t.words, record * t.layout[STRIDE]), salt))
            if first_bucket <= bucket < end_bucket and not exists(t, record, bucket, oldest_version, oldest_epoch):
                remove_record(t, record, salt)
                state[EVICTED] += 1


@register_jitable
def _problem(ids: Ids, salt: int, first_bucket: int, end_bucket: int, seen: npt.NDArray[np.int32]) -> int:
    """Return 0 if the ids of a section are valid, 1 if an id occurs twice, 2 if an id belongs to another bucket."""
    # Scratch memory with ``index_size(ids.size)`` elements; empty if ids may occur twice.
    mask = np.uint64(seen.size - 1)
    seen[:] = -1
    for i in range(ids.size):
        mixed = mixed_id(ids[i], salt)
        bucket = bucket_of(mixed)
        if bucket < first_bucket or bucket >= end_bucket:
            return 2
        if seen.size == 0:
            continue
        at = np.int64(mixed & mask)
        while seen[at] >= 0:
            if ids[seen[at]] == ids[i]:
                return 1
            at = np.int64(np.uint64(at + 1) & mask)
        seen[at] = i
    return 0


_index_size = register_jitable(index_size)
# Rows of the array that ``received`` fills. Its columns are the sections with gradients, followed by the sections with
# wanted rows.
RECEIVED_TABLE, RECEIVED_DIM, RECEIVED_COUNT, RECEIVED_FIRST, RECEIVED_VALUES = range(5)
RECEIVED_SIZE = 5


@register_jitable
def _is_known(found: Any, start: Any, place: Any, table: Any) -> Any:
    """Return True if an earlier section of this kind has the table, or if all columns of this kind are in use."""
    if place - start >= found.shape[1] // 2:
        return True
    for other in range(start, place):  # noqa: SIM110 - numba compiles no generators
        if found[RECEIVED_TABLE, other] == table:
            return True
    return False


@register_jitable
def _sections(words: Any, dims: Any, may_push: Any, found: Any) -> Any:
    """Fill ``found``. Return the number of sections of each kind, -1 if malformed, and the position of the values."""
    tables, count = dims.size, np.int64(words[1])
    pushed = asked = 0
    first = values = answer = np.int64(0)
    found[RECEIVED_COUNT, :] = -1
    for section in range(count):
        at = 2 + 4 * section
        kind, table = words[at] & np.uint32(0xFFFF), np.int64(words[at + 1])
        size = np.int64(words[at + 2]) | np.int64(words[at + 3]) << 32
        is_pushed = kind == GRADIENTS
        start, place = (0, pushed) if is_pushed else (tables, tables + asked)
        is_sound = (is_pushed and may_push) or kind == WANTED
        if not is_sound or table >= tables or not 0 <= size <= words.size or _is_known(found, start, place, table):
            return -1, 0, 0
        found[RECEIVED_TABLE, place], found[RECEIVED_DIM, place] = table, dims[table]
        found[RECEIVED_COUNT, place], found[RECEIVED_FIRST, place] = size, first
        found[RECEIVED_VALUES, place] = values if is_pushed else answer
        first += size
        if is_pushed:
            pushed, values = pushed + 1, values + size * dims[table]
        else:
            asked, answer = asked + 1, answer + size * dims[table]
    values_at = 2 + 4 * count + 2 * first
    if values_at + values != words.size:
        return -1, 0, 0
    return pushed, asked, values_at


def received(
    words: Words,
    ids: Ids,
    dims: npt.NDArray[np.int64],
    salts: npt.NDArray[np.uint64],
    buckets: npt.NDArray[np.int64],
    may_push: bool,
    is_finite: bool,
    seen: npt.NDArray[np.int32],
    found: npt.NDArray[np.int64],
) -> int:
    """Decode and check a trainer's message about rows; see ``wire.table_rows``.

    Args:
        words: The entire message.
        ids: The same memory, from the first id on.
        dims: (tables,) number of elements in a row.
        salts: (tables,) salt of each table.
        buckets: The pserver's first bucket, and the number after its last bucket.
        may_push: True if the message may contain gradients.
        is_finite: True if the values are known to be finite.
        seen: Scratch memory with ``index_size`` elements for the largest section.
        found: (RECEIVED_SIZE, 2 * tables) Filled for each section with its table, dim, number of ids, the position of
            its first id among all ids, and the position of its first value, among all values or in the answer.

    Returns:
        n * (tables + 1) + m for n sections with gradients and m sections of wanted rows. -1 if the message is
        malformed, contains an id twice or of another pserver's bucket, or contains values that are not finite.
    """
    tables = dims.size
    pushed, asked, values_at = _sections(words, dims, may_push, found)
    if pushed < 0:
        return -1
    for place in range(2 * tables):
        size = found[RECEIVED_COUNT, place]
        if size > 0:
            some, table = found[RECEIVED_FIRST, place], found[RECEIVED_TABLE, place]
            mine = seen[: _index_size(size) if place < tables else 0]
            if _problem(ids[some : some + size], salts[table], buckets[0], buckets[1], mine) != 0:
                return -1
    largest = np.uint32(0)
    for i in range(words.size if is_finite else values_at, words.size):
        largest = max(largest, words[i] & MAGNITUDE)
    return -1 if largest >= INFINITY else pushed * (tables + 1) + asked
