"""Types of columns in text: no value becomes another one, and the order of chunks and files does not matter."""

from __future__ import annotations

import datetime as dt
import json
import math
from collections.abc import Mapping, Sequence
from itertools import permutations
from typing import Any

import pyarrow as pa
import pytest

from flightedl.errors import DataError, UsageError
from flightedl.formats.chunks import CorruptChunkError
from flightedl.formats.dataset_spec import DatasetSpec
from flightedl.formats.index import build_index, extended_index
from flightedl.formats.inference import forms, guess_of_texts
from flightedl.formats.reader import read_task
from flightedl.formats.recordio import encode_chunk
from tests.support.memory import MemoryFiles

UTC = dt.UTC
_DAYS = [dt.datetime(2024, 1, day) for day in (1, 2)]  # noqa: DTZ001 - JSON has no zone here


def column_of(contents: Mapping[str, bytes], name: str = "x", **options: Any) -> tuple[str, list[Any]]:
    """Return the type and the values of a column, in the order of the files' names."""
    files = MemoryFiles(dict(contents))
    spec = DatasetSpec(tuple(contents), batch_size=1000, **options)
    index = build_index(files, spec)
    values = []
    for number in range(len(index)):
        for batch in read_task(files, [index.chunk(number)], spec, None, 0, 0, schema=index.schema):
            assert batch.schema.equals(index.schema, check_metadata=True)
            values += batch[name].to_pylist()
    return str(index.schema.field(name).type), values


def csv(values: Sequence[str], **options: Any) -> tuple[str, list[Any]]:
    return column_of({"a.csv": "\n".join(["x,y", *(f"{value},y" for value in values), ""]).encode()}, **options)


def jsonl(values: Sequence[str], **options: Any) -> tuple[str, list[Any]]:
    return column_of({"a.jsonl": "".join(f'{{"x": {value}}}\n' for value in values).encode()}, **options)


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (["1", "-2", "0", ""], "int64"),
        ([" 1", "2 "], "int64"),
        ([str(2**63 - 1), str(-(2**63))], "int64"),
        ([str(2**64 - 1), "0"], "uint64"),
        ([str(2**64)], "string"),
        (["-1", str(2**63)], "string"),
        (["02134", "10001"], "string"),
        (["02134.5"], "string"),
        (["-01"], "string"),
        (["00"], "string"),
        (["+1", "2"], "string"),
        (["+1.5"], "string"),
        (["-0", "1"], "double"),
        (["0x1F"], "string"),
        (["1E5", "2E3"], "string"),
        (["1e5"], "string"),
        (["1e-05", "1.5e10", "1E+5"], "double"),
        (["1.50", ".5", "-.5", "2."], "double"),
        (["inf", "-inf", "1"], "double"),
        (["1e999", "1.5"], "string"),
        (["1.5e-999"], "string"),
        (["0.0e-999"], "double"),
        (["1.5", str(2**53)], "double"),
        (["1.5", str(2**53 + 1)], "string"),
        (["1.5", f"-{2**53 + 1}"], "string"),
        (["1.5", f"{2**53 + 1}.0"], "string"),
        (["1.5", "1.5e300"], "double"),
        (["true", "false", ""], "bool"),
        (["true", "False"], "string"),
        (["true", "1"], "string"),
        (["2024-01-01", "2024-12-31"], "date32[day]"),
        (["2024-01-01", "2024-01-01 00:00:00"], "string"),
        (["2024-01-01", "2024-02-30"], "string"),
        (["2024-01-01 00:00:00", "9999-01-01 00:00:00"], "timestamp[s]"),
        (["2024-01-01T00:00:00", "2024-01-01 00:00:00"], "string"),
        (["2024-01-01T00:00:00", "2024-01-01T00:00:00.5"], "timestamp[ns]"),
        (["2024-01-01T00:00:00.5", "9999-01-01T00:00:00.5"], "string"),
        (["2024-01-01T00:00:00Z", "2024-01-01T00:00:00+01:00"], "timestamp[s, tz=UTC]"),
        (["2024-01-01T00:00:00Z", "2024-01-01T00:00:00"], "string"),
        (["12:30", "23:59"], "time32[s]"),
        (["12:30", "12:30:01"], "string"),
        (["24:30", "12:30"], "string"),
        (["NA", "", "null"], "null"),
        (["NA", "Namibia"], "string"),
        (["12 Main St", "5"], "string"),
        (["1", "nan", "2.5"], "double"),
        (["1.5", "NAN"], "string"),
    ],
)
def test_a_csv_column_has_the_type_that_keeps_its_values(values: list[str], kind: str) -> None:
    for order, chunk in ((values, 1 << 20), (values[::-1], 1)):
        found, read = csv(order, text_chunk_bytes=chunk)
        assert found == kind
        if kind == "string":
            assert read == list(order)
        elif kind in ("int64", "uint64"):
            assert read == [int(value) if value else None for value in order]


def test_values_of_each_type_are_read_as_they_are_written() -> None:
    assert csv(["1.50", "-0", "", "1e-05"])[1] == [1.5, 0.0, None, 1e-05]
    assert math.copysign(1, csv(["-0", "1.5"])[1][0]) == -1
    assert csv(["true", ""])[1] == [True, None]
    assert csv(["2024-01-01T00:00:00+01:00"])[1] == [dt.datetime(2023, 12, 31, 23, tzinfo=UTC)]
    assert csv(["12:30"])[1] == [dt.time(12, 30)]


@pytest.mark.parametrize(
    ("values", "kind", "expected"),
    [
        (["1", "null", "-2"], "int64", [1, None, -2]),
        ([str(2**64 - 1), "1"], "uint64", [2**64 - 1, 1]),
        ([str(2**64)], "string", [str(2**64)]),
        (["-1", str(2**64 - 1)], "string", ["-1", str(2**64 - 1)]),
        (["1.5", str(2**53 + 1)], "string", ["1.5", str(2**53 + 1)]),
        (["1.5", "1e300", "1E5"], "double", [1.5, 1e300, 1e5]),
        (["-0", "1"], "double", [0.0, 1.0]),
        (["1", '"a"', "1.50", "true", "null", '{"k": [1]}'], "string", ["1", "a", "1.50", "true", None, '{"k": [1]}']),
        (["[1]", '["a"]'], "string", ["[1]", '["a"]']),
        ([f"[{2**64 - 1}]", "[]"], "list<item: uint64>", [[2**64 - 1], []]),
        ([f'{{"k": {2**53 + 1}, "s": "9"}}', '{"k": 1.5}'], "string", None),
        (['"2024-01-01"', '"2024-01-02"'], "timestamp[s]", _DAYS),
        (['"2024-01-01"', '"2024-01-01T00:00:00Z"'], "string", ["2024-01-01", "2024-01-01T00:00:00Z"]),
        (['"2024-01-01T00:00:00+01:00"'], "timestamp[s, tz=UTC]", [dt.datetime(2023, 12, 31, 23, tzinfo=UTC)]),
        (['["2024-01-01"]', '["TBA"]'], "list<item: string>", [["2024-01-01"], ["TBA"]]),
        (['{"a": "2024-01-01"}', '{"b": 1}'], "struct<a: timestamp[s], b: int64>", None),
        (["1e999"], "string", ["1e999"]),
        (["[null,[1]]"], "list<item: list<item: int64>>", [[None, [1]]]),
        (["1e-999", "0e-999"], "string", ["1e-999", "0e-999"]),
        (["0.0e-999", "5e-324"], "double", [0.0, 5e-324]),
    ],
)
def test_a_json_column_has_the_type_that_keeps_its_values(values: list[str], kind: str, expected: Any) -> None:
    for chunk in (1 << 20, 1):
        found, read = jsonl(values, text_chunk_bytes=chunk)
        assert found == kind
        assert read == expected or expected is None
    reverse_kind, read = jsonl(values[::-1])
    assert sorted(reverse_kind) == sorted(kind)
    assert read == (expected and expected[::-1]) or expected is None


def test_types_are_decided_over_all_files_in_any_order() -> None:
    parts = [b"x\n02134\n", b"x\n1\n", b"x\n2.5\n", b"x\n\n"]
    for order in permutations(parts):
        kind, read = column_of({f"{number}.csv": part for number, part in enumerate(order)})
        assert kind == "string"
        assert sorted(read) == ["02134", "1", "2.5"]


def test_a_file_that_joins_later_and_does_not_fit_is_named() -> None:
    files = MemoryFiles({"0.csv": b"x\n1\n", "0.jsonl": b'{"o": {"a": 1, "b": 2}}\n'})
    known = build_index(files, DatasetSpec(("0.csv",)))
    files.contents |= {"1.csv": b"x\n02134\n", "2.csv": b"x\n-5\n", "3.csv": b"x\n2.5\n", "4.csv": b"x\nNA\n"}
    spec = DatasetSpec(("*.csv",))
    index, refused = extended_index(files, spec, known, [files._stat(f"{n}.csv") for n in (1, 2, 3, 4)])
    assert [stat.url for stat in index.stats] == ["0.csv", "2.csv", "4.csv"]
    assert {stat.url: str(error) for stat, error in refused.items()} == {
        "1.csv": "1.csv does not go with 0.csv: column 'x' is string and not int64",
        "3.csv": "3.csv does not go with 0.csv: column 'x' is double and not int64",
    }
    known = build_index(files, DatasetSpec(("0.jsonl",)))
    files.contents |= {"1.jsonl": b'{"o": {"a": 3}}\n'}
    index, refused = extended_index(files, DatasetSpec(("*.jsonl",)), known, [files._stat("1.jsonl")])
    assert not refused


def test_declared_types_replace_inferred_ones() -> None:
    assert csv(["1", "02"], types=(("x", "string"),)) == ("string", ["1", "02"])
    assert csv(["1", "2"], types=(("x", "string"),)) == ("string", ["1", "2"])
    assert csv(["1"], types=(("x", "decimal128(5, 2)"),))[0] == "decimal128(5, 2)"
    assert csv(["2024-01-01T00:00:00Z"], types=(("x", "timestamp[us, tz=UTC]"),))[0] == "timestamp[us, tz=UTC]"
    assert jsonl(["1", "2.50"], types=(("x", "string"),)) == ("string", ["1", "2.50"])
    assert jsonl(["1", "2.5"], types=(("x", "float"),)) == ("float", [1.0, 2.5])
    assert jsonl(["[1]", "[]"], types=(("x", "list<double>"),)) == ("list<item: double>", [[1.0], []])
    with pytest.raises(DataError, match=r"a\.csv, record 3: a value does not fit the type given by types=.*'q'"):
        csv(["1", "2", "q", "4"], types=(("x", "int32"),))
    with pytest.raises(DataError, match=r"a\.csv, record 2: a value does not fit the type given by types=.*'q'"):
        csv(["123456789", "q"], types=(("x", "int32"),))
    assert csv(["1", "inf"], types=(("x", "float"),)) == ("float", [1.0, math.inf])
    with pytest.raises(DataError, match=r"a\.csv, record 2: .*: 1e300 is too large for float"):
        csv(["1", "1e300"], types=(("x", "float"),))
    with pytest.raises(DataError, match=r"types= names 'z', but the columns are x, y"):
        csv(["1"], types=(("z", "int32"),))
    with pytest.raises(UsageError, match=r"there is no type 'text'"):
        csv(["1"], types=(("x", "text"),))


@pytest.mark.parametrize("end", ["\r", "\r\n", "\n"])
def test_lines_may_end_in_any_way(end: str) -> None:
    lines = ["x,y", *(f'{number},"a{end}b"' for number in range(50))]
    kind, read = column_of({"a.csv": end.join([*lines, ""]).encode()}, text_chunk_bytes=64)
    assert (kind, read) == ("int64", list(range(50)))
    assert column_of({"a.csv": end.join(["x", "1", "2"]).encode()}) == ("int64", [1, 2])


def test_a_header_alone_is_a_file_without_records_that_is_named() -> None:
    files = MemoryFiles({"a.csv": b"x,y", "b.csv": b"x,y\n1,2\n"})
    index = build_index(files, DatasetSpec(("*.csv",)))
    assert index.record_count == 1
    assert index.without_records == ("a.csv",)
    files.contents["a.csv"] = b"x,z"
    with pytest.raises(DataError, match="column 'z'"):
        build_index(files, DatasetSpec(("*.csv",)))


def test_a_guess_lists_every_form_of_its_values() -> None:
    def found(*values: str) -> list[str]:
        return forms(guess_of_texts("x", pa.chunked_array([pa.array(values)])))

    assert found("1", "2") == ["int64", "uint64", "double"]
    assert found("-1") == ["int64", "double"]
    assert found(str(2**60)) == ["int64", "uint64"]
    assert found("1.5") == ["double"]


def test_json_of_several_records_on_a_line_is_read() -> None:
    assert column_of({"a.jsonl": b'{"x": 1}{"x": 2}\n' + json.dumps({"x": 3}).encode()}) == ("int64", [1, 2, 3])


def test_a_key_that_occurs_twice_is_damage_also_beside_mixed_types() -> None:
    files = MemoryFiles({"a.jsonl": b'{"x": 1}\n{"x": "a"}\n{"x": 2, "y": {"z": 1, "z": 2}}\n'})
    with pytest.raises(DataError, match="key twice: z, z"):
        build_index(files, DatasetSpec(("a.jsonl",), batch_size=10))


def test_json_in_recordio_has_one_type_in_all_batches() -> None:
    records = [b'{"x": 1}', b'{"x": 2,\n"d": "2024-01-01"}', b'{"x": "a"}', b'{"x": 18446744073709551615}']
    contents = {f"{number}.recordio": encode_chunk([record]) for number, record in enumerate(records)}
    options = {"format": "recordio-json"}
    assert column_of(contents, **options) == ("string", ["1", "2", "a", "18446744073709551615"])
    assert column_of(contents, "d", **options) == ("string", [None, "2024-01-01", None, None])
    some = {name: contents[name] for name in ("0.recordio", "3.recordio")}
    assert column_of(some, **options) == ("uint64", [1, 2**64 - 1])
    assert column_of(some, filter=(("x", ">", 1),), **options)[1] == [2**64 - 1]
    assert column_of(some, types=(("x", "string"),), **options) == ("string", ["1", "18446744073709551615"])
    with pytest.raises(DataError, match=r"2\.recordio, record 1: a value does not fit the type given by types="):
        column_of(contents, types=(("x", "uint64"),), **options)
    with pytest.raises(DataError, match="there is no column 'z'"):
        column_of(some, columns=("z",), **options)


@pytest.mark.parametrize("record", [b"not json", b"null", b"[1]", b"", b'{"x": 1}{"x": 2}'])
def test_a_record_that_is_no_json_object_is_corrupt(record: bytes) -> None:
    contents = {"a.recordio": encode_chunk([b'{"x": 1}']) + encode_chunk([b'{"x": 2}', record])}
    with pytest.raises(CorruptChunkError, match=r"a\.recordio is corrupt, chunk at byte 50: "):
        column_of(contents, format="recordio-json")
    assert column_of(contents, format="recordio-json", on_corrupt="skip") == ("int64", [1])


@pytest.mark.parametrize("chunk", [1, 1 << 20])
def test_a_chunk_of_blanks_has_records(chunk: int) -> None:
    assert column_of({"a.tsv": b"x\ty\n1\t2\n\t\n"}, text_chunk_bytes=chunk) == ("int64", [1, None])
    assert column_of({"a.csv": b"x\na\n \n\n"}, text_chunk_bytes=chunk) == ("string", ["a", " "])
