"""Reads and pushes of rows, for numba to compile; ``row_records`` says how they lie, updates are in ``row_updates``."""

from __future__ import annotations

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
    CREATED,
    DEPTH,
    EVICTED,
    GROUP,
    HIGH,
    LIVE,
    NOT_ADMITTED,
    OLDEST,
    REFUSED,
    STRIDE,
    SWEPT,
    Ids,
    Records,
    Table,
    Words,
    change,
    count_touch,
    exists,
    id_at,
    touch,
)

_U1 = np.uint64(1)
_ZERO = np.uint64(0)


def gather(handles: Handles, work: Work, ids: Ids, out: Words, missing: npt.NDArray[np.int64], is_beside: bool) -> int:
    """The values of rows of some tables; the places of ids without one, among all, to ``missing``.

    Args:
        handles: Of all tables.
        work: (sections, WORK_SIZE), whose values lie in ``out``, as words; the last column is filled.
        ids: Of all sections.
        out: Filled where there are rows.
        missing: As many as ids; those of a section from its first id's place on.
        is_beside: Another call works on the same tables now.

    Returns:
        How many are missing.
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
    """Count pushes in a count-min sketch, with conservative update (Estan & Varghese 2002).

    Args:
        t: The rows, which count those that are not admitted.
        sketch: Four rows of counters.
        ids: Of the push.
        salt: Of the table.
        admit_after: Pushes.
        places: Of these ids among all of the push; changed: of those that were pushed often enough, probably.

    Returns:
        How many these are.
    """
    width, found = sketch.size // 4, 0
    mask = np.uint64(width - 1)
    for place in places:
        mixed = mixed_id(ids[place], salt)
        low = np.uint8(255)
        for row in range(4):
            low = min(low, sketch[row * width + np.int64(mixed_id(mixed, np.uint64(row + 1)) & mask)])
        if np.int64(low) + 1 >= admit_after:
            places[found] = place
            found += 1
            continue
        t.state[NOT_ADMITTED] += 1
        for row in range(4):
            at = row * width + np.int64(mixed_id(mixed, np.uint64(row + 1)) & mask)
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
    """Count pushes among the ids that wait, ``w``.

    Args:
        w: They.
        ids: Of the push.
        salt: Of the table.
        version: That the push makes.
        epoch: Of it.
        oldest_version: Lower ones have expired.
        oldest_epoch: Likewise.
        admit_after: Pushes.
        places: Of these ids among all of the push; changed: of those that wait no more, because this was the last push.

    Returns:
        How many these are.
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
        else:
            change(w, record)
            if not exists(w, record, oldest_version, oldest_epoch):
                w.words[record * w.layout[STRIDE] + at_updates] = 0
        at = record * w.layout[STRIDE] + at_updates
        w.words[at] += np.uint32(1)
        touch(w, record, version, epoch)
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
    """Make rows of ids that have none, or an expired one.

    Args:
        t: The rows.
        ids: Of the push.
        salt: Of the table.
        version: That the push makes.
        epoch: Of it.
        places: Of these ids among all of the push; changed: of those whose rows were made, because there was room.
        records: Filled: their records, which have neither slots nor values.

    Returns:
        How many these are.
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
        touch(t, record, version, epoch)
        count_touch(t, record, 1)
        records[made] = record
        places[made] = place
        made += 1
    state[CREATED] += made
    return made


def advance(t: Table, version: int, unused_versions: int, limit: int) -> None:
    """Raise ``OLDEST`` after an update, see ``ReferenceTable``; both rules 0: there is none."""
    state = t.state
    aged = version - unused_versions if unused_versions > 0 else 0
    while state[OLDEST] < aged or (limit > 0 and state[LIVE] > limit and state[OLDEST] < version):
        state[LIVE] -= t.by_version[state[OLDEST]]
        state[OLDEST] += 1


def sweep(
    t: Table, salt: int, oldest_version: int, oldest_epoch: int, first_bucket: int, end_bucket: int, count: int
) -> None:
    """Remove what has expired and lies in these buckets from the next ``count`` records, round and round."""
    state = t.state
    for _ in range(min(count, state[HIGH])):
        if state[SWEPT] >= state[HIGH]:
            state[SWEPT] = 0
        record = state[SWEPT]
        state[SWEPT] += 1
        is_used = t.used[record >> 6] >> np.uint64(record & 63) & _U1 != _ZERO
        if is_used and not exists(t, record, oldest_version, oldest_epoch):
            bucket = np.int64(mixed_id(id_at(t.words, record * t.layout[STRIDE]), salt) >> np.uint64(54))
            if bucket < first_bucket or bucket >= end_bucket:
                continue
            remove_record(t, record, salt)
            state[EVICTED] += 1


def problem(ids: Ids, salt: int, first_bucket: int, end_bucket: int, seen: Ids) -> int:
    """Whether ids can be those of one call: 0, yes; 1, one is there twice; 2, one lies in another bucket.

    ``seen`` is of a size that is a power of two, more than ids.
    """
    mask = np.uint64(seen.size - 1)
    seen[:] = _ZERO
    zeros = 0
    for i in range(ids.size):
        mixed = mixed_id(ids[i], salt)
        bucket = np.int64(mixed >> np.uint64(54))
        if bucket < first_bucket or bucket >= end_bucket:
            return 2
        if mixed == _ZERO:
            zeros += 1
            continue
        at = mixed & mask
        while seen[np.int64(at)] != _ZERO:
            if seen[np.int64(at)] == mixed:
                return 1
            at = (at + _U1) & mask
        seen[np.int64(at)] = mixed
    return 1 if zeros > 1 else 0


_problem = register_jitable(problem)
_index_size = register_jitable(index_size)


def first_problem(
    counts: npt.NDArray[np.int64],
    sizes: npt.NDArray[np.int64],
    salts: Ids,
    ids: Ids,
    bits: Words,
    first_bucket: int,
    end_bucket: int,
    seen: Ids,
) -> int:
    """The first of several tables' sections that no call may have; -1: there is none.

    Args:
        counts: (n,): ids of each section.
        sizes: (n,): numbers that it has.
        salts: (n,): of its table.
        ids: Of all sections.
        bits: Of the float32 numbers of all; none may be NaN or infinity.
        first_bucket: Of the pserver.
        end_bucket: Behind its last one.
        seen: Scratch memory, twice as many as the most ids of a section, and a power of two.
    """
    at = value_at = 0
    for section in range(counts.size):
        count = counts[section]
        size = _index_size(count)
        if _problem(ids[at : at + count], salts[section], first_bucket, end_bucket, seen[:size]) != 0:
            return section
        largest = np.uint32(0)
        for i in range(value_at, value_at + sizes[section]):
            largest = max(largest, bits[i] & MAGNITUDE)
        if largest >= INFINITY:
            return section
        at += count
        value_at += sizes[section]
    return -1
