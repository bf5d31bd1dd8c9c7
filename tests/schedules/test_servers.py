"""Every order in which a trainer's threads look up servers that are being replaced, and call them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from flightedl.client import connections
from flightedl.client.connections import Servers
from flightedl.coordination.records import ServerRecord
from flightedl.errors import NotReadyError
from tests.support.planting import Planted, bug, drops, swaps

from .scheduler import Run, explore, finds, running

CLASS = "client.connections:Servers"


class Connection:
    """A connection to one generation of a server."""

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self.is_aborted = self.is_closed = False

    def abort_calls(self) -> None:
        self.is_aborted = True

    def close(self) -> None:
        self.is_closed = True


class Job:
    """A job with one pserver, and a trainer's connections to it."""

    def __init__(self) -> None:
        self.opened: list[Connection] = []
        self.state: object = object()
        self.present = {0: ServerRecord(address="a:1", generation=1)}
        self._changed: Callable[[], None] = lambda: None
        directory: Any = SimpleNamespace(
            pservers=lambda: self.present,
            master=lambda: None,
            subscribe=self._subscribe,
            require_followed=lambda: None,
        )
        self._directory = directory
        directory.state = self.state
        self.servers = Servers("j", directory, SimpleNamespace(connect=self._connect))  # type: ignore[arg-type]

    def _subscribe(self, changed: Callable[[], None]) -> None:
        self._changed = changed

    def _connect(self, _address: str, expected: Any, _integrity: object) -> Connection:
        running().point()
        self.opened.append(Connection(expected.generation))
        return self.opened[-1]

    def replace(self, generation: int) -> None:
        """Replace the pserver; 0 removes it."""
        self.present = {0: ServerRecord(address="a:1", generation=generation)} if generation else {}
        running().point()
        self._directory.state = object()
        running().point()
        self._changed()

    def look_up(self) -> tuple[int, Any] | None:
        try:
            return self.servers.pserver(0)
        except NotReadyError:
            return None


def connecting(run: Run) -> None:
    """Threads share one connection, and calls on it are possible."""
    job = Job()
    found: list[Any] = []
    run.threads(lambda: found.append(job.look_up()), lambda: found.append(job.look_up()))
    (connection,) = job.opened
    assert found == [(1, connection)] * 2
    assert not connection.is_aborted
    job.servers.close()
    assert connection.is_closed


def replacing(run: Run) -> None:
    """No call to a process that has been replaced goes on, and later calls go to its successor."""
    job = Job()
    found: list[Any] = []
    run.threads(lambda: found.append(job.look_up()), lambda: job.replace(2), lambda: found.append(job.look_up()))
    again = job.look_up()
    assert again is not None
    assert again[0] == again[1].generation == 2
    assert not again[1].is_aborted
    for each in filter(None, found):
        assert each[0] == each[1].generation, "a generation comes with the connection of another"
    former = [each for each in job.opened if each.generation == 1]
    assert all(each.is_aborted for each in former), "calls to a replaced process go on"
    assert len(job.opened) - len(former) == 1
    job.servers.close()
    assert all(each.is_closed for each in job.opened), "a connection to a replaced process is never closed"


def disappearing(run: Run) -> None:
    """After a pserver has disappeared, nobody calls it."""
    job = Job()
    run.threads(job.look_up, lambda: job.replace(0))
    assert job.look_up() is None
    assert all(each.is_aborted for each in job.opened)


@pytest.mark.parametrize("program", [connecting, replacing, disappearing])
def test_calls_go_to_the_present_process(program: Any) -> None:
    assert explore(program, [connections], deviations=2 if program is disappearing else 1).is_complete


@pytest.mark.parametrize(
    ("program", "flaw"),
    [
        (connecting, bug("two connections", swaps(f"{CLASS}._connection", "self._lock", "_nothing"))),
        (
            replacing,
            bug("a replaced connection is forgotten", drops(f"{CLASS}._connection", "self._retired.append(known[1])")),
        ),
        (disappearing, bug("calls go on", drops(f"{CLASS}._leave_replaced", "connection.abort_calls()"))),
        (
            replacing,
            bug(
                "an old record counts as that of the present state",
                swaps(
                    f"{CLASS}.pserver",
                    'state, (record.generation, self._connection("pserver", index, record))',
                    'self._directory.state, (record.generation, self._connection("pserver", index, record))',
                ),
            ),
        ),
        (disappearing, bug("a late connection is used", drops(f"{CLASS}._connection", "connection.abort_calls()"))),
        (replacing, bug("a retired connection is used", drops(f"{CLASS}._connection", "known[1].abort_calls()"))),
    ],
    ids=lambda value: getattr(value, "what", ""),
)
def test_a_call_to_a_former_process_is_found(program: Any, flaw: Planted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_nothing", contextlib.nullcontext(), raising=False)
    finds(flaw, program, [connections], deviations=2 if program is disappearing else 1)
