"""Index of a table's rows: finds, adds and removes records. ``row_records`` describes its layout."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.extending import register_jitable

from flightedl.kernels.intrinsics import prefetch, trailing_zeros
from flightedl.kernels.row_records import (
    AT_SLOTS,
    DEPTH,
    FREE,
    GROUP,
    HIGH,
    LINES,
    MAX_DEPTH,
    PLACES,
    RECORD_LIMIT,
    SEGMENT_LIMIT,
    SEGMENTS,
    STRIDE,
    USED,
    Ids,
    Table,
    bucket_of,
    change,
    count_touch,
    exists,
    id_at,
)

_U6 = np.uint64(6)
_U27 = np.uint64(27)
_U30 = np.uint64(30)
_U31 = np.uint64(31)
_U32 = np.uint64(32)
_U1 = np.uint64(1)
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
def mixed_id(row_id: Any, salt: Any) -> Any:
    """Mix an id, see ``placement.mixed``."""
    bits = row_id ^ salt
    bits = (bits ^ (bits >> _U30)) * _FACTOR_1
    bits = (bits ^ (bits >> _U27)) * _FACTOR_2
    return bits ^ (bits >> _U31)


@register_jitable
def _segment_of(t: Table, mixed: Any) -> Any:
    return np.int64(t.directory[np.int64(mixed >> np.uint64(64 - t.state[DEPTH]))])


@register_jitable(forceinline=True)
def _tag(mixed: Any) -> Any:
    """Return the byte that a line of the index stores for an id, which is never zero."""
    tag = (mixed >> _U6) & _BYTE
    return tag if tag != _ZERO else _U1


@register_jitable(forceinline=True)
def _zero_bytes(word: Any) -> Any:
    """Return a number in which the high bit of each zero byte is set. Only the lowest set bit is reliable."""
    return (word - _ONES) & ~word & _HIGHS


@register_jitable(forceinline=True)
def _next_line(line: Any) -> Any:
    return (line & ~(LINES - 1)) | ((line + 1) & (LINES - 1))


@register_jitable
def _find_from(t: Table, row_id: Any, tag: Any, line: Any) -> Any:
    """Return the record of an id, or -1 if there is none. The search starts at a given line."""
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
def find(t: Table, row_id: Any, mixed: Any) -> Any:
    """Return the record of an id, or -1 if there is none."""
    return _find_from(t, row_id, _tag(mixed), _segment_of(t, mixed) * LINES + np.int64(mixed & _LINE_MASK))


@register_jitable(forceinline=True)
def _first_match(t: Table, tag: Any, line: Any) -> Any:
    """Return the record that probably belongs to the id, for prefetching, or -1 if the line has no candidate."""
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
    """Split the segment of an id into two. Return False if there is no room for another segment."""
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
    first = np.int64(mixed >> np.uint64(64 - depth)) * length
    t.directory[first + length // 2 : first + length] = new
    for i in range(count):
        other = mixed_id(id_at(t.words, records[i] * stride), salt)
        _put(t, _segment_of(t, other), other, records[i])
    return True


@register_jitable
def _has_room(t: Table, mixed: Any, salt: Any) -> Any:
    while True:
        segment = _segment_of(t, mixed)
        # A segment has 768 places. Segments have different limits, so that they are not all split at the same time.
        if t.segments[2 * segment] < 560 + segment * 37 % 101:
            return True
        if not _split(t, segment, mixed, salt):
            return t.segments[2 * segment] < LINES * PLACES - 1


@register_jitable
def made_record(t: Table, row_id: Any, mixed: Any, salt: Any) -> Any:
    """Add a record with an id and an empty history. Return the record, or -1 if there is no room."""
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


@register_jitable
def remove_record(t: Table, record: Any, salt: Any) -> None:
    """Remove a record. If a cut wants the record, copy it for the cut first."""
    stride = t.layout[STRIDE]
    change(t, record)
    mixed = mixed_id(id_at(t.words, record * stride), salt)
    count_touch(t, record, bucket_of(mixed), -1)
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
    """Prefetch the records of a group of ids.

    Results are stored for ``found``: tags in ``t.tags``; lines, candidate records and buckets in ``t.places``.
    """
    tags, lines, records, buckets = t.tags, t.places, t.places[GROUP:], t.places[2 * GROUP :]
    for i in range(count):
        mixed = mixed_id(ids[start + i], salt)
        tags[i], buckets[i] = _tag(mixed), bucket_of(mixed)
        segment = np.int64(t.directory[np.int64(mixed >> shift)])
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
    """Return the record of the i-th id in the group that was passed to ``ask_for``, or -1 if the id has no row."""
    record = t.places[GROUP + i]
    if record < 0 or id_at(t.words, record * stride) != row_id:
        record = _find_from(t, row_id, t.tags[i], t.places[i])
    if has_age and record >= 0 and not exists(t, record, t.places[2 * GROUP + i], oldest_version, oldest_epoch):
        return -1
    return record


@register_jitable
def in_bucket(t: Table, bucket: Any, salt: Any, records: Any) -> Any:
    """Write the records of a bucket to ``records``, in the order of the index. Return their number."""
    depth, found, last = t.state[DEPTH], 0, np.int64(-1)
    first, stop = bucket << MAX_DEPTH - 10 >> MAX_DEPTH - depth, (bucket + 1 << MAX_DEPTH - 10) - 1 >> MAX_DEPTH - depth
    for place in range(first, stop + 1):
        segment = np.int64(t.directory[place])
        if segment == last:
            continue
        last = segment
        for line in range(segment * LINES, (segment + 1) * LINES):
            for i in range(PLACES):
                if (t.lines[line * 8 + i // 8] >> np.uint64(i % 8 * 8)) & _BYTE == _ZERO:
                    continue
                record = np.int64(t.entries[line * 16 + 4 + i])
                if bucket_of(mixed_id(id_at(t.words, record * t.layout[STRIDE]), salt)) == bucket:
                    records[found] = record
                    found += 1
    return found
