"""A server's verbs, and their handlers.

An action consists of a verb and a body (bytes). Tickets of gets, and descriptors of puts and exchanges, are JSON
objects with a field ``verb``; the handler receives the complete object as bytes. A handler decodes the request, makes
one call to its service, and encodes the result. If it raises an error of :mod:`flightedl.errors`, the client receives
this error; any other exception is reported to the client as *internal*.

A handler may wait for at most 20 s in total per call. It must return early if ``call.is_cancelled()`` is true or
``call.closing`` is set; ``call.check()`` raises an error in both cases. After a handler has returned, its arguments
must not be used.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import pyarrow as pa

from flightedl.errors import AuthenticationError, MessageError, UsageError
from flightedl.messages.decoding import from_json
from flightedl.rpc.authentication import Role
from flightedl.rpc.call import Call, Message
from flightedl.rpc.streams import Exchange, Incoming
from flightedl.rpc.validation import check_flat


@dataclass(frozen=True, slots=True)
class Outgoing:
    """Answer to a get: a schema and messages. Metadata without a batch is sent with an empty batch."""

    schema: pa.Schema
    messages: Iterator[Message]


#: Key of the text of an ``Answer`` in the schema's metadata.
TEXT_KEY = b"reply"
#: Schema of a request stream, in both directions.
NO_COLUMNS = pa.schema([])


@dataclass(frozen=True, slots=True)
class Answer:
    """Complete answer to a get: batches, and a text for the caller in the schema's metadata.

    Sending it runs no Python code, which makes it cheaper than ``Outgoing`` for small answers of a busy server.
    """

    schema: pa.Schema
    batches: Sequence[pa.RecordBatch]
    text: bytes


@dataclass(frozen=True, slots=True)
class PutRoute:
    """Handler of uploads, and the schema of the uploaded batches. It returns the acknowledgement, at most 1 kB.

    If the handler returns before the end of the upload, the remaining messages are read and validated before the
    acknowledgement is sent.
    """

    schema: pa.Schema
    serve: Callable[[bytes, Incoming, Call], bytes]


@dataclass(frozen=True, slots=True)
class ExchangeRoute:
    """Handler of bidirectional streams, and the schema of the client's messages."""

    schema: pa.Schema
    serve: Callable[[bytes, Exchange, Call], None]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Part of a data set: its ticket, and the addresses (``host:port``) of the servers that hold it."""

    ticket: bytes
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Locations of a data set's parts. A count of -1 means that the number is unknown."""

    schema: pa.Schema
    endpoints: tuple[Endpoint, ...]
    record_count: int = -1
    size_bytes: int = -1
    #: True if the parts, one after the other, form the data set.
    is_ordered: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Routes:
    """All verbs of a server."""

    actions: Mapping[str, Callable[[bytes, Call], bytes]] = field(default_factory=dict)
    gets: Mapping[str, Callable[[bytes, Call], Outgoing | Answer]] = field(default_factory=dict)
    puts: Mapping[str, PutRoute] = field(default_factory=dict)
    exchanges: Mapping[str, ExchangeRoute] = field(default_factory=dict)
    #: Verb -> handler of its request streams. Each message is metadata without a batch: a sealed request or reply (see
    #: ``identity``). A batch would cost more than the rest of the request.
    request_streams: Mapping[str, Callable[[bytes, Call], bytes]] = field(default_factory=dict)
    #: Handler of GetFlightInfo, which has the verb "info". It receives the descriptor's command.
    info: Callable[[bytes, Call], Endpoints] | None = None
    #: Handler of ListFlights, which has the same verb. It receives the criteria and returns commands for GetFlightInfo.
    flights: Callable[[bytes, Call], Sequence[bytes]] | None = None
    #: Verb -> roles that may call it. With TLS, a verb that is missing here cannot be called.
    roles: Mapping[str, Collection[Role]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        schemas = {verb: route.schema for verb, route in self.puts.items()}
        schemas.update({verb: route.schema for verb, route in self.exchanges.items()})
        for verb, schema in schemas.items():
            try:
                check_flat(schema)
            except UsageError as error:
                raise UsageError(f"route {verb!r}: {error}") from None
        if strange := self.roles.keys() - self.verbs:
            raise UsageError(f"roles are declared for verbs that are not served: {', '.join(sorted(strange))}")

    @property
    def verbs(self) -> set[str]:
        named = {*self.actions, *self.gets, *self.puts, *self.exchanges, *self.request_streams}
        return named if self.info is None else named | {"info"}

    def check_open_to(self, role: Role, verb: str) -> None:
        """Raise AuthenticationError unless members with this role may call the verb."""
        if role not in self.roles.get(verb, ()):
            raise AuthenticationError(f"{verb} is not for members of the role {role}")


class _Envelope(msgspec.Struct, frozen=True):
    verb: str


def verb_of(request: bytes) -> str:
    """Return the verb of a ticket or descriptor. Raises MessageError if it is not a JSON object with a verb."""
    try:
        return from_json(request, _Envelope).verb
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise MessageError("a ticket or descriptor must be a JSON object with a text field 'verb'") from None
