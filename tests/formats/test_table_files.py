"""Table rows in separate files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flightedl.adapters.storage import FsspecFiles
from flightedl.client.tables.ids import found_ids
from flightedl.domain.model.optimizers import SGD, Adam, Optimizer
from flightedl.domain.tables.optimizers import RowAdagrad
from flightedl.domain.tables.spec import TableSpec
from flightedl.errors import DataError
from flightedl.formats import table_files
from flightedl.formats.row_batches import StoredRows
from flightedl.formats.table_files import as_kept, read_table_file, require_table_file, table_file
from flightedl.kernels.half_precision import shortened

IDS = np.array([5, 7, 2**63 + 9, 0], np.uint64)


def stored(spec: TableSpec, values: np.ndarray) -> StoredRows:
    slots = sum(spec.dim if slot.per_element else 1 for slot in spec.optimizer.slots)
    count = len(values)
    numbers = np.arange(count, dtype=np.uint32)
    slot_values = np.arange(count * slots, dtype=np.float32).reshape(count, slots)
    return StoredRows(9, 0, "rows:float32", IDS[:count], numbers, numbers, numbers, slot_values, values)


def read(path: Path, spec: TableSpec) -> Any:
    found = list(read_table_file(FsspecFiles(), str(path), spec))
    assert len(found) == 1
    return found[0]


@pytest.mark.parametrize("optimizer", [SGD(1.0), RowAdagrad(lr=0.1), Adam(lr=0.1)], ids=lambda one: type(one).__name__)
@pytest.mark.parametrize("has_slots", [False, True])
def test_rows_survive_writing_and_reading(tmp_path: Path, optimizer: Optimizer, has_slots: bool) -> None:
    spec = TableSpec("t", 3, optimizer)
    rows = stored(spec, np.arange(12, dtype=np.float32).reshape(4, 3))
    path = tmp_path / "t.parquet"
    path.write_bytes(
        b"".join(table_file(spec, [rows, stored(spec, np.empty((0, 3), np.float32))], has_slots=has_slots))
    )
    require_table_file(FsspecFiles(), str(path), spec)
    found = read(path, spec)
    assert found.ids.tolist() == rows.ids.tolist()
    np.testing.assert_array_equal(found.values, rows.values)
    if has_slots:
        np.testing.assert_array_equal(found.slots, rows.slots)
        assert found.updates.tolist() == [0, 1, 2, 3]
    else:
        assert found.slots is None
    table = pq.read_table(path)
    assert table["id"].to_pylist() == [5, 7, -(2**63) + 9, 0]
    other = read(path, TableSpec("t", 3, Adam(lr=1.0, beta1=0.5) if isinstance(optimizer, SGD) else SGD(1.0)))
    assert other.slots is None, "slots of another optimizer are dropped"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rows_of_16_bits_survive_writing_and_reading(tmp_path: Path, dtype: Any) -> None:
    spec = TableSpec("t", 3, SGD(1.0), dtype=dtype)
    values = np.array([[1.5, -2.25, 1e-3], [0.1, 3.0, 7.0]], np.float32)
    bits = shortened(values.reshape(-1), dtype).reshape(2, 3)
    path = tmp_path / "t.parquet"
    path.write_bytes(b"".join(table_file(spec, [stored(spec, bits)])))
    np.testing.assert_array_equal(as_kept(read(path, spec).values, dtype), bits)


def test_files_of_other_libraries_are_read(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    columns = {"name": ["a", "b"], "values": [[1, 2], [3.5, 4]], "id": pa.array([-1, 8], pa.int16())}
    pq.write_table(pa.table(columns), path)
    found = read(path, TableSpec("t", 2, RowAdagrad(lr=1.0)))
    assert found.ids.tolist() == [2**64 - 1, 8]
    assert found.values.tolist() == [[1, 2], [3.5, 4]]


def test_strings_are_converted_to_the_same_ids_as_in_a_lookup(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"id": ["a", "b"], "values": [[1.0, 2.0], [3.5, 4.0]]}), path)
    found = read(path, TableSpec("t", 2, SGD(1.0)))
    assert found.ids.tolist() == found_ids("t", ["a", "b"]).ids.tolist()


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        ({"id": [1]}, "no column 'values'"),
        ({"values": [[1.0, 2.0]]}, "no column 'id'"),
        ({"id": [1.5], "values": [[1.0, 2.0]]}, "ids of type double"),
        ({"id": [1], "values": [1.0]}, "values of type double"),
        ({"id": [1], "values": [["a"]]}, "must be lists of floats"),
        ({"id": [1], "values": pa.array([[1.0, 2.0, 3.0]], pa.list_(pa.float32(), 3))}, "rows of 3 values.*dim 2"),
        ({"id": [1, 2], "values": [[1.0], [1.0, 2.0, 3.0]]}, "a row without 2 values"),
        ({"id": [1, None], "values": [[1.0, 2.0]] * 2}, "nulls"),
        ({"id": [1, 4], "values": [[1.0, 2.0], [1.0, float("nan")]]}, "NaN or infinity in the row of id 4"),
    ],
)
def test_a_file_without_rows_raises_one_sentence(tmp_path: Path, columns: dict[str, Any], text: str) -> None:
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table(columns), path)
    with pytest.raises(DataError, match=text):
        list(read_table_file(FsspecFiles(), str(path), TableSpec("t", 2, SGD(1.0))))


def test_a_missing_or_unreadable_file_raises_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    with pytest.raises(DataError, match=r"t\.parquet"):
        require_table_file(FsspecFiles(), str(path), TableSpec("t", 2, SGD(1.0)))
    path.write_bytes(b"PAR1 and nothing else")
    with pytest.raises(DataError, match="corrupt"):
        require_table_file(FsspecFiles(), str(path), TableSpec("t", 2, SGD(1.0)))


def test_rows_of_many_groups_are_written_once_and_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_files, "_ROWS_A_GROUP", 4)
    spec = TableSpec("t", 2, SGD(1.0))
    some = [
        StoredRows(
            9,
            0,
            "rows:float32",
            np.arange(start, start + 3, dtype=np.uint64),
            *(np.ones(3, np.uint32) for _ in range(3)),
            np.zeros((3, 0), np.float32),
            np.full((3, 2), start, np.float32),
        )
        for start in range(0, 30, 3)
    ]
    path = tmp_path / "t.parquet"
    path.write_bytes(b"".join(table_file(spec, some)))
    table = pq.read_table(path)
    assert table["id"].to_pylist() == [*range(30)]
    assert [each[0] for each in table["values"].to_pylist()] == [3 * (number // 3) for number in range(30)]
