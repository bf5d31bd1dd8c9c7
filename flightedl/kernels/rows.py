"""Where rows lie, for numba to compile: finding, making, removing and copying records of one table.

**Records.** A row is a record of 32-bit words in one array: id (low word, high word), what has to be known of its
history, slots, values; ``layout`` says where. The array is reserved address space that grows by being touched, so a
record never moves. Removed records form a chain of free ones.

**Index.** Extendible hashing (Fagin et al. 1979). The id is mixed; its ten highest bits are its bucket, which all ids
of a pserver share in part, so the bits behind these lead through the *directory* to a *segment*: 4 KiB, 64 lines of a
cache line each. A line has twelve places: a byte of the mixed id for each (zero: free), compared eight at a time, and
the record's number. What does not fit goes to the next line, and a flag says so. A full segment is split in two; so the
index grows by a few microseconds at a time, and segments fill up to different degrees so that they do not split all at
once.

**Batches.** A row that is not in the cache costs a wait for memory, and its place in the index another. So ids go
through in groups: first the lines of all are asked for, then the records that these name, and then the work is done.

**Cuts.** ``dirty`` has a bit for each record that has changed since the last cut, ``wanted`` one for each record that
the cut has. The first change of a wanted record that the cut has not come to yet copies it to ``undo``.

numba's cache looks at this file alone, so what is called from here is here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba.extending import register_jitable

from flightedl.kernels.intrinsics import atomic_add, atomic_or, copy, prefetch, trailing_zeros

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
    wanted: npt.NDArray[np.uint64]
    #: Records as they were at the cut.
    undo: Words
    #: Rows by the version that updated them last, and by the epoch.
    by_version: npt.NDArray[np.int32]
    by_epoch: npt.NDArray[np.int32]
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
CURSOR = 5  # records that the cut has come to
CUT_HIGH = 6  # records that it may want; 0: there is no cut
UNDO = 7
OLDEST = 8  # rows of lower versions do not exist
LIVE = 9  # rows of this version or higher
RECORD_LIMIT = 10
SEGMENT_LIMIT = 11
SWEPT = 12
CREATED = 13
NOT_ADMITTED = 14
REFUSED = 15
EVICTED = 16
STATE_SIZE = 17

# layout; -1: records have none
STRIDE = 0
AT_UPDATES = 1
AT_VERSION = 2
AT_EPOCH = 3
AT_SLOTS = 4
AT_VALUES = 5
LAYOUT_SIZE = 6

LINES = 64  # of a segment
PLACES = 12  # of a line
MAX_DEPTH = 28
#: Ids that go through together.
GROUP = 32
SCRATCH_SIZE = LINES * PLACES

_U6, _U10, _U27, _U30, _U31, _U32 = (np.uint64(n) for n in (6, 10, 27, 30, 31, 32))
_U1, _U8 = np.uint64(1), np.uint64(8)
_LINE_MASK = np.uint64(LINES - 1)
_BYTE = np.uint64(0xFF)
_LOW_HALF = np.uint64(0xFFFFFFFF)
_ONES = np.uint64(0x0101010101010101)
_HIGHS = np.uint64(0x8080808080808080)
_FOUR_HIGHS = np.uint64(0x80808080)
_OVERFLOWS = np.uint64(1 << 63)
_FACTOR_1 = np.uint64(0xBF58476D1CE4E5B9)
_FACTOR_2 = np.uint64(0x94D049BB133111EB)
_ZERO = np.uint64(0)


@register_jitable(forceinline=True)
def _mixed(row_id: Any, salt: Any) -> Any:
    """As ``placement.mixed``."""
    bits = row_id ^ salt
    bits = (bits ^ (bits >> _U30)) * _FACTOR_1
    bits = (bits ^ (bits >> _U27)) * _FACTOR_2
    return bits ^ (bits >> _U31)


@register_jitable
def _segment_of(t: Table, mixed: Any) -> Any:
    return np.int64(t.directory[np.int64((mixed << _U10) >> np.uint64(64 - t.state[DEPTH]))])


@register_jitable(forceinline=True)
def _tag(mixed: Any) -> Any:
    """The byte that a line has of an id; never zero."""
    tag = (mixed >> _U6) & _BYTE
    return tag if tag != _ZERO else _U1


@register_jitable(forceinline=True)
def _zero_bytes(word: Any) -> Any:
    """The high bits of bytes that are zero; those above the lowest may be wrong."""
    return (word - _ONES) & ~word & _HIGHS


@register_jitable(forceinline=True)
def _next_line(line: Any) -> Any:
    return (line & ~(LINES - 1)) | ((line + 1) & (LINES - 1))


@register_jitable(forceinline=True)
def id_at(words: Words, at: Any) -> Any:
    """The id of a record that begins there."""
    return np.uint64(words[at]) | (np.uint64(words[at + 1]) << _U32)


@register_jitable
def _find_from(t: Table, row_id: Any, tag: Any, line: Any) -> Any:
    """The record of an id whose search begins at this line; -1: there is none."""
    stride = t.layout[STRIDE]
    pattern = tag * _ONES
    for _ in range(LINES):
        high = t.lines[line * 8 + 1]
        matches = _zero_bytes(t.lines[line * 8] ^ pattern)
        while matches != _ZERO:
            record = np.int64(t.entries[line * 16 + 4 + (trailing_zeros(matches) >> 3)])
            if id_at(t.words, record * stride) == row_id:
                return record
            matches &= matches - _U1
        matches = _zero_bytes(high ^ pattern) & _FOUR_HIGHS
        while matches != _ZERO:
            record = np.int64(t.entries[line * 16 + 12 + (trailing_zeros(matches) >> 3)])
            if id_at(t.words, record * stride) == row_id:
                return record
            matches &= matches - _U1
        if high < _OVERFLOWS:
            return -1
        line = _next_line(line)
    return -1


@register_jitable
def _find(t: Table, row_id: Any, mixed: Any) -> Any:
    return _find_from(t, row_id, _tag(mixed), _segment_of(t, mixed) * LINES + np.int64(mixed & _LINE_MASK))


@register_jitable(forceinline=True)
def _first_match(t: Table, tag: Any, line: Any) -> Any:
    """The record that is probably this id's, to be asked for; -1: none in this line."""
    pattern = tag * _ONES
    matches = _zero_bytes(t.lines[line * 8] ^ pattern)
    if matches != _ZERO:
        return np.int64(t.entries[line * 16 + 4 + (trailing_zeros(matches) >> 3)])
    matches = _zero_bytes(t.lines[line * 8 + 1] ^ pattern) & _FOUR_HIGHS
    if matches != _ZERO:
        return np.int64(t.entries[line * 16 + 12 + (trailing_zeros(matches) >> 3)])
    return -1


@register_jitable
def _put(t: Table, segment: Any, mixed: Any, record: Any) -> None:
    """Enter a record in a segment, which has room."""
    line = segment * LINES + np.int64(mixed & _LINE_MASK)
    tag = _tag(mixed)
    while True:
        free = _zero_bytes(t.lines[line * 8])
        if free != _ZERO:
            place = trailing_zeros(free) >> 3
            t.lines[line * 8] |= tag << np.uint64(place * 8)
            t.entries[line * 16 + 4 + place] = record
            break
        free = _zero_bytes(t.lines[line * 8 + 1]) & _FOUR_HIGHS
        if free != _ZERO:
            place = trailing_zeros(free) >> 3
            t.lines[line * 8 + 1] |= tag << np.uint64(place * 8)
            t.entries[line * 16 + 12 + place] = record
            break
        t.lines[line * 8 + 1] |= _OVERFLOWS
        line = _next_line(line)
    t.segments[2 * segment] += 1


@register_jitable
def _split(t: Table, segment: Any, mixed: Any, salt: Any) -> Any:
    """Split the segment of an id in two; whether there was room."""
    state, depth, stride = t.state, np.int64(t.segments[2 * segment + 1]), t.layout[STRIDE]
    if state[SEGMENTS] >= state[SEGMENT_LIMIT] or depth >= MAX_DEPTH:
        return False
    if depth == state[DEPTH]:
        for i in range((1 << depth) - 1, -1, -1):
            t.directory[2 * i + 1] = t.directory[i]
            t.directory[2 * i] = t.directory[i]
        state[DEPTH] += 1
    records, count = t.places, 0
    for line in range(segment * LINES, (segment + 1) * LINES):
        for place in range(PLACES):
            if (t.lines[line * 8 + place // 8] >> np.uint64(place % 8 * 8)) & _BYTE != _ZERO:
                records[count] = t.entries[line * 16 + 4 + place]
                prefetch(t.words, records[count] * stride)
                count += 1
    t.lines[segment * LINES * 8 : (segment + 1) * LINES * 8] = _ZERO
    new = state[SEGMENTS]
    state[SEGMENTS] += 1
    t.segments[2 * segment] = 0
    t.segments[2 * segment + 1] = t.segments[2 * new + 1] = depth + 1
    length = 1 << (state[DEPTH] - depth)
    first = np.int64((mixed << _U10) >> np.uint64(64 - depth)) * length
    t.directory[first + length // 2 : first + length] = new
    for i in range(count):
        other = _mixed(id_at(t.words, records[i] * stride), salt)
        _put(t, _segment_of(t, other), other, records[i])
    return True


@register_jitable
def _has_room(t: Table, mixed: Any, salt: Any) -> Any:
    """Whether an id can be entered, after a split if need be."""
    while True:
        segment = _segment_of(t, mixed)
        # Of 768 places; other segments split at other numbers.
        if t.segments[2 * segment] < 560 + segment * 37 % 101:
            return True
        if not _split(t, segment, mixed, salt):
            return t.segments[2 * segment] < LINES * PLACES - 1


@register_jitable
def _made(t: Table, row_id: Any, mixed: Any, salt: Any) -> Any:
    """A new record with an id and nothing else; -1: there is no room."""
    state, stride = t.state, t.layout[STRIDE]
    if (state[FREE] == 0 and state[HIGH] >= state[RECORD_LIMIT]) or not _has_room(t, mixed, salt):
        return -1
    if state[FREE]:
        record = state[FREE] - 1
        state[FREE] = np.int64(id_at(t.words, record * stride))
    else:
        record = state[HIGH]
        state[HIGH] += 1
    state[USED] += 1
    t.used[record >> 6] |= _U1 << np.uint64(record & 63)
    t.dirty[record >> 6] |= _U1 << np.uint64(record & 63)
    at = record * stride
    t.words[at] = np.uint32(row_id & _LOW_HALF)
    t.words[at + 1] = np.uint32(row_id >> _U32)
    for i in range(2, max(t.layout[AT_SLOTS], 2)):
        t.words[at + i] = 0
    _put(t, _segment_of(t, mixed), mixed, record)
    return record


@register_jitable(forceinline=True)
def change(t: Table, record: Any) -> None:
    """A record is about to change: a cut may have to have it as it is. Other threads may change other records."""
    bit = _U1 << np.uint64(record & 63)
    if t.dirty[record >> 6] & bit != _ZERO:
        return
    atomic_or(t.dirty, record >> 6, bit)
    state, stride = t.state, t.layout[STRIDE]
    if state[CURSOR] <= record < state[CUT_HIGH] and t.wanted[record >> 6] & bit != _ZERO:
        target = atomic_add(state, np.int64(UNDO), np.int64(1))
        copy(t.undo, target * stride, t.words, record * stride, stride)


@register_jitable
def _count_touch(t: Table, record: Any, step: Any) -> None:
    """Count a row in, or out, where its age matters; what waits is not counted by age."""
    at = record * t.layout[STRIDE]
    if t.layout[AT_VERSION] >= 0 and t.by_version.size > 0:
        version = np.int64(t.words[at + t.layout[AT_VERSION]])
        t.by_version[version] += step
        if version >= t.state[OLDEST]:
            t.state[LIVE] += step
    if t.layout[AT_EPOCH] >= 0 and t.by_epoch.size > 0:
        epoch: Any = min(np.int64(t.words[at + t.layout[AT_EPOCH]]), t.by_epoch.size - 1)
        t.by_epoch[epoch] += step


@register_jitable
def _touch(t: Table, record: Any, version: Any, epoch: Any) -> None:
    at = record * t.layout[STRIDE]
    if t.layout[AT_VERSION] >= 0:
        t.words[at + t.layout[AT_VERSION]] = version
    if t.layout[AT_EPOCH] >= 0:
        t.words[at + t.layout[AT_EPOCH]] = epoch


@register_jitable(forceinline=True)
def _exists(t: Table, record: Any, oldest_version: Any, oldest_epoch: Any) -> Any:
    at = record * t.layout[STRIDE]
    if t.layout[AT_VERSION] >= 0 and np.int64(t.words[at + t.layout[AT_VERSION]]) < oldest_version:
        return False
    return not (t.layout[AT_EPOCH] >= 0 and np.int64(t.words[at + t.layout[AT_EPOCH]]) < oldest_epoch)


@register_jitable
def _remove(t: Table, record: Any, salt: Any) -> None:
    """Remove a record, and set it aside before if a cut wants it."""
    stride = t.layout[STRIDE]
    change(t, record)
    _count_touch(t, record, -1)
    mixed = _mixed(id_at(t.words, record * stride), salt)
    segment = _segment_of(t, mixed)
    line = segment * LINES + np.int64(mixed & _LINE_MASK)
    place = 0
    while True:
        shift = np.uint64(place % 8 * 8)
        tag = (t.lines[line * 8 + place // 8] >> shift) & _BYTE
        if tag != _ZERO and t.entries[line * 16 + 4 + place] == record:
            t.lines[line * 8 + place // 8] &= ~(_BYTE << shift)
            break
        place += 1
        if place == PLACES:
            place, line = 0, _next_line(line)
    t.segments[2 * segment] -= 1
    t.used[record >> 6] &= ~(_U1 << np.uint64(record & 63))
    t.words[record * stride] = np.uint32(np.uint64(t.state[FREE]) & _LOW_HALF)
    t.words[record * stride + 1] = np.uint32(np.uint64(t.state[FREE]) >> _U32)
    t.state[FREE] = record + 1
    t.state[USED] -= 1


@register_jitable(forceinline=True)
def ask_for(t: Table, ids: Ids, start: Any, count: Any, salt: Any, shift: Any, stride: Any) -> None:
    """Have the records of a group of ids come into the cache, each probably.

    What is found on the way is for ``found``: tags in ``t.tags``, lines and records in the halves of ``t.places``.
    """
    tags, lines, records = t.tags, t.places, t.places[GROUP:]
    for i in range(count):
        mixed = _mixed(ids[start + i], salt)
        tags[i] = _tag(mixed)
        segment = np.int64(t.directory[np.int64((mixed << _U10) >> shift)])
        lines[i] = segment * LINES + np.int64(mixed & _LINE_MASK)
        prefetch(t.lines, lines[i] * 8)
    for i in range(count):
        record = _first_match(t, tags[i], lines[i])
        records[i] = record
        if record >= 0:
            at = record * stride
            prefetch(t.dirty, record >> 6)
            for word in range(0, stride - 1, 16):
                prefetch(t.words, at + word)
            prefetch(t.words, at + stride - 1)


@register_jitable(forceinline=True)
def found(t: Table, row_id: Any, i: Any, stride: Any, has_age: Any, oldest_version: Any, oldest_epoch: Any) -> Any:
    """The record of a row that exists, of the i-th id of the group that was asked for; -1: there is none."""
    record = t.places[GROUP + i]
    if record < 0 or id_at(t.words, record * stride) != row_id:
        record = _find_from(t, row_id, t.tags[i], t.places[i])
    if has_age and record >= 0 and not _exists(t, record, oldest_version, oldest_epoch):
        return -1
    return record


@register_jitable(forceinline=True)
def retouch(t: Table, record: Any, version: Any, epoch: Any) -> None:
    """A row is updated again."""
    _count_touch(t, record, -1)
    _touch(t, record, version, epoch)
    _count_touch(t, record, 1)


def gather(
    t: Table,
    ids: Ids,
    salt: int,
    oldest_version: int,
    oldest_epoch: int,
    width: int,
    out: Words,
    missing: npt.NDArray[np.int64],
) -> int:
    """The values of rows, ``width`` words each, to ``out``; the places of ids without one to ``missing``.

    Returns:
        How many these are.
    """
    stride, at_values = t.layout[STRIDE], t.layout[AT_VALUES]
    has_age = t.layout[AT_VERSION] >= 0 or t.layout[AT_EPOCH] >= 0
    shift = np.uint64(64 - t.state[DEPTH])
    missed = 0
    for start in range(0, ids.size, GROUP):
        count = min(GROUP, ids.size - start)
        ask_for(t, ids, start, count, salt, shift, stride)
        for i in range(count):
            record = found(t, ids[start + i], i, stride, has_age, oldest_version, oldest_epoch)
            if record < 0:
                missing[missed] = start + i
                missed += 1
            else:
                copy(out, (start + i) * width, t.words, record * stride + at_values, width)
    return missed


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
        mixed = _mixed(ids[place], salt)
        low = np.uint8(255)
        for row in range(4):
            low = min(low, sketch[row * width + np.int64(_mixed(mixed, np.uint64(row + 1)) & mask)])
        if np.int64(low) + 1 >= admit_after:
            places[found] = place
            found += 1
            continue
        t.state[NOT_ADMITTED] += 1
        for row in range(4):
            at = row * width + np.int64(_mixed(mixed, np.uint64(row + 1)) & mask)
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
        mixed = _mixed(ids[place], salt)
        record = _find(w, ids[place], mixed)
        if record < 0:
            record = _made(w, ids[place], mixed, salt)
            if record < 0:
                w.state[REFUSED] += 1
                continue
        else:
            change(w, record)
            if not _exists(w, record, oldest_version, oldest_epoch):
                w.words[record * w.layout[STRIDE] + at_updates] = 0
        at = record * w.layout[STRIDE] + at_updates
        w.words[at] += np.uint32(1)
        _touch(w, record, version, epoch)
        if np.int64(w.words[at]) >= admit_after:
            _remove(w, record, salt)
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
        mixed = _mixed(ids[place], salt)
        expired = _find(t, ids[place], mixed)
        if expired >= 0:
            _remove(t, expired, salt)
            state[EVICTED] += 1
        record = _made(t, ids[place], mixed, salt)
        if record < 0:
            state[REFUSED] += 1
            continue
        _touch(t, record, version, epoch)
        _count_touch(t, record, 1)
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
        if is_used and not _exists(t, record, oldest_version, oldest_epoch):
            bucket = np.int64(_mixed(id_at(t.words, record * t.layout[STRIDE]), salt) >> np.uint64(54))
            if bucket < first_bucket or bucket >= end_bucket:
                continue
            _remove(t, record, salt)
            state[EVICTED] += 1


def place(t: Table, ids: Ids, salt: int, records: Records) -> None:
    """The records of ids from a checkpoint, made where there is none; -1: no room. They are not counted by age."""
    for i in range(ids.size):
        mixed = _mixed(ids[i], salt)
        record = _find(t, ids[i], mixed)
        if record < 0:
            record = _made(t, ids[i], mixed, salt)
        else:
            change(t, record)
            _count_touch(t, record, -1)
        records[i] = record


def count_touches(t: Table, records: Records) -> None:
    """Count records that were filled."""
    for i in range(records.size):
        if records[i] >= 0:
            _count_touch(t, records[i], 1)


def look_up(t: Table, ids: Ids, salt: int, records: Records) -> None:
    """The records of ids; -1: there is none."""
    for i in range(ids.size):
        records[i] = _find(t, ids[i], _mixed(ids[i], salt))


def remove(t: Table, records: Records, salt: int) -> None:
    """Remove records; -1 is none."""
    for i in range(records.size):
        if records[i] >= 0:
            _remove(t, records[i], salt)


def scatter(words: Words, stride: int, at: int, width: int, records: Records, source: Words) -> None:
    """Write ``width`` words from ``at`` on of each record; -1 is none."""
    for i in range(records.size):
        if records[i] >= 0:
            copy(words, records[i] * stride + at, source, i * width, width)


def collect(words: Words, stride: int, at: int, width: int, records: Records, out: Words) -> None:
    """Read ``width`` words from ``at`` on of each record."""
    for i in range(records.size):
        copy(out, i * width, words, records[i] * stride + at, width)


def next_wanted(t: Table, oldest_version: int, oldest_epoch: int, records: Records) -> int:
    """The next records that the cut has and that nobody has changed since; their number, 0 at the end.

    Who changes one of them from now on sets nothing aside: they have to be copied before the lock is given back.
    """
    state, found = t.state, 0
    while found < records.size and state[CURSOR] < state[CUT_HIGH]:
        at = state[CURSOR] >> 6
        left = t.wanted[at] & ~t.dirty[at] & ~((_U1 << np.uint64(state[CURSOR] & 63)) - _U1)
        state[CURSOR] = min((at + 1) << 6, state[CUT_HIGH])
        while left != _ZERO:
            record = (at << 6) + trailing_zeros(left)
            if found == records.size:
                state[CURSOR] = record
                break
            left &= left - _U1
            if _exists(t, record, oldest_version, oldest_epoch):
                records[found] = record
                found += 1
    return found


def existing(t: Table, oldest_version: int, oldest_epoch: int, start: int, records: Records) -> int:
    """Of the records from ``start`` on those of rows that exist; their number."""
    found = 0
    for record in range(start, min(start + records.size, t.state[HIGH])):
        is_used = t.used[record >> 6] >> np.uint64(record & 63) & _U1 != _ZERO
        if is_used and _exists(t, record, oldest_version, oldest_epoch):
            records[found] = record
            found += 1
    return found


def problem(ids: Ids, salt: int, first_bucket: int, end_bucket: int, seen: Ids) -> int:
    """Whether ids can be those of one call: 0, yes; 1, one is there twice; 2, one lies in another bucket.

    ``seen`` is all zero, and its size a power of two, more than ids.
    """
    mask = np.uint64(seen.size - 1)
    zeros = 0
    for i in range(ids.size):
        mixed = _mixed(ids[i], salt)
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
