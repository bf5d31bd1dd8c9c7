"""None of ten thousand torn, truncated and modified checkpoints is loaded."""

from __future__ import annotations

import random

import pytest

from flightedl.domain.consistency.modes import Async
from flightedl.errors import ExhaustedError, MachineError, StoreError, UnavailableError, UnsupportedError
from flightedl.pserver.restoring import load_newest
from tests.support.memory import MemoryStorage

from .test_snapshots import JOB, SPECS, Pserver, publish

COUNT = 10_000


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_no_damaged_checkpoint_is_loaded() -> None:
    storage = MemoryStorage()
    pserver = Pserver(storage, Async())
    pserver.push(0)
    publish(storage, 1, pserver.plan, pserver.checkpoint(1))
    whole = {file.name: storage.read(file.name) for file in storage.list("")}
    names = sorted(whole)
    chance = random.Random(1)
    loaded = 0
    target = Pserver(storage, Async()).shard
    for number in range(COUNT):
        name = names[number % len(names)]
        data = bytearray(whole[name])
        if chance.random() < 0.5:
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        else:
            del data[chance.randrange(len(data)) :]
        damaged = MemoryStorage()
        for other, contents in whole.items():
            damaged.publish(other, [bytes(data) if other == name else contents])
        found = load_newest(damaged, JOB, SPECS, pserver.plan, 0, target)
        loaded += found.number is not None
    assert load_newest(storage, JOB, SPECS, pserver.plan, 0, target).number == 1
    assert loaded == 0


@pytest.mark.parametrize(
    "error", [MemoryError(), ExhaustedError("too many open files"), UnsupportedError("no s3fs")], ids=repr
)
def test_a_checkpoint_is_not_rejected_for_what_one_machine_lacks(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = MemoryStorage()
    pserver = Pserver(storage, Async())
    for number in (1, 2):
        publish(storage, number, pserver.plan, pserver.checkpoint(number))
    target = Pserver(storage, Async()).shard

    def fail(*_: object) -> None:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr("flightedl.pserver.restoring.load_shard_blocks", fail)
        with pytest.raises(MachineError):
            load_newest(storage, JOB, SPECS, pserver.plan, 0, target)
    assert load_newest(storage, JOB, SPECS, pserver.plan, 0, target).number == 2


def test_a_machine_that_cannot_see_the_storage_rejects_no_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = MemoryStorage("memory://checkpoints")
    pserver = Pserver(storage, Async())
    publish(storage, 1, pserver.plan, pserver.checkpoint(1))
    target = Pserver(storage, Async()).shard
    with pytest.raises(UnavailableError, match="has no files on this machine: mount it"):
        load_newest(MemoryStorage(), JOB, SPECS, pserver.plan, 0, target, range(1, 2))
    assert load_newest(MemoryStorage(), JOB, SPECS, pserver.plan, 0, target).number is None

    def refuse(*_: object) -> None:
        raise StoreError("no access to memory://checkpoints")

    for method in ("list", "read", "read_range"):
        with monkeypatch.context() as patched:
            patched.setattr(MemoryStorage, method, refuse)
            with pytest.raises(UnavailableError, match="no access"):
                load_newest(storage, JOB, SPECS, pserver.plan, 0, target, range(1, 2))
    assert load_newest(storage, JOB, SPECS, pserver.plan, 0, target, range(1, 2)).number == 1
