"""The client base: one connection to one server, for any number of threads.

Every call takes ``timeout_s`` by keyword and has no default: Flight itself would wait for ever. Everything that goes
wrong is an error of :mod:`flightedl.errors` by the table in :mod:`flightedl.rpc.errors`; nothing of pyarrow's
leaks out. A call that ended in OutcomeUnknownError or its DeadlineError may have been carried out: only repeat what is
idempotent.

Python runs no signal handlers inside a Flight call: whatever a user's main thread waits for goes in slices of at most
5 s, or Ctrl-C does nothing.

Received batches are read-only views of network memory at any address; NumPy reads them as they are, raw pointers and
``.view(dtype)`` do not. Copy what outlives the batch.

No keepalive is set: gRPC servers cut off a client that pings more often than every 300 s during a blocked call.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any, Self

import pyarrow as pa

from flightedl.errors import UnavailableError, UsageError
from flightedl.process import tracing
from flightedl.process.fork_guard import GUARD
from flightedl.process.socket_abort import leave
from flightedl.rpc.arrow_flight import flight
from flightedl.rpc.authentication import SERVER_NAME, Credentials
from flightedl.rpc.client_streams import ClientCall, ClientExchange, Download, upload
from flightedl.rpc.errors import FOREIGN_ERRORS, shortened
from flightedl.rpc.identity import (
    CALLER_HEADER,
    CHECKSUM_HEADER,
    EXPECT_HEADER,
    SERVER_HEADER,
    TIMEOUT_HEADER,
    Caller,
    ServerIdentity,
    checksum_of,
)
from flightedl.rpc.line import Lines
from flightedl.rpc.routes import Endpoint, Endpoints

_CHANNEL_OPTIONS = [
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # A proxy for the outside world is never on the way to a job's own servers.
    ("grpc.enable_http_proxy", 0),
    # Each Connection is a TCP connection of its own.
    ("grpc.use_local_subchannel_pool", 1),
]


class _Reply(flight.ClientMiddleware):  # type: ignore[misc]
    """Keeps the header by which the server names itself.

    What pyarrow calls of it is no Python code but builtins. A signal that came while Flight waited is handled where
    Python code runs next; were that here, its SystemExit or KeyboardInterrupt would end in Flight's log, and the
    program would never hear of it.
    """

    def __init__(self) -> None:
        self._received: list[Mapping[str, Sequence[str | bytes]]] = []
        #: Gives the headers to send: none.
        self.sending_headers = dict
        self.received_headers = self._received.append
        #: Is told how the call ended, and does nothing.
        self.call_completed = bool

    @property
    def header(self) -> str | None:
        """The server's; None: it sent none."""
        for headers in self._received:
            if values := headers.get(SERVER_HEADER):
                return str(values[0])
        return None


class _Replies(flight.ClientMiddlewareFactory):  # type: ignore[misc]
    """pyarrow starts a call's middleware in the caller's thread, which is how the two find each other."""

    def __init__(self) -> None:
        self._local = threading.local()
        #: Called by pyarrow with what it knows of the call, which nobody needs: it becomes ``getattr``'s default.
        #: No Python code either, as in ``_Reply``.
        self.start_call = partial(getattr, self._local, "reply")

    def expect(self) -> _Reply:
        """Prepare the middleware of the call that this thread starts next."""
        reply = self._local.reply = _Reply()
        return reply


class Connection:
    """A connection to the server at ``address``; opened by the first call, and again whenever it broke. Thread-safe.

    Args:
        address: ``host:port``.
        expected: The server that is meant. Generation 0 accepts any generation; None accepts any server.
        caller: Who asks.
        credentials: Mutual TLS; None: plain text.
        has_checksums: Whether values that travel on it carry checksums, see ``rpc.integrity``.
        shares_memory: Whether to ask the server for shared memory, see ``rpc.same_host``.
    """

    def __init__(
        self,
        address: str,
        *,
        expected: ServerIdentity | None = None,
        caller: Caller | None = None,
        credentials: Credentials | None = None,
        has_checksums: bool = True,
        shares_memory: bool = False,
    ) -> None:
        self.address = address
        self.shares_memory = shares_memory
        self.has_checksums = has_checksums
        self.expected = expected
        #: Of the server, for people.
        self._role = "server" if expected is None else expected.role
        self._headers = [(CALLER_HEADER.encode(), (caller or Caller()).to_header().encode())]
        if expected is not None:
            self._headers.append((EXPECT_HEADER.encode(), expected.to_header().encode()))
        self._replies = _Replies()
        self._is_severed = False
        self._lines = Lines()
        GUARD.check()
        secured: dict[str, Any] = {}
        if credentials is not None:
            secured = {
                "tls_root_certs": credentials.ca,
                "cert_chain": credentials.cert,
                "private_key": credentials.key,
                "override_hostname": SERVER_NAME,
            }
        scheme = "grpc" if credentials is None else "grpc+tls"
        try:
            self._client = flight.FlightClient(
                f"{scheme}://{address}", middleware=[self._replies], generic_options=_CHANNEL_OPTIONS, **secured
            )
        except FOREIGN_ERRORS as error:
            raise UsageError(f"address {address!r} cannot be used: {shortened(str(error), 200)}") from None
        GUARD.register(self._client)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the connection; closing it again is fine. No other thread may be inside a call."""
        GUARD.check()
        self._client.close()

    def abort_calls(self) -> None:
        """End the calls under way in other threads, because the server is known to be replaced.

        One that is frozen would hold them until their time is over. They raise as when the connection breaks; later
        calls raise UnavailableError. Other connections of this process to the same address break, too.
        """
        if not self._is_severed:
            self._is_severed = True
            self._lines.shut()
            leave(self.address)

    def action(self, verb: str, body: bytes, *, timeout_s: float) -> bytes:
        """Carry out an action and return its reply.

        Raises:
            FlightedlError: what the server answered, or what happened on the way.
        """
        with tracing.asks(self._role, verb, self.address):
            call = self._start(verb, timeout_s, body)

            def run() -> bytes:
                results = self._client.do_action(flight.Action(verb, body), call.options)
                # The error, if there is one, appears only while the results are read.
                return b"".join([result.body.to_pybytes() for result in results])

            answer = call.run(run)
            call.check_server()
            return answer

    @contextmanager
    def get(self, ticket: bytes, *, timeout_s: float, schema: pa.Schema | None = None) -> Iterator[Download]:
        """Open a stream of batches; leaving the ``with`` block early cancels it.

        Args:
            ticket: A JSON object with a verb.
            timeout_s: For the whole stream.
            schema: What the stream must carry; None: anything.

        Raises:
            MessageError: another schema, or a batch that is not sound.
            FlightedlError: what the server answered, or what happened on the way.
        """
        call = self._start("get", timeout_s, ticket)

        reader = call.run(lambda: self._client.do_get(flight.Ticket(ticket), call.options))
        download = Download(call, reader, schema)
        try:
            yield download
        finally:
            download.end()

    def put(
        self,
        descriptor: bytes,
        schema: pa.Schema,
        batches: Iterable[tuple[pa.RecordBatch, bytes | None]],
        *,
        timeout_s: float,
    ) -> bytes:
        """Upload batches and return the server's acknowledgement.

        When ``batches`` raises, the upload is left without its commit record, and nothing of it counts.

        Args:
            descriptor: A JSON object with a verb.
            schema: Of all batches; flat columns only.
            batches: Each with its metadata or None.
            timeout_s: For the whole upload.

        Raises:
            FlightedlError: what the server answered, or what happened on the way.
        """
        call = self._start("put", timeout_s, descriptor)
        target = flight.FlightDescriptor.for_command(descriptor)
        writer, reader = call.run(lambda: self._client.do_put(target, schema, call.options))
        return upload(call, writer, reader, schema, batches)

    def exchange(self, descriptor: bytes, schema: pa.Schema, *, timeout_s: float) -> ClientExchange:
        """Open a stream in both directions; use it in a ``with`` statement.

        Args:
            descriptor: A JSON object with a verb.
            schema: Of what is written; flat columns only.
            timeout_s: For the whole stream.
        """
        call = self._start("exchange", timeout_s, descriptor)
        target = flight.FlightDescriptor.for_command(descriptor)
        writer, reader = call.run(lambda: self._client.do_exchange(target, call.options))
        return ClientExchange(call, writer, reader, schema, timeout_s, self._lines)

    def info(self, descriptor: bytes, *, timeout_s: float) -> Endpoints:
        """Ask where a data set is found (GetFlightInfo)."""
        call = self._start("info", timeout_s, descriptor)
        target = flight.FlightDescriptor.for_command(descriptor)
        found = call.run(lambda: self._client.get_flight_info(target, call.options))
        call.check_server()
        endpoints = tuple(
            Endpoint(part.ticket.ticket, tuple(place.uri.decode().partition("://")[2] for place in part.locations))
            for part in found.endpoints
        )
        return Endpoints(found.schema, endpoints, found.total_records, found.total_bytes)

    def _start(self, verb: str, timeout_s: float, request: bytes) -> ClientCall:
        GUARD.check()
        if self._is_severed:
            raise UnavailableError(f"{verb} at {self.address}: the server there was replaced")
        if not (math.isfinite(timeout_s) and timeout_s > 0):
            raise UsageError(f"timeout_s is {timeout_s}, but it must be a positive number of seconds")
        headers = [
            *self._headers,
            (TIMEOUT_HEADER.encode(), f"{timeout_s:.3f}".encode()),
            (CHECKSUM_HEADER.encode(), checksum_of(request).encode()),
        ]
        if traceparent := tracing.carried():
            headers.append((tracing.HEADER.encode(), traceparent.encode()))
        options = flight.FlightCallOptions(timeout=timeout_s, headers=headers)
        reply = self._replies.expect()
        return ClientCall(f"{verb} at {self.address}", options, self.expected, lambda: reply.header)
