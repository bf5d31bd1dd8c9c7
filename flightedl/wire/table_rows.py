"""Wire format for rows of embedding tables: the values of a message part whose blocks are buckets.

The bytes of a part are a *payload*, in little-endian byte order:

* ``uint32`` 2, the version of this layout; ``uint32`` number of sections
* for each section, 16 bytes: ``uint16`` kind; ``uint16`` number of optional ids; ``uint32`` number of the table;
  ``uint64`` number of rows
* the ids of all sections that have ids, as ``uint64``, in the order of the sections
* the values of all sections that have values, as ``float32``, in the order of the sections

In a payload, the ids of all tables form one array, and so do their values. These are the kinds of sections:

* ``GRADIENTS``: n distinct ids, and (n, dim) gradients. A batch that pushes to a table sends this section to every
  pserver, even if the pserver owns none of the ids, because the batch's weight counts in the table's mean.
* ``WANTED``: n ids to look up, which may contain duplicates. The first of them may be optional, such as the id of a
  padding: an optional id without a row reads as zeros, whatever the table returns for other ids without a row.
* ``ROWS``: (n, dim) values, in the order in which the lookup listed the ids.
* ``UNKNOWN``: n ids of the lookup that have no row, for tables in which this is an error. Their values are zero.

A payload without sections reports that the part's version has been reached. Ids are integers; the client converts
strings. Received arrays are read-only views of network memory, valid as long as the message.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import chain
from operator import mul
from struct import Struct, pack
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from flightedl.errors import MessageError

Ids = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float32]
Numbers = npt.NDArray[np.int64]
Payload = npt.NDArray[np.uint8]

LAYOUT = 2
START = Struct("<II")
_SECTION = np.dtype([("kind", "<u2"), ("optional", "<u2"), ("table", "<u4"), ("rows", "<u8")])
#: Number of bytes that precede the sections, and number of bytes per section.
IDS_AT, SECTION_BYTES = START.size, _SECTION.itemsize
_ID_BYTES, _VALUE_BYTES = 8, 4
#: Maximum number of sections in a payload: two per table.
SECTIONS_LIMIT = 65_536


class Kind(IntEnum):
    """Content of a section."""

    GRADIENTS = 1
    WANTED = 2
    ROWS = 3
    UNKNOWN = 4


#: By the kind of the section: 1 if it has ids, and 1 if it has values.
_HAS_IDS = np.array([0, 1, 1, 0, 1])
_HAS_VALUES = np.array([0, 1, 0, 1, 0])


class Section(NamedTuple):
    """Rows of one table."""

    kind: int
    #: Number of the table.
    table: int
    #: (n,); empty for ``ROWS``.
    ids: Ids
    #: (n, dim) values; None if the section's kind has no values.
    values: Floats | None = None
    #: Number of optional ids, which precede the others.
    optional: int = 0


@dataclass(frozen=True, slots=True)
class Sections:
    """The n sections of a payload."""

    #: Four (n,) arrays: kind, number of the table, elements per row, number of rows.
    kinds: Numbers
    tables: Numbers
    dims: Numbers
    counts: Numbers
    #: Ids and values of all sections, flattened, in the order of the sections.
    ids: Ids
    values: Floats

    def __iter__(self) -> Iterator[Section]:
        id_at = value_at = 0
        lists = (each.tolist() for each in (self.kinds, self.tables, self.dims, self.counts))
        for kind, table, dim, count in zip(*lists, strict=True):
            id_end, value_end = id_at + count * int(_HAS_IDS[kind]), value_at + count * dim * int(_HAS_VALUES[kind])
            values = self.values[value_at:value_end].reshape(count, dim) if _HAS_VALUES[kind] else None
            yield Section(kind, table, self.ids[id_at:id_end], values)
            id_at, value_at = id_end, value_end


def rows_payload(tables: Sequence[int], dims: Sequence[int], counts: Sequence[int]) -> tuple[Payload, Floats]:
    """Return a payload with one ``ROWS`` section per table, and its uninitialized values for the caller to fill."""
    header = header_of([(Kind.ROWS, table, count) for table, count in zip(tables, counts, strict=True)])
    payload = np.empty(len(header) + _VALUE_BYTES * sum(map(mul, dims, counts)), np.uint8)
    payload.data[: len(header)] = header
    return payload, payload[len(header) :].view(np.float32)


def new_gradients(ids: Ids, dim: int) -> Floats:
    """Return an uninitialized (n, dim) array for gradients of (n,) ids, located in the memory of a payload."""
    start = IDS_AT + SECTION_BYTES
    values_at = start + ids.nbytes
    payload = np.empty(values_at + _VALUE_BYTES * dim * len(ids), np.uint8)
    payload[start:values_at] = ids.view(np.uint8)
    return payload[values_at:].view(np.float32).reshape(-1, dim)


def payload_of(table: int, ids: Ids, gradients: Floats) -> Payload:
    """Return the payload with one table's gradients. If ``new_gradients`` created the array, it is not copied."""
    payload, values_at = gradients.base, IDS_AT + SECTION_BYTES + ids.nbytes
    if (
        not isinstance(payload, np.ndarray)
        or payload.dtype != np.uint8
        or payload.nbytes != values_at + gradients.nbytes
    ):
        return encode_sections([Section(Kind.GRADIENTS, table, ids, gradients)])
    payload.data[: IDS_AT + SECTION_BYTES] = header_of([(Kind.GRADIENTS, table, len(ids))])
    return payload


def encode_sections(sections: Sequence[Section]) -> Payload:
    """Return the payload of these sections as (n,) bytes."""
    ids = [np.ascontiguousarray(each.ids, np.uint64).data for each in sections if _HAS_IDS[each.kind]]
    values = [np.ascontiguousarray(each.values, np.float32).data for each in sections if each.values is not None]
    header = header_of(
        [
            (each.kind | each.optional << 16, each.table, len(each.ids if each.values is None else each.values))
            for each in sections
        ]
    )
    return np.frombuffer(b"".join([header, *ids, *values]), np.uint8)


def header_of(sections: Sequence[tuple[int, int, int]]) -> bytes:
    """Return the bytes of a payload before its ids, given each section's kind, table and number of rows.

    The upper 16 bits of the kind are the number of optional ids.
    """
    return pack("<II" + "IIQ" * len(sections), LAYOUT, len(sections), *chain.from_iterable(sections))


#: Payload without sections. It reports that the version has been reached.
NOTHING: Payload = np.frombuffer(START.pack(LAYOUT, 0), np.uint8)


def decode_sections(data: memoryview, dims: Numbers, kinds: Iterable[int]) -> Sections:
    """Decode a payload.

    Args:
        data: The received bytes, possibly unaligned.
        dims: Number of elements in a row of each table, by table number.
        kinds: Kinds of sections that are permitted.

    Raises:
        MessageError: the payload is invalid, or has a section of another kind, or two of one kind for the same table.
    """
    if len(data) < START.size:
        raise MessageError(f"rows of tables have only {len(data)} bytes, less than their header")
    layout, count = START.unpack_from(data)
    start = START.size + count * _SECTION.itemsize
    if layout != LAYOUT or count > SECTIONS_LIMIT or len(data) < start:
        raise MessageError(
            f"rows of tables of layout {layout} with {count} sections have {len(data)} bytes: another version?"
        )
    fields = np.frombuffer(data, _SECTION, count, START.size)
    found, tables = fields["kind"].astype(np.int64), fields["table"].astype(np.int64)
    _require_sound(found, tables, len(dims), kinds)
    most = len(data) // _VALUE_BYTES
    if count and (largest := int(fields["rows"].max())) > most:
        raise MessageError(f"rows of tables declare at least {largest} rows, but {len(data)} bytes arrived")
    counts, of_tables = fields["rows"].astype(np.int64), dims[tables]
    values_at = start + int((counts * _HAS_IDS[found]).sum()) * _ID_BYTES
    end = values_at + int((counts * of_tables * _HAS_VALUES[found]).sum()) * _VALUE_BYTES
    if end != len(data):
        raise MessageError(f"rows of tables declare {end} bytes, but {len(data)} arrived")
    ids = np.frombuffer(data[start:values_at], np.uint64)
    return Sections(found, tables, of_tables, counts, ids, np.frombuffer(data[values_at:], np.float32))


def _require_sound(kinds: Numbers, tables: Numbers, table_count: int, expected: Iterable[int]) -> None:
    seen: set[tuple[int, int]] = set()
    allowed = frozenset(map(int, expected))
    for pair in zip(kinds.tolist(), tables.tolist(), strict=True):
        kind, table = pair
        if kind not in allowed or pair in seen:
            raise MessageError(f"rows of tables have an unexpected section of kind {kind} for table {table}")
        if table >= table_count:
            raise MessageError(f"there is no table number {table}: {table_count} are declared")
        seen.add(pair)
