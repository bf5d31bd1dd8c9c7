"""Every order in which a trainer's step, the loop of lines and another trainer's push meet in a round."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flightedl.domain.consistency.modes import Sync
from flightedl.domain.model.parameters import ParameterSpec
from flightedl.messages.base import encode
from flightedl.messages.parameters import BatchIdentity, Outcome, PushHeader
from flightedl.pserver.meter import Meter
from flightedl.pserver.steps import conversation, line_loop
from flightedl.pserver.steps.conversation import Conversation
from flightedl.pserver.steps.line_loop import LineLoop
from flightedl.pserver.steps.step_stream import StepStream
from flightedl.pserver.stores import changes
from flightedl.wire.parts import STEP_END, decode_message, encode_message
from flightedl.wire.rows import OutgoingBlocks
from tests.pserver.test_snapshots import Pserver
from tests.support.memory import MemoryStorage
from tests.support.planting import Planted, bug, drops, rewrites

from .scheduler import Event, Run, VirtualClock, explore, finds, running

SPECS = [ParameterSpec("w", (2,)), ParameterSpec("b", (3,))]


class LineEnd:
    """The pserver's end of a line, whose messages are kept in lists."""

    def __init__(self) -> None:
        self.incoming: list[Any] = []
        self.outgoing: list[Any] = []

    @property
    def fileno(self) -> int:
        return id(self)

    def receive(self, is_over: object = None) -> Any:
        running().point()
        if not self.incoming:
            if is_over is None:
                raise BlockingIOError
            running().block(lambda: bool(self.incoming), None)
        return self.incoming.pop(0)

    def send(self, values: Any, header: bytes, _is_over: object = None) -> bool:
        running().point()
        self.outgoing.append((None if values is None else memoryview(b"".join(values)), header))
        return True


class Poller:
    """An ``epoll`` of one line and of events."""

    line: LineEnd

    def __init__(self) -> None:
        self._registered: set[int] = set()
        _pollers.append(self)

    def register(self, descriptor: int, _events: int) -> None:
        self._registered.add(descriptor)

    def unregister(self, descriptor: int) -> None:
        self._registered.discard(descriptor)

    def ready(self) -> list[tuple[int, int]]:
        line = self.line.fileno
        found = [line] if line in self._registered and self.line.incoming else []
        return [(each, 1) for each in (*found, *(_events & self._registered))]

    def poll(self, timeout_s: float) -> list[tuple[int, int]]:
        running().point()
        running().block(lambda: bool(self.ready()), timeout_s)
        return self.ready()

    def close(self) -> None:
        pass


#: Events that are set, by number, and the pollers of this run.
_events: set[int] = set()
_pollers: list[Poller] = []


@pytest.fixture(autouse=True)
def scheduled_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    system = SimpleNamespace(
        EFD_CLOEXEC=0,
        EFD_NONBLOCK=0,
        eventfd=lambda *_: 1000 + len(_pollers),
        eventfd_write=lambda event, _: _events.add(event),
        eventfd_read=_events.discard,
        close=_events.discard,
    )
    monkeypatch.setattr(line_loop, "os", system)
    monkeypatch.setattr(line_loop, "select", SimpleNamespace(epoll=Poller, EPOLLIN=1))


def stepping(run: Run) -> None:
    """A step that waits for its round is answered with the values as soon as another push closes this round."""
    _events.clear()
    _pollers.clear()
    clock: Any = VirtualClock()
    pserver = Pserver(MemoryStorage(), Sync(reduce="sum"), specs=SPECS, momentum=0.0)
    pserver.view(1, 2, first_round=0)
    line: Any = LineEnd()
    Poller.line = line
    call: Any = SimpleNamespace(
        is_late=False,
        closing=Event(),
        is_resting=False,
        deadline=100.0,
        is_cancelled=lambda: False,
        check_begin=lambda: None,
        check=lambda: None,
    )
    exchange: Any = SimpleNamespace(columns=(), at_rest=lambda read: read(), is_complete=False)
    service: Any = SimpleNamespace(meter=Meter(), shard=lambda _: pserver.shard, require_lease=lambda: None)
    stream = StepStream(exchange, call, clock, service.meter, lambda: None, shares_memory=False)
    stream._line = line
    lines = LineLoop(clock.now)
    with lines._lock:
        lines._start()
    served = Conversation(stream, service, clock, call, lines)
    served._is_small = True

    def train() -> None:
        header = PushHeader(
            trainer="t1",
            generation=1,
            plan_hash=pserver.plan.hash,
            member=1,
            identity=BatchIdentity(epoch=0, task=0, batch=0, batch_count=1000),
            weight=1.0,
            rows=2,
            pull=True,
            wait_s=5.0,
        )
        piece = OutgoingBlocks(range(2), 0, Outcome.NONE, np.ones(5, np.float32), [0, 8, 20])
        values, packed, _ = encode_message([piece], encode(header), checksums=False)
        line.incoming.append((memoryview(b"".join(values or [])), packed))
        found: list[tuple[int, list[float]]] = []
        end = b""
        while not end:
            run.block(lambda: bool(line.outgoing), 20.0)
            parts, end = decode_message(*line.outgoing.pop(0))
            found += [(part.version, np.frombuffer(part.data, np.float32).tolist()) for part in parts if part.data]
        line.incoming.append(None)
        assert end == STEP_END
        assert found == [(1, [-2.0] * 5)], "the step ended without the values of its round"

    run.threads(served.serve, train, lambda: pserver.push(1, 0, 2))
    assert run.now == 0.0, "a step waited although its round was closed"


def test_a_step_is_answered_as_soon_as_its_round_closes() -> None:
    assert explore(stepping, [conversation, line_loop, changes], deviations=1).is_complete


@pytest.mark.parametrize(
    "flaw",
    [
        bug(
            "changes during a push are taken for earlier ones",
            rewrites(
                "pserver.steps.conversation:Conversation.receive",
                "pieces, waiting = pushed(shard, header, parts)",
                """
                pieces, waiting = pushed(shard, header, parts)
                seen = shard.changes.count
                """,
            ),
        ),
        bug("a closed round does not wake the loop", drops("pserver.stores.changes:Changes.announce", "self.wake()")),
    ],
    ids=lambda flaw: flaw.what,
)
def test_a_step_that_waits_too_long_is_found(flaw: Planted) -> None:
    finds(flaw, stepping, [conversation])
