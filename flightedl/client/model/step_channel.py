"""Channel for the messages of steps to one pserver: a stream that stays open, and memory that both sides map.

A stream to a pserver on the same host shares memory from its first message on (``rpc.same_host``). Values for which
there is room lie in that memory, and messages only say where; small messages travel by a line beside the stream
(``rpc.lock_step`` moves both). Where memory cannot be shared, the reason is logged once and values travel by TCP: those
of small messages in their metadata, others in record batches.

In lock-step an answer says that the pserver has what the message brought, so the message's memory is free. The memory
of an answer is free when the next answer is asked for; a counter in the memory says so.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Self

from flightedl.errors import UnavailableError
from flightedl.ports import Clock
from flightedl.rpc.client import Connection
from flightedl.rpc.client_streams import ClientExchange
from flightedl.rpc.lock_step import Carrier, LineCarrier, StreamCarrier, lock_step
from flightedl.rpc.reuse import HeldStream, ReusableExchange
from flightedl.rpc.same_host import NotSharedError, SharedPair, ask_to_share
from flightedl.wire.parts import (
    PARTS_LIMIT,
    STEP_SCHEMA,
    EncodedMessage,
    Place,
    ReceivedBlocks,
    batch_of,
    decode_message,
    encode_message,
    place_of,
)
from flightedl.wire.rows import OutgoingBlocks
from flightedl.wire.shared_values import Inbox, Outbox

_log = logging.getLogger(__name__)

#: Limit of the values of several messages that travel as one, where they are in memory: a message costs time.
_JOINED_BYTES = 4 << 20
#: Least number of messages of a step then: both sides are to work on different ones.
_MESSAGES = 2


class _Shared:
    """The memory of one stream, from the trainer's side."""

    def __init__(self, pair: SharedPair) -> None:
        self.pair = pair
        self.outbox = Outbox(pair.own.values)
        self.inbox = Inbox(pair.other.values, None if pair.store is None else pair.store.values)


class StepChannel:
    """The way to one pserver. For one thread at a time.

    Args:
        index: Of the pserver, for people.
        clock: For the time of streams.
        step_bytes: Bytes of the values of a step.
    """

    def __init__(self, index: int, clock: Clock, *, step_bytes: int) -> None:
        self._joined_bytes = min(_JOINED_BYTES, step_bytes // _MESSAGES)
        self._index = index
        self._clock = clock
        self._kept = ReusableExchange("step", STEP_SCHEMA, clock, self._opened)
        #: The newest connection whose server shares no memory.
        self._unshared: Connection | None = None

    def close_idle(self) -> None:
        """Let go of the stream."""
        self._kept.close_idle()

    def use(self, connection: Connection, *, timeout_s: float) -> StepStream:
        """Return the open stream, for one request in a ``with`` block; see ``ReusableExchange.use``."""
        held = self._kept.begin(connection, timeout_s=timeout_s)
        stream: StepStream = held.greeted
        stream.lent = held, self._kept.end
        return stream

    def _opened(self, connection: Connection, exchange: ClientExchange) -> StepStream:
        if connection.shares_memory and self._unshared is not connection:
            try:
                pair = ask_to_share(exchange)
            except NotSharedError as error:
                self._unshared = connection
                _log.debug("values from and to pserver %d travel by TCP: %s", self._index, error)
            else:
                carrier = LineCarrier(pair.line, exchange, self._clock, batch_of)
                return StepStream(exchange, carrier, _Shared(pair), self._joined_bytes)
        return StepStream(exchange, StreamCarrier(exchange, batch_of))


class StepStream:
    """An open stream that carries one request, answered completely, after the other.

    Args:
        exchange: The Flight stream.
        carrier: Moves its messages.
        shared: Memory of both sides; None if there is none.
        joined_bytes: Limit of the values of several messages that travel as one, where they are in memory.
    """

    def __init__(
        self, exchange: ClientExchange, carrier: Carrier, shared: _Shared | None = None, joined_bytes: int = 0
    ) -> None:
        self._joined_bytes = joined_bytes
        self._exchange = exchange
        self._carrier = carrier
        self._shared = shared
        #: For each unanswered message: True if its values are in memory.
        self._unanswered: deque[bool] = deque()
        #: True while a request has messages that were not sent.
        self._is_sending = False
        #: While a request is under way; None between requests, so that the held stream and this do not keep each other.
        self.lent: tuple[HeldStream, Callable[[HeldStream, BaseException | None], None]] | None = None
        #: True if the newest answer's values lie in the pserver's memory.
        self._is_borrowing = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if error is not None:
            # Whoever keeps the error keeps the frames that it went through, and they have this: let go of the memory.
            self._shared = None
        assert self.lent is not None, "use() lends the stream"
        (held, give_back), self.lent = self.lent, None
        give_back(held, error)

    def require_lent(self) -> None:
        """Check values that were copied out of the pserver's memory, before they count.

        Raises:
            UnavailableError: the pserver has ended the stream in the meantime, and may have changed them.
        """
        if self._is_borrowing and self._shared is not None and self._shared.pair.other.is_over:
            raise UnavailableError("the stream ended while values were read: they may be of two versions")

    @property
    def is_answered(self) -> bool:
        """True if all messages of the request were sent and answered."""
        return not self._unanswered and not self._is_sending

    def converse(
        self,
        messages: Iterable[Sequence[OutgoingBlocks]],
        request: bytes,
        *,
        checksums: bool,
        ahead: int,
    ) -> Iterator[tuple[list[ReceivedBlocks], bytes]]:
        """Send messages, the first of which brings the request, and receive answers in lock-step.

        Drop an answer's values before you ask for the next one.

        Args:
            messages: Made when they are about to be sent.
            request: Of the step.
            checksums: Whether values carry any.
            ahead: Maximum number of unanswered messages.

        Yields:
            The answer's parts, and what is attached to them.
        """
        self._unanswered.clear()
        if isinstance(messages, list) and len(messages) == 1:
            sent: Iterable[EncodedMessage] = (self._encoded(messages[0], request, checksums=checksums),)
        else:
            sent = self._all_encoded(messages, request, checksums=checksums)
        for batch, packed in lock_step(self._carrier, sent, ahead=ahead):
            shared = self._shared
            if self._unanswered and self._unanswered.popleft() and shared is not None:
                shared.outbox.taken(1)
            place = Place.BATCH if batch is not None else place_of(packed)
            self._is_borrowing = place is Place.MEMORY
            if batch is None and place is Place.BATCH:
                yield [], packed or b""
            elif not self._is_borrowing:
                yield decode_message(batch, packed, self._exchange.columns)
            else:
                try:
                    yield decode_message(None, packed, inbox=None if shared is None else shared.inbox)
                finally:
                    # Also if the caller asks for nothing more, because this was the last answer.
                    if shared is not None:
                        shared.pair.own.taken += 1
            # The next answer should land in this one's memory, while that is in the processor's cache.
            del batch, shared

    def _encoded(self, pieces: Sequence[OutgoingBlocks], request: bytes, *, checksums: bool) -> EncodedMessage:
        shared = self._shared
        outbox = None if shared is None else shared.outbox
        message = encode_message(pieces, request, checksums=checksums, outbox=outbox, inline=shared is None)
        self._unanswered.append(shared is not None and message.values is None)
        return message

    def _all_encoded(
        self, messages: Iterable[Sequence[OutgoingBlocks]], request: bytes, *, checksums: bool
    ) -> Iterator[EncodedMessage]:
        self._is_sending = True
        if self._shared is not None:
            messages = _joined(messages, self._joined_bytes)
        for pieces in messages:
            yield self._encoded(pieces, request, checksums=checksums)
            request = b""
        self._is_sending = False


def _joined(messages: Iterable[Sequence[OutgoingBlocks]], limit_bytes: int) -> Iterator[Sequence[OutgoingBlocks]]:
    """Several messages in one as long as they have no more bytes than that: each costs time of its own."""
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
