"""``flightedl dataset`` as users call it."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

from flightedl.errors import FlightedlError, UsageError
from flightedl_tools.dataset import _condition
from flightedl_tools.main import command, run_command_line
from tests.support.processes import closed_port


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three files of 40 records in row groups of ten, in the current directory."""
    for number in range(3):
        table = pa.table({"k": np.arange(number * 40, number * 40 + 40), "word": ["a", "b"] * 20})
        pq.write_table(table, tmp_path / f"part-{number}.parquet", row_group_size=10)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments: str) -> Result:
    return CliRunner().invoke(command, ["dataset", *arguments])


def result_of(*arguments: str) -> dict:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.exception
    return json.loads(result.stdout)


def refused(*arguments: str) -> str:
    error = run(*arguments).exception
    assert isinstance(error, FlightedlError)
    return str(error)


def test_an_index_is_stored_and_only_changed_files_are_read_again(data: Path) -> None:
    first = result_of("index", "part-*.parquet", "--checkpoint", "kept")
    assert (first["files_count"], first["chunks"], first["records"], first["files_read"]) == (3, 12, 120, 3)
    assert Path(first["index"]).is_file()
    assert result_of("index", "part-*.parquet", "--checkpoint", "kept")["files_read"] == 0
    pq.write_table(pa.table({"k": np.arange(7), "word": ["a"] * 7}), data / "part-1.parquet")
    again = result_of("index", "part-*.parquet", "--checkpoint", "kept")
    assert (again["files_read"], again["records"]) == (1, 87)
    assert again["content_hash"] != first["content_hash"]


def test_the_index_command_reports_its_result(data: Path) -> None:
    shown = run("index", "part-*.parquet").stdout
    assert shown.startswith("3 files, 12 chunks, 120 records, ")
    assert "3 files read, 0 already indexed" in shown
    assert "add --checkpoint" in shown


def test_inspect_shows_files_columns_and_records(data: Path) -> None:
    shown = run("inspect", "part-*.parquet", "--records", "2").stdout
    # Paths are printed completely regardless of their length, so that they can be searched for.
    assert f"{data / 'part-2.parquet'} " in shown
    assert "int64" in shown
    assert "'a', 'b'" in shown
    found = result_of("inspect", "part-*.parquet", "--records", "2")
    assert found["columns"] == [{"name": "k", "type": "int64"}, {"name": "word", "type": "string"}]
    assert found["first_records"] == [{"k": 0, "word": "a"}, {"k": 1, "word": "b"}]
    assert [file["chunks"] for file in found["files"]] == [4, 4, 4]


def test_inspect_says_what_a_group_mixes(data: Path) -> None:
    shown = run("inspect", "part-*.parquet", "--global-batch", "16", "--ranks", "2").stdout
    assert "shuffle=True: a global batch of 16 records mixes records of about 12 of 12 chunks (lanes=8" in shown
    assert "a rank reads 4 of 8 lanes" in shown
    assert "without a group: a task has about 10 records of 10 of 12 chunks" in " ".join(shown.split())
    found = result_of("inspect", "part-0.parquet", "--global-batch", "31", "--ranks", "2")["shuffle"]
    assert (found["mixed_chunks"], found["tasks"]["mixed_chunks"]) == (4, 4)
    assert found["warnings"] == [
        "there is only one lane, so each of the 2 ranks decodes all records: lanes= divides them, too"
    ]


def test_conversion_resumes_where_it_stopped(data: Path) -> None:
    arguments = ["convert", "part-*.parquet", "--to", "out/train", "--to-format", "jsonl", "--shards", "4"]
    first = result_of(*arguments)
    assert [Path(name).name for name in first["files"]] == [f"train-0000{i}-of-00004.jsonl" for i in range(4)]
    lines = [json.loads(line) for name in first["files"] for line in Path(name).read_text().splitlines()]
    assert [line["k"] for line in lines] == list(range(120))
    Path(first["files"][2]).unlink()
    assert result_of(*arguments)["kept"] == 3
    assert "overwriting" in refused(*arguments, "--filter", "k > 5")
    filtered = result_of(*arguments, "--filter", "k >= 118", "--filter", "word == b", "--columns", "k", "--overwrite")
    text = "".join(Path(name).read_text() for name in filtered["files"])
    assert [json.loads(line) for line in text.splitlines()] == [{"k": 119}]


def test_split_keeps_the_format(data: Path) -> None:
    found = result_of("split", "part-*.parquet", "--to", str(data / "half"), "--shards", "2")
    assert [pq.read_table(name).num_rows for name in found["files"]] == [60, 60]
    shown = run("split", "part-*.parquet", "--to", "half", "--shards", "2").stdout
    assert "half-00000-of-00002.parquet to half-00001-of-00002.parquet" in shown
    assert "2 of them existed already" in shown


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["index", "absent-*.parquet"], "no file matches"),
        (["inspect", "part-0.parquet", "--format", "odd"], "there is no format 'odd'"),
        (["convert", "part-0.parquet", "--to", "x", "--to-format", "odd"], "there is no format 'odd'"),
        (["convert", "part-0.parquet", "--to", "x", "--to-format", "csv", "--columns", "z"], "no column 'z'"),
        (["convert", "part-0.parquet", "--to", "x", "--to-format", "csv", "--filter", "k >"], "COLUMN OPERATOR VALUE"),
        (["split", "empty.parquet", "--to", "x", "--shards", "2"], "empty.parquet is corrupt"),
    ],
)
def test_mistakes_raise_one_sentence(data: Path, arguments: list[str], text: str) -> None:
    (data / "empty.parquet").write_bytes(b"")
    assert text in refused(*arguments)


def test_files_of_several_formats_cannot_be_split(data: Path) -> None:
    (data / "a.csv").write_text("k\n1\n")
    (data / "b.jsonl").write_text('{"k": 2}\n')
    assert "different formats (csv, jsonl)" in refused("split", "a.csv", "b.jsonl", "--to", "x", "--shards", "2")


def test_columns_survive_conversion_to_recordio(data: Path) -> None:
    result_of("convert", "part-*.parquet", "--to", "records", "--to-format", "recordio", "--shards", "2")
    arguments = ["convert", "records-*.recordio", "--to", "back", "--to-format", "parquet", "--json-records"]
    back = result_of(*arguments, "--columns", "word,k", "--filter", "k > 9")
    expected = [{"word": "ab"[k % 2], "k": k} for k in range(10, 120)]
    assert pq.read_table(back["files"][0]).to_pylist() == expected
    arguments[1] = "part-0.parquet"
    assert "decode= applies to RecordIO only" in refused(*arguments, "--overwrite")


def test_an_index_that_cannot_be_stored_raises_an_error(data: Path) -> None:
    """Otherwise the user would believe that the index exists."""
    message = refused("index", "part-*.parquet", "--checkpoint", "part-0.parquet/kept")
    assert "cannot store the index" in message
    assert "a file is where a directory should be" in message


def test_an_error_about_corrupt_data_says_what_to_do(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = (data / "part-0.parquet").read_bytes()
    (data / "cut.parquet").write_bytes(content[:-60])
    assert run_command_line(["dataset", "index", "cut.parquet"]) == 2
    error = capsys.readouterr().err
    assert "cut.parquet is corrupt" in error
    assert "on_corrupt skip" in error
    assert error.count("\n") == 1
    damaged = bytearray(content)
    damaged[10:60] = bytes(50)
    (data / "damaged.parquet").write_bytes(damaged)
    assert "on_corrupt skip" in refused("convert", "damaged.parquet", "--to", "x", "--to-format", "csv")
    result_of("convert", "damaged.parquet", "--to", "x", "--to-format", "csv", "--on-corrupt", "skip", "--overwrite")


def test_columns_that_csv_cannot_hold_are_named(data: Path) -> None:
    pq.write_table(pa.table({"k": [1], "list": [[1, 2]], "bytes": [b"\xff"]}), data / "odd.parquet")
    convert = ["convert", "odd.parquet", "--to", "x", "--to-format", "csv", "--overwrite"]
    assert "column 'list' (list<item: int64>) cannot be written as csv" in refused(*convert)
    assert "column 'bytes' (binary) cannot be written as csv" in refused(*convert, "--columns", "k,bytes")
    result_of(*convert, "--columns", "k")


def test_a_conversion_that_would_change_values_fails_with_exit_code_1(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not 2: the data and the command are valid. The user decides whether the changes matter."""
    pq.write_table(pa.table({"price": [Decimal("1.10")]}), data / "exact.parquet")
    convert = ["dataset", "convert", "exact.parquet", "--to", "x", "--to-format", "csv"]
    assert run_command_line(convert) == 1
    assert "csv changes the values of 'price', so nothing was written" in capsys.readouterr().err
    assert not list(data.glob("x*"))
    assert run_command_line([*convert, "--lossy"]) == 0
    assert "changed by the format: price" in capsys.readouterr().err


def test_an_in_memory_target_is_rejected(data: Path) -> None:
    assert "lost when this command ends" in refused("split", "part-0.parquet", "--to", "memory://a/b", "--shards", "2")


def test_an_interrupted_conversion_says_how_to_continue(
    data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("flightedl.formats.convert.convert", interrupted)
    assert run_command_line(["dataset", "split", "part-0.parquet", "--to", "x", "--shards", "2"]) == 130
    assert "run the same command to write" in capsys.readouterr().err


def test_the_exit_code_shows_that_input_must_be_changed(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line(["dataset", "index", "absent.parquet"]) == 2
    assert capsys.readouterr().err.startswith("flightedl: ")


@pytest.mark.parametrize(
    ("text", "condition"),
    [
        ("k > 5", ("k", ">", 5)),
        ('word == "5"', ("word", "==", "5")),
        ("word == a b", ("word", "==", "a b")),
        ("k in [1, 2]", ("k", "in", [1, 2])),
        ("k not in [1]", ("k", "not in", [1])),
        ("k != null", ("k", "!=", None)),
    ],
)
def test_a_condition_is_parsed_from_text(text: str, condition: tuple) -> None:
    assert _condition(text) == condition


def test_data_is_served_with_declared_types(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, value in enumerate((1, 0.5)):
        pq.write_table(pa.table({"x": [value]}), tmp_path / f"{number}.parquet")
    pattern = f"{tmp_path}/*.parquet"
    assert run_command_line(["data", "serve", pattern]) == 2
    assert "types= sets its type" in capsys.readouterr().err
    # The address has no etcd, so the command ends after it has indexed the data.
    run_command_line(["data", "serve", pattern, "--types", "x=double", "--etcd", f"127.0.0.1:{closed_port()}"])
    assert "serving 2 records of 2 files" in capsys.readouterr().out


def test_a_condition_without_a_value_is_rejected() -> None:
    with pytest.raises(UsageError, match="COLUMN OPERATOR VALUE"):
        _condition("k >")
