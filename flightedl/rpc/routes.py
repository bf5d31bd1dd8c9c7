"""What a server is made of: a table from verbs to handlers, and what a handler is given.

Actions are named by their verb and carry bytes. Tickets (gets) and descriptors (puts, exchanges) are JSON objects with
a field ``verb``; the whole object is handed on as bytes. A handler decodes, calls its service once, and encodes. It
raises errors of :mod:`flightedl.errors`; anything else reaches the client as *internal*.

A handler may block, but in slices of at most 20 s in all per call, and it ends early when ``call.is_cancelled()`` or
``call.closing`` is set: ``call.check()`` raises then. What it was given is dead after it returned.
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
    """What a get answers: a schema and its messages. Metadata alone travels with an empty batch."""

    schema: pa.Schema
    messages: Iterator[Message]


#: Under this name the schema's metadata has the text of an ``Answer``.
TEXT_KEY = b"reply"
#: Of both directions of a request stream.
NO_COLUMNS = pa.schema([])


@dataclass(frozen=True, slots=True)
class Answer:
    """What a get answers that is there as a whole: batches, and a text for the caller in the schema's metadata.

    Sent without a thread of Python: cheaper than ``Outgoing`` for the small answers of a busy server.
    """

    schema: pa.Schema
    batches: Sequence[pa.RecordBatch]
    text: bytes


@dataclass(frozen=True, slots=True)
class PutRoute:
    """A handler of uploads and the one schema it takes. It returns the acknowledgement, at most 1 kB.

    When the handler returns before the upload's end, the rest is read and checked before the acknowledgement leaves.
    """

    schema: pa.Schema
    serve: Callable[[bytes, Incoming, Call], bytes]


@dataclass(frozen=True, slots=True)
class ExchangeRoute:
    """A handler of exchanges and the one schema that clients write to it."""

    schema: pa.Schema
    serve: Callable[[bytes, Exchange, Call], None]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A part of a data set: the ticket to ask for and the ``host:port`` addresses of servers that hold it."""

    ticket: bytes
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Where a data set is found. Counts are -1 when not known."""

    schema: pa.Schema
    endpoints: tuple[Endpoint, ...]
    record_count: int = -1
    size_bytes: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Routes:
    """All verbs of one server."""

    actions: Mapping[str, Callable[[bytes, Call], bytes]] = field(default_factory=dict)
    gets: Mapping[str, Callable[[bytes, Call], Outgoing | Answer]] = field(default_factory=dict)
    puts: Mapping[str, PutRoute] = field(default_factory=dict)
    exchanges: Mapping[str, ExchangeRoute] = field(default_factory=dict)
    #: Requests that are asked again and again over one exchange of their verb. Each message is metadata alone,
    #: a request or its reply, sealed (see ``identity``): a batch would cost more than all the rest.
    request_streams: Mapping[str, Callable[[bytes, Call], bytes]] = field(default_factory=dict)
    #: Answers GetFlightInfo; given the descriptor's command. Its verb is "info".
    info: Callable[[bytes, Call], Endpoints] | None = None
    #: Verb -> the roles that it is open to. Where roles are proven, a verb that is missing here is closed.
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
            raise UsageError(f"roles are named for verbs that nobody serves: {', '.join(sorted(strange))}")

    @property
    def verbs(self) -> set[str]:
        """All of them."""
        named = {*self.actions, *self.gets, *self.puts, *self.exchanges, *self.request_streams}
        return named if self.info is None else named | {"info"}

    def check_open_to(self, role: Role, verb: str) -> None:
        """AuthenticationError unless a member of this role may ask this."""
        if role not in self.roles.get(verb, ()):
            raise AuthenticationError(f"{verb} is not for members of the role {role}")


class _Envelope(msgspec.Struct, frozen=True):
    verb: str


def verb_of(request: bytes) -> str:
    """The verb of a ticket or descriptor; MessageError when it is not a JSON object that has one."""
    try:
        return from_json(request, _Envelope).verb
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise MessageError("a ticket or descriptor must be a JSON object with a text field 'verb'") from None
