"""None of ten thousand torn, truncated and modified checkpoints is loaded."""

from __future__ import annotations

import random

import pytest

from flightedl.domain.consistency.modes import Async
from flightedl.pserver.restoring import load_newest
from flightedl.testing.memory import MemoryStorage

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
