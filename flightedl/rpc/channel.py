"""Channel: one end of an open stream of messages made of parts (``wire.parts``), regardless of what carries them.

* The Flight stream carries messages in record batches. It carries small messages in metadata alone if the peer also
  sends such messages.
* Two processes on the same host have a line (``rpc.line``) and shared memory (``wire.shared_values``). Large values are
  placed in the memory if there is room, and the message contains their offset. The line carries small messages and
  announces large ones, which follow on the Flight stream.

The subclasses for client and server differ in the meaning of a closed line, and in how they learn that the peer has
consumed values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn, Protocol

import pyarrow as pa

from flightedl.rpc.call import Message
from flightedl.rpc.line import SMALL_BYTES, Line
from flightedl.wire.parts import ReceivedBlocks, batch_of
from flightedl.wire.shared_values import Inbox, Outbox

#: A received message: its values, or None if the message cannot have any; and its metadata.
ValuesMessage = tuple[pa.RecordBatch | memoryview | None, bytes | None]
#: Parts of a message, and its attached bytes.
Received = tuple[list[ReceivedBlocks], bytes]


class MessageStream(Protocol):
    """One end of a bidirectional Flight stream."""

    columns: Sequence[pa.Array]

    def read(self) -> Message | None:
        """Return the next message, or None if the peer sends no more."""
        ...

    def write(self, batch: pa.RecordBatch, metadata: bytes | None = None, *, size_bytes: int | None = None) -> object:
        """Send a batch with metadata."""
        ...

    def write_metadata(self, metadata: bytes) -> None:
        """Send metadata alone."""
        ...


class Channel:
    """One end of a stream. For one thread at a time.

    Args:
        exchange: The Flight stream.
        is_inline: True to send small messages in metadata alone if no memory is shared.
    """

    __slots__ = ("_exchange", "_inbox", "_is_inline", "_line", "_outbox")

    def __init__(self, exchange: MessageStream, *, is_inline: bool) -> None:
        self._exchange = exchange
        self._is_inline = is_inline
        self._line: Line | None = None
        self._outbox: Outbox | None = None
        self._inbox: Inbox | None = None

    def _share(self, line: Line, outbox: Outbox, inbox: Inbox) -> None:
        """Start using a line and shared memory."""
        self._line, self._outbox, self._inbox = line, outbox, inbox

    def _post(self, values: Sequence[memoryview] | None, header: bytes, size_bytes: int) -> None:
        """Send an encoded message, or metadata alone if ``values`` is None."""
        line = self._line
        if line is not None:
            is_small = size_bytes + len(header) <= SMALL_BYTES
            if not (line.send(values, header, self.is_over) if is_small else line.send(None, b"", self.is_over)):
                self._line_ended()
            if is_small:
                return
        if values is None:
            self._exchange.write_metadata(header)
        else:
            self._exchange.write(batch_of(values), header, size_bytes=size_bytes)

    def _next(self) -> ValuesMessage | None:
        """Return the next message undecoded, or None if the peer sends no more."""
        line = self._line
        if line is None:
            return self._exchange.read()
        message = line.receive(self.is_over)
        if message is None:
            self._line_ended()
        return self._exchange.read() if message[0] is None and not message[1] else message

    def is_over(self) -> bool:
        """Return True if there is no reason to keep waiting on the line."""
        raise NotImplementedError

    def _line_ended(self) -> NoReturn:
        """Raise the reason why the line was closed, or why the wait has ended."""
        raise NotImplementedError
