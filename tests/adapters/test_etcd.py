"""The etcd adapter with a real etcd: its contract, and behavior that only a real server shows."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from flightedl.adapters.clock import SystemClock
from flightedl.adapters.etcd import EtcdCoordinator
from flightedl.domain.tenure import TRUSTED_PART
from flightedl.errors import OutcomeUnknownError, RolledBackError, UnavailableError, UsageError
from flightedl.ports import Coordinator, Put, Written
from tests.support.contracts.coordinator import (
    CoordinatorContract,
    CoordinatorHistoryContract,
    CoordinatorOutageContract,
    collect,
    persistently,
    put,
)
from tests.support.etcd_server import EtcdServer
from tests.support.processes import closed_port
from tests.support.proxy import TcpProxy

pytestmark = pytest.mark.etcd


class EtcdWorld:
    """Real etcd behind a proxy."""

    def __init__(self, server: EtcdServer, proxy: TcpProxy, *, timeout_s: float = 2.0) -> None:
        self.timeout_s = timeout_s
        self.prefix = f"/test/{uuid.uuid4().hex}/"
        self.server = server
        self.proxy = proxy
        self.connections: list[EtcdCoordinator] = []

    def connect(self, timeout_s: float | None = None) -> EtcdCoordinator:
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        self.connections.append(EtcdCoordinator(self.proxy.address, timeout_s=timeout_s, clock=SystemClock()))
        return self.connections[-1]

    def pass_time(self, seconds: float) -> None:
        """Wait for half of the time, which leaves slack for a slow machine; the rest elapses while the test polls."""
        time.sleep(seconds / 2)

    def compact(self) -> None:
        self.server.compact()

    def stop(self) -> None:
        self.server.kill()

    def start(self) -> None:
        self.server.restart()

    def lose_reply(self, coordinator: Coordinator) -> None:
        self.proxy.cut_after_request()

    def backup(self) -> Callable[[], None]:
        copy = self.server.backup()
        return lambda: self.server.restore(copy)

    def begin_again(self) -> None:
        self.server.restore(None, cluster=f"begun-{uuid.uuid4().hex}")

    def close(self) -> None:
        for connection in self.connections:
            connection.close()


@pytest.fixture
def shared_world(etcd: EtcdServer) -> Iterator[EtcdWorld]:
    with TcpProxy(etcd.address) as proxy:
        # No server is down here, so a call fails only if the machine is too busy.
        world = EtcdWorld(etcd, proxy, timeout_s=10.0)
        yield world
        world.close()


@pytest.fixture
def own_world(own_etcd: EtcdServer) -> Iterator[EtcdWorld]:
    with TcpProxy(own_etcd.address) as proxy:
        world = EtcdWorld(own_etcd, proxy)
        yield world
        world.close()


class TestContract(CoordinatorContract):
    @pytest.fixture
    def world(self, shared_world: EtcdWorld) -> EtcdWorld:
        return shared_world


@pytest.mark.faults
class TestOutages(CoordinatorOutageContract):
    @pytest.fixture
    def world(self, own_world: EtcdWorld) -> EtcdWorld:
        return own_world


@pytest.mark.faults
class TestHistory(CoordinatorHistoryContract):
    @pytest.fixture
    def world(self, own_world: EtcdWorld) -> EtcdWorld:
        return own_world


@pytest.mark.faults
def test_a_call_to_a_frozen_etcd_times_out(own_world: EtcdWorld) -> None:
    coordinator = own_world.connect(timeout_s=0.5)
    lease = coordinator.grant(60)
    own_world.server.freeze()
    with pytest.raises(OutcomeUnknownError, match=r"did not answer within 0\.5 s"):
        coordinator.transact([], [Put(own_world.prefix + "a", b"")])
    for act in (lambda: coordinator.get("a"), lambda: coordinator.list("a"), lambda: coordinator.grant(5), lease.renew):
        start = time.monotonic()
        with pytest.raises(UnavailableError):
            act()
        assert time.monotonic() - start < 5
    own_world.server.thaw()
    persistently(lease.renew)


@pytest.mark.faults
def test_a_renewal_is_given_up_while_there_is_time_for_another(own_world: EtcdWorld) -> None:
    lease = own_world.connect(timeout_s=10.0).grant(4)
    own_world.server.freeze()
    start = time.monotonic()
    with pytest.raises(UnavailableError):
        lease.renew()
    assert time.monotonic() - start < 4 * TRUSTED_PART
    own_world.server.thaw()
    persistently(lease.renew)


@pytest.mark.faults
def test_a_transaction_that_never_connected_is_reported_as_not_sent(own_world: EtcdWorld) -> None:
    own_world.server.freeze()
    with pytest.raises(UnavailableError):
        own_world.connect(timeout_s=1.0).transact([], [Put(own_world.prefix + "a", b"")])
    own_world.server.thaw()


@pytest.mark.faults
@pytest.mark.timeout(90)
def test_a_watch_survives_a_silent_partition(own_world: EtcdWorld) -> None:
    """The stream looks alive but delivers nothing; only a request on it detects the partition."""
    coordinator = own_world.connect(timeout_s=0.5)
    direct = EtcdCoordinator(own_world.server.address, clock=SystemClock())
    watch = coordinator.watch(own_world.prefix, put(coordinator, own_world.prefix + "a"))
    put(direct, own_world.prefix + "a", b"1")
    collect(watch, 1)
    own_world.proxy.half_open()
    put(direct, own_world.prefix + "a", b"2")
    assert watch.next(0.2) == ()
    # The old connections remain half-open for ever; only new ones are forwarded.
    own_world.proxy.forget()
    (event,) = collect(watch, 1)
    assert isinstance(event, Written)
    assert event.entry.value == b"2"
    assert persistently(lambda: coordinator.get(own_world.prefix + "a")) is not None
    direct.close()


@pytest.mark.faults
def test_a_watch_survives_a_freeze_without_losing_or_repeating_events(own_world: EtcdWorld) -> None:
    coordinator = own_world.connect(timeout_s=0.5)
    watch = coordinator.watch(own_world.prefix, put(coordinator, own_world.prefix + "a"))
    revisions = [put(coordinator, own_world.prefix + "a") for _ in range(3)]
    own_world.server.freeze()
    seen = list(watch.next(1.0))
    own_world.server.thaw()
    revisions += [persistently(lambda: put(coordinator, own_world.prefix + "a")) for _ in range(3)]
    seen += collect(watch, len(revisions) - len(seen))
    # A write whose first attempt timed out may have been applied twice. Each event still arrives once and in order.
    got = [event.entry.mod_revision for event in seen if isinstance(event, Written)]
    assert got == sorted(set(got))
    assert set(revisions) <= set(got)


@pytest.mark.faults
def test_an_etcd_replaced_by_an_empty_one_is_detected_by_its_cluster_id(own_etcd: EtcdServer) -> None:
    with TcpProxy(own_etcd.address) as proxy, EtcdServer() as empty:
        coordinator = EtcdCoordinator(proxy.address, clock=SystemClock())
        for _ in range(5):
            revision = put(coordinator, "/test/a")
        watch = coordinator.watch("/test/", revision)
        assert watch.next(0.1) == ()
        proxy.redirect(empty.address)
        with pytest.raises(RolledBackError, match="cluster"):
            collect(watch, 1)
        coordinator.close()


def test_the_next_endpoint_is_tried_when_one_is_down(etcd: EtcdServer) -> None:
    with closed_port() as port:
        coordinator = EtcdCoordinator(f"127.0.0.1:{port}, {etcd.address}", clock=SystemClock())
        key = f"/test/{uuid.uuid4().hex}"
        revision = put(coordinator, key, b"1")
        watch = coordinator.watch(key, revision)
        put(coordinator, key, b"2")
        collect(watch, 1)
        coordinator.close()


def test_an_unreachable_etcd_says_what_to_do() -> None:
    with closed_port() as port:
        coordinator = EtcdCoordinator(f"127.0.0.1:{port}", clock=SystemClock())
        with pytest.raises(UnavailableError, match=rf":{port} cannot be reached: start it.*FLIGHTEDL_ETCD"):
            coordinator.transact([], [Put("a", b"")])
        coordinator.close()
    coordinator = EtcdCoordinator("no-such-host.invalid:2379", clock=SystemClock())
    with pytest.raises(UnavailableError, match="no-such-host"):
        coordinator.transact([], [Put("a", b"")])
    coordinator.close()
    with pytest.raises(UsageError, match="FLIGHTEDL_ETCD"):
        EtcdCoordinator(" , ", clock=SystemClock())


def test_a_value_that_is_too_large_is_rejected(shared_world: EtcdWorld) -> None:
    coordinator = shared_world.connect()
    for size_bytes in (1_700_000, 4_000_000):
        with pytest.raises(UsageError, match=r"too large|larger than max"):
            coordinator.transact([], [Put(shared_world.prefix + "a", bytes(size_bytes))])
    assert coordinator.get(shared_world.prefix + "a") is None


def test_the_granted_ttl_is_reported(shared_world: EtcdWorld) -> None:
    assert shared_world.connect().grant(1.2).ttl_s == 2.0


def test_a_watch_that_is_far_behind_delivers_all_events(shared_world: EtcdWorld) -> None:
    """etcd sends the events of about 1,000 revisions at a time, but each reply names the newest revision."""
    coordinator, key = shared_world.connect(), shared_world.prefix + "a"
    start = put(coordinator, key)
    with ThreadPoolExecutor(16) as pool:
        written = list(pool.map(lambda _: put(coordinator, key), range(2100)))
    watch = coordinator.watch(shared_world.prefix, start)
    events = collect(watch, len(written))
    assert [event.entry.mod_revision for event in events if isinstance(event, Written)] == sorted(written)


def test_closing_ends_calls_and_watches_of_other_threads(shared_world: EtcdWorld) -> None:
    coordinator = shared_world.connect(timeout_s=20)
    coordinator.get("a")
    watch = coordinator.watch(shared_world.prefix, 0)
    shared_world.proxy.half_open()
    with ThreadPoolExecutor(2) as pool:
        watching = pool.submit(watch.next, 30)
        asking = pool.submit(coordinator.get, "a")
        with pytest.raises(TimeoutError):
            asking.result(0.2)
        coordinator.close()
        assert watching.result(10) == ()
        with pytest.raises(UnavailableError):
            asking.result(10)


def test_nothing_is_written_to_stderr(shared_world: EtcdWorld, capfd: pytest.CaptureFixture[str]) -> None:
    coordinator = shared_world.connect()
    watch = coordinator.watch(shared_world.prefix, put(coordinator, shared_world.prefix + "a"))
    lease = coordinator.grant(5)
    lease.renew()
    put(coordinator, shared_world.prefix + "a")
    collect(watch, 1)
    shared_world.proxy.refuse()
    with pytest.raises(UnavailableError):
        lease.renew()
    assert watch.next(0.3) == ()
    shared_world.proxy.heal()
    persistently(lease.renew)
    coordinator.close()
    assert capfd.readouterr().err == ""
