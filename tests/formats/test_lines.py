"""Lines as records, and the sparse formats svmlight and slots."""

from __future__ import annotations

import gzip
import io
import json
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from flightedl.client.arguments import dataset_declaration
from flightedl.client.data.options import decoding
from flightedl.errors import DataError, LossyError, UsageError
from flightedl.formats import decode as ready
from flightedl.formats.convert import Target, convert
from flightedl.formats.dataset_spec import DatasetSpec
from flightedl.formats.index import build_index
from flightedl.formats.reader import Decode, read_task
from flightedl.formats.registry import named_format
from tests.formats.conftest import World
from tests.formats.test_every_format import QUICK

BOM = b"\xef\xbb\xbf"


def read(
    world: World, content: bytes, form: str, decode: Decode | None = None, url: str = "a.txt", **options: Any
) -> list[dict[str, Any]]:
    spec = DatasetSpec((world.put(url, content),), form, batch_size=4, **options)
    index = build_index(world.files, spec)
    chunks = [index.chunk(number) for number in range(len(index))]
    batches = read_task(world.files, chunks, spec, None, 0, 0, schema=index.schema, decode=decode)
    return [record for batch in batches for record in batch.to_pylist()]


@given(records=st.lists(st.binary(max_size=5), max_size=12), ends=st.binary(min_size=1), has_end=st.booleans())
@example(records=[b"\x00", BOM], ends=b"\x00", has_end=False)
@QUICK
def test_each_line_that_is_not_empty_is_a_record(records: list[bytes], ends: bytes, has_end: bool) -> None:
    records = [record.replace(b"\n", b"").rstrip(b"\r") for record in records]
    lines = [record + (b"\n", b"\r\n")[ends[n % len(ends)] % 2] for n, record in enumerate(records)]
    content = b"".join(lines) if has_end else b"".join(lines)[:-1].rstrip(b"\r")
    expected = [record for record in records if record]
    if not expected or expected[0].startswith(BOM):
        return
    for more in (b"", BOM):
        for text_chunk_bytes in (1, 1 << 20):
            found = read(World(), more + content, "lines", text_chunk_bytes=text_chunk_bytes)
            assert [record["record"] for record in found] == expected


def test_a_function_decodes_lines(world: World) -> None:
    assert read(world, gzip.compress(b"[1]\r\n\n[2]"), "lines", lambda line: {"n": json.loads(line)}, "a.gz") == [
        {"n": [1]},
        {"n": [2]},
    ]
    with pytest.raises(UsageError, match='decode= applies to RecordIO and format="lines" only'):
        read(world, b"a\n1\n", "csv", ready.slots)


def test_json_is_a_format_of_recordio() -> None:
    declared = dataset_declaration(urls="a", batch_size=1)
    assert decoding(declared, json.loads)[0].format == "recordio-json"
    assert decoding(declared, len) == (declared, len)


SVMLIGHT = b"# data\n1 3:0.5 7:1e2 # c: 1\n-1 qid:4 2:-1\n\n+1\n"
SLOTS = b"1 6001:17 6001:4 b:9\n0 b:18446744073709551615 d:0.5\n"
SPARSE = {
    "svmlight": (
        SVMLIGHT,
        [
            {"label": 1.0, "qid": None, "indices": [3, 7], "values": [0.5, 100.0]},
            {"label": -1.0, "qid": 4, "indices": [2], "values": [-1.0]},
            {"label": 1.0, "qid": None, "indices": [], "values": []},
        ],
    ),
    "slots": (
        SLOTS,
        [
            {"label": 1, "6001": [17, 4], "b": [9], "d": []},
            {"label": 0, "6001": [], "b": [2**64 - 1], "d": [0.5]},
        ],
    ),
}


@pytest.mark.parametrize("form", SPARSE)
def test_sparse_lines_become_columns(world: World, form: str) -> None:
    content, records = SPARSE[form]
    untidy = BOM + content.replace(b"\n", b" \r\n").replace(b" ", b"\t ")
    for text in (content, content[:-1], untidy):
        assert read(world, text, form) == records
        assert read(world, text, form, text_chunk_bytes=1) == records
    assert read(world, gzip.compress(content), form, url=f"a.{form}.gz") == records
    assert read(world, content, form, columns=("label",), filter=(("label", "<", 1),)) == [
        {"label": record["label"]} for record in records if record["label"] < 1
    ]
    declared = dataset_declaration(urls="a", batch_size=1, format="lines")
    assert decoding(declared, getattr(ready, form))[0].format == form
    # With other formats, the function converts one record after the other.
    decoded = [getattr(ready, form)(line) for line in content.split(b"\n") if line and line[:1] != b"#"]
    assert [record["label"] for record in decoded] == [record["label"] for record in records]
    with pytest.raises(ValueError, match="0 lines"):
        getattr(ready, form)(b"")


@pytest.mark.parametrize(
    ("form", "content", "text"),
    [
        ("svmlight", b"1 3:1\n3:1\n", "record 2 has no label"),
        ("svmlight", b"1 3:1\n1 3:x\n", "record 2 has a value that is no double: 'x'"),
        ("svmlight", b"1 3:\n", "record 1 has a value that is no double: ''"),
        ("svmlight", b"1 a:1\n", "an index that is no int64: 'a'"),
        ("svmlight", b"1 qid:x 3:1\n", "a query that is no int64: 'x'"),
        ("svmlight", b"1,2 3:1\n", "a label that is no double: '1,2'"),
        ("svmlight", b"1 3:1 7\n", "record 1 has '7', which is no pair with a colon"),
        ("svmlight", b"1 3:1 # \xe9\n", "not UTF-8"),
        ("slots", b"1 2 1:1\n", "record 1 has '2', which is no pair with a colon"),
        ("slots", b"1 label:1\n", "a slot is called 'label', or has no name"),
        ("slots", b"1 :1\n", "a slot is called 'label', or has no name"),
        ("slots", b"\n\n", "there is no record"),
        ("lines", b"", "there is no record"),
    ],
)
def test_a_line_that_does_not_fit_is_refused(world: World, form: str, content: bytes, text: str) -> None:
    with pytest.raises(DataError) as caught:
        read(world, content, form)
    assert text in str(caught.value)
    assert "a.txt" in str(caught.value)


@pytest.mark.parametrize("lines", [1, 2])
def test_a_file_with_very_many_slots_is_refused(world: World, lines: int) -> None:
    each = 10_001 // lines + 1
    content = b"".join(b"1 " + b" ".join(b"%d:1" % (n * each + k) for k in range(each)) + b"\n" for n in range(lines))
    with pytest.raises(DataError, match=r"a\.txt .*10,000.*: is it svmlight\?"):
        read(world, content, "slots", text_chunk_bytes=1)


def test_slots_have_one_type_in_all_files(world: World) -> None:
    content = b"1 a:1\n" * 5000 + b"2 a:0.5 c:x#y\n"
    found = read(world, content, "slots")
    assert found[0] == {"label": 1, "a": [1.0], "c": []}
    assert found[-1] == {"label": 2, "a": [0.5], "c": ["x#y"]}


def test_values_are_those_of_scikit_learn(world: World) -> None:
    datasets = pytest.importorskip("sklearn.datasets")
    matrix, labels = datasets.load_svmlight_file(io.BytesIO(SVMLIGHT.replace(b"-1 qid:4", b"-1")), zero_based=True)
    found = read(world, SVMLIGHT, "svmlight")
    assert [record["label"] for record in found] == labels.tolist()
    for record, row in zip(found, matrix, strict=True):
        assert (record["indices"], record["values"]) == (row.indices.tolist(), row.data.tolist())


def test_lines_are_written_if_they_can_be_read_back(world: World) -> None:
    spec = DatasetSpec((world.write("a.parquet", pa.table({"s": ["x y", "é"]}), "parquet"),))
    convert(world.files, build_index(world.files, spec), spec, world.storage, Target("b", "lines"))
    assert world.storage.read("b-00000-of-00001.lines") == "x y\né\n".encode()
    for wrong in ("a\nb", "", "a\r"):
        with pytest.raises((DataError, LossyError), match="end of a line"):
            list(named_format("lines").write([pa.record_batch({"s": [wrong]})], pa.schema({"s": pa.string()})))
    with pytest.raises(UsageError, match="can only be read"):
        list(named_format("slots").write([], pa.schema([])))


def test_a_split_copies_lines(world: World) -> None:
    content = b"".join(b"%d a:1\r\n\n" % number for number in range(10))
    spec = DatasetSpec((world.put("a.slots", content),))
    convert(world.files, build_index(world.files, spec), spec, world.storage, Target("b", "slots", 2), is_split=True)
    halves = [world.storage.read(f"b-0000{n}-of-00002.slots") for n in (0, 1)]
    assert b"".join(halves).split() == content.split()
