"""Tar archives as written by WebDataset, and by other implementations of tar."""

from __future__ import annotations

import io
import re
import subprocess
import tarfile
from pathlib import Path
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
    layout = TaskLayout(index, spec.batch_size, records_per_task=10**9)
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
    assert "ends without an end mark" in index.skipped[0]


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


def header_of(name: str, kind: bytes, size: int = 0, **fields: Any) -> bytes:
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, size
    for field, value in fields.items():
        setattr(info, field, value)
    return info.tobuf(tarfile.GNU_FORMAT)


def sparse_of(name: str, stored: bytes, extensions: int) -> bytes:
    """Return a sparse member as GNU tar writes it, with more blocks of its map than fit into the header."""
    header = bytearray(header_of(name, b"S", len(stored)))
    header[482] = extensions > 0
    header[148:156] = b"%06o\0 " % (sum(header) - sum(header[148:156]) + 8 * ord(" "))
    maps = b"".join(bytes(504) + bytes([number < extensions - 1]) + bytes(7) for number in range(extensions))
    return bytes(header) + maps + stored + bytes(-len(stored) % 512)


PLAIN = member_of("1.png", b"a" * 600) + member_of("1.cls", b"b")
LAST = member_of("2.png", b"c") + member_of("2.cls", b"d")
END = bytes(1024)
#: Bytes of a member, and the reason why it is left out ("" if nothing is said about it).
OTHERS = {
    "a sparse file": (sparse_of("1.txt", b"HEADTAIL", 0), "1 x sparse file (first: '1.txt')"),
    "a sparse file with extensions": (sparse_of("1.txt", b"x" * 700, 3), "1 x sparse file (first: '1.txt')"),
    "a global header of pax": (tarfile.TarInfo.create_pax_global_header({"comment": "x"}), ""),
    "a symbolic link": (header_of("1.txt", b"2", linkname="x"), "1 x link (first: '1.txt')"),
    "a hard link": (header_of("1.txt", b"1", linkname="1.png"), "1 x link (first: '1.txt')"),
    "a hard link with a size": (header_of("1.txt", b"1", 600, linkname="1.png"), "1 x link (first: '1.txt')"),
    "a device": (header_of("1.txt", b"3"), "1 x member of kind b'3' (first: '1.txt')"),
    "a volume's continuation": (header_of("1.txt", b"M", 3) + b"abc" + bytes(509), "1 x member of kind b'M'"),
    "a directory": (header_of("more.txt", b"5"), ""),
    "a directory of version 7": (header_of("more.txt/", b"\0"), ""),
    "a label": (header_of("label.txt", b"V"), ""),
    "a name without an ending": (member_of("README", b"x"), "1 x name without key or ending (first: 'README')"),
    "a file of macOS": (member_of("._1.png", b"x"), "1 x name without key or ending (first: '._1.png')"),
    "a folder of macOS": (member_of("__MACOSX/1.png", b"x"), "1 x metadata (first: '__MACOSX/1.png')"),
    "a pax header as a file": (member_of("PaxHeaders.12/1.png", b"x"), "1 x metadata (first: 'PaxHeaders.12/1.png')"),
    "a lone block of zeros": (bytes(512), "1 x lone block of zeros (first: 'byte 2560')"),
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("text_chunk_bytes", [1, 1 << 20])
def test_members_that_are_no_data_are_left_out_and_counted(world: World, name: str, text_chunk_bytes: int) -> None:
    other, sentence = OTHERS[name]
    world.put("a.tar", PLAIN + other + LAST + END)
    spec = DatasetSpec(("a.tar",), text_chunk_bytes=text_chunk_bytes)
    assert rows_of(world, spec) == [
        {"__key__": "1", "cls": b"b", "png": b"a" * 600},
        {"__key__": "2", "cls": b"d", "png": b"c"},
    ]
    said = build_index(world.files, spec).skipped
    assert len(said) == bool(sentence)
    assert all(f"a.tar has members that are no data: {sentence}" in each for each in said)


def test_a_sparse_file_of_pax_is_left_out(world: World) -> None:
    info = tarfile.TarInfo("GNUSparseFile.9/1.txt")
    info.size = 4
    info.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "1.txt"}
    world.put("a.tar", PLAIN + info.tobuf(tarfile.PAX_FORMAT) + b"data" + bytes(508) + LAST + END)
    assert "1 x sparse file" in build_index(world.files, DatasetSpec(("a.tar",))).skipped[0]
    assert [row["__key__"] for row in rows_of(world, DatasetSpec(("a.tar",)))] == ["1", "2"]


def test_an_archive_that_was_cut_at_any_block_is_not_taken_for_a_whole_one(world: World) -> None:
    complete = archive(*[(f"{n}.txt", b"%d" % n) for n in range(4)], (f"{'x' * 150}.txt", b"4"))
    end = len(complete.rstrip(b"\0")) // 512 * 512 + 512
    for cut in range(0, end + 1024, 512):
        world.put("a.tar", complete[:cut])
        with pytest.raises(CorruptChunkError, match=r"a\.tar is corrupt.*without an end mark"):
            build_index(world.files, DatasetSpec(("a.tar",)))
    world.put("a.tar", complete[: end + 1024])
    assert build_index(world.files, DatasetSpec(("a.tar",))).record_count == 5


def test_bytes_after_the_end_mark_raise(world: World) -> None:
    world.put("a.tar", archive(("a.jpg", b"1")) + archive(("b.jpg", b"2")))
    with pytest.raises(CorruptChunkError, match=r"a\.tar is corrupt.*bytes after its end mark"):
        build_index(world.files, DatasetSpec(("a.tar",)))
    index = build_index(world.files, DatasetSpec(("a.tar",), on_corrupt="skip"))
    assert index.record_count == 1
    assert "bytes after its end mark" in index.skipped[0]


def test_an_archive_without_records_is_named(world: World) -> None:
    world.put("a.tar", bytes(10240))
    with pytest.raises(DataError, match=r"there is no record in a\.tar"):
        build_index(world.files, DatasetSpec(("a.tar",)))


@pytest.mark.parametrize("on_corrupt", ["fail", "skip"])
def test_a_key_that_comes_back_later_raises(world: World, on_corrupt: str) -> None:
    world.put("a.tar", archive(("a.jpg", b"1"), ("b.jpg", b"3"), ("a.cls", b"2"), ("b.cls", b"4")))
    with pytest.raises(DataError, match=r"a\.tar has files of record 'a' in several places, again at byte 2560: write"):
        build_index(world.files, DatasetSpec(("a.tar",), on_corrupt=on_corrupt))


def test_endings_are_lowered_as_webdataset_does(world: World) -> None:
    world.put("a.tar", archive(("./A.JPG", b"1"), ("./A.Seg.PNG", b"2"), ("./b.jpg", b"3")))
    assert rows_of(world, DatasetSpec(("a.tar",))) == [
        {"__key__": "./A", "jpg": b"1", "seg.png": b"2"},
        {"__key__": "./b", "jpg": b"3", "seg.png": None},
    ]
    world.put("a.tar", archive(("a.JPG", b"1"), ("a.jpg", b"2")))
    with pytest.raises(CorruptChunkError, match="record 'a' has two files 'jpg'"):
        build_index(world.files, DatasetSpec(("a.tar",)))


@pytest.mark.parametrize("name", ["0.__key__", "0.__KEY__", "caf\udce9.txt"])
def test_names_that_cannot_be_used_raise_one_sentence(world: World, name: str) -> None:
    world.put("a.tar", archive(("00.txt", b"1"), (name, b"2"), form=tarfile.GNU_FORMAT))
    expected = rf"^a\.tar has the file {re.escape(ascii(name))} at byte 1536, but names must be UTF-8 and not end in"
    with pytest.raises(DataError, match=expected) as raised:
        build_index(world.files, DatasetSpec(("a.tar",), on_corrupt="skip"))
    assert not isinstance(raised.value, CorruptChunkError)
    world.put("a.tar", archive(("é/日本.txt", b"1")))
    assert rows_of(world, DatasetSpec(("a.tar",))) == [{"__key__": "é/日本", "txt": b"1"}]


@pytest.mark.parametrize(("size", "form"), [(b"\x80" + bytes(10) + b"\x05", "binary"), (b"00000000005\0", "octal")])
def test_sizes_in_base_256_are_read(world: World, size: bytes, form: str) -> None:
    world.put("a.tar", with_size(size) + b"12345" + bytes(507) + END)
    assert rows_of(world, DatasetSpec(("a.tar",))) == [{"__key__": "a", "txt": b"12345"}], form


@pytest.mark.parametrize("size", [b"\xff" * 12, b"-0000000001\0", b"x\0" + bytes(10)])
def test_impossible_sizes_are_damage(world: World, size: bytes) -> None:
    world.put("a.tar", with_size(size) + END)
    with pytest.raises(CorruptChunkError, match=r"a\.tar is corrupt.*(no header at byte 0|negative)"):
        build_index(world.files, DatasetSpec(("a.tar",)))


def with_size(size: bytes) -> bytes:
    header = bytearray(header_of("a.txt", b"0"))
    header[124:136] = size
    header[148:156] = b"%06o\0 " % (sum(header) - sum(header[148:156]) + 8 * ord(" "))
    return bytes(header)


def test_a_damaged_pax_header_is_damage(world: World) -> None:
    for content in (b"5 a=", b"0 a=b\n", b"-9 a=b\n", b"x"):
        world.put("a.tar", header_of("p", b"x", len(content)) + content + bytes(512 - len(content)) + LAST + END)
        with pytest.raises(CorruptChunkError, match=r"a\.tar is corrupt"):
            build_index(world.files, DatasetSpec(("a.tar",)))


def test_archives_of_gnu_tar_are_read(world: World, tmp_path: Path) -> None:
    for name in ("train/0.cls", "train/0.png", f"train/{'x' * 160}.cls", "train/7.cls"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    with (tmp_path / "train" / "sparse.cls").open("wb") as file:
        file.seek(1 << 20)
        file.write(b"tail")
    (tmp_path / "train" / "9.cls").symlink_to("0.cls")
    (tmp_path / "train" / "8.cls").hardlink_to(tmp_path / "train" / "0.cls")
    for form in ("gnu", "pax", "oldgnu"):
        command = ["tar", f"--format={form}", "--sort=name", "-S", "-cf", "-", "-C", tmp_path, "train"]
        world.put("a.tar", subprocess.run(command, check=True, capture_output=True).stdout)
        found = {row["__key__"]: row["cls"] for row in rows_of(world, DatasetSpec(("a.tar",), text_chunk_bytes=1))}
        keys = ("train/0", f"train/{'x' * 160}", "train/7")
        assert found == {key: f"{key}.cls".encode() for key in keys}
        said = build_index(world.files, DatasetSpec(("a.tar",))).skipped[0]
        assert "2 x link (first: 'train/8.cls')" in said
        assert "1 x sparse file (first: " in said
