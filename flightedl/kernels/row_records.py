"""Where rows lie, for numba to compile: finding, making, removing and copying records of one table.

**Records.** A row is a record of 32-bit words in one array: id (low word, high word), what has to be known of its
history, slots, values; ``layout`` says where. The array is reserved address space that grows by being touched, so a
record never moves. Removed records form a chain of free ones.

**Index.** Extendible hashing (Fagin et al. 1979). The id is mixed; its highest bits lead through the *directory* to a
*segment*: 4 KiB, 64 lines of a cache line each. The ten highest bits are the id's bucket, so the index of a bucket is a
range of the directory, and its rows are found without looking at others. A line has twelve places: a byte of the mixed
id for each (zero: free), compared eight at a time, and the record's number. What does not fit goes to the next line,
and a flag says so. A full segment is split in two; so the index grows by a few microseconds at a time, and segments
fill up to different degrees so that they do not split all at once.

**Versions.** The versions in the records of a bucket are its own: ahead of the store's version by what ``shifts`` has
for the bucket. A bucket that comes from another store keeps its versions, and its rows expire as they would have there.

**Limits.** Where the rows of a table are limited, each bucket has its share. ``runs`` has the live rows of a bucket by
the version that updated them last: pairs of a version and a number of rows, rising, from a head to a tail. When there
are too many rows, the runs at the head go, and ``ages`` has the version from which on rows of the bucket exist.

**Batches.** A row that is not in the cache costs a wait for memory, and its place in the index another. So ids go
through in groups: first the lines of all are asked for, then the records that these name, and then the work is done.

**Cuts.** Up to ``MAX_CUTS`` may be read at once. ``dirty`` has a bit for each record that has changed since the newest
cut began. Each cut has a line of numbers in ``cuts``: the record that its reading has come to, and where a bit for each
record that it wants and the memory for old contents are. The first change of a record since the newest cut copies it
for each cut that wants it and has not come to it. When another cut begins, the bits of records that have changed are
taken out of ``wanted`` of those before it, and ``dirty`` begins anew. A cut whose memory is full is lost: ``UNDONE``
says so.
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
    #: Index: lines of 8 words, and the same memory by 16 words of 32 bits.
    lines: npt.NDArray[np.uint64]
    entries: Words
    directory: Words
    #: For each segment: entries, and bits of the mixed id that lead to it.
    segments: npt.NDArray[np.int32]
    #: A bit for each record.
    used: npt.NDArray[np.uint64]
    dirty: npt.NDArray[np.uint64]
    #: (MAX_CUTS * CUT_SIZE,): see below.
    cuts: npt.NDArray[np.int64]
    #: Rows by the version of the store that updated them last, where they are not limited, and by the epoch.
    by_version: npt.NDArray[np.int32]
    by_epoch: npt.NDArray[np.int32]
    #: (buckets,): see "Versions".
    shifts: npt.NDArray[np.int64]
    #: (AGES * buckets,) and (buckets, any number, 2): see "Limits"; without a limit there are no runs.
    ages: npt.NDArray[np.int64]
    runs: Words
    state: npt.NDArray[np.int64]
    layout: npt.NDArray[np.int64]
    #: What functions keep while they run: loops that allocate nothing need not count references to arrays.
    tags: npt.NDArray[np.uint64]
    places: npt.NDArray[np.int64]


# state
HIGH = 0  # records that were ever used
FREE = 1  # first of the chain of free ones, plus 1
USED = 2
SEGMENTS = 3
DEPTH = 4  # bits of the directory's index
CUTS = 5  # lines of ``cuts`` that may be in use
OLDEST = 6  # rows of lower versions have expired by their age
LIVE = 7  # rows of this version or higher
RECORD_LIMIT = 8
SEGMENT_LIMIT = 9
SWEPT = 10
CREATED = 11
NOT_ADMITTED = 12
REFUSED = 13
EVICTED = 14
STATE_SIZE = 15

# a line of ``cuts``
CURSOR = 0  # record that reading has come to
END = 1  # behind the last record that may be wanted; 0: there is no cut
UNDONE = 2  # records copied before they changed, also those that found no room
WANTED = 3  # address and size of a bit for each record
UNDO = 5  # address and size of the copies
CUT_SIZE = 7
MAX_CUTS = 8

# layout; -1: records have none
STRIDE = 0
AT_UPDATES = 1
AT_VERSION = 2
AT_EPOCH = 3
AT_SLOTS = 4
AT_VALUES = 5
LAYOUT_SIZE = 6

# ages; each is that of the first bucket, and those of others follow
GIVEN_UP = 0  # rows of lower versions have gone, because there were too many
LIVING = 1024  # rows in runs
HEAD = 2048  # first run of those that count
TAIL = 3072  # behind the last one
AGES = 4
BUCKETS = 1024

LINES = 64  # of a segment
PLACES = 12  # of a line
MAX_DEPTH = 28
#: Ids that go through together.
GROUP = 32
SCRATCH_SIZE = LINES * PLACES

_U32 = np.uint64(32)
_U54 = np.uint64(54)
_U1 = np.uint64(1)
_ZERO = np.uint64(0)


@register_jitable(forceinline=True)
def id_at(words: Words, at: Any) -> Any:
    """The id of a record that begins there."""
    return np.uint64(words[at]) | (np.uint64(words[at + 1]) << _U32)


@register_jitable(forceinline=True)
def bucket_of(mixed: Any) -> Any:
    """The bucket of a mixed id."""
    return np.int64(mixed >> _U54)


@register_jitable(forceinline=True)
def change(t: Table, record: Any) -> None:
    """A record is about to change: a cut may have to have it as it is. Other threads may change other records."""
    bit = _U1 << np.uint64(record & 63)
    if t.dirty[record >> 6] & bit != _ZERO:
        return
    atomic_or(t.dirty, record >> 6, bit)
    if t.state[CUTS]:
        _set_aside(t, record, bit)


@register_jitable
def _set_aside(t: Table, record: Any, bit: Any) -> None:
    """Copy a record for each cut that wants it and has not come to it."""
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
    """Count a row in, or out, where its age matters; what waits is not counted by age."""
    at = record * t.layout[STRIDE]
    if t.layout[AT_VERSION] >= 0 and t.by_version.size > 0:
        # What was updated before the store began counts as if by its first version.
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
    """Move the runs of a bucket together; where most have rows, which only files can bring about, the oldest go."""
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
    """Let the oldest run of a bucket go."""
    run = 2 * (bucket * size + t.ages[HEAD + bucket])
    t.ages[GIVEN_UP + bucket] = np.int64(t.runs[run]) + 1
    t.ages[LIVING + bucket] -= np.int64(t.runs[run + 1])
    t.ages[HEAD + bucket] += 1


@register_jitable
def _count_in_run(t: Table, bucket: Any, version: Any, step: Any) -> None:
    """Count a live row in, or out."""
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
    """A row was updated now, at a version of the store; nobody counts it."""
    at = record * t.layout[STRIDE]
    if t.layout[AT_VERSION] >= 0:
        t.words[at + t.layout[AT_VERSION]] = version + t.shifts[bucket]
    if t.layout[AT_EPOCH] >= 0:
        t.words[at + t.layout[AT_EPOCH]] = epoch


@register_jitable(forceinline=True)
def retouch(t: Table, record: Any, bucket: Any, version: Any, epoch: Any) -> None:
    """A row is updated again."""
    count_touch(t, record, bucket, -1)
    touch(t, record, bucket, version, epoch)
    count_touch(t, record, bucket, 1)


@register_jitable(forceinline=True)
def exists(t: Table, record: Any, bucket: Any, oldest_version: Any, oldest_epoch: Any) -> Any:
    """True if a row has not expired, by the oldest version of the store and what the bucket has given up."""
    return is_young(t, record, max(oldest_version + t.shifts[bucket], t.ages[GIVEN_UP + bucket]), oldest_epoch)


@register_jitable(forceinline=True)
def is_young(t: Table, record: Any, oldest: Any, oldest_epoch: Any) -> Any:
    """True if a row has at least this version of its bucket, and this epoch."""
    at = record * t.layout[STRIDE]
    if t.layout[AT_VERSION] >= 0 and np.int64(t.words[at + t.layout[AT_VERSION]]) < oldest:
        return False
    return not (t.layout[AT_EPOCH] >= 0 and np.int64(t.words[at + t.layout[AT_EPOCH]]) < oldest_epoch)
