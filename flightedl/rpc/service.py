"""Methods of a Flight server. Each method admits the call, finds and runs the call's handler, and ends its stream.

A :class:`~flightedl.rpc.server.FlightServer` owns its :class:`Service`. All methods map exceptions to our errors.

pyarrow runs a call's middleware and the call's method in the same thread. So the middleware stores the headers by
thread id, and the method fetches them from there. A middleware object per call would enter the interpreter two more
times, which costs a busy server a quarter of the time of a small call.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import pyarrow as pa

from flightedl.errors import InternalError, MessageError, UsageError
from flightedl.process import tracing
from flightedl.process.fork_guard import GUARD
from flightedl.rpc.admission import Admission
from flightedl.rpc.arrow_flight import flight
from flightedl.rpc.authentication import Credentials
from flightedl.rpc.call import Call
from flightedl.rpc.errors import shortened, to_wire
from flightedl.rpc.identity import (
    CHECKSUM_HEADER,
    SERVER_HEADER,
    check_undamaged,
    sealed,
)
from flightedl.rpc.routes import NO_COLUMNS, TEXT_KEY, Answer, Endpoints, ExchangeRoute, Outgoing, Routes, verb_of
from flightedl.rpc.streams import Exchange, Incoming

logger = logging.getLogger(__name__)

ACKNOWLEDGEMENT_LIMIT_BYTES = 1024
#: Prefix of our headers' names.
_OURS = "flightedl-"
_Route = TypeVar("_Route")

_Headers = Mapping[str, str]

#: Shared, because pyarrow would otherwise read its defaults from the environment for each stream.
_IPC_OPTIONS = pa.ipc.IpcWriteOptions()


class Arrivals(flight.ServerMiddlewareFactory):  # type: ignore[misc]
    """Middleware that rejects invalid headers, and stores the headers of each call until its method fetches them."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        #: Thread id -> headers of the call that runs in the thread.
        self._headers: dict[int, _Headers] = {}

    def start_call(self, info: flight.CallInfo, headers: Mapping[str, Sequence[str | bytes]]) -> None:
        """Store the headers of a call. Called by pyarrow. Returns None, so that the call has no middleware object."""
        thread = threading.get_ident()
        self._headers.pop(thread, None)
        try:
            self._headers[thread] = self._checked(info.method, headers)
        except BaseException as error:  # noqa: BLE001 - mapped, whatever it is
            self._admission.note_refusal(error)
            raise to_wire(error, doing="checking a call's headers") from None

    def pop(self) -> _Headers:
        """Return the headers of this thread's call and remove them. Raises InternalError if there are none."""
        headers = self._headers.pop(threading.get_ident(), None)
        if headers is None:
            raise InternalError("a call's headers were not checked")
        return headers

    def _checked(self, method: flight.FlightMethod, headers: Mapping[str, Sequence[str | bytes]]) -> _Headers:
        texts = {name: values[0] for name, values in headers.items() if values and isinstance(values[0], str)}
        if any(len(values) > 1 for name, values in headers.items() if name.startswith(_OURS)):
            raise MessageError("a header of this protocol occurs twice")
        if method == flight.FlightMethod.GET_SCHEMA:
            # Reject GetSchema here: an error in the method itself would reach the client with a traceback.
            raise MessageError("this server does not implement GetSchema")
        return texts


class _Place:
    """Admission of a get. It is released when the stream ends, even if the stream never started."""

    __slots__ = ("_admission", "_call")

    def __init__(self, admission: Admission, call: Call) -> None:
        self._admission = admission
        self._call = call

    def __del__(self) -> None:
        self._admission.release(self._call)


_Method = TypeVar("_Method", bound=Callable[..., Any])


def _guarded(method: _Method) -> _Method:
    """Convert all exceptions of a method to errors for the client."""

    @functools.wraps(method)
    def guarded(self: Service, context: flight.ServerCallContext, *arguments: Any) -> Any:
        context.add_header(SERVER_HEADER, self._admission.header)
        try:
            return method(self, context, *arguments)
        except BaseException as error:  # noqa: BLE001 - mapped, whatever it is
            self._admission.note_refusal(error)
            raise to_wire(error, doing=method.__name__) from None

    return guarded  # type: ignore[return-value]


class Service(flight.FlightServerBase):  # type: ignore[misc]
    """Methods of a Flight server, called by pyarrow."""

    def __init__(
        self, admission: Admission, routes: Routes, host: str, port: int, credentials: Credentials | None
    ) -> None:
        self._admission = admission
        self._routes = routes
        self._arrivals = Arrivals(admission)
        self._exchanges = dict(routes.exchanges)
        for verb, asked in routes.request_streams.items():
            self._exchanges[verb] = ExchangeRoute(NO_COLUMNS, functools.partial(self._converse, asked))
        secured: dict[str, Any] = {}
        if credentials is not None:
            secured = {
                "tls_certificates": [(credentials.cert, credentials.key)],
                "verify_client": True,
                "root_certificates": credentials.ca,
            }
        try:
            location = f"[{host}]" if ":" in host else host, port
            super().__init__(location=location, middleware={"flightedl": self._arrivals}, **secured)
        except pa.ArrowException as error:
            raise UsageError(f"cannot serve on {host} port {port}: {shortened(str(error), 200)}") from None
        GUARD.register(self)

    @_guarded
    def do_action(self, context: flight.ServerCallContext, action: flight.Action) -> list[bytes]:
        with self._admitted(context, action.type, self._admission.limits.call_s) as call:
            # Before the body is copied.
            self._check_length(action.body.size)
            handler = self._route(call, self._routes.actions, action.type)
            with tracing.serves(self._admission.identity.role, action.type, call.headers.get(tracing.HEADER, "")):
                return [handler(self._request(call, action.body.to_pybytes()), call)]

    @_guarded
    def do_get(self, context: flight.ServerCallContext, ticket: flight.Ticket) -> flight.FlightDataStream:
        call = self._admission.admit(context, self._arrivals.pop(), "get", self._admission.limits.stream_s)
        try:
            request = self._request(call, ticket.ticket)
            call.verb = verb_of(request)
            outgoing = self._route(call, self._routes.gets, call.verb)(request, call)
            if isinstance(outgoing, Answer):
                self._admission.release(call)
                return _whole(outgoing)
            return flight.GeneratorStream(
                outgoing.schema, self._outgoing(outgoing, call, _Place(self._admission, call))
            )
        except BaseException:
            self._admission.release(call)
            raise

    def _outgoing(self, outgoing: Outgoing, call: Call, place: _Place) -> Iterator[Any]:  # noqa: ARG002 - lives as long
        try:
            for batch, metadata in outgoing.messages:
                if batch is None:
                    batch = _empty(outgoing.schema)  # noqa: PLW2901 - a get cannot send metadata alone
                call.is_writing = True
                yield (batch, metadata) if metadata is not None else batch
                call.is_writing = False
                call.check_time()
        except GeneratorExit:
            raise
        except BaseException as error:  # noqa: BLE001 - mapped, whatever it is
            self._admission.note_refusal(error)
            raise to_wire(error, doing=str(call)) from None
        finally:
            close = getattr(outgoing.messages, "close", None)
            if close is not None:
                close()
            self._admission.release(call)

    @_guarded
    def do_put(
        self,
        context: flight.ServerCallContext,
        descriptor: flight.FlightDescriptor,
        reader: flight.MetadataRecordBatchReader,
        writer: flight.FlightMetadataWriter,
    ) -> None:
        with self._admitted(context, "put", self._admission.limits.stream_s) as call:
            request = self._command(call, descriptor)
            call.verb = verb_of(request)
            route = self._route(call, self._routes.puts, call.verb)
            incoming = Incoming(reader, route.schema, call, self._admission.limits.batches)
            try:
                incoming.open()
                acknowledgement = route.serve(request, incoming, call)
                incoming.drain()
                if len(acknowledgement) > ACKNOWLEDGEMENT_LIMIT_BYTES:
                    raise InternalError(f"the acknowledgement of {call.verb} has {len(acknowledgement)} bytes")
                _acknowledge(writer, acknowledgement)
            finally:
                incoming.end()

    @_guarded
    def do_exchange(
        self,
        context: flight.ServerCallContext,
        descriptor: flight.FlightDescriptor,
        reader: flight.MetadataRecordBatchReader,
        writer: flight.MetadataRecordBatchWriter,
    ) -> None:
        with self._admitted(context, "exchange", self._admission.limits.stream_s) as call:
            request = self._command(call, descriptor)
            call.verb = verb_of(request)
            route = self._route(call, self._exchanges, call.verb)
            exchange = Exchange(reader, writer, route.schema, call, self._admission.limits.batches)
            try:
                route.serve(request, exchange, call)
                exchange.drain()
            finally:
                exchange.end()

    def _converse(self, asked: Callable[[bytes, Call], bytes], _: bytes, exchange: Exchange, call: Call) -> None:
        """Serve a request stream: answer requests one after the other until an error occurs."""
        exchange.begin(NO_COLUMNS)
        try:
            while (request := exchange.read_request()) is not None:
                self._admission.require_serving()
                exchange.write_metadata(sealed(asked(request, call)))
        finally:
            if call.ended is not None:
                call.ended()

    @_guarded
    def get_flight_info(
        self, context: flight.ServerCallContext, descriptor: flight.FlightDescriptor
    ) -> flight.FlightInfo:
        with self._admitted(context, "info", self._admission.limits.call_s) as call:
            if self._routes.info is None:
                raise MessageError("this server does not implement GetFlightInfo")
            self._check_role(call, "info")
            return _flight_info(
                descriptor,
                self._routes.info(self._command(call, descriptor), call),
                is_secured=self._admission.is_secured,
            )

    @_guarded
    def list_flights(self, context: flight.ServerCallContext, criteria: bytes) -> Iterator[flight.FlightInfo]:
        with self._admitted(context, "list", self._admission.limits.call_s) as call:
            routes = self._routes
            if routes.flights is None or routes.info is None:
                raise MessageError("this server does not implement ListFlights")
            self._check_role(call, "info")
            commands = routes.flights(self._request(call, criteria), call)
            is_secured = self._admission.is_secured
            return iter(
                [
                    _flight_info(
                        flight.FlightDescriptor.for_command(command), routes.info(command, call), is_secured=is_secured
                    )
                    for command in commands
                ]
            )

    @_guarded
    def list_actions(self, context: flight.ServerCallContext) -> list[tuple[str, str]]:
        with self._admitted(context, "actions", self._admission.limits.call_s):
            return [(verb, f"JSON body, see schemas/ of flightedl: {verb}") for verb in self._routes.actions]

    @contextmanager
    def _admitted(self, context: flight.ServerCallContext, verb: str, limit_s: float) -> Iterator[Call]:
        """Admit a call at the beginning of the block, and release it at the end."""
        call = self._admission.admit(context, self._arrivals.pop(), verb, limit_s)
        try:
            yield call
        finally:
            self._admission.release(call)

    def _command(self, call: Call, descriptor: flight.FlightDescriptor) -> bytes:
        if descriptor.descriptor_type != flight.DescriptorType.CMD:
            raise MessageError("a descriptor must be a command with a JSON object, not a path")
        return self._request(call, descriptor.command)

    def _check_length(self, size_bytes: int) -> None:
        limit_bytes = self._admission.limits.request_bytes
        if size_bytes > limit_bytes:
            raise MessageError(f"the request has {size_bytes} bytes, at most {limit_bytes} are allowed")

    def _request(self, call: Call, request: bytes) -> bytes:
        self._check_length(len(request))
        check_undamaged(request, call.headers.get(CHECKSUM_HEADER))
        return request

    def _route(self, call: Call, routes: Mapping[str, _Route], verb: str) -> _Route:
        try:
            route = routes[verb]
        except KeyError:
            known = ", ".join(sorted(routes)) or "none"
            raise MessageError(f"unknown verb {shortened(verb, 80)!r}, known here: {known}") from None
        self._check_role(call, verb)
        return route

    def _check_role(self, call: Call, verb: str) -> None:
        if call.role is not None:
            self._routes.check_open_to(call.role, verb)


def _whole(answer: Answer) -> flight.RecordBatchStream:
    table = pa.Table.from_batches(answer.batches, answer.schema)
    return flight.RecordBatchStream(table.replace_schema_metadata({TEXT_KEY: answer.text}), options=_IPC_OPTIONS)


@functools.lru_cache(maxsize=64)
def _empty(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([], schema=schema)


def _acknowledge(writer: flight.FlightMetadataWriter, acknowledgement: bytes) -> None:
    try:
        writer.write(acknowledgement)
    except OSError:
        logger.info("a client disconnected before its upload was acknowledged")


def _flight_info(descriptor: flight.FlightDescriptor, found: Endpoints, *, is_secured: bool) -> flight.FlightInfo:
    scheme = "grpc+tls" if is_secured else "grpc"
    endpoints = [
        flight.FlightEndpoint(part.ticket, [f"{scheme}://{address}" for address in part.addresses])
        for part in found.endpoints
    ]
    counts = (found.record_count, found.size_bytes)
    return flight.FlightInfo(found.schema, descriptor, endpoints, *counts, ordered=found.is_ordered)
