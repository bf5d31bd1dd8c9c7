from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from flightedl.errors import DataError, ExhaustedError, UsageError
from flightedl.formats.chunk_index import ChunkIndex
from flightedl.formats.chunks import ChunkColumns, CorruptChunkError, FileIndex
from flightedl.formats.dataset_spec import DatasetSpec
from flightedl.formats.index import IndexProgress, build_index
from flightedl.formats.layout import TaskLayout
from flightedl.formats.stored_index import decode_index, encode_index, index_name, load_or_build
from flightedl.ports import FileStat
from tests.support.memory import MemoryFiles

INT64 = pa.int64()
SMALL = pa.table({"a": [1, 2, 3, 4, 5], "b": ["v", "w", "x", "y", "z"]})


class CountingFiles(MemoryFiles):
    """Files that record which were opened, and how many were open at once."""

    def __init__(self) -> None:
        super().__init__()
        self.opened: list[str] = []
        self.most_open = self._open = 0
        self._lock = threading.Lock()

    def open(self, url: str) -> Any:
        with self._lock:
            self.opened.append(url)
            self._open += 1
            self.most_open = max(self.most_open, self._open)
        file = super().open(url)
        close = file.close

        def closing() -> None:
            if not file.closed:
                with self._lock:
                    self._open -= 1
            close()

        file.close = closing  # type: ignore[method-assign]
        return file


class SlowFiles(CountingFiles):
    """Files whose opening takes a while."""

    def __init__(self, latency_s: float) -> None:
        super().__init__()
        self.latency_s = latency_s

    def open(self, url: str) -> Any:
        time.sleep(self.latency_s)
        return super().open(url)


def test_files_are_indexed_in_order_with_progress(world: Any) -> None:
    for number in (2, 0, 1):
        world.write(f"f{number}.parquet", SMALL.slice(0, number + 1), "parquet", 2)
    reports: list[IndexProgress] = []
    index = build_index(world.files, DatasetSpec(("f*.parquet",)), progress=reports.append)
    assert index.records.tolist() == [1, 2, 2, 1]
    assert [index.chunk(number).url for number in range(4)] == ["f0.parquet", "f1.parquet", "f2.parquet", "f2.parquet"]
    assert [index.chunk(number).first_record for number in range(4)] == [0, 0, 0, 2]
    assert reports[-1] == IndexProgress(3, 3, 4, 6)
    assert index.schema.equals(SMALL.schema)
    with pytest.raises(IndexError, match="no chunk 4 of 4"):
        index.chunk(4)


def test_no_more_files_are_open_than_allowed(world: Any) -> None:
    files = CountingFiles()
    content = world.files.contents[world.write("x.jsonl", SMALL, "jsonl")]
    for number in range(60):
        files.contents[f"f{number:02d}.jsonl"] = content
    assert build_index(files, DatasetSpec(("f*",)), concurrency=3).record_count == 300
    assert files.most_open <= 3


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_ten_thousand_files_with_latency_are_indexed_in_parallel(world: Any) -> None:
    files = SlowFiles(0.005)
    content = world.files.contents[world.write("x.arrow", SMALL, "arrow", 5)]
    files.contents = {f"f{number:05d}.arrow": content for number in range(10_000)}
    reports: list[int] = []
    begun = time.monotonic()
    index = build_index(files, DatasetSpec(("f*",)), concurrency=16, progress=lambda p: reports.append(p.files_done))
    assert index.record_count == 50_000
    # Sequential reads would take ten thousand times the latency.
    assert time.monotonic() - begun < 0.6 * 10_000 * files.latency_s
    assert files.most_open <= 16
    assert reports == list(range(1, 10_001))
    assert len(files.opened) == 10_000
    again = build_index(files, DatasetSpec(("f*",)), known=index)
    assert len(files.opened) == 10_000
    assert again.content_hash() == index.content_hash()


def test_the_first_bad_file_ends_indexing(world: Any) -> None:
    files = CountingFiles()
    for number in range(500):
        files.contents[f"f{number:03d}.parquet"] = b"not parquet"
    with pytest.raises(CorruptChunkError, match=r"f\d+\.parquet is corrupt"):
        build_index(files, DatasetSpec(("f*",)), concurrency=4)
    assert len(files.opened) < 50


@pytest.mark.parametrize("format_name", ["parquet", "arrow"])
def test_an_error_about_mixed_schemas_names_file_and_column(world: Any, format_name: str) -> None:
    suffix = f".{format_name}"
    spec = DatasetSpec((f"*{suffix}",))
    world.write(f"a{suffix}", SMALL, format_name)
    world.write(f"b{suffix}", SMALL.set_column(0, "a", pa.array(list("pqrst"))), format_name)
    with pytest.raises(DataError, match=rf"b\{suffix} does not go with a\{suffix}: column 'a' is string and not int64"):
        build_index(world.files, spec)
    world.write(f"b{suffix}", SMALL.drop_columns("b"), format_name)
    with pytest.raises(DataError, match=rf"b\{suffix} does not go with .*: column 'b' is missing"):
        build_index(world.files, spec)
    world.write(f"b{suffix}", SMALL.append_column("c", SMALL.column("a")), format_name)
    with pytest.raises(DataError, match=rf"b\{suffix} does not go with .*: there is an extra column 'c'"):
        build_index(world.files, spec)
    world.write(f"b{suffix}", SMALL.select(["b", "a"]), format_name)
    assert build_index(world.files, spec).schema.names == ["a", "b"]


def test_guessed_types_are_widened_over_files(world: Any) -> None:
    world.put("a.csv", b"x,y,z\n1,2020-01-01,\n")
    world.put("b.csv", b"x,y,z\n1.5,2020-01-01 10:00:00,q\n")
    schema = build_index(world.files, DatasetSpec(("*.csv",))).schema
    assert schema.types == [pa.float64(), pa.string(), pa.string()]  # Dates and timestamps have two forms.


def test_a_dataset_without_records_is_rejected(world: Any) -> None:
    world.write("a.parquet", SMALL.slice(0, 0), "parquet")
    world.write("b.parquet", SMALL.slice(0, 0), "parquet")
    with pytest.raises(DataError, match=r"there is no record in a\.parquet and 1 more files"):
        build_index(world.files, DatasetSpec(("*.parquet",)))
    world.write("c.parquet", SMALL, "parquet")
    assert build_index(world.files, DatasetSpec(("*.parquet",))).record_count == 5


def test_missing_files_and_columns_are_reported(world: Any) -> None:
    with pytest.raises(DataError, match="no file matches nowhere"):
        build_index(world.files, DatasetSpec(("nowhere*",)))
    world.write("a.parquet", SMALL, "parquet")
    with pytest.raises(DataError, match=r"there is no column 'c' in a\.parquet: it has a, b"):
        build_index(world.files, DatasetSpec(("a.parquet",), columns=("c",)))
    with pytest.raises(DataError, match=r"there is no column 'q' in a\.parquet"):
        build_index(world.files, DatasetSpec(("a.parquet",), filter=(("q", "==", 1),)))
    with pytest.raises(DataError, match=r"the filter does not fit its columns \(b is string\)"):
        build_index(world.files, DatasetSpec(("a.parquet",), filter=(("b", ">", 1),)))


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"urls": ()}, "at least one URL"),
        ({"batch_size": 0}, "batch_size has to be at least 1"),
        ({"on_corrupt": "ignore"}, "on_corrupt is one of fail, skip"),
        ({"columns": ("a", "a")}, "each only once"),
        ({"text_chunk_bytes": 0}, "size above 0"),
    ],
)
def test_a_wrong_spec_raises_one_sentence(wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        DatasetSpec(**{"urls": ("a",), **wrong})


def test_skipping_is_explicit_and_counted(world: Any) -> None:
    world.write("a.parquet", SMALL, "parquet")
    world.put("b.parquet", b"PAR1 and nothing else")
    with pytest.raises(CorruptChunkError, match=r"b\.parquet"):
        build_index(world.files, DatasetSpec(("*.parquet",)))
    index = build_index(world.files, DatasetSpec(("*.parquet",), on_corrupt="skip"))
    assert index.record_count == 5
    assert len(index.skipped) == 1
    assert "b.parquet" in index.skipped[0]


def test_large_row_groups_are_divided(world: Any) -> None:
    world.write("a.parquet", SMALL, "parquet", 3)
    index = build_index(world.files, DatasetSpec(("a.parquet",), max_records_per_chunk=2))
    assert index.records.tolist() == [2, 1, 2]
    chunks = [index.chunk(number) for number in range(3)]
    assert [(chunk.number, chunk.first_record) for chunk in chunks] == [(0, 0), (0, 2), (1, 3)]


def test_an_index_is_stored_and_reused(world: Any) -> None:
    files = CountingFiles()
    for number in range(4):
        files.contents[f"f{number}.csv"] = b"x\n" + b"1\n" * (number + 1)
    spec = DatasetSpec(("f*.csv",))
    first = load_or_build(files, world.storage, spec)
    assert first.files_read == 4
    files.opened.clear()
    again = load_or_build(files, world.storage, spec)
    assert files.opened == []
    assert (again.files_read, again.index.content_hash()) == (0, first.index.content_hash())
    files.contents["f2.csv"] = b"x\n2.5\n"
    files.contents["f9.csv"] = b"x\n3\n"
    changed = load_or_build(files, world.storage, spec)
    assert files.opened == ["f2.csv", "f9.csv"]
    assert changed.index.content_hash() == build_index(files, spec).content_hash() != first.index.content_hash()
    assert changed.index.schema.types == [pa.float64()]


def test_a_damaged_stored_index_is_rebuilt(world: Any) -> None:
    world.write("a.parquet", SMALL, "parquet", 2)
    spec = DatasetSpec(("a.parquet",))
    load_or_build(world.files, world.storage, spec)
    sound = world.storage.files[index_name(spec)]
    for damaged in (b"", sound[:-100], sound.replace(b"a.parquet", b"b.parquet"), b"x" * 1000):
        world.storage.files[index_name(spec)] = damaged
        assert load_or_build(world.files, world.storage, spec).files_read == 1
        assert world.storage.files[index_name(spec)] == sound
    assert load_or_build(world.files, None, spec).index.record_count == 5


def test_damage_anywhere_in_a_stored_index_is_detected(world: Any) -> None:
    world.write("a.parquet", SMALL, "parquet", 2)
    index = build_index(world.files, DatasetSpec(("a.parquet",)))
    sound = encode_index(index)
    for place in range(0, len(sound), 7):
        damaged = bytearray(sound)
        damaged[place] ^= 0x55
        try:
            found = decode_index(bytes(damaged))
        except ValueError:
            continue
        assert found.content_hash() == index.content_hash()
        assert [found.chunk(n) for n in range(len(found))] == [index.chunk(n) for n in range(len(index))]


def test_the_hash_depends_on_names_content_schemas_and_records_but_not_on_folders_and_times(world: Any) -> None:
    def hash_of(
        mark: str = "m",
        records: int = 5,
        kind: pa.DataType = INT64,
        url: str = "/a/x",
        version: str = "v",
        digest: int = 0,
    ) -> str:
        schema = pa.schema([("x", kind)])
        chunks = ChunkColumns.of([records], [4], [100], [digest])
        file = FileIndex(FileStat(url, 100, version), "parquet", schema, chunks, mark=mark)
        return ChunkIndex([file], schema).content_hash()

    assert hash_of() == hash_of(version="w") == hash_of(url="/b/x")
    others = [hash_of("n"), hash_of(records=6), hash_of(kind=pa.int32()), hash_of(url="/a/y"), hash_of(digest=7)]
    assert len({hash_of(), *others}) == 6


def index_of(counts: list[int]) -> ChunkIndex:
    schema = pa.schema([("x", pa.int64())])
    chunks = ChunkColumns.of(counts, list(range(len(counts))), [1] * len(counts))
    return ChunkIndex([FileIndex(FileStat("a.parquet", 1, "v"), "parquet", schema, chunks)], schema)


def test_tasks_consist_of_chunks() -> None:
    layout = TaskLayout(index_of([30, 35, 7]), 8)
    assert layout.task_count == 3
    assert [layout.records(task) for task in range(3)] == [30, 35, 7]
    assert [layout.batch_count(task) for task in range(3)] == [4, 5, 1]
    assert [chunk.records for chunk in layout.chunks_of(1)] == [35]
    assert [layout.chunk_range(task) for task in range(3)] == [range(1), range(1, 2), range(2, 3)]
    with pytest.raises(IndexError, match="no task 3 of 3"):
        layout.chunks_of(3)


def test_tasks_consist_of_records() -> None:
    rng = np.random.default_rng(0)
    counts = rng.integers(1, 50, 300).tolist()
    layout = TaskLayout(index_of(counts), 8, records_per_task=100)
    ranges = [layout.chunk_range(task) for task in range(layout.task_count)]
    assert [number for part in ranges for number in part] == list(range(300))
    assert [layout.records(task) for task in range(layout.task_count)] == [
        sum(counts[n] for n in part) for part in ranges
    ]
    assert max(layout.records(task) for task in range(layout.task_count)) < 150
    assert TaskLayout(index_of([1000, 1000]), 8, records_per_task=100).task_count == 2
    assert TaskLayout(index_of([1, 1, 1]), 8, records_per_task=100).task_count == 1
    with pytest.raises(UsageError):
        TaskLayout(index_of([1]), 0)


def test_a_stored_index_for_which_memory_lacks_is_not_called_damaged(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.write("a.parquet", SMALL, "parquet", 2)
    data = encode_index(build_index(world.files, DatasetSpec(("a.parquet",))))

    def fail(*_: object, **__: object) -> None:
        raise pa.ArrowMemoryError("malloc failed")

    monkeypatch.setattr("pyarrow.ipc.open_file", fail)
    with pytest.raises(ExhaustedError, match="the stored index cannot be read: this machine has too little"):
        decode_index(data)
