"""Rows of tables in files of other programs: what is read, what is chosen, and what is rejected in one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flightedl.adapters.storage import FsspecFiles
from flightedl.client.tables.ids import found_ids
from flightedl.domain.model.optimizers import SGD, Adam
from flightedl.domain.tables.evict import Evict
from flightedl.domain.tables.optimizers import RowAdagrad
from flightedl.domain.tables.placement import BUCKETS, buckets_of
from flightedl.domain.tables.spec import TableSpec
from flightedl.errors import DataError
from flightedl.formats.dataset_spec import DatasetSpec
from flightedl.formats.row_sources import row_table, rows_of
from flightedl.formats.table_files import FileRows

SPEC = TableSpec("t", 2, SGD(1.0))
IDS, VALUES = np.array([7, -1, 2**40]), np.array([[0.1, 2], [3, -4], [5e-7, 6]], np.float32)
NONE = np.empty(0, np.uint64)


def read(url: object, kind: str = "", spec: TableSpec = SPEC, **types: str) -> FileRows:
    content = row_table(FsspecFiles(), DatasetSpec((str(url),), kind, types=tuple(types.items())))
    rows, counts = rows_of(str(url), content, spec, NONE, has_slots=True, keeps_existing=False)
    assert counts == {"imported": len(content), "replaced": 0, "skipped_existing": 0, "skipped_full": 0}
    return rows[0]


def chosen(content: pa.Table, spec: TableSpec, existing: Any = NONE, **how: bool) -> tuple[list[int], dict[str, int]]:
    rows, counts = rows_of("f", content, spec, np.asarray(existing, np.uint64), **{"has_slots": True, **how})
    return [each for some in rows for each in some.ids.tolist()], counts


def lines(delimiter: str, ids: list[str], end: str = "\n") -> str:
    return "".join(delimiter.join([one, *map(repr, row)]) + end for one, row in zip(ids, VALUES.tolist(), strict=True))


def test_columns_of_single_values_replace_a_column_of_lists(tmp_path: Path) -> None:
    columns = {"id": IDS, "1": VALUES[:, 1], "0": VALUES[:, 0].astype(np.float64)}
    for part, rows in (("a", slice(0, 1)), ("b", slice(1, 3))):
        pq.write_table(pa.table({name: column[rows] for name, column in columns.items()}), tmp_path / f"{part}.parquet")
    found = read(tmp_path / "*.parquet")
    np.testing.assert_array_equal(found.ids, IDS.view(np.uint64))
    np.testing.assert_array_equal(found.values, VALUES)


def test_a_gap_between_columns_of_single_values_is_not_closed(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": IDS, "0": VALUES[:, 0], "2": VALUES[:, 1]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="has rows of 1 values, and table 't' has dim 2"):
        read(tmp_path / "a.parquet")
    with pytest.raises(DataError, match="an unknown column '2'"):
        read(tmp_path / "a.parquet", "", TableSpec("t", 1, SGD(1.0)))


def test_arrays_are_read_with_their_slots(tmp_path: Path) -> None:
    arrays: dict[str, Any] = {"ids": IDS, "values": VALUES, "updates": [1, 2, 3], "square_sum": np.float32([1, 4, 9])}
    np.savez(tmp_path / "a.npz", **arrays)
    (tmp_path / "a").mkdir()
    for name, array in arrays.items():
        np.save(tmp_path / "a" / f"{name}.npy", array)
    for place in ("a", "a.npz"):
        found = read(tmp_path / place, "numpy", TableSpec("t", 2, RowAdagrad(lr=1.0)))
        np.testing.assert_array_equal(found.values, VALUES)
        assert found.updates is not None
        assert found.slots is not None
        assert (found.updates.tolist(), found.slots.tolist()) == ([1, 2, 3], [[1.0], [4.0], [9.0]])
    np.savez(tmp_path / "b.npz", ids=["x", "y", "z"], values=VALUES)
    assert read(tmp_path / "b.npz", "numpy").ids.tolist() == found_ids("t", ["x", "y", "z"]).ids.tolist()


@pytest.mark.parametrize(("delimiter", "end"), [(" ", "\n"), (" ", " \n"), ("\t", "\n"), (",", "\r\n")])
@pytest.mark.parametrize("header", ["", "3 2\n"], ids=["plain", "word2vec"])
def test_lines_are_read_exactly(tmp_path: Path, delimiter: str, end: str, header: str) -> None:
    path = tmp_path / "v.txt"
    path.write_text(header + lines(delimiter, ["7", "-1", str(2**40)], end), newline="")
    found = read(path, "text")
    np.testing.assert_array_equal(found.ids, IDS.view(np.uint64))
    np.testing.assert_array_equal(found.values, VALUES)


def test_texts_have_the_ids_that_pushes_give_them(tmp_path: Path) -> None:
    path = tmp_path / "v.txt"
    texts: list[Any] = ['"', "naïve", b"\xff\xfe"]
    raw = [each if isinstance(each, bytes) else each.encode() for each in texts]
    path.write_bytes(b"".join(b"%b 1 2\n" % each for each in raw))
    assert read(path, "text").ids.tolist() == found_ids("t", texts).ids.tolist()
    path.write_text("2019 1 2\nthe 3 4\n")
    with pytest.raises(DataError, match=r"invalid value 'the'.*is set by --types id=string or id=uint64"):
        read(path, "text")
    assert read(path, "text", id="string").ids.tolist() == found_ids("t", ["2019", "the"]).ids.tolist()
    path.write_text(f"{2**64 - 1} 1 2\n3 4 5\n")
    assert read(path, "text", id="uint64").ids.tolist() == [2**64 - 1, 3]
    path.write_text("3 1 2\n4 1\n")
    with pytest.raises(DataError, match="a line of another form: CSV parse error: Expected 3 columns, got 2: 4 1"):
        read(path, "text")


def table(ids: list[Any], **more: Any) -> pa.Table:
    return pa.table({"id": ids, "values": [[1.0, 2.0]] * len(ids), **more})


ADAM = TableSpec("t", 2, Adam(lr=1.0))
STATE: dict[str, Any] = {"updates": [1], "average": [[1.0, 1.0]], "square_average": [[1.0, 1.0]]}


@pytest.mark.parametrize(
    ("content", "spec", "text"),
    [
        (table([1, 2, 1, 2, 3]), SPEC, r"f has several rows of the same id, for example of \[1, 2\]"),
        (table(["a", "b", "b"]), SPEC, r"of \['b'\]: keep one row of each id"),
        (table([1], frequency=[3]), SPEC, "f has an unknown column 'frequency', but the state of SGD is updates"),
        (
            table([1], average=[[1.0, 1.0]]),
            ADAM,
            "no column 'square_average', but the state of Adam is updates, average",
        ),
        (table([1], **{**STATE, "average": [1.0]}), ADAM, "f has double in the column 'average'.*add --no-slots"),
        (table([1], **{**STATE, "updates": [-1]}), ADAM, "updates that are no counts"),
        (table([1], **{**STATE, "average": [["a", "b"]]}), ADAM, "other values than numbers"),
        (table([1], **{**STATE, "average": [[1.0, float("inf")]]}), ADAM, "NaN or infinity in the row of id 1"),
        (table([1]), TableSpec("t", 3, SGD(1.0)), "a row without 3 values, which is the dim of table 't'"),
        (pa.table({"id": [1], "values": [[1, 2]]}), SPEC, "must be lists of floats"),
        (pa.table({"id": [1], "values": [[1e39, 2]]}), SPEC, "NaN or infinity"),
    ],
)
def test_rows_that_do_not_fit_are_rejected(content: pa.Table, spec: TableSpec, text: str) -> None:
    with pytest.raises(DataError, match=text), np.errstate(over="ignore"):
        chosen(content, spec, keeps_existing=False)


def test_slots_and_other_columns_can_be_ignored() -> None:
    found, _ = chosen(table([1], frequency=[3]), ADAM, has_slots=False, keeps_existing=False)
    assert found == [1]


def test_files_without_arrays_or_with_arrays_of_other_lengths_are_rejected(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", ids=IDS, values=VALUES[:2])
    with pytest.raises(DataError, match="one row per id, but there are ids of 3, values of 2"):
        read(tmp_path / "a.npz", "numpy")
    np.savez(tmp_path / "b.npz", ids=np.array([None], object))
    with pytest.raises(DataError, match=r"b\.npz is corrupt, its arrays: Object arrays cannot be loaded"):
        read(tmp_path / "b.npz", "numpy")
    with pytest.raises(DataError, match="no file matches"):
        read(tmp_path / "none", "numpy")


def test_existing_rows_are_replaced_or_kept() -> None:
    found, counts = chosen(table([1, 2, 3]), SPEC, [3, 9, 1], keeps_existing=False)
    assert (found, counts["replaced"], counts["skipped_existing"]) == ([1, 2, 3], 2, 0)
    found, counts = chosen(table([1, 2, 3]), SPEC, [3, 9, 1], keeps_existing=True)
    assert (found, counts["replaced"], counts["skipped_existing"]) == ([2], 0, 2)


@pytest.mark.parametrize("keeps_existing", [False, True])
def test_new_ids_get_rows_until_their_bucket_is_full(keeps_existing: bool) -> None:
    """Rows of existing ids do not count as new, and the first ones of a file are preferred."""
    limit, rng = 3, np.random.default_rng(1)
    spec = TableSpec("t", 2, SGD(1.0), evict=Evict(max_rows=limit * BUCKETS))
    ids = rng.permutation(6_000)
    existing = np.concatenate([ids[::7], np.arange(10_000, 11_000)]).astype(np.uint64)
    found, counts = chosen(table(ids.tolist()), spec, existing, keeps_existing=keeps_existing)
    rows = np.bincount(buckets_of(existing, spec.salt), minlength=BUCKETS)
    expected, full, known = [], 0, set(ids[::7].tolist())
    for one, bucket in zip(ids.tolist(), buckets_of(ids.astype(np.uint64), spec.salt).tolist(), strict=True):
        if one in known:
            expected += [] if keeps_existing else [one]
        elif rows[bucket] < limit:
            rows[bucket] += 1
            expected.append(one)
        else:
            full += 1
    assert (found, counts["skipped_full"]) == (expected, full)
    assert full > 1_000
