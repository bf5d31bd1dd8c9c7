from __future__ import annotations

import base64
import datetime as dt
import decimal
import json
import math
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flightedl.errors import DataError, LossyError, UnavailableError, UsageError
from flightedl.formats.convert import Converted, Target, convert
from flightedl.formats.dataset_spec import DatasetSpec
from flightedl.formats.index import build_index
from flightedl.formats.layout import TaskLayout
from flightedl.formats.reader import read_task
from flightedl.formats.registry import FORMATS
from tests.support.memory import MemoryFiles, MemoryStorage

TABLE = pa.table({"n": range(100), "t": [f"text {number}" for number in range(100)]})


def run(world: Any, target: Target, source: str = "*.parquet", **options: Any) -> Converted:
    spec = options.pop("spec", DatasetSpec((source,)))
    return convert(world.files, build_index(world.files, spec), spec, world.storage, target, **options)


def contents(
    storage: MemoryStorage, names: tuple[str, ...], types: tuple[tuple[str, str], ...] = (), **options: Any
) -> list[dict[str, Any]]:
    files = MemoryFiles({name: storage.files[name] for name in names})
    spec = DatasetSpec(names, batch_size=1000, types=types)
    index = build_index(files, spec)
    layout = TaskLayout(index, 1000, records_per_task=10**9)
    batches = list(read_task(files, layout.chunks_of(0), spec, None, 0, 0, schema=index.schema, **options))
    return [row for batch in batches for row in batch.to_pylist()]


SPARSE = ("lines", "svmlight", "slots")
COLUMNAR = [name for name in FORMATS if name not in ("tar", *SPARSE)]


@pytest.mark.parametrize("source", COLUMNAR)
@pytest.mark.parametrize("target", COLUMNAR)
def test_every_format_converts_to_every_other(world: Any, source: str, target: str) -> None:
    world.write("a.parquet", TABLE, "parquet", 30)
    first = run(world, Target("one", source, 1, 17))
    middle = MemoryFiles({name: world.storage.files[name] for name in first.names})
    form = "recordio-json" if source == "recordio" and target != "recordio" else ""
    text = (("t", "string"),)  # TFRecord has bytes only.
    spec = DatasetSpec(first.names, form, types=text if source == "tfrecord" else ())
    index = build_index(middle, spec)
    second = convert(middle, index, spec, world.storage, Target("two", target, 3, 17))
    assert [name.partition(".")[0] for name in second.names] == [f"two-0000{shard}-of-00003" for shard in range(3)]
    back = contents(
        world.storage,
        second.names,
        text if target == "tfrecord" else (),
        decode=json.loads if target == "recordio" else None,
    )
    assert back == TABLE.to_pylist()


@pytest.mark.parametrize("target", [name for name in FORMATS if name not in ("recordio", *SPARSE)])
def test_tar_stores_columns_without_bytes_as_one_json_object(world: Any, target: str) -> None:
    world.write("a.parquet", TABLE, "parquet", 30)
    first = run(world, Target("one", "tar", 2, 17))
    middle = MemoryFiles({name: world.storage.files[name] for name in first.names})
    spec = DatasetSpec(first.names)
    is_lossy = target in ("csv", "tsv", "jsonl")  # They have no bytes.
    second = convert(
        middle, build_index(middle, spec), spec, world.storage, Target("two", target, 3, 17), is_lossy=is_lossy
    )
    assert second.changed == (("json",) if is_lossy else ())
    back = contents(world.storage, second.names)
    texts = [base64.b64decode(row["json"]) if target == "jsonl" else row["json"] for row in back]
    assert [json.loads(text) for text in texts] == TABLE.to_pylist()
    assert [int(row["__key__"]) for row in back] == [*range(50), *range(50)]


@pytest.mark.slow
@given(st.integers(1, 40), st.integers(1, 60), st.integers(1, 12), st.integers(1, 30))
@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
def test_shards_hold_equal_shares_of_each_record_once(
    world: Any, records: int, shards: int, rows: int, per_chunk: int
) -> None:
    world.storage.files.clear()
    world.write("a.parquet", TABLE.slice(0, records), "parquet", rows)
    reports: list[tuple[int, int]] = []
    done = run(world, Target("p/x", "arrow", shards, per_chunk), progress=lambda *counts: reports.append(counts))
    assert len(done.names) == shards
    assert contents(world.storage, done.names) == TABLE.slice(0, records).to_pylist()
    assert reports == sorted(reports)
    assert reports[-1] == (records, records)
    assert done.size_bytes == sum(len(world.storage.files[name]) for name in done.names)


def test_an_interrupted_conversion_resumes(world: Any) -> None:
    world.write("a.parquet", TABLE, "parquet", 10)
    target = Target("x", "csv", 5, 10)
    result = run(world, target)
    expected = {name: world.storage.files[name] for name in result.names}
    world.storage.files.clear()
    # The third publication is the second shard.
    world.storage.plan.fail_at("publish:end", 3, UnavailableError("the store is gone"))
    with pytest.raises(UnavailableError):
        run(world, target)
    assert [name for name in result.names if name in world.storage.files] == list(result.names[:1])
    again = run(world, target)
    assert again.kept == 1
    assert {name: world.storage.files[name] for name in again.names} == expected
    assert run(world, target).kept == 5


def test_a_resumed_conversion_takes_types_from_all_shards(world: Any) -> None:
    world.write("a.parquet", pa.table({"t": ["a", "b", "1", "2"]}), "parquet")
    world.storage.plan.fail_at("publish:end", 3, UnavailableError("the store is gone"))
    with pytest.raises(UnavailableError):
        run(world, Target("x", "csv", 2))
    assert run(world, Target("x", "csv", 2)).kept == 1


@pytest.mark.parametrize("error", [LossyError, DataError])
def test_shards_are_replaced_only_if_the_conversion_succeeds(world: Any, error: type[Exception]) -> None:
    world.write("a.parquet", pa.table({"n": [1, 2]}), "parquet")
    run(world, Target("x", "csv", 2))
    before = dict(world.storage.files)
    if error is LossyError:
        world.write("a.parquet", pa.table({"n": [1.0, math.nan]}), "parquet")
        with pytest.raises(LossyError):
            run(world, Target("x", "csv", 2), overwrite=True)
    else:
        world.write("a.arrow", pa.table({"n": ["1", "x"]}), "arrow")
        spec = DatasetSpec(("a.arrow",), types=(("n", "int64"),))
        with pytest.raises(DataError, match="record 2"):
            run(world, Target("x", "csv", 2), spec=spec, overwrite=True)
    assert world.storage.files == before


def test_another_conversion_is_not_mixed_in(world: Any) -> None:
    world.write("a.parquet", TABLE, "parquet", 10)
    run(world, Target("x", "csv", 2))
    with pytest.raises(UsageError, match=r"x-00000-of-00002\.csv exists already, from another source"):
        run(world, Target("x", "csv", 3))
    world.write("a.parquet", TABLE.slice(1), "parquet", 10)
    with pytest.raises(UsageError, match="exists already"):
        run(world, Target("x", "csv", 2))
    done = run(world, Target("x", "csv", 3), overwrite=True)
    shards = [name for name in world.storage.files if name.startswith("x-")]
    assert sorted(shards) == list(done.names)


@pytest.mark.parametrize("deleted", [0, 1])
def test_shards_of_a_replaced_conversion_are_never_kept(world: Any, deleted: int) -> None:
    """The process dies while it deletes the shards."""
    target = Target("x", "csv", 2, 10)
    world.write("a.parquet", TABLE, "parquet", 10)
    run(world, target)
    world.write("a.parquet", TABLE.slice(1), "parquet", 10)
    world.storage.plan.fail_at("delete", deleted + 1, UnavailableError("the store is gone"))
    with pytest.raises(UnavailableError):
        run(world, target, overwrite=True)
    with pytest.raises(UsageError, match="exists already"):
        run(world, target)
    assert [row["n"] for row in contents(world.storage, run(world, target, overwrite=True).names)] == list(
        range(1, 100)
    )


def test_columns_and_filter_are_applied(world: Any) -> None:
    world.write("a.parquet", TABLE, "parquet", 10)
    spec = DatasetSpec(("a.parquet",), columns=("t",), filter=(("n", "<", 30),))
    done = run(world, Target("x", "parquet", 4), spec=spec)
    assert contents(world.storage, done.names) == TABLE.slice(0, 30).select(["t"]).to_pylist()


def test_columns_that_a_format_cannot_store_are_reported(world: Any) -> None:
    world.write("a.parquet", pa.table({"x": [[1, 2], [3]]}), "parquet")
    with pytest.raises(DataError, match="cannot be written as csv"):
        run(world, Target("x", "csv"))
    assert [name for name in world.storage.files if name.startswith("x-")] == []
    with pytest.raises(UsageError, match="number of shards"):
        Target("x", "csv", 0)
    with pytest.raises(UsageError, match="no format 'xml'"):
        Target("x", "xml")


@pytest.mark.parametrize(
    ("target", "changed", "also"),
    [
        ("parquet", "", ""),
        ("arrow", "", ""),
        ("csv", "bytes nan time", "digits"),
        ("jsonl", "bytes date dec dur map nan time ts", ""),
        ("recordio", "bytes date dec dur map nan time ts", ""),
    ],
)
def test_a_format_that_changes_values_ends_the_conversion_with_nothing_written(
    world: Any, target: str, changed: str, also: str
) -> None:
    columns = {
        "b": pa.array([True]),
        "bytes": pa.array([b"x"]),
        "date": pa.array([dt.date(2024, 1, 1)]),
        "dec": pa.array([decimal.Decimal("1.50")]),
        "digits": pa.array(["501"]),
        "dur": pa.array([dt.timedelta(1)]),
        "f": pa.array([1.0]),
        "f32": pa.array([0.1], pa.float32()),
        "i32": pa.array([1], pa.int32()),
        "list": pa.array([[1, 2]]),
        "map": pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64())),
        "nan": pa.array([math.nan]),
        "null": pa.array([None], pa.string()),
        "struct": pa.array([{"a": 1}]),
        "time": pa.array([dt.time(1, 2)]),
        "ts": pa.array([1], pa.timestamp("us")),
        "u64": pa.array([2**64 - 1], pa.uint64()),
    }
    if target == "csv":
        columns = {
            name: column for name, column in columns.items() if name not in ("dec", "dur", "list", "map", "struct")
        }
    world.write("a.parquet", pa.table({**columns, "k": [1]}), "parquet")
    if changed:
        names = ", ".join(repr(name) for name in changed.split())
        with pytest.raises(DataError, match=f"{target} changes the values of {names}, so nothing was written"):
            run(world, Target("x", target))
        assert not world.storage.files
    done = run(world, Target("x", target), is_lossy=True)
    assert done.changed == (*changed.split(), *also.split())


def test_text_that_would_become_numbers_only_as_a_whole_is_found_after_the_last_shard(world: Any) -> None:
    world.write("a.parquet", pa.table({"t": ["1", "2", "3", "a"]}), "parquet")
    assert run(world, Target("x", "csv", 4)).changed == ()
    world.write("b.parquet", pa.table({"t": ["1", "2"]}), "parquet")
    with pytest.raises(DataError, match="csv changes the values of 't'"):
        run(world, Target("y", "csv", 2), "b.parquet")
    assert not [name for name in world.storage.files if "y" in name]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_a_split_copies_text_records(world: Any, end: str) -> None:
    lines = ["00501,1.50,NA", '7,"a""b",', "8,2024-01-01T00:00:00Z, x "]
    world.put("a.csv", end.join(["zip,price,note", *lines[:2], "", lines[2]]).encode())
    spec = DatasetSpec(("a.csv",), text_chunk_bytes=8)
    target = Target("x", "csv", 2)
    done = convert(world.files, build_index(world.files, spec), spec, world.storage, target, is_split=True)
    found = [world.storage.files[name].decode() for name in done.names]
    assert [part.splitlines()[0] for part in found] == ["zip,price,note"] * 2
    assert [line for part in found for line in part.splitlines()[1:] if line] == lines


def test_a_split_keeps_the_schema_of_its_source(world: Any) -> None:
    schema = pa.schema(
        [
            pa.field("s", pa.string_view(), nullable=False),
            pa.field("d", pa.dictionary(pa.int8(), pa.string())),
            pa.field("l", pa.large_list(pa.field("item", pa.int32(), nullable=False))),
        ],
        {b"origin": b"here"},
    )
    table = pa.table({"s": ["a", "b", "a"], "d": ["x", "y", "x"], "l": [[1], [], None]}, schema)
    for name in ("arrow", "parquet"):
        world.write(f"a.{name}", table, name, 2)
        spec = DatasetSpec((f"a.{name}",))
        target = Target(name, name, 1)
        done = convert(world.files, build_index(world.files, spec), spec, world.storage, target, is_split=True)
        data = pa.BufferReader(world.storage.files[done.names[0]])
        found = pa.ipc.open_file(data).read_all() if name == "arrow" else pq.read_table(data)
        assert found.to_pylist() == table.to_pylist()
        if name == "arrow":
            assert found.schema.equals(schema, check_metadata=True)
        else:
            assert found.schema.equals(pq.read_table(pa.BufferReader(world.files.contents["a.parquet"])).schema)
