"""What a server is made of: a table from verbs to handlers, and what a handler is given.

Actions are named by their verb and carry bytes. Tickets (gets) and descriptors (puts, exchanges) are JSON objects with
a field ``verb``; the whole object is handed on as bytes. A handler decodes, calls its service once, and encodes. It
raises errors of :mod:`flightedl.errors`; anything else reaches the client as *internal*.

A handler may block, but in slices of at most 20 s in all per call, and it ends early when ``call.is_cancelled()`` or
``call.closing`` is set: ``call.check()`` raises then. What it was given is dead after it returned.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
import pyarrow as pa

from flightedl.errors import AuthenticationError, DeadlineError, MessageError, NotReadyError, UsageError
from flightedl.messages.decoding import from_json
from flightedl.ports import Clock
from flightedl.rpc.authentication import Role
from flightedl.rpc.identity import Caller
from flightedl.rpc.validation import BatchLimits, check_flat

if TYPE_CHECKING:
    from flightedl.rpc.streams import Exchange, Incoming

#: Both sides watch the same deadline. The caller's clock ends the call; the server's makes sure of it a little later.
_CALLER_FIRST_S = 0.25

#: A batch with or without metadata, or metadata alone.
Message = tuple[pa.RecordBatch | None, bytes | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a server lets one call, and all of them, use."""

    #: Calls that run at one time; further ones are answered *busy*. Each is a thread.
    running_calls: int = 1024
    #: Bytes of an action's body, a ticket or a descriptor.
    request_bytes: int = 4 << 20
    #: Bytes of freed memory that are kept when a message was refused; what is more goes back to the system.
    kept_free_bytes: int = 32 << 20
    #: Seconds that an action may take, whatever the client asks for.
    call_s: float = 60.0
    #: Seconds that a stream may take, whatever the client asks for.
    stream_s: float = 600.0
    #: Seconds past its deadline after which a stream that waits for its peer loses its connection.
    sever_after_s: float = 1.0
    batches: BatchLimits = field(default_factory=BatchLimits)


class Call:
    """One running call. Alive until its handler returned, or until the stream of a get ended.

    Attributes:
        verb: What is asked.
        caller: Who says to ask.
        role: What the caller has proven to be; None: it could prove nothing, as there is no TLS.
        peer: The peer's address, as gRPC writes it.
        headers: The request's headers, without credentials.
        deadline: Instant of the server's clock, from the client's timeout and the server's limits.
        closing: Set when the server is about to stop; whoever waits, waits on this, too.
    """

    __slots__ = (
        "_cancelled",
        "_clock",
        "caller",
        "closing",
        "deadline",
        "headers",
        "is_late",
        "is_reading",
        "is_resting",
        "is_writing",
        "peer",
        "role",
        "verb",
    )

    def __init__(
        self,
        *,
        verb: str,
        caller: Caller,
        role: Role | None,
        peer: str,
        headers: Mapping[str, str],
        deadline: float,
        clock: Clock,
        closing: threading.Event,
        cancelled: Callable[[], bool],
    ) -> None:
        self.verb = verb
        self.caller = caller
        self.role = role
        self.peer = peer
        self.headers = headers
        self.deadline = deadline
        self.closing = closing
        #: Whether a thread of the handler is inside a read, or a write, of the stream.
        self.is_reading = False
        self.is_writing = False
        #: Whether nothing is under way: the handler waits for the stream's next request.
        self.is_resting = False
        #: Set by the server's watch within a quarter of a second after the deadline; cheap to look at.
        self.is_late = False
        self._clock = clock
        self._cancelled = cancelled

    def __str__(self) -> str:
        return f"{self.verb} for {self.caller} at {self.peer}"

    @property
    def waits_for_peer(self) -> bool:
        """Whether the handler can go on only when the peer sends or reads."""
        return self.is_reading or self.is_writing

    def remaining_s(self) -> float:
        """Seconds until the deadline; negative when it passed."""
        return self.deadline - self._clock.now()

    def is_cancelled(self) -> bool:
        """Whether the client is known to be gone. Not reliable for uploads: their commit record is."""
        return self._cancelled()

    def check_time(self) -> None:
        """DeadlineError when the deadline passed."""
        if self.remaining_s() <= -_CALLER_FIRST_S:
            raise DeadlineError(f"{self.verb}: the time for this call is over")

    def check_begin(self) -> None:
        """Raise when what was just asked for is not to be begun any more: deadline passed, or server closing."""
        self.check_time()
        if self.closing.is_set():
            raise NotReadyError("the server is stopping, look for its successor")

    def check(self) -> None:
        """Raise when there is no point in going on: deadline passed, server closing, or client gone."""
        self.check_begin()
        if self._cancelled():
            raise DeadlineError(f"{self.verb}: the client gave up")

    def end(self) -> None:
        """Let go of the transport; the server calls it, nobody else."""
        self._cancelled = _always


def _always() -> bool:
    return True


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
