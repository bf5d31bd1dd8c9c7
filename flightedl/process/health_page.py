"""What a server says of its own condition, on a small HTTP port, for the probes of a cluster.

Three questions, because they have different answers and different consequences:

* ``/started``: has it begun? Until then nobody asks the other two.
* ``/live``: does its main loop go round? One that stands still for ``STANDS_STILL_S`` is not going to move again, and
  only another process helps. What waits for others (a lock, etcd, a checkpoint to load) is alive, however long it
  takes.
* ``/ready``: may the next one be replaced? No while it builds, loads or ends. Nobody is sent to a server by this
  answer: the members of a job find each other by etcd.

The answers are 200 or 503 with one sentence, which names nothing but what is waited for. They need no certificate: a
kubelet has none. Nothing can be ordered here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from flightedl.errors import UsageError

#: As long as `flightedl run` bears a process that stands still.
STANDS_STILL_S = 30.0
#: Requests at the same time; who comes beyond them is cut off.
_REQUESTS_LIMIT = 16
_SILENCE_S = 2.0
#: How long closing may take.
_POLL_S = 0.1


class Condition(NamedTuple):
    """How a process is doing, since a moment."""

    is_started: bool
    is_ready: bool
    #: What it does, for people.
    doing: str
    #: When its main loop said so; None: it waits for others, which may take any time.
    beat_at: float | None


class Health:
    """Where a process says how it is doing. Thread-safe.

    Args:
        now: Seconds that never go back.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._condition = Condition(is_started=False, is_ready=False, doing="starting", beat_at=None)

    def waits(self, doing: str, *, is_ready: bool = False) -> None:
        """It does something that may take any time."""
        self._condition = Condition(is_started=True, is_ready=is_ready, doing=doing, beat_at=None)

    def goes_round(self, doing: str, *, is_ready: bool) -> None:
        """Its main loop has gone round, and will again soon."""
        self._condition = Condition(is_started=True, is_ready=is_ready, doing=doing, beat_at=self._now())

    def answer(self, path: str) -> tuple[int, str]:
        """HTTP status and sentence for ``/started``, ``/live`` or ``/ready``; 404 for anything else."""
        found = self._condition
        still_s = 0.0 if found.beat_at is None else self._now() - found.beat_at
        is_live = still_s < STANDS_STILL_S
        answers = {"/started": found.is_started, "/live": is_live, "/ready": is_live and found.is_ready}
        if path not in answers:
            return 404, "ask for /started, /live or /ready"
        doing = found.doing if is_live else f"it has stood still for {still_s:.0f} s"
        return (200 if answers[path] else 503), doing


class HealthPage:
    """Answers on a port of its own until it is closed.

    Raises:
        UsageError: the port is taken.
    """

    def __init__(self, bind: str, port: int, health: Health) -> None:
        try:
            self._server = _Server((bind, port), health)
        except OSError as error:
            raise UsageError(f"the health page cannot be served on {bind} port {port}: {error}") from None
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_POLL_S,), name="flightedl-health", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Answer no more."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
    #: Closing does not wait for requests.
    block_on_close = False

    def __init__(self, address: tuple[str, int], health: Health) -> None:
        self.health = health
        self._places = threading.BoundedSemaphore(_REQUESTS_LIMIT)
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        """Without the look-up of the host's name in the standard library, which can take seconds."""
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A caller that went away is of no interest."""


class _Handler(BaseHTTPRequestHandler):
    #: Silence for so long ends a connection.
    timeout = _SILENCE_S
    server: _Server

    def do_GET(self) -> None:
        """Answer a probe."""
        status, doing = self.server.health.answer(self.path)
        body = f"{doing}\n".encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/plain; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def version_string(self) -> str:
        """Nothing about versions."""
        return "flightedl"

    def log_message(self, *_: Any) -> None:
        """Probes come every few seconds."""
