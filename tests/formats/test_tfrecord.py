"""TFRecord files of ``tf.train.Example``: those of TensorFlow, and some that are made by hand, damaged or unusual."""

from __future__ import annotations

import gzip
import struct
import zlib
from typing import Any

import google_crc32c
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from flightedl.errors import DataError, LossyError, UsageError
from flightedl.formats.chunks import CorruptChunkError
from flightedl.formats.convert import Target, convert
from flightedl.formats.dataset_spec import DatasetSpec
from flightedl.formats.index import build_index, extended_index
from flightedl.formats.layout import TaskLayout
from flightedl.formats.reader import ReadCounts, read_task
from flightedl.formats.registry import format_for
from tests.support.memory import MemoryFiles

World = Any  # the one of this folder's conftest
QUICK = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

#: The same three Examples, written by TensorFlow 2.21 without compression, with GZIP and with ZLIB.
TENSORFLOW = {
    "plain": bytes.fromhex(
        "620000000000000079fd606f0a600a240a076772c3b6c39f6512191a170a15fdffffffffffffffff01ac0280808080808080"
        "80400a100a05696d61676512070a050a03ffd8000a0e0a056c6162656c12051a030a01010a160a0673636f726573120c120a"
        "0a080000003f0000c0bf2e8660fb3f00000000000000516576610a3d0a0d0a05696d61676512040a020a000a0e0a056c6162"
        "656c12051a030a01000a0e0a046e6f746512060a040a02c3a90a0c0a0673636f726573120212001ca787ab1d000000000000"
        "00602fdf230a1b0a090a05696d61676512000a0e0a056c6162656c12051a030a0107d00a8364"
    ),
    "gzip": bytes.fromhex(
        "1f8b08000000000000034b628080cabf09f95c095c2a5cece94587b71d9e9f2a242925ce25faf73f1430ae616a8002072e01"
        "2ed6ccdcc4f45421762e562ee6ff3718b8f8b85873129352738458a598b91819b9c4b8d88a93f38b528b857884b8b8388016"
        "d833301cd8afd796f0db1e6a63606a5922972d172fcc2c162e262e7483407c96bcfc925421362ea0fce1955c3c7083998418"
        "6496b7af96851a97a07f5f994b9a8b13661cba51ec17b89a5300a4f007a2ee000000"
    ),
    "zlib": bytes.fromhex(
        "789c4b628080cabf09f95c095c2a5cece94587b71d9e9f2a242925ce25faf73f1430ae616a8002072e012ed6ccdcc4f45421"
        "762e562ee6ff3718b8f8b85873129352738458a598b91819b9c4b8d88a93f38b528b857884b8b8388016d833301cd8afd796"
        "f0db1e6a63606a5922972d172fcc2c162e262e7483407c96bcfc925421362ea0fce1955c3c70839984186496b7af96851a97"
        "a07f5f994b9a8b13661cba51ec17b89a5300f48e3a90"
    ),
}
EXPECTED = [
    {"größe": [-3, 300, 2**62], "image": b"\xff\xd8\x00", "label": 1, "note": None, "scores": [0.5, -1.5]},
    {"größe": None, "image": b"", "label": 0, "note": "é".encode(), "scores": []},
    {"größe": None, "image": None, "label": 7, "note": None, "scores": None},
]


def masked(data: bytes) -> int:
    checksum = google_crc32c.value(data)
    return (((checksum >> 15) | (checksum << 17)) + 0xA282EAD8) % 2**32


def record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", masked(length)) + data + struct.pack("<I", masked(data))


def varint(number: int) -> bytes:
    number %= 2**64
    return bytes([number]) if number < 128 else bytes([number % 128 + 128]) + varint(number // 128)


def field(number: int, content: bytes) -> bytes:
    return varint(number * 8 + 2) + varint(len(content)) + content


def entry(name: str, feature: bytes) -> bytes:
    return field(1, field(1, name.encode()) + field(2, feature))


def feature_of(values: list[Any], *, is_packed: bool = True) -> bytes:
    """Return a Feature with values of one type, as protobuf encodes them."""
    if values and isinstance(values[0], bytes):
        return field(1, b"".join(field(1, value) for value in values))
    is_float = bool(values) and isinstance(values[0], float)
    parts = [struct.pack("<f", value) if is_float else varint(value) for value in values]
    if is_packed:
        return field(2 if is_float else 3, field(1, b"".join(parts)))
    return field(2 if is_float else 3, b"".join((b"\x0d" if is_float else b"\x08") + part for part in parts))


def example_of(*, is_packed: bool = True, **features: list[Any] | None) -> bytes:
    entries = [
        entry(name, b"" if values is None else feature_of(values, is_packed=is_packed))
        for name, values in features.items()
    ]
    return field(1, b"".join(entries))


def file_of(*records: bytes) -> bytes:
    return b"".join(map(record, records))


def numbered(start: int, stop: int) -> bytes:
    return file_of(*(example_of(n=[n], x=[n / 4], s=[b"%d" % n] * (1 + n % 2)) for n in range(start, stop)))


def read(files: MemoryFiles, spec: DatasetSpec, counts: ReadCounts | None = None) -> list[dict[str, Any]]:
    index = build_index(files, spec)
    layout = TaskLayout(index, spec.batch_size)
    rows = []
    for task in range(layout.task_count):
        chunks = layout.chunks_of(task)
        for batch in read_task(files, chunks, spec, None, 0, task, schema=index.schema, counts=counts):
            batch.validate(full=True)
            assert batch.schema == index.schema or spec.columns
            rows += batch.to_pylist()
    return rows


def rows_of(*contents: bytes, **options: Any) -> list[dict[str, Any]]:
    files = MemoryFiles({f"{number}.tfrecord": content for number, content in enumerate(contents)})
    return read(files, DatasetSpec(("*.tfrecord",), batch_size=5, **options))


def refusal(*contents: bytes, **options: Any) -> str:
    with pytest.raises(DataError) as caught:
        rows_of(*contents, **options)
    return str(caught.value)


@pytest.mark.parametrize("name", ["a.tfrecord", "a.tfrecord.gz", "train.tfrecord-00000-of-00001", "a.tfrec"])
@pytest.mark.parametrize("compression", TENSORFLOW)
def test_files_of_tensorflow_are_read_whatever_their_compression_and_name(compression: str, name: str) -> None:
    files = MemoryFiles({name: TENSORFLOW[compression]})
    assert read(files, DatasetSpec((name,))) == EXPECTED
    schema = build_index(files, DatasetSpec((name,))).schema
    assert {each.name: str(each.type) for each in schema} == {
        "größe": "list<item: int64>",
        "image": "binary",
        "label": "int64",
        "note": "binary",
        "scores": "list<item: float>",
    }


@pytest.mark.parametrize("name", ["a.tfrecord.zst", "a.tfrecord.gz"])
def test_files_that_are_named_after_another_compression_are_read(name: str) -> None:
    compress = gzip.compress if name.endswith("zst") else lambda data: data
    assert read(MemoryFiles({name: compress(TENSORFLOW["plain"])}), DatasetSpec((name,))) == EXPECTED
    zstd = pa.compress(TENSORFLOW["plain"], codec="zstd", asbytes=True)
    assert read(MemoryFiles({"a.tfrecord.zst": zstd}), DatasetSpec(("a.tfrecord.zst",))) == EXPECTED


def test_columns_and_conditions_are_applied() -> None:
    options = {"columns": ("scores",), "filter": (("label", "<", 7),)}
    assert rows_of(TENSORFLOW["plain"], **options) == [{"scores": [0.5, -1.5]}, {"scores": []}]


@pytest.mark.parametrize("text_chunk_bytes", [1, 300, 1 << 20])
def test_chunks_end_with_records(text_chunk_bytes: int) -> None:
    expected = [{"n": n, "s": [b"%d" % n] * (1 + n % 2), "x": n / 4} for n in range(100)]
    assert rows_of(numbered(0, 40), numbered(40, 100), text_chunk_bytes=text_chunk_bytes) == expected


def test_numbers_may_be_packed_or_not() -> None:
    values = {"i": [-1, 0, 2**63 - 1, -(2**63)], "f": [0.5, float("inf")], "b": [b"", b"x" * 300]}
    contents = [file_of(example_of(**values, is_packed=is_packed)) for is_packed in (True, False)]
    # A list may also consist of several packed parts.
    parts = field(3, field(1, b"\x01\x02") + b"\x08\x03" + field(1, b"\x04"))
    found = rows_of(*contents, file_of(field(1, entry("i", parts))))
    assert found == [values, values, {"i": [1, 2, 3, 4], "f": None, "b": None}]


def test_a_feature_is_a_list_if_a_record_anywhere_has_not_one_value() -> None:
    one, two, none = (file_of(example_of(x=values)) for values in ([1], [1, 2], []))
    assert rows_of(one, one) == [{"x": 1}, {"x": 1}]
    assert rows_of(one, two) == rows_of(one + two, text_chunk_bytes=1) == [{"x": [1]}, {"x": [1, 2]}]
    assert rows_of(one, none) == [{"x": [1]}, {"x": []}]
    assert rows_of(two, one, types=(("x", "list<double>"),)) == [{"x": [1.0, 2.0]}, {"x": [1.0]}]
    assert rows_of(one, none, types=(("x", "int32"),)) == [{"x": 1}, {"x": None}]
    text = refusal(one + two, types=(("x", "int64"),))
    assert "0.tfrecord, record 2: a value does not fit the type given by types=" in text
    assert "2 values of feature 'x', but int64 is the type of one: make it list<int64>" in text


def test_a_missing_feature_is_null_and_so_is_one_without_a_list() -> None:
    content = file_of(example_of(x=[1]), example_of(), b"", example_of(x=None, y=None))
    # Some encoders leave out values of map entries that are empty.
    content += record(field(1, field(1, field(1, b"x"))))
    assert rows_of(content) == [{"x": 1, "y": None}] + [{"x": None, "y": None}] * 4
    assert rows_of(content, types=(("y", "string"),))[0] == {"x": 1, "y": None}
    assert "no columns" in refusal(file_of(b"", b""))


def test_types_are_set_by_name() -> None:
    content = file_of(example_of(t=["é".encode()], i=[3], f=[0.5], ts=[b"a", b"b"]))
    types = (("f", "double"), ("i", "int8"), ("t", "string"), ("ts", "list<string>"))
    files = MemoryFiles({"a.tfrecord": content})
    spec = DatasetSpec(("a.tfrecord",), types=types)
    assert [str(each.type) for each in build_index(files, spec).schema] == [
        "double",
        "int8",
        "string",
        "list<item: string>",
    ]
    assert read(files, spec) == [{"f": 0.5, "i": 3, "t": "é", "ts": ["a", "b"]}]
    large = file_of(example_of(i=[1] * 100), example_of(i=[300]))
    assert "0.tfrecord, record 2: a value does not fit" in refusal(large, types=(("i", "list<int8>"),))
    binary = file_of(example_of(t=[b"a"]), example_of(t=[b"\xff"]))
    assert "0.tfrecord, record 2: a value does not fit" in refusal(binary, types=(("t", "string"),))
    double = file_of(example_of(f=[1e30, 2.0]))
    assert "record 1: a value does not fit" in refusal(double, types=(("f", "list<halffloat>"),))


@pytest.mark.parametrize("other", [[1.5], [b"x"], [1.5, 2.5]])
@pytest.mark.parametrize("is_large", [True, False])
def test_values_of_two_types_are_refused(other: list[Any], is_large: bool) -> None:
    whole, rest = (file_of(*[example_of(x=values)] * 3) for values in ([1], other))
    text = refusal(whole + rest, text_chunk_bytes=1 << 20 if is_large else 1)
    assert text.startswith("0.tfrecord is corrupt, bytes ")
    assert "feature 'x' is " in text
    assert "int64" in text
    assert rows_of(whole + rest, text_chunk_bytes=1, on_corrupt="skip") == [{"x": 1}] * 3
    text = refusal(whole, rest)
    assert "1.tfrecord does not go with 0.tfrecord: column 'x' is" in text
    assert "types= sets its type" in text


def test_whole_numbers_and_floats_of_two_files_go_together_if_their_type_is_set() -> None:
    found = rows_of(file_of(example_of(x=[1])), file_of(example_of(x=[1.5])), types=(("x", "double"),))
    assert found == [{"x": 1.0}, {"x": 1.5}]


def test_other_formats_go_together_with_features_of_their_types(world: World) -> None:
    world.put("a.tfrecord", file_of(example_of(b=[b"x"], i=[1], t=[b"t"])))
    world.write("b.parquet", pa.table({"b": [b"y"], "i": pa.array([2], pa.int32()), "t": ["u"]}), "parquet")
    found = read(world.files, DatasetSpec(("a.tfrecord", "b.parquet")))
    assert found == [{"b": b"x", "i": 1, "t": "t"}, {"b": b"y", "i": 2, "t": "u"}]


def test_a_later_file_with_lists_does_not_join_a_column_of_single_values() -> None:
    one, two = file_of(example_of(x=[1])), file_of(example_of(x=[1, 2]))
    files = MemoryFiles({"a.tfrecord": one})
    for types, is_joined in (((), False), ((("x", "list<int64>"),), True)):
        spec = DatasetSpec(("*.tfrecord",), types=types)
        files.contents = {"a.tfrecord": one}
        index = build_index(files, spec)
        files.contents["b.tfrecord"] = two
        index, refused = extended_index(files, spec, index, files.expand(["b.tfrecord"]))
        assert len(index.stats) == 1 + is_joined
        assert is_joined or "column 'x' is list<item: int64> and not int64" in str(*refused.values())


FOREIGN = {
    "SequenceExample": field(1, entry("x", feature_of([1]))) + field(2, b""),
    "text": b"hello",
    "unknown field of a Feature": field(1, entry("x", field(4, b"\x01"))),
    "two lists": field(1, entry("x", feature_of([1]) + feature_of([b"x"]))),
    "no name": field(1, field(1, field(2, feature_of([1])))),
    "more in an entry": field(1, field(1, field(1, b"x") + field(2, b"") + field(2, b""))),
    "half a float": field(1, entry("x", field(2, field(1, b"abc")))),
    "an endless number": field(1, entry("x", field(3, field(1, b"\xff" * 11)))),
    "half a number": field(1, entry("x", field(3, field(1, b"\x01\xff")))),
    "a number beyond its list": field(1, entry("x", field(3, b"\x08\xff"))),
    "a float beyond its list": field(1, entry("x", field(2, b"\x0d\x00"))),
    "a length beyond its list": field(1, entry("x", field(1, b"\x0a\x7f"))),
    "an endless length": b"\x0a" + b"\xff" * 11,
    "a huge length": b"\x0a" + varint(2**63 + 5),
    "name that is no UTF-8": field(1, field(1, field(1, b"\xff") + field(2, feature_of([1])))),
    "a feature twice": field(1, entry("x", feature_of([1])) + entry("x", feature_of([2]))),
    "a feature twice, without a list": field(1, entry("x", b"")) + field(1, entry("x", feature_of([2]))),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_a_record_that_is_no_example_is_refused_or_skipped_with_its_chunk(case: str) -> None:
    content = numbered(0, 3) + record(FOREIGN[case]) + numbered(3, 6)
    text = refusal(content)
    assert text.startswith("0.tfrecord is corrupt, bytes 0 to ")
    if "UTF-8" not in case:
        assert "its record 4 " in text
        assert ("has feature 'x' twice" if "twice" in case else "is no tf.train.Example") in text
    assert text.endswith("or choose on_corrupt skip to train without the corrupt parts")
    files = MemoryFiles({"a.tfrecord": content})
    spec = DatasetSpec(("a.tfrecord",), text_chunk_bytes=1, on_corrupt="skip")
    found = [row["n"] for row in read(files, spec)]
    # A chunk may contain a short record and its neighbors.
    assert found == [n for n in range(6) if n in found]
    assert {0, 1, 4, 5} <= set(found)
    assert len(build_index(files, spec).skipped) == 1


def test_a_wrong_checksum_of_data_costs_one_chunk() -> None:
    content = bytearray(numbered(0, 10))
    content[len(numbered(0, 4)) + 20] ^= 1
    text = refusal(bytes(content))
    assert "the data of its record 5 do not match their checksum" in text
    found = rows_of(bytes(content), on_corrupt="skip", text_chunk_bytes=1)
    assert [row["n"] for row in found] == [0, 1, 2, 3, 5, 6, 7, 8, 9]


@pytest.mark.parametrize("text_chunk_bytes", [1, 250, 1 << 20])
def test_a_wrong_checksum_of_a_length_costs_the_rest_of_the_file(text_chunk_bytes: int) -> None:
    content = bytearray(numbered(0, 10))
    place = len(numbered(0, 4))
    content[place + 2] ^= 1
    files = MemoryFiles({"a.tfrecord": bytes(content), "b.tfrecord": numbered(10, 12)})
    spec = DatasetSpec(("*.tfrecord",), text_chunk_bytes=text_chunk_bytes)
    with pytest.raises(CorruptChunkError, match=r"a\.tfrecord is corrupt.*the length of its record .* does not match"):
        build_index(files, spec)
    spec = DatasetSpec(("*.tfrecord",), text_chunk_bytes=text_chunk_bytes, on_corrupt="skip")
    found = [row["n"] for row in read(files, spec)]
    assert found == {1: [0, 1, 2, 3, 10, 11], 250: [0, 1, 2, 3, 10, 11], 1 << 20: [10, 11]}[text_chunk_bytes]
    assert len(build_index(files, spec).skipped) == 1


def test_the_rest_of_a_damaged_file_is_not_read_into_memory() -> None:
    content = bytearray(numbered(0, 4) * 1000)
    content[2] ^= 1

    class Files(MemoryFiles):
        taken = 0

        def open(self, url: str) -> Any:
            file = super().open(url)
            read = file.read

            def counted(size: int | None = -1) -> bytes:
                data = read(size)
                self.taken += len(data)
                return bytes(data)

            file.read = counted
            return file

    files = Files({"a.tfrecord": bytes(content)})
    with pytest.raises(CorruptChunkError):
        build_index(files, DatasetSpec(("a.tfrecord",)))
    assert 0 < files.taken < len(content) / 4


@pytest.mark.parametrize("text_chunk_bytes", [1, 1 << 20])
def test_every_truncation_is_found(text_chunk_bytes: int) -> None:
    content = numbered(0, 4)
    ends = [len(numbered(0, stop)) for stop in range(5)]
    for cut in range(1, len(content)):
        whole = sum(cut >= end for end in ends[1:])
        if cut in ends:
            assert [row["n"] for row in rows_of(content[:cut])] == list(range(whole))
            continue
        assert "the file is truncated" in refusal(content[:cut], text_chunk_bytes=text_chunk_bytes)
        files = MemoryFiles({"a.tfrecord": content[:cut], "b.tfrecord": numbered(4, 5)})
        spec = DatasetSpec(("*",), text_chunk_bytes=text_chunk_bytes, on_corrupt="skip")
        *found, last = [row["n"] for row in read(files, spec)]
        assert last == 4
        assert found == list(range(len(found)))
        # Little more than the incomplete record is lost if chunks are small, and the only chunk otherwise.
        assert whole - 1 <= len(found) <= whole if text_chunk_bytes == 1 else not found


@pytest.mark.parametrize("compress", [gzip.compress, zlib.compress])
def test_damage_of_a_compressed_file_costs_the_file(compress: Any) -> None:
    content = compress(numbered(0, 50))
    for cut in range(12, len(content) - 1, 7):
        assert "0.tfrecord is corrupt" in refusal(content[:cut])
    damaged = bytearray(numbered(0, 50))
    damaged[len(numbered(0, 30)) + 2] ^= 1
    for text_chunk_bytes in (1, 1 << 20):
        options = {"text_chunk_bytes": text_chunk_bytes}
        assert "the length of its record" in refusal(compress(bytes(damaged)), **options)
        found = rows_of(compress(bytes(damaged)), numbered(50, 52), on_corrupt="skip", **options)
        assert [row["n"] for row in found] == [50, 51]


PLAIN = numbered(0, 12)


@given(place=st.integers(0, len(PLAIN) - 1), flip=st.integers(1, 255), size=st.sampled_from([1, 200, 1 << 20]))
@example(place=7, flip=128, size=1)
@QUICK
def test_no_flipped_bit_is_read(place: int, flip: int, size: int) -> None:
    content = bytearray(PLAIN)
    content[place] ^= flip
    assert refusal(bytes(content), text_chunk_bytes=size).startswith("0.tfrecord is corrupt")
    try:
        found = rows_of(bytes(content), text_chunk_bytes=size, on_corrupt="skip")
    except DataError as error:
        assert "there is no record in 0.tfrecord" in str(error)  # noqa: PT017
    else:
        numbers = [row["n"] for row in found]
        assert numbers == sorted({*range(12)} & {*numbers})
        assert len(numbers) < 12
        assert [row["x"] for row in found] == [n / 4 for n in numbers]


@given(data=st.binary(max_size=60), place=st.integers(0, 200), cut=st.integers(0, 20))
@settings(QUICK, max_examples=400)
def test_messages_with_correct_checksums_are_examples_or_refused(data: bytes, place: int, cut: int) -> None:
    """The compiled parser stays within its message, whatever that is."""
    whole = example_of(n=[1, 300], f=[1.5], b=[b"abc", b""])
    place %= len(whole)
    for message in (data, whole[:place] + data + whole[place + cut :]):
        try:
            rows_of(numbered(0, 2) + record(message))
        except DataError as error:
            assert "0.tfrecord" in str(error)  # noqa: PT017


VALUES = st.one_of(
    st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4),
    st.lists(st.floats(width=32, allow_nan=False), max_size=4),
    st.lists(st.binary(max_size=9), max_size=4),
)


@st.composite
def columns(draw: st.DrawFn) -> pa.Table:
    count = draw(st.integers(1, 8))
    found = {}
    for name in draw(st.lists(st.text(st.characters(codec="utf-8"), max_size=5), min_size=1, max_size=4, unique=True)):
        kind = draw(st.sampled_from([pa.int64(), pa.float32(), pa.binary()]))
        of = {"int64": st.integers(-(2**63), 2**63 - 1), "float": st.floats(width=32), "binary": st.binary(max_size=9)}
        values = of[str(kind)]
        if draw(st.booleans()):
            kind, values = pa.list_(kind), st.lists(values, max_size=3)
        found[name] = pa.array(draw(st.lists(st.none() | values, min_size=count, max_size=count)), kind)
    return pa.table(found)


@given(table=columns(), size=st.sampled_from([1, 1 << 20]), rows=st.integers(1, 4))
@settings(QUICK, max_examples=200)
def test_written_values_are_read_back(world: World, table: pa.Table, size: int, rows: int) -> None:
    world.write("a.tfrecord", table, "tfrecord", rows)
    # Lists that all have one value, and columns of nulls only, have other types unless these are set.
    types = tuple((each.name, str(each.type)) for each in table.schema)
    found = read(world.files, DatasetSpec(("a.tfrecord",), batch_size=3, text_chunk_bytes=size, types=types))
    assert repr([{name: row[name] for name in table.column_names} for row in found]) == repr(table.to_pylist())


def run(world: World, table: pa.Table, **options: Any) -> Any:
    world.write("a.parquet", table, "parquet")
    spec = DatasetSpec(("a.parquet",))
    return convert(world.files, build_index(world.files, spec), spec, world.storage, Target("x", "tfrecord"), **options)


@pytest.mark.parametrize(
    ("column", "changed"),
    [
        (pa.array(["a", None, "é"]), False),
        (pa.array([["a"], None, []]), False),
        (pa.array([b"a", None, b"\xff"]), False),
        (pa.array([1, None, 3], pa.uint8()), False),
        (pa.array([1.5, None, -2.0]), False),
        (pa.array([[1.5, 2.5], [], None], pa.list_(pa.float32())), False),
        (pa.array([[1, 2], [3, 4], None], pa.list_(pa.int16(), 2)), False),
        (pa.array(["a", "b", "a"]).dictionary_encode(), False),
        (pa.array([None, None, None], pa.string()), False),
        (pa.array([0.1, None, 1.0]), True),
        (pa.array([True, None, False]), True),
        (pa.array([[1], [2], [3]]), True),
    ],
)
def test_a_conversion_names_the_columns_that_tfrecord_changes(world: World, column: pa.Array, changed: bool) -> None:
    table = pa.table({"x": column, "n": [0, 1, 2]})
    if changed:
        with pytest.raises(LossyError, match="tfrecord changes the values of 'x'"):
            run(world, table)
    assert run(world, table, is_lossy=True).changed == (("x",) if changed else ())


@pytest.mark.parametrize(
    ("column", "text"),
    [
        (pa.array([{"a": 1}]), "column 'x' is struct<a: int64>: convert it to one of these, or leave it out"),
        (pa.array([1], pa.timestamp("us")), r"column 'x' is timestamp\[us\]: convert it"),
        (pa.array([[[1]]]), "column 'x' is list"),
        (pa.array([[1, None]]), "column 'x' cannot be written to TFRecord: its lists have nulls"),
        (pa.array([2**63], pa.uint64()), "column 'x' cannot be written to TFRecord: .*9223372036854775808"),
    ],
)
def test_columns_that_an_example_cannot_hold_are_refused(world: World, column: pa.Array, text: str) -> None:
    with pytest.raises((DataError, UsageError), match=text):
        run(world, pa.table({"x": column}))


def test_a_split_copies_records(world: World) -> None:
    contents = [file_of(*(example_of(x=[n], y=None, z=[]) for n in range(part, part + 5))) for part in (0, 5)]
    world.put("a.tfrecord", contents[0])
    world.put("b.tfrecord.gz", gzip.compress(contents[1]))
    spec = DatasetSpec(("*",), text_chunk_bytes=1)
    target = Target("x", "tfrecord", 3)
    done = convert(world.files, build_index(world.files, spec), spec, world.storage, target, is_split=True)
    assert b"".join(world.storage.files[name] for name in done.names) == b"".join(contents)


def test_shuffled_records_are_the_same_records() -> None:
    files = MemoryFiles({"a.tfrecord": numbered(0, 60)})
    spec = DatasetSpec(("a.tfrecord",), batch_size=7, text_chunk_bytes=300)
    index = build_index(files, spec)
    layout = TaskLayout(index, 7, records_per_task=10**9)
    found = list(read_task(files, layout.chunks_of(0), spec, 5, 0, 0, schema=index.schema))
    assert pc.sort_indices(pa.Table.from_batches(found)["n"]).to_pylist() != list(range(60))
    assert np.sort(pa.Table.from_batches(found)["n"]).tolist() == list(range(60))


def test_too_many_features_are_refused() -> None:
    content = file_of(example_of(**{f"f{number}": [1] for number in range(10_001)}))
    assert "it has 10,001 features, but 10,000 are the limit" in refusal(content)


def test_names_of_shards_imply_their_format() -> None:
    assert format_for("s3://b/x.tfrecord-00003-of-00010").name == "tfrecord"
    assert format_for("s3://b/x.csv-00003-of-00010").name == "csv"
    assert format_for("data/x.TFRecords.gz").name == "tfrecord"
