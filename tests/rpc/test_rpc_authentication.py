"""Who may ask: every method refuses every caller that is not proven."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import flight
from rpc_support import BATCH, CALLER, IDENTITY, SCHEMA, TIMEOUT_S, Handlers, command, options

from flightedl.errors import AuthenticationError, FlightedlError, OutcomeUnknownError, UsageError
from flightedl.rpc import Caller, Connection, Credentials, FlightServer, Tokens

TOKENS = Tokens({"trainer": "t" * 40, "master": "m" * 40})
REFUSED: list[tuple[str, dict[str, str]]] = [
    ("no credentials", {}),
    ("no role", {"authorization": "Bearer " + "t" * 40}),
    ("no token", {"flightedl_caller": "trainer/t1"}),
    ("wrong token", {"flightedl_caller": "trainer/t1", "authorization": "Bearer wrong"}),
    ("token of another role", {"flightedl_caller": "trainer/t1", "authorization": "Bearer " + "m" * 40}),
    ("unknown role", {"flightedl_caller": "None/t1", "authorization": "Bearer None"}),
    ("no Bearer", {"flightedl_caller": "trainer/t1", "authorization": "t" * 40}),
    ("malformed role", {"flightedl_caller": "trainer", "authorization": "Bearer " + "t" * 40}),
]
ADMITTED = {"flightedl_caller": "trainer/t1", "authorization": "Bearer " + "t" * 40}


def put(client: flight.FlightClient, chosen: flight.FlightCallOptions) -> None:
    writer, reader = client.do_put(command(b'{"verb": "upload"}'), SCHEMA, chosen)
    try:
        writer.write_batch(BATCH)
        writer.done_writing()
        reader.read()
    finally:
        writer.close()


def exchange(client: flight.FlightClient, chosen: flight.FlightCallOptions) -> None:
    writer, reader = client.do_exchange(command(b'{"verb": "mirror"}'), chosen)
    try:
        writer.begin(SCHEMA)
        writer.done_writing()
        reader.read_all()
    finally:
        writer.close()


METHODS: dict[str, Callable[[flight.FlightClient, flight.FlightCallOptions], object]] = {
    "do_action": lambda client, chosen: list(client.do_action(flight.Action("echo", b""), chosen)),
    "do_get": lambda client, chosen: client.do_get(flight.Ticket(b'{"verb": "numbers"}'), chosen).read_all(),
    "do_put": put,
    "do_exchange": exchange,
    "get_flight_info": lambda client, chosen: client.get_flight_info(command(b"{}"), chosen),
    "get_schema": lambda client, chosen: client.get_schema(command(b"{}"), chosen),
    "list_flights": lambda client, chosen: list(client.list_flights(b"", chosen)),
    "list_actions": lambda client, chosen: list(client.list_actions(chosen)),
}


@pytest.mark.parametrize("method", list(METHODS))
@pytest.mark.parametrize(("state", "headers"), REFUSED, ids=[state for state, _ in REFUSED])
def test_every_method_refuses_the_unproven(
    serve: Callable[..., FlightServer], handlers: Handlers, method: str, state: str, headers: dict[str, str]
) -> None:
    server = serve(handlers.routes(), tokens=TOKENS)
    with (
        flight.FlightClient(f"grpc://{server.address}") as client,
        pytest.raises((flight.FlightError, OSError)) as caught,
    ):
        METHODS[method](client, options(**headers))
    words = "role/name" if state == "malformed role" else "role and its token"
    assert words in str(caught.value)
    assert not handlers.calls
    assert not handlers.uploads


@pytest.mark.parametrize("method", ["do_action", "do_get", "get_flight_info", "list_actions"])
def test_the_proven_pass(serve: Callable[..., FlightServer], handlers: Handlers, method: str) -> None:
    server = serve(handlers.routes(), tokens=TOKENS)
    with flight.FlightClient(f"grpc://{server.address}") as client:
        METHODS[method](client, options(**ADMITTED))


def test_connections_bring_their_token(serve: Callable[..., FlightServer], handlers: Handlers) -> None:
    server = serve(handlers.routes(), tokens=TOKENS)
    with Connection(server.address, expected=IDENTITY, caller=CALLER, token="t" * 40) as connection:
        assert connection.action("echo", b"x", timeout_s=TIMEOUT_S) == b"x"
    assert "authorization" not in handlers.calls[0].headers
    with (
        Connection(server.address, caller=Caller("master", "m"), token="t" * 40) as connection,
        pytest.raises(AuthenticationError),
    ):
        connection.action("echo", b"x", timeout_s=TIMEOUT_S)


@pytest.mark.parametrize("token", ["", "x" * 5000, "ä"])
def test_tokens_fit_into_headers(token: str) -> None:
    with pytest.raises(UsageError, match="token of role"):
        Tokens({"trainer": token})


def test_secrets_are_not_shown(credentials: Callable[[str], Credentials]) -> None:
    assert "t" * 40 not in repr(TOKENS)
    assert "BEGIN" not in repr(credentials("server"))


# --- TLS ---


@pytest.fixture
def secured(
    serve: Callable[..., FlightServer], handlers: Handlers, credentials: Callable[[str], Credentials]
) -> FlightServer:
    return serve(handlers.routes(), credentials=credentials("server"))


def test_both_sides_of_one_authority_talk(secured: FlightServer, credentials: Callable[[str], Credentials]) -> None:
    with Connection(secured.address, expected=IDENTITY, credentials=credentials("trainer")) as connection:
        assert connection.action("echo", b"x", timeout_s=TIMEOUT_S) == b"x"
        with connection.exchange(b'{"verb": "mirror"}', SCHEMA, timeout_s=TIMEOUT_S) as exchange:
            assert next(exchange.lock_step([(BATCH, None, BATCH.nbytes)], ahead=1)) == (BATCH, None)


@pytest.mark.parametrize("method", list(METHODS))
@pytest.mark.parametrize("who", ["plain text", "no certificate", "another authority's certificate"])
def test_every_method_refuses_strangers(
    secured: FlightServer, handlers: Handlers, certificates: Callable[[str], Path], method: str, who: str
) -> None:
    scheme = "grpc" if who == "plain text" else "grpc+tls"
    arguments = (
        {}
        if who == "plain text"
        else {"tls_root_certs": (certificates("trainer") / "ca.pem").read_bytes(), "override_hostname": "flightedl"}
    )
    if who == "another authority's certificate":
        arguments["cert_chain"] = (certificates("outsider") / "cert.pem").read_bytes()
        arguments["private_key"] = (certificates("outsider") / "key.pem").read_bytes()
    with (
        flight.FlightClient(f"{scheme}://{secured.address}", **arguments) as client,
        pytest.raises((flight.FlightError, pa.ArrowException, OSError)),
    ):
        METHODS[method](client, options())
    assert not handlers.calls
    assert not handlers.uploads


@pytest.mark.parametrize("who", ["plain text", "outsider"])
def test_strangers_get_an_error_that_is_no_success(
    secured: FlightServer, credentials: Callable[[str], Credentials], who: str
) -> None:
    chosen = None if who == "plain text" else credentials(who)
    with Connection(secured.address, credentials=chosen) as connection, pytest.raises(FlightedlError) as caught:
        connection.action("echo", b"x", timeout_s=TIMEOUT_S)
    assert isinstance(caught.value, AuthenticationError | OutcomeUnknownError) or caught.value.retryable


@pytest.mark.parametrize("name", ["wrong-name", "outsider"])
def test_a_client_refuses_servers_that_are_not_the_jobs(
    serve: Callable[..., FlightServer], handlers: Handlers, credentials: Callable[[str], Credentials], name: str
) -> None:
    server = serve(handlers.routes(), credentials=credentials(name))
    with (
        Connection(server.address, credentials=credentials("trainer")) as connection,
        pytest.raises(AuthenticationError, match="certificates"),
    ):
        connection.action("echo", b"x", timeout_s=TIMEOUT_S)
    assert not handlers.calls


def test_no_directory_means_plain_text() -> None:
    assert Credentials.load("") is None


def test_missing_and_wrong_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"ca\.pem cannot be read"):
        Credentials.load(str(tmp_path))
    (tmp_path / "ca.pem").write_text("no certificate")
    with pytest.raises(UsageError, match=r"ca\.pem is not PEM"):
        Credentials.load(str(tmp_path))


def test_wrong_keys_are_a_clear_error(
    serve: Callable[..., FlightServer], credentials: Callable[[str], Credentials], handlers: Handlers
) -> None:
    good = credentials("server")
    bad = Credentials(good.ca, good.cert, credentials("trainer").key)
    with pytest.raises(UsageError, match="cannot serve on"):
        serve(handlers.routes(), credentials=bad)
