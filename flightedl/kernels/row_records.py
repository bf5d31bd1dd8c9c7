"""Memory layout of a table's rows, and how versions, limits and cuts are recorded.

**Records.** A row is a record of 32-bit words in one array: id (low word, high word), history, slots, values.
``layout`` contains the positions of these words. The array reserves address space, and its pages are allocated when
they are first written, so a record never moves. Removed records form a chain of free records.

**Index.** The index uses extendible hashing (Fagin et al. 1979). The highest bits of the mixed id select an entry of
the *directory*, which points to a *segment* of 4 KiB: 64 lines of one cache line each. The ten highest bits are the
id's bucket, so a bucket's part of the index is a range of the directory, and a scan of a bucket visits no other rows.

A line has twelve places. Each place contains the number of a record and a byte of the record's mixed id, or 0 if the
place is free; eight bytes are compared at a time. If a line is full, the record goes to the next line, and a flag marks
the overflow. A full segment is split into two, so growing the index takes only a few microseconds at a time. Segments
are split at different loads, so that they are not all split at the same time.

**Versions.** The records of a bucket use the bucket's own versions, which are the store's versions plus the bucket's
entry in ``shifts``. So a bucket that arrives from another store keeps its versions, and its rows expire as if they had
stayed there.

**Limits.** If a table's number of rows is limited, each bucket has a share of the limit. ``runs`` counts the bucket's
live rows by the version of their last update: it contains pairs of version and row count in ascending order, from a
head to a tail. When a bucket has too many rows, the runs at its head are dropped, and ``ages`` records the lowest
version that remains.

**Batches.** Accessing a row that is not in the cache costs one wait for memory, and accessing its place in the index
costs another. Therefore ids are processed in groups: a loop first prefetches the index lines of all ids in a group,
then their records, and then processes them.

**Cuts.** Up to ``MAX_CUTS`` consistent cuts can be read at the same time. ``dirty`` has one bit per record, set if the
record has changed since the newest cut began. Each cut has a line of numbers in ``cuts``: a cursor, the address of the
``wanted`` bits of the records to read, and the address of the memory for old contents.

When a record first changes after the newest cut began, it is copied for each cut that wants the record and whose cursor
is not past it. When another cut begins, the changed records are removed from the ``wanted`` bits of the earlier cuts,
and ``dirty`` is cleared. If the memory of a cut is full, the cut is lost; in that case, ``UNDONE`` is greater than the
number of copies that fit.
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
    #: The index as lines of eight 64-bit words, and the same memory as lines of sixteen 32-bit words.
    lines: npt.NDArray[np.uint64]
    entries: Words
    directory: Words
    #: For each segment: the number of its entries, and the number of bits of the mixed id that select it.
    segments: npt.NDArray[np.int32]
    #: One bit per record: ``used`` is set if the record is in use, ``dirty`` if it has changed since the newest cut
    #: began.
    used: npt.NDArray[np.uint64]
    dirty: npt.NDArray[np.uint64]
    #: (MAX_CUTS * CUT_SIZE,) numbers, whose meaning is explained at ``CURSOR``.
    cuts: npt.NDArray[np.int64]
    #: Number of rows by the store's version at their last update (for tables without a limit), and by epoch.
    by_version: npt.NDArray[np.int32]
    by_epoch: npt.NDArray[np.int32]
    #: (buckets,), see "Versions".
    shifts: npt.NDArray[np.int64]
    #: Described in "Limits". Shapes: (AGES * buckets,) and (buckets, any number, 2). ``runs`` is empty without a limit.
    ages: npt.NDArray[np.int64]
    runs: Words
    state: npt.NDArray[np.int64]
    layout: npt.NDArray[np.int64]
    #: Scratch memory of loops. Loops that do not allocate memory need not count references to arrays.
    tags: npt.NDArray[np.uint64]
    places: npt.NDArray[np.int64]


# State of a table: ``HIGH`` is the number of records ever used, ``FREE`` the first free record plus 1 (0 if no record
# is free), ``DEPTH`` the number of bits of an index into the directory, and ``CUTS`` the number of lines of ``cuts``
# that may be in use. Rows with versions below ``OLDEST`` have expired by age; ``LIVE`` counts all other rows.
HIGH = 0
FREE = 1
USED = 2
SEGMENTS = 3
DEPTH = 4
CUTS = 5
OLDEST = 6
LIVE = 7
RECORD_LIMIT = 8
SEGMENT_LIMIT = 9
SWEPT = 10
CREATED = 11
NOT_ADMITTED = 12
REFUSED = 13
EVICTED = 14
STATE_SIZE = 15

# A line of ``cuts`` describes one cut. ``CURSOR`` is the next record to read, ``END`` is 1 above the last record that
# may be wanted (0 if the line is not in use), and ``UNDONE`` is the number of records that had to be copied, even if
# there was no room. ``WANTED`` and ``UNDO`` are the positions of an address and a size: of the array with a bit for
# each record, and of the memory for copies.
CURSOR = 0
END = 1
UNDONE = 2
WANTED = 3
UNDO = 5
CUT_SIZE = 7
MAX_CUTS = 8

# Positions of words in a record; -1 if records do not have them.
STRIDE = 0
AT_UPDATES = 1
AT_VERSION = 2
AT_EPOCH = 3
AT_SLOTS = 4
AT_VALUES = 5

# Positions in ``ages`` of bucket 0's numbers, each of which is followed by the numbers of the other buckets. Rows with
# versions below ``GIVEN_UP`` were evicted because there were too many, ``LIVING`` is the number of rows in the runs,
# ``HEAD`` the first valid run, and ``TAIL`` the last valid run plus 1.
GIVEN_UP = 0
LIVING = 1024
HEAD = 2048
TAIL = 3072
AGES = 4
BUCKETS = 1024

# Number of lines in a segment of the index, and number of places in a line.
LINES = 64
PLACES = 12
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
    """Copy a record that is about to change, for the cuts that want it. Other threads may change other records."""
    bit = _U1 << np.uint64(record & 63)
    if t.dirty[record >> 6] & bit != _ZERO:
        return
    atomic_or(t.dirty, record >> 6, bit)
    if t.state[CUTS]:
        _set_aside(t, record, bit)


@register_jitable
def _set_aside(t: Table, record: Any, bit: Any) -> None:
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
    """Add ``step`` to the number of rows of each age. Ids that wait for admission are not counted."""
    at = record * t.layout[STRIDE]
    if t.layout[AT_VERSION] >= 0 and t.by_version.size > 0:
        # A row whose last update precedes the store's first version counts as updated in that version.
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
    """Record the version and epoch of a row's update, without changing the counts by age."""
    at = record * t.layout[STRIDE]
    if t.layout[AT_VERSION] >= 0:
        t.words[at + t.layout[AT_VERSION]] = version + t.shifts[bucket]
    if t.layout[AT_EPOCH] >= 0:
        t.words[at + t.layout[AT_EPOCH]] = epoch


@register_jitable(forceinline=True)
def retouch(t: Table, record: Any, bucket: Any, version: Any, epoch: Any) -> None:
    """Record the version and epoch of an existing row's update, and adjust the counts by age.

    A batch that is repeated may have a lower epoch than the batches that the row has.
    """
    count_touch(t, record, bucket, -1)
    if t.layout[AT_EPOCH] >= 0:
        epoch = max(epoch, np.int64(t.words[record * t.layout[STRIDE] + t.layout[AT_EPOCH]]))
    touch(t, record, bucket, version, epoch)
    count_touch(t, record, bucket, 1)


@register_jitable(forceinline=True)
def exists(t: Table, record: Any, bucket: Any, oldest_version: Any, oldest_epoch: Any) -> Any:
    """Return True if a row has neither expired by age nor been evicted by its bucket's limit."""
    return is_young(t, record, max(oldest_version + t.shifts[bucket], t.ages[GIVEN_UP + bucket]), oldest_epoch)


@register_jitable(forceinline=True)
def is_young(t: Table, record: Any, oldest: Any, oldest_epoch: Any) -> Any:
    """Return True if a row is at least as new as its bucket's version in ``oldest`` and as ``oldest_epoch``."""
    at = record * t.layout[STRIDE]
    if t.layout[AT_VERSION] >= 0 and np.int64(t.words[at + t.layout[AT_VERSION]]) < oldest:
        return False
    return not (t.layout[AT_EPOCH] >= 0 and np.int64(t.words[at + t.layout[AT_EPOCH]]) < oldest_epoch)
