"""The storage adapter: its contract on a local directory, in fsspec's memory and on a real S3 server."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from flightedl.adapters.storage import FsspecFiles, FsspecStorage, open_storage
from flightedl.config import child_environment
from flightedl.domain.data_urls import without_credentials
from flightedl.errors import DataError, NotFoundError, UnavailableError, UsageError
from tests.support.contracts.storage import StorageContract
from tests.support.processes import free_port
from tests.support.s3_server import S3Server


class TestLocalPath(StorageContract):
    @pytest.fixture
    def storage(self, tmp_path: Path) -> FsspecStorage:
        return open_storage(str(tmp_path / "not yet" / "there"))


class TestFileUrl(StorageContract):
    @pytest.fixture
    def storage(self, tmp_path: Path) -> FsspecStorage:
        return open_storage(f"file://{tmp_path}/root/")


class TestMemory(StorageContract):
    @pytest.fixture
    def storage(self) -> FsspecStorage:
        return open_storage(f"memory://{uuid.uuid4().hex}")


@pytest.mark.s3
class TestS3(StorageContract):
    @pytest.fixture
    def storage(self, s3_url: str) -> FsspecStorage:
        return open_storage(s3_url + "/some/where")


class _OverloadedFiles(MemoryFileSystem):
    """A store that answers all requests with the HTTP status 503, which s3fs turns into EBUSY."""

    protocol = "overloaded"

    def _refuse(self, *_: object, **__: object) -> None:
        raise OSError(errno.EBUSY, "Please reduce your request rate.")

    find = cat_file = pipe_file = rm_file = _refuse


@pytest.mark.parametrize("request_of", ["list", "read", "publish", "delete"])
def test_a_store_that_is_overloaded_is_unavailable(request_of: str) -> None:
    fsspec.register_implementation("overloaded", _OverloadedFiles, clobber=True)
    storage = open_storage("overloaded://bucket")
    requests = {
        "list": lambda: storage.list(""),
        "read": lambda: storage.read("a"),
        "publish": lambda: storage.publish("a", [b"1"]),
        "delete": lambda: storage.delete("a"),
    }
    with pytest.raises(UnavailableError, match="reduce your request rate"):
        requests[request_of]()


# --- local ---


def test_a_publish_that_fails_leaves_no_temporary_file(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    with pytest.raises(ZeroDivisionError):
        storage.publish("a", (bytes(1 // n) for n in (1, 0)))
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_disappears_during_a_publish_is_an_error_of_the_store(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path / "kept"))

    def parts() -> Iterator[bytes]:
        yield b"first"
        (tmp_path / "kept").rename(tmp_path / "gone")
        (tmp_path / "kept").write_text("a file where a directory should be")
        yield b"second"

    with pytest.raises(UsageError, match="a file is where a directory should be"):
        storage.publish("a", parts())


def test_temporary_files_of_a_killed_writer_are_not_listed(tmp_path: Path) -> None:
    (tmp_path / ".a.0123.partial").write_bytes(b"torn")
    assert open_storage(str(tmp_path)).list("") == ()


def test_the_file_is_synced_before_it_is_renamed_and_the_directory_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test observes the order of the calls: a process cannot see what reached the disk first."""
    calls: list[str] = []
    real_fsync, real_replace = os.fsync, Path.replace

    def fsync(handle: int) -> None:
        is_directory = Path(f"/proc/self/fd/{handle}").is_dir()
        calls.append("sync directory" if is_directory else f"sync {os.fstat(handle).st_size} byte")
        real_fsync(handle)

    def replace(self: Path, target: Path) -> Path:
        calls.append("rename")
        return real_replace(self, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "replace", replace)
    open_storage(str(tmp_path)).publish("new/a", [b"1"])
    assert calls == ["sync 1 byte", "rename", "sync directory", "sync directory"]


def test_a_process_killed_during_an_upload_leaves_no_local_file(tmp_path: Path) -> None:
    program = """
import os, signal
from flightedl.adapters.storage import open_storage
def parts():
    yield b"some"
    os.kill(os.getpid(), signal.SIGKILL)
open_storage("memory://x").publish("a", parts())
"""
    ended = subprocess.run([sys.executable, "-c", program], env=child_environment(TMPDIR=str(tmp_path)), check=False)
    assert ended.returncode == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []


@pytest.mark.s3
def test_a_file_of_many_parts_is_uploaded_completely(s3_url: str) -> None:
    """fsspec's S3 client uploads the parts in parallel, each from its own position in the buffer."""
    storage = open_storage(s3_url + "/many")
    parts = [bytes([number]) * (1 << 20) for number in range(120)]
    assert storage.publish("a", parts) == 120 << 20
    assert storage.read("a") == b"".join(parts)


@pytest.mark.parametrize("name", ["../a", "/a", "a/../../b", "./a"])
def test_names_outside_the_root_are_rejected(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="not the name"):
        open_storage(str(tmp_path)).publish(name, [b""])


@pytest.mark.parametrize("root", ["/proc", "/proc/new"])
def test_a_place_where_no_file_can_be_created_is_named(root: str) -> None:
    with pytest.raises(UsageError, match=f"no file can be created in {root}: choose another place"):
        open_storage(root).publish("a", [b"x"])


def test_deleting_the_last_file_deletes_its_directory(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path / "kept" / "job"))
    for name in ("c-1/shard", "c-1/manifest.json", "c-2/shard"):
        storage.publish(name, [b"x"])
    storage.delete("c-1/shard")
    assert (tmp_path / "kept" / "job" / "c-1").is_dir()
    storage.delete("c-1/manifest.json")
    assert [path.name for path in (tmp_path / "kept" / "job").iterdir()] == ["c-2"]
    storage.delete("c-2/shard")
    assert list((tmp_path / "kept").iterdir()) == []


def test_a_full_disk_raises_unavailable() -> None:
    """/dev/full returns the same error as a full disk."""
    storage = open_storage("/dev")
    with (
        Path("/dev/full").open("wb", buffering=0) as file,
        pytest.raises(UnavailableError, match=os.strerror(errno.ENOSPC)),
    ):
        storage._write_all("full", file, [b"x"])


def test_a_root_that_is_a_file_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UsageError, match="a file is where a directory should be"):
        open_storage(str(tmp_path / "file")).publish("a", [b""])


# --- URLs ---


def test_credentials_are_never_shown() -> None:
    assert without_credentials("s3://key:secret@bucket/a?token=t") == "s3://bucket/a"
    assert without_credentials("/plain/p@th?x") == "/plain/p@th?x"


def test_an_unknown_protocol_raises_a_usage_error() -> None:
    with pytest.raises(UsageError, match="nonsense://user"):
        open_storage("nonsense://user/dir")


# --- S3 ---


@pytest.mark.usefixtures("new_s3_client")
def test_a_dead_s3_server_is_reported_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "visible-key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "visible-secret")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    start = time.monotonic()
    with pytest.raises(UnavailableError, match="s3://bucket/a cannot be used") as caught:
        open_storage("s3://bucket").read("a")
    assert "visible" not in str(caught.value)
    assert time.monotonic() - start < 8


@pytest.mark.s3
@pytest.mark.usefixtures("new_s3_client")
def test_wrong_credentials_and_a_missing_bucket_raise_different_errors(
    s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(NotFoundError):
        open_storage("s3://no-such-bucket-here").read("a")
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(UsageError, match=r"no access to s3://.*[^.]; check the credentials and rights$") as caught:
        open_storage(s3_url).publish("a", [b""])
    assert "wrong" not in str(caught.value)


@pytest.mark.s3
@pytest.mark.faults
@pytest.mark.slow
@pytest.mark.usefixtures("new_s3_client")
def test_storage_works_again_after_an_s3_server_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    with S3Server() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        server.make_bucket("bucket")
        storage = open_storage("s3://bucket/x")
        storage.publish("a", [b"1"])
        server.kill()
        with pytest.raises(UnavailableError):
            storage.publish("a", [b"2"])
        server.restart()
        deadline = time.monotonic() + 30
        while True:
            try:
                storage.publish("a", [b"3"])
                break
            except UnavailableError:
                assert time.monotonic() < deadline
        assert storage.read("a") == b"3"


@pytest.mark.s3
def test_files_on_s3_are_listed_and_read(s3_url: str) -> None:
    storage = open_storage(s3_url)
    for name in ("d/b.parquet", "d/a.parquet", "d/c.csv"):
        storage.publish(name, [name.encode()])
    stats = FsspecFiles().expand([f"{s3_url}/d/*.parquet", f"{s3_url}/d/a.parquet"])
    assert [stat.url for stat in stats] == [f"{s3_url}/d/a.parquet", f"{s3_url}/d/b.parquet"]
    with FsspecFiles().open(stats[1].url) as file:
        file.seek(2)
        assert file.read() == b"b.parquet"
    storage.publish("d/a.parquet", [b"D/A.PARQUET"])
    changed = FsspecFiles().expand([f"{s3_url}/d/a.parquet"])[0]
    assert changed.size_bytes == stats[0].size_bytes
    assert changed.version != stats[0].version
    with pytest.raises(DataError, match="none"):
        FsspecFiles().open(f"{s3_url}/none")


# --- Files ---


def test_patterns_expand_to_sorted_unique_local_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("b.parquet", "a.parquet", "c.csv", "we[i]rd.csv"):
        (tmp_path / name).write_bytes(name.encode())
    (tmp_path / "dir.parquet").mkdir()
    monkeypatch.chdir(tmp_path)
    stats = FsspecFiles().expand(["*.parquet", f"file://{tmp_path}/a.parquet", "we[i]rd.csv"])
    assert [stat.url for stat in stats] == [str(tmp_path / n) for n in ("a.parquet", "b.parquet", "we[i]rd.csv")]
    assert stats[0].size_bytes == 9
    with FsspecFiles().open(stats[0].url) as file:
        assert file.read() == b"a.parquet"


def test_a_changed_file_has_a_new_version(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"1")
    before = FsspecFiles().expand([str(path)])[0].version
    assert FsspecFiles().expand([str(path)])[0].version == before
    os.utime(path, ns=(1, 1))
    assert FsspecFiles().expand([str(path)])[0].version != before


def test_an_error_names_the_missing_file_or_pattern(tmp_path: Path) -> None:
    files = FsspecFiles()
    with pytest.raises(DataError, match=r"no file matches .*/\*\.parquet"):
        files.expand([f"{tmp_path}/*.parquet"])
    with pytest.raises(DataError, match=r"there is no file .*/a\.parquet"):
        files.expand([f"{tmp_path}/a.parquet"])
    with pytest.raises(DataError, match=r"is a directory: name the files, as in .*/\*\.parquet"):
        files.expand([str(tmp_path)])
    with pytest.raises(DataError, match="there is no file"):
        files.open(f"{tmp_path}/a.parquet")
    with pytest.raises(DataError, match="is a directory"):
        files.open(str(tmp_path))


def test_memory_files_are_listed_and_read() -> None:
    root = f"memory://{uuid.uuid4().hex}"
    open_storage(root).publish("a.csv", [b"1"])
    (stat,) = FsspecFiles().expand([f"{root}/*.csv"])
    assert FsspecFiles().open(stat.url).read() == b"1"


@pytest.mark.parametrize("name", ["a[1].csv", "what?.csv", "all*.csv", "plain.csv"])
@pytest.mark.parametrize("kind", ["memory", "local"])
def test_a_file_whose_name_looks_like_a_pattern_is_found(tmp_path: Path, kind: str, name: str) -> None:
    root = f"memory://{uuid.uuid4().hex}" if kind == "memory" else str(tmp_path)
    open_storage(root).publish(name, [b"12"])
    open_storage(root).publish("all-1.csv", [b"1"])
    files = FsspecFiles()
    stat = files.stat(f"{root}/{name}")
    assert stat is not None
    assert stat.size_bytes == 2
    assert files.stat(stat.url) == stat
    assert stat in files.expand([f"{root}/*.csv"])
    assert files.stat(f"{root}/none.csv") is None
    assert files.stat(root) is None


@pytest.mark.parametrize("kind", ["memory", "local"])
def test_wildcards_skip_hidden_and_underscore_files(tmp_path: Path, kind: str) -> None:
    root = f"memory://{uuid.uuid4().hex}" if kind == "memory" else str(tmp_path)
    for name in ("a.csv", "_a.csv", ".a.csv"):
        open_storage(root).publish(name, [b"12"])
    files = FsspecFiles()
    assert [stat.url.rpartition("/")[2] for stat in files.expand([f"{root}/*"])] == ["a.csv"]
    assert [stat.url.rpartition("/")[2] for stat in files.expand([f"{root}/_a.csv"])] == ["_a.csv"]
    assert [stat.url.rpartition("/")[2] for stat in files.expand([f"{root}/_*"])] == ["_a.csv"]


def test_expanding_to_no_files_is_allowed_on_request(tmp_path: Path) -> None:
    files = FsspecFiles()
    patterns = [f"{tmp_path}/*.csv", f"{tmp_path}/none/*.csv", f"{tmp_path}/a.csv", f"memory://{uuid.uuid4().hex}/*"]
    assert files.expand(patterns, may_be_empty=True) == ()


def test_credentials_in_an_s3_url_are_rejected_and_not_shown() -> None:
    with pytest.raises(UsageError, match="AWS_ACCESS_KEY_ID") as raised:
        FsspecFiles().expand(["s3://me:secret@bucket/x.parquet"])
    assert "secret" not in str(raised.value)


@pytest.mark.usefixtures("new_s3_client")
def test_missing_credentials_are_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    with pytest.raises(DataError, match=r"no access to s3://.*: Unable to locate credentials; set AWS_ACCESS_KEY_ID"):
        FsspecFiles().expand([f"s3://bucket-{tmp_path.name.replace('_', '-')}/x-*.parquet"])


def test_transient_and_permanent_read_errors_are_distinguished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(error: Exception) -> None:
        def fail(*_: object, **__: object) -> None:
            raise error

        monkeypatch.setattr(Path, "open", fail)

    failing(ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"))
    with pytest.raises(UnavailableError, match=r"/a cannot be read at the moment: .*Connection reset by peer"):
        FsspecFiles().open(str(tmp_path / "a"))
    failing(OSError(errno.ENAMETOOLONG, "File name too long"))
    with pytest.raises(DataError, match=r"/a cannot be read: .*File name too long"):
        FsspecFiles().open(str(tmp_path / "a"))
