"""The in-memory coordinator passes the contract of coordinators, forgets old events, and wakes watches in time."""

from __future__ import annotations

import uuid
from collections.abc import Callable

import pytest

from flightedl.adapters import memory
from flightedl.adapters.clock import SystemClock
from flightedl.errors import OutcomeUnknownError, UnavailableError
from flightedl.ports import CompactedError, Coordinator, Put, Removed, Written
from tests.support.clock import FakeClock
from tests.support.contracts.coordinator import (
    CoordinatorContract,
    CoordinatorHistoryContract,
    CoordinatorOutageContract,
    put,
)
from tests.support.memory import MemoryCoordinator


class MemoryWorld:
    def __init__(self) -> None:
        self.prefix = f"/test/{uuid.uuid4().hex}/"
        self.clock = FakeClock()
        self.first = MemoryCoordinator(self.clock)
        self.connections: list[MemoryCoordinator] = []

    def connect(self) -> MemoryCoordinator:
        self.connections.append(self.first.another())
        return self.connections[-1]

    def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)

    def compact(self) -> None:
        self.first.compact()

    def stop(self) -> None:
        for connection in self.connections:
            connection.disconnect()

    def start(self) -> None:
        for connection in self.connections:
            connection.reconnect()

    def backup(self) -> Callable[[], None]:
        copy = self.first.backup()
        return lambda: self.first.restore(copy)

    def begin_again(self) -> None:
        self.first.restore(cluster=uuid.uuid4().hex[:16])

    def lose_reply(self, coordinator: Coordinator) -> None:
        assert isinstance(coordinator, MemoryCoordinator)
        coordinator.fail_next("lost_reply")


@pytest.fixture
def memory_world() -> MemoryWorld:
    return MemoryWorld()


class TestContract(CoordinatorContract):
    @pytest.fixture
    def world(self, memory_world: MemoryWorld) -> MemoryWorld:
        return memory_world


class TestOutages(CoordinatorOutageContract):
    @pytest.fixture
    def world(self, memory_world: MemoryWorld) -> MemoryWorld:
        return memory_world


class TestHistory(CoordinatorHistoryContract):
    @pytest.fixture
    def world(self, memory_world: MemoryWorld) -> MemoryWorld:
        return memory_world


def test_planned_faults_happen_once_each_and_in_order(memory_world: MemoryWorld) -> None:
    coordinator = memory_world.connect()
    for kind in ("unavailable", "lost_request", "lost_reply"):
        coordinator.fail_next(kind)
    with pytest.raises(UnavailableError):
        put(coordinator, "a")
    with pytest.raises(OutcomeUnknownError):
        put(coordinator, "b")
    with pytest.raises(OutcomeUnknownError):
        put(coordinator, "c")
    assert [entry.key for entry in coordinator.list("").entries] == ["c"]


def test_a_fault_of_one_connection_leaves_the_others_alone(memory_world: MemoryWorld) -> None:
    one, other = memory_world.connect(), memory_world.connect()
    one.disconnect()
    assert other.transact([], [Put("a", b"")]).committed
    with pytest.raises(UnavailableError):
        one.get("a")
    one.reconnect()
    assert one.get("a") is not None


def test_a_store_forgets_old_events_and_says_so(memory_world: MemoryWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_HISTORY_LIMIT", 4)
    coordinator = memory_world.connect()
    begun = coordinator.list("").revision
    behind, recent = coordinator.watch("", begun), coordinator.watch("", begun + 5)
    for number in range(9):
        put(coordinator, str(number))

    with pytest.raises(CompactedError):
        behind.next(0.0)
    assert [event.entry.key for event in recent.next(0.0) if isinstance(event, Written)] == ["5", "6", "7", "8"]


def test_a_watch_wakes_when_a_lease_expires() -> None:
    clock = SystemClock()
    coordinator = memory.MemoryCoordinator(clock)
    lease = coordinator.grant(0.05)
    coordinator.transact([], [Put("a", b"", lease_id=lease.id)])
    watch = coordinator.watch("", coordinator.list("").revision)

    began = clock.now()
    assert [type(event) for event in watch.next(30.0)] == [Removed]
    assert clock.now() - began < 10.0


def test_each_store_has_a_cluster_id_of_its_own() -> None:
    ids = set()
    for _ in range(2):
        coordinator = memory.MemoryCoordinator(FakeClock())
        coordinator.get("a")
        seen = coordinator.sighting()
        assert seen is not None
        ids.add(seen.cluster)
    assert len(ids) == 2
