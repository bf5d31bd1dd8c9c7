"""FileListing of files: links, duplicates, hidden names, and queries of URLs."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

import pytest

from flightedl.adapters.storage import FsspecFiles, open_storage
from flightedl.errors import DataError
from flightedl.ports import FileListing


def write(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"x\n{name}\n")


def link(root: Path, name: str, target: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).symlink_to(target)


def names(root: Path, listing: FileListing) -> list[str]:
    return [stat.url.removeprefix(f"{root}/") for stat in listing]


def left_out(root: Path, listing: FileListing) -> list[str]:
    return [sentence.replace(f"{root}/", "") for sentence in listing.left_out]


def test_links_to_files_and_folders_are_followed(tmp_path: Path) -> None:
    """Layout of the Hugging Face cache and of ConfigMaps."""
    write(tmp_path, "blobs/1", "..2024/a.csv", "real.csv")
    link(tmp_path, "..data", "..2024")
    link(tmp_path, "a.csv", "..data/a.csv")
    link(tmp_path, "snap/b.csv", "../blobs/1")
    link(tmp_path, "alias", "snap")
    files = FsspecFiles()
    assert names(tmp_path, files.expand([f"{tmp_path}/*.csv"])) == ["a.csv", "real.csv"]
    listing = files.expand([f"{tmp_path}/alias/*"])
    assert names(tmp_path, listing) == ["alias/b.csv"]
    assert (listing[0].size_bytes, listing[0].name) == (10, "b.csv")
    assert files.stat(listing[0].url) == listing[0]
    deep = files.expand([f"{tmp_path}/**/*.csv"])
    assert names(tmp_path, deep) == ["a.csv", "alias/b.csv", "real.csv"]
    assert left_out(tmp_path, deep) == [
        "2 matching names are left out, such as ..2024: a name that a wildcard matches begins with _ or .",
        "snap/b.csv is left out: the same file is listed already",
    ]


def test_names_of_the_same_file_are_one(tmp_path: Path) -> None:
    write(tmp_path, "b.csv", "c.csv")
    link(tmp_path, "a.csv", "c.csv")
    os.link(tmp_path / "b.csv", tmp_path / "d.csv")
    listing = FsspecFiles().expand([f"{tmp_path}/*.csv", f"{tmp_path}/./c.csv", f"{tmp_path}//b.csv"])
    assert [stat.url.rpartition("/")[2] for stat in listing] == ["c.csv", "b.csv"]
    assert len(listing.left_out) == 1
    assert listing.left_out[0].startswith("4 matching names are left out, such as ")
    root = f"memory://{uuid.uuid4().hex}"
    open_storage(root).publish("x.csv", [b"1"])
    twice = FsspecFiles().expand([f"{root}/x.csv", f"{root}/x.csv"])
    assert len(twice) == 1
    assert twice.left_out[0].endswith("/x.csv is left out: the same file is listed already")


def test_links_in_a_loop_end(tmp_path: Path) -> None:
    write(tmp_path, "d/a.csv")
    link(tmp_path, "d/e/up", "..")
    link(tmp_path, "d/e/self.csv", "self.csv")
    with pytest.raises(DataError, match=r"self\.csv is a link without a target: restore the target, or remove it"):
        FsspecFiles().expand([f"{tmp_path}/**/*.csv"])
    (tmp_path / "d/e/self.csv").unlink()
    listing = FsspecFiles().expand([f"{tmp_path}/**/*.csv"])
    assert names(tmp_path, listing) == ["d/a.csv"]
    assert left_out(tmp_path, listing) == ["d/e/up is left out: it is a link to a folder above it"]


@pytest.mark.parametrize("pattern", ["*.csv", "*/b.csv", "a.csv", "**/*.csv"])
def test_a_link_without_a_target_is_an_error_unless_files_may_be_added(tmp_path: Path, pattern: str) -> None:
    link(tmp_path, "a.csv", "gone")
    link(tmp_path, "mount", "gone-too")
    with pytest.raises(DataError, match="is a link without a target"):
        FsspecFiles().expand([f"{tmp_path}/{pattern}"])
    listing = FsspecFiles().expand([f"{tmp_path}/{pattern}"], may_be_empty=True)
    assert {stat.version for stat in listing} == {""}


@pytest.mark.parametrize("kind", ["memory", "local"])
def test_a_wildcard_matches_no_hidden_component_unless_its_own_begins_so(tmp_path: Path, kind: str) -> None:
    root = f"memory://{uuid.uuid4().hex}" if kind == "memory" else str(tmp_path)
    hidden = (".git/a.csv", "_temporary/0/a.csv", "t/_delta_log/a.csv", "t/.a.csv", "t/_b.csv")
    for name in ("t/a.csv", "day=1/a.csv", *hidden):
        open_storage(root).publish(name, [name.encode()])

    def found(pattern: str) -> list[str]:
        return [stat.url.removeprefix("memory:///").removeprefix("memory://") for stat in expanded(pattern)]

    def expanded(pattern: str) -> FileListing:
        return FsspecFiles().expand([f"{root}/{pattern}"])

    short = root.removeprefix("memory://")
    assert found("**/*.csv") == found("*/*.csv") == [f"{short}/day=1/a.csv", f"{short}/t/a.csv"]
    assert "begins with _ or ." in expanded("**/*.csv").left_out[0]
    assert found("_temporary/**") == [f"{short}/_temporary/0/a.csv"]
    assert found(".g*/*.csv") == [f"{short}/.git/a.csv"]
    assert found("t/_*/*.csv") == [f"{short}/t/_delta_log/a.csv"]
    assert found("t/[ab].csv") == [f"{short}/t/a.csv"]
    assert [stat.name for stat in expanded("*/*.csv")] == ["day=1/a.csv", "t/a.csv"]


def test_folders_and_special_files_are_counted_and_unreadable_names_refused(tmp_path: Path) -> None:
    write(tmp_path, "a.csv")
    (tmp_path / "b.csv").mkdir()
    os.mkfifo(tmp_path / "c.csv")
    listing = FsspecFiles().expand([f"{tmp_path}/*.csv"])
    assert names(tmp_path, listing) == ["a.csv"]
    assert left_out(tmp_path, listing) == [
        "b.csv is left out: it is a folder",
        "c.csv is left out: it is neither a file nor a folder",
    ]
    with pytest.raises(DataError, match=r"names folders: name the files, as in .*/\*/\*\.parquet"):
        FsspecFiles().expand([f"{tmp_path}/*/"])
    with pytest.raises(DataError, match=r"no file matches .*b\*: .* \(.*b\.csv is left out: it is a folder\)"):
        FsspecFiles().expand([f"{tmp_path}/b*"])
    (tmp_path / os.fsdecode(b"\xff.csv")).write_text("x\n1\n")
    with pytest.raises(DataError, match=r"the name '.*udcff\.csv' is not UTF-8: rename the file"):
        FsspecFiles().expand([f"{tmp_path}/*.csv"])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # fsspec leaves blockcache files open
@pytest.mark.parametrize("cache", ["filecache", "simplecache", "blockcache"])
def test_a_cached_file_has_the_version_of_its_target(tmp_path: Path, cache: str) -> None:
    write(tmp_path, "a.csv")
    files = FsspecFiles()
    (before,) = files.expand([f"{cache}::file://{tmp_path}/*.csv"])
    assert before.url == f"{cache}::{tmp_path}/a.csv"
    with files.open(before.url) as file:
        assert file.read() == b"x\na.csv\n"
    assert files.stat(before.url) == before
    assert files.expand([str(tmp_path / "a.csv")])[0].version == before.version
    os.utime(tmp_path / "a.csv", ns=(1, 1))
    assert files.stat(before.url) != before
