"""One running call of a server, and the limits of calls."""

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
