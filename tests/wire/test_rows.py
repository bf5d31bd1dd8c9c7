"""Rows of blocks: intact ones are decoded unchanged, damaged ones are rejected."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flightedl.errors import CorruptError, DamagedError, MessageError
from flightedl.messages.parameters import Outcome
from flightedl.wire.rows import (
    PUSH_SCHEMA,
    VALUES_SCHEMA,
    Checksums,
    OutgoingBlocks,
    decode_batch,
    decode_rows,
    encode_pieces,
    encode_rows,
    group_by_size,
)


def _received(batch: pa.RecordBatch) -> pa.RecordBatch:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return pa.ipc.open_stream(sink.getvalue()).read_next_batch()


@given(st.lists(st.lists(st.floats(width=32, allow_nan=False), max_size=20), min_size=1, max_size=6))
def test_decoded_rows_equal_the_encoded_rows(contents: list[list[float]]) -> None:
    arrays = [np.array(content, np.float32) if content else None for content in contents]
    blocks, versions = list(range(10, 10 + len(arrays))), list(range(len(arrays)))
    batch = _received(encode_rows(blocks, versions, arrays))
    batch.validate(full=True)
    assert batch.schema == PUSH_SCHEMA
    rows = list(decode_rows(batch))
    assert [row.block for row in rows] == blocks
    assert [row.version for row in rows] == versions
    for row, array in zip(rows, arrays, strict=True):
        expected = np.empty(0, np.float32) if array is None else array
        np.testing.assert_array_equal(row.array(np.float32), expected)


def test_a_single_array_is_not_copied() -> None:
    array = np.arange(1000, dtype=np.float64)
    batch = encode_rows([1], [2], [array])
    assert batch.column(3).buffers()[2].address == array.ctypes.data


def test_values_carry_outcomes() -> None:
    batch = encode_rows([1, 2], [5, 6], [None, np.ones(3, np.float32)], [Outcome.STALE, Outcome.NONE])
    assert batch.schema == VALUES_SCHEMA
    assert [row.outcome for row in decode_rows(batch)] == [Outcome.STALE, Outcome.NONE]


def test_a_slice_of_a_batch_decodes_to_its_own_rows() -> None:
    arrays = [np.full(4, n, np.float32) for n in range(5)]
    part = encode_rows(range(5), [0] * 5, arrays).slice(2, 2)
    assert [(row.block, row.array(np.float32)[0]) for row in decode_rows(part)] == [(2, 2.0), (3, 3.0)]


def test_a_flipped_bit_is_detected() -> None:
    data = bytearray(np.ones(8, np.float32).tobytes())
    good = encode_rows([1], [0], [np.ones(8, np.float32)])
    data[5] ^= 1
    damaged = pa.RecordBatch.from_arrays([*good.columns[:3], pa.array([bytes(data)], pa.binary())], schema=PUSH_SCHEMA)
    with pytest.raises(CorruptError, match="block 1"):
        list(decode_rows(damaged))


def test_a_null_is_rejected() -> None:
    good = encode_rows([1], [0], [np.ones(8, np.float32)])
    with pytest.raises(MessageError, match="null"):
        list(
            decode_rows(
                pa.RecordBatch.from_arrays([*good.columns[:3], pa.array([None], pa.binary())], PUSH_SCHEMA.names)
            )
        )


@given(st.lists(st.integers(0, 3000), max_size=30), st.integers(1, 4000))
def test_groups_cover_all_rows_in_order_and_respect_the_target_size(sizes: list[int], target: int) -> None:
    groups = group_by_size(sizes, target)
    assert [i for group in groups for i in group] == list(range(len(sizes)))
    assert all(len(group) == 1 or sum(sizes[i] for i in group) <= target for group in groups)


def test_a_checksum_of_zero_is_compared_like_any_other() -> None:
    good = encode_rows([1], [0], [np.ones(8, np.float32)])
    zero = good.set_column(2, good.schema.field(2), pa.array([0], pa.uint64()))
    with pytest.raises(DamagedError):
        list(decode_rows(zero))


def test_pieces_are_encoded_block_by_block_also_when_their_checksums_are_known() -> None:
    values, sums = np.arange(6, dtype=np.float32), Checksums()
    pieces = [
        OutgoingBlocks(range(3, 5), 7, Outcome.ACCEPTED, None, (0, 0, 0)),
        OutgoingBlocks(range(8, 11), 9, Outcome.NONE, values, (0, 4, 16, 24), sums),
    ]
    expected = encode_rows(
        [3, 4, 8, 9, 10],
        [7, 7, 9, 9, 9],
        [None, None, values[:1], values[1:4], values[4:]],
        [Outcome.ACCEPTED] * 2 + [Outcome.NONE] * 3,
    )
    for _ in range(2):
        assert encode_pieces(pieces).equals(expected)
        rows = decode_batch(_received(encode_pieces(pieces)))
        assert [bytes(rows.bytes_of(place, place + 1)) for place in range(5)] == [
            b"",
            b"",
            values[:1].tobytes(),
            values[1:4].tobytes(),
            values[4:].tobytes(),
        ]
        assert bytes(rows.bytes_of(3, 5)) == values[1:].tobytes()
    assert sums.rows is not None
    assert len(sums.rows) == 3
