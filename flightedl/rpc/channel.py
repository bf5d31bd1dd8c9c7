"""Channel: one end of an open stream of messages (``wire.parts``). It hides how messages are transported.

* The Flight stream carries messages as record batches. This end sends small messages as metadata without a batch if the
  peer does.
* Two processes on the same host also have a line (``rpc.line``) and shared memory (``wire.shared_values``). Large
  values are placed in shared memory if it has room, and the message contains their offset. The line carries small
  messages. It also announces large messages, which follow on the Flight stream.

The subclasses for client and server differ in the meaning of a closed line, and in how they learn that the peer has
consumed values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

import pyarrow as pa

from flightedl.rpc.line import SMALL_BYTES, Line
from flightedl.wire.parts import ReceivedBlocks, batch_of
from flightedl.wire.shared_values import Inbox, Outbox

if TYPE_CHECKING:
    from flightedl.rpc.client_streams import ClientExchange
    from flightedl.rpc.streams import Exchange

#: A received message: its values (None if it cannot have values) and its metadata.
ValuesMessage = tuple[pa.RecordBatch | memoryview | None, bytes | None]
#: The parts of a message and the bytes attached to the message.
Received = tuple[list[ReceivedBlocks], bytes]


class Channel:
    """One end of a stream. Only one thread at a time may use it.

    Args:
        exchange: The Flight stream.
        is_inline: True to send small messages in metadata alone if no memory is shared.
    """

    __slots__ = ("_exchange", "_inbox", "_is_inline", "_line", "_outbox")

    def __init__(self, exchange: Exchange | ClientExchange, *, is_inline: bool) -> None:
        self._exchange = exchange
        self._is_inline = is_inline
        self._line: Line | None = None
        self._outbox: Outbox | None = None
        self._inbox: Inbox | None = None

    def _share(self, line: Line, outbox: Outbox, inbox: Inbox) -> None:
        """Start using this line and shared memory."""
        self._line, self._outbox, self._inbox = line, outbox, inbox

    def _post(self, values: Sequence[memoryview] | None, header: bytes, size_bytes: int) -> None:
        """Send an encoded message, or metadata without a batch if ``values`` is None."""
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
        """Return the next message without decoding it, or None if the peer has sent its last one."""
        line = self._line
        if line is None:
            return self._exchange.read()
        message = line.receive(self.is_over)
        if message is None:
            self._line_ended()
        return self._exchange.read() if message[0] is None and not message[1] else message

    def is_over(self) -> bool:
        """Return True if there is no point in waiting on the line any longer."""
        raise NotImplementedError

    def _line_ended(self) -> NoReturn:
        """Raise the error that closed the line or ended the wait."""
        raise NotImplementedError
