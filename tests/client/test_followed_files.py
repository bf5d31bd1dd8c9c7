"""A copy in Parquet files: DuckDB and Polars find the present rows in a base and its increments."""

from __future__ import annotations

import uuid
from pathlib import Path

import duckdb
import numpy as np
import polars as pl
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flightedl.adapters.storage import open_storage
from flightedl.client.following.files import ParquetCopy, Rows
from flightedl.domain.model.parameters import ParameterSpec
from flightedl.errors import UsageError
from flightedl.messages.feed import Position
from tests.support.faults import FaultPlan, InjectedFault
from tests.support.memory import MemoryStorage

#: id -> the only element of its row.
TABLES = st.dictionaries(st.integers(-3, 5), st.sampled_from([0.0, 1.5, -2.5, np.nan]), max_size=8)
PRESENT = """
    SELECT id, arg_max("values", number) AS "values" FROM read_parquet('{files}')
    WHERE base = (SELECT max(base) FROM read_parquet('{files}'))
    GROUP BY id HAVING NOT arg_max(removed, number)
"""


def rows_of(table: dict[int, float]) -> Rows:
    return Rows.of(np.array(list(table), np.int64), np.array(list(table.values()), np.float32).reshape(-1, 1))


def bits(table: dict[int, float]) -> dict[int, bytes]:
    return {key: np.float32(value).tobytes() for key, value in table.items()}


def by_duckdb(folder: Path, name: str) -> dict[int, float]:
    with duckdb.connect() as database:
        found = database.sql(PRESENT.format(files=folder / name / "*.parquet")).fetchall()
    return {key: values[0] for key, values in found}


def by_polars(folder: Path, name: str) -> dict[int, float]:
    files = pl.scan_parquet(folder / name / "*.parquet")
    newest = files.filter(pl.col("base") == pl.col("base").max()).sort("number").group_by("id").last()
    present = newest.filter(~pl.col("removed")).collect()
    return {key: values[0] for key, values in zip(present["id"], present["values"], strict=True)}


def write(copy: ParquetCopy, table: dict[int, float]) -> None:
    position = Position(life=1, generation=2, placement=3, number=copy.written.number + 5)
    copy.write([], {}, {"t": rows_of(table)}, {0: position}, 7.0)


@given(st.lists(st.tuples(TABLES, st.booleans()), min_size=1, max_size=7), st.integers(0, 3))
def test_all_present_rows_are_read_and_no_removed_ones(
    tmp_path_factory: pytest.TempPathFactory, states: list[tuple[dict[int, float], bool]], most: int
) -> None:
    """``states``: the rows of each copy, and True if another process then continues."""
    folder = tmp_path_factory.mktemp("copy")
    copy = ParquetCopy(str(folder), "job", most)
    for table, is_ended in states:
        write(copy, table)
        assert bits(by_duckdb(folder, "t")) == bits(by_polars(folder, "t")) == bits(table)
        numbers = copy.written.tables["t"].numbers
        assert sorted(int(path.stem) for path in (folder / "t").glob("*.parquet")) == numbers
        assert len(numbers) <= 1 + most
        if is_ended:
            copy = ParquetCopy(str(folder), "job", most)
    assert ParquetCopy(str(folder), "job", most).written == copy.written
    assert copy.written.number == len(states)
    assert copy.written.positions[0].number == len(states) + 4


def test_an_increment_has_only_changed_rows_until_a_base_is_smaller(tmp_path: Path) -> None:
    copy = ParquetCopy(str(tmp_path), "job", 20)
    table = dict.fromkeys(range(10), 1.0)
    write(copy, table)
    write(copy, table)
    assert copy.written.tables["t"].numbers == [1]
    del table[3]
    write(copy, table | {4: 2.0, 20: 0.5})
    increment = pq.read_table(tmp_path / "t" / "00000003.parquet").to_pylist()
    found = {row["id"]: (row["values"], row["removed"], row["number"], row["base"]) for row in increment}
    assert found == {3: ([0.0], True, 3, 1), 4: ([2.0], False, 3, 1), 20: ([0.5], False, 3, 1)}
    write(copy, dict.fromkeys(range(10), 4.0))
    assert copy.written.tables["t"].numbers == [4]
    assert [path.name for path in (tmp_path / "t").iterdir()] == ["00000004.parquet"]


def test_files_of_a_copy_that_was_not_completed_are_deleted(tmp_path: Path) -> None:
    write(ParquetCopy(str(tmp_path), "job", 20), {1: 1.0, 2: 1.0})
    index = (tmp_path / "copy.json").read_bytes()
    write(ParquetCopy(str(tmp_path), "job", 20), {1: 5.0, 2: 1.0})
    (tmp_path / "copy.json").write_bytes(index)
    assert by_duckdb(tmp_path, "t") == {1: 5.0, 2: 1.0}
    copy = ParquetCopy(str(tmp_path), "job", 20)
    assert by_duckdb(tmp_path, "t") == {1: 1.0, 2: 1.0}
    write(copy, {1: 1.0})
    assert by_duckdb(tmp_path, "t") == {1: 1.0}


def test_a_copy_is_readable_after_its_writer_died_at_any_point(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = MemoryStorage()
    monkeypatch.setattr("flightedl.client.following.files.open_storage", lambda _: storage)
    before, table, died, point = {1: 1.0}, {2: 2.0}, True, 0
    while died:
        point += 1
        storage.files.clear()
        storage.plan = FaultPlan()
        # Each copy is a base, which replaces the files of the previous copy.
        copy = ParquetCopy("", "job", 0)
        write(copy, before)
        storage.plan = FaultPlan()
        storage.plan.fail_at_step(point)
        try:
            write(copy, table)
        except InjectedFault:
            pass
        else:
            died = False
        storage.plan = FaultPlan()
        rows = ParquetCopy("", "job", 0)._rows["t"]
        assert dict(zip(rows.ids.tolist(), rows.values[:, 0].tolist(), strict=True)) in (
            (table,) if not died else (before, table)
        )
    assert point > 5


def test_a_table_with_another_size_of_rows_gets_a_base(tmp_path: Path) -> None:
    write(ParquetCopy(str(tmp_path), "job", 20), {1: 1.0})
    copy = ParquetCopy(str(tmp_path), "job", 20)
    copy.write([], {}, {"t": Rows.of(np.array([1]), np.ones((1, 2), np.float32))}, {}, 0.0)
    assert copy.written.tables["t"].numbers == [2]


def test_copies_are_written_to_any_storage_with_their_parameters() -> None:
    url = f"memory://{uuid.uuid4().hex}"
    specs = [ParameterSpec("a/b", (2, 3)), ParameterSpec("half", (2,), "bfloat16")]
    arrays = {spec.name: np.ones(spec.shape, np.float32) for spec in specs}
    ParquetCopy(url, "job", 20).write(specs, arrays, {"a/b": rows_of({1: 1.0})}, {}, 0.0)
    names = [file.name for file in open_storage(url).list("")]
    assert names == ["a%2Fb.parquet", "a%2Fb/00000001.parquet", "copy.json", "half.parquet"]
    with pytest.raises(UsageError, match="has a copy of the job 'job': choose another place for 'other'"):
        ParquetCopy(url, "other", 20)
