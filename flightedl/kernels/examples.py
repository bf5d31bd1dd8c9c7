"""Compiled parser of ``tf.train.Example`` in protobuf's wire format, for ``formats.tfrecord``.

An Example is ``Example{1: Features{1: map entry{1: name, 2: Feature}}}``. A Feature has one of ``1: BytesList``, ``2:
FloatList`` and ``3: Int64List``, or nothing. The values of a list are its fields 1; numbers are packed, or have a tag
each. Any other field makes a message foreign, because skipping it would lose data.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import types
from numba.extending import register_jitable

from flightedl.kernels.compiled import machine_code
from flightedl.kernels.plain import BYTES, FLOATS, INTEGERS

Bytes = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.int64]

#: Bytes of a record before and after its data: its length with a checksum, and the checksum of the data.
_HEAD, _TAIL = 12, 4


@register_jitable
def _little_endian(data: Any, at: Any, size: Any) -> Any:
    number = np.int64(0)
    for i in range(size):
        number |= np.int64(data[at + i]) << np.int64(8 * i)
    return number


@register_jitable
def _varint(data: Any, at: Any, end: Any) -> Any:
    """Decode the number at ``at``. Return it and the place after it, which is -1 if it does not end before ``end``."""
    number, shift = np.int64(0), np.int64(0)
    while at < end and shift < 70:
        number |= np.int64(data[at] & 127) << shift
        at += 1
        if data[at - 1] < 128:
            return number, at
        shift += np.int64(7)
    return number, -1


@register_jitable
def _part(data: Any, at: Any, end: Any, tag: Any) -> Any:
    """Return the start and end of the bytes after this tag and a length at ``at``; the end is -1 if there are none."""
    if at < 0 or at >= end or data[at] != tag:
        return at, -1
    size, start = _varint(data, at + 1, end)
    return start, start + size if start >= 0 and 0 <= size <= end - start else -1


@register_jitable
def _entry(data: Any, at: Any, end: Any) -> Any:
    """Return the start and end of a name, the kind and the start of the list, and its end; the end may be -1."""
    at, end = _part(data, at, end, 10)
    name, name_end = _part(data, at, end, 10)
    kind, start, list_end = np.int64(0), name_end, name_end
    if 0 <= name_end < end:
        start, list_end = _part(data, name_end, end, 18)
    if start < list_end:
        tag = data[start]
        kind = np.int64(tag >> 3) if tag & 7 == 2 else np.int64(0)
        start, list_end = _part(data, start, list_end, tag)
        list_end = list_end if BYTES <= kind <= INTEGERS else -1
    return name, name_end, kind, start, list_end if list_end == end else -1


@register_jitable
def _read_list(data: Any, at: Any, end: Any, kind: Any, values: Any, found: Any) -> Any:
    """Append the values of a list to the first ``found`` values, or only count them. Return their number, or -1."""
    while at < end:
        is_single = (kind == FLOATS and data[at] == 13) or (kind == INTEGERS and data[at] == 8)
        start, stop = at + 1, at + (5 if kind == FLOATS else 2)
        if not is_single:
            start, stop = _part(data, at, end, 10)
        if stop < 0 or stop > end or (kind == FLOATS and (stop - start) % 4):
            return -1
        at = start
        if kind == BYTES:
            if values.size:
                values[found], values[found + 1] = start, stop
            at, found = stop, found + 2
        while 0 <= at < stop:
            if kind == FLOATS:
                number, at = _little_endian(data, at, 4), at + 4
            else:
                number, at = _varint(data, at, end if is_single else stop)
            if values.size:
                values[found] = number
            found += 1
        if at < 0:
            return -1
    return found


def read_examples(data: Bytes, features: Numbers, values: Numbers) -> tuple[int, int, int]:
    """Read all features of all records, or only count them.

    Args:
        data: (n,) records with their lengths and checksums, which are not verified.
        features: (6, rows) or empty. Receives the record of each feature, the start and end of its name, the kind of
            its list (0 if there is none), and the start and end of its values.
        values: (m,) or empty. Receives integers, the bits of floats, and the start and end of each value of bytes.

    Returns:
        The number of records, of features (-1 if the last record is no Example) and of ``values``.
    """
    record = rows = found = start = 0
    while start < data.size:
        record, at = record + 1, start + _HEAD
        end = at + _little_endian(data, start, 8 if at <= data.size else 0)
        start = end + _TAIL
        if end < at or start > data.size:
            return record, -1, found
        while at < end:
            at, stop = _part(data, at, end, 10)
            while at < stop:
                name, name_end, kind, content, at = _entry(data, at, stop)
                first = found
                found = _read_list(data, content, at, kind, values, found) if kind else found
                if at < 0 or found < 0:
                    return record, -1, 0
                if features.size:
                    features[0, rows], features[1, rows], features[2, rows] = record - 1, name, name_end
                    features[3, rows], features[4, rows], features[5, rows] = kind, first, found
                rows += 1
            if stop < 0 or at != stop:
                return record, -1, found
    return record, rows, found


@cache
def examples_kernel() -> Any:
    """Return ``read_examples``, compiled or read from numba's cache."""
    received = types.Array(types.uint8, 1, "C", readonly=True, aligned=False)
    result = types.UniTuple(types.int64, 3)  # type: ignore[no-untyped-call]
    return machine_code(read_examples, result(received, types.int64[:, ::1], types.int64[::1]), allocates=False)
