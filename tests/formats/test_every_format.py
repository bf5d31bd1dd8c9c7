"""Common behavior of all formats: they round-trip, cover each record once, and report errors."""

from __future__ import annotations

import gzip
import io
import logging
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flightedl.adapters.clock import SystemClock
from flightedl.adapters.patience import PatientFiles, Persistence
from flightedl.domain.queue.drawing import drawn
from flightedl.domain.retries import Patience
from flightedl.errors import DataError, UnavailableError, UsageError
from flightedl.formats.chunks import CorruptChunkError
from flightedl.formats.dataset_spec import DatasetSpec
from flightedl.formats.index import build_index
from flightedl.formats.layout import TaskLayout
from flightedl.formats.reader import DecodedChunks, read_task
from flightedl.formats.registry import FORMATS, format_for, named_format
from tests.support.faults import FaultPlan
from tests.support.memory import MemoryFiles

TABULAR = ["parquet", "arrow", "arrow-stream", "csv", "tsv", "jsonl"]
NASTY = ["plain", 'a "quote"', "comma, here", "line\nbreak", "tab\there", "\r\n", '"', "é€", " x "]
QUICK = settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


def table_of(rows: int) -> pa.Table:
    return pa.table(
        {
            "number": pa.array(range(rows), pa.int64()),
            "share": pa.array([number / 4 + 0.125 for number in range(rows)], pa.float64()),
            "text": pa.array([NASTY[number % len(NASTY)] for number in range(rows)]),
        }
    )


def content_of(format_name: str, table: pa.Table, rows: int) -> bytes:
    batches = table.combine_chunks().to_batches(max_chunksize=rows)
    return b"".join(named_format(format_name).write(batches, table.schema))


def read_everything(
    files: MemoryFiles, spec: DatasetSpec, seed: int | None = None, **layout: int
) -> list[pa.RecordBatch]:
    index = build_index(files, spec)
    pieces = None
    if seed is not None and len(index):
        pieces = drawn(index.records, index.decoded_bytes, spec.batch_size, seed, **layout)
    tasks = TaskLayout(index, spec.batch_size, **layout, pieces=pieces)
    batches, decoded = [], DecodedChunks(1000)
    for task in range(tasks.task_count):
        found = list(read_task(files, tasks.chunks_of(task), spec, seed, 0, task, schema=index.schema, decoded=decoded))
        assert len(found) == tasks.batch_count(task)
        batches += found
    return batches


@pytest.mark.parametrize("format_name", TABULAR)
@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=4).filter(any),
    rows=st.integers(1, 15),
    text_chunk=st.integers(1, 300),
    batch_size=st.integers(1, 20),
    records_per_task=st.sampled_from([0, 7, 20]),
    shuffle=st.booleans(),
)
@QUICK
def test_each_record_is_read_exactly_once(
    format_name: str,
    sizes: list[int],
    rows: int,
    text_chunk: int,
    batch_size: int,
    records_per_task: int,
    shuffle: bool,
) -> None:
    complete = table_of(sum(sizes))
    suffix = named_format(format_name).suffixes[0]
    files = MemoryFiles()
    start = 0
    for number, size in enumerate(sizes):
        files.contents[f"f{number}{suffix}"] = content_of(format_name, complete.slice(start, size), rows)
        start += size
    spec = DatasetSpec((f"*{suffix}",), batch_size=batch_size, text_chunk_bytes=text_chunk)
    batches = read_everything(files, spec, 5 if shuffle else None, records_per_task=records_per_task)
    found = pa.Table.from_batches(batches)
    if shuffle:
        found = found.sort_by("number")
    assert found.to_pylist() == complete.to_pylist()


@pytest.mark.parametrize("compression", ["gz", "zst"])
@pytest.mark.parametrize("format_name", ["csv", "tsv", "jsonl"])
def test_compressed_text_is_one_chunk(format_name: str, compression: str) -> None:
    plain = content_of(format_name, table_of(50), 1000)
    half = len(plain) // 2
    compress = gzip.compress if compression == "gz" else _zstd
    url = f"a.{format_name}.{compression}"
    # Two gzip members, as in concatenated files.
    files = MemoryFiles({url: compress(plain[:half]) + compress(plain[half:])})
    spec = DatasetSpec((url,), batch_size=7, text_chunk_bytes=64)
    assert len(build_index(files, spec)) == 1
    assert pa.Table.from_batches(read_everything(files, spec)).to_pylist() == table_of(50).to_pylist()
    files.contents[url] = compress(plain)[:-20]
    with pytest.raises(CorruptChunkError, match=url):
        build_index(files, spec)


@pytest.mark.parametrize("format_name", TABULAR)
def test_columns_and_conditions_are_applied(format_name: str) -> None:
    url = "a" + named_format(format_name).suffixes[0]
    files = MemoryFiles({url: content_of(format_name, table_of(100), 10)})
    spec = DatasetSpec(
        (url,),
        columns=("text", "number"),
        filter=(("share", ">", 5), ("number", "not in", [40, 41])),
        batch_size=16,
        text_chunk_bytes=500,
    )
    kept = table_of(100).filter((pc.field("share") > 5) & ~pc.field("number").isin([40, 41]))
    for seed in (None, 3):
        batches = read_everything(files, spec, seed, records_per_task=10**9)
        assert len(batches) == 7  # batches of the unfiltered records
        assert all(batch.schema.names == ["text", "number"] for batch in batches)
        found = pa.Table.from_batches(batches).sort_by("number")
        assert found.to_pylist() == kept.select(["text", "number"]).to_pylist()


@pytest.mark.parametrize("format_name", [*TABULAR, "tfrecord"])
def test_a_filter_never_moves_a_record_to_another_batch(format_name: str) -> None:
    url = "a" + named_format(format_name).suffixes[0]
    files = MemoryFiles({url: content_of(format_name, table_of(60), 10)})
    plain = DatasetSpec((url,), batch_size=9, text_chunk_bytes=300)
    filtered = DatasetSpec((url,), batch_size=9, filter=(("number", "<", 20),), text_chunk_bytes=300)
    for seed in (None, 1):
        everything = read_everything(files, plain, seed, records_per_task=30)
        some = read_everything(files, filtered, seed, records_per_task=30)
        expected = [[n for n in batch.column("number").to_pylist() if n < 20] for batch in everything]
        assert [batch.column("number").to_pylist() for batch in some] == expected


@pytest.mark.parametrize("format_name", [*TABULAR, "recordio", "tfrecord"])
def test_a_part_of_a_task_is_always_the_same_part(format_name: str) -> None:
    url = "a" + named_format(format_name).suffixes[0]
    table = table_of(50) if format_name != "recordio" else pa.table({"record": [b"%d" % n for n in range(50)]})
    files = MemoryFiles({url: content_of(format_name, table, 8)})
    spec = DatasetSpec((url,), batch_size=6, text_chunk_bytes=200)
    index = build_index(files, spec)
    chunks = TaskLayout(index, 6, records_per_task=10**9).chunks_of(0)
    for seed in (None, 9):
        complete = list(read_task(files, chunks, spec, seed, 2, 0, schema=index.schema))
        part = list(read_task(files, chunks, spec, seed, 2, 0, 3, 6, schema=index.schema))
        assert [batch.to_pylist() for batch in part] == [batch.to_pylist() for batch in complete[3:6]]
        other = list(read_task(files, chunks, spec, seed, 3, 0, schema=index.schema))
        assert ([b.to_pylist() for b in other] == [b.to_pylist() for b in complete]) == (seed is None)
    with pytest.raises(UsageError, match="no batches 3 to 10 in task 0: it has 9"):
        list(read_task(files, chunks, spec, None, 0, 0, 3, 10, schema=index.schema))


@pytest.mark.parametrize("format_name", [*TABULAR, "recordio", "tfrecord"])
def test_a_changed_file_is_rejected(format_name: str) -> None:
    url = "a" + named_format(format_name).suffixes[0]
    tables = [table_of(50), table_of(49)]
    if format_name == "recordio":
        tables = [pa.table({"record": [b"%d" % number for number in range(count)]}) for count in (50, 49)]
    files = MemoryFiles({url: content_of(format_name, tables[0], 8)})
    spec = DatasetSpec((url,), batch_size=6, on_corrupt="skip")
    index = build_index(files, spec)
    files.contents[url] = content_of(format_name, tables[1], 8)
    with pytest.raises(DataError, match=f"{url} has changed since it was indexed"):
        list(read_task(files, [index.chunk(0)], spec, None, 0, 0, schema=index.schema))


@pytest.mark.parametrize("format_name", ["parquet", "arrow", "arrow-stream"])
def test_every_truncation_raises_a_data_error_that_names_the_file(format_name: str) -> None:
    url = "a" + named_format(format_name).suffixes[0]
    content = content_of(format_name, table_of(30), 10)
    spec = DatasetSpec((url,), batch_size=6)
    for cut in np.linspace(0, len(content) - 1, 60).astype(int).tolist():
        files = MemoryFiles({url: content[:cut]})
        try:
            batches = read_everything(files, spec)
        except DataError as error:
            assert url in str(error)  # noqa: PT017 - most cuts raise, some need not
        else:
            # By its format, a stream that ends between two messages is complete.
            assert format_name == "arrow-stream"
            assert sum(batch.num_rows for batch in batches) in (10, 20, 30)


@pytest.mark.parametrize("format_name", ["parquet", "arrow", "arrow-stream", "csv", "jsonl", "tfrecord"])
@given(place=st.floats(0, 0.999), flip=st.integers(1, 255))
@settings(max_examples=40, deadline=None)
def test_damage_raises_only_data_errors(format_name: str, place: float, flip: int) -> None:
    url = "a" + named_format(format_name).suffixes[0]
    content = bytearray(content_of(format_name, table_of(30), 10))
    content[int(place * len(content))] ^= flip
    try:
        read_everything(MemoryFiles({url: bytes(content)}), DatasetSpec((url,), batch_size=6))
    except DataError as error:
        assert url in str(error)  # noqa: PT017 - harmless damage need not raise


def _zstd(data: bytes) -> bytes:
    return pa.compress(data, codec="zstd", asbytes=True)


class BrokenStore(MemoryFiles):
    """Files whose reads fail after a while, as network storage may."""

    def open(self, url: str) -> Any:
        class Failing(io.BytesIO):
            def read(self, size: int | None = -1, /) -> bytes:
                if self.tell() or size is None or size > 20:
                    raise OSError("connection reset by peer")
                return super().read(size)

        return Failing(self.contents[url])


@pytest.mark.parametrize("format_name", [*TABULAR, "recordio", "tfrecord"])
def test_a_failing_store_is_not_reported_as_corruption(format_name: str) -> None:
    url = "a" + named_format(format_name).suffixes[0]
    table = table_of(50) if format_name != "recordio" else pa.table({"record": [b"%d" % n for n in range(50)]})
    files = BrokenStore({url: content_of(format_name, table, 8)})
    with pytest.raises(UnavailableError, match=f"{url} cannot be read at the moment: connection reset by peer"):
        build_index(files, DatasetSpec((url,), on_corrupt="skip"))


def test_the_format_follows_from_the_name_or_an_option() -> None:
    assert {format_for("x" + suffix).name for found in FORMATS.values() for suffix in found.suffixes} == set(FORMATS)
    assert format_for("s3://b/x.CSV.GZ").name == "csv"
    assert format_for("whatever", "recordio").name == "recordio"
    with pytest.raises(DataError, match=r"the name of data\.bin implies no format: pass format=, one of parquet"):
        format_for("data.bin")
    with pytest.raises(UsageError, match="there is no format 'xml'"):
        format_for("data.bin", "xml")
    with pytest.raises(DataError, match="decompress it"):
        format_for("a.parquet.gz")


@pytest.mark.parametrize("format_name", [*TABULAR, "recordio", "tfrecord"])
def test_a_read_that_fails_once_neither_loses_nor_repeats_a_record(
    format_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    # Logging would leave a Python thread object for each of pyarrow's permanent threads.
    caplog.set_level(logging.ERROR, "flightedl.adapters.patience")
    url = "a" + named_format(format_name).suffixes[0]
    table = table_of(50) if format_name != "recordio" else pa.table({"record": [b"%d" % n for n in range(50)]})
    files = MemoryFiles({url: content_of(format_name, table, 8)})
    patience = Patience(limit_s=10.0, first_pause_s=0.0)
    spec = DatasetSpec((url,), batch_size=7)

    def records() -> list[dict[str, Any]]:
        patient = PatientFiles(files, Persistence(patience, SystemClock()))
        index = build_index(patient, spec, concurrency=1)
        layout = TaskLayout(index, spec.batch_size)
        return [
            record
            for task in range(layout.task_count)
            for batch in read_task(patient, layout.chunks_of(task), spec, None, 0, task, schema=index.schema)
            for record in batch.to_pylist()
        ]

    expected = records()
    assert len(expected) == 50
    for point in ("expand", "stat", "open", "file:read"):
        for nth in range(1, files.plan.count(point) + 1):
            failing = FaultPlan()
            failing.fail_at(point, nth, ConnectionResetError(104, "Connection reset by peer"))
            plan, files.plan = files.plan, failing
            assert records() == expected
            files.plan = plan


def test_a_text_record_longer_than_a_parser_block_is_read_completely() -> None:
    values = ["short", "x" * (1 << 20), 'with "quotes"\nand a line', "short"] * 2
    table = pa.table({"n": range(8), "s": values})
    files = MemoryFiles({"long.csv": content_of("csv", table, 8)})
    spec = DatasetSpec(("long.csv",), batch_size=3)
    index = build_index(files, spec)
    layout = TaskLayout(index, 3)
    found = [
        text
        for task in range(layout.task_count)
        for batch in read_task(files, layout.chunks_of(task), spec, None, 0, task, schema=index.schema)
        for text in batch["s"].to_pylist()
    ]
    assert found == values
