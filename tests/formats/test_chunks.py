from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flightedl.errors import MessageError
from flightedl.formats.chunks import CHUNK_SCHEMA, Chunk, ChunkColumns, chunks_from_batch, chunks_to_batch

CHUNKS = [Chunk("s3://b/ä.parquet", "v1", "parquet", 3, 2**40, 5, 2**41, 7), Chunk("x", "", "csv", 0, 0, 1, 0, 0)]


@pytest.mark.parametrize("chunks", [CHUNKS, []])
def test_chunks_cross_the_wire(chunks: list[Chunk]) -> None:
    batch = chunks_to_batch(chunks)
    assert batch.schema.equals(CHUNK_SCHEMA)
    assert chunks_from_batch(batch) == chunks


def test_what_is_refused() -> None:
    batch = chunks_to_batch(CHUNKS)
    with pytest.raises(MessageError, match="unexpected schema"):
        chunks_from_batch(batch.select(["url"]))
    with pytest.raises(MessageError, match="negative number"):
        chunks_from_batch(chunks_to_batch([Chunk("x", "", "csv", 0, -1, 1, 0, 0)]))
    nulls = pa.RecordBatch.from_arrays([pa.nulls(1, field.type) for field in CHUNK_SCHEMA], schema=CHUNK_SCHEMA)
    with pytest.raises(MessageError, match=r"null|damaged"):
        chunks_from_batch(nulls)
    broken = pa.Array.from_buffers(
        pa.string(), 1, [None, pa.py_buffer(np.array([0, 2], np.int32)), pa.py_buffer(b"\xff\xfe")]
    )
    columns = [broken, *chunks_to_batch(CHUNKS[:1]).columns[1:]]
    with pytest.raises(MessageError, match="damaged"):
        chunks_from_batch(pa.RecordBatch.from_arrays(columns, schema=CHUNK_SCHEMA))


@given(st.lists(st.integers(0, 30), max_size=20), st.integers(1, 10))
@settings(max_examples=50, deadline=None)
def test_splitting_keeps_each_record_once(records: list[int], most: int) -> None:
    whole = ChunkColumns.of(records, [10 * number for number in range(len(records))], [10] * len(records))
    parts = whole.split(most)
    covered = [
        number
        for first, count in zip(parts.first_record.tolist(), parts.records.tolist(), strict=True)
        for number in range(first, first + count)
    ]
    assert covered == list(range(sum(records)))
    assert all(0 < count <= most for count in parts.records.tolist())
    assert parts.offset.tolist() == [10 * number for number in parts.number.tolist()]
