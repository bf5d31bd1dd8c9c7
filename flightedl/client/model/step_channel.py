"""Channel for steps to one pserver: a stream that stays open from step to step (``rpc.channel``).

If the pserver runs on the same host, the stream shares memory with it and gets a line (``rpc.same_host``) before the
first step. If memory cannot be shared, the reason is logged once, and values travel over TCP.

Messages are exchanged in lock-step, with only a few messages unanswered at any time. This keeps data in the processor's
cache, and limits the unanswered bytes, so that the two sides cannot deadlock. A message larger than the limit is sent
alone. Shared memory is freed one exchange later: an answer frees the memory of its message, and is itself freed by the
next answer.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NoReturn

from flightedl.errors import OutcomeUnknownError, UnavailableError
from flightedl.marks import sometimes
from flightedl.ports import Clock
from flightedl.process.shared_memory import SharedMemory
from flightedl.rpc.channel import Channel, Received
from flightedl.rpc.client import Connection
from flightedl.rpc.client_streams import ClientExchange
from flightedl.rpc.line import AHEAD_BYTES, SMALL_BYTES
from flightedl.rpc.reuse import ReusableExchange
from flightedl.rpc.same_host import NotSharedError, SharedPair, ask_to_share
from flightedl.wire.parts import (
    PARTS_LIMIT,
    STEP_SCHEMA,
    EncodedMessage,
    Place,
    decode_message,
    encode_message,
    place_of,
)
from flightedl.wire.rows import OutgoingBlocks
from flightedl.wire.shared_values import Inbox, Outbox

_log = logging.getLogger(__name__)

#: Maximum bytes of unanswered messages on the stream. On some machines, limits of 8 MiB and more led to deadlocks;
#: limits of up to 6 MiB never did.
LOCK_STEP_LIMIT_BYTES = 4 << 20
#: Kernel overhead of one message on a line, in bytes.
_OVERHEAD_BYTES = 1 << 10
#: Maximum bytes of values in a joined message. Joining saves time if the values are in shared memory.
_JOINED_BYTES = 4 << 20
#: When messages are joined, at least this many remain per step, so that both sides can work simultaneously.
_MESSAGES = 2


class StepChannel:
    """The connection that carries steps to one pserver.

    ``begin`` returns the open stream for one step, and ``close_idle`` closes the stream; see ``ReusableExchange``.

    Args:
        index: Index of the pserver, for messages.
        clock: Clock for the deadlines of streams.
        step_bytes: Bytes of values in a step.
        ahead: Maximum number of unanswered messages.
        gradients: Returns the memory from which gradients are lent; None if no gradients are lent.
    """

    def __init__(
        self,
        index: int,
        clock: Clock,
        *,
        step_bytes: int,
        ahead: int = 2,
        gradients: Callable[[], SharedMemory | None] = lambda: None,
    ) -> None:
        self._gradients = gradients
        self._joined_bytes = min(_JOINED_BYTES, step_bytes // _MESSAGES)
        self._ahead = ahead
        self._index = index
        self._clock = clock
        self._kept = ReusableExchange("step", STEP_SCHEMA, clock, self._opened)
        #: Most recent connection to a server that does not share memory.
        self._unshared: Connection | None = None
        self.begin = self._kept.begin
        self.close_idle = self._kept.close_idle

    def end(self, stream: StepStream, error: BaseException | None = None) -> None:
        """Keep the stream if its step has been answered completely. After a failed step, end the stream."""
        if error is not None or stream.is_borrowing or not stream.is_answered:
            stream.rest(error)
        self._kept.end(stream, error)

    def _opened(self, connection: Connection, exchange: ClientExchange, old_at: float, ends_at: float) -> StepStream:
        stream = StepStream(connection, exchange, old_at, ends_at, self._clock.now, self._ahead)
        if connection.shares_memory and self._unshared is not connection:
            try:
                stream.share(ask_to_share(exchange, self._gradients()), self._joined_bytes)
            except NotSharedError as error:
                sometimes("a stream did without shared memory")
                self._unshared = connection
                _log.debug("values from and to pserver %d are sent by TCP: %s", self._index, error)
        return stream


class StepStream(Channel):
    """Client's end of an open stream, which carries one step after another.

    For each step, call ``send`` for every message, ``receive`` while ``is_full`` is true, and ``receive`` for the
    remaining answers at the end.

    Args:
        connection: Connection to the pserver.
        exchange: The Flight stream.
        old_at: Time after which the stream accepts no more steps.
        ends_at: Deadline of the stream.
        now: The process's clock.
        ahead: Maximum number of unanswered messages.
    """

    __slots__ = (
        "_ahead",
        "_by_line",
        "_by_stream",
        "_joined_bytes",
        "_now",
        "_pair",
        "_pending",
        "_unanswered",
        "connection",
        "ends_at",
        "exchange",
        "is_answered",
        "is_borrowing",
        "is_full",
        "old_at",
    )

    def __init__(
        self,
        connection: Connection,
        exchange: ClientExchange,
        old_at: float,
        ends_at: float,
        now: Callable[[], float],
        ahead: int,
    ) -> None:
        super().__init__(exchange, is_inline=True)
        self.connection = connection
        self.exchange = exchange
        self.old_at = old_at
        self.ends_at = ends_at
        self._now = now
        self._ahead = ahead
        self._joined_bytes = 0
        self._pair: SharedPair | None = None
        #: For each unanswered message: its size on the line, its size on the stream, and True if its values are in
        #: shared memory
        self._unanswered: deque[tuple[int, int, bool]] = deque()
        self._by_line = self._by_stream = 0
        #: An encoded message that is held back until earlier messages have been answered.
        self._pending: tuple[EncodedMessage, int, int] | None = None
        #: True if an answer must be received before the next message can be sent.
        self.is_full = False
        #: True if all sent messages have been answered.
        self.is_answered = True
        #: True if the most recent answer's values are still in the pserver's memory.
        self.is_borrowing = False

    def share(self, pair: SharedPair, joined_bytes: int) -> None:
        """Start using shared memory.

        Args:
            pair: The memory of both sides, and the line.
            joined_bytes: Maximum bytes of values in messages that are joined.
        """
        self._pair = pair
        self._joined_bytes = joined_bytes
        self._is_inline = False
        store = None if pair.store is None else pair.store.values
        lent = None if pair.gradients is None else pair.gradients.values
        self._share(pair.line, Outbox(pair.own.values, store=lent), Inbox(pair.other.values, store))

    def send(self, pieces: Sequence[OutgoingBlocks], attached: bytes = b"", *, checksums: bool) -> None:
        """Send a message. If there is no room for it yet, hold it back until an answer has been received.

        Args:
            pieces: Content of the message.
            attached: The step's request, in the first message only.
            checksums: True if the values have checksums.
        """
        line = self._line
        message = encode_message(pieces, attached, checksums=checksums, outbox=self._outbox, inline=self._is_inline)
        _, header, size_bytes = message
        if line is None:
            by_line, by_stream = 0, size_bytes
        elif size_bytes + len(header) <= SMALL_BYTES:
            by_line, by_stream = _OVERHEAD_BYTES + size_bytes + len(header), 0
        else:
            by_line, by_stream = _OVERHEAD_BYTES, size_bytes
        self.is_answered = False
        if self._unanswered and not self._has_room(by_line, by_stream):
            self._pending = message, by_line, by_stream
            self.is_full = True
            return
        self._post_counted(message, by_line, by_stream)
        self.is_full = len(self._unanswered) >= self._ahead

    def receive(self) -> Received:
        """Drop the previous answer's values. Return the next answer's parts, and the bytes attached to it.

        Raises:
            FlightedlError: the server's error.
            OutcomeUnknownError: the server ended the stream before the step was answered completely.
        """
        if self.is_borrowing:
            self._give_back()
        message = self._next()
        if message is None:
            # Raises the server's error.
            self.exchange.answer()
            raise AssertionError("unreachable")
        if self._unanswered:
            by_line, by_stream, is_in_memory = self._unanswered.popleft()
            self._by_line -= by_line
            self._by_stream -= by_stream
            if is_in_memory and self._outbox is not None:
                self._outbox.consumed(1)
            if self._pending is not None and (not self._unanswered or self._has_room(*self._pending[1:])):
                pending, self._pending = self._pending, None
                self._post_counted(*pending)
            self.is_answered = not self._unanswered
            self.is_full = self._pending is not None or len(self._unanswered) >= self._ahead
        batch, packed = message
        if batch is None:
            place = place_of(packed)
            if place is Place.BATCH:
                return [], packed or b""
            self.is_borrowing = place is Place.MEMORY
        return decode_message(batch, packed, self.exchange.columns, self._inbox)

    def require_lent(self) -> None:
        """Check that the values in the pserver's memory were still valid after they were copied.

        Raises:
            UnavailableError: the pserver has ended the stream in the meantime, and may have changed the values.
        """
        if self.is_borrowing and self._pair is not None and self._pair.other.is_over:
            raise UnavailableError("the stream ended while values were read: they may be a mixture of two versions")

    def joined(self, messages: Iterable[Sequence[OutgoingBlocks]]) -> Iterable[Sequence[OutgoingBlocks]]:
        """Join messages whose values are in shared memory: the messages themselves take longer than their values."""
        return messages if self._pair is None else _joined(messages, self._joined_bytes)

    def rest(self, error: BaseException | None = None) -> None:
        """End a step. Pass ``error`` if the step failed."""
        if error is not None:
            if self._pair is not None:
                # The server may still be reading the shared gradients, which the caller is about to overwrite.
                self._pair.own.end()
            # Release the memory: a caller may keep the error, whose stack frames refer to this object.
            self._pair = self._outbox = self._inbox = None
            self.is_borrowing = False
        elif self.is_borrowing:
            self._give_back()
        if self._unanswered:
            # The server ended the step before it had received all messages.
            self._unanswered.clear()
            self._pending, self._by_line, self._by_stream = None, 0, 0
            self.is_answered, self.is_full = True, False

    def _has_room(self, by_line: int, by_stream: int) -> bool:
        return self._by_line + by_line <= AHEAD_BYTES and self._by_stream + by_stream <= LOCK_STEP_LIMIT_BYTES

    def _post_counted(self, message: EncodedMessage, by_line: int, by_stream: int) -> None:
        self._unanswered.append((by_line, by_stream, message[0] is None))
        self._by_line += by_line
        self._by_stream += by_stream
        self._post(*message)

    def _give_back(self) -> None:
        self.is_borrowing = False
        assert self._pair is not None, "no memory is borrowed"
        self._pair.own.consumed += 1

    def is_over(self) -> bool:
        return self._now() > self.ends_at

    def _line_ended(self) -> NoReturn:
        # Raise the server's error, or the reason why the stream ended.
        sometimes("a line ended before its stream")
        self.exchange.answer()
        raise OutcomeUnknownError("the server has ended the line, but not the stream")


def _joined(messages: Iterable[Sequence[OutgoingBlocks]], limit_bytes: int) -> Iterator[Sequence[OutgoingBlocks]]:
    joined: list[OutgoingBlocks] = []
    total_bytes = 0
    for pieces in messages:
        size_bytes = sum(piece.size_bytes for piece in pieces)
        if joined and (total_bytes + size_bytes > limit_bytes or len(joined) + len(pieces) > PARTS_LIMIT):
            yield joined
            joined, total_bytes = [], 0
        joined.extend(pieces)
        total_bytes += size_bytes
    if joined:
        yield joined
