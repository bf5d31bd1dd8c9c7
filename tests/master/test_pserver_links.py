"""The thread that calls a pserver: it misses no wake-up, and calls each process of the pserver by its generation."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from flightedl.adapters.clock import SystemClock
from flightedl.coordination.records import ServerRecord
from flightedl.domain.master.effects import ControlCall, NoCallDue
from flightedl.domain.master.events import Answered
from flightedl.errors import UnavailableError
from flightedl.master.pservers import PserverLink
from flightedl.messages.base import encode
from flightedl.messages.control import ViewRequest
from flightedl.messages.status import PserverStatusReply
from flightedl.rpc.identity import ServerIdentity
from tests.support.contracts.coordinator import eventually

from .job_of_twins import Job

NUMBERS = dict.fromkeys(("lowest_version", "highest_version", "size_bytes", "pushes"), 0)
STATUS = PserverStatusReply(index=0, state="serving", blocks=1, rows={}, members=[], waiting_for="", **NUMBERS)


class Connection:
    def __init__(self, expected: ServerIdentity) -> None:
        self.generation = expected.generation
        self.aborts = 0
        self.is_closed = False

    def action(self, verb: str, *_: object, **__: object) -> bytes:
        assert verb == "status"
        if self.aborts:
            raise UnavailableError("the calls were aborted")
        return encode(STATUS)

    def abort_calls(self) -> None:
        self.aborts += 1

    def close(self) -> None:
        self.is_closed = True


class Pserver:
    """A pserver whose processes all have the same address, and a core that makes no calls to it."""

    def __init__(self) -> None:
        self.records = {0: ServerRecord(address="h:1", generation=5)}
        self.connections: list[Connection] = []
        #: Generations for which the core was asked.
        self.asked = queue.SimpleQueue[int]()
        self.before_answer: Callable[[], None] = lambda: None
        self._subscribers: list[Callable[[], None]] = []
        directory: Any = SimpleNamespace(pservers=lambda: self.records, subscribe=self._subscribers.append)
        connector: Any = SimpleNamespace(connect=self._connect)
        state: Any = SimpleNamespace(clock=SystemClock(), apply=self._apply)
        self.link = PserverLink(0, "demo", state, directory, connector)

    def _connect(self, _address: str, expected: ServerIdentity) -> Connection:
        self.connections.append(Connection(expected))
        return self.connections[-1]

    def _apply(self, event: Any, carry: Callable[[object], None]) -> None:
        self.asked.put(event.generation)
        self.before_answer()
        carry(NoCallDue(0, event.generation, 600.0))

    def set_records(self, records: dict[int, ServerRecord]) -> None:
        self.records = records
        for subscriber in self._subscribers:
            subscriber()


@pytest.fixture
def pserver() -> Iterator[Pserver]:
    made = Pserver()
    yield made
    made.link.close()


def test_a_wake_up_while_the_core_answers_is_not_missed(pserver: Pserver) -> None:
    def wake_once() -> None:
        pserver.before_answer = lambda: None
        pserver.link.wake()

    pserver.before_answer = wake_once
    pserver.link.wake()
    assert [pserver.asked.get(timeout=20) for _ in range(2)] == [5, 5]


def test_calls_to_a_process_that_was_replaced_at_its_address_are_aborted(pserver: Pserver) -> None:
    pserver.link.wake()
    eventually(lambda: pserver.link.status)
    pserver.set_records({0: ServerRecord(address="h:1", generation=5)})
    assert pserver.connections[0].aborts == 0
    pserver.set_records({0: ServerRecord(address="h:1", generation=6)})
    assert pserver.connections[0].aborts == 1
    pserver.link.wake()
    assert [pserver.asked.get(timeout=20) for _ in range(2)] == [5, 6]
    assert [connection.generation for connection in pserver.connections] == [5, 6]
    assert pserver.connections[0].is_closed


def test_a_pserver_that_is_gone_has_no_status(pserver: Pserver) -> None:
    pserver.link.wake()
    eventually(lambda: pserver.link.status)
    pserver.set_records({})
    assert pserver.connections[0].aborts == 1
    pserver.link.wake()
    eventually(lambda: pserver.link.status is None)


def test_pservers_beyond_the_desired_number_are_followed_too(make_job: Callable[..., Job]) -> None:
    """Blocks may be about to move to them."""
    job = make_job()
    master = job.start_master()
    job.start_pserver(2)
    eventually(lambda: len(master.service._links.statuses) == 3)
    eventually(lambda: master.service._links.statuses[2])


def test_the_core_learns_that_a_view_may_not_have_arrived(pserver: Pserver) -> None:
    view = ViewRequest(plan_hash="h", master_generation=1, serial=1, members=[])
    answered = queue.SimpleQueue[Answered]()
    state: Any = pserver.link._state

    def apply(event: Any, carry: Callable[[object], None] | None = None) -> None:
        if isinstance(event, Answered):
            answered.put(event)
        elif carry is not None:
            carry(ControlCall(0, event.generation, view, revision=3))

    def wait_durable(revision: int) -> None:
        assert revision == 3
        raise UnavailableError("the reply was lost")

    state.apply, state.wait_durable = apply, wait_durable
    pserver.link.wake()
    found = answered.get(timeout=20)
    assert (found.request, found.generation, found.reply) == (view, 5, None)
