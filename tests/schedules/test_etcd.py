"""Every order in which threads share connections to etcd, and in which a watch is read, answered and closed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from flightedl.adapters import etcd
from flightedl.adapters.etcd import EtcdCoordinator
from flightedl.errors import UnavailableError
from flightedl.ports import Written
from tests.support.planting import Planted, bug, drops, rewrites, swaps

from .scheduler import Run, VirtualClock, explore, finds, running

CLOSE = "adapters.etcd:EtcdWatch.close"
TIMEOUT_S = 2.0


class Connection:
    """A connection to an etcd that answers at once."""

    def __init__(self, *_: object) -> None:
        self.is_open = True
        self.kv = SimpleNamespace(Range=self._ask)
        connections.append(self)

    def _ask(self, _request: object, timeout: float) -> Any:
        running().point()
        if not self.is_open:
            raise ValueError("Cannot invoke RPC on closed channel!")
        return SimpleNamespace(header=SimpleNamespace(cluster_id=1, revision=1), kvs=[])

    def close(self) -> None:
        self.is_open = False


class Stream:
    """A stream of a watch, which the program answers."""

    def __init__(self, connection: Any, first: Any, on_reply: Callable[..., None], on_end: Callable[..., None]) -> None:
        self.connection = connection
        self.start_revision = first.create_request.start_revision
        self._on_reply, self._on_end = on_reply, on_end
        streams.append(self)

    def ask_for_progress(self) -> None:
        self.reply()

    def close(self) -> None:
        self.connection.close()
        self._on_end(self)

    def reply(self, *revisions: int) -> None:
        header = SimpleNamespace(cluster_id=1, revision=max(revisions, default=1))
        events = [
            SimpleNamespace(
                type=0, kv=SimpleNamespace(key=b"k", value=b"", create_revision=1, mod_revision=each, lease=0)
            )
            for each in revisions
        ]
        self._on_reply(self, SimpleNamespace(header=header, events=events, compact_revision=0, created=False))


#: Connections and streams of the current run.
connections: list[Connection] = []
streams: list[Stream] = []


@pytest.fixture(autouse=True)
def without_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(etcd, "_Connection", Connection)
    monkeypatch.setattr(etcd, "_Stream", Stream)


def opened() -> EtcdCoordinator:
    connections.clear()
    streams.clear()
    clock: Any = VirtualClock()
    return EtcdCoordinator("a,b", timeout_s=TIMEOUT_S, clock=clock)


def sharing(run: Run) -> None:
    """Two threads open one connection. A coordinator that is closed at any moment leaves none open."""
    coordinator = opened()

    def ask() -> None:
        with contextlib.suppress(UnavailableError):
            coordinator.get("k")

    run.threads(ask, ask, coordinator.close)
    assert not any(each.is_open for each in connections), "a connection was left open"
    assert len(connections) <= 1, "two connections were opened to one endpoint"


def switching(run: Run) -> None:
    """Two calls that fail together switch once to the next endpoint, and the stuck connection is closed later."""
    coordinator = opened()
    index, stuck = coordinator._connection()
    fail = lambda: coordinator._switch_from(index, stuck, is_stuck=True)  # noqa: E731
    run.threads(fail, fail)
    assert coordinator._connection()[0] == 1
    run.sleep(2 * TIMEOUT_S)
    coordinator._switch_from(0, stuck, is_stuck=True)
    assert not connections[0].is_open
    coordinator.close()
    assert not any(each.is_open for each in connections)


def watching(run: Run) -> None:
    """Each event is delivered once and in order while a stream breaks, and no thread sleeps through an event."""
    coordinator = opened()
    watch = coordinator.watch("k", 0)
    seen: list[int] = []

    def read() -> None:
        while len(seen) < 3:
            seen.extend(event.entry.mod_revision for event in watch.next(5.0) if isinstance(event, Written))

    def answer() -> None:
        run.block(lambda: len(streams) == 1, None)
        streams[0].reply(1)
        streams[0].reply(2)
        streams[0]._on_end(streams[0])
        run.block(lambda: len(streams) == 2, None)
        streams[0].reply(3)
        streams[1].reply(2, 3)

    run.threads(read, answer)
    assert seen == [1, 2, 3]
    assert streams[1].start_revision == 2
    assert run.now == etcd._REOPEN_PAUSE_S, "a thread slept through an event"


def closing(run: Run) -> None:
    """Closing ends a wait at once, delivers nothing more, and leaves no stream open."""
    coordinator = opened()
    watch = coordinator.watch("k", 0)
    after: list[Any] = []

    def read() -> None:
        watch.next(30.0)
        while not watch._is_closed:
            watch.next(30.0)
        after.extend(watch.next(30.0))

    def close() -> None:
        run.sleep(1.0)
        if streams:
            streams[0].reply(1)
        coordinator.close()

    run.threads(read, close)
    assert after == []
    assert not any(each.is_open for each in connections), "a stream was left open"
    assert run.now == 1.0, "closing does not end a wait"
    with pytest.raises(UnavailableError, match="closed by this process"):
        coordinator.watch("k", 0)


@pytest.mark.parametrize("program", [sharing, switching, watching, closing])
def test_threads_share_what_is_open_and_leave_nothing(program: Any) -> None:
    assert explore(program, [etcd], deviations=1).is_complete


@pytest.mark.parametrize(
    ("program", "flaw"),
    [
        (
            sharing,
            bug("two threads connect", swaps("adapters.etcd:EtcdCoordinator._connection", "self._lock", "_nothing")),
        ),
        (
            sharing,
            bug(
                "a closed coordinator opens a connection",
                rewrites("adapters.etcd:EtcdCoordinator.close", "self._is_closed = True", "pass"),
            ),
        ),
        (switching, bug("two switches", swaps("adapters.etcd:EtcdCoordinator._switch_from", "self._lock", "_nothing"))),
        (
            watching,
            bug("an event wakes nobody", drops("adapters.etcd:EtcdWatch._received", "self._condition.notify_all()")),
        ),
        (
            watching,
            bug(
                "the end of a stream wakes nobody",
                drops("adapters.etcd:EtcdWatch._ended", "self._condition.notify_all()"),
            ),
        ),
        (closing, bug("closing wakes nobody", drops(CLOSE, "self._condition.notify_all()"))),
    ],
    ids=lambda value: getattr(value, "what", ""),
)
def test_what_is_left_open_or_missed_is_found(program: Any, flaw: Planted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(etcd, "_nothing", contextlib.nullcontext(), raising=False)
    finds(flaw, program, [etcd], deviations=1)
