"""The server base: admission, identity, deadlines and error mapping around the handlers of a :class:`Routes` table.

Life of a server: constructing it binds the port and answers *not ready* to everything; the owner registers the address,
learns its generation, and calls ``start_serving``; ``stop`` refuses new calls, wakes those that wait on ``closing``,
lets running ones end for a grace time, then breaks their connections, and never blocks for ever. There is no blocking
"serve": the main thread waits on its own event, so that signals arrive.

Order of checks for each call, all before a handler runs: forked? closing? ready? a member of this job? meant for this
generation? fewer running than the limit? Then size, verb, and whether it is open to the caller's role. Each refusal
says that nothing was done.

gRPC gives each running call a thread of its own, without bound: the admission limit is the bound. The server cannot
interrupt a handler's own code; it only ends waits for the peer (:mod:`flightedl.process.socket_abort`).
"""

from __future__ import annotations

import ipaddress
import itertools
import logging
import math
import socket
import threading
from collections import Counter
from collections.abc import Mapping

from flightedl.errors import (
    AuthenticationError,
    BusyError,
    FlightedlError,
    InternalError,
    MessageError,
    NotReadyError,
    UsageError,
)
from flightedl.ports import Clock
from flightedl.process.fork_guard import GUARD
from flightedl.process.free_memory import give_back
from flightedl.process.socket_abort import abort_connections, port_of_peer
from flightedl.rpc.arrow_flight import flight
from flightedl.rpc.authentication import Credentials, proven_role
from flightedl.rpc.errors import shortened
from flightedl.rpc.identity import (
    CALLER_HEADER,
    EXPECT_HEADER,
    TIMEOUT_HEADER,
    Caller,
    ServerIdentity,
    timeout_from_header,
)
from flightedl.rpc.routes import Call, Limits, Routes
from flightedl.rpc.service import Service

logger = logging.getLogger(__name__)

_SHUTDOWN_WAIT_S = 5.0
_WATCH_INTERVAL_S = 0.25
#: Looks of the watch between two at which memory is given back.
_LOOKS_A_GIVING = 4
_REST_POLL_S = 0.05


class FlightServer:
    """A running Flight server that answers the verbs of ``routes``.

    Args:
        routes: What it answers.
        identity: Job, role and index; the generation may still be 0.
        clock: For deadlines.
        host: Numeric address to bind. A name could be bound by a second server on the same port unnoticed.
        port: 0: any free one.
        limits: What calls may use.
        credentials: Mutual TLS; None: plain text, and everybody may ask everything.

    Raises:
        UsageError: the host is not numeric, the port is taken, or this process was forked.
    """

    def __init__(
        self,
        routes: Routes,
        identity: ServerIdentity,
        *,
        clock: Clock,
        host: str = "127.0.0.1",
        port: int = 0,
        limits: Limits | None = None,
        credentials: Credentials | None = None,
    ) -> None:
        GUARD.check()
        _check_bindable(host, port)
        self.routes = routes
        self.limits = limits or Limits()
        #: Set when the server is about to stop.
        self.closing = threading.Event()
        self._clock = clock
        self._identity = identity
        self._header = identity.to_header()
        self._is_ready = False
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._running: set[Call] = set()
        self._refusals: Counter[str] = Counter()
        #: For so many times that memory is given back, there may be some of a refused message.
        self._givings_left = 0
        self._host = host
        self._is_secured = credentials is not None
        # Calls arrive before the next line returns: everything above is what they need.
        self._service = Service(self, host, port, credentials)
        self.port: int = self._service.port
        self._watch = threading.Thread(target=self._watch_streams, name=f"rpc-watch-{self.port}", daemon=True)
        self._watch.start()

    @property
    def address(self) -> str:
        """The bound ``host:port``."""
        return f"[{self._host}]:{self.port}" if ":" in self._host else f"{self._host}:{self.port}"

    @property
    def identity(self) -> ServerIdentity:
        """Who this server says it is."""
        return self._identity

    @property
    def running_calls(self) -> int:
        """Calls admitted and not ended."""
        return len(self._running)

    @property
    def refusals(self) -> dict[str, int]:
        """How many calls ended with each error, by its code, since the start."""
        with self._lock:
            return dict(self._refusals)

    def start_serving(self, identity: ServerIdentity) -> None:
        """Answer from now on, as ``identity``, whose generation is known."""
        if identity.generation <= 0:
            raise UsageError("a server serves only under a generation of its own")
        self._header = identity.to_header()
        self._identity = identity
        self._is_ready = True

    def stop(self, grace_s: float) -> bool:
        """Refuse new calls, let running ones end for ``grace_s`` seconds, then end their connections and the server.

        Streams on which nothing is under way are not waited for.

        Takes at most ``grace_s`` + 5 seconds. Returns False when a handler still runs then: the process should exit by
        ``os._exit``, because gRPC's threads would keep it.
        """
        GUARD.check()
        self.closing.set()
        with self._idle:
            for _ in range(math.ceil(grace_s / _REST_POLL_S)):
                # Who ends says so; who begins to rest does not.
                if self._idle.wait_for(lambda: all(call.is_resting for call in self._running), _REST_POLL_S):
                    break
            left = list(self._running)
        if busy := [str(call) for call in left if not call.is_resting]:
            logger.warning("stopping with calls still running: calls=%s", ", ".join(busy[:10]))
        shutdown = threading.Thread(target=self._service.shutdown, name=f"rpc-stop-{self.port}", daemon=True)
        shutdown.start()
        if left:
            abort_connections(self.port)
        shutdown.join(_SHUTDOWN_WAIT_S)
        self._watch.join(_SHUTDOWN_WAIT_S)
        return not shutdown.is_alive()

    # --- what the service below asks ---

    def note_refusal(self, error: BaseException) -> None:
        """A call ends with this error."""
        code = error.code if isinstance(error, FlightedlError) else InternalError.code
        with self._lock:
            self._refusals[code] += 1
            if isinstance(error, MessageError | AuthenticationError):
                # Once more, because the call's own memory is freed after this.
                self._givings_left = 2

    @property
    def header(self) -> str:
        """The reply header that names this server."""
        return self._header

    def admit(self, context: flight.ServerCallContext, headers: Mapping[str, str], verb: str, limit_s: float) -> Call:
        """Check and count a call; whoever admits it releases it."""
        GUARD.check()
        self.require_serving()
        role = proven_role(context.peer_identity(), self._identity.job) if self._is_secured else None
        caller = Caller.from_header(headers[CALLER_HEADER]) if CALLER_HEADER in headers else Caller()
        if EXPECT_HEADER in headers:
            self._identity.check_meant_by(ServerIdentity.from_header(headers[EXPECT_HEADER]))
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
            if len(self._running) >= self.limits.running_calls:
                raise BusyError(f"{self._identity} runs {self.limits.running_calls} calls already, ask again")
            self._running.add(call)
        return call

    def require_serving(self) -> None:
        """NotReadyError while this server answers nobody; asked before each call, and before each request of one."""
        if self.closing.is_set():
            raise NotReadyError(f"{self._identity} is stopping, look for its successor")
        if not self._is_ready:
            raise NotReadyError(f"{self._identity} is starting")

    def release(self, call: Call) -> None:
        """Let go of a call; releasing it again is harmless."""
        call.end()
        with self._lock:
            self._running.discard(call)
            if self.closing.is_set():
                self._idle.notify_all()

    def _watch_streams(self) -> None:
        for look in itertools.count(1):
            if self.closing.wait(_WATCH_INTERVAL_S):
                return
            if self._givings_left and look % _LOOKS_A_GIVING == 0:
                self._give_memory_back()
            with self._lock:
                late = [call for call in self._running if call.remaining_s() <= 0]
            for call in late:
                call.is_late = True
                port = port_of_peer(call.peer)
                if call.waits_for_peer and port is not None and -call.remaining_s() > self.limits.sever_after_s:
                    severed = abort_connections(self.port, port)
                    logger.warning(
                        "ended the connection of a peer that does not go on: call=%s severed=%d", call, severed
                    )

    def _give_memory_back(self) -> None:
        """What a refused message took is not kept for others."""
        with self._lock:
            self._givings_left -= 1
        if give_back(self.limits.kept_free_bytes):
            logger.info("gave memory back after a refused message")


def _check_bindable(host: str, port: int) -> None:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        raise UsageError(f"bind address {host!r} is a name; give a numeric address such as 127.0.0.1") from None
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise UsageError(f"cannot listen on {host} port {port} ({error.strerror}): choose another port") from None
