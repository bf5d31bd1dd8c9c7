"""Authorization: every method rejects strangers, and members whose role it does not admit."""

from __future__ import annotations

import datetime as dt
import threading
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import flight

from flightedl.adapters.certificates import Member, create, renew
from flightedl.adapters.etcd_access import EtcdAccess
from flightedl.adapters.pem_files import FILES
from flightedl.config import CommonSettings
from flightedl.errors import AuthenticationError, FlightedlError, OutcomeUnknownError, UsageError
from flightedl.rpc import Caller, Connection, Connector, Credentials, FlightServer, Role, Routes
from flightedl.rpc.authentication import name_in_certificate
from flightedl.rpc.errors import from_wire
from flightedl.rpc.server import _warn_of_expiry

from .rpc_support import BATCH, IDENTITY, SCHEMA, TIMEOUT_S, Handlers, command, options


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


def test_secrets_are_not_shown(credentials: Callable[[str], Credentials]) -> None:
    assert "BEGIN" not in repr(credentials("server"))


@pytest.fixture
def secured(
    serve: Callable[..., FlightServer], handlers: Handlers, credentials: Callable[[str], Credentials]
) -> FlightServer:
    return serve(handlers.routes(), credentials=credentials("server"))


def test_both_sides_with_one_authority_can_talk(
    secured: FlightServer, credentials: Callable[[str], Credentials]
) -> None:
    with Connection(secured.address, expected=IDENTITY, credentials=credentials("trainer")) as connection:
        assert connection.action("echo", b"x", timeout_s=TIMEOUT_S) == b"x"
        with connection.exchange(b'{"verb": "mirror"}', SCHEMA, timeout_s=TIMEOUT_S) as exchange:
            exchange.write(BATCH)
            assert exchange.answer() == (BATCH, None)


@pytest.mark.parametrize("method", list(METHODS))
@pytest.mark.parametrize("who", ["plain text", "no certificate", "another authority's certificate"])
def test_every_method_rejects_strangers(
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
def test_strangers_never_get_a_successful_reply(
    secured: FlightServer, credentials: Callable[[str], Credentials], who: str
) -> None:
    chosen = None if who == "plain text" else credentials(who)
    with Connection(secured.address, credentials=chosen) as connection, pytest.raises(FlightedlError) as caught:
        connection.action("echo", b"x", timeout_s=TIMEOUT_S)
    assert isinstance(caught.value, AuthenticationError | OutcomeUnknownError) or caught.value.retryable


@pytest.mark.parametrize("name", ["wrong-name", "outsider"])
def test_a_client_rejects_servers_outside_the_job(
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
    assert Credentials.load("", Role.TRAINER) is None


def test_missing_and_wrong_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"ca\.pem cannot be read"):
        Credentials.load(str(tmp_path), Role.TRAINER)
    (tmp_path / "ca.pem").write_text("no certificate")
    with pytest.raises(UsageError, match=r"ca\.pem is not PEM"):
        Credentials.load(str(tmp_path), Role.TRAINER)


def test_wrong_keys_raise_a_clear_error(
    serve: Callable[..., FlightServer], credentials: Callable[[str], Credentials], handlers: Handlers
) -> None:
    good = credentials("server")
    bad = Credentials(good.ca, good.cert, credentials("trainer").key)
    with pytest.raises(UsageError, match="cannot serve on"):
        serve(handlers.routes(), credentials=bad)


# --- roles ---

REFUSED = {
    "other-job": "your certificate is for another job",
    "no-role": "names no role of flightedl: make one with `flightedl certs create`",
    "unknown-role": "names no role",
    "no-uri": "names no role",
    "reader": "not for members of the role reader",
    "server": "not for members of the role server",
}
OPEN_TO_ALL = ("get_schema", "list_flights", "list_actions")


def trusting(certificates: Callable[[str], Path], who: str, address: str) -> flight.FlightClient:
    """Return a plain client that presents a certificate and claims an arbitrary name."""
    place = certificates(who)
    return flight.FlightClient(
        f"grpc+tls://{address}",
        tls_root_certs=(place / "ca.pem").read_bytes(),
        cert_chain=(place / "cert.pem").read_bytes(),
        private_key=(place / "key.pem").read_bytes(),
        override_hostname="flightedl",
    )


@pytest.mark.parametrize("method", [name for name in METHODS if name not in OPEN_TO_ALL])
@pytest.mark.parametrize("who", list(REFUSED))
def test_every_method_rejects_members_of_another_role(
    secured: FlightServer, handlers: Handlers, certificates: Callable[[str], Path], method: str, who: str
) -> None:
    with (
        trusting(certificates, who, secured.address) as client,
        pytest.raises((flight.FlightError, OSError)) as caught,
    ):
        METHODS[method](client, options(flightedl_caller="trainer/t1"))
    assert REFUSED[who] in str(caught.value)
    assert not handlers.calls
    assert not handlers.uploads


@pytest.mark.parametrize("method", ["do_action", "do_get", "get_flight_info", "list_actions"])
@pytest.mark.parametrize("who", ["trainer", "of-all-jobs"])
def test_members_of_the_right_role_are_admitted(
    secured: FlightServer, certificates: Callable[[str], Path], method: str, who: str
) -> None:
    with trusting(certificates, who, secured.address) as client:
        METHODS[method](client, options())


def test_a_handler_sees_the_proven_identity_of_the_caller(
    secured: FlightServer, handlers: Handlers, credentials: Callable[[str], Credentials]
) -> None:
    claimed = Caller("admin", "me")
    with Connection(secured.address, caller=claimed, credentials=credentials("trainer")) as connection:
        connection.action("echo", b"x", timeout_s=TIMEOUT_S)
    assert handlers.calls[0].role is Role.TRAINER


def test_a_verb_without_roles_is_closed(
    serve: Callable[..., FlightServer], handlers: Handlers, credentials: Callable[[str], Credentials]
) -> None:
    server = serve(Routes(actions={"echo": handlers.echo}), credentials=credentials("server"))
    with (
        Connection(server.address, credentials=credentials("trainer")) as connection,
        pytest.raises(AuthenticationError, match="echo is not for members of the role trainer"),
    ):
        connection.action("echo", b"x", timeout_s=TIMEOUT_S)


def test_roles_may_be_set_only_for_served_verbs() -> None:
    with pytest.raises(UsageError, match="verbs that are not served: other"):
        Routes(roles={"other": (Role.TRAINER,)})


def test_a_duplicate_header_is_rejected(server: FlightServer, bare: flight.FlightClient) -> None:
    twice = flight.FlightCallOptions(
        timeout=TIMEOUT_S, headers=[(b"flightedl-caller", b"trainer/a"), (b"flightedl-caller", b"admin/b")]
    )
    with pytest.raises(flight.FlightError, match="occurs twice"):
        list(bare.do_action(flight.Action("echo", b""), twice))


# --- the connector ---


def copied(certificates: Callable[[str], Path], who: str, to: Path) -> None:
    to.mkdir(exist_ok=True)
    for name in ("ca.pem", "cert.pem", "key.pem"):
        (to / name).write_bytes((certificates(who) / name).read_bytes())


def test_a_connector_uses_the_certificate_of_its_role_and_its_renewal(
    secured: FlightServer, certificates: Callable[[str], Path], tmp_path: Path
) -> None:
    copied(certificates, "reader", tmp_path / "trainer")
    connector = Connector(Caller("trainer", "t"), Role.TRAINER, str(tmp_path))
    with connector.connect(secured.address, IDENTITY) as connection, pytest.raises(AuthenticationError):
        connection.action("echo", b"x", timeout_s=TIMEOUT_S)
    (tmp_path / "trainer" / "key.pem").write_bytes((certificates("trainer") / "key.pem").read_bytes())
    with connector.connect(secured.address, IDENTITY) as connection, pytest.raises(AuthenticationError, match="reader"):
        connection.action("echo", b"x", timeout_s=TIMEOUT_S)
    copied(certificates, "trainer", tmp_path / "trainer")
    with connector.connect(secured.address, IDENTITY) as connection:
        assert connection.action("echo", b"x", timeout_s=TIMEOUT_S) == b"x"


def test_a_key_of_another_certificate_is_reported(certificates: Callable[[str], Path], tmp_path: Path) -> None:
    copied(certificates, "trainer", tmp_path)
    (tmp_path / "key.pem").write_bytes((certificates("reader") / "key.pem").read_bytes())
    with pytest.raises(UsageError, match=r"key\.pem does not belong to cert\.pem"):
        Credentials.load(str(tmp_path), Role.TRAINER)


def issue(directory: Path, monkeypatch: pytest.MonkeyPatch, begins_days: float, ends_days: float) -> Path:
    """Issue a certificate that is valid in this range of days from now. Return its directory."""
    members = [Member(Role.SERVER, name_in_certificate(IDENTITY.job, Role.SERVER), ("flightedl",))]
    create(directory, members, days=1, authority_days=400)
    now = dt.datetime.now(dt.UTC)
    span = now + dt.timedelta(days=begins_days), now + dt.timedelta(days=ends_days)
    monkeypatch.setattr("flightedl.adapters.certificates._span", lambda _: span)
    renew(directory, members, days=1)
    return directory / Role.SERVER


@pytest.mark.parametrize(
    ("begins_days", "ends_days", "text"),
    [
        (-30, -3, r"server/cert\.pem expired on \d{4}-\d\d-\d\d: run `flightedl certs renew`"),
        (3, 30, r"server/cert\.pem is valid from \d{4}-\d\d-\d\d on: correct this machine's clock"),
    ],
    ids=["expired", "not yet valid"],
)
def test_a_certificate_that_is_not_valid_now_is_named_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begins_days: float, ends_days: float, text: str
) -> None:
    place = issue(tmp_path, monkeypatch, begins_days, ends_days)
    with pytest.raises(UsageError, match=text):
        Credentials.load(str(tmp_path), Role.SERVER)
    with pytest.raises(UsageError, match=text):
        EtcdAccess.of(CommonSettings(etcd_tls_dir=str(place)))


@pytest.mark.parametrize("ends_days", [6.9, 7.1])
def test_a_certificate_that_expires_within_a_week_is_named_at_the_start_and_daily(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    serve: Callable[..., FlightServer],
    handlers: Handlers,
    ends_days: float,
) -> None:
    issue(tmp_path, monkeypatch, -30, ends_days)
    monkeypatch.setattr("flightedl.rpc.server._LOOKS_A_DAY", 1)
    credentials = Credentials.load(str(tmp_path), Role.SERVER)
    looks = threading.Semaphore(0)
    monkeypatch.setattr("flightedl.rpc.server._warn_of_expiry", lambda path: (_warn_of_expiry(path), looks.release()))
    serve(handlers.routes(), credentials=credentials)
    assert looks.acquire(timeout=20)
    assert looks.acquire(timeout=20)
    named = [each.getMessage() for each in caplog.records if "server/cert.pem expires on" in each.getMessage()]
    assert (len(named) >= 3) == (ends_days < 7), "once at the start, and twice by the server"
    assert bool(named) == (ends_days < 7)


def test_the_sentence_about_an_expired_certificate_is_not_cut(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    serve: Callable[..., FlightServer],
    handlers: Handlers,
) -> None:
    place = issue(tmp_path, monkeypatch, -30, -3)
    expired = Credentials(*((place / name).read_bytes() for name in FILES))
    server = serve(handlers.routes(), credentials=expired)
    connection = Connection(server.address, expected=IDENTITY, caller=Caller("t", "t"), credentials=expired)
    with connection, pytest.raises(AuthenticationError) as caught:
        connection.action("echo", b"x", timeout_s=TIMEOUT_S)
    text = "no secure connection, check both sides' certificates: certificate verify failed: certificate has expired"
    assert str(caught.value) == f"echo at {server.address}: {text}"


def test_the_end_of_a_long_message_about_certificates_is_kept() -> None:
    message = (
        "failed to connect to all addresses; last error: UNKNOWN: " + "ipv6:%5Bfd00::1%5D:1: " * 40 + "Ssl handshake "
        "failed: SSL_ERROR_SSL: error:0A000086:SSL routines::certificate verify failed: certificate has expired"
    )
    found = from_wire(flight.FlightUnavailableError(message), doing="a call")
    assert isinstance(found, AuthenticationError)
    assert str(found).endswith("certificates: certificate verify failed: certificate has expired")
