"""Footers of Parquet files: their row groups, and damage, which never does more than raise."""

from __future__ import annotations

import datetime as dt
import io
from dataclasses import replace
from decimal import Decimal
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from flightedl.errors import DataError
from flightedl.formats import parquet
from flightedl.formats.chunks import CorruptChunkError
from flightedl.formats.dataset_spec import DatasetSpec
from flightedl.formats.index import build_index
from flightedl.formats.layout import TaskLayout
from flightedl.formats.reader import ChunkReader, read_task
from flightedl.formats.records import expression
from tests.support.memory import MemoryFiles

URL = "a.parquet"


def written(table: pa.Table, rows_per_group: int) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink, row_group_size=rows_per_group, write_page_checksum=True)
    return sink.getvalue()


def read(content: bytes, spec: DatasetSpec) -> int:
    """Return the number of records."""
    files = MemoryFiles({URL: content})
    index = build_index(files, spec)
    layout = TaskLayout(index, spec.batch_size)
    return sum(
        batch.num_rows
        for task in range(layout.task_count)
        for batch in read_task(files, layout.chunks_of(task), spec, 0, 0, task, schema=index.schema)
    )


@pytest.mark.parametrize(
    "table",
    [
        pa.table({"x": np.arange(40), "y": ["text"] * 40}),
        pa.table({"x": [[n] * n for n in range(40)], "y": np.arange(40)}),
        pa.table({"x.y": [{"a": n, "b": [n]} for n in range(40)]}),
        pa.table({f"column {n}": np.arange(40) for n in range(300)}),
    ],
    ids=["flat", "list", "struct", "a footer of several reads"],
)
def test_a_chunk_starts_at_the_first_page_of_its_row_group(table: pa.Table) -> None:
    content = written(table, 10)
    metadata = pq.ParquetFile(io.BytesIO(content)).metadata
    firsts = [metadata.row_group(number).column(0) for number in range(4)]
    chunks = build_index(MemoryFiles({URL: content}), DatasetSpec((URL,))).files[0].chunks
    assert chunks.offset.tolist() == [
        min(first.data_page_offset, first.dictionary_page_offset or first.data_page_offset) for first in firsts
    ]
    assert chunks.records.tolist() == [10] * 4
    assert read(content, DatasetSpec((URL,))) == 40


@pytest.mark.slow
@pytest.mark.parametrize("condition", [(), (("number", ">", 3),)], ids=["all records", "with a condition"])
def test_damage_to_a_footer_raises(condition: tuple[tuple[str, str, int], ...]) -> None:
    """pyarrow would abort the process when it reads some damaged fields."""
    content = written(pa.table({"number": np.arange(30), "share": np.arange(30.0), "text": ["t"] * 30}), 10)
    spec = DatasetSpec((URL,), filter=condition, batch_size=30)
    expected = read(content, spec)
    raised = 0
    for place in range(len(content) - 8 - int.from_bytes(content[-8:-4], "little"), len(content)):
        damaged = bytearray(content)
        damaged[place] ^= 1 + place % 2
        try:
            assert read(bytes(damaged), spec) <= expected
        except DataError:
            raised += 1
    assert raised > 100


def test_a_row_group_with_a_negative_number_of_records_is_corrupt() -> None:
    content = written(pa.table({"x": np.arange(30)}), 10)
    # thrift encodes 10 as 20, and -10 as 19. The record count of a row group is between its size and its first page.
    places = [place for place in range(len(content)) if content[place : place + 3] == bytes([20, 0x26, 8])]
    assert places
    damaged = bytearray(content)
    damaged[places[0]] = 19
    with pytest.raises(CorruptChunkError, match=f"{URL} is corrupt.*row group 0 has -10 records"):
        build_index(MemoryFiles({URL: bytes(damaged)}), DatasetSpec((URL,)))


NAN, INF = float("nan"), float("inf")
DAY, SECOND = dt.date(1969, 12, 31), dt.datetime(1969, 12, 31, 23, 59, 59, 1, dt.UTC)
#: Arrow type -> values that are hard cases for bounds.
VALUES: dict[pa.DataType, list[Any]] = {
    pa.float64(): [NAN, 0.0, -0.0, 1.0, -INF, INF],
    pa.float32(): [NAN, 0.0, -0.0, 1.0, -INF, INF],
    pa.int64(): [0, -1, 2**63 - 1, -(2**63)],
    pa.uint64(): [0, 1, 2**63 - 1, 2**64 - 1],
    pa.bool_(): [False, True],
    pa.string(): ["", "a", "ä", "\uffff", "\U0001f600", "z" * 100, "z" * 99 + "y"],
    pa.binary(): [b"", b"a", b"\x80", b"\xff" * 80],
    pa.decimal128(10, 2): [Decimal("0.00"), Decimal("-1.00"), Decimal("12345678.90")],
    pa.decimal256(50, 2): [Decimal("0.00"), Decimal("-1.00"), Decimal("12345678.90")],
    pa.date32(): [DAY, DAY + dt.timedelta(days=1)],
    pa.timestamp("us", "UTC"): [SECOND, SECOND + dt.timedelta(seconds=1)],
    pa.time64("us"): [dt.time(0), dt.time(23, 59, 59, 1)],
}


@st.composite
def filtered(draw: st.DrawFn) -> tuple[pa.Table, list[tuple[str, str, Any]], dict[str, Any]]:
    """Strategy for records, conditions on them, and write options."""
    kind = draw(st.sampled_from(list(VALUES)))
    records = draw(st.lists(st.sampled_from([None, *VALUES[kind]]), min_size=1, max_size=6))
    # NaN equals nothing, so filters reject it.
    known = st.sampled_from([value for value in VALUES[kind] if value == value])
    comparison = st.tuples(st.just("x"), st.sampled_from(["==", "!=", "<", "<=", ">", ">="]), known)
    membership = st.tuples(st.just("x"), st.sampled_from(["in", "not in"]), st.lists(known, max_size=3))
    null = st.tuples(st.just("x"), st.sampled_from(["==", "!="]), st.none())
    conditions = draw(st.lists(comparison | membership | null, min_size=1, max_size=2))
    written = {
        "row_group_size": draw(st.integers(1, 3)),
        "use_dictionary": draw(st.booleans()),
        "version": draw(st.sampled_from(["1.0", "2.6"])),
    }
    return pa.table({"x": pa.array(records, kind), "n": np.arange(len(records))}), conditions, written


@example((pa.table({"x": [NAN, NAN], "n": [0, 1]}), [("x", "!=", 1.0)], {}))
@example((pa.table({"x": [NAN, 1.0], "n": [0, 1]}), [("x", "!=", 1.0)], {}))
@example((pa.table({"x": [NAN, 1.0], "n": [0, 1]}), [("x", "not in", [1.0])], {}))
@example((pa.table({"x": [0.0], "n": [0]}), [("x", "in", [0.0])], {}))
@given(filtered())
def test_a_filter_keeps_exactly_the_records_that_arrow_keeps(
    case: tuple[pa.Table, list[tuple[str, str, Any]], dict[str, Any]],
) -> None:
    table, conditions, options = case
    sink = io.BytesIO()
    pq.write_table(table, sink, **options)
    files, spec = MemoryFiles({URL: sink.getvalue()}), DatasetSpec((URL,), filter=tuple(conditions), batch_size=6)
    index = build_index(files, spec)
    stored = pq.read_table(io.BytesIO(sink.getvalue()))
    expected = ds.dataset(stored).to_table(filter=expression(stored.schema, conditions))
    layout = TaskLayout(index, spec.batch_size)
    kept = [
        number
        for task in range(layout.task_count)
        for batch in read_task(files, layout.chunks_of(task), spec, None, 0, task, schema=index.schema)
        for number in batch.column("n").to_pylist()
    ]
    assert kept == expected.column("n").to_pylist()


@pytest.mark.parametrize("decoded", [1, 3, 7, 1000])
def test_parts_of_a_row_group_are_complete_however_many_records_are_decoded_at_once(
    world: Any, monkeypatch: pytest.MonkeyPatch, decoded: int
) -> None:
    monkeypatch.setattr(parquet, "_DECODED_RECORDS", decoded)
    world.write("a.parquet", pa.table({"k": range(40)}), "parquet", 20)
    spec = DatasetSpec(("a.parquet",), batch_size=5, max_records_per_chunk=7)
    index = build_index(world.files, spec)
    assert max(index.records) <= 7
    for condition, expected in (((), range(40)), ((("k", ">=", 13),), range(13, 40))):
        chosen = replace(spec, filter=condition)
        for number in range(len(index)):
            reader = ChunkReader(world.files, [index.chunk(number)], chosen, index.schema)
            found = reader.range(range(reader.record_count))["k"].to_pylist()
            first = index.chunk(number).first_record
            whole = range(first, first + index.chunk(number).records)
            assert found == [each for each in whole if each in expected]


def test_a_row_group_with_fewer_records_than_in_the_index_is_damage(world: Any) -> None:
    world.write("a.parquet", pa.table({"k": range(20)}), "parquet", 20)
    spec = DatasetSpec(("a.parquet",))
    index = build_index(world.files, spec)
    chunk = msgspec.structs.replace(index.chunk(0), records=21)
    with pytest.raises(CorruptChunkError, match="does not have 21 records"):
        ChunkReader(world.files, [chunk], spec, index.schema).range(range(1))
