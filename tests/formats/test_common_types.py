"""The common type of stored columns: the same values in other physical types go together, in any order of files."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import permutations
from typing import Any

import pyarrow as pa
import pytest

from flightedl.errors import DataError, UserCodeError
from flightedl.formats import reader, records
from flightedl.formats.dataset_spec import DatasetSpec
from flightedl.formats.index import build_index
from flightedl.formats.reader import read_task

World = Any  # the one of this folder's conftest
SECOND = 1_700_000_000


def runs(values: Sequence[Any]) -> pa.Array:
    return pa.RunEndEncodedArray.from_arrays(pa.array(range(1, len(values) + 1), pa.int32()), pa.array(values))


def put(world: World, columns: Sequence[pa.Array], format_name: str = "arrow") -> tuple[str, ...]:
    return tuple(
        world.write(f"{number}.{format_name}", pa.table({"x": column}), format_name)
        for number, column in enumerate(columns)
    )


def read(world: World, urls: Sequence[str], seed: int | None = None, **options: Any) -> tuple[pa.DataType, list[Any]]:
    spec = DatasetSpec(tuple(urls), batch_size=100, **options)
    index = build_index(world.files, spec)
    chunks = [index.chunk(number) for number in range(len(index))]
    batches = list(read_task(world.files, chunks, spec, seed, 0, 0, schema=index.schema))
    assert {batch.schema for batch in batches} == {index.schema}
    return index.schema.field("x").type, [value for batch in batches for value in batch["x"].to_pylist()]


@pytest.mark.parametrize(
    ("columns", "kind"),
    [
        ([pa.array([1], pa.int32()), pa.array([2**40]), pa.array([-3], pa.int8())], "int64"),
        ([pa.array([1], pa.uint8()), pa.array([2], pa.uint32())], "uint32"),
        ([pa.array([255], pa.uint8()), pa.array([-1], pa.int8())], "int16"),
        ([pa.array([1], pa.int16()), pa.array([0.5], pa.float32())], "float"),
        ([pa.array([1], pa.int32()), pa.array([0.5], pa.float32())], "double"),
        ([pa.array([SECOND], pa.timestamp("s")), pa.array([SECOND * 1000 + 1], pa.timestamp("ms"))], "timestamp[ms]"),
        (
            [pa.array([SECOND], pa.timestamp("s", "UTC")), pa.array([1], pa.timestamp("ns", "Europe/Berlin"))],
            "timestamp[ns, tz=UTC]",
        ),
        ([pa.array([1], pa.duration("s")), pa.array([1], pa.duration("us"))], "duration[us]"),
        ([pa.array([0], pa.date32()), pa.array([86_400_000], pa.date64())], "date64[ms]"),
        ([pa.array(["a", None]).dictionary_encode(), pa.array(["b"]), runs(["c"])], "string"),
        ([pa.array(["a"], pa.string_view()), pa.array(["b"], pa.large_string())], "string"),
        ([pa.array([b"a"], pa.binary_view()), pa.array([b"bc"], pa.binary(2))], "binary"),
        ([pa.nulls(2), pa.array([1], pa.int8())], "int8"),
        ([pa.nulls(1), pa.nulls(1)], "null"),
        ([pa.array([[1]], pa.list_(pa.int8())), pa.array([[2]], pa.large_list(pa.int16()))], "list<item: int16>"),
        ([pa.array([[1, 2]], pa.list_(pa.int8(), 2)), pa.array([[2]], pa.list_view(pa.int8()))], "list<item: int8>"),
        (
            [pa.array([[1]], pa.list_(pa.field("e", pa.int8(), nullable=False))), pa.array([[None]])],
            "list<item: int8>",
        ),
        ([pa.array([{"a": 1, "b": "x"}]), pa.array([{"b": "y", "a": None}])], "struct<a: int64, b: string>"),
    ],
)
def test_the_same_values_in_other_types_go_together(world: World, columns: list[pa.Array], kind: str) -> None:
    for order in permutations(columns):
        urls = put(world, order)
        expected = [value for column in order for value in column.to_pylist()]
        found, values = read(world, urls)
        assert str(found) == kind or pa.types.is_struct(found)  # Its fields have the order of the first file.
        assert values == expected
        assert sorted(map(repr, read(world, urls, seed=1)[1])) == sorted(map(repr, values))


@pytest.mark.parametrize(
    "columns",
    [
        [pa.array([1]), pa.array([0.5])],
        [pa.array([1], pa.uint64()), pa.array([-1], pa.int8())],
        [pa.array(["a"]), pa.array([1])],
        [pa.array([1], pa.timestamp("s")), pa.array([1], pa.timestamp("s", "UTC"))],
        [pa.array([{"a": 1}]), pa.array([{"b": 1}])],
        [pa.array(["a"]), pa.array([b"a"])],
    ],
)
def test_types_that_neither_represents_are_refused_and_named(world: World, columns: list[pa.Array]) -> None:
    with pytest.raises(DataError, match=r"1\.arrow does not go with 0\.arrow: column 'x' is .* and not .*types="):
        read(world, put(world, columns))


@pytest.mark.parametrize("format_name", ["arrow", "parquet"])
def test_a_value_that_does_not_fit_is_an_error_with_file_and_record(world: World, format_name: str) -> None:
    years = pa.array([0, 0, 400_000_000_000], pa.timestamp("s"))
    urls = put(world, [pa.array([1], pa.timestamp("ns")), years], format_name)
    with pytest.raises(
        DataError, match=rf"1\.{format_name}, record 3: the value of 'x' .* does not fit timestamp\[ns\]"
    ):
        read(world, urls)
    urls = put(world, [pa.array([1, 2, 300])], format_name)
    # If the script is wrong, all records fail: the job must end, and not wait for the data.
    with pytest.raises(
        UserCodeError, match=rf"0\.{format_name}, record 3: the value of 'x' \(int64\) does not fit int8"
    ):
        read(world, urls, types=(("x", "int8"),))
    urls = put(world, [pa.array([1.0, math.inf, None, 1e300])], format_name)
    with pytest.raises(DataError, match=rf"0\.{format_name}, record 4: the value of 'x' \(double\) does not fit float"):
        read(world, urls, types=(("x", "float"),))


def test_a_declared_type_that_no_value_can_have_is_refused_at_the_declaration(world: World) -> None:
    spec = DatasetSpec(put(world, [pa.array([1]).dictionary_encode()]), batch_size=1, types=(("x", "date32"),))
    with pytest.raises(
        DataError, match=r"0\.arrow: column 'x' is dict.*, which cannot be read as date32.*correct types="
    ):
        build_index(world.files, spec)


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("kind", [pa.string(), pa.list_(pa.string()), pa.dictionary(pa.int8(), pa.string())])
def test_large_offsets_are_internal(world: World, kind: pa.DataType, seed: int | None, monkeypatch: Any) -> None:
    for module in (reader, records):
        monkeypatch.setattr(module, "LARGE_BYTES", 10)
    texts = ["a" * 9, None, "b", "c" * 30]
    values = [[text] for text in texts] if pa.types.is_list(kind) else texts
    urls = put(world, [pa.array(values, kind)])
    plain = pa.string() if pa.types.is_dictionary(kind) else kind
    found, read_values = read(world, urls, seed)
    assert found == plain
    assert sorted(map(repr, read_values)) == sorted(map(repr, values))


@pytest.mark.parametrize("format_name", ["arrow", "parquet"])
@pytest.mark.parametrize(
    ("values", "kind", "condition", "expected"),
    [
        ([0.0, -0.0, 1.0, None, math.nan], pa.float64(), ("in", [0.0]), [0.0, -0.0]),
        ([0.0, -0.0, 1.0, None], pa.float64(), ("in", [-0.0]), [0.0, -0.0]),
        ([0.0, -0.0, 1.0, None], pa.float32(), ("not in", [0]), [1.0]),
        ([0.5, 0.25], pa.float32(), ("in", [0.5]), [0.5]),
        ([1, 2**64 - 1, None], pa.uint64(), (">", -1), [1, 2**64 - 1]),
        ([1, 2**64 - 1], pa.uint64(), ("in", [-1, 2**64 - 1]), [2**64 - 1]),
        ([2**53, 2**53 + 1], pa.int64(), ("==", float(2**53)), [2**53]),
        ([2**53, 2**53 + 1], pa.int64(), (">", float(2**53)), [2**53 + 1]),
        ([2**53, 2**53 + 1], pa.int64(), ("in", [float(2**53)]), [2**53]),
        ([2**63 - 1], pa.int64(), (">=", float(2**63)), []),
        ([1, 2], pa.int64(), ("<", math.nan), []),
        ([1.0, math.nan], pa.float64(), ("in", [math.nan]), []),
        ([1.0, math.nan], pa.float64(), ("not in", [math.nan]), [1.0, math.nan]),
        ([1, 2], pa.int64(), ("<", math.inf), [1, 2]),
        (["a", "b", None], pa.dictionary(pa.int8(), pa.string()), ("in", ["a", "c"]), ["a"]),
        (["a", "b", None], pa.dictionary(pa.int8(), pa.string()), ("==", "a"), ["a"]),
        (["a", "b", None], pa.string_view(), ("not in", ["a"]), ["b"]),
    ],
)
def test_membership_finds_what_equality_finds(
    world: World,
    format_name: str,
    values: list[Any],
    kind: pa.DataType,
    condition: tuple[str, Any],
    expected: list[Any],
) -> None:
    urls = put(world, [pa.array(values, kind)], format_name)
    found = read(world, urls, filter=(("x", *condition),))[1]
    assert repr(found) == repr(expected)


def test_a_float_finds_its_own_precision_and_no_whole_number_that_it_cannot_hold(world: World) -> None:
    urls = put(world, [pa.array([0.1, 0.2, 2**24], pa.float32())])
    for condition in (("==", 0.1), ("in", [0.1]), ("==", 2**24)):
        assert len(read(world, urls, filter=(("x", *condition),))[1]) == 1
    for number in (2**24 + 1, 10**400):
        with pytest.raises(DataError, match="the filter on x has a number that float cannot hold: 1"):
            read(world, urls, filter=(("x", "<", number),))


@pytest.mark.parametrize("rows", [2, 100])
def test_a_name_with_a_dot_is_not_a_field_of_a_struct(world: World, rows: int) -> None:
    table = pa.table({"x.b": range(50), "x": [{"b": -number} for number in range(50)]})
    url = world.write("a.parquet", table, "parquet", 25)
    found = read(world, [url], filter=(("x.b", ">", 5),), max_records_per_chunk=rows)[1]
    assert found == [{"b": -number} for number in range(6, 50)]


def test_a_date_among_texts_is_text_in_json(world: World) -> None:
    lines = b"".join(b'{"x": "%s", "p": "%s"}\n' % (day, b"p" * 40) for day in [b"2024-01-01"] * 600 + [b"TBA"] * 600)
    urls = (world.put("a.jsonl", lines),)
    kind, values = read(world, urls)
    assert (str(kind), values) == ("string", ["2024-01-01"] * 600 + ["TBA"] * 600)
