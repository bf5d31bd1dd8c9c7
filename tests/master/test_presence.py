"""Processes whose streams to the master break: they lose their keys if they are dead, and only then."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from flightedl.adapters.clock import SystemClock
from flightedl.coordination.directory import Directory
from flightedl.coordination.keeper import HeldKey
from flightedl.coordination.keys import JobKeys
from flightedl.coordination.presence import STREAMS, PresenceStreams
from flightedl.coordination.records import ServerRecord
from flightedl.domain.master import presence as rules
from flightedl.domain.master.presence import Process
from flightedl.errors import MessageError, NotReadyError, UsageError
from flightedl.master import presence
from flightedl.master.presence import PresenceWatch
from flightedl.messages.base import decode
from flightedl.messages.control import PresenceRequest
from flightedl.ports import Delete
from flightedl.rpc import FlightServer, Role, Routes, ServerIdentity
from flightedl.rpc.call import Call
from flightedl.rpc.connector import Connector
from flightedl.rpc.identity import Caller
from tests.support.contracts.coordinator import eventually, put
from tests.support.memory import MemoryCoordinator
from tests.support.processes import free_port
from tests.support.proxy import TcpProxy

KEYS = JobKeys("demo")
#: So long that no lease ends within a test.
TTL_S = 60.0


class Job:
    """A master that only watches, and processes that reach it through a proxy."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self.clock, self._stack = SystemClock(), stack
        self.coordinator = MemoryCoordinator(self.clock)
        put(self.coordinator, KEYS.ps_desired, b"1")
        self.directory = stack.enter_context(Directory(self.coordinator.another(), KEYS, self.clock))
        self.watch = stack.enter_context(
            contextlib.closing(PresenceWatch(self.coordinator, self.directory, KEYS, self.clock))
        )
        self.open = 0
        self.server = FlightServer(
            Routes(request_streams={"presence": self._hear}), ServerIdentity("demo", "master"), clock=self.clock
        )
        stack.callback(self.server.stop, 0.2)
        self.server.start_serving(ServerIdentity("demo", "master", 0, 1))
        self.proxy = stack.enter_context(TcpProxy(f"127.0.0.1:{self.server.port}"))
        put(self.coordinator, KEYS.master_address, record(self.proxy.address, 1))

    def _hear(self, body: bytes, call: Call) -> bytes:
        self.watch.hear(decode(body, PresenceRequest), call)
        self.open += 1
        return b"{}"

    def process(self, key: str, port: int = 0) -> tuple[HeldKey, PresenceStreams]:
        """Start the streams of a process that holds a key. Return when all of them are open."""
        held = HeldKey.claim(self.coordinator, self.clock, key, record(f"127.0.0.1:{port}"), TTL_S)
        assert held is not None
        self._stack.callback(held.release)
        eventually(lambda: self.directory.entry(key) and self.directory.master(), 5)
        before = self.open
        streams = PresenceStreams("demo", self.directory, Connector(Caller("trainer"), Role.TRAINER), lambda: held)
        self._stack.callback(streams.close)
        eventually(lambda: self.open == before + STREAMS, 5)
        return held, streams

    def has(self, held: HeldKey) -> bool:
        return self.coordinator.get(held.key) is not None


def record(address: str, generation: int = 0) -> bytes:
    return msgspec.json.encode(ServerRecord(address=address, generation=generation, name="x", pid=1))


@pytest.fixture
def job() -> Iterator[Job]:
    with contextlib.ExitStack() as stack:
        yield Job(stack)


def test_a_trainer_whose_connections_close_for_good_loses_its_key(job: Job) -> None:
    other, _ = job.process(KEYS.trainer("b"))
    held, streams = job.process(KEYS.trainer("a"))
    streams.close()
    eventually(lambda: not job.has(held), 5)
    assert job.has(other)


def test_processes_whose_connections_are_reset_open_others_and_keep_their_keys(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A process on a busy machine may take longer than usual.
    monkeypatch.setattr(rules, "GRACE_S", 1.0)
    held = [job.process(KEYS.trainer(name))[0] for name in "ab"]
    for _ in range(5):
        before = job.open
        job.proxy.cut()
        eventually(lambda before=before: job.open >= before + 2 * STREAMS, 5)
    job.clock.sleep(1.2)
    assert all(map(job.has, held))


def test_a_process_that_registers_again_opens_streams_for_its_new_generation(job: Job) -> None:
    job.process(KEYS.trainer("b"))
    held, streams = job.process(KEYS.trainer("a"))
    job.coordinator.transact([], [Delete(held.key)])
    again = HeldKey.claim(job.coordinator, job.clock, held.key, record(""), TTL_S)
    assert again is not None
    before = job.open
    streams._held = lambda: again
    put(job.coordinator, KEYS.trainer("c"), b"{}")
    eventually(lambda: job.open == before + STREAMS, 5)
    assert Process(held.key, again.generation) in job.watch._presences._known
    again.release()


def test_a_pserver_whose_port_accepts_keeps_its_key(job: Job) -> None:
    job.process(KEYS.trainer("a"))
    job.process(KEYS.trainer("b"))
    held, streams = job.process(KEYS.pserver(0), job.server.port)
    streams.close()
    eventually(lambda: len(job.watch._presences._known) == 2, 5)
    dead, streams = job.process(KEYS.pserver(1), free_port())
    streams.close()
    eventually(lambda: not job.has(dead), 5)
    assert job.has(held)


def test_a_graceful_end_is_no_death(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    job.process(KEYS.trainer("b"))
    held, streams = job.process(KEYS.trainer("a"))
    held.release()
    streams.close()
    eventually(lambda: len(job.watch._presences._known) == 1, 5)
    assert "presumed dead" not in caplog.text


class Opened:
    """A call as far as the watch uses it."""

    def __init__(self, role: Role | None = None) -> None:
        self.role = role
        self.ended: Any = None


@pytest.mark.parametrize(
    ("key", "role", "error"),
    [
        (KEYS.master_lock, None, MessageError),
        (KEYS.pserver(0), Role.TRAINER, MessageError),
        (KEYS.trainer("a"), Role.SERVER, MessageError),
        (KEYS.trainer("a"), Role.TRAINER, NotReadyError),
    ],
)
def test_a_process_speaks_only_for_a_key_that_it_holds(
    job: Job, key: str, role: Role | None, error: type[Exception]
) -> None:
    put(job.coordinator, KEYS.trainer("a"), b"{}")
    eventually(lambda: job.directory.entry(KEYS.trainer("a")), 5)
    with pytest.raises(error):
        job.watch.hear(PresenceRequest(key=key, generation=77, streams=2), Opened(role))  # type: ignore[arg-type]


def test_streams_leave_threads_to_other_calls(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presence, "_STREAMS_LIMIT", STREAMS)
    held, _ = job.process(KEYS.trainer("a"))
    request = PresenceRequest(key=held.key, generation=held.generation, streams=STREAMS)
    with pytest.raises(UsageError):
        job.watch.hear(request, Opened())  # type: ignore[arg-type]


def test_leases_alone_count_without_pservers(job: Job) -> None:
    generation = put(job.coordinator, KEYS.trainer("a"), b"{}")
    put(job.coordinator, KEYS.ps_desired, b"0")
    eventually(lambda: job.directory.ps_desired() == 0, 5)
    with pytest.raises(UsageError):
        job.watch.hear(PresenceRequest(key=KEYS.trainer("a"), generation=generation, streams=2), Opened())  # type: ignore[arg-type]
