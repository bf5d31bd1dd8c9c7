"""Operations on checkpoint files wait for the state from which they follow."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from flightedl.domain.checkpoint.manifest import checksum, manifest_name
from flightedl.domain.checkpoint.values import Sweep, WriteManifest
from flightedl.domain.master.effects import StoreWork
from flightedl.domain.master.events import ManifestFailed, ManifestWritten
from flightedl.errors import UnavailableError
from flightedl.master.checkpointing import CheckpointStore
from flightedl.messages.declarations import ArrivalRecord, JobDeclaration
from flightedl.testing.memory import MemoryStorage


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
    store._manifest = lambda: SimpleNamespace(encode=lambda: b"of checkpoint 2")  # type: ignore[method-assign, assignment, return-value]
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
    state: Any = SimpleNamespace(becomes_durable=lambda *_: True, lock=threading.RLock(), core=core, apply=applied.put)
    store = CheckpointStore(storage, state, "demo")
    store._manifest = lambda: SimpleNamespace(encode=lambda: b"of checkpoint 2")  # type: ignore[method-assign, assignment, return-value]
    store.do(StoreWork(WriteManifest(2), 7))
    assert applied.get(timeout=20) == ManifestWritten(2, checksum(b"of checkpoint 2"))
    assert storage.read(manifest_name(2)) == b"of checkpoint 2"

    def fail(*_: object) -> None:
        raise UnavailableError("the storage is full")

    monkeypatch.setattr(storage, "publish", fail)
    store.do(StoreWork(WriteManifest(2), 7))
    assert applied.get(timeout=20) == ManifestFailed(2, "the storage is full")
    store.close()


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
