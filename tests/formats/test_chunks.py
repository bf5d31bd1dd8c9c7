from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flightedl.errors import MessageError
from flightedl.formats.chunks import (
    CHUNK_SCHEMA,
    Chunk,
    ChunkColumns,
    chunks_from_rows,
    chunks_to_batch,
    chunks_to_rows,
    parts_to_rows,
)
from flightedl.messages.base import decode, encode
from flightedl.messages.tasks import Assignment

CHUNKS = [Chunk("s3://b/ä.parquet", "v1", "parquet", 3, 2**40, 5, 2**41, 7), Chunk("x", "", "csv", 0, 0, 1, 0, 0)]
PARTS = [Chunk("x", "", "csv", 0, 0, 9, 0, 0).part(2, 3).part(1, 1), CHUNKS[0]]


@pytest.mark.parametrize("chunks", [CHUNKS, PARTS, []])
def test_chunks_survive_encoding_and_decoding(chunks: list[Chunk]) -> None:
    batch = chunks_to_batch(chunks)
    assert batch.schema.equals(CHUNK_SCHEMA)
    rows, parts = chunks_to_rows(chunks), parts_to_rows(chunks)
    assert chunks_from_rows([tuple(row.values()) for row in batch.to_pylist()], parts) == tuple(chunks)
    assert [list(row) for row in rows] == [list(row.values()) for row in batch.to_pylist()]
    numbers = {"epoch": 0, "position": 0, "task": 0, "attempt": 1, "first_batch": 0, "end_batch": 1, "batch_count": 1}
    assignment = decode(encode(Assignment(**numbers, seed=None, chunks=rows, parts=parts)), Assignment)
    assert chunks_from_rows(assignment.chunks, assignment.parts) == tuple(chunks)


@pytest.mark.parametrize(
    "row",
    [
        ["x", "", "csv", 0, -1, 1, 0, 0],
        ["x", "", "csv", 0, 0, 1, 0],
        ["x", None, "csv", 0, 0, 1, 0, 0],
        ["x", "", "csv", 0, 0, 1, 0, 0.5],
        [],
    ],
)
def test_bytes_that_are_not_a_chunk_are_rejected(row: list[object]) -> None:
    fields = dict.fromkeys(("epoch", "position", "task", "attempt", "first_batch", "end_batch", "batch_count"), 0)
    with pytest.raises(MessageError, match="Assignment"):
        decode(msgspec.json.encode({**fields, "seed": None, "chunks": [row]}), Assignment)


@given(st.lists(st.integers(0, 30), max_size=20), st.integers(1, 10))
@settings(max_examples=50, deadline=None)
def test_splitting_keeps_each_record_once(records: list[int], most: int) -> None:
    complete = ChunkColumns.of(records, [10 * number for number in range(len(records))], [10] * len(records))
    parts = complete.split(most)
    covered = [
        number
        for first, count in zip(parts.first_record.tolist(), parts.records.tolist(), strict=True)
        for number in range(first, first + count)
    ]
    assert covered == list(range(sum(records)))
    assert all(0 < count <= most for count in parts.records.tolist())
    assert parts.offset.tolist() == [10 * number for number in parts.number.tolist()]
