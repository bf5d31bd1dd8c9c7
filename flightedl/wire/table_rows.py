"""Rows of embedding tables as they travel: the values of a part whose blocks are buckets (see ``parts``).

A *payload* is the bytes of one part. Little-endian: ``uint32`` 1, the version of this layout; ``uint32`` number of
sections; then for each section 16 bytes: ``uint16`` kind, ``uint16`` 0, ``uint32`` number of the table, ``uint64``
number of rows; then what the sections carry, one after the other, each of its pieces on a multiple of eight bytes:

* ``GRADIENTS``: (n,) ``uint64`` ids, none twice, then (n, dim) ``float32`` gradients. A batch that pushes to a table
  has such a section on every pserver, also where none of its ids lie there: it has its weight in the table's mean.
* ``WANTED``: (n,) ``uint64`` ids whose rows the sender wants.
* ``ROWS``: (n, dim) values in the table's dtype (bfloat16 as ``uint16``), in the order in which their ids were asked.
* ``UNKNOWN``: (n,) ``uint64`` ids that were asked for and are in no row, of a table where that is an error; their
  values are zero.

A payload without sections says that the version of the part has been reached. Ids are integers; whoever has text makes
integers of it. Received arrays are read-only views of network memory, and live as long as the message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from struct import Struct
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from flightedl.errors import MessageError

Array = npt.NDArray[np.generic]
Ids = npt.NDArray[np.uint64]

_LAYOUT = 1
_START = Struct("<II")
_SECTION = Struct("<HHIQ")
_ID_BYTES = 8
_ALIGNMENT_BYTES = 8
#: The most sections of a payload, which is twice as many tables.
SECTIONS_LIMIT = 65_536


class Kind(IntEnum):
    """What a section carries."""

    GRADIENTS = 1
    WANTED = 2
    ROWS = 3
    UNKNOWN = 4


_KINDS = frozenset(map(int, Kind))
_WITH_IDS = frozenset({Kind.GRADIENTS, Kind.WANTED, Kind.UNKNOWN})
_WITH_VALUES = frozenset({Kind.GRADIENTS, Kind.ROWS})


class Section(NamedTuple):
    """Rows of one table."""

    kind: int
    #: Number of the table.
    table: int
    #: (n,); of ``ROWS`` empty.
    ids: Ids
    #: (n, dim), where there are any.
    values: Array | None = None

    @property
    def row_count(self) -> int:
        """How many rows it has."""
        return len(self.ids) if self.values is None else len(self.values)


#: Whole numbers by size.
_BITS = {2: np.uint16, 4: np.uint32, 8: np.uint64}
_NO_IDS: Ids = np.empty(0, np.uint64)


def rows_section(table: int, values: Array) -> Section:
    """Values in the order in which they were asked for."""
    return Section(Kind.ROWS, table, _NO_IDS, values)


def encode_sections(sections: Sequence[Section]) -> npt.NDArray[np.uint8]:
    """A payload, (n,) bytes."""
    header = [_START.pack(_LAYOUT, len(sections))]
    pieces: list[bytes | memoryview] = []
    for kind, table, ids, values in sections:
        header.append(_SECTION.pack(kind, 0, table, len(ids) if values is None else len(values)))
        if kind in _WITH_IDS and len(ids):
            pieces.append(np.ascontiguousarray(ids).data.cast("B"))
        if values is not None and values.size:
            # NumPy's bfloat16 has no format that memory could be seen by.
            bits = np.ascontiguousarray(values).view(_BITS[values.itemsize])
            pieces.append(bits.data.cast("B"))
            if bits.nbytes % _ALIGNMENT_BYTES:
                pieces.append(bytes(_padded(bits.nbytes) - bits.nbytes))
    return np.frombuffer(b"".join([*header, *pieces]), np.uint8)


def _padded(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


#: No sections: a version has been reached.
NOTHING: npt.NDArray[np.uint8] = encode_sections([])


def decode_sections(
    data: memoryview, row_of: Callable[[int, int], tuple[int, np.dtype[np.generic]]], kinds: Iterable[int]
) -> list[Section]:
    """The sections of a payload.

    Args:
        data: As received, at any address.
        row_of: (kind, table) -> elements and dtype of one row of values; raises MessageError of an unknown table.
        kinds: That are expected.

    Raises:
        MessageError: it is no payload, or has a section that is not expected, or two of a kind for a table.
    """
    if len(data) < _START.size:
        raise MessageError(f"rows of tables have {len(data)} bytes: no header")
    layout, count = _START.unpack_from(data)
    at = _START.size + count * _SECTION.size
    if layout != _LAYOUT or count > SECTIONS_LIMIT or len(data) < at:
        raise MessageError(
            f"rows of tables of layout {layout} with {count} sections have {len(data)} bytes: another version?"
        )
    expected = frozenset(kinds)
    found: list[Section] = []
    seen: set[tuple[int, int]] = set()
    for kind, _, table, rows in _SECTION.iter_unpack(data[_START.size : at]):
        if kind not in expected or kind not in _KINDS or (kind, table) in seen:
            raise MessageError(f"rows of tables have a section of kind {kind} for table {table} that they may not have")
        seen.add((kind, table))
        ids, values = _NO_IDS, None
        elements, dtype = row_of(kind, table)
        if kind in _WITH_IDS:
            ids = np.frombuffer(_cut(data, at, rows * _ID_BYTES), np.uint64)
            at += rows * _ID_BYTES
        if kind in _WITH_VALUES:
            size_bytes = rows * elements * dtype.itemsize
            values = np.frombuffer(_cut(data, at, size_bytes), dtype).reshape(rows, elements)
            at += _padded(size_bytes)
        found.append(Section(kind, table, ids, values))
    if at != len(data):
        raise MessageError(f"rows of tables tell of {at} bytes, {len(data)} came")
    return found


def _cut(data: memoryview, at: int, size_bytes: int) -> memoryview:
    if at + size_bytes > len(data):
        raise MessageError(f"rows of tables tell of {at + size_bytes} bytes or more, {len(data)} came")
    return data[at : at + size_bytes]
