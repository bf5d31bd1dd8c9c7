"""A small, read-only HTTP server for the pages of a process: probes, metrics, and the job's page.

The server withstands hostile clients: it limits the number of concurrent requests, closes idle connections, and rejects
connections beyond its limits. With certificates, it answers only members of the job. A stream lasts until its reader
disconnects; the number of streams has a lower limit than that of requests, so that readers of a page cannot displace a
probe or Prometheus.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from flightedl.config import family_of, is_loopback
from flightedl.errors import UsageError

#: Maximum number of concurrent requests. Further connections are rejected.
_REQUESTS_LIMIT = 16
_STREAMS_LIMIT = 8
_SILENCE_S = 2.0
#: Maximum seconds that closing takes.
_POLL_S = 0.1
#: Seconds between two attempts to open a port that is in use.
_AGAIN_S = 1.0

_log = logging.getLogger(__name__)

TEXT = "text/plain; charset=utf-8"


class Asked(NamedTuple):
    """A request."""

    path: str
    #: Formats that the reader accepts, as stated in its request.
    accept: str
    #: Set when the server is closing, to end all streams.
    closing: threading.Event


class Answer(NamedTuple):
    """A complete answer, or a stream of parts, each of which is sent as soon as it has been produced."""

    body: bytes | Iterator[bytes]
    content_type: str = TEXT
    status: int = 200
    headers: Mapping[str, str] = {}


Handler = Callable[[Asked], Answer]


class HttpPage:
    """Answers requests on a port until it is closed.

    Args:
        name: Name of the page, for error messages.
        bind: Numeric address.
        port: Port; 0 for any free port.
        answer: Called in the thread of the request.
        tls: Paths of the authorities, the certificate and the key for TLS among members only; None for plain text.

    Raises:
        UsageError: the port is in use, or the files are unusable.
    """

    def __init__(
        self, name: str, bind: str, port: int, answer: Handler, tls: tuple[Path, Path, Path] | None = None
    ) -> None:
        try:
            self._server = _Server((bind, port), answer, None if tls is None else _context(tls))
        except OSError as error:  # also raised by TLS
            raise UsageError(f"the {name} cannot be served on {bind} port {port}: {error}") from None
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_POLL_S,), name="flightedl-http", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self._server.closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextlib.contextmanager
def patient_page(open_page: Callable[[], HttpPage]) -> Iterator[None]:
    """Serve a page during the block, as soon as its port is free. Entering the block never waits.

    A server can thus run without its page while another process, such as a frozen predecessor, occupies the port.
    """
    closing = threading.Event()
    with contextlib.ExitStack() as stack:

        def keep_trying() -> None:
            while not closing.wait(_AGAIN_S):
                with contextlib.suppress(UsageError):
                    stack.callback(open_page().close)
                    return

        try:
            stack.callback(open_page().close)
        except UsageError as error:
            _log.warning("%s; retrying", error)
            thread = threading.Thread(target=keep_trying, name="flightedl-http-port", daemon=True)
            thread.start()
            stack.callback(thread.join)
        stack.callback(closing.set)
        yield


def _context(tls: tuple[Path, Path, Path]) -> ssl.SSLContext:
    ca, cert, key = tls
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    context.load_verify_locations(ca)
    context.verify_mode = ssl.CERT_REQUIRED
    return context


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
    #: When closing, do not wait for requests in progress.
    block_on_close = False

    def __init__(self, address: tuple[str, int], answer: Handler, context: ssl.SSLContext | None) -> None:
        self.answer = answer
        self.closing = threading.Event()
        self.stream_places = threading.BoundedSemaphore(_STREAMS_LIMIT)
        self._context = context
        self._places = threading.BoundedSemaphore(_REQUESTS_LIMIT)
        self.address_family = family_of(address[0])
        super().__init__(address, _RequestHandler)

    def server_bind(self) -> None:
        """Bind without the host name lookup of the standard library, which may take seconds."""
        # Allow binding the port while the kernel still remembers connections of a predecessor.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
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

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Perform the handshake in the request's thread, so that a slow handshake does not delay other requests."""
        if self._context is None:
            super().finish_request(request, client_address)
            return
        request.settimeout(_SILENCE_S)
        with self._context.wrap_socket(request, server_side=True) as secured:
            super().finish_request(secured, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors caused by clients that have disconnected, and by unauthorized clients."""


class _RequestHandler(BaseHTTPRequestHandler):
    #: Connections are closed after this many seconds of inactivity.
    timeout = _SILENCE_S
    server: _Server

    def do_GET(self) -> None:
        server = self.server
        if not self._is_for_this_host():
            self.send_error(403, "ask for it as localhost")
            return
        asked = Asked(urlsplit(self.path).path, self.headers.get("Accept", ""), server.closing)
        found = server.answer(asked)
        if isinstance(found.body, bytes):
            self._begin(found, {"Content-Length": str(len(found.body))})
            self.wfile.write(found.body)
        elif server.stream_places.acquire(blocking=False):
            try:
                self._stream(found, found.body)
            finally:
                server.stream_places.release()
        else:
            self.send_error(503, "too many readers")

    def _is_for_this_host(self) -> bool:
        """False if a browser on this machine reached this page under another site's name (DNS rebinding)."""
        named = urlsplit(f"//{self.headers.get('Host', '')}").hostname
        address = str(self.server.server_address[0])
        return not is_loopback(address) or named in {None, "localhost"} or is_loopback(str(named))

    def _begin(self, found: Answer, more: Mapping[str, str]) -> None:
        self.send_response(found.status)
        self.send_header("Content-Type", found.content_type)
        for name, value in {"X-Content-Type-Options": "nosniff", **found.headers, **more}.items():
            self.send_header(name, value)
        self.end_headers()

    def _stream(self, found: Answer, parts: Iterator[bytes]) -> None:
        self._begin(found, {"Cache-Control": "no-store"})
        for part in parts:
            self.wfile.write(part)
            self.wfile.flush()

    def version_string(self) -> str:
        """Reveal no versions."""
        return "flightedl"

    def log_message(self, *_: Any) -> None:
        """Log nothing, because probes arrive every few seconds."""
