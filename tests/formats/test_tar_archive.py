"""Tar archives as written by WebDataset, and by other implementations of tar."""

from __future__ import annotations

import io
import tarfile
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from flightedl.errors import DataError, UsageError
from flightedl.formats.chunks import CorruptChunkError
from flightedl.formats.dataset_spec import DatasetSpec
from flightedl.formats.index import build_index
from flightedl.formats.layout import TaskLayout
from flightedl.formats.reader import read_task
from flightedl.formats.registry import named_format
from flightedl.formats.tar_archive import _member, _plain_members

World = Any  # the one of this folder's conftest


def archive(*members: tuple[str, bytes], form: int = tarfile.PAX_FORMAT) -> bytes:
    """Return an archive written by Python's tarfile, with a directory and a link, which are not data."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=form) as tar:
        directory = tarfile.TarInfo("train")
        directory.type = tarfile.DIRTYPE
        tar.addfile(directory)
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
        link = tarfile.TarInfo("train/link.png")
        link.type, link.linkname = tarfile.SYMTYPE, "elsewhere"
        tar.addfile(link)
    return file.getvalue()


def samples(count: int) -> list[tuple[str, bytes]]:
    made = []
    for number in range(count):
        made.append((f"train/{number:04d}.left.png", bytes([number % 251]) * (number % 700)))
        made.append((f"train/{number:04d}.cls", b"%d" % number))
    return made


def member_of(name: str, content: bytes) -> bytes:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    return info.tobuf() + content + bytes(-len(content) % tarfile.BLOCKSIZE)


def rows_of(world: World, spec: DatasetSpec, seed: int | None = None) -> list[dict]:
    index = build_index(world.files, spec)
    layout = TaskLayout(index, spec.batch_size, chunks_per_task=2)
    batches = [
        batch
        for task in range(layout.task_count)
        for batch in read_task(world.files, layout.chunks_of(task), spec, seed, 0, task, schema=index.schema)
    ]
    return pa.Table.from_batches(batches).to_pylist()


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
@pytest.mark.parametrize("seed", [None, 7])
def test_files_that_share_a_key_are_one_record(world: World, form: int, seed: int | None) -> None:
    world.put("a.tar", archive(*samples(90), form=form))
    found = rows_of(world, DatasetSpec(("a.tar",), batch_size=7, text_chunk_bytes=4096), seed)
    expected = [
        {"__key__": f"train/{n:04d}", "cls": b"%d" % n, "left.png": bytes([n % 251]) * (n % 700)} for n in range(90)
    ]
    assert sorted(found, key=lambda row: row["__key__"]) == expected
    assert (found == expected) == (seed is None)


def test_long_names_belong_to_their_record(world: World) -> None:
    """Headers of long names have several blocks, within which a chunk must not end."""
    name = "train/" + "x" * 150
    for form in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT):
        members = [(f"{name}{number}.bin", b"%d" % number) for number in range(20)]
        world.put("a.tar", archive(*members, form=form))
        found = rows_of(world, DatasetSpec(("a.tar",), batch_size=3, text_chunk_bytes=1))
        assert [row["bin"] for row in found] == [b"%d" % number for number in range(20)]


def test_a_missing_file_of_a_record_is_null(world: World) -> None:
    world.put("a.tar", archive(("1.png", b"a"), ("1.cls", b"b"), ("2.png", b"c"), ("README", b"d"), (".hidden", b"e")))
    expected = [{"__key__": "1", "cls": b"b", "png": b"a"}, {"__key__": "2", "cls": None, "png": b"c"}]
    assert rows_of(world, DatasetSpec(("a.tar",))) == expected
    spec = DatasetSpec(("a.tar",), columns=("png",), filter=(("cls", "!=", None),))
    assert rows_of(world, spec) == [{"png": b"a"}]


def test_written_values_are_read_back(world: World) -> None:
    table = pa.table(
        {
            "__key__": [f"a/{number}" for number in range(20)],
            "number": np.arange(20),
            "png": [bytes([number]) * number * 100 for number in range(20)],
        }
    )
    world.write("a.tar", table, "tar", rows=6)
    found = rows_of(world, DatasetSpec(("a.tar",), text_chunk_bytes=2000))
    assert [row["__key__"] for row in found] == table["__key__"].to_pylist()
    assert [row["png"] for row in found] == table["png"].to_pylist()
    assert [row["json"] for row in found] == [b'{"number":%d}' % number for number in range(20)]
    with tarfile.open(fileobj=io.BytesIO(world.files.contents["a.tar"])) as tar:
        assert tar.getnames()[:3] == ["a/0.png", "a/0.json", "a/1.png"]


def test_records_without_a_key_are_numbered(world: World) -> None:
    world.write("a.tar", pa.table({"png": [b"x", b"y", b"z"]}), "tar", rows=2)
    assert [row["__key__"] for row in rows_of(world, DatasetSpec(("a.tar",)))] == [
        "000000000",
        "000000001",
        "000000002",
    ]


@pytest.mark.parametrize(
    "table",
    [
        pa.table({"__key__": ["a.b"], "png": [b"x"]}),
        pa.table({"__key__": ["a", "a"], "png": [b"x", b"y"]}),
        pa.table({"png": pa.array([None], pa.binary())}),
    ],
)
def test_records_that_an_archive_cannot_hold_are_rejected(world: World, table: pa.Table) -> None:
    with pytest.raises(DataError, match="cannot be written as tar"):
        world.write("a.tar", table, "tar")


def test_columns_that_cannot_be_files_are_rejected() -> None:
    with pytest.raises(UsageError, match="'a/b' cannot be the ending"):
        named_format("tar").write([], pa.schema([("a/b", pa.binary())]))
    with pytest.raises(UsageError, match="leaves no name for n"):
        list(named_format("tar").write([], pa.schema([("json", pa.binary()), ("n", pa.int64())])))


def test_a_truncated_archive_raises_or_its_rest_is_skipped(world: World) -> None:
    complete = archive(*samples(30))
    with tarfile.open(fileobj=io.BytesIO(complete)) as tar:
        data_end = max(member.offset_data + member.size for member in tar if member.isreg())
    for cut in np.linspace(0, data_end - 1, 40).astype(int).tolist():
        world.put("a.tar", complete[:cut])
        with pytest.raises(CorruptChunkError, match=r"a\.tar is corrupt"):
            build_index(world.files, DatasetSpec(("a.tar",)))
    world.put("a.tar", complete[: data_end - 1])
    index = build_index(world.files, DatasetSpec(("a.tar",), on_corrupt="skip", text_chunk_bytes=1))
    assert index.record_count == 29
    assert "ends within" in index.skipped[0]


def test_a_damaged_header_is_not_mistaken_for_the_end(world: World) -> None:
    content = bytearray(archive(*samples(10)))
    with tarfile.open(fileobj=io.BytesIO(bytes(content))) as tar:
        place = tar.getmembers()[9].offset
    content[place + 3] ^= 255
    world.put("a.tar", bytes(content))
    with pytest.raises(CorruptChunkError, match=f"no header at byte {place}"):
        build_index(world.files, DatasetSpec(("a.tar",)))


def test_records_between_directories_and_links_are_read(world: World) -> None:
    plain = [member_of(f"{number}.cls", b"%d" % number) for number in range(4)]
    link = tarfile.TarInfo("9.cls")
    link.type, link.linkname = tarfile.SYMTYPE, "elsewhere"
    directory = tarfile.TarInfo("more.cls")
    directory.type = tarfile.DIRTYPE
    for other in (link.tobuf(), directory.tobuf(), member_of(f"{'x' * 120}.cls", b"4")):
        world.put("a.tar", b"".join([*plain[:2], other, *plain[2:], bytes(1024)]))
        found = [row["cls"] for row in rows_of(world, DatasetSpec(("a.tar",), batch_size=4))]
        assert [cell for cell in found if cell != b"4"] == [b"0", b"1", b"2", b"3"]


def test_two_files_with_one_name_are_rejected(world: World) -> None:
    world.put("a.tar", archive(("1.png", b"a"), ("1.png", b"b")))
    with pytest.raises(CorruptChunkError, match="record '1' has two files 'png'"):
        build_index(world.files, DatasetSpec(("a.tar",)))


def test_archives_with_different_columns_are_rejected(world: World) -> None:
    world.put("a.tar", archive(("1.png", b"a")))
    world.put("b.tar", archive(("1.jpg", b"a")))
    with pytest.raises(DataError, match=r"b\.tar does not go with a\.tar"):
        build_index(world.files, DatasetSpec(("*.tar",)))


@pytest.mark.parametrize("place", [3, 100, 140, 200])
def test_a_damaged_header_is_not_read_as_a_plain_member(place: int) -> None:
    """Members of plain archives are found without the standard library, which checks the sums of headers."""
    data = bytearray(_member("a.txt", b"content") + _member("b.txt", b"more"))
    assert _plain_members(memoryview(data)) is not None
    data[place] ^= 1
    assert _plain_members(memoryview(data)) is None
