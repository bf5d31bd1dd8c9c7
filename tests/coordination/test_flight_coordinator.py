"""A coordinator over Arrow Flight passes the contract of coordinators."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator

import pytest

from flightedl.adapters.clock import SystemClock
from flightedl.coordination.coordinators import open_coordinator
from flightedl.coordination.flight_coordinator import ROLE, FlightAccess, FlightCoordinator, coordinator_actions
from flightedl.errors import UnavailableError
from flightedl.ports import Coordinator
from flightedl.rpc.identity import ServerIdentity
from flightedl.rpc.routes import Routes
from flightedl.rpc.server import FlightServer
from tests.support.contracts.coordinator import (
    CoordinatorContract,
    CoordinatorHistoryContract,
    CoordinatorOutageContract,
    put,
)
from tests.support.memory import MemoryCoordinator
from tests.support.proxy import TcpProxy

JOB = "j"


class FlightWorld:
    """A coordinator in memory, whose server can be stopped, behind a proxy."""

    def __init__(self) -> None:
        self.prefix = f"/test/{uuid.uuid4().hex}/"
        self.inner = MemoryCoordinator(SystemClock())
        self.connections: list[FlightCoordinator] = []
        self.server: FlightServer | None = None
        self.port = 0
        self.start()
        self.proxy = TcpProxy(f"127.0.0.1:{self.port}")

    def connect(self) -> FlightCoordinator:
        access = FlightAccess(self.proxy.address, JOB, None)
        self.connections.append(open_coordinator(access, clock=SystemClock()))
        return self.connections[-1]

    def pass_time(self, seconds: float) -> None:
        """Wait for half of the time, which leaves slack for a slow machine; the rest elapses while the test polls."""
        time.sleep(seconds / 2)

    def compact(self) -> None:
        self.inner.compact()

    def start(self) -> None:
        # A connection refuses a restored store if it has seen a later state of it.
        routes = Routes(actions=coordinator_actions(self.inner.another()))
        identity = ServerIdentity(JOB, ROLE)
        self.server = FlightServer(routes, identity, clock=SystemClock(), port=self.port)
        self.port = self.server.port
        self.server.start_serving(ServerIdentity(JOB, ROLE, 0, 1))

    def stop(self) -> None:
        assert self.server is not None
        assert self.server.stop(0.0)

    def lose_reply(self, coordinator: Coordinator) -> None:
        self.proxy.cut_after_request()

    def backup(self) -> Callable[[], None]:
        copy = self.inner.backup()

        def restore() -> None:
            self.stop()
            self.inner.restore(copy)
            self.start()

        return restore

    def begin_again(self) -> None:
        self.stop()
        self.inner.restore(cluster=uuid.uuid4().hex[:16])
        self.start()


@pytest.fixture
def flight_world() -> Iterator[FlightWorld]:
    world = FlightWorld()
    with world.proxy:
        yield world
        for connection in world.connections:
            connection.close()
    world.stop()


class TestContract(CoordinatorContract):
    @pytest.fixture
    def world(self, flight_world: FlightWorld) -> FlightWorld:
        return flight_world


class TestOutages(CoordinatorOutageContract):
    @pytest.fixture
    def world(self, flight_world: FlightWorld) -> FlightWorld:
        return flight_world


class TestHistory(CoordinatorHistoryContract):
    @pytest.fixture
    def world(self, flight_world: FlightWorld) -> FlightWorld:
        return flight_world


def test_closing_ends_waits_and_later_calls(flight_world: FlightWorld) -> None:
    coordinator = flight_world.connect()
    watch = coordinator.watch(flight_world.prefix, put(coordinator, flight_world.prefix + "a"))
    results: list[object] = []
    waiting = threading.Thread(target=lambda: results.append(watch.next(60.0)))
    waiting.start()
    coordinator.close()
    waiting.join(10.0)
    assert results == [()]
    with pytest.raises(UnavailableError, match="closed"):
        coordinator.list("")
