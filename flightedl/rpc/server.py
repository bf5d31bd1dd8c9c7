"""A Flight server and its lifecycle.

The constructor binds the port, and the server answers all calls with *not ready*. The owner registers the address,
which gives the server its generation, and calls ``start_serving``. ``stop`` refuses new calls, sets ``closing`` to wake
waiting handlers, gives running calls a grace period, and then closes their connections. It never blocks forever. There
is no blocking "serve" method: the main thread waits for an event of its own, so that it can handle signals.

Every call is checked before a handler runs. ``admission`` checks, in this order: the process has not been forked; the
server is not closing; the server is ready; the caller is a member of this job; the generation matches; the number of
running calls is below the limit. ``service`` then checks the size, the verb, and the caller's role. A refused call has
had no effect.

gRPC starts a thread for each call without limiting their number, so admission limits the number of calls. The server
cannot interrupt a handler; it can only end a handler's wait for the peer (:mod:`flightedl.process.socket_abort`).
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
from pathlib import Path

from flightedl.adapters.pem_files import require_valid
from flightedl.config import LOOPBACK, host_port
from flightedl.errors import UsageError
from flightedl.ports import Clock
from flightedl.process import machine
from flightedl.process.fork_guard import GUARD
from flightedl.process.socket_abort import port_of_peer
from flightedl.rpc.admission import Admission
from flightedl.rpc.authentication import Credentials
from flightedl.rpc.call import Limits
from flightedl.rpc.identity import ServerIdentity
from flightedl.rpc.routes import Routes
from flightedl.rpc.service import Service

logger = logging.getLogger(__name__)

#: Seconds that gRPC has to send the replies of ended calls before idle connections are closed.
_SENDING_S = 0.2
_SHUTDOWN_WAIT_S = 5.0
_WATCH_INTERVAL_S = 0.25
#: Number of iterations of the watching thread between two checks for memory to return to the system.
_LOOKS_A_GIVING = 4
#: Number of its iterations between two checks for a certificate that expires soon.
_LOOKS_A_DAY = round(86_400 / _WATCH_INTERVAL_S)
_REST_POLL_S = 0.05


class FlightServer:
    """A running Flight server.

    Args:
        routes: Verbs and their handlers.
        identity: Job, role and index. The generation may still be 0.
        clock: Clock of the deadlines.
        host: Numeric address to bind. With a host name, a second server could bind the same port unnoticed.
        port: Port to bind; 0 for any free port.
        limits: Limits on calls.
        credentials: Credentials for mutual TLS; None for plain text, which gives everyone full access.

    Raises:
        UsageError: the host is not numeric, the port is in use, or this process was forked.
    """

    def __init__(
        self,
        routes: Routes,
        identity: ServerIdentity,
        *,
        clock: Clock,
        host: str = LOOPBACK,
        port: int = 0,
        limits: Limits | None = None,
        credentials: Credentials | None = None,
    ) -> None:
        GUARD.check()
        machine.require_bindable(host, port)
        self._admission = Admission(identity, clock, limits or Limits(), is_secured=credentials is not None)
        #: Set when the server begins to stop.
        self.closing = self._admission.closing
        self.routes = routes
        self._host = host
        self._certificate = None if credentials is None else credentials.path
        # Calls arrive before this returns.
        self._service = Service(self._admission, routes, host, port, credentials)
        self.port: int = self._service.port
        self._watch = threading.Thread(target=self._watch_streams, name=f"rpc-watch-{self.port}", daemon=True)
        self._watch.start()

    @property
    def address(self) -> str:
        return host_port(self._host, self.port)

    @property
    def identity(self) -> ServerIdentity:
        return self._admission.identity

    @property
    def running_calls(self) -> int:
        return len(self._admission.running)

    @property
    def refusals(self) -> dict[str, int]:
        return self._admission.refusals

    def start_serving(self, identity: ServerIdentity) -> None:
        """Start answering calls as ``identity``, which includes the generation."""
        if identity.generation <= 0:
            raise UsageError("a server needs its generation before it serves")
        self._admission.serve_as(identity)

    def stop(self, grace_s: float) -> bool:
        """Refuse new calls, wait up to ``grace_s`` seconds for calls in progress, then close all connections.

        Does not wait for idle request streams, and takes at most ``grace_s`` + 5 seconds. Returns False if a handler is
        still running after that; the process should then exit with ``os._exit``, because gRPC's threads would keep it
        alive.
        """
        GUARD.check()
        running = self._admission.running
        with self._admission.idle:
            was_busy = any(not call.is_resting for call in running)
        self.closing.set()
        with self._admission.idle:
            for _ in range(math.ceil(grace_s / _REST_POLL_S)):
                # A call notifies this thread when it ends, but not when it starts waiting for the next request.
                if self._admission.idle.wait_for(lambda: all(call.is_resting for call in running), _REST_POLL_S):
                    break
            left = list(running)
        if busy := [str(call) for call in left if not call.is_resting]:
            logger.warning("stopping with calls still running: calls=%s", ", ".join(busy[:10]))
        shutdown = threading.Thread(target=self._service.shutdown, name=f"rpc-stop-{self.port}", daemon=True)
        shutdown.start()
        if left:
            if was_busy:
                # On idle connections, gRPC may still be sending the replies of calls that have just ended.
                shutdown.join(_SENDING_S)
            machine.abort_connections(self.port)
        shutdown.join(_SHUTDOWN_WAIT_S)
        self._watch.join(_SHUTDOWN_WAIT_S)
        return not shutdown.is_alive()

    def _watch_streams(self) -> None:
        for look in itertools.count(1):
            if self.closing.wait(_WATCH_INTERVAL_S):
                return
            if look % _LOOKS_A_DAY == 0 and self._certificate is not None:
                _warn_of_expiry(self._certificate)
            has_garbage = look % _LOOKS_A_GIVING == 0 and self._admission.has_memory_to_give_back()
            if has_garbage and machine.give_back(self._admission.limits.kept_free_bytes):
                logger.info("returned memory to the system after a refused message")
            for call in self._admission.late():
                call.is_late = True
                port = port_of_peer(call.peer)
                is_severed = -call.remaining_s() > self._admission.limits.sever_after_s
                if call.waits_for_peer and port is not None and is_severed:
                    severed = machine.abort_connections(self.port, port)
                    logger.warning(
                        "ended the connection of a peer that does not go on: call=%s severed=%d", call, severed
                    )


def _warn_of_expiry(certificate: Path) -> None:
    try:
        require_valid(certificate)
    except UsageError as error:
        logger.warning("%s", error)
