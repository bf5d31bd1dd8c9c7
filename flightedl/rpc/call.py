"""A call in progress on a server, and the limits on calls."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import pyarrow as pa

from flightedl.errors import DeadlineError, NotReadyError
from flightedl.ports import Clock
from flightedl.rpc.authentication import Role
from flightedl.rpc.identity import Caller
from flightedl.rpc.validation import BatchLimits

#: Grace period, in seconds, before the server ends a call that exceeds its deadline. Normally, the client ends it
#: first.
_CALLER_FIRST_S = 0.25

#: A batch with or without metadata, or metadata without a batch.
Message = tuple[pa.RecordBatch | None, bytes | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits on each call, and on all calls of a server together."""

    #: Maximum number of calls in progress, each of which occupies a thread. More calls are refused as *busy*.
    running_calls: int = 1024
    #: Maximum size in bytes of an action's body, a ticket or a descriptor.
    request_bytes: int = 4 << 20
    #: Bytes of free memory that the process keeps after refusing a message. It returns the rest to the system.
    kept_free_bytes: int = 32 << 20
    #: Maximum duration of an action in seconds, regardless of the client's timeout.
    call_s: float = 60.0
    #: Maximum duration of a stream in seconds, regardless of the client's timeout.
    stream_s: float = 600.0
    #: Seconds between a stream's deadline and the closing of its connection, if the stream is still blocked on its
    #: peer.
    sever_after_s: float = 1.0
    batches: BatchLimits = field(default_factory=BatchLimits)


class Call:
    """A call in progress. Valid until its handler returns or, for a get, until its stream ends.

    Attributes:
        verb: Verb of the request.
        caller: The caller, according to its own header.
        role: Role that the caller has proved; None without TLS.
        peer: Address of the peer in gRPC's notation.
        headers: Headers of the request.
        deadline: Time by the server's clock, derived from the client's timeout and the server's limits.
        closing: Set when the server is about to stop. A waiting handler must also wait for this event.
    """

    __slots__ = (
        "_cancelled",
        "_clock",
        "caller",
        "closing",
        "deadline",
        "ended",
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
        #: True while a thread of the handler is reading from the stream or writing to it.
        self.is_reading = False
        self.is_writing = False
        #: True while the handler is waiting for the stream's next request.
        self.is_resting = False
        #: Set by a thread of the server within a quarter of a second of the deadline. Reading it is cheap.
        self.is_late = False
        #: Called when a request stream has ended, also because its client has died. A handler of its requests sets it.
        self.ended: Callable[[], None] | None = None
        self._clock = clock
        self._cancelled = cancelled

    def __str__(self) -> str:
        return f"{self.verb} for {self.caller} at {self.peer}"

    @property
    def waits_for_peer(self) -> bool:
        """True if the handler is blocked until the peer sends or reads something."""
        return self.is_reading or self.is_writing

    def remaining_s(self) -> float:
        """Return the seconds until the deadline; negative after the deadline."""
        return self.deadline - self._clock.now()

    def is_cancelled(self) -> bool:
        """Return True if the client is known to have disconnected. Unreliable for uploads: see their commit record."""
        return self._cancelled()

    def check_time(self) -> None:
        """Raise DeadlineError if the deadline has passed."""
        if self.remaining_s() <= -_CALLER_FIRST_S:
            raise DeadlineError(f"{self.verb}: the time for this call is over")

    def check_begin(self) -> None:
        """Raise an error if no new request may start, because the deadline has passed or the server is stopping."""
        self.check_time()
        if self.closing.is_set():
            raise NotReadyError("the server is stopping, look for its successor")

    def check(self) -> None:
        """Raise an error if the deadline has passed, the server is stopping, or the client has disconnected."""
        self.check_begin()
        if self._cancelled():
            raise DeadlineError(f"{self.verb}: the client gave up")

    def end(self) -> None:
        """Release the transport. For use by the server only."""
        self._cancelled = _always


def _always() -> bool:
    return True
