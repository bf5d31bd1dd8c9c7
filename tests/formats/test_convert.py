from __future__ import annotations

import base64
import json
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flightedl.errors import DataError, UnavailableError, UsageError
from flightedl.formats.convert import Converted, ConvertProgress, Target, convert
from flightedl.formats.dataset_spec import DatasetSpec
from flightedl.formats.index import build_index
from flightedl.formats.layout import TaskLayout
from flightedl.formats.reader import read_task
from flightedl.formats.registry import FORMATS
from flightedl.testing.memory import MemoryFiles, MemoryStorage

TABLE = pa.table({"n": range(100), "t": [f"text {number}" for number in range(100)]})


def run(world: Any, target: Target, source: str = "*.parquet", **options: Any) -> Converted:
    spec = options.pop("spec", DatasetSpec((source,)))
    return convert(world.files, build_index(world.files, spec), spec, world.storage, target, **options)


def contents(storage: MemoryStorage, names: tuple[str, ...], **options: Any) -> list[dict[str, Any]]:
    files = MemoryFiles({name: storage.files[name] for name in names})
    spec = DatasetSpec(names, batch_size=1000)
    index = build_index(files, spec)
    layout = TaskLayout(index, 1000, chunks_per_task=len(index))
    batches = list(read_task(files, layout.chunks_of(0), spec, None, 0, 0, schema=index.schema, **options))
    return [row for batch in batches for row in batch.to_pylist()]


COLUMNAR = [name for name in FORMATS if name != "tar"]


@pytest.mark.parametrize("source", COLUMNAR)
@pytest.mark.parametrize("target", COLUMNAR)
def test_every_format_converts_to_every_other(world: Any, source: str, target: str) -> None:
    world.write("a.parquet", TABLE, "parquet", 30)
    first = run(world, Target("one", source, 1, 17))
    middle = MemoryFiles({name: world.storage.files[name] for name in first.names})
    spec = DatasetSpec(first.names)
    decode = json.loads if source == "recordio" and target != "recordio" else None
    index = build_index(middle, spec)
    second = convert(middle, index, spec, world.storage, Target("two", target, 3, 17), decode=decode)
    assert [name.partition(".")[0] for name in second.names] == [f"two-0000{shard}-of-00003" for shard in range(3)]
    back = contents(world.storage, second.names, decode=json.loads if target == "recordio" else None)
    assert back == TABLE.to_pylist()


@pytest.mark.parametrize("target", [name for name in FORMATS if name != "recordio"])
def test_tar_stores_columns_without_bytes_as_one_json_object(world: Any, target: str) -> None:
    world.write("a.parquet", TABLE, "parquet", 30)
    first = run(world, Target("one", "tar", 2, 17))
    middle = MemoryFiles({name: world.storage.files[name] for name in first.names})
    spec = DatasetSpec(first.names)
    second = convert(middle, build_index(middle, spec), spec, world.storage, Target("two", target, 3, 17))
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
    reports: list[ConvertProgress] = []
    done = run(world, Target("p/x", "arrow", shards, per_chunk), progress=reports.append)
    assert len(done.names) == shards
    assert contents(world.storage, done.names) == TABLE.slice(0, records).to_pylist()
    assert [step.records for step in reports] == sorted(step.records for step in reports)
    assert reports[-1] == ConvertProgress(shards, shards, records, records)
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
