"""Small messages beside a stream: in order, whole or not at all, and never waited for when there is no reason to."""

from __future__ import annotations

import random
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pyarrow as pa
import pytest

from flightedl.adapters.clock import SystemClock
from flightedl.errors import DeadlineError, FencedError, FlightedlError, MessageError
from flightedl.rpc import Call, Connection, Exchange, ExchangeRoute, FlightServer, Routes
from flightedl.rpc.line import AHEAD_BYTES, LIMIT_BYTES, Line
from flightedl.rpc.lock_step import LineCarrier, lock_step
from flightedl.rpc.same_host import ask_to_share, share

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="lines are offered on Linux only")

SCHEMA = pa.schema([pa.field("values", pa.binary(), nullable=False)])
CLOCK = SystemClock()
Pair = tuple[Line, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """A line, and the bare socket at its other end."""
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    line = Line(mine)
    with theirs:
        yield line, theirs
    line.close()


def _never() -> bool:
    return False


def _always() -> bool:
    return True


def _both() -> tuple[Line, Line]:
    return tuple(map(Line, socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)))  # type: ignore[return-value]


def test_messages_come_whole_and_in_order() -> None:
    here, there = _both()
    sent: list[tuple[list[bytes] | None, bytes]] = [
        ([b"ab", b"c"], b"header"),
        ([], b"no values, but a place for them"),
        (None, b"alone"),
        ([b"x" * (LIMIT_BYTES - 5)], b""),
    ]
    for values, header in sent:
        assert here.send(None if values is None else list(map(memoryview, values)), header, _never)
        found = there.receive(_never)
        assert found is not None
        assert found[1] == header
        assert (None if found[0] is None else found[0].tobytes()) == (None if values is None else b"".join(values))
    assert here.send(None, b"", _never)
    assert there.receive(_never) == (None, b"")
    here.close()
    assert there.receive(_never) is None
    assert not there.send(None, b"?", _never)
    there.close()


def test_values_lie_where_kernels_take_them_as_they_are(pair: Pair) -> None:
    line, theirs = pair
    theirs.send(np.arange(5, dtype=np.float64).tobytes() + b"abc" + struct.pack("<IB", 3, 1))
    values, header = line.receive(_never) or (None, b"")
    assert header == b"abc"
    assert values is not None
    found = np.frombuffer(values, np.float64)
    assert found.flags.aligned
    assert not found.flags.writeable
    assert found.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    "message",
    [
        b"abcd",
        struct.pack("<IB", 1, 1),
        b"abc" + struct.pack("<IB", 4, 1),
        b"abc" + struct.pack("<IB", 2, 2),
        b"abc" + struct.pack("<IB", 3, 0),
        b"abc" + struct.pack("<IB", 0, 0),
        b"abc" + struct.pack("<IB", 3, 3),
        b"abc" + struct.pack("<IB", (1 << 32) - 1, 1),
        b"x" * LIMIT_BYTES + struct.pack("<IB", 0, 1),
        b"x" * (2 * LIMIT_BYTES),
    ],
)
def test_what_is_no_message_is_refused(pair: Pair, message: bytes) -> None:
    line, theirs = pair
    theirs.send(message)
    with pytest.raises(MessageError):
        line.receive(_never)


def test_random_bytes_are_refused_or_within_what_came(pair: Pair) -> None:
    line, theirs = pair
    chance = random.Random(11)
    taken = 0
    for _ in range(3000):
        body = chance.randbytes(chance.choice((0, 1, 4, 5, 6, 30, 1000)))
        if chance.random() < 0.8:
            body += struct.pack("<IB", chance.choice((0, 1, len(body), len(body) + 1, 1 << 31)), chance.randrange(4))
        if not body:
            continue
        theirs.send(body)
        try:
            found = line.receive(_never)
        except MessageError:
            continue
        assert found is not None
        assert bytes(found[0] or b"") + found[1] == body[:-5]
        taken += 1
    assert 100 < taken < 2900, taken


def test_nobody_waits_when_it_is_over(pair: Pair) -> None:
    line, _ = pair
    assert line.receive(_always) is None
    sent = 0
    while line.send([memoryview(bytes(LIMIT_BYTES // 2))], b"", _always):
        sent += 1
    assert sent
    shut = threading.Timer(0.05, line.shut)
    shut.start()
    began = time.monotonic()
    assert line.receive(_never) is None
    assert time.monotonic() - began < 5.0
    shut.join()


def test_the_kernel_takes_what_a_client_has_under_way_while_nobody_reads() -> None:
    for size in (0, 100, 1000, 5000, LIMIT_BYTES - 2000):
        here, there = _both()
        left = AHEAD_BYTES
        while left >= size + 1024:
            assert here.send([memoryview(bytes(size))], b"", _always), (size, left)
            left -= size + 1024
        here.close()
        there.close()


class Echo:
    """A server whose handler answers as it is told to."""

    def __init__(self) -> None:
        self.error: FlightedlError | None = None
        #: Answers after which the error comes.
        self.after = 0
        self.is_silent = threading.Event()
        self.ended = threading.Event()
        self.cancelled = False

    def routes(self) -> Routes:
        return Routes(exchanges={"step": ExchangeRoute(SCHEMA, self._step)})

    def _step(self, _: bytes, exchange: Exchange, call: Call) -> None:
        exchange.begin(SCHEMA)
        asked = exchange.read_at_rest()
        assert asked is not None
        assert asked[1] is not None
        line = share(exchange, asked[1], CLOCK).line
        try:
            while (message := exchange.read_at_rest(line)) is not None:
                if self.error is not None and not self.after:
                    raise self.error
                self.after -= 1
                if self.is_silent.is_set():
                    continue
                values, header = message
                if isinstance(values, pa.RecordBatch):
                    assert header is not None
                    data = values.column(0)[0].as_buffer()
                    assert not exchange.write_by(line, [memoryview(data)], header, data.size)
                    exchange.write(values, header)
                else:
                    assert header is not None
                    assert exchange.write_by(line, None if values is None else [values], header, len(values or b""))
        finally:
            self.ended.set()


@pytest.fixture
def echo() -> Echo:
    return Echo()


@pytest.fixture
def server(serve: Callable[..., FlightServer], echo: Echo) -> FlightServer:
    return serve(echo.routes())


@pytest.fixture
def connection(server: FlightServer) -> Iterator[Connection]:
    with Connection(server.address) as connection:
        yield connection


def _as_batch(values: Sequence[memoryview]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"values": [b"".join(values)]}, SCHEMA)


def _messages(sizes: Sequence[int]) -> Iterator[tuple[list[memoryview] | None, bytes, int]]:
    for number, size in enumerate(sizes):
        header = b"%d" % number
        yield (None if size < 0 else [memoryview(bytes([number % 256]) * size)]), header, max(0, size)


def _ask(
    connection: Connection, sizes: Sequence[int], timeout_s: float = 10.0, ahead: int = 100
) -> Iterator[tuple[int | None, bytes]]:
    with connection.exchange(b'{"verb": "step"}', SCHEMA, timeout_s=timeout_s) as exchange:
        carrier = LineCarrier(ask_to_share(exchange).line, exchange, CLOCK, _as_batch)
        answers = lock_step(carrier, _messages(sizes), ahead=ahead)
        for number in range(len(sizes)):
            values, header = next(answers)
            assert header is not None
            if isinstance(values, pa.RecordBatch):
                values = memoryview(values.column(0)[0].as_py())
            assert values is None or set(values) <= {number % 256}
            yield None if values is None else len(values), header


def test_big_messages_among_small_ones_keep_their_order(connection: Connection, echo: Echo) -> None:
    sizes = [0, 5, -1, LIMIT_BYTES - 7, LIMIT_BYTES, 1 << 20, 3, 1 << 20, -1, *[60_000] * 5, *[10] * 200, 2 << 20, 4]
    found = list(_ask(connection, sizes))
    assert found == [(None if size < 0 else size, b"%d" % number) for number, size in enumerate(sizes)]
    assert echo.ended.wait(5.0), "the line ends with the stream"


@pytest.mark.parametrize("after", [0, 1, 3])
def test_the_servers_error_is_heard_on_the_stream(connection: Connection, echo: Echo, after: int) -> None:
    echo.error, echo.after = FencedError("the lease is over"), after
    found = []
    with pytest.raises(FencedError, match="the lease is over"):
        found.extend(_ask(connection, [5] * 9, ahead=2))
    assert echo.ended.wait(5.0)


def test_the_streams_time_is_the_lines(connection: Connection, echo: Echo) -> None:
    echo.is_silent.set()
    began = time.monotonic()
    with pytest.raises(DeadlineError):
        list(_ask(connection, [5], timeout_s=0.5))
    assert time.monotonic() - began < 3.0
    assert echo.ended.wait(5.0)


def test_a_connection_whose_calls_end_ends_its_lines(connection: Connection, echo: Echo) -> None:
    echo.is_silent.set()
    strike = threading.Timer(0.2, connection.abort_calls)
    strike.start()
    began = time.monotonic()
    with pytest.raises(FlightedlError):
        list(_ask(connection, [5]))
    assert time.monotonic() - began < 3.0
    strike.join()
    assert echo.ended.wait(5.0)


def test_a_server_that_stops_does_not_wait_for_who_rests_at_a_line(
    connection: Connection, server: FlightServer, echo: Echo
) -> None:
    answers = _ask(connection, [5, 5], ahead=1)
    next(answers)
    began = time.monotonic()
    assert server.stop(grace_s=5.0)
    assert time.monotonic() - began < 2.0
    assert echo.ended.is_set()
    with pytest.raises(FlightedlError):
        list(answers)
