"""Messages of a step: intact ones are decoded, damaged and inconsistent ones are rejected."""

from __future__ import annotations

from contextlib import nullcontext
from struct import pack

import numpy as np
import pyarrow as pa
import pytest
import xxhash

from flightedl.errors import DamagedError, MessageError
from flightedl.messages.parameters import Outcome
from flightedl.wire.parts import (
    INLINE_BYTES,
    STEP_SCHEMA,
    Place,
    ReceivedBlocks,
    decode_message,
    place_of,
)
from flightedl.wire.rows import Checksums, OutgoingBlocks

from .encoded import encode_parts

VALUES = np.arange(6, dtype=np.float32)


def _pieces() -> list[OutgoingBlocks]:
    return [
        OutgoingBlocks(range(3, 5), 1 << 40, Outcome.ACCEPTED, VALUES[:4], ()),
        OutgoingBlocks(range(9, 10), 2, Outcome.STALE, None, ()),
        OutgoingBlocks(range(5, 6), 7, Outcome.NONE, VALUES[4:], ()),
    ]


def _sealed(rest: bytes) -> bytes:
    return xxhash.xxh3_64_intdigest(rest).to_bytes(8, "little") + rest


def _part(first: int = 3, count: int = 2, version: int = 1, size_bytes: int = 24, checksum: int | None = None) -> bytes:
    found = xxhash.xxh3_64_intdigest(VALUES.data) if checksum is None else checksum
    return pack("<iiqiIQ", first, count, version, 0, size_bytes, found)


def _batch(*values: bytes) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array(values, pa.binary())], schema=STEP_SCHEMA)


@pytest.mark.parametrize("pieces", [_pieces(), _pieces()[:1], _pieces()[1:2]], ids=["three", "one", "empty"])
def test_parts_arrive_as_they_were_sent(pieces: list[OutgoingBlocks]) -> None:
    batch, header = encode_parts(pieces)
    assert batch.schema == STEP_SCHEMA
    batch.validate(full=True)
    received = pa.ipc.read_record_batch(batch.serialize(), STEP_SCHEMA)
    assert decode_message(received, header)[0] == [
        ReceivedBlocks(p.blocks, p.version, p.outcome, memoryview(b"" if p.values is None else p.values.tobytes()))
        for p in pieces
    ]


@pytest.mark.parametrize("pieces", [_pieces(), _pieces()[:1], _pieces()[1:2]], ids=["three", "one", "empty"])
def test_attachments_arrive_with_the_parts(pieces: list[OutgoingBlocks]) -> None:
    batch, header = encode_parts(pieces, b"a request")
    parts, attached = decode_message(batch, header)
    assert attached == b"a request"
    assert decode_message(*encode_parts(pieces)) == (parts, b"")
    for damaged in (header[:-1], header + b"!", header[:-1] + b"T"):
        with pytest.raises(DamagedError):
            decode_message(batch, damaged)[0]


@pytest.mark.parametrize("checksums", [True, False])
@pytest.mark.parametrize("pieces", [_pieces(), _pieces()[:1], _pieces()[1:2]], ids=["three", "one", "empty"])
def test_a_small_message_travels_in_its_metadata_alone(pieces: list[OutgoingBlocks], checksums: bool) -> None:
    batch, message = encode_parts(pieces, b"a request", checksums=checksums, inline=True)
    assert batch is None
    assert place_of(message) is Place.HEADER
    assert decode_message(None, message) == decode_message(*encode_parts(pieces, b"a request", checksums=checksums))
    for place in range(len(message)):
        damaged = bytearray(message)
        damaged[place] ^= 4
        is_header = place < int.from_bytes(message[16:24], "little")
        with pytest.raises((DamagedError, MessageError)) if checksums or is_header else nullcontext():
            decode_message(None, bytes(damaged))
        if place:
            with pytest.raises((DamagedError, MessageError)):
                decode_message(None, message[:place])
    with pytest.raises(MessageError, match=r"bytes, .* arrived"):
        decode_message(None, message + b"!")
    with pytest.raises(MessageError, match="values follow it"):
        decode_message(_batch(b""), message)


@pytest.mark.parametrize("header_bytes", [0, 55, 81, 1 << 63])
def test_a_header_is_bounded_by_its_metadata_message(header_bytes: int) -> None:
    rest = pack("<IIQ", 6, 1, header_bytes) + _part() + VALUES.tobytes()
    with pytest.raises(MessageError, match=f"a header of {header_bytes} bytes with 1 parts"):
        decode_message(None, _sealed(rest))


def test_a_message_in_metadata_has_a_size_limit() -> None:
    for count, is_small in ((INLINE_BYTES - 56, True), (INLINE_BYTES - 55, False)):
        pieces = [OutgoingBlocks(range(1), 0, 0, np.zeros(count, np.uint8), ())]
        batch, header = encode_parts(pieces, inline=True)
        assert (batch is None) == is_small
        assert len(header) == (INLINE_BYTES if is_small else 48)


def test_one_piece_is_not_copied() -> None:
    batch, _ = encode_parts(_pieces()[:1])
    assert batch.column(0).buffers()[2].address == VALUES.ctypes.data


def test_a_slice_of_a_batch_decodes_to_the_slice() -> None:
    message, header = encode_parts(_pieces())
    both = _batch(b"something else", message.column(0)[0].as_py())
    assert decode_message(both.slice(1), header)[0] == decode_message(message, header)[0]


def test_the_checksum_of_values_sent_again_is_computed_once() -> None:
    known = Checksums(whole=42)
    _, header = encode_parts([OutgoingBlocks(range(1), 0, 0, VALUES, (), known)])
    assert header.endswith((42).to_bytes(8, "little"))


@pytest.mark.parametrize("place", range(0, 112, 5))
def test_a_header_with_any_flipped_bit_is_rejected(place: int) -> None:
    batch, header = encode_parts(_pieces())
    damaged = bytearray(header)
    damaged[place] ^= 4
    with pytest.raises((DamagedError, MessageError)):
        decode_message(batch, bytes(damaged))[0]


def test_changed_values_are_rejected() -> None:
    batch, header = encode_parts([OutgoingBlocks(range(3, 5), 1, 0, VALUES, ())])
    data = bytearray(batch.column(0)[0].as_py())
    data[7] ^= 1
    with pytest.raises(DamagedError, match="blocks 3 to 4"):
        decode_message(_batch(bytes(data)), header)[0]


def test_checksums_are_optional_for_values_but_not_for_headers() -> None:
    batch, header = encode_parts(_pieces(), b"a request", checksums=False)
    assert [part.data for part in decode_message(batch, header)[0]] == [
        memoryview(b"" if piece.values is None else piece.values.tobytes()) for piece in _pieces()
    ]
    data = bytearray(batch.column(0)[0].as_py())
    data[7] ^= 1
    assert decode_message(_batch(bytes(data)), header)[0][0].data == data[:16], (
        "values without checksums are not verified"
    )
    for place in range(0, len(header), 5):
        damaged = bytearray(header)
        damaged[place] ^= 4
        with pytest.raises((DamagedError, MessageError)):
            decode_message(batch, bytes(damaged))[0]


@pytest.mark.parametrize(
    ("header", "batch", "message"),
    [
        (None, _batch(VALUES.tobytes()), "no header"),
        (b"\1" * 15, _batch(VALUES.tobytes()), "no header"),
        (_sealed(pack("<II", 2, 1) + _part()), _batch(), "0 rows"),
        (_sealed(pack("<II", 2, 1) + _part()), _batch(VALUES.tobytes(), b""), "2 rows"),
        (_sealed(pack("<II", 4, 1) + _part()), _batch(VALUES.tobytes()), "layout 4"),
        (_sealed(pack("<II", 2, 2) + _part()), _batch(VALUES.tobytes()), "2 parts"),
        (_sealed(pack("<II", 2, 0xFFFFFFFF) + _part()), _batch(VALUES.tobytes()), "parts has"),
        (_sealed(pack("<II", 2, 1) + _part(first=-1)), _batch(VALUES.tobytes()), "from -1"),
        (_sealed(pack("<II", 2, 1) + _part(count=0)), _batch(VALUES.tobytes()), "0 blocks"),
        (_sealed(pack("<II", 2, 1) + _part(count=-4)), _batch(VALUES.tobytes()), "-4 blocks"),
        (
            _sealed(pack("<II", 2, 1) + _part(size_bytes=25)),
            _batch(VALUES.tobytes()),
            "at least 25 bytes, but 24 arrived",
        ),
        (_sealed(pack("<II", 2, 1) + _part(size_bytes=0)), _batch(VALUES.tobytes()), "0 bytes, but 24 arrived"),
        (_sealed(pack("<II", 2, 0)), _batch(VALUES.tobytes()), "0 bytes, but 24 arrived"),
    ],
)
def test_inconsistent_messages_are_rejected(header: bytes | None, batch: pa.RecordBatch, message: str) -> None:
    with pytest.raises(MessageError, match=message):
        decode_message(batch, header)[0]


@pytest.mark.parametrize("count", [1, 3])
def test_a_checksum_that_is_kept_for_the_next_reader_is_of_all_values(count: int) -> None:
    values = np.arange(1000, dtype=np.float32)
    pieces = [
        OutgoingBlocks(range(number, number + 1), 7, Outcome.NONE, values + number, (), Checksums())
        for number in range(count)
    ]
    first, again = encode_parts(pieces), encode_parts(pieces)
    fresh = encode_parts([OutgoingBlocks(p.blocks, p.version, p.outcome, p.values, ()) for p in pieces])
    assert first[1] == again[1] == fresh[1]
    for batch, header in (first, again):
        received = pa.ipc.read_record_batch(batch.serialize(), STEP_SCHEMA)
        assert [bytes(part.data) for part in decode_message(received, header)[0]] == [
            (values + number).tobytes() for number in range(count)
        ]
