"""Every order in which the two ends of a stream use their line and shared memory, also when one end gives up."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from flightedl.client.model import step_channel
from flightedl.domain.model.optimizers import SGD
from flightedl.domain.model.sharding import Block
from flightedl.errors import UnavailableError
from flightedl.messages.parameters import Outcome
from flightedl.pserver.meter import Meter
from flightedl.pserver.steps import step_stream
from flightedl.pserver.stores.arena import Arena
from flightedl.pserver.stores.array_span import ArraySpan, ReceivedArray
from flightedl.rpc.same_host import SharedPair
from flightedl.wire import shared_protocol, shared_values
from flightedl.wire.parts import STEP_END
from flightedl.wire.rows import OutgoingBlocks
from flightedl.wire.shared_values import Outbox
from tests.support.planting import Planted, bug, drops, rewrites, swaps

from .scheduler import Event, Lock, Run, SimpleQueue, VirtualClock, explore, finds, running

MODULES = [step_stream, step_channel, shared_protocol]
#: Large enough for shared memory.
COUNT = 1024
Values = npt.NDArray[np.float32]


class Memory:
    """Memory of one process, as both see it."""

    def __init__(self, size: int = 1 << 16) -> None:
        self.values = np.zeros(size, np.uint8)
        self._consumed = 0
        self._is_over = False
        self._name = running().number_primitive()

    @property
    def consumed(self) -> int:
        running().point((self._name, False))
        return self._consumed

    @consumed.setter
    def consumed(self, count: int) -> None:
        running().point((self._name, True))
        self._consumed = count

    @property
    def is_over(self) -> bool:
        running().point((self._name, False))
        return self._is_over

    def end(self) -> None:
        running().point((self._name, True))
        self._is_over = True


class LineEnd:
    """One end of a line whose messages are kept in two queues."""

    def __init__(self, incoming: SimpleQueue, outgoing: SimpleQueue) -> None:
        self._incoming, self._outgoing = incoming, outgoing

    def send(self, values: Sequence[memoryview] | None, header: bytes, _is_over: object = None) -> bool:
        self._outgoing.put((None if values is None else memoryview(b"".join(values)), header))
        return True

    def receive(self, _is_over: object = None) -> Any:
        return self._incoming.get()

    def close(self) -> None:
        self._outgoing.put(None)


class Exchange:
    """The Flight stream, which carries nothing here."""

    columns = ()

    def at_rest(self, read: Any) -> Any:
        return read()

    def answer(self) -> None:
        raise UnavailableError("the stream has ended")


class Call:
    """The call of a stream that is never late."""

    is_late = False

    def __init__(self) -> None:
        self.closing = Event()

    def is_cancelled(self) -> bool:
        return False


def require_equal(values: Values, expected: float) -> None:
    """Read values in two parts, between which others may run."""
    half = values.size // 2
    first = set(values[:half].tolist())
    running().point()
    assert first | set(values[half:].tolist()) == {expected}, "values changed while they were read"


def fill(values: Values, value: float) -> None:
    half = values.size // 2
    values[:half] = value
    running().point()
    values[half:] = value


@pytest.fixture(autouse=True)
def copies_in_two_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    def copy(target: Values, source: Values) -> bool:
        half = source.size // 2
        target[:half] = source[:half]
        running().point()
        target[half:] = source[half:]
        return True

    monkeypatch.setattr(step_stream, "finite_copy", lambda: copy)


class Stream:
    """Both ends of a stream, a span of a pserver, and a gradient of a trainer. Both lend from memory."""

    def __init__(self) -> None:
        clock: Any = VirtualClock()
        requests, answers = SimpleQueue(), SimpleQueue()
        there: Any = LineEnd(requests, answers)
        here: Any = LineEnd(answers, requests)
        theirs: Any = Memory()
        ours: Any = Memory()
        store: Any = Memory()
        gradients: Any = Memory()
        exchange: Any = Exchange()
        call: Any = Call()
        self.line, self.ours = there, ours
        self.server = step_stream.StepStream(exchange, call, clock, Meter(), lambda: store, shares_memory=True)
        pair = SharedPair(theirs, ours, there, store, gradients)
        self.server._pair = pair
        self.server._share(there, Outbox(theirs.values, store=store.values), step_stream.inbox_of(pair))
        self.client = step_channel.StepStream(exchange, exchange, 1e9, 1e9, clock.now, 2)
        self.client.share(SharedPair(ours, theirs, here, store, gradients), 1 << 20)
        values = Arena(store.values).allocate(COUNT, np.float32, is_values=True)
        lock: Any = Lock()
        unused: Any = SimpleNamespace(optimizer=SGD(1.0))
        arena = Arena(store.values[COUNT * 4 :])
        self.span = ArraySpan(range(1), [Block(0, 0, 0, COUNT, 0)], values, [], unused, unused, arena, lock)
        self.version = self.answered = 0
        self.gradient = gradients.values[: COUNT * 4].view(np.float32)

    def update(self, value: int) -> None:
        """Set all values, as an update by another trainer may."""
        with self.span.lock:
            fill(self.span.detach_for_write().view(np.float32), value)
            self.version = value

    def serve(self, number: int) -> None:
        """Serve a step, whose gradient consists of its number: answer with the values, and then with the end."""
        received = self.server.request()
        assert received is not None
        (part,), _ = received
        require_equal(np.frombuffer(part.data, np.float32), number)
        del part, received
        with self.span.lock:
            piece = self.span.piece(range(1), self.version, Outcome.ACCEPTED, ReceivedArray())
        self.server.write([piece], checksums=False)
        del piece
        self.server.write([OutgoingBlocks(range(1), 0, Outcome.NONE, None, [0, 0])], STEP_END, checksums=False)
        self.answered += 1

    def send(self, number: int) -> None:
        fill(self.gradient, number)
        piece = OutgoingBlocks(range(1), 0, Outcome.NONE, self.gradient, [0, COUNT * 4])
        self.client.send([piece], b"{}", checksums=False)

    def receive(self) -> None:
        """Receive both answers. All values have to be of the version of their message."""
        end = b""
        while not end:
            (part,), end = self.client.receive()
            values = read_slowly(part.data)
            self.client.require_lent()
            assert values in ([], [float(part.version)]), "values changed while they were read"


def read_slowly(data: memoryview) -> list[float]:
    values = np.frombuffer(data, np.float32)
    half = values.size // 2
    first = set(values[:half].tolist())
    running().point()
    return sorted(first | set(values[half:].tolist()))


def stepping(run: Run) -> None:
    """Both ends read what the other sent, although both reuse memory, and another trainer updates the values."""
    stream = Stream()

    def serve() -> None:
        for number in (1, 2):
            stream.serve(number)

    def train() -> None:
        for number in (1, 2):
            stream.send(number)
            stream.receive()
            stream.client.rest()

    def update() -> None:
        for number in (1, 2):
            run.block(lambda: stream.answered >= number, 5.0)  # noqa: B023
            stream.update(50 + number)

    run.threads(serve, update, train)
    assert run.now == 0.0


def ending(run: Run) -> None:
    """A trainer that still reads when the pserver ends the stream gets sound values or an error."""
    stream = Stream()

    def serve() -> None:
        stream.serve(1)
        stream.server.end()

    def update() -> None:
        run.block(lambda: stream.answered == 1, 5.0)
        stream.update(7)

    def train() -> None:
        stream.send(1)
        try:
            stream.receive()
        except UnavailableError as error:
            stream.client.rest(error)

    run.threads(serve, update, train)


def resting(run: Run) -> None:
    """A trainer that rests between two steps has given back all values."""
    stream = Stream()

    def serve() -> None:
        received = stream.server.request()
        assert received is not None
        del received
        with stream.span.lock:
            piece = stream.span.piece(range(1), 0, Outcome.ACCEPTED, ReceivedArray())
        stream.server.write([piece], STEP_END, checksums=False)

    def train() -> None:
        stream.send(1)
        stream.receive()
        stream.client.rest()
        assert stream.ours.consumed == 1, "values are still lent between two steps"

    run.threads(serve, train)


def giving_up(run: Run) -> None:
    """A pserver that still copies when the trainer gives up gets a sound gradient or an error."""
    stream = Stream()

    def serve() -> None:
        try:
            stream.serve(1)
        except UnavailableError:
            stream.server.end()

    def train() -> None:
        stream.send(1)
        stream.client.rest(UnavailableError("the script was interrupted"))
        fill(stream.gradient, 9)

    run.threads(serve, train)


@pytest.mark.parametrize("program", [stepping, ending, resting, giving_up])
def test_neither_end_uses_values_that_change(program: Any) -> None:
    modules = [step_stream] if program is ending else MODULES
    assert explore(program, modules, deviations=1 if program is stepping else 2).is_complete


SERVER, CLIENT = "pserver.steps.step_stream:StepStream", "client.model.step_channel:StepStream"


@pytest.mark.parametrize(
    ("program", "flaw"),
    [
        (
            stepping,
            bug(
                "lent values count as read when their message arrives",
                rewrites(
                    f"{CLIENT}.receive",
                    "message = self._next()",
                    """
                    message = self._next()
                    self._pair.own.consumed += 1
                    """,
                ),
            ),
        ),
        (
            stepping,
            bug(
                "all values are free once one message is counted",
                swaps("wire.shared_protocol:Loans.counted", "min(counter - self.seen, self.open)", "self.open"),
            ),
        ),
        (
            ending,
            bug(
                "values change before the memory is marked",
                drops(f"{SERVER}.end", "self._pair.own.end()"),
            ),
        ),
        (
            ending,
            bug(
                "lent values are free before the memory is marked",
                rewrites(
                    f"{SERVER}.end",
                    "self._pair.own.end()\n            self._outbox.end()",
                    """
                    self._outbox.end()
                    self._pair.own.end()
                    """,
                ),
            ),
        ),
        (
            ending,
            bug(
                "the trainer does not look for the mark",
                swaps(f"{CLIENT}.require_lent", "self.is_borrowing and", "False and"),
            ),
        ),
        (giving_up, bug("the trainer does not mark its memory", drops(f"{CLIENT}.rest", "self._pair.own.end()"))),
        (resting, bug("values are not given back at rest", drops(f"{CLIENT}.rest", "self._give_back()"))),
        (
            giving_up,
            bug(
                "the pserver looks for the mark before it copies",
                rewrites(
                    "wire.shared_values:CopyingInbox.take",
                    "self.is_finite = self._copy_values(copy, place)",
                    """
                    is_over = self._is_over()
                    self.is_finite = self._copy_values(copy, place)
                    self._is_over = lambda: is_over
                    """,
                ),
            ),
        ),
    ],
    ids=lambda value: getattr(value, "what", ""),
)
def test_values_that_change_while_they_are_used_are_found(program: Any, flaw: Planted) -> None:
    finds(flaw, program, [step_stream] if program is ending else [*MODULES, shared_values])
