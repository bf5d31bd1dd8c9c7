"""A master process on a thread: its lock, its address, its end, and what a successor finds."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from flightedl.adapters.clock import SystemClock
from flightedl.config import MasterSettings
from flightedl.coordination.keeper import HeldKey
from flightedl.coordination.keys import JobKeys
from flightedl.coordination.lives import JobCoordinator
from flightedl.coordination.records import ServerRecord
from flightedl.errors import EXIT_START_AGAIN, FlightedlError, UsageError
from flightedl.launch.status import is_master_answering, tool_connector
from flightedl.master import continuity
from flightedl.master.main import MasterProcess
from flightedl.messages.decoding import from_json
from flightedl.ports import Entry, Put
from tests.support.contracts.coordinator import eventually
from tests.support.memory import MemoryCoordinator

KEYS = JobKeys("demo")
TTL_S = 3.0


class Running:
    """A master on a thread of this process."""

    def __init__(self, store: MemoryCoordinator, pservers: int = 2) -> None:
        self.store = store
        chosen = MasterSettings(etcd="memory:1", job="demo", lease_ttl_s=TTL_S, drain_s=0.2, pservers=pservers)
        self.process = MasterProcess(chosen)
        self.exit_code: int | None = None
        self.error: FlightedlError | None = None
        self._coordinator = JobCoordinator(store.another(), KEYS)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        try:
            self.exit_code = self.process._serve(self._coordinator)
        except FlightedlError as error:
            self.error = error

    def lead(self) -> Entry:
        """Wait until this or another master has published its address. Return the lock."""
        eventually(lambda: self.store.get(KEYS.master_address), 20.0)
        lock = self.store.get(KEYS.master_lock)
        assert lock is not None
        return lock

    def join(self) -> int | None:
        self._thread.join(20.0)
        assert not self._thread.is_alive()
        return self.exit_code


Start = Callable[..., Running]


@pytest.fixture
def store() -> MemoryCoordinator:
    return MemoryCoordinator(SystemClock())


@pytest.fixture
def start(store: MemoryCoordinator) -> Iterator[Start]:
    made: list[Running] = []

    def one(pservers: int = 2) -> Running:
        made.append(Running(store, pservers))
        return made[-1]

    yield one
    for each in made:
        each.process.end(0, "the test is over")
        each.join()
    assert not store._store.leases, "a master that has ended holds a lease"


def test_a_master_publishes_its_address_under_its_lock_and_takes_both_away(
    store: MemoryCoordinator, start: Start
) -> None:
    master = start()
    lock = master.lead()
    address = store.get(KEYS.master_address)
    assert address is not None
    assert address.lease_id == lock.lease_id
    assert from_json(address.value, ServerRecord).generation == lock.create_revision
    master.process.end(0, "terminated")
    master.process.end(7, "another reason")
    assert master.join() == 0, "the first reason decides"
    assert store.get(KEYS.master_lock) is None
    assert store.get(KEYS.master_address) is None


def test_a_master_that_has_lost_its_lock_ends_and_its_standby_takes_over(
    store: MemoryCoordinator, start: Start
) -> None:
    first = start()
    lock = first.lead()
    standby = start()
    eventually(lambda: "standby" in standby.process._health.answer("/ready")[1], 20.0)
    store.end_lease(lock.lease_id)
    assert first.join() == EXIT_START_AGAIN
    assert standby.lead().create_revision > lock.create_revision


@pytest.mark.parametrize(("stored", "asked", "expected"), [(None, 2, b"2"), (b"3", 2, b"3"), (b"3", -1, b"3")])
def test_the_first_master_determines_the_number_of_pservers(
    store: MemoryCoordinator, start: Start, stored: bytes | None, asked: int, expected: bytes
) -> None:
    if stored is not None:
        store.transact([], [Put(KEYS.ps_desired, stored)])
    start(asked).lead()
    entry = store.get(KEYS.ps_desired)
    assert entry is not None
    assert entry.value == expected


def test_a_new_job_without_a_number_of_pservers_does_not_start(store: MemoryCoordinator, start: Start) -> None:
    master = start(-1)
    master.join()
    assert isinstance(master.error, UsageError)
    assert store.get(KEYS.master_lock) is None, "the next master waits for a lock that nobody holds"


def test_a_master_that_begins_a_life_leads_only_under_a_new_lock(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    generations: list[int] = []
    settle = continuity.settle

    def begin_once(*arguments: Any, **more: Any) -> bool:
        held = arguments[2]
        generations.append(held.generation)
        return settle(*arguments, **more) if len(generations) > 1 else False

    monkeypatch.setattr(continuity, "settle", begin_once)
    lock = start().lead()
    assert generations[1:] == [lock.create_revision]
    assert generations[0] < lock.create_revision


def test_a_master_answers_from_the_moment_its_address_is_published(
    store: MemoryCoordinator, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered: list[bool] = []
    publish = MasterProcess._publish

    def ask_first(self: MasterProcess, held: HeldKey, port: int) -> None:
        record = ServerRecord(address=f"127.0.0.1:{port}", generation=held.generation)
        answered.append(is_master_answering(record, "demo", tool_connector(""), 20.0))
        publish(self, held, port)

    monkeypatch.setattr(MasterProcess, "_publish", ask_first)
    start().lead()
    assert answered == [True]
    entry = store.get(KEYS.master_address)
    assert entry is not None
    assert is_master_answering(from_json(entry.value, ServerRecord), "demo", tool_connector(""), 20.0)
