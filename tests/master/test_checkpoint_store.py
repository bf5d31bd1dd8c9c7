"""Operations on checkpoint files wait for the state from which they follow."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest

from flightedl.domain.checkpoint.manifest import checksum, manifest_name
from flightedl.domain.checkpoint.values import Sweep, WriteManifest
from flightedl.domain.master.effects import StoreWork
from flightedl.domain.master.events import ManifestFailed, ManifestWritten
from flightedl.domain.recovery.store_history import Sighting
from flightedl.errors import UnavailableError
from flightedl.master.checkpointing import CheckpointStore
from flightedl.messages.declarations import ArrivalRecord, JobDeclaration
from flightedl.ports import StoredFile
from tests.support.clock import FakeClock
from tests.support.memory import MemoryStorage


def test_files_are_deleted_only_after_the_pointer_is_stored() -> None:
    """A successor that reads the old pointer from etcd needs the files to which it points."""
    storage = MemoryStorage()
    storage.publish("c-1", [b"old"])
    looked, is_durable, is_done = threading.Event(), threading.Event(), threading.Event()
    revisions: list[int] = []

    def becomes_durable(is_ending: Callable[[], bool], revision: int) -> bool:
        revisions.append(revision)
        looked.set()
        is_durable.wait(20.0)
        is_done.set()
        return revision != 8

    checkpoints = SimpleNamespace(deletable=lambda names: names)
    core = SimpleNamespace(checkpointing=SimpleNamespace(checkpoints=checkpoints))
    state: Any = SimpleNamespace(becomes_durable=becomes_durable, lock=threading.RLock(), core=core)
    store = CheckpointStore(storage, state, "demo")
    store.do(StoreWork(Sweep(), 7))
    assert looked.wait(20.0)
    assert [file.name for file in storage.list("")] == ["c-1"]
    is_durable.set()
    assert is_done.wait(20.0)
    store.do(StoreWork(Sweep(), 8))
    while len(revisions) < 2:
        threading.Event().wait(0.01)
    assert storage.list("") == ()
    storage.publish("c-2", [b"new"])
    store.close()
    assert revisions == [7, 8]
    assert [file.name for file in storage.list("")] == ["c-2"]


def test_a_manifest_is_not_written_again_when_another_checkpoint_is_under_way() -> None:
    """A repeated request for an earlier manifest would store the next checkpoint under its name."""
    storage, is_done = MemoryStorage(), threading.Event()
    storage.publish(manifest_name(1), [b"of checkpoint 1"])
    applied: list[object] = []

    def becomes_durable(_is_ending: Callable[[], bool], revision: int) -> bool:
        if revision == 8:
            is_done.set()
        return revision == 7

    core = SimpleNamespace(checkpointing=SimpleNamespace(checkpoints=SimpleNamespace(under_way=2)))
    state: Any = SimpleNamespace(
        becomes_durable=becomes_durable, lock=threading.RLock(), core=core, apply=applied.append
    )
    store = CheckpointStore(storage, state, "demo")
    store._manifest = lambda: SimpleNamespace(encode=lambda: b"of checkpoint 2", shards=())  # type: ignore[method-assign, assignment, return-value]
    store.do(StoreWork(WriteManifest(1), 7))
    store.do(StoreWork(Sweep(), 8))
    assert is_done.wait(20.0)
    store.close()
    assert storage.read(manifest_name(1)) == b"of checkpoint 1"
    assert not applied


def test_the_core_learns_the_checksum_of_the_manifest_or_that_it_was_not_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    storage = MemoryStorage()
    applied = queue.SimpleQueue[object]()
    core = SimpleNamespace(checkpointing=SimpleNamespace(checkpoints=SimpleNamespace(under_way=2)))
    state: Any = SimpleNamespace(
        becomes_durable=lambda *_: True,
        lock=threading.RLock(),
        core=core,
        apply=applied.put,
        sighting=lambda: None,
        clock=FakeClock(),
    )
    store = CheckpointStore(storage, state, "demo")
    store._manifest = lambda: SimpleNamespace(encode=lambda: b"of checkpoint 2", shards=())  # type: ignore[method-assign, assignment, return-value]
    store.do(StoreWork(WriteManifest(2), 7))
    assert applied.get(timeout=20) == ManifestWritten(2, checksum(b"of checkpoint 2"))
    assert storage.read(manifest_name(2)) == b"of checkpoint 2"

    def fail(*_: object) -> None:
        raise UnavailableError("the storage is full")

    monkeypatch.setattr(storage, "publish", fail)
    store.do(StoreWork(WriteManifest(2), 7))
    assert applied.get(timeout=20) == ManifestFailed(2, "the storage is full")
    store.close()


class Writer:
    """A master that writes checkpoints, and its warnings."""

    def __init__(self, storage: MemoryStorage, cluster: str) -> None:
        self.warnings: list[str] = []
        self.clock = FakeClock()
        self.files: list[StoredFile] = []
        self._written = queue.SimpleQueue[object]()
        state: Any = SimpleNamespace(
            becomes_durable=lambda *_: True,
            lock=threading.RLock(),
            core=SimpleNamespace(checkpointing=SimpleNamespace(checkpoints=SimpleNamespace(under_way=1))),
            apply=self._written.put,
            sighting=lambda: Sighting(cluster, 1),
            clock=self.clock,
            journal=SimpleNamespace(add=lambda kind, who, text, is_warning: self.warnings.append(text)),
        )
        self.store = CheckpointStore(storage, state, "demo")
        self.store._manifest = lambda: SimpleNamespace(
            encode=lambda: b"a checkpoint", shards=[SimpleNamespace(chain=self.files)]
        )  # type: ignore[method-assign, assignment, return-value]

    def try_to_write(self) -> object:
        """Write a checkpoint. Return the event."""
        self.warnings = []
        self.store.do(StoreWork(WriteManifest(1), 7))
        return self._written.get(timeout=20)

    def write(self) -> list[str]:
        """Write a checkpoint. Return the new warnings."""
        assert self.try_to_write() == ManifestWritten(1, checksum(b"a checkpoint"))
        return self.warnings


def test_two_jobs_that_write_checkpoints_to_one_url_are_warned_once() -> None:
    storage = MemoryStorage("memory://checkpoints")
    first, second = Writer(storage, "a" * 16), Writer(storage, "b" * 16)
    for _ in range(2):
        assert first.write() == []
    time = datetime.fromtimestamp(second.clock.wall_time(), UTC)
    assert second.write() == [], "the other job may have ended"
    (warning,) = first.write()
    assert "another job also writes to memory://checkpoints: on host" in warning
    assert f"host {socket.gethostname()} at {time:%Y-%m-%d %H:%M:%S} UTC" in warning
    assert len(second.write()) == 1
    assert first.write() == second.write() == []
    for each in (first, second):
        each.store.close()


def test_files_that_a_pserver_wrote_elsewhere_are_not_a_checkpoint() -> None:
    """A pserver without the mount writes to its own disk, and the checkpoint could never be loaded."""
    storage = MemoryStorage("memory://checkpoints")
    master = Writer(storage, "a" * 16)
    for size in (None, 2):
        master.files = [StoredFile("c-1-shard-0", 3)]
        if size:
            storage.publish("c-1-shard-0", [b"x" * size])
        text = "memory://checkpoints lacks c-1-shard-0: mount one store on all machines"
        assert master.try_to_write() == ManifestFailed(1, text, lacks_file=True)
    storage.publish("c-1-shard-0", [b"xyz"])
    assert master.write() == []
    master.store.close()


def test_a_resumed_job_and_a_new_master_are_not_other_jobs() -> None:
    storage = MemoryStorage()
    for cluster in ("a", "a", "b"):
        master = Writer(storage, cluster * 16)
        for _ in range(2):
            assert master.write() == []
        master.store.close()
    former, successor = Writer(storage, "b" * 16), Writer(storage, "b" * 16)
    for _ in range(2):
        assert former.write() == successor.write() == []
    for each in (former, successor):
        each.store.close()


def test_a_manifest_lists_the_files_that_joined_the_dataset() -> None:
    """A job that is resumed elsewhere cannot read them from etcd."""
    arrivals = (ArrivalRecord(files=[("/d/2.parquet", 1, "1")]),)
    core = SimpleNamespace(declaration=JobDeclaration())
    state: Any = SimpleNamespace(core=core, dataset=SimpleNamespace(arrivals=arrivals))
    store = CheckpointStore(None, state, "demo")
    assert store._full_declaration().arrivals == list(arrivals)
    store.close()


def test_an_unexpected_error_of_the_storage_does_not_end_later_operations(caplog: pytest.LogCaptureFixture) -> None:
    storage, done = MemoryStorage(), threading.Event()
    failures: list[Exception] = [ValueError("a bug of the storage's library")]
    listing = storage.list

    def list_or_fail(prefix: str) -> object:
        if failures:
            raise failures.pop()
        done.set()
        return listing(prefix)

    storage.list = list_or_fail  # type: ignore[method-assign,assignment]
    core = SimpleNamespace(checkpointing=SimpleNamespace(checkpoints=SimpleNamespace(deletable=lambda _: [])))
    state: Any = SimpleNamespace(becomes_durable=lambda *_: True, lock=threading.RLock(), core=core)
    store = CheckpointStore(storage, state, "demo")
    for revision in (1, 2):
        store.do(StoreWork(Sweep(), revision))
    assert done.wait(20.0)
    store.close()
    assert "a bug of the storage's library" in caplog.text
