"""Calls to several endpoints of etcd, and the life of a watch's streams, without a server."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from flightedl.adapters import etcd
from flightedl.adapters.etcd import EtcdCoordinator, EtcdWatch, _History
from flightedl.adapters.etcd_access import EtcdAccess
from flightedl.errors import AuthenticationError, OutcomeUnknownError, UnavailableError, UsageError
from flightedl.ports import CompactedError, Entry, LeaseLostError, Put, Removed, Written
from tests.support.clock import FakeClock

TIMEOUT_S = 2.0
CLUSTER = 7


class CallError(grpc.RpcError):  # type: ignore[misc]
    def __init__(self, code: grpc.StatusCode, details: str = "") -> None:
        super().__init__()
        self.code = lambda: code
        self.details = lambda: details


NEVER_SENT = CallError(grpc.StatusCode.UNAVAILABLE, "failed to connect to all addresses; last error: refused")
BROKEN_OFF = CallError(grpc.StatusCode.UNAVAILABLE, "Socket closed")
TOO_LATE = CallError(grpc.StatusCode.DEADLINE_EXCEEDED)


class Endpoints:
    """Endpoints of etcd. Each call takes the next one of the endpoint's errors, or succeeds."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.errors: dict[str, list[Exception]] = {}
        #: Endpoints in the order of calls, and the connections that are open.
        self.calls: list[str] = []
        self.open: list[Any] = []
        self.revision = 1
        #: Seconds that each call takes.
        self.takes_s = 0.0

    def connect(self, _access: object, endpoint: str, _timeout_s: float) -> Any:
        def call(_request: object, timeout: float) -> Any:
            self.calls.append(endpoint)
            self.timeout_s = timeout
            self.clock.advance(self.takes_s)
            if self.errors.get(endpoint):
                raise self.errors[endpoint].pop(0)
            header = SimpleNamespace(cluster_id=CLUSTER, revision=self.revision)
            return SimpleNamespace(header=header, kvs=[], succeeded=True, TTL=1, responses=[])

        made = SimpleNamespace(
            endpoint=endpoint,
            kv=SimpleNamespace(Range=call, Txn=call),
            keep_alive=call,
            close=lambda: self.open.remove(made),
        )
        self.open.append(made)
        return made


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def endpoints(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> Endpoints:
    made = Endpoints(clock)
    monkeypatch.setattr(etcd, "_Connection", made.connect)
    return made


@pytest.fixture
def coordinator(clock: FakeClock, endpoints: Endpoints) -> EtcdCoordinator:
    return EtcdCoordinator("a, b", timeout_s=TIMEOUT_S, clock=clock)


def test_the_endpoint_that_answered_last_is_asked_first(coordinator: EtcdCoordinator, endpoints: Endpoints) -> None:
    endpoints.errors["a"] = [NEVER_SENT]
    for _ in range(2):
        coordinator.get("x")
    assert endpoints.calls == ["a", "b", "b"]


def test_each_endpoint_is_tried_once(coordinator: EtcdCoordinator, endpoints: Endpoints) -> None:
    endpoints.errors = {"a": [NEVER_SENT] * 2, "b": [NEVER_SENT] * 2}
    with pytest.raises(UnavailableError, match="cannot be reached"):
        coordinator.transact([], [Put("x", b"")])
    assert endpoints.calls == ["a", "b"]


@pytest.mark.parametrize("error", [BROKEN_OFF, TOO_LATE])
def test_a_call_that_may_have_been_executed_is_not_repeated(
    coordinator: EtcdCoordinator, endpoints: Endpoints, error: Exception
) -> None:
    endpoints.errors["a"] = [error]
    with pytest.raises(OutcomeUnknownError):
        coordinator.transact([], [Put("x", b"")])
    coordinator.get("x")
    assert endpoints.calls == ["a", "b"]
    endpoints.errors["b"] = [error]
    with pytest.raises(UnavailableError):
        coordinator.get("x")


def test_no_endpoint_is_tried_after_the_deadline(coordinator: EtcdCoordinator, endpoints: Endpoints) -> None:
    endpoints.errors["a"], endpoints.takes_s = [NEVER_SENT], TIMEOUT_S
    with pytest.raises(UnavailableError):
        coordinator.get("x")
    assert endpoints.calls == ["a"]
    endpoints.errors["b"], endpoints.takes_s = [NEVER_SENT], TIMEOUT_S / 4
    coordinator.get("x")
    assert endpoints.timeout_s == TIMEOUT_S * 3 / 4


def test_a_stuck_connection_is_replaced_and_closed_when_its_calls_have_ended(
    coordinator: EtcdCoordinator, endpoints: Endpoints, clock: FakeClock
) -> None:
    def fail(error: Exception) -> None:
        endpoints.errors[coordinator._endpoints[coordinator._current]] = [error]
        with pytest.raises(UnavailableError):
            coordinator.get("x")

    fail(TOO_LATE)
    stuck = endpoints.open[0]
    fail(BROKEN_OFF)
    broken = endpoints.open[1]
    coordinator.get("x")
    assert [each.endpoint for each in endpoints.open] == ["a", "b", "a"], "a stuck connection is used again"
    clock.advance(TIMEOUT_S / 2)
    fail(BROKEN_OFF)
    assert stuck in endpoints.open, "calls on the stuck connection may still be answered"
    clock.advance(TIMEOUT_S)
    fail(BROKEN_OFF)
    assert stuck not in endpoints.open
    assert broken in endpoints.open, "a connection that works again was replaced"
    coordinator.close()
    assert not endpoints.open


def test_a_late_failure_does_not_switch_again(coordinator: EtcdCoordinator, endpoints: Endpoints) -> None:
    index, connection = coordinator._connection()
    for _ in range(2):
        coordinator._switch_from(index, connection, is_stuck=True)
    assert coordinator._current == 1
    assert len(coordinator._retired) == 1
    newer = coordinator._connection()[1]
    coordinator._switch_from(1, newer, is_stuck=False)
    again = coordinator._connection()[1]
    coordinator._switch_from(0, connection, is_stuck=True)
    assert coordinator._connection()[1] is not connection
    assert again in coordinator._connections.values(), "the successor of a stuck connection was closed"


def test_a_closed_coordinator_opens_nothing(coordinator: EtcdCoordinator, endpoints: Endpoints) -> None:
    coordinator.close()
    with pytest.raises(UnavailableError, match="closed by this process"):
        coordinator.get("x")
    assert not endpoints.open
    assert not endpoints.calls


@pytest.mark.parametrize(("ttl_s", "timeout_s"), [(1.0, 0.5), (4.0, 1.0), (60.0, TIMEOUT_S)])
def test_a_renewal_leaves_time_for_another(
    coordinator: EtcdCoordinator, endpoints: Endpoints, ttl_s: float, timeout_s: float
) -> None:
    lease = etcd.EtcdLease(1, ttl_s, coordinator._ask, TIMEOUT_S)
    lease.renew()
    assert endpoints.timeout_s == timeout_s


@pytest.mark.parametrize(
    ("code", "details", "expected"),
    [
        (grpc.StatusCode.NOT_FOUND, "etcdserver: requested lease not found", LeaseLostError),
        (grpc.StatusCode.INVALID_ARGUMENT, "etcdserver: request is too large", UsageError),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "trying to send message larger than max", UsageError),
        (grpc.StatusCode.UNAUTHENTICATED, "etcdserver: invalid auth token", AuthenticationError),
        (grpc.StatusCode.PERMISSION_DENIED, "etcdserver: permission denied", AuthenticationError),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "etcdserver: mvcc: database space exceeded", UnavailableError),
        (grpc.StatusCode.UNAVAILABLE, "DNS resolution failed for etcd", UnavailableError),
        (grpc.StatusCode.UNAVAILABLE, "etcdserver: leader changed", OutcomeUnknownError),
        (grpc.StatusCode.UNKNOWN, "etcdserver: request timed out", OutcomeUnknownError),
    ],
)
def test_errors_of_a_transaction(
    clock: FakeClock, endpoints: Endpoints, code: grpc.StatusCode, details: str, expected: type[Exception]
) -> None:
    endpoints.errors["a"] = [CallError(code, details)]
    with pytest.raises(expected) as raised:
        EtcdCoordinator("a", timeout_s=TIMEOUT_S, clock=clock).transact([], [Put("x", b"")])
    assert type(raised.value) is expected


# --- watches ---


class Stream:
    """A stream of a watch, which the test answers."""

    def __init__(self, connection: Any, first: Any, on_reply: Callable[..., None], on_end: Callable[..., None]) -> None:
        self.endpoint = connection.endpoint
        self.start_revision = first.create_request.start_revision
        self.probes = 0
        self.is_closed = False
        self._on_reply, self._on_end = on_reply, on_end
        streams.append(self)

    def ask_for_progress(self) -> None:
        self.probes += 1

    def close(self) -> None:
        self.is_closed = True

    def reply(self, *events: Any, revision: int, compact_revision: int = 0, created: bool = False) -> None:
        header = SimpleNamespace(cluster_id=CLUSTER, revision=revision)
        reply = SimpleNamespace(header=header, events=events, compact_revision=compact_revision, created=created)
        self._on_reply(self, reply)

    def end(self) -> None:
        self._on_end(self)


#: Streams of the current test.
streams: list[Stream] = []


@pytest.fixture
def watch(clock: FakeClock, endpoints: Endpoints, monkeypatch: pytest.MonkeyPatch) -> EtcdWatch:
    streams.clear()
    monkeypatch.setattr(etcd, "_Stream", Stream)
    return EtcdWatch(EtcdAccess("a,b"), "p", 5, TIMEOUT_S, clock, _History(), lambda _: None)


def event(revision: int, *, is_removal: bool = False) -> Any:
    kv = SimpleNamespace(key=b"p1", value=b"", create_revision=6, mod_revision=revision, lease=0)
    return SimpleNamespace(type=int(is_removal), kv=kv)


def test_a_watch_delivers_events_after_its_revision_once(watch: EtcdWatch) -> None:
    assert watch.next(0.0) == ()
    (stream,) = streams
    assert stream.start_revision == 5
    stream.reply(event(5), event(6), revision=6)
    stream.reply(event(6), event(7, is_removal=True), revision=7)
    assert watch.next(0.0) == (Written(Entry("p1", b"", 6, 6)), Removed("p1", 7))
    assert watch.next(0.0) == ()


def test_a_silent_stream_is_probed_once_and_then_replaced(watch: EtcdWatch, clock: FakeClock) -> None:
    watch.next(0.0)
    streams[0].reply(event(9), revision=9)
    watch.next(0.0)
    clock.advance(etcd._QUIET_S)
    for _ in range(2):
        watch.next(0.0)
    assert streams[0].probes == 1
    streams[0].reply(revision=9)
    clock.advance(etcd._QUIET_S)
    watch.next(0.0)
    assert streams[0].probes == 2
    assert not streams[0].is_closed
    clock.advance(TIMEOUT_S)
    watch.next(0.0)
    assert streams[0].is_closed
    watch.next(0.0)
    assert [(each.endpoint, each.start_revision) for each in streams] == [("a", 5), ("b", 9)]
    streams[0].reply(event(10), revision=10)
    streams[0].end()
    streams[1].reply(event(9), event(10), revision=10)
    assert [each.entry.mod_revision for each in watch.next(0.0) if isinstance(each, Written)] == [10]
    watch.next(0.0)
    assert len(streams) == 2, "the end of an abandoned stream has ended its successor"


def test_a_stream_that_has_ended_is_reopened_after_a_pause(watch: EtcdWatch, clock: FakeClock) -> None:
    watch.next(0.0)
    streams[0].end()
    watch.next(0.0)
    assert len(streams) == 1
    clock.advance(etcd._REOPEN_PAUSE_S)
    watch.next(0.0)
    assert len(streams) == 2
    clock.advance(etcd._QUIET_S / 2)
    watch.next(0.0)
    assert not streams[1].probes, "the new stream counts as silent since before it was opened"


@pytest.mark.parametrize("loss", ["compacted", "older"])
def test_events_received_before_a_loss_are_delivered_before_it_is_raised(watch: EtcdWatch, loss: str) -> None:
    watch.next(0.0)
    streams[0].reply(event(6), revision=6)
    if loss == "compacted":
        streams[0].reply(revision=9, compact_revision=8)
    else:
        streams[0].reply(revision=5, created=True)
    assert len(watch.next(0.0)) == 1
    for _ in range(2):
        with pytest.raises(CompactedError):
            watch.next(0.0)


def test_a_closed_watch_delivers_nothing_and_opens_nothing(watch: EtcdWatch, clock: FakeClock) -> None:
    watch.next(0.0)
    streams[0].reply(event(6), revision=6)
    watch.close()
    assert streams[0].is_closed
    clock.advance(60.0)
    assert watch.next(0.0) == ()
    assert len(streams) == 1
