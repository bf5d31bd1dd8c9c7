"""Shared by tests of flightedl.rpc: a schema, an identity, and handlers of every kind."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pyarrow as pa
from pyarrow import flight

from flightedl.rpc import (
    Answer,
    Call,
    Caller,
    Endpoint,
    Endpoints,
    Exchange,
    ExchangeRoute,
    Incoming,
    Outgoing,
    PutRoute,
    Role,
    Routes,
    ServerIdentity,
)

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("values", pa.binary(), nullable=False)])
IDENTITY = ServerIdentity("digits", "pserver", 1, 7)
VERBS = ("echo", "wait", "fail", "numbers", "whole", "endless", "upload", "mirror", "answer", "info")
CALLER = Caller("trainer", "trainer-1")
#: Timeout of calls that end by themselves: long enough for a busy machine, so that only hanging calls exceed it.
TIMEOUT_S = 20.0


def make_batch(rows: int = 3, size: int = 4) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(
        [pa.array(range(rows), pa.int64()), pa.array([b"x" * size] * rows, pa.binary())], schema=SCHEMA
    )


BATCH = make_batch()


class Handlers:
    """Handlers of every kind, which record what they receive."""

    def __init__(self) -> None:
        self.uploads: list[tuple[int, bool]] = []
        self.failures: list[BaseException] = []
        self.calls: list[Call] = []
        self.requests: list[bytes] = []
        self.streams: list[Incoming | Exchange] = []
        self.entered = threading.Event()
        self.received = threading.Event()
        self.release = threading.Event()
        self.ended = threading.Event()

    def routes(self) -> Routes:
        return Routes(
            actions={"echo": self.echo, "wait": self.wait, "fail": self.fail},
            gets={"numbers": self.numbers, "whole": self.whole, "endless": self.endless, "fail": self.fail_late},
            puts={"upload": PutRoute(SCHEMA, self.upload), "fail": PutRoute(SCHEMA, self.fail_upload)},
            exchanges={"mirror": ExchangeRoute(SCHEMA, self.mirror), "fail": ExchangeRoute(SCHEMA, self.fail_exchange)},
            request_streams={"answer": self.answer},
            info=self.info,
            roles=dict.fromkeys(VERBS, (Role.TRAINER,)),
        )

    def echo(self, body: bytes, call: Call) -> bytes:
        self.calls.append(call)
        return body

    def wait(self, body: bytes, call: Call) -> bytes:
        self.entered.set()
        while not self.release.is_set() and not call.closing.wait(0.01):
            call.check()
        return b"woken by closing" if call.closing.is_set() else body

    def fail(self, body: bytes, call: Call) -> bytes:
        raise self.failures[-1]

    def numbers(self, ticket: bytes, call: Call) -> Outgoing:
        return Outgoing(SCHEMA, iter([(BATCH, None), (BATCH, b"metadata"), (None, b"alone")]))

    def whole(self, ticket: bytes, call: Call) -> Answer:
        return Answer(SCHEMA, [] if b"nothing" in ticket else [BATCH, make_batch(1)], b'{"all": true}')

    def answer(self, request: bytes, call: Call) -> bytes:
        if self.failures:
            raise self.failures[-1]
        self.requests.append(request)
        self.calls.append(call)
        call.ended = self.ended.set
        return b"answer to " + request

    def endless(self, ticket: bytes, call: Call) -> Outgoing:
        return Outgoing(SCHEMA, self.forever())

    def forever(self) -> Iterator[tuple[pa.RecordBatch, None]]:
        try:
            while True:
                yield make_batch(1, 1 << 20), None
        finally:
            self.ended.set()

    def fail_late(self, ticket: bytes, call: Call) -> Outgoing:
        def messages() -> Iterator[tuple[pa.RecordBatch, None]]:
            yield BATCH, None
            raise self.failures[-1]

        return Outgoing(SCHEMA, messages())

    def upload(self, descriptor: bytes, incoming: Incoming, call: Call) -> bytes:
        self.streams.append(incoming)
        rows = 0
        self.entered.set()
        try:
            for batch, _ in incoming:
                rows += batch.num_rows
                self.received.set()
        finally:
            self.uploads.append((rows, incoming.is_complete))
            self.ended.set()
        return str(rows).encode()

    def fail_upload(self, descriptor: bytes, incoming: Incoming, call: Call) -> bytes:
        raise self.failures[-1]

    def mirror(self, descriptor: bytes, exchange: Exchange, call: Call) -> None:
        self.streams.append(exchange)
        self.entered.set()
        exchange.begin(SCHEMA)
        try:
            while (message := exchange.read()) is not None:
                batch, metadata = message
                if batch is None:
                    exchange.write_metadata(metadata or b"")
                else:
                    exchange.write(batch, metadata)
        finally:
            self.uploads.append((0, exchange.is_complete))
            self.ended.set()

    def fail_exchange(self, descriptor: bytes, exchange: Exchange, call: Call) -> None:
        raise self.failures[-1]

    def info(self, descriptor: bytes, call: Call) -> Endpoints:
        if self.failures:
            raise self.failures[-1]
        return Endpoints(SCHEMA, (Endpoint(b'{"verb": "numbers"}', ("127.0.0.1:1", "[::1]:2")),), 9, 108)


def eventually(condition: Callable[[], bool], what: str, within_s: float = 20.0) -> None:
    """Poll until the condition holds."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen in time"
        time.sleep(0.005)


def options(timeout_s: float = TIMEOUT_S, **headers: str) -> flight.FlightCallOptions:
    pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return flight.FlightCallOptions(timeout=timeout_s, headers=pairs)


def command(text: bytes) -> flight.FlightDescriptor:
    return flight.FlightDescriptor.for_command(text)
