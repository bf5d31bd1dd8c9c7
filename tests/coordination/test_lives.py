"""The coordinator of one job: revisions increase over lives, and a new life or a rolled back etcd ends the process."""

from __future__ import annotations

import time

import msgspec
import pytest

from flightedl.adapters.clock import SystemClock
from flightedl.coordination.directory import Directory
from flightedl.coordination.keeper import HeldKey
from flightedl.coordination.keys import JobKeys
from flightedl.coordination.lives import JobCoordinator
from flightedl.coordination.records import HistoryRecord
from flightedl.domain.recovery.store_history import LIFE_REVISIONS
from flightedl.errors import BegunAnewError, FlightedlError, RolledBackError
from flightedl.ports import CreatedAt, Delete, ModifiedAt, Put, Removed, Written
from tests.support.memory import MemoryCoordinator

KEYS = JobKeys("demo")
KEY = KEYS.prefix + "a"
PATIENCE_S = 10.0


@pytest.fixture
def store() -> MemoryCoordinator:
    return MemoryCoordinator(SystemClock())


def begin_life(store: MemoryCoordinator, life: int) -> None:
    store.transact([], [Put(KEYS.history, msgspec.json.encode(HistoryRecord(life=life, cluster="c")))])


def job(store: MemoryCoordinator, over: list[FlightedlError] | None = None) -> JobCoordinator:
    return JobCoordinator(store.another(), KEYS, (over if over is not None else []).append)


def test_the_first_life_uses_the_revisions_of_etcd(store: MemoryCoordinator) -> None:
    coordinator = job(store)
    result = coordinator.transact([], [Put(KEY, b"1")])
    assert coordinator.get(KEY) == store.get(KEY)
    assert result.revision == store.list("").revision


def test_revisions_of_a_later_life_exceed_all_earlier_ones(store: MemoryCoordinator) -> None:
    begin_life(store, 2)
    coordinator = job(store)
    made = coordinator.transact([], [Put(KEY, b"1")]).revision
    entry, own = coordinator.get(KEY), store.get(KEY)
    assert entry is not None
    assert own is not None
    assert entry.create_revision == entry.mod_revision == made == own.mod_revision + 2 * LIFE_REVISIONS
    assert coordinator.list(KEYS.prefix).entries[0] == entry
    assert coordinator.list(KEYS.prefix).revision == made
    sighting = coordinator.sighting()
    assert sighting is not None
    assert sighting.revision == made


def test_conditions_and_watches_use_revisions_of_the_job(store: MemoryCoordinator) -> None:
    begin_life(store, 1)
    coordinator = job(store)
    made = coordinator.transact([ModifiedAt(KEY, 0)], [Put(KEY, b"1")]).revision
    watch = coordinator.watch(KEYS.prefix, made)
    own = made - LIFE_REVISIONS
    for condition, holds in (
        (CreatedAt(KEY, made), True),
        (ModifiedAt(KEY, made), True),
        # The same number in an earlier life denotes another revision, even if it is the first of its life.
        (CreatedAt(KEY, own), False),
        (ModifiedAt(KEY, own), False),
        (ModifiedAt(KEYS.prefix + "none", LIFE_REVISIONS), False),
        (CreatedAt(KEY, LIFE_REVISIONS), False),
    ):
        assert coordinator.transact([condition], []).committed is holds, condition
    refused = coordinator.transact([CreatedAt(KEY, own)], [])
    assert refused.entries == {KEY: coordinator.get(KEY)}
    coordinator.transact([], [Put(KEY, b"2")])
    removed = coordinator.transact([], [Delete(KEY)]).revision
    written, gone = watch.next(1.0)
    assert isinstance(written, Written)
    assert written.entry.create_revision == made
    assert gone == Removed(KEY, removed)


def test_generations_increase_across_the_loss_of_etcd(store: MemoryCoordinator) -> None:
    old = HeldKey.claim(job(store), SystemClock(), KEY, b"", 60.0)
    assert old is not None
    store.restore(cluster="2" * 16)
    again = store.another()
    begin_life(again, 1)
    new = HeldKey.claim(job(again), SystemClock(), KEY, b"", 60.0)
    assert new is not None
    assert new.generation > old.generation
    with pytest.raises(FlightedlError):
        old.write([Put(KEY, b"late")])
    assert old.generation != new.generation
    old.release()
    new.release()


def test_a_rollback_of_etcd_ends_the_process_and_says_how_to_resume(store: MemoryCoordinator) -> None:
    over: list[FlightedlError] = []
    coordinator = job(store, over)
    backup = store.backup()
    with Directory(coordinator, KEYS, SystemClock()) as directory:
        made = coordinator.transact([], [Put(KEY, b"1")]).revision
        assert directory.wait_until(lambda d: d.revision >= made or None, PATIENCE_S)
        directory.require_followed()
        store.restore(backup)
        deadline = time.monotonic() + PATIENCE_S
        while not over:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        directory.close()
        with pytest.raises(RolledBackError):
            directory.require_followed()
    with pytest.raises(RolledBackError, match="continue from its newest checkpoint with --resume"):
        coordinator.get(KEY)
    assert len(over) == 1


def test_a_new_life_started_by_another_process_ends_this_process(store: MemoryCoordinator) -> None:
    over: list[FlightedlError] = []
    coordinator = job(store, over)
    watch = coordinator.watch(KEYS.prefix, coordinator.list(KEYS.prefix).revision)
    begin_life(store, 1)
    with pytest.raises(BegunAnewError, match="start this process again"):
        watch.next(1.0)
    with pytest.raises(BegunAnewError):
        coordinator.get(KEY)
    assert len(over) == 1


def test_the_process_that_begins_a_life_reads_it_again(store: MemoryCoordinator) -> None:
    coordinator = job(store)
    before = coordinator.list(KEYS.prefix).revision
    coordinator.transact([], [Put(KEYS.history, msgspec.json.encode(HistoryRecord(life=1, cluster="c")))])
    coordinator.look_again()
    assert coordinator.list(KEYS.prefix).revision == before + 1 + LIFE_REVISIONS
