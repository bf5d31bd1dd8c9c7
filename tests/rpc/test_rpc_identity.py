"""The fence: both sides ensure that a request reaches the intended process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from pyarrow import flight

from flightedl.adapters.clock import SystemClock
from flightedl.errors import FencedError, MessageError
from flightedl.rpc import Caller, Connection, FlightServer, ServerIdentity
from flightedl.rpc.admission import Admission
from flightedl.rpc.call import Limits

from .rpc_support import BATCH, IDENTITY, SCHEMA, TIMEOUT_S, Handlers, command, options

OTHERS = [
    ServerIdentity("flights", "pserver", 1, 7),
    ServerIdentity("digits", "master", 1, 7),
    ServerIdentity("digits", "pserver", 0, 7),
    ServerIdentity("digits", "pserver", 1, 6),
    ServerIdentity("digits", "pserver", 1, 8),
    ServerIdentity("digits", "pserver", 0, 0),
]


@pytest.mark.parametrize("expected", OTHERS, ids=str)
def test_the_server_rejects_a_misdirected_request_before_acting(
    server: FlightServer, handlers: Handlers, expected: ServerIdentity
) -> None:
    with Connection(server.address, expected=expected) as connection:
        with pytest.raises(FencedError, match="look the address up again"):
            connection.action("echo", b"", timeout_s=TIMEOUT_S)
        with pytest.raises(FencedError):
            connection.put(b'{"verb": "upload"}', SCHEMA, [(BATCH, None)], timeout_s=TIMEOUT_S)
        with pytest.raises(FencedError), connection.get(b'{"verb": "numbers"}', timeout_s=TIMEOUT_S) as download:
            list(download)
        with (
            pytest.raises(FencedError),
            connection.exchange(b'{"verb": "mirror"}', SCHEMA, timeout_s=TIMEOUT_S) as exchange,
        ):
            exchange.done_writing()
        with pytest.raises(FencedError):
            connection.info(b"{}", timeout_s=TIMEOUT_S)
    assert not handlers.calls
    assert not handlers.uploads


@pytest.mark.parametrize("expected", [IDENTITY, ServerIdentity("digits", "pserver", 1), None], ids=str)
def test_requests_to_the_right_server_or_unknown_generations_are_admitted(
    server: FlightServer, expected: ServerIdentity | None
) -> None:
    with Connection(server.address, expected=expected) as connection:
        assert connection.action("echo", b"x", timeout_s=TIMEOUT_S) == b"x"


class Impostor(flight.FlightServerBase):
    """A Flight server that serves every request without reading headers, under a given name."""

    def __init__(self, header: str | None) -> None:
        middleware = {"name": _Naming(header)} if header is not None else {}
        super().__init__(("127.0.0.1", 0), middleware=middleware)

    def do_action(self, context: object, action: object) -> list[bytes]:
        return [b"done"]

    def do_get(self, context: object, ticket: object) -> object:
        return flight.GeneratorStream(SCHEMA, iter([BATCH]))

    def do_put(self, context: object, descriptor: object, reader: object, writer: flight.FlightMetadataWriter) -> None:
        for _ in reader:
            pass
        writer.write(b"done")

    def do_exchange(self, context: object, descriptor: object, reader: object, writer: object) -> None:
        writer.begin(SCHEMA)
        for chunk in reader:
            if chunk.data is not None:
                writer.write_batch(chunk.data)


class _Naming(flight.ServerMiddlewareFactory):
    def __init__(self, header: str) -> None:
        self.header = header

    def start_call(self, info: object, headers: object) -> flight.ServerMiddleware:
        header = self.header

        class Naming(flight.ServerMiddleware):
            def sending_headers(self) -> dict[str, str]:
                return {"flightedl-server": header}

        return Naming()


@pytest.mark.parametrize("header", [None, *(other.to_header() for other in OTHERS[:5])])
def test_the_client_rejects_answers_of_another_server(header: str | None) -> None:
    with Impostor(header) as server, Connection(f"127.0.0.1:{server.port}", expected=IDENTITY) as connection:
        with pytest.raises(FencedError):
            connection.action("echo", b"", timeout_s=TIMEOUT_S)
        with pytest.raises(FencedError):
            connection.put(b"{}", SCHEMA, [(BATCH, None)], timeout_s=TIMEOUT_S)
        with pytest.raises(FencedError), connection.get(b"{}", timeout_s=TIMEOUT_S) as download:
            list(download)
        with pytest.raises(FencedError), connection.exchange(b"{}", SCHEMA, timeout_s=TIMEOUT_S) as exchange:  # noqa: PT012
            exchange.write(BATCH)
            exchange.read()


@pytest.mark.parametrize("header", ["", "a/b/c/d", "a/b/1", "a/b/1/2/3", "a/b/-1/2", "x" * 2000 + "/b/1/2"])
def test_malformed_names_of_servers_are_rejected(server: FlightServer, header: str) -> None:
    with pytest.raises(MessageError, match="job/role/index/generation"):
        ServerIdentity.from_header(header)
    with (
        Impostor(header) as other,
        Connection(f"127.0.0.1:{other.port}", expected=IDENTITY) as connection,
        pytest.raises((MessageError, FencedError)),
    ):
        connection.action("echo", b"", timeout_s=TIMEOUT_S)
    with flight.FlightClient(f"grpc://{server.address}") as client, pytest.raises(flight.FlightError, match="message:"):
        list(client.do_action(flight.Action("echo", b""), options(flightedl_expect=header)))


@pytest.mark.parametrize(
    "headers",
    [
        {"flightedl_timeout": "soon"},
        {"flightedl_timeout": "-1"},
        {"flightedl_timeout": "nan"},
        {"flightedl_caller": "x"},
    ],
)
def test_malformed_headers_are_rejected(bare: flight.FlightClient, headers: dict[str, str]) -> None:
    with pytest.raises(flight.FlightServerError, match="message:"):
        list(bare.do_action(flight.Action("echo", b""), options(**headers)))


@pytest.mark.parametrize("name", ["plain", "ä/ö ü\n", "a" * 256])
def test_names_survive_encoding_in_headers(server: FlightServer, handlers: Handlers, name: str) -> None:
    caller = Caller("trainer", name)
    assert Caller.from_header(caller.to_header()) == caller
    identity = ServerIdentity("job/with slash", "pserver", 12, 1 << 60)
    assert ServerIdentity.from_header(identity.to_header()) == identity
    with Connection(server.address, caller=caller) as connection:
        connection.action("echo", b"", timeout_s=TIMEOUT_S)
    assert handlers.calls[0].caller == caller


def test_every_reply_names_its_server(serve: Callable[..., FlightServer], handlers: Handlers) -> None:
    seen: list[str] = []

    class Watching(flight.ClientMiddleware):
        def received_headers(self, headers: dict[str, list[str]]) -> None:
            seen.extend(headers.get("flightedl-server", []))

    class Factory(flight.ClientMiddlewareFactory):
        def start_call(self, info: object) -> Watching:
            return Watching()

    server = serve(handlers.routes())
    with flight.FlightClient(f"grpc://{server.address}", middleware=[Factory()]) as client:
        list(client.do_action(flight.Action("echo", b""), options()))
        client.do_get(flight.Ticket(b'{"verb": "numbers"}'), options()).read_all()
        client.get_flight_info(command(b"{}"), options())
        with pytest.raises(flight.FlightError):
            list(client.list_flights(b"", options()))
    assert set(seen) == {"digits/pserver/1/7"}
    assert len(seen) >= 4


def test_a_server_knows_its_generation_before_it_answers() -> None:
    """Otherwise, it could carry out a request that was meant for its predecessor."""

    class Watched(Admission):
        def __setattr__(self, name: str, value: object) -> None:
            if name == "is_ready" and value:
                assert (self.identity, self.header) == (IDENTITY, IDENTITY.to_header())
            super().__setattr__(name, value)

    admission = Watched(ServerIdentity("digits", "pserver", 1), SystemClock(), Limits(), is_secured=False)
    admission.serve_as(IDENTITY)
    assert admission.is_ready
