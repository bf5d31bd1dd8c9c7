"""Names of followers: one live process has a name, and keeps or recovers it until it is closed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from flightedl.client.following import consumer
from flightedl.client.following.consumer import ConsumerName
from flightedl.coordination.keys import JobKeys
from flightedl.errors import UsageError
from tests.coordination.process_clock import ProcessClock
from tests.support.contracts.coordinator import eventually
from tests.support.memory import MemoryCoordinator

KEYS = JobKeys("demo")
KEY = KEYS.consumer("copy")
TTL_S = 0.6


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[ProcessClock]:
    monkeypatch.setattr(consumer, "_GRACE_S", 0.1)
    monkeypatch.setattr(consumer, "_RETRY_S", 0.02)
    made = ProcessClock()
    yield made
    made.close()


@pytest.fixture
def store(clock: ProcessClock) -> MemoryCoordinator:
    return MemoryCoordinator(clock)


def named(store: MemoryCoordinator, clock: ProcessClock, name: str = "copy") -> ConsumerName:
    return ConsumerName(store.another(), clock, KEYS, name, TTL_S)


def test_a_name_that_a_live_process_holds_is_refused(store: MemoryCoordinator, clock: ProcessClock) -> None:
    holder = named(store, clock)
    entry = store.get(KEY)
    assert entry is not None
    assert holder.generation == entry.create_revision
    began = clock.now()
    with pytest.raises(UsageError, match="already follows job 'demo' as process"):
        named(store, clock)
    assert clock.now() - began >= TTL_S, "the process with this name may have died a moment ago"
    other = named(store, clock, "other")
    other.close()
    holder.close()
    assert store.get(KEY) is None
    named(store, clock).close()


def test_the_name_of_a_dead_process_is_free_when_its_lease_ends(store: MemoryCoordinator, clock: ProcessClock) -> None:
    dead = store.another()
    holder = ConsumerName(dead, clock, KEYS, "copy", TTL_S)
    dead.disconnect()
    successor = named(store, clock)
    assert successor.generation is not None
    eventually(lambda: holder.generation is None)
    holder.close()
    assert store.get(KEY) is not None, "the name of a successor was released"
    successor.close()


def test_a_lost_name_is_claimed_again_as_soon_as_it_is_free(store: MemoryCoordinator, clock: ProcessClock) -> None:
    connection = store.another()
    holder = ConsumerName(connection, clock, KEYS, "copy", TTL_S)
    first = holder.generation
    connection.disconnect()
    store.end_lease(holder._held.lease_id)
    rival = named(store, clock)
    eventually(lambda: holder.generation is None)
    connection.reconnect()
    clock.pass_time(TTL_S / 2)
    assert holder.generation is None, "two processes have the name"
    rival.close()
    eventually(lambda: holder.generation is not None)
    entry = store.get(KEY)
    assert entry is not None
    assert holder.generation == entry.create_revision != first
    store.end_lease(holder._held.lease_id)
    eventually(lambda: holder.generation not in {None, entry.create_revision})
    holder.close()
    assert not store._store.leases


def test_a_follower_that_is_closed_while_it_waits_for_its_name_leaves_none(
    store: MemoryCoordinator, clock: ProcessClock
) -> None:
    connection = store.another()
    holder = ConsumerName(connection, clock, KEYS, "copy", TTL_S)
    connection.disconnect()
    store.end_lease(holder._held.lease_id)
    rival = named(store, clock)
    eventually(lambda: holder.generation is None)
    connection.reconnect()
    holder.close()
    rival.close()
    clock.pass_time(TTL_S)
    assert store.get(KEY) is None
    assert not store._store.leases


@pytest.mark.parametrize("name", ["", "a/b", "a b", "x" * 65])
def test_a_name_has_few_and_simple_characters(store: MemoryCoordinator, clock: ProcessClock, name: str) -> None:
    with pytest.raises(UsageError, match="needs 1 to 64"):
        named(store, clock, name)
