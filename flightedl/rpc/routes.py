"""Table of a server's verbs and their handlers.

An action has a verb and a body of bytes. Tickets (of gets) and descriptors (of puts and exchanges) are JSON objects
with a field ``verb``; the handler receives the complete object as bytes. A handler decodes the request, calls its
service once, and encodes the result. It raises errors of :mod:`flightedl.errors`; the client receives any other
exception as *internal*.

A handler may wait for at most 20 s in total per call. It must return early if ``call.is_cancelled()`` or
``call.closing`` is set; ``call.check()`` raises in both cases. Its arguments must not be used after it has returned.
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
    """Answer to a get: a schema and messages. Metadata alone travels with an empty batch."""

    schema: pa.Schema
    messages: Iterator[Message]


#: Key of the text of an ``Answer`` in the schema's metadata.
TEXT_KEY = b"reply"
#: Schema of both directions of a request stream.
NO_COLUMNS = pa.schema([])


@dataclass(frozen=True, slots=True)
class Answer:
    """Complete answer to a get: batches, and a text for the caller in the schema's metadata.

    It is sent without a Python thread, which is cheaper than ``Outgoing`` for small answers of a busy server.
    """

    schema: pa.Schema
    batches: Sequence[pa.RecordBatch]
    text: bytes


@dataclass(frozen=True, slots=True)
class PutRoute:
    """A handler of uploads and their schema. It returns the acknowledgement, at most 1 kB.

    If the handler returns before the end of the upload, the rest is read and checked before the acknowledgement.
    """

    schema: pa.Schema
    serve: Callable[[bytes, Incoming, Call], bytes]


@dataclass(frozen=True, slots=True)
class ExchangeRoute:
    """A handler of exchanges and the schema of the client's messages."""

    schema: pa.Schema
    serve: Callable[[bytes, Exchange, Call], None]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A part of a data set: its ticket, and the ``host:port`` addresses of the servers that have it."""

    ticket: bytes
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Locations of a data set. Counts are -1 if unknown."""

    schema: pa.Schema
    endpoints: tuple[Endpoint, ...]
    record_count: int = -1
    size_bytes: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Routes:
    """All verbs of a server."""

    actions: Mapping[str, Callable[[bytes, Call], bytes]] = field(default_factory=dict)
    gets: Mapping[str, Callable[[bytes, Call], Outgoing | Answer]] = field(default_factory=dict)
    puts: Mapping[str, PutRoute] = field(default_factory=dict)
    exchanges: Mapping[str, ExchangeRoute] = field(default_factory=dict)
    #: Handlers of repeated requests on one exchange of their verb. Each message is metadata alone, a sealed request or
    #: reply (see ``identity``), because a batch would cost more than the rest of the request.
    request_streams: Mapping[str, Callable[[bytes, Call], bytes]] = field(default_factory=dict)
    #: Handler of GetFlightInfo, with the verb "info". It receives the descriptor's command.
    info: Callable[[bytes, Call], Endpoints] | None = None
    #: Roles that may call each verb. With TLS, a verb that is missing here is closed.
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
        """Names of all verbs."""
        named = {*self.actions, *self.gets, *self.puts, *self.exchanges, *self.request_streams}
        return named if self.info is None else named | {"info"}

    def check_open_to(self, role: Role, verb: str) -> None:
        """Raise AuthenticationError unless a member with this role may call the verb."""
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
