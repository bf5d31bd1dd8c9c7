"""Request streams: many requests over one stream, each checked like a call."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest
from pyarrow import flight

from flightedl.errors import (
    BusyError,
    DamagedError,
    FencedError,
    FlightedlError,
    MessageError,
    NotReadyError,
    OutcomeUnknownError,
    UnavailableError,
)
from flightedl.rpc import Call, Connection, Exchange, ExchangeRoute, FlightServer, Limits, Routes, ServerIdentity
from flightedl.rpc.identity import sealed, unsealed
from flightedl.rpc.request_stream import RequestStream
from flightedl.rpc.reuse import HeldStream, ReusableExchange
from flightedl.rpc.routes import NO_COLUMNS
from tests.support.clock import FakeClock

from .rpc_support import BATCH, CALLER, IDENTITY, SCHEMA, TIMEOUT_S, Handlers, command, eventually, options

ROOT = Path(__file__).parents[2]

FIRST, SECOND = b"first", b"second"


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def requests(clock: FakeClock) -> Iterator[RequestStream]:
    made = RequestStream("answer", clock)
    yield made
    made.close_idle()


def test_one_stream_carries_many_requests(
    requests: RequestStream, connection: Connection, server: FlightServer, handlers: Handlers
) -> None:
    for _ in range(3):
        assert requests.ask(connection, FIRST, timeout_s=TIMEOUT_S) == b"answer to first"
        assert requests.ask(connection, SECOND, timeout_s=TIMEOUT_S) == b"answer to second"
    assert handlers.requests == [FIRST, SECOND] * 3
    assert server.running_calls == 1
    requests.close_idle()
    eventually(lambda: server.running_calls == 0, "the stream ends when it is let go of")
    assert server.refusals == {}
    assert requests.ask(connection, FIRST, timeout_s=TIMEOUT_S) == b"answer to first"
    assert requests.is_open


def test_an_error_of_a_handler_reaches_the_client_and_ends_the_stream(
    requests: RequestStream, connection: Connection, server: FlightServer, handlers: Handlers
) -> None:
    requests.ask(connection, FIRST, timeout_s=TIMEOUT_S)
    handlers.failures = [BusyError("come back later")]
    with pytest.raises(BusyError, match="come back later"):
        requests.ask(connection, FIRST, timeout_s=TIMEOUT_S)
    assert not requests.is_open
    eventually(lambda: server.running_calls == 0, "the stream ends with the error")
    handlers.failures = []
    assert requests.ask(connection, FIRST, timeout_s=TIMEOUT_S) == b"answer to first"


def test_a_server_that_no_longer_serves_rejects_each_request(
    requests: RequestStream, connection: Connection, server: FlightServer, handlers: Handlers
) -> None:
    requests.ask(connection, FIRST, timeout_s=TIMEOUT_S)
    server._admission.is_ready = False
    with pytest.raises(NotReadyError):
        requests.ask(connection, FIRST, timeout_s=TIMEOUT_S)
    assert len(handlers.requests) == 1


def test_a_stop_ends_the_stream_at_its_next_request(
    requests: RequestStream, connection: Connection, server: FlightServer, handlers: Handlers
) -> None:
    requests.ask(connection, FIRST, timeout_s=TIMEOUT_S)
    server.closing.set()
    with pytest.raises(NotReadyError, match="stopping"):
        requests.ask(connection, FIRST, timeout_s=TIMEOUT_S)
    assert len(handlers.requests) == 1


def test_a_request_stream_is_bound_to_one_generation(
    requests: RequestStream, server: FlightServer, handlers: Handlers
) -> None:
    other = ServerIdentity(IDENTITY.job, IDENTITY.role, IDENTITY.index, IDENTITY.generation + 1)
    with (
        Connection(server.address, expected=other, caller=CALLER) as connection,
        pytest.raises(FencedError),
    ):
        requests.ask(connection, FIRST, timeout_s=TIMEOUT_S)
    assert handlers.requests == []


def test_a_new_connection_and_old_age_open_a_new_stream(
    requests: RequestStream, clock: FakeClock, connection: Connection, server: FlightServer, handlers: Handlers
) -> None:
    def streams() -> int:
        return len({id(call) for call in handlers.calls})

    requests.ask(connection, FIRST, timeout_s=TIMEOUT_S)
    clock.advance(4.9)
    requests.ask(connection, FIRST, timeout_s=TIMEOUT_S)
    assert streams() == 1
    clock.advance(0.2)
    requests.ask(connection, FIRST, timeout_s=TIMEOUT_S)
    assert streams() == 2
    requests.ask(connection, FIRST, timeout_s=2 * TIMEOUT_S + 0.1)
    assert streams() == 3
    with Connection(server.address, expected=IDENTITY, caller=CALLER) as other:
        requests.ask(other, FIRST, timeout_s=TIMEOUT_S)
        assert streams() == 4
        eventually(lambda: server.running_calls == 1, "those before have ended")
        requests.close_idle()


def test_a_dead_server_leaves_the_outcome_unknown_and_the_next_request_uses_its_successor(
    requests: RequestStream, connection: Connection
) -> None:
    program = """
import sys
from tests.rpc.rpc_support import Handlers, IDENTITY
from flightedl.adapters.clock import SystemClock
from flightedl.rpc import FlightServer
server = FlightServer(Handlers().routes(), IDENTITY, clock=SystemClock())
server.start_serving(IDENTITY)
print(server.address, flush=True)
sys.stdin.read()
"""
    environment = {"PYTHONPATH": ":".join([*sys.path, str(ROOT)])}
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as child:
        assert child.stdout is not None
        with Connection(child.stdout.readline().strip(), expected=IDENTITY) as to_child:
            requests.ask(to_child, FIRST, timeout_s=TIMEOUT_S)
            child.kill()
            child.wait()
            with pytest.raises(OutcomeUnknownError):
                requests.ask(to_child, FIRST, timeout_s=TIMEOUT_S)
            with pytest.raises((UnavailableError, OutcomeUnknownError)):
                requests.ask(to_child, FIRST, timeout_s=TIMEOUT_S)
    assert requests.ask(connection, SECOND, timeout_s=TIMEOUT_S) == b"answer to second"


def test_a_request_timeout_ends_the_stream(
    serve: Callable[..., FlightServer], handlers: Handlers, requests: RequestStream
) -> None:
    server = serve(handlers.routes(), limits=Limits(stream_s=0.3, sever_after_s=0.1))
    with Connection(server.address, expected=IDENTITY, caller=CALLER) as connection:
        requests.ask(connection, FIRST, timeout_s=TIMEOUT_S)
        eventually(lambda: server.running_calls == 0, "the server ends what outlives its limit", 10.0)
        with pytest.raises((OutcomeUnknownError, UnavailableError)):
            requests.ask(connection, FIRST, timeout_s=TIMEOUT_S)
        assert requests.ask(connection, SECOND, timeout_s=TIMEOUT_S) == b"answer to second"


@pytest.mark.parametrize(
    ("verb", "message", "error"),
    [
        ("answer", b"0" * 16 + FIRST, "damaged"),
        ("answer", b"short", "damaged"),
        ("answer", b"\xff" * 40, "damaged"),
        ("answer", BATCH, "schema is"),
        ("numbers", sealed(FIRST), "unknown verb"),
        ("unknown", sealed(FIRST), "unknown verb"),
    ],
)
def test_malformed_requests_on_a_stream_are_rejected(
    verb: str, message: object, error: str, bare: flight.FlightClient, server: FlightServer, handlers: Handlers
) -> None:
    writer, reader = bare.do_exchange(command(f'{{"verb": "{verb}"}}'.encode()), options())
    with pytest.raises(flight.FlightError, match=error):
        _say(writer, reader, message)
    with pytest.raises(flight.FlightError):
        writer.close()
    assert handlers.requests == []
    eventually(lambda: server.running_calls == 0, "the stream ended")


def _say(writer: flight.FlightStreamWriter, reader: flight.FlightStreamReader, message: object) -> None:
    """Send messages until the server rejects one: it does not wait for the others."""
    writer.begin(NO_COLUMNS if isinstance(message, bytes) else SCHEMA)
    if isinstance(message, bytes):
        writer.write_metadata(message)
    else:
        writer.write_batch(message)
    reader.read_chunk()


def test_a_seal_detects_every_flipped_bit() -> None:
    message = sealed(FIRST)
    assert unsealed(message) == FIRST
    for number in range(8 * len(message)):
        damaged = bytearray(message)
        damaged[number // 8] ^= 1 << number % 8
        with pytest.raises(DamagedError):
            unsealed(bytes(damaged))


def test_a_server_without_request_streams_is_rejected(clock: FakeClock, connection: Connection) -> None:
    numbers = RequestStream("numbers", clock)
    with pytest.raises(MessageError, match="unknown verb"):
        numbers.ask(connection, FIRST, timeout_s=TIMEOUT_S)
    assert not numbers.is_open


@pytest.mark.parametrize("message", [b"0" * 16 + b"answer", b"short", None])
def test_a_damaged_answer_is_requested_again(
    message: bytes | None, serve: Callable[..., FlightServer], clock: FakeClock
) -> None:
    def damage(_: bytes, exchange: Exchange, __: Call) -> None:
        exchange.begin(SCHEMA)
        exchange.read()
        if message is None:
            exchange.write(BATCH)
        else:
            exchange.write_metadata(message)

    server = serve(Routes(exchanges={"answer": ExchangeRoute(NO_COLUMNS, damage)}))
    with Connection(server.address, expected=IDENTITY, caller=CALLER) as connection:
        requests = RequestStream("answer", clock)
        with pytest.raises(MessageError if message is None else DamagedError):
            requests.ask(connection, FIRST, timeout_s=TIMEOUT_S)
        assert not requests.is_open


def test_an_old_stream_is_not_used_for_a_short_request_either() -> None:
    """The server authorizes the caller only when a stream is opened."""
    clock, opened = FakeClock(), []

    class Opened:
        def __enter__(self) -> Self:
            opened.append(self)
            return self

        def __exit__(self, *_: object) -> None:
            pass

    connection: Any = SimpleNamespace(exchange=lambda *_, **__: Opened())
    kept = ReusableExchange("v", NO_COLUMNS, clock, HeldStream)
    for timeout_s, count in ((60.0, 1), (1.0, 1), (1.0, 2)):
        kept.end(kept.begin(connection, timeout_s=timeout_s))
        assert len(opened) == count
        clock.advance(4.0)
    kept.close_idle()


def test_a_handler_learns_that_its_stream_has_ended(
    requests: RequestStream, connection: Connection, handlers: Handlers
) -> None:
    requests.ask(connection, FIRST, timeout_s=TIMEOUT_S)
    assert not handlers.ended.is_set()
    requests.close_idle()
    assert handlers.ended.wait(TIMEOUT_S)


def test_another_thread_can_cancel_a_stream_that_waits_for_an_answer(
    connection: Connection, server: FlightServer, handlers: Handlers
) -> None:
    with connection.exchange(b'{"verb": "answer"}', NO_COLUMNS, timeout_s=TIMEOUT_S) as stream:
        stream.write_metadata(sealed(FIRST))
        assert stream.answer()[1] is not None
        threading.Timer(0.1, stream.cancel).start()
        with pytest.raises(FlightedlError):
            stream.answer()
    assert handlers.ended.wait(TIMEOUT_S)
