"""Encoding and decoding of table rows, and rejection of invalid payloads."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from flightedl.errors import MessageError
from flightedl.wire.table_rows import NOTHING, Kind, Section, decode_sections, encode_sections

DIMS = np.array([3, 5])


VALUED = (Kind.GRADIENTS, Kind.ROWS)


def some(kind: Kind, table: int, count: int) -> Section:
    ids = np.arange(count, dtype=np.uint64) + 7
    values = np.arange(count * DIMS[table], dtype=np.float32).reshape(count, DIMS[table])
    return Section(kind, table, ids[: 0 if kind == Kind.ROWS else count], values if kind in VALUED else None)


@pytest.mark.parametrize("shift", [0, 1, 4])
def test_encoded_rows_decode_at_any_address(shift: int) -> None:
    sections = [
        some(Kind.GRADIENTS, 0, 5),
        some(Kind.GRADIENTS, 1, 0),
        some(Kind.WANTED, 1, 3),
        some(Kind.ROWS, 1, 1),
        some(Kind.UNKNOWN, 0, 2),
    ]
    data = bytes(shift) + encode_sections(sections).tobytes()
    found = list(decode_sections(memoryview(data)[shift:], DIMS, Kind))
    assert [(each.kind, each.table, each.ids.tolist()) for each in found] == [
        (each.kind, each.table, each.ids.tolist()) for each in sections
    ]
    for one, other in zip(found, sections, strict=True):
        assert (one.values is None) == (other.values is None)
        assert one.values is None or other.values is None or (one.values == other.values).all()


def test_an_empty_payload_decodes_to_no_rows() -> None:
    assert list(decode_sections(memoryview(NOTHING.tobytes()), DIMS, Kind)) == []


def _header(count: int, kind: int = 1, table: int = 0, rows: int = 0, layout: int = 2) -> bytes:
    return struct.pack("<II", layout, count) + struct.pack("<HHIQ", kind, 0, table, rows) * count


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "less than their header"),
        (_header(1, layout=9), "another version"),
        (_header(1)[:-1], "another version"),
        (_header(1, kind=7), "kind 7"),
        (_header(2), "unexpected section"),
        (_header(1, table=5), "no table number 5"),
        (_header(1, rows=1), "declare 44 bytes, but 24 arrived"),
        (_header(1, rows=2**60), "at least"),
        (_header(1) + b"x", "declare"),
    ],
)
def test_bytes_that_are_not_a_payload_are_rejected(data: bytes, text: str) -> None:
    with pytest.raises(MessageError, match=text):
        decode_sections(memoryview(data), DIMS, Kind)


def test_an_unexpected_kind_is_rejected() -> None:
    data = encode_sections([some(Kind.ROWS, 0, 1)]).tobytes()
    with pytest.raises(MessageError, match="kind 3"):
        decode_sections(memoryview(data), DIMS, (Kind.WANTED,))
