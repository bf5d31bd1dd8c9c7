"""Files of pyarrow, pandas, Polars and DuckDB with all types. Every way of reading yields what pyarrow reads."""

from __future__ import annotations

import base64
import datetime as dt
import math
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pyarrow.parquet.encryption as encryption
import pytest

from flightedl.adapters.storage import FsspecFiles, FsspecStorage
from flightedl.errors import DataError, UnsupportedError
from flightedl.formats.chunk_index import ChunkIndex
from flightedl.formats.convert import Target, convert
from flightedl.formats.dataset_spec import DatasetSpec
from flightedl.formats.index import build_index
from flightedl.formats.layout import TaskLayout
from flightedl.formats.reader import read_task
from flightedl.formats.registry import named_format

#: Rows of each file: the values of a column are repeated.
ROWS = 23
NAN, INF = math.nan, math.inf
at = dt.datetime.fromisoformat
DAYS = [dt.date(1, 1, 1), dt.date(1969, 12, 31), None, dt.date(9999, 12, 31)]
TIMES = [dt.time(0), None, dt.time(23, 59, 59)]
STAMPS = [at("1969-12-31 23:59:59"), None, at("2024-03-31 02:30:00"), at("2262-01-01")]
FINE = [stamp and stamp.replace(microsecond=123_456) for stamp in STAMPS]
SPANS = [dt.timedelta(days=-1, seconds=1), None, dt.timedelta(0), dt.timedelta(days=999, seconds=59)]
TEXTS = ["", None, "a", 'say "hi", ok', "line\nbreak", "é\U0001f600", "\0", "NA", "null", "00501", " x "]
BYTES = [b"", None, b"\0\xff", b"abc"]
UUIDS = [bytes(range(16)), None, bytes(16)]
STRUCTS = [{"a": 1, "b": None}, None, {"a": None, "b": [None, "x"]}]
UNIONS = pa.UnionArray.from_sparse(
    pa.array([0, 1, 0], pa.int8()), [pa.array([1, 2, 3]), pa.array(["a", "b", "c"])], ["number", "text"]
)

PYARROW: dict[str, dict[str, pa.Array]] = {
    "whole numbers": {
        f"{sign}int{bits}": pa.array(
            [0, None, 1, 2 ** (bits - (not sign)) - 1, 0 if sign else -(2 ** (bits - 1))], f"{sign}int{bits}"
        )
        for sign in ("", "u")
        for bits in (8, 16, 32, 64)
    },
    "floats": {
        "half": pa.array([0.0, -0.0, None, NAN, INF, -INF, 65504.0], pa.float16()),
        "single": pa.array([0.0, -0.0, None, NAN, INF, 1e-45, 3.4028235e38], pa.float32()),
        "double": pa.array([0.0, -0.0, None, NAN, -INF, 5e-324, 1.7976931348623157e308], pa.float64()),
        "bool": pa.array([True, None, False]),
    },
    "texts": {
        **{str(kind): pa.array(TEXTS, kind) for kind in (pa.string(), pa.large_string(), pa.string_view())},
        **{str(kind): pa.array(BYTES, kind) for kind in (pa.binary(), pa.large_binary(), pa.binary_view())},
        "fixed": pa.array([b"abc", None, b"\0\0\0"], pa.binary(3)),
    },
    "encoded": {
        "dictionary": pa.array(TEXTS).dictionary_encode(),
        "of numbers": pa.array([3, None, -1]).dictionary_encode(),
        "wide keys": pa.array(TEXTS).cast(pa.dictionary(pa.int64(), pa.large_string())),
        "ordered": pa.DictionaryArray.from_arrays(
            pa.array([1, None, 0], pa.int8()), pa.array(["x", "y"]), ordered=True
        ),
    },
    "runs": {
        "runs": pa.RunEndEncodedArray.from_arrays(pa.array([2, 5, 6], pa.int32()), pa.array(["a", None, "b"])),
        "of numbers": pa.RunEndEncodedArray.from_arrays(pa.array([3, 4], pa.int16()), pa.array([7, None])),
    },
    "days": {
        "date32": pa.array(DAYS),
        "date64": pa.array(DAYS, pa.date64()),
        **{f"time {unit}": pa.array(TIMES, pa.time32(unit)) for unit in ("s", "ms")},
        **{f"time {unit}": pa.array(TIMES, pa.time64(unit)) for unit in ("us", "ns")},
    },
    "stamps": {
        f"{unit} {zone}": pa.array(FINE if unit in ("us", "ns") else STAMPS, pa.timestamp(unit, zone))
        for unit in ("s", "ms", "us", "ns")
        for zone in (None, "UTC", "Europe/Berlin", "+05:30")
    },
    "durations": {unit: pa.array(SPANS, pa.duration(unit)) for unit in ("s", "ms", "us", "ns")},
    "decimals": {
        str(kind): pa.array([Decimal("-1.50"), None, Decimal("99999.99")], kind)
        for kind in (pa.decimal32(9, 2), pa.decimal64(18, 2), pa.decimal128(38, 2), pa.decimal256(76, 2))
    },
    "lists": {
        "list": pa.array([[1, None], None, []], pa.list_(pa.int32())),
        "large": pa.array([["a"], None, [None]], pa.large_list(pa.large_string())),
        "fixed": pa.array([[1.0, 2.0], None, [NAN, -0.0]], pa.list_(pa.float32(), 2)),
        "not null": pa.array([[1], []], pa.list_(pa.field("element", pa.int8(), nullable=False))),
        "deep": pa.array([[[1], None], [], [[]]], pa.list_(pa.list_(pa.int64()))),
    },
    "views": {
        "view": pa.array([[1], None, []], pa.list_view(pa.int64())),
        "large view": pa.array([[1], None, []], pa.large_list_view(pa.int64())),
    },
    "structs": {
        "struct": pa.array(STRUCTS, pa.struct([("a", pa.int8()), ("b", pa.list_(pa.string_view()))])),
        "map": pa.array([[("k", 1), ("k", 2)], None, []], pa.map_(pa.string(), pa.int64())),
        "sorted": pa.array([[("k", 1)]], pa.map_(pa.large_string(), pa.int64(), keys_sorted=True)),
        "dotted.name": pa.array([{"a.b": 1, "": 2}]),
        "encoded": pa.array([["a", "b"], None]).cast(pa.list_(pa.dictionary(pa.int8(), pa.string()))),
    },
    "no values": {
        "null": pa.nulls(3),
        "text": pa.nulls(3, pa.string()),
        "struct": pa.nulls(3, pa.struct([("a", pa.int8())])),
    },
    "extensions": {
        "uuid": pa.ExtensionArray.from_storage(pa.uuid(), pa.array(UUIDS, pa.binary(16))),
        "json": pa.ExtensionArray.from_storage(pa.json_(), pa.array(['{"a": 1}', None])),
        "tensor": pa.ExtensionArray.from_storage(
            pa.fixed_shape_tensor(pa.int8(), [2, 2]), pa.array([[1, 2, 3, 4]], pa.list_(pa.int8(), 4))
        ),
        "bool8": pa.ExtensionArray.from_storage(pa.bool8(), pa.array([1, 0, None], pa.int8())),
    },
    "intervals": {"interval": pa.array([(1, -2, 3), None], pa.month_day_nano_interval())},
    "unions": {"union": UNIONS},
}
POLARS: dict[str, dict[str, pl.Series]] = {
    "numbers": {
        "i8": pl.Series([0, None, -128], dtype=pl.Int8),
        "u64": pl.Series([0, None, 2**64 - 1], dtype=pl.UInt64),
        "f32": pl.Series([0.0, -0.0, None, NAN], dtype=pl.Float32),
        "decimal": pl.Series([Decimal("-1.50"), None, Decimal("99.99")], dtype=pl.Decimal(20, 2)),
        "bool": pl.Series([True, None]),
        "null": pl.Series([None, None]),
    },
    "i128": {"i128": pl.Series([0, None, -(2**100)], dtype=pl.Int128)},
    "texts": {
        "text": pl.Series(TEXTS),
        "bytes": pl.Series(BYTES),
        "category": pl.Series(TEXTS, dtype=pl.Categorical),
        "enum": pl.Series(["a", None, "b"], dtype=pl.Enum(["b", "a", "c"])),
    },
    "times": {
        "date": pl.Series(DAYS),
        "time": pl.Series(TIMES),
        **{unit: pl.Series(FINE, dtype=pl.Datetime(unit, "Europe/Berlin")) for unit in ("ms", "us", "ns")},
        "duration": pl.Series(SPANS, dtype=pl.Duration("us")),
    },
    "nested": {
        "list": pl.Series([["a", None], None, []]),
        "array": pl.Series([[1, 2], None, [3, 4]], dtype=pl.Array(pl.Int16, 2)),
        "struct": pl.Series(STRUCTS),
        "categories": pl.Series([["a", "b"], None], dtype=pl.List(pl.Categorical)),
    },
}
PANDAS: dict[str, Callable[[], dict[str, Any]]] = {
    "numbers": lambda: {
        "nullable": pd.array([1, None, -5], "Int16"),
        "double": [1.5, NAN, -0.0],
        "float32": pd.array([1.5, None, 2.5], "Float32"),
        "boolean": pd.array([True, None, False], "boolean"),
        "mixed": [1, None, 2],
        "decimal": [Decimal("1.5"), None, Decimal(-20)],
        "complexes": [None, None, None],
    },
    "texts": lambda: {
        "object": pd.Series(["a", None, "é"], dtype=object),
        "string": pd.array(["a", None, "NA"], "string"),
        "arrow": pd.array(["a", None, "b"], pd.ArrowDtype(pa.large_string())),
        "category": pd.Categorical(["x", None, "y"], ["y", "x", "z"], ordered=True),
        "numbers": pd.Categorical([3, 1, 3]),
        "bytes": pd.Series([b"a", None, b"\0"], dtype=object),
    },
    "times": lambda: {
        "naive": pd.to_datetime(["1969-12-31", None, "2024-03-31 02:30:00.123456789"], format="ISO8601"),
        "zone": pd.to_datetime(["1969-12-31", None, "2024-03-31 02:30"], format="ISO8601").tz_localize("UTC"),
        "duration": pd.to_timedelta([1, None, -5], unit="s"),
        "date": [dt.date(2024, 1, 1), None, dt.date(1969, 1, 1)],
        "time": [dt.time(1, 2), None, dt.time(3, 4, 5, 6)],
    },
    "nested": lambda: {
        "list": [[1, 2], None, []],
        "dict": [{"a": 1}, None, {"a": 2}],
        "arrays": [[[1.5]], None, [[], [2.5]]],
    },
    "periods": lambda: {
        "period": pd.period_range("2024-01", periods=3, freq="M"),
        "interval": pd.interval_range(0, 3),
    },
}
DUCKDB = {
    "numbers": "i::tinyint a, i::ubigint b, i::hugeint c, (i / 3)::decimal(18, 4) d, i::float e, i % 2 = 0 f, null g",
    "texts": "i::varchar a, ('x' || i)::blob b, uuid() c, (['a', 'b'])[i % 2 + 1]::enum('b', 'a') d, '1011'::bit e",
    "times": "date '1969-12-31' + i::int a, time '01:02:03.5' b, timestamp '2024-03-31 02:30:00.123456' c, "
    "timestamptz '2024-03-31 02:30:00+02' d, '2024-01-01'::timestamp_s e, '2024-01-01'::timestamp_ms f, "
    "'2024-01-01 00:00:00.123456789'::timestamp_ns g, '01:02:03+04'::timetz h",
    "intervals": "to_months(i) a",
    "nested": "[i, null] a, {'x': i, 'y': ['z']} b, map([i], ['v']) c, array_value(i, 2) d, [{'a': [i]}] e",
    "json": """'{"a": 1}'::json a, ('{"b": ' || i || '}')::json b""",
    "unions": "case when i % 2 = 0 then union_value(n := i) else union_value(n := 5) end a",
}


def repeated(values: pa.Array) -> pa.Array:
    return pa.concat_arrays([values] * (ROWS // len(values) + 1)).slice(0, ROWS)


def by_pyarrow(group: str, suffix: str, **options: Any) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        numbers = pa.array(range(ROWS))
        table = pa.table({**{name: repeated(values) for name, values in PYARROW[group].items()}, "n": numbers})
        if suffix == "parquet":
            pq.write_table(table, path, row_group_size=7, **options)
            return
        new = pa.ipc.new_file if suffix == "arrow" else pa.ipc.new_stream
        with new(path, table.schema) as writer:
            writer.write_table(table, 7)

    return write


def by_polars(group: str, suffix: str) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        frame = pl.DataFrame({name: pl.concat([values] * ROWS).head(ROWS) for name, values in POLARS[group].items()})
        frame = frame.with_columns(n=pl.int_range(ROWS))
        if suffix == "parquet":
            frame.write_parquet(path, row_group_size=7)
        elif suffix == "arrow":
            frame.write_ipc(path, compression="zstd", record_batch_size=7)
        else:
            frame.write_ipc_stream(path)

    return write


def by_pandas(group: str, suffix: str) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        frame = pd.concat([pd.DataFrame(PANDAS[group]())] * (ROWS // 3 + 1), ignore_index=True).head(ROWS)
        frame["n"] = range(ROWS)
        if suffix == "parquet":
            frame.to_parquet(path, row_group_size=7)
        else:
            frame.to_feather(path, chunksize=7)

    return write


def by_duckdb(group: str, suffix: str) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        with duckdb.connect(config={"threads": 1}) as database:
            database.execute(f"copy (select {DUCKDB[group]}, i n from range({ROWS}) t(i)) to '{path}'")

    return write


#: Options with which pyarrow writes Parquet as older and as other programs do.
OLD: dict[str, Any] = {
    "version": "1.0",
    "compression": "gzip",
    "store_schema": False,
    "use_compliant_nested_type": False,
    "use_dictionary": False,
    "write_statistics": False,
}
SPARK: dict[str, Any] = {"store_schema": False, "use_deprecated_int96_timestamps": True, "data_page_version": "2.0"}
#: What Parquet of pyarrow cannot hold.
ONLY_IN_ARROW = ("runs", "intervals", "unions")
FILES = {
    f"{name} {suffix}, {group}": (by(group, suffix), suffix)
    for name, by, groups, suffixes in (
        ("pyarrow", by_pyarrow, PYARROW, ("parquet", "arrow", "arrows")),
        ("polars", by_polars, POLARS, ("parquet", "arrow", "arrows")),
        ("pandas", by_pandas, PANDAS, ("parquet", "feather")),
        ("duckdb", by_duckdb, DUCKDB, ("parquet",)),
    )
    for group in groups
    for suffix in suffixes
    if not (name == "pyarrow" and suffix == "parquet" and group in ONLY_IN_ARROW)
}
FILES |= {
    f"pyarrow {name}, {group}": (by_pyarrow(group, "parquet", **options), "parquet")
    for name, options, groups in (
        ("old parquet", OLD, ("whole numbers", "floats", "texts", "decimals", "lists", "structs")),
        ("spark parquet", SPARK, ("floats", "texts", "days", "stamps", "lists")),
    )
    for group in groups
}


def expected_of(path: Path) -> list[Any]:
    if path.suffix == ".parquet":
        file = pq.ParquetFile(path, coerce_int96_timestamp_unit="us")
        # One by one, because pyarrow does not join all types.
        groups = [file.read_row_group(number).to_pylist() for number in range(file.num_row_groups)]
    else:
        data = path.read_bytes()
        open_ = pa.ipc.open_file if data.startswith(b"ARROW1") else pa.ipc.open_stream
        groups = [
            batch.to_pylist() for batch in pa.Table.from_batches(open_(data).read_all().to_batches()).to_batches()
        ]
    return [record for group in groups for record in group]


def read(index: ChunkIndex, spec: DatasetSpec, seed: int | None = None, records_per_task: int = 0) -> list[Any]:
    files = FsspecFiles()
    layout = TaskLayout(index, spec.batch_size, records_per_task=records_per_task)
    records = []
    for task in range(layout.task_count):
        for batch in read_task(files, layout.chunks_of(task), spec, seed, 0, task, schema=index.schema):
            assert batch.schema.equals(index.schema, check_metadata=True)
            batch.validate(full=True)
            records += batch.to_pylist()
    return records if seed is None else sorted(records, key=lambda record: record["n"])


def written_again(index: ChunkIndex, spec: DatasetSpec, format_name: str, *, is_split: bool, folder: Path) -> list[Any]:
    target = Target(f"{format_name}{is_split}", format_name, 2)
    done = convert(FsspecFiles(), index, spec, FsspecStorage(str(folder)), target, is_split=is_split)
    copies = DatasetSpec(tuple(str(folder / name) for name in done.names), batch_size=100)
    return read(build_index(FsspecFiles(), copies), copies)


def require_everywhere(
    spec: DatasetSpec, expected: list[Any], folder: Path, own: str, form: Callable[[Any], Any] = repr
) -> None:
    """Read in stored and random order, all records and some, one chunk and all at a time, and from another file."""
    index = build_index(FsspecFiles(), spec)
    wanted = [form(record) for record in expected]
    half = len(wanted) // 2
    for chosen, records in ((spec, wanted), (replace(spec, filter=(("n", ">=", half),)), wanted[half:])):
        for seed in (None, 3):
            for size in (0, 10**9):
                assert [form(record) for record in read(index, chosen, seed, size)] == records
    assert [form(record) for record in written_again(index, spec, own, is_split=True, folder=folder)] == wanted


@pytest.mark.parametrize("case", FILES)
def test_every_way_of_reading_yields_what_pyarrow_reads(case: str, tmp_path: Path) -> None:
    write, suffix = FILES[case]
    path = tmp_path / f"a.{suffix}"
    write(path)
    spec = DatasetSpec((str(path),), batch_size=5)
    if "i128" in case:
        with pytest.raises(DataError, match=f"{path}.*Integers with more than 64 bits"):
            build_index(FsspecFiles(), spec)
        return
    own, other = ("parquet", "arrow") if suffix == "parquet" else ("arrow", "parquet")
    require_everywhere(spec, expected_of(path), tmp_path, own)
    index = build_index(FsspecFiles(), spec)
    if other == "parquet" and case.endswith(("intervals", "unions")):
        with pytest.raises(DataError, match="parquet cannot hold"):
            written_again(index, spec, other, is_split=False, folder=tmp_path)
    else:
        found = written_again(index, spec, other, is_split=False, folder=tmp_path)
        assert list(map(repr, found)) == list(map(repr, expected_of(path)))


def test_int96_reaches_the_dates_that_writers_use_for_never(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    stamps = [at("9999-12-31"), at("0001-01-01"), at("2024-01-01 00:00:00.000001")]
    table = pa.table({"t": pa.array(stamps, pa.timestamp("us")), "n": range(3)})
    pq.write_table(table, path, use_deprecated_int96_timestamps=True)
    spec = DatasetSpec((str(path),))
    index = build_index(FsspecFiles(), spec)
    require_everywhere(spec, table.to_pylist(), tmp_path, "parquet")
    assert read(index, replace(spec, filter=(("t", ">", "9000-01-01"),))) == table.to_pylist()[:1]


#: Columns of text files, as all writers write them, and their values.
TEXT_COLUMNS: dict[str, Any] = {
    "whole": [-(2**63), 2**63 - 1, 0],
    "big": pa.array([2**64 - 1, 0, 2**63], pa.uint64()),
    "double": [1.5, -0.0, 1e-05],
    "small": [0.1, 123456.789, 1.7976931348623157e308],
    "flag": [True, False, True],
    "zip": ["02134", "501", "-0"],
    "text": ['say "hi", ok', "line\nbreak", "é\U0001f600"],
    "date": [dt.date(1969, 12, 31), dt.date(2024, 2, 29), dt.date(9999, 12, 31)],
    "stamp": [at("1969-12-31 23:59:59"), at("2024-03-31 02:30:00"), at("2262-01-01")],
    "n": [0, 1, 2],
}
TEXT_WRITERS: dict[str, Callable[[pa.Table, str], object]] = {
    "pyarrow.csv": pyarrow.csv.write_csv,
    "pandas.csv": lambda table, path: table.to_pandas().to_csv(path, index=False),
    "pandas.jsonl": lambda table, path: table.to_pandas().to_json(
        path, orient="records", lines=True, date_format="iso"
    ),
    "polars.csv": lambda table, path: pl.DataFrame(table).write_csv(path),
    "polars.jsonl": lambda table, path: pl.DataFrame(table).write_ndjson(path),
    "polars.tsv": lambda table, path: pl.DataFrame(table).write_csv(path, separator="\t"),
    "duckdb.csv": lambda table, path: duckdb.from_arrow(table).write_csv(path),
    "duckdb.jsonl": lambda source, path: duckdb.sql(f"copy (from source) to '{path}' (format json)"),
}


@pytest.mark.parametrize("writer", TEXT_WRITERS)
def test_text_of_every_writer_has_the_values_that_were_written(writer: str, tmp_path: Path) -> None:
    table = pa.table(TEXT_COLUMNS)
    path = tmp_path / f"a.{writer.partition('.')[2]}"
    TEXT_WRITERS[writer](table, str(path))
    spec = DatasetSpec((str(path),), batch_size=2, text_chunk_bytes=1)
    index = build_index(FsspecFiles(), spec)
    assert len(index) == 3
    expected = table.to_pylist()
    if writer == "pandas.jsonl":
        expected = [{**row, "double": row["double"] or 0.0, "small": float(f"{row['small']:.10g}")} for row in expected]

    def plain(row: dict[str, Any]) -> str:
        # Dates as text: JSON has no type for them.
        lengths = {"date": 10, "stamp": 19}
        return repr({k: str(v).replace("T", " ")[: lengths[k]] if k in lengths else v for k, v in row.items()})

    require_everywhere(spec, expected, tmp_path, named_format(path.suffix[1:]).name, plain)
    found = written_again(index, spec, "parquet", is_split=False, folder=tmp_path)
    assert list(map(plain, found)) == list(map(plain, expected))


def test_joined_streams_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.arrows"
    by_pyarrow("lists", "arrows")(path)
    path.write_bytes(2 * path.read_bytes())
    with pytest.raises(DataError, match="bytes after its end mark: do not join streams"):
        build_index(FsspecFiles(), DatasetSpec((str(path),)))


@pytest.mark.parametrize("is_footer_plain", [True, False])
def test_an_encrypted_file_is_not_called_corrupt(is_footer_plain: bool, tmp_path: Path) -> None:
    class Keys(encryption.KmsClient):  # type: ignore[misc]
        def wrap_key(self, key: bytes, _: str) -> bytes:
            return base64.b64encode(key)

    table = pa.table({"a": [1], "b": [2]})
    factory = encryption.CryptoFactory(lambda _: Keys())
    how = encryption.EncryptionConfiguration("k", column_keys={"c": ["a"]}, plaintext_footer=is_footer_plain)
    keys = factory.file_encryption_properties(encryption.KmsConnectionConfig(), how)
    path = tmp_path / "a.parquet"
    with pq.ParquetWriter(path, table.schema, encryption_properties=keys) as writer:
        writer.write_table(table)
    with pytest.raises(UnsupportedError, match=r"a\.parquet.*decrypt"):
        build_index(FsspecFiles(), DatasetSpec((str(path),), on_corrupt="skip"))
