"""Connection of a client to one server. Any number of threads may use it.

Every call has the required keyword argument ``timeout_s``, because Flight would wait forever. All failures are errors
of :mod:`flightedl.errors`, mapped by the list in :mod:`flightedl.rpc.errors`. A call that raises OutcomeUnknownError
or DeadlineError may have been carried out, so repeat only idempotent requests.

Python cannot run signal handlers during a Flight call. For Ctrl-C to work, a call on the user's main thread should take
at most 5 s.

Received batches are read-only views of network memory and may be unaligned. NumPy can read them; raw pointers and
``.view(dtype)`` do not work. Copy data that must outlive the batch.

Keepalive is disabled, because a gRPC server disconnects clients that ping more than once in 300 s during a blocked
call.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Self

import pyarrow as pa

from flightedl.errors import UnavailableError, UsageError
from flightedl.process import machine, tracing
from flightedl.process.fork_guard import GUARD
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
    # Do not use an internet proxy: there is none between the servers of a job.
    ("grpc.enable_http_proxy", 0),
    # Give each Connection its own TCP connection.
    ("grpc.use_local_subchannel_pool", 1),
]


class _Reply(flight.ClientMiddleware):  # type: ignore[misc]
    """Middleware for one call. It stores the header that carries the server's identity.

    pyarrow may call only builtins of this object, never Python code. A signal that arrives while Flight waits is
    handled by the next Python code that runs. If that code were a method of this class, Flight would log the resulting
    SystemExit or KeyboardInterrupt, and the program would not receive it.
    """

    def __init__(self) -> None:
        self._received: list[Mapping[str, Sequence[str | bytes]]] = []
        #: pyarrow calls this to get the headers to send. There are none.
        self.sending_headers = dict
        self.received_headers = self._received.append
        #: pyarrow calls this with the status of the call. It does nothing.
        self.call_completed = bool

    @property
    def header(self) -> str | None:
        for headers in self._received:
            if values := headers.get(SERVER_HEADER):
                return str(values[0])
        return None


class _Replies(flight.ClientMiddlewareFactory):  # type: ignore[misc]
    """Middleware factory. pyarrow starts the middleware of a call in the caller's thread, which identifies the call."""

    def __init__(self) -> None:
        self._local = threading.local()
        #: pyarrow calls this to get the middleware of a call. It must not run Python code, for the reason given in
        #: ``_Reply``. The argument, a description of the call, becomes the default of ``getattr``, which is not used.
        self.start_call = partial(getattr, self._local, "reply")

    def expect(self) -> _Reply:
        """Prepare the middleware of this thread's next call."""
        reply = self._local.reply = _Reply()
        return reply


class Connection:
    """A connection to a server. The first call opens it; if it breaks, the next call reopens it. Thread-safe.

    Args:
        address: ``host:port``.
        expected: The expected server. Generation 0 accepts any generation; None accepts any server.
        caller: Name of this process.
        credentials: Credentials for mutual TLS; None for plain text.
        has_checksums: True if values have checksums; see ``rpc.integrity``.
        shares_memory: True to request shared memory from the server; see ``rpc.same_host``.
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
        #: Role of the server, for messages to users.
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

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection. No other thread may be using it. Closing it twice is harmless."""
        GUARD.check()
        self._client.close()

    def abort_calls(self) -> None:
        """Abort the calls of other threads, because the server was replaced.

        A frozen server would otherwise block these calls until their deadlines. They raise the same errors as if the
        connection had broken, and later calls raise UnavailableError. Other connections of this process to the same
        address break, too.
        """
        if not self._is_severed:
            self._is_severed = True
            self._lines.shut()
            machine.leave(self.address)

    def action(self, verb: str, body: bytes, *, timeout_s: float) -> bytes:
        """Call an action and return its reply.

        Raises:
            FlightedlError: the server's error, or a failure of the connection.
        """
        with tracing.asks(self._role, verb, self.address):
            call = self._start(verb, timeout_s, body)

            def run() -> bytes:
                results = self._client.do_action(flight.Action(verb, body), call.options)
                # Flight raises errors only when the results are read.
                return b"".join([result.body.to_pybytes() for result in results])

            answer = call.run(run)
            call.check_server()
            return answer

    @contextmanager
    def get(self, ticket: bytes, *, timeout_s: float, schema: pa.Schema | None = None) -> Iterator[Download]:
        """Open a stream of batches from the server. Leaving the ``with`` block early cancels it.

        Args:
            ticket: A JSON object with a verb.
            timeout_s: Time limit of the entire stream.
            schema: Required schema; None to accept any schema.

        Raises:
            MessageError: the stream has a different schema, or contains an invalid batch.
            FlightedlError: the server's error, or a failure of the connection.
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

        If iterating over ``batches`` raises an error, the upload ends without a commit record and has no effect.

        Args:
            descriptor: A JSON object with a verb.
            schema: Schema of all batches, which may contain only flat columns.
            batches: Pairs of a batch and its metadata, which may be None.
            timeout_s: Time limit of the entire upload.

        Raises:
            FlightedlError: the server's error, or a failure of the connection.
        """
        call = self._start("put", timeout_s, descriptor)
        target = flight.FlightDescriptor.for_command(descriptor)
        writer, reader = call.run(lambda: self._client.do_put(target, schema, call.options))
        return upload(call, writer, reader, schema, batches)

    def exchange(self, descriptor: bytes, schema: pa.Schema, *, timeout_s: float) -> ClientExchange:
        """Open a bidirectional stream. Use it as a context manager.

        Args:
            descriptor: A JSON object with a verb.
            schema: Schema of the client's batches, which may contain only flat columns.
            timeout_s: Time limit of the entire stream.
        """
        call = self._start("exchange", timeout_s, descriptor)
        target = flight.FlightDescriptor.for_command(descriptor)
        writer, reader = call.run(lambda: self._client.do_exchange(target, call.options))
        return ClientExchange(call, writer, reader, schema, timeout_s, self._lines)

    def info(self, descriptor: bytes, *, timeout_s: float) -> Endpoints:
        """Return the locations of a data set (GetFlightInfo)."""
        call = self._start("info", timeout_s, descriptor)
        target = flight.FlightDescriptor.for_command(descriptor)
        found = call.run(lambda: self._client.get_flight_info(target, call.options))
        call.check_server()
        return _endpoints(found)

    def flights(self, criteria: bytes, *, timeout_s: float) -> list[Endpoints]:
        """Return the locations of all data sets that match the criteria (ListFlights)."""
        call = self._start("list", timeout_s, criteria)
        found = call.run(lambda: list(self._client.list_flights(criteria, call.options)))
        call.check_server()
        return [_endpoints(each) for each in found]

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


def _endpoints(found: flight.FlightInfo) -> Endpoints:
    endpoints = tuple(
        Endpoint(part.ticket.ticket, tuple(place.uri.decode().partition("://")[2] for place in part.locations))
        for part in found.endpoints
    )
    return Endpoints(found.schema, endpoints, found.total_records, found.total_bytes, found.ordered)
