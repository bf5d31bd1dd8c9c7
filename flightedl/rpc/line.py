"""A line: a Unix socket that carries a stream's small messages between two processes on the same host.

gRPC's threads take ten times as long to pass on a message as the kernel takes to copy its bytes. Therefore the two
processes keep the Unix connection on which they authenticated each other and exchanged memory (``same_host``). The
connection preserves the boundaries and the order of messages, and loses none.

* The line determines the order of the stream's messages. A small message is sent on the line itself. For a large
  message, the line carries a marker, and the message follows on the Flight stream.
* The kernel copies the values, so the sender cannot change them after they have been checked. They are valid until the
  next message arrives.
* The Flight stream enforces the deadline and carries the server's errors. If the line ends, the reason is available
  from the stream. The line is closed with the stream.
* A side that waits on the line checks every ``_LOOK_MS`` if there is still a reason to wait.
* A client never has more unanswered bytes than the kernel buffers while nobody reads (``AHEAD_BYTES``). So client and
  server never wait for buffer space at the same time.

A message consists of its values, its header, the length of the header (``uint32``), and the kind (``uint8``): 1 for
values (possibly empty) with a header, 2 for a header alone, and 0 for the marker of a message on the stream.
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

#: Maximum size of a message on a line. Larger messages travel on the stream.
LIMIT_BYTES = 64 << 10
#: Maximum bytes of a client's unanswered messages, including the kernel's overhead per message.
AHEAD_BYTES = 80 << 10
#: Polling interval, in milliseconds, of a waiting side, which checks if there is still a reason to wait.
_LOOK_MS = 100
_TIME = Struct("@ll")
_NO_DATA: tuple[()] = ()
_ALIGNMENT_BYTES = 64
_END = Struct("<IB")
#: Maximum bytes of values and header in a message on a line.
SMALL_BYTES = LIMIT_BYTES - _END.size
_BY_STREAM, _WITH_VALUES, _ALONE = range(3)

#: The values of a message (None if its kind has no values) and its header.
LineMessage = tuple[memoryview | None, bytes]


class Line:
    """One end of a line. Only one thread may use it, but any thread may call ``shut``.

    Args:
        connection: A Unix socket that preserves message boundaries. The line owns and closes it.
    """

    __slots__ = ("_buffer", "_connection", "_memory", "_writable")

    def __init__(self, connection: socket.socket) -> None:
        # Receiving blocks in the kernel, but sending does not: a socket with a timeout would refuse messages while a
        # quarter of its buffer is in use.
        connection.setblocking(True)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIME.pack(0, _LOOK_MS * 1000))
        self._connection = connection
        self._writable = select.poll()
        self._writable.register(connection, select.POLLOUT)
        # One byte larger than the largest allowed message, so that a larger message is detected.
        raw = np.empty(LIMIT_BYTES + 1 + _ALIGNMENT_BYTES, np.uint8)
        start = -raw.ctypes.data % _ALIGNMENT_BYTES
        self._buffer = raw[start : start + LIMIT_BYTES + 1].data
        self._memory = self._buffer.toreadonly()

    @property
    def fileno(self) -> int:
        return self._connection.fileno()

    def send(
        self, values: Sequence[memoryview] | None, header: bytes, is_over: Callable[[], bool] | None = None
    ) -> bool:
        """Send a message. An empty header without values announces a message on the stream.

        Args:
            values: Values of the message; None if it cannot have values.
            header: Header of the message.
            is_over: Returns True if there is no reason to wait for room any longer. None to not wait at all.

        Returns:
            False if the peer has closed the line, or ``is_over`` has returned True.

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
        """Receive the next message.

        Returns:
            The message, whose values are valid until the next call. ``(None, b"")`` if the message follows on the
            stream. None if the peer has closed the line, or ``is_over`` has returned True.

        Raises:
            MessageError: the message is invalid.
            BlockingIOError: no message has arrived, and ``is_over`` is None.
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
            raise MessageError(f"a message on a line has {size_bytes} bytes or more")
        length, kind = _END.unpack_from(self._memory, stop)
        start = stop - length
        if start < 0 or kind > _ALONE or (kind != _WITH_VALUES and start) or (kind == _BY_STREAM and length):
            raise MessageError(f"a message of {size_bytes} bytes on a line has kind {kind} and a header of {length}")
        return (self._memory[:start] if kind == _WITH_VALUES else None), bytes(self._memory[start:stop])

    def shut(self) -> None:
        """Shut down the line, which unblocks both ends. Any thread may call this."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close this end of the line. The peer notices that it was closed."""
        self._connection.close()


class Lines:
    """Lines of all streams on a connection. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of: dict[object, Line] = {}
        self._are_shut = False

    def add(self, stream: object, line: Line) -> None:
        with self._lock:
            self._of[stream] = line
            if self._are_shut:
                line.shut()

    def end(self, stream: object) -> None:
        """Close the line, if any, of a stream that has ended. Must be called by the stream's thread."""
        with self._lock:
            if (found := self._of.pop(stream, None)) is not None:
                found.close()

    def shut(self) -> None:
        """Shut down all lines, because all streams are being ended."""
        with self._lock:
            self._are_shut = True
            for line in self._of.values():
                line.shut()
