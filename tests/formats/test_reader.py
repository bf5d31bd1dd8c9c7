from __future__ import annotations

import datetime as dt
import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from flightedl.adapters.storage import FsspecFiles
from flightedl.domain.queue.drawing import drawn
from flightedl.errors import (
    DataError,
    ExhaustedError,
    FlightedlError,
    StoreError,
    UnavailableError,
    UsageError,
    UserCodeError,
)
from flightedl.formats import csv_text, parquet, reader
from flightedl.formats.chunks import CorruptChunkError
from flightedl.formats.dataset_spec import DatasetSpec, spec_of
from flightedl.formats.decode import slots
from flightedl.formats.index import build_index
from flightedl.formats.layout import TaskLayout
from flightedl.formats.mixed_layout import layout_of
from flightedl.formats.reader import DecodedChunks, ReadCounts, first_records, read_task
from flightedl.formats.recordio import encode_chunk
from flightedl.formats.sources import WatchedFile
from flightedl.messages.declarations import DatasetDeclaration
from tests.support.memory import MemoryFiles

JSON_RECORDS = [json.dumps({"n": number, "t": str(number)}).encode() for number in range(10)]


def read(world: Any, spec: DatasetSpec, seed: int | None = None, **options: Any) -> list[pa.RecordBatch]:
    index = build_index(world.files, spec)
    layout = TaskLayout(index, spec.batch_size, records_per_task=10**9)
    return list(read_task(world.files, layout.chunks_of(0), spec, seed, 0, 0, schema=index.schema, **options))


def test_decode_converts_bytes_to_columns(world: Any) -> None:
    world.put("a.recordio", encode_chunk(JSON_RECORDS[:6]) + encode_chunk(JSON_RECORDS[6:]))
    spec = DatasetSpec(("a.recordio",), batch_size=4, columns=("t",), filter=(("n", ">=", 3),))
    batches = read(world, spec, decode=json.loads)
    assert [batch.to_pydict() for batch in batches] == [{"t": ["3"]}, {"t": list("4567")}, {"t": ["8", "9"]}]
    raw = read(world, DatasetSpec(("a.recordio",), batch_size=10))
    assert raw[0].column("record").to_pylist() == JSON_RECORDS


def test_decoded_records_may_have_different_columns(world: Any) -> None:
    world.put("a.recordio", encode_chunk([b'{"a": 1}', b'{"b": 2}']))
    (batch,) = read(world, DatasetSpec(("a.recordio",), batch_size=10), decode=json.loads)
    assert batch.to_pylist() == [{"a": 1, "b": None}, {"a": None, "b": 2}]


def test_ready_functions_decode_whole_batches(world: Any) -> None:
    world.put("a.recordio", encode_chunk([b"1 user:17 tag:4 tag:9", b"0 user:18", b"1 user:19"]))
    spec = DatasetSpec(("a.recordio",), batch_size=2)
    assert [batch.to_pylist() for batch in read(world, spec, decode=slots)] == [
        [{"label": 1, "user": [17], "tag": [4, 9]}, {"label": 0, "user": [18], "tag": []}],
        [{"label": 1, "user": [19]}],
    ]


def test_a_batch_of_several_steps_equals_several_batches(world: Any) -> None:
    world.write("a.parquet", pa.table({"k": range(10)}), "parquet")
    spec = DatasetSpec(("a.parquet",), batch_size=4, steps_per_batch=3)
    layout = TaskLayout(build_index(world.files, spec), 4, steps_per_batch=3)
    assert layout.batch_count(0) == 9
    complete = [batch["k"].to_pylist() for batch in read(world, spec)]
    assert complete == [*[[0, 1, 2, 3]] * 3, *[[4, 5, 6, 7]] * 3, *[[8, 9]] * 3]
    for first in range(9):
        for end in range(first, 10):
            part = read(world, spec, first_batch=first, end_batch=end)
            assert [batch["k"].to_pylist() for batch in part] == complete[first:end]
    assert layout.records_of(0, range(2, 7)) == range(10)
    assert layout.records_of(0, range(3, 4)) == range(4, 8)
    with pytest.raises(UsageError, match="there are no batches 0 to 10 in task 0: it has 9"):
        read(world, spec, end_batch=10)


def test_a_failing_decode_raises_a_data_error(world: Any) -> None:
    world.put("a.recordio", encode_chunk([*JSON_RECORDS, b"not json"]))
    spec = DatasetSpec(("a.recordio",), batch_size=100)
    with pytest.raises(DataError, match="decode= failed at a record of 8 bytes: Expecting value"):
        read(world, spec, decode=json.loads)

    def two_types(record: bytes) -> Mapping[str, Any]:
        return {"x": record if len(record) == 8 else 1}

    with pytest.raises(DataError, match="decode= returned values that do not form columns"):
        read(world, spec, decode=two_types)
    world.write("b.parquet", pa.table({"a": [1]}), "parquet")
    with pytest.raises(UsageError, match="decode= applies to RecordIO and format"):
        read(world, DatasetSpec(("b.parquet",)), decode=json.loads)


def test_recordio_without_decode_has_one_column_of_bytes(world: Any) -> None:
    world.put("a.recordio", encode_chunk(JSON_RECORDS))
    with pytest.raises(DataError, match=r"there is no column 't' in a\.recordio"):
        read(world, DatasetSpec(("a.recordio",), columns=("t",)))


@pytest.mark.parametrize("seed", [None, 4])
def test_corrupt_chunks_are_skipped_only_on_request_and_counted(world: Any, seed: int | None) -> None:
    parts = [encode_chunk([b"%d" % n for n in range(start, start + 4)]) for start in (0, 4, 8)]
    damaged = bytearray(parts[1])
    damaged[-1] ^= 1
    world.put("a.recordio", parts[0] + bytes(damaged) + parts[2])
    with pytest.raises(CorruptChunkError, match=rf"a\.recordio is corrupt, chunk at byte {len(parts[0])}"):
        read(world, DatasetSpec(("a.recordio",), batch_size=3), seed)
    counts = ReadCounts()
    batches = read(world, DatasetSpec(("a.recordio",), batch_size=3, on_corrupt="skip"), seed, counts=counts)
    # Batches keep their boundaries: only the records of the corrupt chunk are missing.
    assert len(batches) == 4
    found = [record for batch in batches for record in batch.column("record").to_pylist()]
    assert sorted(found, key=int) == [b"%d" % n for n in (0, 1, 2, 3, 8, 9, 10, 11)]
    if seed is None:
        assert [batch.num_rows for batch in batches] == [3, 1, 1, 3]
    assert (counts.corrupt_chunks, counts.corrupt_records, len(counts.sentences)) == (1, 4, 1)


def test_dictionaries_may_differ_between_batches(world: Any) -> None:
    batches = [
        pa.record_batch({"d": pa.array(values).dictionary_encode()}) for values in (["a", "b"], ["c", "b"], ["c", "d"])
    ]
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    world.put("a.arrows", sink.getvalue().to_pybytes())
    read_batches = read(world, DatasetSpec(("a.arrows",), batch_size=3))
    assert [batch.column("d").to_pylist() for batch in read_batches] == [["a", "b", "c"], ["b", "c", "d"]]
    assert sorted(read(world, DatasetSpec(("a.arrows",), batch_size=6), 1)[0].column("d").to_pylist()) == list("abbccd")
    filtered = read(world, DatasetSpec(("a.arrows",), batch_size=6, filter=(("d", "==", "c"),)))
    assert filtered[0].column("d").to_pylist() == ["c", "c"]


def test_a_part_of_a_row_group_is_read(world: Any) -> None:
    world.write("a.parquet", pa.table({"n": range(20)}), "parquet", 10)
    spec = DatasetSpec(("a.parquet",), batch_size=100, max_records_per_chunk=4, filter=(("n", "!=", 13),))
    index = build_index(world.files, spec)
    tasks = [read_task(world.files, [index.chunk(n)], spec, None, 0, 0, schema=index.schema) for n in range(len(index))]
    found = [next(task).column("n").to_pylist() for task in tasks]
    assert found == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9], [10, 11, 12], [14, 15, 16, 17], [18, 19]]


def test_a_part_whose_row_group_is_not_described_is_read_in_order(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Older masters send only the part's first record and number of records."""
    monkeypatch.setattr(parquet, "_STREAMED_BYTES", 40)
    world.write("a.parquet", pa.table({"n": range(200)}), "parquet", 100)
    spec = DatasetSpec(("a.parquet",), batch_size=7, max_records_per_chunk=30)
    index, found = build_index(world.files, spec), []
    for number in range(len(index)):
        chunk = msgspec.structs.replace(index.chunk(number), skipped=0, container_records=0)
        for batch in read_task(world.files, [chunk], spec, None, 0, 0, schema=index.schema):
            found += batch["n"].to_pylist()
    assert found == list(range(200))


@pytest.mark.parametrize("seed", [None, 3])
def test_parts_of_a_row_group_yield_the_batches_of_the_complete_group(world: Any, seed: int | None) -> None:
    world.write("a.parquet", pa.table({"n": range(50), "m": range(50)}), "parquet", 25)
    for columns in (None, ("n",)):
        for condition in ((), (("m", "<", 40),)):
            spec = DatasetSpec(("a.parquet",), batch_size=7, columns=columns, filter=condition)
            complete = read(world, spec, seed)
            assert read(world, replace(spec, max_records_per_chunk=4), seed) == complete


@pytest.mark.parametrize("name", ["parquet", "jsonl", "recordio"])
def test_a_chunk_is_decoded_once_for_all_tasks_with_parts_of_it(world: Any, name: str, monkeypatch: Any) -> None:
    kind = {"recordio": "record"}.get(name, "n")
    table = pa.table({kind: [b"%03d" % n for n in range(60)] if kind == "record" else range(60)})
    world.write(f"a.{name}", table, name, 10)
    spec = DatasetSpec((f"a.{name}",), batch_size=4, text_chunk_bytes=100)
    index = build_index(world.files, spec)
    layout = TaskLayout(index, 4, pieces=drawn(index.records, index.decoded_bytes, 4, 1))
    decoded: list[Any] = []
    real = reader._read_unchanged
    monkeypatch.setattr(
        reader, "_read_unchanged", lambda files, chunk, request: decoded.append(chunk) or real(files, chunk, request)
    )
    for limit, is_once in ((10**6, True), (1, False)):
        kept = DecodedChunks(limit)
        found = [
            value
            for task in range(layout.task_count)
            for batch in read_task(
                world.files, layout.chunks_of(task), spec, 2, 0, task, schema=index.schema, decoded=kept
            )
            for value in batch.column(kind).to_pylist()
        ]
        assert sorted(found) == table[kind].to_pylist() != found
        assert (len(decoded) == len(index) == len(set(decoded))) == is_once
        assert {chunk.container for chunk in decoded} == set(decoded), "chunks are decoded as a whole"
        decoded.clear()


def test_a_large_row_group_is_decoded_once_in_order_whatever_the_batches_and_tasks(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "_STREAMED_BYTES", 400)
    table = pa.table({"n": range(700), "s": [str(n) for n in range(700)]})
    world.write("a.parquet", table, "parquet", 300)
    opened: list[Any] = []
    real = parquet.Parquet.stream
    monkeypatch.setattr(
        parquet.Parquet,
        "stream",
        lambda *given: opened.append(given[2].number) or real(*given),  # type: ignore[func-returns-value]
    )
    for batch_size in (1, 7, 64, 1000):
        for size in (0, 20, 10**9):
            declared = DatasetDeclaration(urls=["a.parquet"], batch_size=batch_size, records_per_task=size)
            spec = spec_of(declared)
            index, kept = build_index(world.files, spec), DecodedChunks(1)
            layout = layout_of(index, declared, batch_size)
            found = [
                batch
                for task in range(layout.task_count)
                for batch in read_task(
                    world.files, layout.chunks_of(task), spec, None, 0, task, schema=index.schema, decoded=kept
                )
            ]
            assert pa.Table.from_batches(found).equals(table)
            assert len(found) == sum(layout.batch_count(task) for task in range(layout.task_count))
            assert opened == [0, 1, 2], (batch_size, size)
            opened.clear()


def test_little_more_than_the_latest_records_of_a_large_row_group_are_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "_STREAMED_BYTES", 1 << 16)
    monkeypatch.setattr(parquet, "_BUFFER_BYTES", 1 << 16)
    path = str(tmp_path / "a.parquet")
    pq.write_table(
        pa.table({"n": range(10**6)}), path, data_page_size=1 << 14, use_dictionary=False, compression="none"
    )
    spec, files = DatasetSpec((path,), batch_size=1000), FsspecFiles()
    index = build_index(files, spec)
    sizes: list[int] = []
    real = WatchedFile.read
    monkeypatch.setattr(WatchedFile, "read", lambda file, size=-1: sizes.append(size) or real(file, size))  # type: ignore[func-returns-value]
    before, most = pa.total_allocated_bytes(), 0
    for _ in read_task(files, TaskLayout(index, 1000).chunks_of(0), spec, None, 0, 0, schema=index.schema):
        most = max(most, pa.total_allocated_bytes() - before)
    assert most < 2 << 20, "the table has 8 MB"
    assert max(sizes) <= 1 << 17


def test_a_stream_that_failed_is_not_read_further(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "_STREAMED_BYTES", 400)
    world.write("a.parquet", pa.table({"n": range(300)}), "parquet", 300)
    spec, kept = DatasetSpec(("a.parquet",), batch_size=10), DecodedChunks(1)
    index = build_index(world.files, spec)
    chunks = TaskLayout(index, 10).chunks_of(0)

    def read_from(first: int) -> Iterator[pa.RecordBatch]:
        return read_task(world.files, chunks, spec, None, 0, 0, first, schema=index.schema, decoded=kept)

    batches = read_from(0)
    assert next(batches)["n"][0].as_py() == 0
    world.files.plan.fail_at("stat", 1, UnavailableError("the store is slow"))
    with pytest.raises(UnavailableError, match="the store is slow"):
        list(batches)
    assert [batch["n"][0].as_py() for batch in read_from(4)] == list(range(40, 300, 10))


def test_a_part_is_read_although_a_later_page_of_its_row_group_is_corrupt(world: Any) -> None:
    sink = io.BytesIO()
    options = {"data_page_size": 64, "write_page_checksum": True, "use_dictionary": False, "write_statistics": False}
    pq.write_table(pa.table({"n": range(400)}), sink, write_batch_size=8, compression="none", **options)
    content = bytearray(sink.getvalue())
    content[content.index((399).to_bytes(8, "little"))] ^= 1
    world.put("a.parquet", bytes(content))
    spec = DatasetSpec(("a.parquet",), batch_size=100, max_records_per_chunk=100, on_corrupt="skip")
    index, counts = build_index(world.files, spec), ReadCounts()
    layout = TaskLayout(index, 100)
    found = [
        batch.num_rows
        for task in range(4)
        for batch in read_task(
            world.files, layout.chunks_of(task), spec, None, 0, task, schema=index.schema, counts=counts
        )
    ]
    assert found == [100, 100, 100, 0]
    assert (counts.corrupt_chunks, counts.corrupt_records) == (1, 100)


def test_statistics_avoid_reading_excluded_row_groups(world: Any) -> None:
    table = pa.table({"n": range(20), "blob": [b"x" * 1000 + b"%d" % number for number in range(20)]})
    world.write("a.parquet", table, "parquet", 10)
    content = bytearray(world.files.contents["a.parquet"])
    column = pq.ParquetFile(io.BytesIO(content)).metadata.row_group(0).column(1)
    content[column.dictionary_page_offset + 40] ^= 1
    world.put("a.parquet", bytes(content))
    # The damage is in the first row group, which is never read because the condition excludes it.
    assert [b.num_rows for b in read(world, DatasetSpec(("a.parquet",), batch_size=10, filter=(("n", ">", 15),)))] == [
        0,
        4,
    ]
    assert [b.num_rows for b in read(world, DatasetSpec(("a.parquet",), batch_size=10, columns=("n",)))] == [10, 10]
    with pytest.raises(CorruptChunkError, match=r"a\.parquet is corrupt, row group 0 at byte 4"):
        read(world, DatasetSpec(("a.parquet",), batch_size=10))


def test_text_types_are_inferred_from_all_files(world: Any) -> None:
    world.put("a.csv", b"x,y\n1,1\n2,2\n3.5,x\n")
    spec = DatasetSpec(("a.csv",), batch_size=10, text_chunk_bytes=4)
    assert read(world, spec)[0].to_pydict() == {"x": [1.0, 2.0, 3.5], "y": ["1", "2", "x"]}
    world.put("a.jsonl", b'{"x":1}\n{"y":{"a":1}}\n\n{"x":2.5,"y":{"b":[]}}\n')
    spec = DatasetSpec(("a.jsonl",), batch_size=10, text_chunk_bytes=4)
    assert read(world, spec)[0].to_pylist() == [
        {"x": 1.0, "y": None},
        {"x": None, "y": {"a": 1, "b": None}},
        {"x": 2.5, "y": {"a": None, "b": []}},
    ]


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("a.csv", b"", "no header line"),
        ("a.csv", b"x,y\n1,2\n1\n", r"bytes 4 to 10: .*Expected 2 columns, got 1"),
        ("a.csv", b'x,y\n1,"2\n3,4\n', "ends within a quoted field"),
        ("a.csv", b"x,y\n1,\xff\n", "byte 2 of it is not UTF-8"),
        ("a.csv", b"x,x\n1,2\n", "two columns named 'x'"),
        ("a.jsonl", b'{"x":1}\n{"x":\n', "bytes 0 to 14: "),
        ("a.csv", b"x;y\n1;2\n", "divided by ';'"),
        ("a.csv", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "git lfs pull"),
        ("a.csv", "x,y\n1,2\n".encode("utf-16"), "byte 0 of it is not UTF-8"),
        ("a.jsonl", b"[1]\n", "bytes 0 to 4: it is an array"),
        ("a.jsonl", b"1\n", "bytes 0 to 2: "),
        ("a.jsonl", b" null\n", "bytes 0 to 6: a line is null"),
        ("a.jsonl", b'{"x":1}\nnull\n', "bytes 0 to 13: a line is null"),
        ("a.jsonl", b'{"x":%s1%s}\n' % (b'[{"y":' * 99999, b"}]" * 99999), "nested more than 100 times"),
        ("a.jsonl", b"{}\n{}\n", "have no columns"),
    ],
)
def test_an_error_about_broken_text_names_file_and_position(world: Any, name: str, content: bytes, text: str) -> None:
    world.put(name, content)
    with pytest.raises(DataError, match=text) as caught:
        build_index(world.files, DatasetSpec((name,)))
    assert name in str(caught.value)


def test_a_byte_order_mark_and_empty_lines_are_ignored(world: Any) -> None:
    world.put("a.csv", b'\xef\xbb\xbf"x",y\r\n\r\n1,2\r\n\r\n')
    assert read(world, DatasetSpec(("a.csv",)))[0].to_pydict() == {"x": [1], "y": [2]}
    world.put("a.jsonl", b'\xef\xbb\xbf{"x":1}\n\n{"x":"a"}\n')
    assert read(world, DatasetSpec(("a.jsonl",), batch_size=2))[0].to_pydict() == {"x": ["1", "a"]}


def test_brackets_in_text_are_not_nested_values(world: Any) -> None:
    world.put("a.jsonl", b'{"x":"\\"%s"}\n' % (b"]" * 999))
    assert read(world, DatasetSpec(("a.jsonl",)))[0].to_pydict() == {"x": ['"' + "]" * 999]}


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        (("d", ">=", "2020-01-02"), [2, 3]),
        (("n", "==", None), [4]),
        (("n", "!=", None), [1, 2, 3]),
        (("n", "!=", 2), [1, 3]),
        (("n", "not in", [1]), [2, 3]),
        (("n", "in", []), []),
        (("n", "in", [1, 3, 7]), [1, 3]),
        (("n", "<", 2.5), [1, 2]),
        (("s", "in", ["a", "c"]), [1, 3]),
    ],
)
def test_conditions_select_records(world: Any, condition: Any, expected: list[int]) -> None:
    days = [dt.date(2020, 1, day) for day in (1, 2, 3)]
    table = pa.table({"k": [1, 2, 3, 4], "d": [*days, None], "n": [1, 2, 3, None], "s": ["a", "b", "c", None]})
    world.write("a.parquet", table, "parquet")
    batch = read(world, DatasetSpec(("a.parquet",), batch_size=10, filter=(condition,)))[0]
    assert batch.column("k").to_pylist() == expected


@pytest.mark.parametrize(
    ("condition", "text"),
    [
        (("n", "~", 1), "unknown operator '~': use one of ==, !="),
        (("n", "<", None), "None, which only == and != support"),
        (("n", "in", 3), "needs a list of values"),
        (("n", "in", [1, "x"]), "different types"),
        (("b", "in", [True]), "does not fit its columns .b is extension<arrow.bool8>"),
    ],
)
def test_wrong_conditions_raise_one_sentence(world: Any, condition: Any, text: str) -> None:
    extension = pa.ExtensionArray.from_storage(pa.bool8(), pa.array([1], pa.int8()))
    world.write("a.parquet", pa.table({"n": [1], "b": extension}), "parquet")
    with pytest.raises(DataError, match=text):
        build_index(world.files, DatasetSpec(("a.parquet",), filter=(condition,)))


def test_the_first_records_are_read(world: Any) -> None:
    world.write("a.parquet", pa.table({"n": range(20)}), "parquet", 3)
    spec = DatasetSpec(("a.parquet",))
    index = build_index(world.files, spec)
    chunks = [index.chunk(number) for number in range(3)]
    assert first_records(world.files, chunks, spec, 5, schema=index.schema).column("n").to_pylist() == [0, 1, 2, 3, 4]
    assert first_records(world.files, chunks, spec, 500, schema=index.schema).num_rows == 9


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("text", ["plain", '"two\nlines"', '"two\r\nlines"', '"a ""quote"" "'])
def test_csv_is_read_as_it_was_indexed_whatever_ends_its_lines(
    end: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A newline within quotes and a return that ends a record may hide each other in the number of lines."""
    monkeypatch.setattr(csv_text, "_BLOCK_BYTES", 1000)
    records = [f"{number},{text if number % 3 else 'plain'}" for number in range(12_000)]
    content = (
        "number,text\n" + "".join(record + (end if number % 2 else "\n") for number, record in enumerate(records))
    ).encode()
    files = MemoryFiles({"/a.csv": content})
    spec = DatasetSpec(("/a.csv",), batch_size=5000)
    index = build_index(files, spec)
    chunks = [index.chunk(number) for number in range(len(index))]
    found = pa.Table.from_batches(read_task(files, chunks, spec, None, 0, 0, schema=index.schema))
    expected = pa.csv.read_csv(pa.py_buffer(content), parse_options=pa.csv.ParseOptions(newlines_in_values=True))
    assert found.to_pydict() == expected.to_pydict()


def test_a_corrupt_chunk_yields_no_records_of_the_chunk_before_it(world: Any) -> None:
    damaged = bytearray(encode_chunk([b"b%d" % n for n in range(4)], "none"))
    damaged[-1] ^= 1
    good = [encode_chunk([b"%s%d" % (name, n) for n in range(4)], "none") for name in (b"a", b"c")]
    world.put("a.recordio", good[0] + bytes(damaged) + good[1])
    spec = DatasetSpec(("a.recordio",), batch_size=2, on_corrupt="skip")
    counts = ReadCounts()
    batches = read(world, spec, counts=counts)
    found = [batch["record"].to_pylist() for batch in batches]
    assert found == [[b"a0", b"a1"], [b"a2", b"a3"], [], [], [b"c0", b"c1"], [b"c2", b"c3"]]
    assert (counts.corrupt_chunks, counts.corrupt_records) == (1, 4)


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv"])
def test_records_after_damage_are_read_from_their_places(world: Any, name: str) -> None:
    is_csv = name == "a.csv"
    lines = [b"%d" % n if is_csv else b'{"n": %d}' % n for n in range(60_000)]
    lines[30_000] = b'"\xff\xfe"' if is_csv else b'{"n": "\xff"}'
    world.put(name, (b"n\n" if is_csv else b"") + b"\n".join(lines) + b"\n")
    spec = DatasetSpec((name,), batch_size=1000, on_corrupt="skip", text_chunk_bytes=16 << 10)
    found = [n for batch in read(world, spec) for n in batch["n"].to_pylist()]
    assert found == sorted(set(found))
    assert found[0] == 0
    assert found[-1] == 59_999
    assert 30_000 not in found
    assert 60_000 - len(found) < 10_000, "only the damaged chunk is left out"


@pytest.mark.parametrize("name", ["a.arrow", "a.arrows"])
def test_values_outside_of_their_column_are_damage(world: Any, name: str) -> None:
    world.write(name, pa.table({"t": ["aa"] * 50}), "arrow" if name == "a.arrow" else "arrow-stream", 10)
    data = bytearray(world.files.contents[name])
    at = data.index(b"".join(number.to_bytes(4, "little") for number in (0, 2, 4, 6)))
    data[at + 4 : at + 8] = (1 << 30).to_bytes(4, "little")
    world.put(name, bytes(data))
    with pytest.raises(CorruptChunkError, match="is corrupt, record batch 0"):
        read(world, DatasetSpec((name,), batch_size=5))
    found = read(world, DatasetSpec((name,), batch_size=5, on_corrupt="skip"))
    assert sum(batch.num_rows for batch in found) == 40


@pytest.mark.parametrize("name", ["parquet", "arrow", "jsonl"])
def test_a_filter_that_fails_at_a_value_does_not_make_records_corrupt(world: Any, name: str, monkeypatch: Any) -> None:
    world.write("a", pa.table({"n": [1, 2]}), name)
    spec = DatasetSpec(("a",), format=name, filter=(("n", "<", 2),), on_corrupt="skip")
    failing = pc.field("n").cast(pa.string()).cast(pa.timestamp("s")).is_valid()
    for module in ("records", "parquet"):
        monkeypatch.setattr(f"flightedl.formats.{module}.expression", lambda *_: failing)
    counts = ReadCounts()
    with pytest.raises(UserCodeError, match=r"the filter n < 2 cannot be applied to a record: .*timestamp"):
        read(world, spec, counts=counts)
    assert counts == ReadCounts()


def test_errors_say_whose_they_are(world: Any) -> None:
    world.write("a.recordio", pa.table({"record": [b"1", b"2"]}), "recordio")
    spec = DatasetSpec(("a.recordio",), batch_size=2)

    def failing(error: Exception) -> Any:
        def decode(_: bytes) -> dict[str, int]:
            raise error

        return decode

    for error, fault in (
        (KeyError("x"), "code"),
        (MemoryError(), "machine"),
        (ModuleNotFoundError("no cv2"), "machine"),
    ):
        with pytest.raises(FlightedlError) as raised:
            read(world, spec, decode=failing(error))
        assert raised.value.fault == fault
    with pytest.raises(UserCodeError, match="do not form columns"):
        read(world, spec, decode=lambda record: {"x": 1 if record == b"1" else "text"})
    index = build_index(world.files, spec)
    world.files.contents.clear()
    with pytest.raises(StoreError, match=r"there is no file a\.recordio"):
        list(read_task(world.files, [index.chunk(0)], spec, None, 0, 0, schema=index.schema))


@pytest.mark.parametrize("seed", [None, 1])
def test_memory_that_lacks_for_a_batch_is_this_machines(world: Any, seed: int | None, monkeypatch: Any) -> None:
    world.write("a.parquet", pa.table({"n": range(20)}), "parquet", 10)

    def fail(*_: object) -> None:
        raise pa.ArrowMemoryError("malloc of size 640 failed")

    monkeypatch.setattr("flightedl.formats.reader.joined_tables", fail)
    with pytest.raises(ExhaustedError, match=r"batch 0 of task 0 cannot be read: .*too little free memory"):
        read(world, DatasetSpec(("a.parquet",), batch_size=20), seed)


@pytest.mark.parametrize("columns", [None, ("n",)])
def test_an_arrow_file_is_read_by_its_footer_alone(world: Any, columns: tuple[str, ...] | None) -> None:
    """As files of Polars 2.1, whose first message is not the schema of the footer."""
    table = pa.table({"s": ["a", "b", "c"], "n": [1, 2, 3], "d": pa.array([0, 1, 0], pa.int8())})
    table = table.set_column(2, "d", pa.DictionaryArray.from_arrays(table["d"].chunk(0), ["x", "y"]))
    world.write("a.arrow", table, "arrow", 2)
    content = bytearray(world.files.contents["a.arrow"])
    schema_bytes = int.from_bytes(content[12:16], "little")
    content[16 : 16 + schema_bytes] = bytes(schema_bytes)
    world.put("a.arrow", bytes(content))
    found = read(world, DatasetSpec(("a.arrow",), batch_size=2, columns=columns))
    expected = table if columns is None else table.select(columns)
    assert [row for batch in found for row in batch.to_pylist()] == expected.to_pylist()
