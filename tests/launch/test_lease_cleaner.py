"""Keys of dead processes are deleted, and no others."""

from __future__ import annotations

import socket

import msgspec
import pytest

from flightedl.config import CommonSettings
from flightedl.coordination.keys import JobKeys
from flightedl.coordination.records import ServerRecord, TrainerRecord
from flightedl.launch.lease_cleaner import LeaseCleaner, delete_keys_of
from flightedl.ports import Delete, Listing, Put
from tests.support.clock import FakeClock
from tests.support.faulty_coordinator import FaultKind
from tests.support.memory import MemoryCoordinator

KEYS = JobKeys("demo")
PID = 4321


@pytest.fixture
def coordinator() -> MemoryCoordinator:
    return MemoryCoordinator(FakeClock())


def put(coordinator: MemoryCoordinator, key: str, record: msgspec.Struct) -> None:
    coordinator.transact([], [Put(key, msgspec.json.encode(record), coordinator.grant(60.0).id)])


def keys(coordinator: MemoryCoordinator) -> list[str]:
    return [entry.key for entry in coordinator.list(KEYS.prefix).entries]


def trainer(host: str, pid: int) -> TrainerRecord:
    return TrainerRecord(id="t", host=host, pid=pid)


def test_only_keys_of_this_process_on_this_machine_are_deleted(coordinator: MemoryCoordinator) -> None:
    here = socket.gethostname()
    put(coordinator, KEYS.trainer("dead"), trainer(here, PID))
    put(coordinator, KEYS.pserver(0), ServerRecord(address="h:1", generation=0, name=here, pid=PID))
    put(coordinator, KEYS.trainer("other-process"), trainer(here, PID + 1))
    put(coordinator, KEYS.trainer("other-machine"), trainer(f"not-{here}", PID))
    delete_keys_of(coordinator, KEYS.prefix, PID)
    assert keys(coordinator) == sorted([KEYS.trainer("other-machine"), KEYS.trainer("other-process")])


def test_a_successors_key_is_not_deleted(coordinator: MemoryCoordinator, monkeypatch: pytest.MonkeyPatch) -> None:
    """A successor may register between the listing and the deletion."""
    key = KEYS.pserver(0)
    put(coordinator, key, ServerRecord(address="h:1", generation=0, name=socket.gethostname(), pid=PID))
    listing = coordinator.list

    def list_and_replace(prefix: str) -> Listing:
        found = listing(prefix)
        coordinator.transact([], [Delete(key)])
        put(coordinator, key, ServerRecord(address="h:2", generation=0, name=socket.gethostname(), pid=PID + 1))
        return found

    monkeypatch.setattr(coordinator, "list", list_and_replace)
    delete_keys_of(coordinator, KEYS.prefix, PID)
    monkeypatch.undo()
    assert keys(coordinator) == [key]


def test_keys_that_no_process_holds_are_kept(coordinator: MemoryCoordinator) -> None:
    coordinator.transact([], [Put(KEYS.ps_desired, b"2")])
    delete_keys_of(coordinator, KEYS.prefix, PID)
    assert keys(coordinator) == [KEYS.ps_desired]


@pytest.mark.parametrize("fault", ["unavailable", "lost_request", "lost_reply"])
def test_keys_of_a_dead_process_are_deleted_as_soon_as_etcd_answers(fault: FaultKind) -> None:
    clock = FakeClock(jumps=True)
    coordinator = MemoryCoordinator(clock)
    cleaner = LeaseCleaner(CommonSettings(job="demo", etcd="unused:1"), clock)
    put(coordinator, KEYS.trainer("dead"), trainer(socket.gethostname(), PID))
    for _ in range(3):
        coordinator.fail_next(fault)
    cleaner._revoke(coordinator, PID)
    assert not keys(coordinator)
    began = clock.now()
    coordinator.disconnect()
    cleaner._revoke(coordinator, PID)
    assert clock.now() - began < 20.0, "an etcd that is away for long is not waited for, because leases expire"
    cleaner.close()
