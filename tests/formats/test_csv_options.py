"""CSV and TSV files without a header line, with other delimiters and nulls."""

from __future__ import annotations

import gzip
from typing import Any

import pytest

from flightedl.errors import DataError, UsageError
from flightedl.formats.chunks import TextOptions, column_names
from flightedl.formats.convert import Target, convert
from flightedl.formats.dataset_spec import DatasetSpec
from flightedl.formats.index import build_index
from flightedl.formats.reader import read_task
from tests.formats.conftest import World

BOM = b"\xef\xbb\xbf"


def read(
    world: World, content: bytes, url: str = "a.csv", names: str = "a,b1-b2", **options: Any
) -> list[dict[str, Any]]:
    text = TextOptions(column_names(names), options.pop("delimiter", ""), options.pop("null_values", ()))
    spec = DatasetSpec((world.put(url, content),), batch_size=4, text=text, **options)
    index = build_index(world.files, spec)
    chunks = [index.chunk(number) for number in range(len(index))]
    batches = read_task(world.files, chunks, spec, None, 0, 0, schema=index.schema)
    return [record for batch in batches for record in batch.to_pylist()]


@pytest.mark.parametrize(
    "content",
    [
        b"1,2,x\n4,5,y\n",
        b"1,2,x\n4,5,y",
        BOM + b"1,2,x\r\n4,5,y\r\n",
        b"1,2,x\r4,5,y",
        b"\n\r\n1,2,x\n\n4,5,y\n",
        b'"1","2","x"\n4,5,y\n',
        b"a,b1,b2\n1,2,x\n4,5,y\n",
        BOM + b",b1,b2\r\n1,2,x\r\n4,5,y\r\n",
    ],
)
def test_each_record_of_a_file_without_a_header_is_read(world: World, content: bytes) -> None:
    records = [{"a": 1, "b1": 2, "b2": "x"}, {"a": 4, "b1": 5, "b2": "y"}]
    assert read(world, content) == records
    assert read(world, content, text_chunk_bytes=1) == records
    assert read(world, gzip.compress(content), "day_0.gz", format="csv") == records


@pytest.mark.parametrize("first", ["1,2", "x,-1.5", "x,2024-01-01", "x,68fd1e64", "x,true", "x,007", "x,1e-5", "1,1"])
def test_a_first_line_with_values_is_no_header(world: World, first: str) -> None:
    with pytest.raises(DataError, match=r"the first line of a\.csv has '.*names="):
        read(world, f"{first}\n3,4\n".encode(), names="")


@pytest.mark.parametrize("header", ["x,y1", "2d,e1", ",x", "feature-1,T1"])
def test_names_with_digits_are_a_header(world: World, header: str) -> None:
    assert len(read(world, f"{header}\n3,4\n".encode(), names="")) == 1


@pytest.mark.parametrize(
    ("content", "options", "text"),
    [
        (b"1,2\n", {}, "the first record of a.csv has 2 fields, but names= has 3"),
        (b"1,2,3,\n", {}, "has 4 fields, but names= has 3"),
        (b"a;b\n", {"names": ""}, "are divided by ';': pass delimiter=';'"),
        (b'1,"2,3\n', {}, "ends within a quoted field"),
        (b"1,2,3\n4,5\n", {}, "Expected 3 columns, got 2"),
        (b"1,2,\xff\n", {}, "not UTF-8"),
        (b"", {}, "there is no record in a.csv"),
        (b"\n\n", {}, "there is no record in a.csv"),
        (b'{"a": 1}', {"format": "jsonl"}, "apply to csv and tsv, but a.csv is jsonl"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(world: World, content: bytes, options: Any, text: str) -> None:
    with pytest.raises(DataError) as caught:
        read(world, content, **options)
    assert text in str(caught.value)


def test_ranges_stand_for_all_of_their_names() -> None:
    assert column_names("label, I1-I3,C09-C11,x-1,I1-J2") == (
        *("label", "I1", "I2", "I3", "C09", "C10", "C11", "x-1", "I1-J2"),
    )
    assert column_names("0-2") == ("0", "1", "2")
    for wrong, text in (("b9-b1", "must ascend"), ("a,,b", "names is 'a,,b'"), ("c0-c1000000", "must ascend")):
        with pytest.raises(UsageError, match=text):
            column_names(wrong)
    with pytest.raises(UsageError, match="names has 'a' twice"):
        TextOptions(("a", "a"))
    for delimiter in ("||", "\n", '"', "§"):
        with pytest.raises(UsageError, match="must be one ASCII character"):
            TextOptions(delimiter=delimiter)


def test_given_nulls_are_nulls_in_text_too(world: World) -> None:
    content = b"\\N\x01x\n3\x01\\N\n\x01NULL\n"
    found = read(world, content, names="a,b", delimiter="\x01", null_values=("\\N",))
    assert [tuple(record.values()) for record in found] == [(None, "x"), (3, None), (None, "NULL")]
    assert read(world, content, names="a,b", delimiter="\x01")[0] == {"a": "\\N", "b": "x"}


def test_other_options_are_another_content(world: World) -> None:
    world.put("a.tsv", b"1\t2|3\n")
    options = [TextOptions(("a", "b"), *more) for more in ((), ("|",), ("", ("2",)))]
    specs = [DatasetSpec(("a.tsv",), text=text) for text in (*options, TextOptions(("a", "c")))]
    indices = [build_index(world.files, spec) for spec in specs]
    assert len({index.content_hash() for index in indices}) == len({spec.index_hash() for spec in specs}) == 4
    with pytest.raises(DataError, match="not those that were indexed"):
        list(read_task(world.files, [indices[0].chunk(0)], specs[2], None, 0, 0, schema=indices[0].schema))


def test_a_split_has_no_header_either(world: World) -> None:
    content = b"".join(b"%d|x\n" % number for number in range(10))
    spec = DatasetSpec((world.put("a.csv", content),), text=TextOptions(("n", "s"), "|"))
    convert(world.files, build_index(world.files, spec), spec, world.storage, Target("b", "csv", 2), is_split=True)
    assert b"".join(world.storage.read(f"b-0000{n}-of-00002.csv") for n in (0, 1)) == content


def test_a_record_may_have_very_many_columns(world: World) -> None:
    count = 5_000
    found = read(world, b",".join(b"%d" % number for number in range(count)), names=f"c1-c{count}")
    assert found[0][f"c{count}"] == count - 1
