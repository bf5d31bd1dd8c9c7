"""Admission of calls to a server: checks before a handler runs, and counters of running and refused calls."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping

from flightedl.errors import AuthenticationError, BusyError, FlightedlError, InternalError, MessageError, NotReadyError
from flightedl.ports import Clock
from flightedl.process.fork_guard import GUARD
from flightedl.rpc.arrow_flight import flight
from flightedl.rpc.authentication import proven_role
from flightedl.rpc.call import Call, Limits
from flightedl.rpc.errors import shortened
from flightedl.rpc.identity import (
    CALLER_HEADER,
    EXPECT_HEADER,
    TIMEOUT_HEADER,
    Caller,
    ServerIdentity,
    timeout_from_header,
)


class Admission:
    """Admits calls while the server is serving. Thread-safe.

    Args:
        identity: Job, role and index. The generation may still be 0.
        clock: Clock of the deadlines.
        limits: Limits on each call, and on all calls together.
        is_secured: True if peers prove their roles by mutual TLS.
    """

    def __init__(self, identity: ServerIdentity, clock: Clock, limits: Limits, *, is_secured: bool) -> None:
        self.limits = limits
        self.is_secured = is_secured
        self.identity = identity
        #: Reply header that names this server.
        self.header = identity.to_header()
        self.is_ready = False
        #: Set when the server begins to stop.
        self.closing = threading.Event()
        #: Admitted calls that are still running.
        self.running: set[Call] = set()
        self._clock = clock
        self._lock = threading.Lock()
        #: Notified when a call ends while the server is closing.
        self.idle = threading.Condition(self._lock)
        self._refusals: Counter[str] = Counter()
        #: Number of times that memory freed by refused messages must still be returned to the system.
        self._givings_left = 0

    def serve_as(self, identity: ServerIdentity) -> None:
        self.header = identity.to_header()
        self.identity = identity
        self.is_ready = True

    def admit(self, context: flight.ServerCallContext, headers: Mapping[str, str], verb: str, limit_s: float) -> Call:
        """Check a call and count it as running. The caller must call ``release`` when the call has ended."""
        GUARD.check()
        self.require_serving()
        role = proven_role(context.peer_identity(), self.identity.job) if self.is_secured else None
        caller = Caller.from_header(headers[CALLER_HEADER]) if CALLER_HEADER in headers else Caller()
        if EXPECT_HEADER in headers:
            self.identity.check_meant_by(ServerIdentity.from_header(headers[EXPECT_HEADER]))
        if TIMEOUT_HEADER in headers:
            limit_s = min(limit_s, timeout_from_header(headers[TIMEOUT_HEADER]))
        call = Call(
            verb=shortened(verb, 80),
            caller=caller,
            role=role,
            peer=context.peer(),
            headers=headers,
            deadline=self._clock.now() + limit_s,
            clock=self._clock,
            closing=self.closing,
            cancelled=context.is_cancelled,
        )
        with self._lock:
            if len(self.running) >= self.limits.running_calls:
                raise BusyError(f"{self.identity} already runs {self.limits.running_calls} calls: try again later")
            self.running.add(call)
        return call

    def require_serving(self) -> None:
        """Raise NotReadyError unless the server is serving. Called before each call and each request of a stream."""
        if self.closing.is_set():
            raise NotReadyError(f"{self.identity} is stopping, look for its successor")
        if not self.is_ready:
            raise NotReadyError(f"{self.identity} is starting")

    def release(self, call: Call) -> None:
        """Record that a call has ended. A second call of this method is harmless."""
        call.end()
        with self._lock:
            self.running.discard(call)
            if self.closing.is_set():
                self.idle.notify_all()

    def late(self) -> list[Call]:
        with self._lock:
            return [call for call in self.running if call.remaining_s() <= 0]

    def note_refusal(self, error: BaseException) -> None:
        """Count the error that ended a call."""
        code = error.code if isinstance(error, FlightedlError) else InternalError.code
        with self._lock:
            self._refusals[code] += 1
            if isinstance(error, MessageError | AuthenticationError):
                # Return memory to the system twice, because the call itself still holds its memory the first time.
                self._givings_left = 2

    @property
    def refusals(self) -> dict[str, int]:
        with self._lock:
            return dict(self._refusals)

    def has_memory_to_give_back(self) -> bool:
        """Return True if memory freed by refused messages should be returned to the system now."""
        with self._lock:
            has_some = self._givings_left > 0
            self._givings_left -= has_some
        return has_some
