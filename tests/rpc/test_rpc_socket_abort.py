"""A client abandons a server that was replaced: the server's open calls end at once, regardless of their timeouts."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from flightedl.errors import FlightedlError, OutcomeUnknownError, UnavailableError
from flightedl.process.socket_abort import abort_calls_to
from flightedl.rpc import Call, Connection, Exchange, ExchangeRoute, FlightServer, Outgoing, Routes

from .rpc_support import BATCH, SCHEMA, Handlers, eventually

LONG_S = 60.0


def act(connection: Connection) -> object:
    return connection.action("wait", b"", timeout_s=LONG_S)


def get(connection: Connection) -> object:
    with connection.get(b'{"verb": "wait"}', timeout_s=LONG_S) as download:
        return list(download)


def exchange_reading(connection: Connection) -> object:
    with connection.exchange(b'{"verb": "wait"}', SCHEMA, timeout_s=LONG_S) as exchange:
        exchange.write(BATCH)
        return exchange.read()


def exchange_writing(connection: Connection) -> object:
    with connection.exchange(b'{"verb": "wait"}', SCHEMA, timeout_s=LONG_S) as exchange:
        while True:
            exchange.write(BATCH)


@pytest.fixture
def deaf(serve: Callable[..., FlightServer], handlers: Handlers) -> FlightServer:
    """A server that holds every call, like a frozen one."""

    def wait_to_send(ticket: bytes, call: Call) -> Outgoing:
        handlers.wait(ticket, call)
        return Outgoing(SCHEMA, iter(()))

    def wait_to_read(descriptor: bytes, exchange: Exchange, call: Call) -> None:
        handlers.wait(descriptor, call)

    return serve(
        Routes(
            actions={"wait": handlers.wait, "echo": handlers.echo},
            gets={"wait": wait_to_send},
            exchanges={"wait": ExchangeRoute(SCHEMA, wait_to_read)},
        )
    )


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
@pytest.mark.parametrize("call", [act, get, exchange_reading, exchange_writing])
def test_an_aborted_call_ends_like_a_broken_one(
    deaf: FlightServer, handlers: Handlers, call: Callable[[Connection], object], host: str
) -> None:
    with Connection(deaf.address.replace("127.0.0.1", host)) as connection, ThreadPoolExecutor(1) as pool:
        held = pool.submit(call, connection)
        assert handlers.entered.wait(LONG_S)
        start = time.monotonic()
        connection.abort_calls()
        with pytest.raises((OutcomeUnknownError, UnavailableError)):
            held.result(LONG_S)
        assert time.monotonic() - start < LONG_S / 6
        with pytest.raises(UnavailableError, match="was replaced"):
            connection.action("echo", b"", timeout_s=LONG_S)
    handlers.release.set()
    eventually(lambda: deaf.running_calls == 0, "the handler ends")


def test_only_connections_to_the_replaced_server_end(
    deaf: FlightServer, handlers: Handlers, connection: Connection
) -> None:
    handlers.release.set()
    with Connection(deaf.address) as other:
        assert connection.action("echo", b"a", timeout_s=LONG_S) == b"a"
        assert other.action("echo", b"b", timeout_s=LONG_S) == b"b"
        assert abort_calls_to(deaf.address) == 1
        assert abort_calls_to("no port") == 0
        assert abort_calls_to("nowhere.invalid:1") == 0
        # A connection severed only by its address connects again.
        eventually(lambda: _echoes(other), "a new connection")
        eventually(lambda: _echoes(connection), "calls of the other one, too")


def _echoes(connection: Connection) -> bool:
    try:
        return connection.action("echo", b"d", timeout_s=LONG_S) == b"d"
    except FlightedlError:
        return False
