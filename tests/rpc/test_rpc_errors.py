"""Errors: flightedl's own are transmitted unchanged, all others as incidents. No reply contains tracebacks or paths."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable

import pyarrow as pa
import pytest
from pyarrow import flight

from flightedl import errors
from flightedl.errors import ERRORS_BY_CODE, FlightedlError, InternalError
from flightedl.rpc import Connection, FlightServer, Incoming
from flightedl.rpc.errors import from_wire, to_wire

from .rpc_support import SCHEMA, TIMEOUT_S, Handlers, command, options

LEAKS = re.compile(r"Traceback|\.py\b|\.pyx\b|/srv|/usr|/home|site-packages|line \d+|secret")


@pytest.mark.parametrize("code", sorted(ERRORS_BY_CODE))
def test_flightedl_errors_are_transmitted_unchanged(connection: Connection, handlers: Handlers, code: str) -> None:
    handlers.failures.append(ERRORS_BY_CODE[code]("what to do about it"))
    with pytest.raises(FlightedlError) as caught:
        connection.action("fail", b"", timeout_s=TIMEOUT_S)
    assert type(caught.value) is ERRORS_BY_CODE[code]
    assert str(caught.value) == "what to do about it"
    with (
        pytest.raises(ERRORS_BY_CODE[code]),
        connection.get(b'{"verb": "fail"}', timeout_s=TIMEOUT_S) as download,
    ):
        list(download)


@pytest.mark.parametrize("text", ["x" * 20_000, "ä" * 20_000, '"\\' * 9_000, "\n\x00\x1b[31m" * 3000, "", "\ud800"])
def test_errors_with_long_or_odd_texts_keep_their_class_and_a_bounded_size(
    connection: Connection, handlers: Handlers, text: str
) -> None:
    handlers.failures.append(errors.GradientError(text))
    with pytest.raises(errors.GradientError) as caught:
        connection.action("fail", b"", timeout_s=TIMEOUT_S)
    assert len(str(caught.value).encode()) <= 512
    wire = to_wire(handlers.failures[-1], doing="a test")
    assert len(str(wire).encode()) <= 512
    assert len(wire.extra_info) <= 1024
    assert json.loads(wire.extra_info)["code"] == "gradient"


FOREIGN: list[BaseException] = [
    ValueError("/srv/secret.py"),
    KeyError("secret"),
    OSError(2, "No such file or directory", "/home/secret"),
    RecursionError("secret"),
    StopIteration("secret"),
    pa.ArrowInvalid("/usr/secret"),
    NotImplementedError("secret"),
    flight.FlightServerError("secret", b"secret"),
    SystemExit("secret"),
    KeyboardInterrupt("secret"),
    UnicodeDecodeError("utf-8", b"secret", 0, 1, "secret"),
]


def exchange(client: flight.FlightClient) -> None:
    writer, reader = client.do_exchange(command(b'{"verb": "fail"}'), options())
    try:
        writer.begin(SCHEMA)
        writer.done_writing()
        reader.read_all()
    finally:
        writer.close()


def put(client: flight.FlightClient) -> None:
    writer, reader = client.do_put(command(b'{"verb": "fail"}'), SCHEMA, options())
    try:
        writer.done_writing()
        reader.read()
    finally:
        writer.close()


METHODS: dict[str, Callable[[flight.FlightClient], object]] = {
    "do_action": lambda client: list(client.do_action(flight.Action("fail", b""), options())),
    "do_get": lambda client: client.do_get(flight.Ticket(b'{"verb": "fail"}'), options()).read_all(),
    "do_put": put,
    "do_exchange": exchange,
    "get_flight_info": lambda client: client.get_flight_info(command(b"{}"), options()),
    "get_schema": lambda client: client.get_schema(command(b"{}"), options()),
    "list_flights": lambda client: list(client.list_flights(b"", options())),
    "list_actions": lambda client: list(client.list_actions(options())),
}

#: Methods with fixed answers, which handlers' failures do not affect.
FIXED = {"get_schema": "does not implement GetSchema", "list_flights": "does not implement ListFlights"}


def everything_said(error: BaseException) -> str:
    return f"{error!r} {error} {getattr(error, 'extra_info', b'')!r}"


@pytest.mark.parametrize("failure", FOREIGN, ids=lambda failure: type(failure).__name__)
@pytest.mark.parametrize("method", [name for name in METHODS if name != "list_actions"])
def test_no_reply_leaks_tracebacks_or_paths(
    bare: flight.FlightClient,
    handlers: Handlers,
    method: str,
    failure: BaseException,
    caplog: pytest.LogCaptureFixture,
) -> None:
    handlers.failures.append(failure)
    with caplog.at_level(logging.CRITICAL), pytest.raises((flight.FlightError, pa.ArrowException, OSError)) as caught:
        METHODS[method](bare)
    assert not LEAKS.search(everything_said(caught.value)), everything_said(caught.value)
    if method in FIXED:
        assert FIXED[method] in str(caught.value)
    else:
        assert isinstance(caught.value, flight.FlightInternalError)
        assert "incident" in str(caught.value)


@pytest.mark.parametrize("method", list(METHODS))
@pytest.mark.parametrize("state", ["not ready", "closing", "fenced", "bug in admission"])
def test_rejections_leak_nothing(
    server: FlightServer,
    bare: flight.FlightClient,
    method: str,
    state: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if state == "not ready":
        server._admission.is_ready = False
    elif state == "closing":
        server.closing.set()
    elif state == "fenced":
        plain = options
        monkeypatch.setitem(globals(), "options", lambda: plain(flightedl_expect="digits/pserver/1/6"))
    else:

        def broken(*_: object) -> None:
            raise RuntimeError("/srv/secret.py")

        monkeypatch.setattr(server._admission, "admit", broken)
    with caplog.at_level(logging.CRITICAL), pytest.raises((flight.FlightError, pa.ArrowException, OSError)) as caught:
        METHODS[method](bare)
    assert not LEAKS.search(everything_said(caught.value)), everything_said(caught.value)


def test_incidents_are_logged_by_the_server(
    connection: Connection, handlers: Handlers, caplog: pytest.LogCaptureFixture
) -> None:
    handlers.failures.append(ZeroDivisionError("the secret detail"))
    with pytest.raises(InternalError) as caught:
        connection.action("fail", b"", timeout_s=TIMEOUT_S)
    incident = str(caught.value).rpartition(" ")[2]
    record = next(record for record in caplog.records if incident in record.getMessage())
    assert record.exc_info is not None
    assert "the secret detail" in str(record.exc_info[1])


def test_a_request_without_memory_may_be_repeated(
    connection: Connection, handlers: Handlers, caplog: pytest.LogCaptureFixture
) -> None:
    handlers.failures.append(MemoryError("the secret detail"))
    with pytest.raises(errors.BusyError, match="too little free memory for this request") as caught:
        connection.action("fail", b"", timeout_s=TIMEOUT_S)
    assert caught.value.retryable
    assert [record.exc_info for record in caplog.records if record.levelno >= logging.WARNING] == [None]


def test_an_error_of_a_handler_ends_an_upload_half_way(connection: Connection, handlers: Handlers) -> None:
    def refuse(descriptor: bytes, incoming: Incoming, call: object) -> bytes:
        raise errors.CorruptError("block 3")

    handlers.upload = refuse
    handlers.failures.append(errors.CorruptError("block 3"))
    with pytest.raises(errors.CorruptError, match="block 3"):
        connection.put(b'{"verb": "fail"}', SCHEMA, [], timeout_s=TIMEOUT_S)


@pytest.mark.parametrize(
    ("foreign", "ours"),
    [
        (
            flight.FlightUnavailableError("failed to connect to all addresses; last error: refused"),
            errors.UnavailableError,
        ),
        (flight.FlightUnavailableError("errors resolving no.such.host"), errors.UnavailableError),
        (flight.FlightUnavailableError("Stream removed (Socket closed)"), errors.OutcomeUnknownError),
        (
            flight.FlightUnavailableError("failed to connect to all addresses; last error: Ssl handshake failed: x"),
            errors.AuthenticationError,
        ),
        (flight.FlightTimedOutError("Deadline Exceeded"), errors.DeadlineError),
        (flight.FlightCancelledError("CANCELLED"), errors.OutcomeUnknownError),
        (flight.FlightInternalError("broken"), errors.OutcomeUnknownError),
        (flight.FlightServerError("x", b"no json"), errors.OutcomeUnknownError),
        (flight.FlightServerError("x", b'{"code": 3}'), errors.OutcomeUnknownError),
        (flight.FlightServerError("x", b'{"code": "newer", "retryable": true}'), errors.UnavailableError),
        (flight.FlightServerError("x", b'{"code": "newer"}'), FlightedlError),
        (flight.FlightUnauthenticatedError("no"), errors.AuthenticationError),
        (flight.FlightUnauthorizedError("no"), errors.AuthenticationError),
        (pa.ArrowInvalid("Destination already closed"), errors.OutcomeUnknownError),
        (pa.ArrowInvalid("FlightClient is closed"), errors.UsageError),
        (pa.ArrowKeyError("x"), errors.OutcomeUnknownError),
        (pa.ArrowNotImplementedError("x"), errors.MessageError),
        (OSError("Unknown error writing metadata."), errors.OutcomeUnknownError),
    ],
)
def test_foreign_errors_are_mapped_by_the_table(foreign: BaseException, ours: type[FlightedlError]) -> None:
    mapped = from_wire(foreign, doing="push at 127.0.0.1:1")
    assert type(mapped) is ours
    assert not LEAKS.search(str(mapped))
