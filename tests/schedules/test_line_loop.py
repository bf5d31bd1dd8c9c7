"""Every order in which handlers lend conversations to the loop of lines, end them, and wake the loop."""

from __future__ import annotations

import select
import socket
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from flightedl.pserver.steps import line_loop
from flightedl.pserver.steps.line_loop import LineLoop
from flightedl.rpc import line as rpc_line
from flightedl.rpc.line import Lines
from tests.support.planting import Planted, bug, drops, rewrites, swaps

from .scheduler import Lock, Run, VirtualClock, explore, finds, running

LOOP = "pserver.steps.line_loop:LineLoop"


class Poller:
    """An ``epoll`` that waits under the scheduler."""

    def __init__(self) -> None:
        self._poll = select.poll()

    def register(self, descriptor: int, _events: int) -> None:
        self._poll.register(descriptor, select.POLLIN)

    def unregister(self, descriptor: int) -> None:
        self._poll.unregister(descriptor)

    def poll(self, timeout_s: float) -> list[tuple[int, int]]:
        running().point()
        running().block(lambda: bool(self._poll.poll(0)), timeout_s)
        return self._poll.poll(0)

    def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def scheduled_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    fake: Any = type("select", (), {"epoll": Poller, "EPOLLIN": select.EPOLLIN})
    monkeypatch.setattr(line_loop, "select", fake)


class Round:
    """A round of two members, whose second push closes it."""

    def __init__(self) -> None:
        self.count = 0
        self.lock = Lock()


class Conversation:
    """A stream whose one step waits in the loop until the round is closed."""

    def __init__(self, loop: LineLoop, current: Round) -> None:
        self._loop = loop
        self._round = current
        self._here, self._there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.due_at: float | None = None
        self.answers = 0
        self._is_back = False
        running().on_end += [self._here.close, self._there.close]

    @property
    def fileno(self) -> int:
        return self._here.fileno()

    def receive(self) -> bool:
        try:
            message = self._here.recv(10, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        if not message:
            self._is_back = True
            return False
        self.push()
        self.due_at = running().now + 60.0
        return True

    def push(self) -> None:
        """Contribute to the round, and wake the loop as ``Changes.announce`` does."""
        with self._round.lock:
            self._round.count += 1
        self._loop.wake()

    def look(self, _now: float) -> bool:
        if self._round.count == 2:
            self.due_at = None
            self.answers += 1
        return True

    def fail(self, error: BaseException) -> None:
        raise AssertionError("a step failed") from error

    def serve(self) -> None:
        """Run as the stream's handler does: lend the conversation, and wait until it is handed back."""
        self._loop.enter()
        self._loop.lend(self)
        self.leave_when_back()

    def leave_when_back(self) -> None:
        running().block(lambda: self._is_back, 5.0)
        if not self._is_back:
            self._loop.take_back(self)
        self._loop.leave()
        self._here.close()

    def step(self) -> None:
        """Send a step, wait for its answer, and end the stream."""
        self._there.send(b"step")
        running().block(lambda: self.answers == 1, 5.0)
        self._there.close()


def waking(run: Run) -> None:
    """A parked step is answered when another thread closes its round, and waking an ending loop harms nobody."""
    clock = VirtualClock()
    loop = LineLoop(clock.now)
    current = Round()
    parked, other = Conversation(loop, current), Conversation(loop, current)
    run.threads(parked.serve, parked.step, other.push)
    assert parked.answers == 1
    assert run.now == 0.0, "a wake-up was lost"
    assert not loop._lent
    assert not loop._parked


def leaving(run: Run) -> None:
    """A trainer may end its stream while another one closes the round for which its step waits."""
    loop = LineLoop(VirtualClock().now)
    current = Round()
    parked, other = Conversation(loop, current), Conversation(loop, current)
    loop.enter()
    loop.lend(parked)
    parked._there.send(b"step")
    run.sleep(1.0)
    assert loop._parked

    def leave() -> None:
        run.point()
        parked._there.close()
        parked.leave_when_back()

    run.threads(leave, other.push)
    assert run.now == 1.0, "a handler was not woken"
    assert not loop._lent
    assert not loop._parked


def shutting(run: Run) -> None:
    """A line is shut by the shutdown of its connection, even if its stream has just opened it, or is ending it."""
    lines = Lines()
    shut: list[str] = []

    def shut_one(name: str) -> None:
        run.point()
        shut.append(name)

    of: Any = {name: SimpleNamespace(shut=partial(shut_one, name), close=run.point) for name in ("old", "new")}
    lines.add("old", of["old"])
    run.threads(lambda: lines.add("new", of["new"]), lambda: lines.end("old"), lines.shut)
    assert "new" in shut, "a line stays open"
    assert set(lines._of) == {"new"}


def test_all_lines_of_a_connection_are_shut() -> None:
    assert explore(shutting, [rpc_line]).is_complete
    flaw = bug("a line opens unnoticed", swaps("rpc.line:Lines.add", "self._are_shut:", "False:"))
    finds(flaw, shutting, [rpc_line])
    flaw = bug("no lock", swaps("rpc.line:Lines.shut", "with self._lock:", "if True:"))
    finds(flaw, shutting, [rpc_line])


@pytest.mark.parametrize("program", [waking, leaving])
def test_a_parked_step_is_answered_when_its_round_closes(program: Any) -> None:
    assert explore(program, [line_loop]).is_complete


@pytest.mark.parametrize(
    ("program", "flaw"),
    [
        (
            waking,
            bug("the loop is not woken if it just served messages", drops(f"{LOOP}._run", "self._is_awake = False")),
        ),
        (
            waking,
            bug(
                "parked steps are looked at before others may skip the wake-up",
                rewrites(
                    f"{LOOP}._run",
                    "self._is_awake = False\n                timeout_s = self._look() if self._parked else _LONG_S",
                    """
                    timeout_s = self._look() if self._parked else _LONG_S
                    self._is_awake = False
                    """,
                ),
            ),
        ),
        (
            leaving,
            bug("the event of an ended thread is written to", swaps(f"{LOOP}._run", "self._event = None", "pass")),
        ),
        (leaving, bug("a conversation stays parked", drops(f"{LOOP}._let_go", "self._parked.discard(conversation)"))),
    ],
    ids=lambda value: getattr(value, "what", ""),
)
def test_a_step_that_nobody_answers_is_found(program: Any, flaw: Planted) -> None:
    finds(flaw, program, [line_loop])
