"""A line: a Unix socket that carries a stream's small messages between two processes of one host.

gRPC's threads take ten times as long for a message as the kernel takes to move its bytes. The Unix connection by which
both sides have exchanged memory (``same_host``) and proven who they are therefore stays open. It keeps messages apart
and in order, and loses none.

* From the first message on, every message of the stream comes by the line: whole, or, if it is too big, as a word that
  the next message is to be read from the stream. So there is one order.
* The kernel copies the values: nobody changes them between a check and the use. They hold until the next message.
* The stream decides about life and end: it has the deadline and brings the server's errors. A line that ends says only
  that there is something to hear on the stream, and it ends with the stream.
* Neither side waits for longer than a moment before it looks whether there is still a reason to wait.
* A client has no more under way than the kernel takes without a reader (``AHEAD_BYTES``), so it never waits to write
  while the server waits to write.

A message is its values, its header, ``uint32`` the header's length, and ``uint8`` its kind: 1 with values, maybe none;
2 a header alone; 0 the word that the next one comes by the stream.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections.abc import Callable, Sequence
from struct import Struct

import numpy as np

from flightedl.errors import MessageError

#: What is longer goes by the stream.
LIMIT_BYTES = 64 << 10
#: Of a client's messages that have no answer; each counts for more than it has, as in the kernel.
AHEAD_BYTES = 80 << 10
#: For so long it is waited without a look at whether there is still a reason to.
_LOOK_MS = 100
_TIME = Struct("@ll")
_NO_DATA: tuple[()] = ()
_ALIGNMENT_BYTES = 64
_END = Struct("<IB")
#: Limit of the values and the header of a message that goes by a line.
SMALL_BYTES = LIMIT_BYTES - _END.size
_BY_STREAM, _WITH_VALUES, _ALONE = range(3)

#: Values, None: there are none and cannot be; and a header.
LineMessage = tuple[memoryview | None, bytes]


class Line:
    """One end of a connection. For one thread, but for ``shut``.

    Args:
        connection: A Unix socket that keeps messages apart; closed with the line.
    """

    __slots__ = ("_buffer", "_connection", "_memory", "_writable")

    def __init__(self, connection: socket.socket) -> None:
        # The kernel waits for messages. It does not wait for room: a socket with a time limit would take no more while
        # a quarter of what it may keep is there.
        connection.setblocking(True)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIME.pack(0, _LOOK_MS * 1000))
        self._connection = connection
        self._writable = select.poll()
        self._writable.register(connection, select.POLLOUT)
        # One byte more than it may have, by which a longer one is known.
        raw = np.empty(LIMIT_BYTES + 1 + _ALIGNMENT_BYTES, np.uint8)
        start = -raw.ctypes.data % _ALIGNMENT_BYTES
        self._buffer = raw[start : start + LIMIT_BYTES + 1].data
        self._memory = self._buffer.toreadonly()

    @property
    def fileno(self) -> int:
        """The socket's descriptor."""
        return self._connection.fileno()

    def send(
        self, values: Sequence[memoryview] | None, header: bytes, is_over: Callable[[], bool] | None = None
    ) -> bool:
        """Send a message. An empty header without values announces that the next message comes by the stream.

        Args:
            values: Of the message; None if it has none and can have none.
            header: Of the message.
            is_over: True if there is no reason to wait for room any longer; None: do not wait.

        Returns:
            False if the other end is closed, or ``is_over`` says so.

        Raises:
            BlockingIOError: there is no room, and ``is_over`` is None.
        """
        if values is None:
            parts: Sequence[bytes | memoryview] = (header, _END.pack(len(header), _ALONE if header else _BY_STREAM))
        else:
            parts = (*values, header, _END.pack(len(header), _WITH_VALUES))
        while True:
            try:
                self._connection.sendmsg(parts, _NO_DATA, socket.MSG_DONTWAIT)
            except BlockingIOError:
                if is_over is None:
                    raise
                if not self._writable.poll(_LOOK_MS) and is_over():
                    return False
            except OSError:
                return False
            else:
                return True

    def receive(self, is_over: Callable[[], bool] | None = None) -> LineMessage | None:
        """Return the next message, whose values hold until the one after it.

        Returns:
            ``(None, b"")`` if the message comes by the stream; None if the other end is closed, or ``is_over`` says so.

        Raises:
            MessageError: what came is no message.
            BlockingIOError: nothing has come, and ``is_over`` is None.
        """
        flags = socket.MSG_DONTWAIT if is_over is None else 0
        while True:
            try:
                size_bytes = self._connection.recv_into(self._buffer, 0, flags)
                break
            except BlockingIOError:
                if is_over is None:
                    raise
                if is_over():
                    return None
            except OSError:
                return None
        if not size_bytes:
            return None
        stop = size_bytes - _END.size
        if stop < 0 or size_bytes > LIMIT_BYTES:
            raise MessageError(f"a message of {size_bytes} bytes or more came by a line")
        length, kind = _END.unpack_from(self._memory, stop)
        start = stop - length
        if start < 0 or kind > _ALONE or (kind != _WITH_VALUES and start) or (kind == _BY_STREAM and length):
            raise MessageError(f"a message of {size_bytes} bytes by a line says to be {kind} with {length} of header")
        return (self._memory[:start] if kind == _WITH_VALUES else None), bytes(self._memory[start:stop])

    def shut(self) -> None:
        """End the waits at both ends: the line is over. For any thread."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Let go of it; the other end finds out."""
        self._connection.close()


class Lines:
    """The lines of a connection's streams. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of: dict[object, Line] = {}
        self._are_shut = False

    def add(self, stream: object, line: Line) -> None:
        """Note that a stream has a line from now on."""
        with self._lock:
            self._of[stream] = line
            if self._are_shut:
                line.shut()

    def end(self, stream: object) -> None:
        """Close the line of a stream that is over, if it has one. For the stream's own thread."""
        with self._lock:
            if (found := self._of.pop(stream, None)) is not None:
                found.close()

    def shut(self) -> None:
        """End all waits at lines, because all streams are about to end."""
        with self._lock:
            self._are_shut = True
            for line in self._of.values():
                line.shut()
