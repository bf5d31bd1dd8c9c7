"""Messages of steps by every carrier: in order, in lock-step, and awaited only while an answer can still arrive."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from flightedl.adapters.clock import SystemClock
from flightedl.client.model import step_channel
from flightedl.client.model.step_channel import LOCK_STEP_LIMIT_BYTES, StepChannel, StepStream
from flightedl.errors import DeadlineError, FencedError, FlightedlError, OutcomeUnknownError, UnavailableError
from flightedl.pserver.meter import Meter
from flightedl.pserver.steps.step_stream import StepStream as PserverStream
from flightedl.rpc import Call, Connection, Exchange, ExchangeRoute, FlightServer, Routes, ServerIdentity
from flightedl.rpc.line import LIMIT_BYTES, SMALL_BYTES
from flightedl.wire.parts import STEP_SCHEMA, encode_message
from flightedl.wire.rows import OutgoingBlocks
from flightedl.wire.shared_values import Outbox

CLOCK = SystemClock()


def _message(number: int, size: int) -> list[OutgoingBlocks]:
    values = np.full(size, number % 256, np.uint8) if size else None
    return [OutgoingBlocks(range(number, number + 1), 0, 0, values, ())]


class Answering:
    """A stream whose server answers each message at once with its number."""

    columns = ()
    timeout_s = 10.0

    def __init__(self) -> None:
        self.sent: list[int] = []
        self.answers: deque[bytes] = deque()

    def write(self, batch: pa.RecordBatch, metadata: bytes, *, size_bytes: int) -> None:
        self.sent.append(size_bytes)
        self.answers.append(encode_message(_message(len(self.sent), 0), inline=True)[1])

    def write_metadata(self, metadata: bytes) -> None:
        self.write(None, metadata, size_bytes=0)

    def read(self) -> tuple[None, bytes] | None:
        return (None, self.answers.popleft()) if self.answers else None

    def answer(self) -> object:
        raise OutcomeUnknownError("the server ended the stream before it had answered everything")


def _by_stream(exchange: Answering, ahead: int) -> StepStream:
    return StepStream(None, exchange, 0.0, 10.0, lambda: 0.0, ahead)  # type: ignore[arg-type]


def _lock_step(stream: StepStream, messages: Sequence[Sequence[OutgoingBlocks]]) -> Iterator[int]:
    """Send the messages, and return the number of each answer."""
    for pieces in messages:
        stream.send(pieces, checksums=False)
        while stream.is_full:
            yield stream.receive()[0][0].blocks.start
    while not stream.is_answered:
        yield stream.receive()[0][0].blocks.start


def test_the_number_of_messages_in_flight_reaches_exactly_its_limit() -> None:
    exchange = Answering()
    for number in _lock_step(_by_stream(exchange, 3), [_message(n, 100_000) for n in range(39)]):
        assert len(exchange.sent) == min(number + 2, 39)
    assert len(exchange.sent) == 39


def test_a_message_large_enough_for_a_deadlock_is_sent_alone() -> None:
    half = LOCK_STEP_LIMIT_BYTES // 2
    sizes = [70_000, 70_000, LOCK_STEP_LIMIT_BYTES, half, half + 1, 70_000]
    exchange = Answering()
    answers = _lock_step(_by_stream(exchange, 9), [_message(n, size) for n, size in enumerate(sizes)])
    ahead = [len(exchange.sent) for _ in answers]
    assert ahead == [2, 3, 4, 5, 6, 6], "the large message left after the two before it were answered"
    assert exchange.sent == sizes


def test_an_early_end_is_not_mistaken_for_the_last_answer() -> None:
    exchange = Answering()
    stream = _by_stream(exchange, 2)
    stream.send(_message(0, 5), checksums=False)
    stream.receive()
    with pytest.raises(OutcomeUnknownError, match="before it had answered everything"):
        stream.receive()


def _in_memory(stream: StepStream) -> Outbox:
    """Let a stream place large values in memory."""
    stream._is_inline = False
    stream._outbox = Outbox(np.zeros(1 << 20, np.uint8), least_bytes=100)
    return stream._outbox


def test_an_answer_frees_the_memory_of_its_own_message_only() -> None:
    """Otherwise the memory of a message that the server has not read yet would be overwritten."""
    exchange = Answering()
    stream = _by_stream(exchange, 9)
    outbox = _in_memory(stream)
    is_in_memory = [False, True, False, True, True, False]
    for number, is_large in enumerate(is_in_memory):
        stream.send(_message(number, 1000 if is_large else 10), checksums=False)
    assert outbox.loans.open == 3
    for answered in range(1, len(is_in_memory) + 1):
        stream.receive()
        assert outbox.loans.open == sum(is_in_memory[answered:])
    assert stream.is_answered


def test_a_message_that_was_held_back_when_its_step_ended_is_never_sent() -> None:
    exchange = Answering()
    stream = _by_stream(exchange, 9)
    for number in range(2):
        stream.send(_message(number, LOCK_STEP_LIMIT_BYTES), checksums=False)
    assert stream.is_full
    stream.rest()
    assert stream.is_answered
    exchange.answers.clear()
    assert [*_lock_step(stream, [_message(2, 7), _message(3, 7)])] == [2, 3]
    assert exchange.sent == [LOCK_STEP_LIMIT_BYTES, 0, 0]
    # The bytes of the unanswered messages no longer count.
    stream.send(_message(4, LOCK_STEP_LIMIT_BYTES // 2), checksums=False)
    stream.send(_message(5, LOCK_STEP_LIMIT_BYTES // 2), checksums=False)
    assert not stream.is_full


def test_a_failed_step_revokes_its_memory_and_keeps_none_of_it() -> None:
    """The caller may keep the error, whose stack frames refer to the stream."""
    stream = _by_stream(Answering(), 2)
    _in_memory(stream)
    ended: list[str] = []
    memory: Any = SimpleNamespace(end=lambda: ended.append("end"))
    stream._pair = SimpleNamespace(own=memory)  # type: ignore[assignment]
    stream.is_borrowing = True
    stream.rest(UnavailableError("gone"))
    assert ended == ["end"]
    assert stream._pair is stream._outbox is stream._inbox is None
    assert not stream.is_borrowing


@pytest.mark.parametrize("size", [1, SMALL_BYTES - 200, *range(SMALL_BYTES - 70, SMALL_BYTES + 3)])
def test_a_message_counts_where_it_is_sent(size: int) -> None:
    """The bytes on the line and those on the stream have separate limits, without which both sides could wait."""
    exchange = Answering()
    stream = _by_stream(exchange, 9)
    stream._is_inline = False
    on_line: list[int] = []

    def send(values: Sequence[memoryview] | None, header: bytes, _: object) -> bool:
        on_line.append(sum(map(len, values or [])) + len(header))
        return True

    stream._line = SimpleNamespace(send=send)  # type: ignore[assignment]
    stream.send(_message(0, size), b"request", checksums=False)
    (sent,) = on_line
    assert sent <= SMALL_BYTES
    assert sum(exchange.sent) == (0 if sent else size)
    assert stream._by_line == (1 << 10) + sent
    assert stream._by_stream == sum(exchange.sent)


def test_an_answer_without_values_has_only_its_attached_bytes() -> None:
    exchange = Answering()
    stream = _by_stream(exchange, 9)
    stream.send(_message(0, 5), checksums=False)
    exchange.answers[0] = b"end of step"
    assert stream.receive() == ([], b"end of step")
    assert not stream.is_borrowing


@pytest.mark.parametrize("is_borrowing", [True, False])
@pytest.mark.parametrize("is_over", [True, False])
def test_only_lent_values_that_were_revoked_are_not_used(is_borrowing: bool, is_over: bool) -> None:
    stream = _by_stream(Answering(), 9)
    stream._pair = SimpleNamespace(other=SimpleNamespace(is_over=is_over))  # type: ignore[assignment]
    stream.is_borrowing = is_borrowing
    with pytest.raises(UnavailableError, match="mixture") if is_borrowing and is_over else nullcontext():
        stream.require_lent()


class Echo:
    """A server whose handler gives planned answers."""

    def __init__(self) -> None:
        self.error: FlightedlError | None = None
        #: Number of answers before the error.
        self.after = 0
        self.is_silent = threading.Event()
        self.ended = threading.Event()

    def routes(self) -> Routes:
        return Routes(exchanges={"step": ExchangeRoute(STEP_SCHEMA, self._step)})

    def _step(self, _: bytes, exchange: Exchange, call: Call) -> None:
        stream = PserverStream(exchange, call, CLOCK, Meter(), lambda: None, shares_memory=True)
        stream.begin()
        try:
            while (received := stream.request()) is not None:
                if self.error is not None and not self.after:
                    raise self.error
                self.after -= 1
                if not self.is_silent.is_set():
                    (part,), attached = received
                    values = np.frombuffer(part.data, np.uint8) if part.data else None
                    stream.write([OutgoingBlocks(part.blocks, 0, 0, values, ())], attached, checksums=False)
        finally:
            stream.end()
            self.ended.set()


@pytest.fixture
def echo() -> Echo:
    return Echo()


@pytest.fixture
def server(echo: Echo) -> Iterator[FlightServer]:
    server = FlightServer(echo.routes(), ServerIdentity("j", "pserver", 0, 1), clock=CLOCK)
    server.start_serving(ServerIdentity("j", "pserver", 0, 1))
    yield server
    assert server.stop(grace_s=0.2)


@pytest.fixture(params=["line", "stream"])
def connection(request: pytest.FixtureRequest, server: FlightServer) -> Iterator[Connection]:
    if request.param == "line" and sys.platform != "linux":
        pytest.skip("lines are offered on Linux only")
    with Connection(server.address, shares_memory=request.param == "line") as connection:
        yield connection


def _ask(connection: Connection, sizes: Sequence[int], timeout_s: float = 60.0, ahead: int = 100) -> Iterator[int]:
    """Return the size of each answer's values."""
    channel = StepChannel(0, CLOCK, step_bytes=0, ahead=ahead)
    stream = channel.begin(connection, timeout_s=timeout_s)
    assert (stream._pair is not None) == connection.shares_memory
    left = list(enumerate(sizes))
    try:
        for number in range(len(sizes)):
            while left and not stream.is_full:
                place, size = left.pop(0)
                stream.send(_message(place, size), b"%d" % place, checksums=False)
            (part,), attached = stream.receive()
            assert (part.blocks.start, attached) == (number, b"%d" % number)
            assert set(part.data) <= {number % 256}
            yield len(part.data)
    except BaseException as error:
        channel.end(stream, error)
        raise
    channel.end(stream)
    channel.close_idle()


@pytest.mark.parametrize("has_room", [True, False])
def test_large_messages_among_small_ones_keep_their_order(
    connection: Connection, echo: Echo, monkeypatch: pytest.MonkeyPatch, has_room: bool
) -> None:
    if not has_room:
        monkeypatch.setattr(Outbox, "put", lambda *_: None)
    sizes = [0, 5, LIMIT_BYTES - 7, LIMIT_BYTES, 1 << 20, 3, 1 << 20, *[60_000] * 5, *[10] * 200, 2 << 20, 4]
    assert list(_ask(connection, sizes)) == sizes
    assert echo.ended.wait(5.0), "the line ends with the stream"


@pytest.mark.skipif(sys.platform != "linux", reason="memory is shared on Linux only")
def test_the_values_of_an_answer_are_given_back_before_the_next_answer_is_awaited(
    server: FlightServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Connection(server.address, shares_memory=True) as connection:
        channel = StepChannel(0, CLOCK, step_bytes=0)
        stream = channel.begin(connection, timeout_s=60.0)
        pair = stream._pair
        assert pair is not None
        following, consumed = StepStream._next, list[int]()

        def awaited(self: StepStream) -> object:
            consumed.append(pair.own.consumed)
            return following(self)

        monkeypatch.setattr(StepStream, "_next", awaited)
        for number in range(3):
            stream.send(_message(number, LIMIT_BYTES), b"x", checksums=False)
            stream.receive()
            assert stream._pair.own.consumed == consumed[-1] == number
        channel.end(stream)
        assert stream._pair.own.consumed == 3
        channel.close_idle()


@pytest.mark.parametrize("after", [0, 1, 3])
def test_the_error_of_the_server_is_received_on_the_stream(connection: Connection, echo: Echo, after: int) -> None:
    echo.error, echo.after = FencedError("the lease is over"), after
    with pytest.raises(FencedError, match="the lease is over"):
        list(_ask(connection, [5] * 9, ahead=2))
    assert echo.ended.wait(5.0)


def test_the_deadline_of_the_stream_applies_to_the_line(
    connection: Connection, echo: Echo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flightedl.rpc.reuse._LIFETIME_S", 0.1)
    echo.is_silent.set()
    started = time.monotonic()
    with pytest.raises(DeadlineError):
        list(_ask(connection, [5], timeout_s=0.4))
    assert time.monotonic() - started < 3.0
    assert echo.ended.wait(5.0)


def test_a_connection_whose_calls_end_ends_its_streams(connection: Connection, echo: Echo) -> None:
    echo.is_silent.set()
    strike = threading.Timer(0.2, connection.abort_calls)
    strike.start()
    started = time.monotonic()
    with pytest.raises(FlightedlError):
        list(_ask(connection, [5]))
    assert time.monotonic() - started < 3.0
    strike.join()
    assert echo.ended.wait(5.0)


def test_a_stopping_server_does_not_wait_for_idle_clients(
    connection: Connection, server: FlightServer, echo: Echo
) -> None:
    answers = _ask(connection, [5, 5], ahead=1)
    next(answers)
    started = time.monotonic()
    assert server.stop(grace_s=5.0)
    assert time.monotonic() - started < 2.0
    assert echo.ended.is_set()
    with pytest.raises(FlightedlError):
        list(answers)


def test_messages_of_a_step_are_joined_up_to_a_limit() -> None:
    messages = [_message(n, 10) for n in range(7)]
    joined = [[piece.blocks.start for piece in pieces] for pieces in step_channel._joined(messages, 30)]
    assert joined == [[0, 1, 2], [3, 4, 5], [6]]
