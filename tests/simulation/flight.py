"""In-memory ``pyarrow.flight``. Everything above it is the product's own ``rpc``.

A call is a logical thread in the server's process. Messages are copied as Arrow IPC, so nothing is shared. Writers wait
while the reader lags behind, and every call has a deadline at both ends. TLS is not simulated.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Self

import pyarrow as pa
from pyarrow import flight as real

from tests.simulation.network import Connected, Network, size_of
from tests.simulation.scheduler import require_running, this_process

#: Time after which a call arrives that no server accepts.
_VERB = re.compile(rb'"verb": ?"(\w+)"')
_REFUSAL_S = 0.0005
#: Maximum time after which a doubled call arrives again.
_DOUBLED_S = 3.0
_POLL_S = 0.01
_REFUSED = "failed to connect to all addresses; last error: Connection refused"


class _Current:
    """Holds the network of the current seed."""

    network: Network | None = None


def set_network(network: Network | None) -> None:
    """Begin or end a seed."""
    _Current.network = network


def network() -> Network:
    """Return the network of the current seed."""
    assert _Current.network is not None, "no seed is running"
    return _Current.network


def numeric(host: str) -> str:
    """Return the address of a host."""
    return "127.0.0.1" if host == "localhost" else host.strip("[]")


class FlightCallOptions:
    """See ``pyarrow.flight``."""

    def __init__(self, timeout: float = 1e9, headers: list[tuple[bytes, bytes]] | None = None) -> None:
        self.timeout = timeout
        self.headers = headers or []


class Result:
    """See ``pyarrow.flight``."""

    def __init__(self, body: Any) -> None:
        self.body = pa.py_buffer(bytes(body))


class Chunk:
    """See ``pyarrow.flight.FlightStreamChunk``."""

    __slots__ = ("app_metadata", "data")

    def __init__(self, data: pa.RecordBatch | None, metadata: bytes | None) -> None:
        self.data = data
        self.app_metadata = None if metadata is None else pa.py_buffer(metadata)


def _copied(batch: pa.RecordBatch) -> pa.RecordBatch:
    return pa.ipc.read_record_batch(batch.serialize(), batch.schema)


class Writer:
    """A writer of either end."""

    def __init__(self, send: Callable[[Any, int], None], end: Callable[[], None] = lambda: None) -> None:
        self._send = send
        self._end = end

    def begin(self, schema: pa.Schema, options: object = None) -> None:
        self._send(("schema", schema), 64)

    def write_batch(self, batch: pa.RecordBatch) -> None:
        self._chunk(batch, None)

    def write_with_metadata(self, batch: pa.RecordBatch, buf: Any) -> None:
        self._chunk(batch, bytes(buf))

    def write_metadata(self, buf: Any) -> None:
        self._chunk(None, bytes(buf))

    write = write_metadata

    def _chunk(self, batch: pa.RecordBatch | None, metadata: bytes | None) -> None:
        self._send(("chunk", None if batch is None else _copied(batch), metadata), size_of(batch, metadata))

    def done_writing(self) -> None:
        self._send(("end", None), 0)

    def close(self) -> None:
        self._end()


class Reader:
    """A reader of either end."""

    def __init__(self, call: Connected, read: Callable[[], Any]) -> None:
        self._call = call
        self._read = read
        self._schema: pa.Schema | None = None
        #: A message that arrived before the schema.
        self._early: Any = None

    @property
    def schema(self) -> pa.Schema:
        while self._schema is None:
            item = self._read()
            if item is None or item[0] != "schema":
                raise pa.ArrowInvalid("the stream has no schema")
            self._schema = item[1]
        return self._schema

    def read_chunk(self) -> Chunk:
        while True:
            item = self._read()
            if item is None:
                raise StopIteration
            if item[0] != "schema":
                return Chunk(item[1], item[2])
            self._schema = item[1]

    def read(self) -> pa.Buffer | None:
        """Return the next metadata of an upload's answers."""
        item = self._read()
        return None if item is None else pa.py_buffer(item[2])

    def __iter__(self) -> Iterator[Chunk]:
        while True:
            try:
                yield self.read_chunk()
            except StopIteration:
                return

    def read_all(self) -> pa.Table:
        """Return all batches as a table."""
        schema = self.schema
        return pa.Table.from_batches([chunk.data for chunk in self if chunk.data is not None], schema)

    def cancel(self) -> None:
        self._call.cancel()


def _named(kind: str, request: bytes | None) -> str:
    """Return a call's name: its kind and its verb."""
    found = _VERB.search(request or b"")
    return kind if found is None else f"{kind} {found[1].decode()}"


class _Call:
    """The client's end of a call."""

    def __init__(self, client: FlightClient, options: FlightCallOptions | None) -> None:
        options = options or FlightCallOptions()
        self.network = network()
        process = this_process()
        self.over = Connected(self.network, process, client.port, client.address, options.timeout)
        self.headers: dict[str, list[str]] = {}
        for name, value in options.headers:
            self.headers.setdefault(name.decode(), []).append(value.decode())
        self._reply = client.middleware.start_call(None) if client.middleware is not None else None
        self.reply_headers: dict[str, list[str]] = {}
        #: Method of Flight, where the product distinguishes it.
        self.method: object = None
        self._has_headers = False
        self._is_done_writing = False

    def begin(self, what: str, serve: Callable[[FlightServerBase, Context], None]) -> None:
        """Send the call to the server."""
        call, scheduler = self.over, self.network.scheduler
        call.what = what
        scheduler.note(f"call {what} to {call.address[1]}")
        self.network.watch(call.client, what, "before")
        server = self.network.server_at(call.address)
        if server is None:
            scheduler.after(_REFUSAL_S, self._refuse)
            return
        call.server = server.process
        way = call.way_up
        if way.breaks():
            self.network.broken_count += 1
            call.snap("connection lost")
        if way.loses():
            call.hang()
            return

        def arrive() -> None:
            # A call that its client has given up arrives nevertheless, unless its connection broke.
            if call.is_broken:
                return
            if not server.is_closed and server.process.is_alive:
                scheduler.spawn(server.process, f"call {what}", lambda: server.run(self, serve))
            elif not call.is_over:
                call.snap("the server is gone")

        scheduler.after(way.delay_s(), arrive)
        if what.startswith("action") and way.doubles():
            self._arrive_again(server, serve)

    def _refuse(self) -> None:
        self.over.down.fail(real.FlightUnavailableError(_REFUSED))
        self.over.over()

    def _arrive_again(self, server: FlightServerBase, serve: Callable[[FlightServerBase, Context], None]) -> None:
        """Let the call arrive a second time, later, as if its client had repeated it."""
        twin, scheduler = _Twin(self), self.network.scheduler

        def arrive() -> None:
            if not server.is_closed and server.process.is_alive:
                scheduler.spawn(server.process, twin.over.what, lambda: server.run(twin, serve))

        scheduler.after(self.over.way_up.chance.random() * _DOUBLED_S, arrive)

    def answer(self) -> Any:
        """Wait for the next item and return it; None at the end."""
        call = self.over
        try:
            item = call.down.read(call.deadline)
        except real.FlightTimedOutError:
            call.cancel()
            raise
        except real.FlightError:
            self._receive_headers()
            raise
        self._receive_headers()
        if item[0] == "end":
            call.over()
            call.down.error = item[1] or StopIteration()
            if item[1] is not None:
                raise item[1]
            return None
        return item

    def _receive_headers(self) -> None:
        if not self._has_headers and self._reply is not None:
            self._has_headers = True
            self._reply.received_headers(dict(self.reply_headers))

    def send(self, item: Any, size_bytes: int) -> None:
        """Send to the server."""
        call = self.over
        if call.is_over or call.up.error is not None:
            # As the real one, it then asks for the server's status.
            self.close()
            raise OSError("Could not write to stream (server disconnect?)")
        self._is_done_writing = self._is_done_writing or item[0] == "end"
        call.up.send(item, size_bytes, call.way_up, call.deadline)

    def close(self) -> None:
        """Send nothing more, wait for the server's status, and raise it if it is an error."""
        if not self.over.is_over and self.over.up.error is None and not self._is_done_writing:
            self.send(("end", None), 0)
        while not self.over.is_over and self._next() is not None:
            pass
        error = self.over.down.error
        if error is not None and not isinstance(error, StopIteration):
            raise error

    def stream(self) -> tuple[Writer, Reader]:
        """Return both ends of a stream at the client."""
        return Writer(self.send, self.close), Reader(self.over, self._next)

    def _next(self) -> Any:
        try:
            return self.answer()
        except StopIteration:
            return None


class _Twin:
    """A call that arrives a second time. Nobody waits for its answer."""

    def __init__(self, call: _Call) -> None:
        self.headers = call.headers
        self.method = call.method
        self.reply_headers: dict[str, list[str]] = {}
        first = call.over
        self.over = Connected(call.network, first.client, first.client_port, first.address, 60.0)
        self.over.server, self.over.what = first.server, f"late {first.what}"
        self.over.down.is_lost = True


class FlightClient:
    """See ``pyarrow.flight``."""

    def __init__(self, location: str, middleware: list[Any] | None = None, **_: object) -> None:
        host, _colon, port = location.partition("://")[2].rpartition(":")
        if not port.isdecimal():
            raise pa.ArrowInvalid(f"Cannot parse URI: '{location}'")
        self.address = numeric(host), int(port)
        self.middleware = middleware[0] if middleware else None
        self.port = network().port()
        self._is_closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._is_closed = True

    def _open(self, options: FlightCallOptions | None) -> _Call:
        if self._is_closed:
            raise pa.ArrowInvalid("FlightClient is closed")
        return _Call(self, options)

    def do_action(self, action: Any, options: FlightCallOptions | None = None) -> Iterator[Result]:
        if isinstance(action, tuple):
            action = real.Action(*action)
        call = self._open(options)

        def serve(server: FlightServerBase, context: Context) -> None:
            for body in server.do_action(context, action):
                context.send(("result", body), len(body))

        call.begin(f"action {action.type}", serve)
        return self._results(call)

    def _results(self, call: _Call) -> Iterator[Result]:
        while (item := call.answer()) is not None:
            yield Result(item[1])

    def do_get(self, ticket: real.Ticket, options: FlightCallOptions | None = None) -> Reader:
        call = self._open(options)

        def serve(server: FlightServerBase, context: Context) -> None:
            stream = server.do_get(context, ticket)
            context.send(("schema", stream.schema), 64)
            for batch, metadata in stream.messages(context):
                context.send(("chunk", _copied(batch), metadata), size_of(batch, metadata))

        call.begin(_named("get", ticket.ticket), serve)
        return call.stream()[1]

    def do_put(
        self, target: real.FlightDescriptor, schema: pa.Schema, options: FlightCallOptions | None = None
    ) -> tuple[Writer, Reader]:
        call = self._open(options)

        def serve(server: FlightServerBase, context: Context) -> None:
            server.do_put(context, target, context.reader(), Writer(context.send))

        call.begin(_named("put", target.command), serve)
        writer, reader = call.stream()
        writer.begin(schema)
        return writer, reader

    def do_exchange(
        self, target: real.FlightDescriptor, options: FlightCallOptions | None = None
    ) -> tuple[Writer, Reader]:
        call = self._open(options)

        def serve(server: FlightServerBase, context: Context) -> None:
            server.do_exchange(context, target, context.reader(), Writer(context.send))

        call.begin(_named("exchange", target.command), serve)
        return call.stream()

    def get_flight_info(self, target: real.FlightDescriptor, options: FlightCallOptions | None = None) -> Any:
        call = self._open(options)
        call.begin("info", lambda server, context: context.send(("info", server.get_flight_info(context, target)), 64))
        return call.answer()[1]

    def list_flights(self, criteria: bytes = b"", options: FlightCallOptions | None = None) -> Iterator[Any]:
        call = self._open(options)

        def serve(server: FlightServerBase, context: Context) -> None:
            for each in server.list_flights(context, criteria):
                context.send(("info", each), 64)

        call.begin("list", serve)
        while (item := call.answer()) is not None:
            yield item[1]

    def get_schema(self, target: real.FlightDescriptor, options: FlightCallOptions | None = None) -> Any:
        call = self._open(options)
        call.method = real.FlightMethod.GET_SCHEMA
        call.begin("schema", lambda server, context: context.send(("schema", server.get_schema(context, target)), 64))
        return call.answer()[1]

    def list_actions(self, options: FlightCallOptions | None = None) -> list[Any]:
        call = self._open(options)
        call.begin("actions", lambda server, context: context.send(("all", server.list_actions(context)), 64))
        return [real.ActionType(*each) for each in call.answer()[1]]


class Context:
    """See ``pyarrow.flight.ServerCallContext``."""

    def __init__(self, call: _Call | _Twin) -> None:
        self._call = call
        self._over = call.over

    def peer(self) -> str:
        return f"ipv4:127.0.0.1:{self._over.client_port}"

    def peer_identity(self) -> bytes:
        return b""

    def is_cancelled(self) -> bool:
        return self._over.is_cancelled

    def add_header(self, name: str, value: str) -> None:
        self._call.reply_headers[name] = [value]

    def send(self, item: Any, size_bytes: int) -> None:
        """Send to the client."""
        if self._over.is_over or self._over.is_cancelled:
            raise OSError("the client is gone")
        self._over.down.send(item, size_bytes, self._over.way_down, self._over.deadline)

    def reader(self) -> Reader:
        """Return a reader of the client's messages."""
        return Reader(self._over, self._incoming)

    def _incoming(self) -> Any:
        pipe = self._over.up
        if isinstance(pipe.error, StopIteration):
            return None
        item = pipe.read(self._over.deadline)
        if item[0] == "end":
            pipe.error = StopIteration()
            return None
        return item


@dataclass(frozen=True, slots=True)
class _Info:
    """See ``pyarrow.flight.CallInfo``."""

    method: object


class FlightServerBase:
    """See ``pyarrow.flight``. It listens as soon as it is made."""

    #: Methods of the product's server.
    do_action: Callable[..., Any]
    do_get: Callable[..., Any]
    do_put: Callable[..., Any]
    do_exchange: Callable[..., Any]
    get_flight_info: Callable[..., Any]
    get_schema: Callable[..., Any]
    list_flights: Callable[..., Any]
    list_actions: Callable[..., Any]

    def __init__(self, location: tuple[str, int], middleware: dict[str, Any] | None = None, **_: object) -> None:
        self.process = this_process()
        self.port = location[1] or network().port()
        self.is_closed = False
        self._middleware = middleware or {}
        self._running_count = 0
        network().servers[location[0].strip("[]"), self.port] = self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def run(self, call: _Call | _Twin, serve: Callable[[FlightServerBase, Context], None]) -> None:
        """Run a call from its middleware to its end."""
        self._running_count += 1
        error: BaseException | None = None
        try:
            for each in self._middleware.values():
                each.start_call(_Info(call.method), call.headers)
            serve(self, Context(call))
        except (real.FlightError, pa.ArrowException, OSError) as failed:
            error = failed
        finally:
            self._running_count -= 1
        call.over.up.fail(error or real.FlightCancelledError("the server has answered"))
        call.over.finish(error)

    def shutdown(self) -> None:
        """Accept no more calls, and wait for those that run."""
        self.is_closed = True
        while self._running_count:
            require_running().sleep(_POLL_S)


class GeneratorStream:
    """See ``pyarrow.flight``."""

    def __init__(self, schema: pa.Schema, generator: Iterator[Any]) -> None:
        self.schema = schema
        self._generator = generator

    def messages(self, context: Context) -> Iterator[tuple[pa.RecordBatch, bytes | None]]:
        """Yield batches, and their metadata, while the client is there."""
        try:
            for item in self._generator:
                if context.is_cancelled():
                    return
                batch, metadata = item if isinstance(item, tuple) else (item, None)
                yield batch, None if metadata is None else bytes(metadata)
        finally:
            self._generator.close()  # type: ignore[attr-defined] # the product passes generators


class RecordBatchStream:
    """See ``pyarrow.flight``."""

    def __init__(self, table: pa.Table, options: object = None) -> None:
        self.schema = table.schema
        self._table = table

    def messages(self, _: Context) -> Iterator[tuple[pa.RecordBatch, None]]:
        """Yield the batches of the table."""
        for batch in self._table.to_batches():
            yield batch, None


fake_flight = types.ModuleType("pyarrow.flight")
fake_flight.__dict__.update({name: value for name, value in vars(real).items() if not name.startswith("__")})
fake_flight.__dict__.update(
    FlightCallOptions=FlightCallOptions,
    FlightClient=FlightClient,
    FlightServerBase=FlightServerBase,
    GeneratorStream=GeneratorStream,
    RecordBatchStream=RecordBatchStream,
)
