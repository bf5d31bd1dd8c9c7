"""A file is its content: copies with other times are read, and changed content is refused."""

from __future__ import annotations

import io
import os
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from flightedl.adapters.storage import FsspecFiles
from flightedl.errors import DataError, UsageError
from flightedl.formats.chunk_index import ChunkIndex
from flightedl.formats.chunks import ChangedFileError, CorruptChunkError
from flightedl.formats.dataset_spec import DatasetSpec, moved_folders
from flightedl.formats.index import build_index
from flightedl.formats.reader import read_task
from flightedl.formats.registry import named_format
from flightedl.formats.stored_index import decode_index, encode_index
from tests.support.memory import MemoryFiles

SHOWN = ["csv", "jsonl", "recordio", "tfrecord"]
NOT_SHOWN = ["parquet", "arrow", "tar"]


def content_of(kind: str, values: list[str]) -> bytes:
    """Return a file whose footer or headers do not depend on the values."""
    if kind == "tar":
        made = io.BytesIO()
        with tarfile.open(fileobj=made, mode="w") as archive:
            for number, value in enumerate(values):
                member = tarfile.TarInfo(f"{number}.txt")
                member.size = len(value)
                archive.addfile(member, io.BytesIO(value.encode()))
        return made.getvalue()
    column = pa.array(values, pa.binary() if kind == "recordio" else pa.string())
    table = pa.table({"record": column})
    return b"".join(named_format(kind).write(table.to_batches(), table.schema))


def rewritten(kind: str, content: bytes) -> bytes:
    """Return the content with other values, and with an equal footer or headers."""
    if kind == "parquet":
        at = len(content) - int.from_bytes(content[-8:-4], "little") - 70_000
        return content[: at - 1] + bytes([content[at - 1] ^ 1]) + content[at:]
    return content.replace(b"aaaa", b"bbbb", 1)


def values_of(kind: str) -> list[str]:
    return [os.urandom(50_000).hex() for _ in range(4)] if kind == "parquet" else ["aaaa", "cccc"]


def read(files: Any, index: ChunkIndex, spec: DatasetSpec) -> list[Any]:
    tasks = [read_task(files, [index.chunk(n)], spec, None, 0, n, schema=index.schema) for n in range(len(index))]
    return [row for task in tasks for batch in task for row in batch.to_pylist()]


class Copied:
    """An indexed file, and a copy of its folder with other times."""

    def __init__(self, root: Path, kind: str) -> None:
        self.old, self.new = root / "old", root / "new"
        self.old.mkdir()
        self.name = "a" + named_format(kind).suffixes[0]
        (self.old / self.name).write_bytes(content_of(kind, values_of(kind)))
        self.spec = DatasetSpec((f"{self.old}/*",), batch_size=10)
        self.index = decode_index(encode_index(build_index(FsspecFiles(), self.spec)))
        self.rows = read(FsspecFiles(), self.index, self.spec)
        shutil.copytree(self.old, self.new)
        os.utime(self.new / self.name, ns=(5, 5))

    def replace(self) -> Path:
        """Put the copy in the place of the indexed file."""
        return (self.new / self.name).replace(self.old / self.name)


@pytest.mark.parametrize("kind", SHOWN)
def test_a_copy_whose_content_is_read_is_the_same_file(tmp_path: Path, kind: str) -> None:
    copied = Copied(tmp_path, kind)
    file = copied.replace()
    assert read(FsspecFiles(), copied.index, copied.spec) == copied.rows
    file.write_bytes(rewritten(kind, file.read_bytes()))
    with pytest.raises(ChangedFileError, match="has changed since it was indexed"):
        read(FsspecFiles(), copied.index, copied.spec)


@pytest.mark.parametrize("kind", NOT_SHOWN)
def test_a_copy_whose_footer_is_read_must_be_declared_as_one(tmp_path: Path, kind: str) -> None:
    copied = Copied(tmp_path, kind)
    file = copied.replace()
    with pytest.raises(ChangedFileError, match=r"only its time or ETag differs.* --data-moved OLD=NEW or data_moved="):
        read(FsspecFiles(), copied.index, copied.spec)
    same = FsspecFiles({str(copied.old): str(copied.old)})
    assert read(same, copied.index, copied.spec) == copied.rows
    file.write_bytes(content_of(kind, ["aaaa", "ccccc"]))
    with pytest.raises(ChangedFileError, match="restart the job to use the new content"):
        read(same, copied.index, copied.spec)


@pytest.mark.parametrize("kind", NOT_SHOWN)
def test_values_rewritten_in_place_are_refused(tmp_path: Path, kind: str) -> None:
    copied = Copied(tmp_path, kind)
    file = copied.old / copied.name
    file.write_bytes(rewritten(kind, file.read_bytes()))
    assert build_index(FsspecFiles(), copied.spec).content_hash() == copied.index.content_hash()
    os.utime(file, ns=(7, 7))
    with pytest.raises(DataError, match="has changed since it was indexed"):
        read(FsspecFiles(), copied.index, copied.spec)


@pytest.mark.parametrize("kind", [*SHOWN, *NOT_SHOWN])
def test_files_are_read_in_their_new_folder_and_keep_their_identity(tmp_path: Path, kind: str) -> None:
    copied = Copied(tmp_path, kind)
    shutil.rmtree(copied.old)
    files = FsspecFiles(moved_folders(f"{copied.old}/={copied.new}"))
    assert read(files, copied.index, copied.spec) == copied.rows
    (found,) = files.expand([f"{copied.old}/*"])
    assert (found.url, found.name, found.is_copy) == (f"{copied.old}/{copied.name}", copied.name, True)
    anew = DatasetSpec((f"{copied.new}/*",), batch_size=10)
    assert build_index(FsspecFiles(), anew).content_hash() == copied.index.content_hash()


def test_bytes_that_differ_in_a_file_of_the_same_time_are_corrupt() -> None:
    class Same(MemoryFiles):
        """Files whose versions do not show changes."""

        def _stat(self, url: str) -> Any:
            from flightedl.ports import FileStat

            return FileStat(url, len(self.contents[url]), "same")

    files, spec = Same({"a.csv": b"x\n1\n"}), DatasetSpec(("a.csv",))
    index = build_index(files, spec)
    files.contents["a.csv"] = b"x\n2\n"
    with pytest.raises(CorruptChunkError, match="its bytes are not those that were indexed"):
        read(files, index, spec)
    files.contents["a.csv"] = b"y\n1\n"
    with pytest.raises(CorruptChunkError, match="its bytes are not those that were indexed"):
        read(files, index, spec)


def test_moved_folders_are_pairs() -> None:
    assert moved_folders("/a/=/b,file:///c=s3://d/e/") == {"/a": "/b", "/c": "s3://d/e"}
    for text in ("/a", "/a=", "=/b"):
        with pytest.raises(UsageError, match=r"is not OLD=NEW \(data_moved, --data-moved or FLIGHTEDL_DATA_MOVED\)"):
            moved_folders(text)


@pytest.mark.parametrize("kind", ["csv", "jsonl", "recordio", "parquet", "arrow", "tar"])
def test_indexing_opens_each_file_once_and_asks_for_no_more_than_before(kind: str) -> None:
    """The numbers of reads are those of the versions that computed no marks."""
    reads = {"csv": 2, "jsonl": 2, "recordio": 3, "parquet": 1, "arrow": 9, "tar": 6}
    calls: list[int] = []

    class Counting(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            calls.append(size or 0)
            return super().read(size)

    class Files(MemoryFiles):
        def open(self, url: str) -> Any:
            return Counting(self.contents[url])

    url = "a" + named_format(kind).suffixes[0]
    build_index(Files({url: content_of(kind, ["aaaa", "cccc"])}), DatasetSpec((url,)))
    assert len(calls) == reads[kind]
