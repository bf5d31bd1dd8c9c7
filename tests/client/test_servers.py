"""Lookup of servers: a call ends if the directory no longer names its server."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial

import msgspec
import pytest

from flightedl.adapters.clock import SystemClock
from flightedl.client.connections import Servers
from flightedl.coordination.directory import Directory
from flightedl.coordination.keys import JobKeys
from flightedl.coordination.records import ServerRecord
from flightedl.domain.retries import is_transient
from flightedl.domain.trainer.first_values import Elected, FollowedElection
from flightedl.errors import FlightedlError, NotReadyError, RolledBackError
from flightedl.ports import Delete, Entry, Put
from flightedl.rpc import Call, Caller, Connection, Connector, FlightServer, Role, Routes, ServerIdentity
from tests.support.memory import MemoryCoordinator

LONG_S = 60.0
KEYS = JobKeys("demo")


class Place:
    """One server of a job, and its record in etcd."""

    def __init__(self, coordinator: MemoryCoordinator, role: str) -> None:
        self._coordinator = coordinator
        self.role = role
        self.key = KEYS.pserver(0) if role == "pserver" else KEYS.master_address
        self.entered = threading.Event()
        self.release = threading.Event()
        self.server = FlightServer(
            Routes(actions={"wait": self._wait}), ServerIdentity("demo", role), clock=SystemClock()
        )
        self.publish(self.server.address)

    def publish(self, address: str) -> None:
        """Publish a new generation of the server at this address."""
        self._coordinator.transact([], [Delete(self.key)])
        generation = self._coordinator.list("/").revision + 1
        record = ServerRecord(address=address, generation=generation)
        self._coordinator.transact([], [Put(self.key, msgspec.json.encode(record))])
        if address == self.server.address:
            self.server.start_serving(ServerIdentity("demo", self.role, 0, generation))

    def connection(self, servers: Servers) -> Connection:
        """Return the connection that a trainer gets."""
        return servers.pserver(0)[1] if self.role == "pserver" else servers.master()

    def _wait(self, body: bytes, call: Call) -> bytes:
        self.entered.set()
        while not self.release.is_set() and not call.closing.wait(0.01):
            pass
        return body


@pytest.fixture(params=["master", "pserver"])
def place(request: pytest.FixtureRequest, coordinator: MemoryCoordinator) -> Iterator[Place]:
    made = Place(coordinator, request.param)
    yield made
    made.release.set()
    assert made.server.stop(grace_s=5.0)


@pytest.fixture
def coordinator() -> MemoryCoordinator:
    return MemoryCoordinator(SystemClock())


@pytest.fixture
def servers(coordinator: MemoryCoordinator, place: Place) -> Iterator[Servers]:
    with ExitStack() as stack:
        directory = stack.enter_context(Directory(coordinator, KEYS, SystemClock()))
        assert directory.wait_until(lambda d: d.entry(place.key), LONG_S)
        made = Servers("demo", directory, Connector(Caller("trainer", "trainer-1"), Role.TRAINER))
        stack.callback(made.close)
        yield made


def publish_and_wait(place: Place, servers: Servers) -> None:
    """Publish a new generation at the same address, and wait until the calls to the former one have been aborted.

    The abort breaks all connections of this process to the address, so calls that begin earlier may break, too.
    """
    directory = servers._directory
    seen: list[int] = []
    directory.subscribe(lambda: seen.append(directory.revision))  # called after the one of ``servers``
    place.publish(place.server.address)
    newest = place._coordinator.list("/").revision
    deadline = time.monotonic() + LONG_S
    while not any(revision >= newest for revision in seen):
        assert time.monotonic() < deadline
        time.sleep(0.001)


def replaced(place: Place) -> None:
    place.publish("127.0.0.1:1")


def gone(place: Place) -> None:
    place._coordinator.transact([], [Delete(place.key)])


@pytest.mark.parametrize("change", [replaced, gone])
def test_a_call_to_a_frozen_server_ends_when_it_is_replaced(
    place: Place, servers: Servers, change: Callable[[Place], None]
) -> None:
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(place.connection(servers).action, "wait", b"", timeout_s=LONG_S)
        assert place.entered.wait(LONG_S)
        start = time.monotonic()
        change(place)
        with pytest.raises(FlightedlError) as raised:
            held.result(LONG_S)
        assert is_transient(raised.value)
        assert time.monotonic() - start < LONG_S / 6


def test_all_calls_can_be_aborted_when_etcd_is_gone(place: Place, servers: Servers) -> None:
    """The directory then never learns that a frozen server has no lease any more."""
    with ThreadPoolExecutor(1) as pool:
        connection = place.connection(servers)
        held = pool.submit(connection.action, "wait", b"", timeout_s=LONG_S)
        assert place.entered.wait(LONG_S)
        servers._directory.close()
        servers._connections.clear()
        servers._retired.append(connection)
        servers._pservers.clear()
        servers.abort_calls()
        with pytest.raises(FlightedlError):
            held.result(LONG_S / 6)
        place.entered.clear()
        with pytest.raises(FlightedlError):
            place.connection(servers).action("wait", b"", timeout_s=LONG_S)
        assert not place.entered.is_set()


def test_a_connection_to_a_server_that_is_replaced_while_it_is_opened_calls_nobody(
    place: Place, servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = servers._connector.connect

    def connect_late(*arguments: object) -> Connection:
        connection = connect(*arguments)  # type: ignore[arg-type]
        monkeypatch.setattr(servers._connector, "connect", connect)
        gone(place)
        assert servers._directory.wait_until(lambda d: d.entry(place.key) is None or None, LONG_S)
        return connection

    monkeypatch.setattr(servers._connector, "connect", connect_late)
    with pytest.raises(FlightedlError) as raised:
        place.connection(servers).action("wait", b"", timeout_s=LONG_S)
    assert is_transient(raised.value)
    assert not place.entered.is_set()
    with pytest.raises(NotReadyError):
        place.connection(servers)


def test_calls_go_to_the_server_that_has_replaced_another(
    place: Place, servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = place.connection(servers)
    assert place.connection(servers) is before
    publish_and_wait(place, servers)
    after = place.connection(servers)
    assert after is not before
    place.release.set()
    assert after.action("wait", b"x", timeout_s=LONG_S) == b"x"
    closed: list[Connection] = []
    for connection in (before, after):
        monkeypatch.setattr(connection, "close", partial(closed.append, connection))
    servers.close()
    monkeypatch.undo()
    assert closed == [before, after]
    for connection in closed:
        connection.close()


def test_no_server_is_called_after_a_rollback_of_etcd(
    place: Place, servers: Servers, coordinator: MemoryCoordinator
) -> None:
    coordinator.restore(cluster="2" * 16)
    deadline = time.monotonic() + LONG_S
    while not servers._directory.trouble:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with pytest.raises(RolledBackError) as raised:
        place.connection(servers)
    assert not is_transient(raised.value)


def test_calls_continue_when_other_servers_join_and_leave(
    place: Place, servers: Servers, coordinator: MemoryCoordinator
) -> None:
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(place.connection(servers).action, "wait", b"x", timeout_s=LONG_S)
        assert place.entered.wait(LONG_S)
        other = KEYS.pserver(1)
        for _ in range(3):
            coordinator.transact([], [Put(other, msgspec.json.encode(ServerRecord(address="127.0.0.1:2")))])
            coordinator.transact([], [Delete(other)])
        seen = servers._directory.wait_until(lambda d: d.entry(other) is None or None, LONG_S)
        assert seen
        place.release.set()
        assert held.result(LONG_S) == b"x"


def test_a_server_of_another_generation_does_not_carry_out_a_call(
    place: Place, servers: Servers, coordinator: MemoryCoordinator
) -> None:
    """Its successor may listen at the same address."""
    before = place.connection(servers)
    record = ServerRecord(address=place.server.address, generation=coordinator.list("/").revision + 2)
    coordinator.transact([], [Delete(place.key)])
    coordinator.transact([], [Put(place.key, msgspec.json.encode(record))])
    newest = coordinator.list("/").revision
    assert servers._directory.wait_until(lambda d: d.revision >= newest or None, LONG_S)
    assert place.connection(servers) is not before
    place.release.set()
    with pytest.raises(FlightedlError) as caught:
        place.connection(servers).action("wait", b"", timeout_s=LONG_S)
    assert is_transient(caught.value)
    assert not place.entered.is_set()


class LateDirectory(Directory):
    """A directory in which a key appears just after it was looked up for the first time."""

    coordinator: MemoryCoordinator
    late_key = ""

    def entry(self, key: str) -> Entry | None:
        found = super().entry(key)
        if key == self.late_key:
            self.late_key = ""
            self.coordinator.transact([], [Put(key, b"")])
            assert self.wait_until(lambda d: d.entry(key), LONG_S)
        return found


def test_a_model_whose_election_the_directory_learns_during_the_check_is_the_same(
    coordinator: MemoryCoordinator,
) -> None:
    """The election is newer than the revision at which its key was not there yet."""
    with LateDirectory(coordinator, KEYS, SystemClock()) as directory:
        directory.coordinator = coordinator
        assert directory.wait_until(lambda d: d.revision or None, LONG_S)
        election = coordinator.list("/").revision + 1
        servers = Servers("demo", directory, Connector(Caller("trainer", "trainer-1"), Role.TRAINER))
        servers.follow("/flightedl/demo/election", FollowedElection(Elected(election, election)))
        directory.late_key = "/flightedl/demo/election"
        with pytest.raises(NotReadyError, match="no master serves this job yet"):
            servers.master()
        assert not directory.late_key
        servers.close()


class ReplacedLate(Directory):
    """A directory in which a pserver disappears just after it was looked up."""

    coordinator: MemoryCoordinator
    is_armed = False

    def pservers(self) -> Mapping[int, ServerRecord]:
        found = super().pservers()
        if self.is_armed:
            self.is_armed = False
            self.coordinator.transact([], [Delete(KEYS.pserver(0))])
            assert self.wait_until(lambda d: d.entry(KEYS.pserver(0)) is None or None, LONG_S)
        return found


def test_a_pserver_that_disappears_during_its_lookup_is_looked_up_again(coordinator: MemoryCoordinator) -> None:
    coordinator.transact([], [Put(KEYS.pserver(0), msgspec.json.encode(ServerRecord(address="127.0.0.1:1")))])
    with ReplacedLate(coordinator, KEYS, SystemClock()) as directory:
        directory.coordinator = coordinator
        assert directory.wait_until(lambda d: d.pservers() or None, LONG_S)
        servers = Servers("demo", directory, Connector(Caller("trainer", "trainer-1"), Role.TRAINER))
        directory.is_armed = True
        servers.pserver(0)
        with pytest.raises(NotReadyError):
            servers.pserver(0)
        servers.close()
