"""Threads, deadlines, lifecycle: start, admission, stop, reconnect, fork."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from pyarrow import flight

from flightedl.adapters.clock import SystemClock
from flightedl.errors import (
    BusyError,
    DeadlineError,
    FencedError,
    MessageError,
    NotReadyError,
    OutcomeUnknownError,
    UnavailableError,
    UsageError,
)
from flightedl.rpc import Call, Connection, FlightServer, Limits, Outgoing, Routes, ServerIdentity

from .rpc_support import BATCH, IDENTITY, SCHEMA, TIMEOUT_S, Handlers, command, eventually, options


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as threads:
        yield threads


def wait_call(pool: ThreadPoolExecutor, connection: Connection, timeout_s: float = TIMEOUT_S) -> Future[bytes]:
    return pool.submit(lambda: connection.action("wait", b"done", timeout_s=timeout_s))


def test_a_server_answers_not_ready_until_it_serves(serve: Callable[..., FlightServer], handlers: Handlers) -> None:
    server = serve(handlers.routes(), ready=False)
    with Connection(server.address, expected=ServerIdentity("digits", "pserver", 3, 9)) as connection:
        with pytest.raises(NotReadyError, match="is starting"):
            connection.action("echo", b"", timeout_s=TIMEOUT_S)
        # The server learns its index and its generation only when it is registered.
        server.start_serving(ServerIdentity("digits", "pserver", 3, 9))
        assert connection.action("echo", b"x", timeout_s=TIMEOUT_S) == b"x"
        server._admission.is_ready = False
        with pytest.raises(NotReadyError):
            connection.action("echo", b"", timeout_s=TIMEOUT_S)
    assert len(handlers.calls) == 1


def test_a_server_serves_only_under_a_generation(serve: Callable[..., FlightServer]) -> None:
    with pytest.raises(UsageError, match="generation"):
        serve(Routes(), ready=False).start_serving(ServerIdentity("digits", "pserver", 1, 0))


def test_calls_beyond_the_admission_limit_are_answered_busy(
    serve: Callable[..., FlightServer], handlers: Handlers, pool: ThreadPoolExecutor
) -> None:
    server = serve(handlers.routes(), limits=Limits(running_calls=2))
    with Connection(server.address) as connection:
        waiting = [wait_call(pool, connection) for _ in range(2)]
        eventually(lambda: server.running_calls == 2, "two calls run")
        with pytest.raises(BusyError, match="already runs 2 calls"):
            connection.action("echo", b"", timeout_s=TIMEOUT_S)
        with pytest.raises(BusyError), connection.get(b'{"verb": "numbers"}', timeout_s=TIMEOUT_S) as download:
            list(download)
        handlers.release.set()
        assert [call.result() for call in waiting] == [b"done", b"done"]
        assert connection.action("echo", b"x", timeout_s=TIMEOUT_S) == b"x"


def test_failed_calls_free_their_slots(serve: Callable[..., FlightServer], handlers: Handlers) -> None:
    server = serve(handlers.routes(), limits=Limits(running_calls=1))
    handlers.failures.append(ValueError("bug"))
    with flight.FlightClient(f"grpc://{server.address}") as client:
        for _ in range(5):
            for method in METHODS.values():
                with pytest.raises((flight.FlightError, OSError)):
                    method(client, b'{"verb": "fail"}', options())
                eventually(lambda: server.running_calls == 0, "the place is free")


def test_a_deadline_ends_the_wait_and_frees_the_server(
    connection: Connection, server: FlightServer, handlers: Handlers
) -> None:
    with pytest.raises(DeadlineError, match="wait at 127"):
        connection.action("wait", b"", timeout_s=0.2)
    eventually(lambda: server.running_calls == 0, "the handler saw its deadline")
    assert connection.action("echo", b"x", timeout_s=TIMEOUT_S) == b"x"


def test_a_server_enforces_its_own_deadline(serve: Callable[..., FlightServer], handlers: Handlers) -> None:
    server = serve(handlers.routes(), limits=Limits(call_s=0.1))
    with Connection(server.address) as connection, pytest.raises(DeadlineError, match="time for this call is over"):
        connection.action("wait", b"", timeout_s=TIMEOUT_S)


def test_stop_wakes_waiters_so_that_they_can_answer(
    serve: Callable[..., FlightServer], handlers: Handlers, pool: ThreadPoolExecutor
) -> None:
    server = serve(handlers.routes())
    with Connection(server.address) as connection:
        waiting = wait_call(pool, connection)
        assert handlers.entered.wait(TIMEOUT_S)
        assert server.stop(grace_s=5.0)
        assert waiting.result() == b"woken by closing"
        # A request written before the client sees the end of its connection counts as possibly sent.
        eventually(lambda: _is_refused(connection), "calls are known not to be sent")


def test_a_closing_server_rejects_new_calls(serve: Callable[..., FlightServer], pool: ThreadPoolExecutor) -> None:
    entered, release = threading.Event(), threading.Event()

    def deaf(body: bytes, call: Call) -> bytes:
        entered.set()
        release.wait(TIMEOUT_S)
        return b"ended"

    server = serve(Routes(actions={"deaf": deaf}))
    with Connection(server.address) as connection:
        running = pool.submit(lambda: connection.action("deaf", b"", timeout_s=TIMEOUT_S))
        assert entered.wait(TIMEOUT_S)
        stopping = pool.submit(lambda: server.stop(grace_s=TIMEOUT_S))
        assert server.closing.wait(TIMEOUT_S)
        with pytest.raises(NotReadyError, match="is stopping"):
            connection.action("deaf", b"", timeout_s=TIMEOUT_S)
        release.set()
        assert running.result() == b"ended"
        assert stopping.result()


def test_stop_ends_streams_of_silent_peers(serve: Callable[..., FlightServer], handlers: Handlers) -> None:
    server = serve(handlers.routes())
    with flight.FlightClient(f"grpc://{server.address}") as client:
        writer, _ = client.do_put(command(b'{"verb": "upload"}'), SCHEMA)
        writer.write_batch(BATCH)
        assert handlers.received.wait(TIMEOUT_S)
        # The server logs that it no longer waits for its handlers.
        assert server.stop(grace_s=0.1)
        assert handlers.uploads == [(3, False)]
        with pytest.raises(flight.FlightError):
            writer.close()


def test_stop_does_not_wait_for_ever_for_a_deaf_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flightedl.rpc.server._SHUTDOWN_WAIT_S", 0.2)
    entered, release = threading.Event(), threading.Event()

    def deaf(body: bytes, call: Call) -> bytes:
        entered.set()
        release.wait()
        return b""

    server = FlightServer(Routes(actions={"deaf": deaf}), IDENTITY, clock=SystemClock())
    server.start_serving(IDENTITY)
    with Connection(server.address) as connection, ThreadPoolExecutor(1) as pool:
        running = pool.submit(lambda: connection.action("deaf", b"", timeout_s=TIMEOUT_S))
        assert entered.wait(TIMEOUT_S)
        assert server.stop(grace_s=0.1) is False
        release.set()
        assert running.exception() is not None


def test_memory_of_a_refused_message_is_returned_to_the_system(
    serve: Callable[..., FlightServer], handlers: Handlers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice, because the call still has its memory when the server looks for the first time."""
    returned: list[int] = []
    monkeypatch.setattr("flightedl.rpc.server._WATCH_INTERVAL_S", 0.002)
    monkeypatch.setattr("flightedl.process.machine.give_back", returned.append)
    server = serve(handlers.routes(), limits=Limits(kept_free_bytes=7))
    for error in (MessageError("the sizes are wrong"), NotReadyError("not yet")):
        handlers.failures.append(error)
        with Connection(server.address) as connection, pytest.raises(type(error)):
            connection.action("fail", b"", timeout_s=TIMEOUT_S)
        eventually(lambda: returned == [7, 7], "memory is returned")
    threading.Event().wait(0.05)
    assert returned == [7, 7]


def test_a_late_call_that_does_not_wait_for_its_peer_keeps_the_connection(
    serve: Callable[..., FlightServer], handlers: Handlers, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection carries other calls, and its end would not end the handler."""
    monkeypatch.setattr("flightedl.rpc.server._WATCH_INTERVAL_S", 0.005)
    entered, release = threading.Event(), threading.Event()

    def busy(body: bytes, call: Call) -> bytes:
        entered.set()
        eventually(lambda: call.is_late, "the call is late")
        assert release.wait(TIMEOUT_S)
        return body

    server = serve(
        Routes(actions={"busy": busy, "echo": handlers.echo}), limits=Limits(call_s=0.01, sever_after_s=0.01)
    )
    with Connection(server.address) as connection:
        running = pool.submit(lambda: connection.action("busy", b"done", timeout_s=TIMEOUT_S))
        assert entered.wait(TIMEOUT_S)
        threading.Event().wait(0.1)
        assert connection.action("echo", b"x", timeout_s=TIMEOUT_S) == b"x"
        release.set()
        assert running.result(TIMEOUT_S) == b"done"


def test_a_get_whose_messages_come_too_slowly_ends_at_its_deadline(serve: Callable[..., FlightServer]) -> None:
    def slow() -> Iterator[tuple[object, None]]:
        while True:
            threading.Event().wait(0.02)
            yield BATCH, None

    server = serve(Routes(gets={"slow": lambda _, __: Outgoing(SCHEMA, slow())}), limits=Limits(stream_s=0.1))
    with (
        Connection(server.address) as connection,
        connection.get(b'{"verb": "slow"}', timeout_s=TIMEOUT_S) as download,
        pytest.raises(DeadlineError, match="the time for this call is over"),
    ):
        list(download)


def test_stopping_is_idempotent(serve: Callable[..., FlightServer], handlers: Handlers) -> None:
    server = serve(handlers.routes())
    assert server.stop(grace_s=0.0)
    assert server.stop(grace_s=0.0)


@pytest.mark.parametrize("host", ["localhost", "", "example.org"])
def test_addresses_to_bind_must_be_numeric(host: str) -> None:
    with pytest.raises(UsageError, match="numeric address"):
        FlightServer(Routes(), IDENTITY, clock=SystemClock(), host=host)


def test_an_occupied_port_raises_a_clear_error(server: FlightServer) -> None:
    with pytest.raises(UsageError, match="choose another port"):
        FlightServer(Routes(), IDENTITY, clock=SystemClock(), port=server.port)


def test_a_client_finds_a_restarted_server_at_once(handlers: Handlers) -> None:
    server = FlightServer(handlers.routes(), IDENTITY, clock=SystemClock())
    server.start_serving(IDENTITY)
    with Connection(server.address, expected=ServerIdentity("digits", "pserver", 1)) as connection:
        connection.action("echo", b"", timeout_s=TIMEOUT_S)
        assert server.stop(grace_s=0.1)
        eventually(lambda: not _answers(connection), "the server is gone")
        again = FlightServer(handlers.routes(), IDENTITY, clock=SystemClock(), port=server.port)
        again.start_serving(ServerIdentity("digits", "pserver", 1, 8))
        try:
            eventually(lambda: _answers(connection), "the client is back", within_s=5.0)
            with Connection(again.address, expected=IDENTITY) as old, pytest.raises(FencedError):
                old.action("echo", b"", timeout_s=TIMEOUT_S)
        finally:
            assert again.stop(grace_s=0.1)


def _answers(connection: Connection) -> bool:
    try:
        return connection.action("echo", b"x", timeout_s=TIMEOUT_S) == b"x"
    except (UnavailableError, OutcomeUnknownError):
        return False


def _is_refused(connection: Connection) -> bool:
    with pytest.raises((UnavailableError, OutcomeUnknownError)) as caught:
        connection.action("echo", b"x", timeout_s=TIMEOUT_S)
    return isinstance(caught.value, UnavailableError)


def test_every_kind_of_call_without_a_server_raises_unavailable() -> None:
    with socket.socket() as occupied:
        occupied.bind(("127.0.0.1", 0))
        with Connection(f"127.0.0.1:{occupied.getsockname()[1]}") as connection:
            for call in CALLS:
                with pytest.raises(UnavailableError, match="not reachable: Connection refused"):
                    call(connection)


def _download(connection: Connection) -> None:
    with connection.get(b'{"verb": "numbers"}', timeout_s=TIMEOUT_S) as download:
        list(download)


def _exchange(connection: Connection) -> None:
    with connection.exchange(b'{"verb": "mirror"}', SCHEMA, timeout_s=TIMEOUT_S) as exchange:
        exchange.write(BATCH)
        exchange.done_writing()
        exchange.read()


CALLS: list[Callable[[Connection], object]] = [
    _download,
    _exchange,
    lambda c: c.action("echo", b"", timeout_s=TIMEOUT_S),
    lambda c: c.put(b'{"verb": "upload"}', SCHEMA, [(BATCH, None)], timeout_s=TIMEOUT_S),
    lambda c: c.info(b"{}", timeout_s=TIMEOUT_S),
]


def put_bare(client: flight.FlightClient, request: bytes, chosen: flight.FlightCallOptions) -> object:
    writer, reader = client.do_put(command(request), SCHEMA, chosen)
    try:
        writer.done_writing()
        return reader.read()
    finally:
        writer.close()


def exchange_bare(client: flight.FlightClient, request: bytes, chosen: flight.FlightCallOptions) -> object:
    writer, reader = client.do_exchange(command(request), chosen)
    try:
        writer.begin(SCHEMA)
        writer.done_writing()
        return reader.read_all()
    finally:
        writer.close()


METHODS: dict[str, Callable[[flight.FlightClient, bytes, flight.FlightCallOptions], object]] = {
    "do_action": lambda c, _, o: list(c.do_action(flight.Action("fail", b""), o)),
    "do_get": lambda c, r, o: c.do_get(flight.Ticket(r), o).read_all(),
    "do_put": put_bare,
    "do_exchange": exchange_bare,
    "get_flight_info": lambda c, r, o: c.get_flight_info(command(r), o),
}


_FORKING = """
import os, sys, warnings
from flightedl.adapters.clock import SystemClock
from flightedl.errors import UsageError
from flightedl.rpc import Connection, FlightServer, Routes, ServerIdentity
warnings.simplefilter("ignore")
what = sys.argv[1]
identity = ServerIdentity("j", "master", 0, 1)
clock = SystemClock()
server = FlightServer(Routes(), identity, clock=clock) if what != "nothing" else None
connection = Connection(server.address) if server else None
child = os.fork()
if child == 0:
    try:
        if what == "server":
            FlightServer(Routes(), identity, clock=clock)
        elif what == "connection":
            Connection("127.0.0.1:1")
        elif what == "call":
            connection.action("echo", b"", timeout_s=5.0)
        elif what == "stop":
            server.stop(0.1)
        elif what == "nothing":
            Connection("127.0.0.1:1").close()
            os._exit(0)
    except UsageError as error:
        assert "spawn" in str(error)
        del server, connection
        sys.exit(42)
    os._exit(1)
_, status = os.waitpid(child, 0)
print(os.waitstatus_to_exitcode(status), flush=True)
os._exit(0)
"""


@pytest.mark.parametrize(
    ("what", "code"), [("server", 42), ("connection", 42), ("call", 42), ("stop", 42), ("nothing", 0)]
)
def test_a_call_in_a_forked_child_raises_a_clear_error(what: str, code: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _FORKING, what], capture_output=True, text=True, timeout=20, check=False
    )
    assert done.stdout.strip() == str(code), done.stderr
