"""A TCP proxy that breaks connections in the same ways as networks and dying processes.

One thread serves all connections with a selector. Methods that cause faults may be called from any thread. Faults
affect open connections and, unless documented otherwise, new connections until ``heal`` is called.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

_POLL_S = 0.01
_CHUNK_BYTES = 256 * 1024
_BUFFER_LIMIT_BYTES = 4 << 20
#: Seconds between swallowing the first byte of a reply and cutting the connection.
_SWALLOW_S = 0.2


class TcpProxy:
    """A proxy that listens on 127.0.0.1 and forwards to ``target`` (``host:port``). A context manager."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._selector = selectors.DefaultSelector()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self._listener.setblocking(False)
        self._port = int(self._listener.getsockname()[1])
        self._lock = threading.RLock()
        self._pairs: list[_Pair] = []
        self._delay_s = 0.0
        #: True if the connection from this client port must be reset.
        self.is_refused: Callable[[int], bool] = lambda _port: False
        self._is_refusing = False
        self._is_half_open = False
        self._is_swallowing = False
        self._flip_in: int | None = None
        self._swallowed = threading.Event()
        self._flipped = threading.Event()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="flightedl-proxy", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_closed = True
        self._thread.join()
        self.cut()
        self._listener.close()
        self._selector.close()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._port}"

    # --- faults ---

    def heal(self) -> None:
        """Stop causing faults: forward all data unchanged, and cut half-open connections."""
        with self._lock:
            if self._is_half_open:
                self.cut()
            self._delay_s = 0.0
            self._is_refusing = self._is_half_open = self._is_swallowing = False
            self._flip_in = None

    def forget(self) -> None:
        """After ``half_open``, forward new connections. Existing connections stay open and silent forever."""
        with self._lock:
            self._is_half_open = False
            for pair in self._pairs:
                pair.is_silent = True

    def redirect(self, target: str) -> None:
        """Reset all open connections, and forward new ones to another ``host:port``."""
        host, _, port = target.rpartition(":")
        with self._lock:
            self._target = (host, int(port))
            self.cut()

    def cut(self) -> None:
        """Reset all open connections, but accept new ones."""
        with self._lock:
            for pair in list(self._pairs):
                self._drop(pair)

    def refuse(self) -> None:
        """Reset all open connections. From now on, also reset every new connection immediately."""
        with self._lock:
            self._is_refusing = True
            self.cut()

    def delay(self, seconds: float) -> None:
        """Delay all data in both directions by ``seconds``."""
        with self._lock:
            self._delay_s = seconds

    def cut_after_request(self) -> None:
        """Forward the next request, swallow the server's reply, and reset that connection. Happens once."""
        with self._lock:
            self._swallowed.clear()
            self._is_swallowing = True

    def half_open(self) -> None:
        """Stop forwarding in both directions, but close no connections: a silent partition."""
        with self._lock:
            self._is_half_open = True

    def flip_bit(self, smallest_bytes: int = 1) -> None:
        """Flip a bit in the middle of the client's next chunk of at least ``smallest_bytes`` bytes. Happens once."""
        with self._lock:
            self._flipped.clear()
            self._flip_in = smallest_bytes

    def wait_until_cut(self, timeout_s: float) -> bool:
        """True once ``cut_after_request`` has cut a connection; False after the timeout."""
        return self._swallowed.wait(timeout_s)

    def wait_until_flipped(self, timeout_s: float) -> bool:
        """True once ``flip_bit`` has flipped its bit; False after the timeout."""
        return self._flipped.wait(timeout_s)

    # --- the thread ---

    def _run(self) -> None:
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        while not self._is_closed:
            for key, _ in self._selector.select(_POLL_S if self._pairs else 5 * _POLL_S):
                with self._lock:
                    if key.data is None:
                        self._accept()
                    elif not key.data.pair.is_dropped:
                        self._receive(key.data)
            now = time.monotonic()
            with self._lock:
                for pair in list(self._pairs):
                    self._serve(pair, now)
                is_blocked = self._is_half_open or any(pair.is_blocked for pair in self._pairs)
            if is_blocked:
                time.sleep(_POLL_S)

    def _accept(self) -> None:
        client, (_, port) = self._listener.accept()
        if self._is_refusing or self.is_refused(port):
            _reset(client)
            return
        try:
            server = socket.create_connection(self._target, timeout=1.0)
        except OSError:
            _reset(client)
            return
        pair = _Pair(client, server)
        self._pairs.append(pair)
        for way in pair.ways:
            way.source.setblocking(False)
            way.source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._selector.register(way.source, selectors.EVENT_READ, way)

    def _receive(self, way: _Way) -> None:
        if self._is_half_open or way.pair.is_silent or way.is_full:
            return
        pair = way.pair
        try:
            data = way.source.recv(_CHUNK_BYTES)
        except BlockingIOError:
            return
        except OSError:
            self._drop(pair)
            return
        now = time.monotonic()
        if data and way is pair.up and self._is_swallowing:
            self._is_swallowing = False
            pair.is_swallowing = True
        elif data and way is pair.down and pair.is_swallowing:
            pair.cut_at = pair.cut_at or now + _SWALLOW_S
            return
        if way is pair.up and self._flip_in is not None and len(data) >= self._flip_in:
            self._flip_in = None
            middle = len(data) // 2
            data = data[:middle] + bytes((data[middle] ^ 4,)) + data[middle + 1 :]
            self._flipped.set()
        if not data:
            self._selector.unregister(way.source)
        way.chunks.append((now + self._delay_s, data))

    def _serve(self, pair: _Pair, now: float) -> None:
        if pair.cut_at is not None and now >= pair.cut_at:
            self._drop(pair)
            self._swallowed.set()
            return
        if self._is_half_open or pair.is_silent:
            return
        try:
            for way in pair.ways:
                way.send_due(now)
        except OSError:
            self._drop(pair)
            return
        if all(way.is_ended for way in pair.ways):
            self._drop(pair)

    def _drop(self, pair: _Pair) -> None:
        pair.is_dropped = True
        self._pairs.remove(pair)
        for way in pair.ways:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(way.source)
            _reset(way.source)


class _Way:
    """One direction of a connection."""

    def __init__(self, pair: _Pair, source: socket.socket, sink: socket.socket) -> None:
        self.pair = pair
        self.source = source
        self.sink = sink
        #: (time at which to forward, data) for pending chunks. Empty data marks the end of the stream.
        self.chunks: list[tuple[float, bytes]] = []
        self.is_ended = False

    @property
    def is_full(self) -> bool:
        return sum(len(data) for _, data in self.chunks) > _BUFFER_LIMIT_BYTES

    def send_due(self, now: float) -> None:
        while self.chunks and self.chunks[0][0] <= now:
            due, data = self.chunks[0]
            if not data:
                self.sink.shutdown(socket.SHUT_WR)
                self.is_ended = True
                self.chunks.clear()
                return
            try:
                sent = self.sink.send(data)
            except BlockingIOError:
                return
            if sent < len(data):
                self.chunks[0] = (due, data[sent:])
                return
            self.chunks.pop(0)


class _Pair:
    """A client's connection, and the proxy's own connection to the target."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self.up = _Way(self, client, server)
        self.down = _Way(self, server, client)
        self.ways = (self.up, self.down)
        self.is_dropped = False
        self.is_swallowing = False
        self.is_silent = False
        self.cut_at: float | None = None

    @property
    def is_blocked(self) -> bool:
        return self.is_silent or self.up.is_full or self.down.is_full


def _reset(connection: socket.socket) -> None:
    """Close the connection so that the peer sees a reset."""
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    connection.close()
