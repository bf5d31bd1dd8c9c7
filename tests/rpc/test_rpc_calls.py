"""Results of successful calls, and required arguments."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pytest

from flightedl.errors import MessageError, UsageError
from flightedl.rpc import Call, Connection, Exchange, ExchangeRoute, FlightServer, Incoming, PutRoute, Routes

from .rpc_support import (
    BATCH,
    CALLER,
    IDENTITY,
    SCHEMA,
    TIMEOUT_S,
    Handlers,
    command,
    eventually,
    make_batch,
    options,
)


def test_an_action_carries_bytes_both_ways(connection: Connection) -> None:
    body = bytes(range(256)) * 4096
    assert connection.action("echo", body, timeout_s=TIMEOUT_S) == body


def test_a_call_knows_its_caller_and_deadline(connection: Connection, handlers: Handlers) -> None:
    connection.action("echo", b"", timeout_s=9.0)
    call = handlers.calls[0]
    assert call.caller == CALLER
    assert call.verb == "echo"
    assert call.peer.startswith("ipv4:127.0.0.1:")
    assert 0 < call.remaining_s() <= 9.0
    assert call.headers["flightedl-expect"] == IDENTITY.to_header()


def test_a_get_returns_batches_and_metadata(connection: Connection) -> None:
    with connection.get(b'{"verb": "numbers"}', timeout_s=TIMEOUT_S, schema=SCHEMA) as download:
        assert download.schema == SCHEMA
        received = list(download)
    assert [(batch, metadata) for batch, metadata in received] == [
        (BATCH, None),
        (BATCH, b"metadata"),
        (None, b"alone"),
    ]


def test_a_put_returns_one_acknowledgement(connection: Connection, handlers: Handlers) -> None:
    acknowledgement = connection.put(
        b'{"verb": "upload"}', SCHEMA, ((make_batch(n), b"m") for n in (1, 0, 5)), timeout_s=TIMEOUT_S
    )
    assert acknowledgement == b"6"
    assert handlers.uploads == [(6, True)]


def test_an_empty_upload_is_complete(connection: Connection, handlers: Handlers) -> None:
    assert connection.put(b'{"verb": "upload"}', SCHEMA, [], timeout_s=TIMEOUT_S) == b"0"
    assert handlers.uploads == [(0, True)]


def test_both_sides_count_sliced_batches_equally(connection: Connection) -> None:
    big = make_batch(100, 7)
    parts = [(big.slice(start, 13), None) for start in range(0, 100, 13)]
    assert connection.put(b'{"verb": "upload"}', SCHEMA, parts, timeout_s=TIMEOUT_S) == b"100"


def test_an_exchange_answers_each_message(connection: Connection) -> None:
    with connection.exchange(b'{"verb": "mirror"}', SCHEMA, timeout_s=TIMEOUT_S) as exchange:
        exchange.write(BATCH, b"first")
        exchange.write_metadata(b"alone")
        exchange.write(BATCH)
        assert exchange.read() == (BATCH, b"first")
        assert exchange.read() == (None, b"alone")
        exchange.done_writing()
        assert exchange.read() == (BATCH, None)
        assert exchange.read() is None
        assert exchange.read() is None


def test_flight_info_names_endpoints(connection: Connection) -> None:
    found = connection.info(b'{"verb": "info"}', timeout_s=TIMEOUT_S)
    assert found.schema == SCHEMA
    assert found.endpoints[0].ticket == b'{"verb": "numbers"}'
    assert found.endpoints[0].addresses == ("127.0.0.1:1", "[::1]:2")
    assert (found.record_count, found.size_bytes) == (9, 108)


def test_actions_are_listed_for_other_clients(bare: object) -> None:
    assert [action.type for action in bare.list_actions(options())] == ["echo", "wait", "fail"]


@pytest.mark.parametrize("method", ["action", "get", "put", "exchange", "info"])
def test_every_call_requires_a_timeout(connection: Connection, method: str) -> None:
    arguments = {"action": ("echo", b""), "put": (b"", SCHEMA, []), "exchange": (b"", SCHEMA)}.get(method, (b"",))
    with pytest.raises(TypeError, match="timeout_s"):
        getattr(connection, method)(*arguments)


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, math.nan, math.inf])
def test_timeouts_are_positive_and_finite(connection: Connection, timeout_s: float) -> None:
    with pytest.raises(UsageError, match="timeout_s"):
        connection.action("echo", b"", timeout_s=timeout_s)


def test_one_connection_serves_many_threads(connection: Connection) -> None:
    def ask(number: int) -> bool:
        body = str(number).encode()
        with connection.get(b'{"verb": "numbers"}', timeout_s=TIMEOUT_S) as download:
            received = len(list(download))
        return connection.action("echo", body, timeout_s=TIMEOUT_S) == body and received == 3

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(ask, range(160)))


def test_one_thread_may_read_while_another_writes(connection: Connection) -> None:
    received: list[object] = []
    with connection.exchange(b'{"verb": "mirror"}', SCHEMA, timeout_s=TIMEOUT_S) as exchange:

        def read() -> None:
            while (message := exchange.read()) is not None:
                received.append(message)

        reader = threading.Thread(target=read)
        reader.start()
        for _ in range(300):
            exchange.write(BATCH)
        exchange.done_writing()
        reader.join()
    assert len(received) == 300


def test_a_handler_cannot_use_its_stream_after_it_has_returned(connection: Connection, handlers: Handlers) -> None:
    connection.put(b'{"verb": "upload"}', SCHEMA, [(BATCH, None)], timeout_s=TIMEOUT_S)
    with connection.exchange(b'{"verb": "mirror"}', SCHEMA, timeout_s=TIMEOUT_S) as exchange:
        exchange.done_writing()
    incoming, mirrored = handlers.streams
    assert incoming.read() is None
    with pytest.raises(UsageError, match="after its handler returned"):
        mirrored.write(BATCH)
    with pytest.raises(UsageError, match="after its handler returned"):
        mirrored.begin(SCHEMA)


def _use(connection: Connection, kind: str) -> None:
    if kind == "upload":
        connection.put(b'{"verb": "fail"}', SCHEMA, [(BATCH, None)], timeout_s=TIMEOUT_S)
    else:
        with connection.exchange(b'{"verb": "fail"}', SCHEMA, timeout_s=TIMEOUT_S) as exchange:
            exchange.answer()


@pytest.mark.parametrize("kind", ["upload", "exchange"])
def test_a_stream_that_has_failed_cannot_be_used_afterwards(
    serve: Callable[..., FlightServer], handlers: Handlers, kind: str
) -> None:
    def fail(_: bytes, stream: Incoming | Exchange, __: Call) -> bytes:
        handlers.streams.append(stream)
        raise MessageError("no")

    routes = Routes(
        puts={"fail": PutRoute(SCHEMA, fail)},
        exchanges={"fail": ExchangeRoute(SCHEMA, fail)},  # type: ignore[arg-type]
    )
    with Connection(serve(routes).address) as connection:
        with pytest.raises(MessageError, match="no"):
            _use(connection, kind)
        eventually(lambda: handlers.streams, "the handler is called")
    (stream,) = handlers.streams
    eventually(lambda: stream._reader is None, "the stream is released")
    with pytest.raises(UsageError, match="after its handler returned"):
        stream.read()
    if isinstance(stream, Exchange):
        for write in (lambda: stream.write(BATCH), lambda: stream.write_metadata(b"x")):
            with pytest.raises(UsageError, match="after its handler returned"):
                write()


def test_a_call_ends_when_its_handler_returns(connection: Connection, server: FlightServer, handlers: Handlers) -> None:
    connection.action("echo", b"", timeout_s=TIMEOUT_S)
    eventually(lambda: server.running_calls == 0, "the call is released")
    assert handlers.calls[0].is_cancelled()


def test_messages_that_a_handler_does_not_read_are_still_checked(serve: object) -> None:
    def lazy(descriptor: bytes, incoming: object, call: object) -> bytes:
        return b"not read"

    server = serve(Routes(puts={"upload": PutRoute(SCHEMA, lazy)}))
    with Connection(server.address) as connection:
        batches = [(make_batch(1, 1 << 20), None)] * 20
        assert connection.put(b'{"verb": "upload"}', SCHEMA, batches, timeout_s=TIMEOUT_S) == b"not read"


@pytest.mark.parametrize("kind", [pa.list_(pa.int8()), pa.dictionary(pa.int8(), pa.string()), pa.null()])
def test_uploads_must_have_flat_columns(kind: pa.DataType) -> None:
    with pytest.raises(UsageError, match="flat columns"):
        Routes(puts={"upload": PutRoute(pa.schema([pa.field("c", kind)]), Handlers().upload)})


def test_several_results_of_an_action_are_joined(serve: object) -> None:
    from pyarrow import flight

    class Chatty(flight.FlightServerBase):
        def do_action(self, context: object, action: object) -> list[bytes]:
            return [b"one ", b"two"]

    with Chatty(("127.0.0.1", 0)) as server, Connection(f"127.0.0.1:{server.port}") as connection:
        assert connection.action("any", b"", timeout_s=TIMEOUT_S) == b"one two"


def test_calls_on_a_closed_connection_raise(server: FlightServer) -> None:
    connection = Connection(server.address)
    connection.close()
    connection.close()
    with pytest.raises(UsageError, match="closed"):
        connection.action("echo", b"", timeout_s=TIMEOUT_S)


def test_batches_of_another_schema_are_rejected_before_sending(connection: Connection, handlers: Handlers) -> None:
    other = pa.record_batch([pa.array([1])], names=["other"])
    with pytest.raises(UsageError, match="does not fit"):
        connection.put(b'{"verb": "upload"}', SCHEMA, [(BATCH, None), (other, None)], timeout_s=TIMEOUT_S)
    eventually(handlers.ended.is_set, "the upload ends")
    assert handlers.uploads == [(3, False)]


def test_received_values_are_read_only(connection: Connection) -> None:
    with connection.get(b'{"verb": "numbers"}', timeout_s=TIMEOUT_S) as download:
        for batch, _ in download:
            if batch is not None:
                assert not batch.column(0).to_numpy().flags.writeable
    assert command(b"").command == b""
