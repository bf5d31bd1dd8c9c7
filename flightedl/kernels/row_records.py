"""Memory layout of one table's rows, and the bookkeeping of versions, limits and cuts.

**Records.** A row is a record of 32-bit words in one array: id (low word, high word), history, slots, values.
``layout`` contains their places. The array is reserved address space whose pages are allocated when they are first
written, so a record never moves. Removed records form a chain of free records.

**Index.** Extendible hashing (Fagin et al. 1979). The highest bits of the mixed id select an entry of the *directory*,
which points to a *segment*: 4 KiB, 64 lines of one cache line each. The ten highest bits are the id's bucket, so the
index of a bucket is a range of the directory, and a scan of a bucket visits no other rows. A line has twelve places.
Each has a byte of the mixed id (0 if the place is free; eight are compared at once) and the number of the record. If a
line is full, the record goes to the next line, and a flag marks the overflow. A full segment is split in two, so the
index grows by a few microseconds at a time. Segments split at different loads, so they do not all split at once.

**Versions.** A bucket's records use the bucket's own versions: the store's version plus the bucket's entry in
``shifts``. A bucket that arrives from another store keeps its versions, and its rows expire as they would have there.

**Limits.** If the number of a table's rows is limited, each bucket has a share of the limit. ``runs`` counts a bucket's
live rows by the version of their last update, as ascending pairs of version and row count, from a head to a tail. If a
bucket has too many rows, the runs at its head are dropped; ``ages`` records the lowest version that remains.

**Batches.** A row outside the cache costs one wait for memory, and its place in the index costs another. Ids are
therefore processed in groups: the loop prefetches the index lines of all ids in a group, then their records, and then
works.

**Cuts.** Up to ``MAX_CUTS`` consistent cuts can be read at once. ``dirty`` has a bit for each record that has changed
since the newest cut began. Each cut has a line of numbers in ``cuts``: a cursor, the address of the bits of records
that the cut wants, and the address of the memory for old contents. The first change of a record after the newest cut
began copies the record for each cut that wants it and whose cursor has not passed it. When another cut begins, changed
records are removed from ``wanted`` of the earlier cuts, and ``dirty`` is cleared. A cut whose memory is full is lost;
``UNDONE`` then exceeds the number of copies that fit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba.extending import register_jitable

from flightedl.kernels.intrinsics import atomic_add, atomic_or, copy, longs_at, words_at

Ids = npt.NDArray[np.uint64]
Records = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint32]


class Table(NamedTuple):
    """The memory of one table."""

    #: Records.
    words: Words
    #: Index, as lines of eight 64-bit words, and the same memory as lines of sixteen 32-bit words.
    lines: npt.NDArray[np.uint64]
    entries: Words
    directory: Words
    #: For each segment: its number of entries, and the number of bits of the mixed id that select it.
    segments: npt.NDArray[np.int32]
    #: A bit for each record: set if in use, and set if changed since the newest cut began.
    used: npt.NDArray[np.uint64]
    dirty: npt.NDArray[np.uint64]
    #: (MAX_CUTS * CUT_SIZE,), see ``CURSOR`` and the following.
    cuts: npt.NDArray[np.int64]
    #: Numbers of rows by the store's version at their last update (for tables without a limit), and by epoch.
    by_version: npt.NDArray[np.int32]
    by_epoch: npt.NDArray[np.int32]
    #: (buckets,), see "Versions".
    shifts: npt.NDArray[np.int64]
    #: (AGES * buckets,) and (buckets, any number, 2); see "Limits". ``runs`` is empty without a limit.
    ages: npt.NDArray[np.int64]
    runs: Words
    state: npt.NDArray[np.int64]
    layout: npt.NDArray[np.int64]
    #: Scratch memory: loops that allocate nothing need not count references to arrays.
    tags: npt.NDArray[np.uint64]
    places: npt.NDArray[np.int64]


# state
HIGH = 0  # number of records that were ever used
FREE = 1  # first record of the chain of free records, plus 1; 0 if there are none
USED = 2
SEGMENTS = 3
DEPTH = 4  # bits of the directory's index
CUTS = 5  # number of lines of ``cuts`` that may be in use
OLDEST = 6  # rows of lower versions have expired by age
LIVE = 7  # number of rows of ``OLDEST`` or a higher version
RECORD_LIMIT = 8
SEGMENT_LIMIT = 9
SWEPT = 10
CREATED = 11
NOT_ADMITTED = 12
REFUSED = 13
EVICTED = 14
STATE_SIZE = 15

# a line of ``cuts``
CURSOR = 0  # next record to read
END = 1  # last record that may be wanted, plus 1; 0 if there is no cut
UNDONE = 2  # number of records to copy before they changed, including those that found no room
WANTED = 3  # address and size of the array with a bit for each record
UNDO = 5  # address and size of the memory for copies
CUT_SIZE = 7
MAX_CUTS = 8

# layout: places of words in a record; -1 if records do not have them
STRIDE = 0
AT_UPDATES = 1
AT_VERSION = 2
AT_EPOCH = 3
AT_SLOTS = 4
AT_VALUES = 5
LAYOUT_SIZE = 6

# ages: places of the first bucket's numbers; those of the other buckets follow
GIVEN_UP = 0  # rows of lower versions were evicted, because there were too many
LIVING = 1024  # number of rows in runs
HEAD = 2048  # first valid run
TAIL = 3072  # last valid run, plus 1
AGES = 4
BUCKETS = 1024

LINES = 64  # lines of a segment
PLACES = 12  # places of a line
MAX_DEPTH = 28
#: Number of ids in a group; see "Batches".
GROUP = 32
SCRATCH_SIZE = LINES * PLACES

_U32 = np.uint64(32)
_U54 = np.uint64(54)
_U1 = np.uint64(1)
_ZERO = np.uint64(0)


@register_jitable(forceinline=True)
def id_at(words: Words, at: Any) -> Any:
    """Return the id of the record that begins at ``at``."""
    return np.uint64(words[at]) | (np.uint64(words[at + 1]) << _U32)


@register_jitable(forceinline=True)
def bucket_of(mixed: Any) -> Any:
    """Return the bucket of a mixed id."""
    return np.int64(mixed >> _U54)


@register_jitable(forceinline=True)
def change(t: Table, record: Any) -> None:
    """Copy a record that is about to change for the cuts that want it. Other threads may change other records."""
    bit = _U1 << np.uint64(record & 63)
    if t.dirty[record >> 6] & bit != _ZERO:
        return
    atomic_or(t.dirty, record >> 6, bit)
    if t.state[CUTS]:
        _set_aside(t, record, bit)


@register_jitable
def _set_aside(t: Table, record: Any, bit: Any) -> None:
    """Copy a record for each cut that wants it and whose cursor has not passed it."""
    stride = t.layout[STRIDE]
    for line in range(t.state[CUTS]):
        at = line * CUT_SIZE
        if t.cuts[at + CURSOR] <= record < t.cuts[at + END]:
            if longs_at(t.cuts, at + WANTED)[record >> 6] & bit == _ZERO:
                continue
            target = atomic_add(t.cuts, np.int64(at + UNDONE), np.int64(1)) * stride
            undo = words_at(t.cuts, at + UNDO)
            if target + stride <= undo.size:
                copy(undo, target, t.words, record * stride, stride)


@register_jitable
def count_touch(t: Table, record: Any, bucket: Any, step: Any) -> None:
    """Add ``step`` to the counts of rows by age. Ids that wait for admission are not counted."""
    at = record * t.layout[STRIDE]
    if t.layout[AT_VERSION] >= 0 and t.by_version.size > 0:
        # Rows that were last updated before the store's first version are counted for that version.
        version: Any = max(np.int64(t.words[at + t.layout[AT_VERSION]]) - t.shifts[bucket], 0)
        t.by_version[version] += step
        if version >= t.state[OLDEST]:
            t.state[LIVE] += step
    if t.runs.size > 0 and np.int64(t.words[at + t.layout[AT_VERSION]]) >= t.ages[GIVEN_UP + bucket]:
        _count_in_run(t, bucket, np.int64(t.words[at + t.layout[AT_VERSION]]), step)
    if t.layout[AT_EPOCH] >= 0 and t.by_epoch.size > 0:
        epoch: Any = min(np.int64(t.words[at + t.layout[AT_EPOCH]]), t.by_epoch.size - 1)
        t.by_epoch[epoch] += step


@register_jitable
def _make_room(t: Table, bucket: Any, size: Any) -> None:
    """Compact a bucket's runs. If most runs have rows, which only restored files can cause, drop the oldest runs."""
    first, tail, used = bucket * size, 0, 0
    for place in range(t.ages[HEAD + bucket], t.ages[TAIL + bucket]):
        used += t.runs[2 * (first + place) + 1] > 0
    while used > size - 2:
        used -= t.runs[2 * (first + t.ages[HEAD + bucket]) + 1] > 0
        give_up_run(t, bucket, size)
    for place in range(t.ages[HEAD + bucket], t.ages[TAIL + bucket]):
        run = 2 * (first + place)
        if t.runs[run + 1] > 0:
            t.runs[2 * (first + tail)], t.runs[2 * (first + tail) + 1] = t.runs[run], t.runs[run + 1]
            tail += 1
    t.ages[HEAD + bucket], t.ages[TAIL + bucket] = 0, tail


@register_jitable(forceinline=True)
def give_up_run(t: Table, bucket: Any, size: Any) -> None:
    """Drop the oldest run of a bucket."""
    run = 2 * (bucket * size + t.ages[HEAD + bucket])
    t.ages[GIVEN_UP + bucket] = np.int64(t.runs[run]) + 1
    t.ages[LIVING + bucket] -= np.int64(t.runs[run + 1])
    t.ages[HEAD + bucket] += 1


@register_jitable
def _count_in_run(t: Table, bucket: Any, version: Any, step: Any) -> None:
    size = t.runs.size // (2 * BUCKETS)
    if step > 0 and t.ages[TAIL + bucket] == size:
        _make_room(t, bucket, size)
        if version < t.ages[GIVEN_UP + bucket]:
            return
    first, low, tail = bucket * size, t.ages[HEAD + bucket], t.ages[TAIL + bucket]
    high = tail
    if high > low and np.int64(t.runs[2 * (first + high - 1)]) == version:
        low = high = high - 1
    while low < high:
        middle = (low + high) // 2
        if np.int64(t.runs[2 * (first + middle)]) < version:
            low = middle + 1
        else:
            high = middle
    run = 2 * (first + low)
    if low == tail or np.int64(t.runs[run]) != version:
        for at in range(2 * (first + tail) - 1, run - 1, -1):
            t.runs[at + 2] = t.runs[at]
        t.runs[run], t.runs[run + 1] = version, 0
        t.ages[TAIL + bucket] += 1
    t.runs[run + 1] = np.int64(t.runs[run + 1]) + step
    t.ages[LIVING + bucket] += step


@register_jitable
def touch(t: Table, record: Any, bucket: Any, version: Any, epoch: Any) -> None:
    """Record the version and epoch of a row's update, without changing the counts."""
    at = record * t.layout[STRIDE]
    if t.layout[AT_VERSION] >= 0:
        t.words[at + t.layout[AT_VERSION]] = version + t.shifts[bucket]
    if t.layout[AT_EPOCH] >= 0:
        t.words[at + t.layout[AT_EPOCH]] = epoch


@register_jitable(forceinline=True)
def retouch(t: Table, record: Any, bucket: Any, version: Any, epoch: Any) -> None:
    """Record the version and epoch of an existing row's update, and adjust the counts."""
    count_touch(t, record, bucket, -1)
    touch(t, record, bucket, version, epoch)
    count_touch(t, record, bucket, 1)


@register_jitable(forceinline=True)
def exists(t: Table, record: Any, bucket: Any, oldest_version: Any, oldest_epoch: Any) -> Any:
    """Return True if a row has not expired by age and was not evicted because of its bucket's limit."""
    return is_young(t, record, max(oldest_version + t.shifts[bucket], t.ages[GIVEN_UP + bucket]), oldest_epoch)


@register_jitable(forceinline=True)
def is_young(t: Table, record: Any, oldest: Any, oldest_epoch: Any) -> Any:
    """Return True if a row is at least as new as its bucket's version in ``oldest``, and as ``oldest_epoch``."""
    at = record * t.layout[STRIDE]
    if t.layout[AT_VERSION] >= 0 and np.int64(t.words[at + t.layout[AT_VERSION]]) < oldest:
        return False
    return not (t.layout[AT_EPOCH] >= 0 and np.int64(t.words[at + t.layout[AT_EPOCH]]) < oldest_epoch)
