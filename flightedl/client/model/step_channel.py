"""What the messages of steps to one pserver travel by: a stream that is kept open, and memory that both sides map.

A stream to a pserver of the same host shares memory from its first message on (``rpc.same_host``); values for which
there is room then lie there, and the messages only say where. What is small enough goes by a line beside the stream
(``rpc.line``). Everything else is as without it. What is in the way of it is said once, and values are sent.

In lock-step (``rpc.client_streams``) an answer says that the pserver has what the message brought, so its memory is
free. What the pserver put into its own is free when its next message is asked for: that is said by a number in memory.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType

from flightedl.client.model.phases import Phases
from flightedl.errors import UnavailableError
from flightedl.ports import Clock
from flightedl.rpc.client import Connection
from flightedl.rpc.client_streams import ClientExchange
from flightedl.rpc.line import LineSteps
from flightedl.rpc.reuse import ReusableExchange
from flightedl.rpc.routes import Message
from flightedl.rpc.same_host import NotSharedError, SharedPair, ask_to_share
from flightedl.wire.parts import (
    PARTS_LIMIT,
    STEP_SCHEMA,
    EncodedMessage,
    ReceivedBlocks,
    attached_to,
    batch_of,
    decode_parts,
    encode_message,
    is_shared,
)
from flightedl.wire.rows import OutgoingBlocks
from flightedl.wire.shared_values import Inbox, Outbox

_log = logging.getLogger(__name__)

#: Values of several messages travel as one up to so many bytes, where they are in memory: a message costs time.
_JOINED_BYTES = 4 << 20
#: Messages of a step then, at least: both sides are to be at work on different ones.
_MESSAGES = 2


class _Shared:
    """The memory of one stream, and the line beside it, from the trainer's side."""

    def __init__(self, pair: SharedPair, line: LineSteps) -> None:
        self.pair = pair
        self.line = line
        self.outbox = Outbox(pair.own.values)
        self.inbox = Inbox(pair.other.values, None if pair.store is None else pair.store.values)


class StepChannel:
    """The way to one pserver. For one thread at a time.

    Args:
        index: Of the pserver, for people.
        clock: For the time of streams.
        step_bytes: Of the values of a step.
    """

    def __init__(self, index: int, clock: Clock, *, step_bytes: int) -> None:
        self._joined_bytes = min(_JOINED_BYTES, step_bytes // _MESSAGES)
        self._index = index
        self._clock = clock
        self._stream = ReusableExchange("step", STEP_SCHEMA, clock, self._greet)
        #: Whose server shares no memory.
        self._unshared: Connection | None = None

    def close_idle(self) -> None:
        """Let go of the stream."""
        self._stream.close_idle()

    def use(self, connection: Connection, *, timeout_s: float) -> _Request:
        """The stream, for the one request of a ``with`` block; see ``ReusableExchange.use``."""
        return _Request(self._stream, connection, timeout_s, self._joined_bytes)

    def _greet(self, connection: Connection, exchange: ClientExchange) -> _Shared | None:
        if not connection.shares_memory or self._unshared is connection:
            return None
        try:
            pair = ask_to_share(exchange)
            return _Shared(pair, LineSteps(pair.line, exchange, self._clock, batch_of))
        except NotSharedError as error:
            self._unshared = connection
            _log.debug("values from and to pserver %d travel by TCP: %s", self._index, error)
            return None


class _Request:
    """What ``with`` needs of a request: a generator in its place costs a small step a tenth of its time."""

    __slots__ = ("_asked", "_held", "_joined_bytes", "_kept", "_stream")

    def __init__(self, kept: ReusableExchange, connection: Connection, timeout_s: float, joined_bytes: int) -> None:
        self._kept = kept
        self._asked = connection, timeout_s
        self._joined_bytes = joined_bytes

    def __enter__(self) -> StepStream:
        connection, timeout_s = self._asked
        held = self._held = self._kept.begin(connection, timeout_s=timeout_s)
        self._stream = StepStream(held.exchange, held.greeted, self._joined_bytes)
        return self._stream

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        # An error that somebody keeps has the frames that it went through, and they have this.
        self._stream.end()
        self._kept.end(self._held, error)


class StepStream:
    """One request and its answers.

    Args:
        exchange: What they travel by.
        shared: Memory of both sides; None: there is none.
        joined_bytes: Values of several messages that travel as one, where they are in memory.
    """

    def __init__(self, exchange: ClientExchange, shared: _Shared | None, joined_bytes: int = 0) -> None:
        self._joined_bytes = joined_bytes
        self._exchange = exchange
        self._shared = shared
        #: For each message that has no answer yet: whether its values are in memory.
        self._unanswered: deque[bool] = deque()

    def require_lent(self) -> None:
        """To be asked when values were copied, before they count.

        Raises:
            UnavailableError: the pserver has ended the stream meanwhile, and may have changed them.
        """
        if self._shared is not None and self._shared.pair.other.is_over:
            raise UnavailableError("the stream ended while values were read: they may be of two versions")

    def end(self) -> None:
        """Let go of the memory."""
        self._shared = None

    def converse(
        self,
        messages: Iterable[Sequence[OutgoingBlocks]],
        request: bytes,
        phases: Phases,
        *,
        checksums: bool,
        ahead: int,
    ) -> Iterator[tuple[list[ReceivedBlocks], bytes]]:
        """Messages there, the first of which brings the request, and answers back, in lock-step.

        Drop an answer's values before you ask for the next one.

        Args:
            messages: Made when they are about to be sent.
            request: Of the step.
            phases: Told what goes on.
            checksums: Whether values carry any.
            ahead: Messages that may be unanswered.

        Yields:
            What came, and what is attached to it.
        """
        sent = self._encoded(messages, request, phases, checksums=checksums)
        shared = self._shared
        answers = self._by_stream(sent, ahead) if shared is None else shared.line.lock_step(sent, ahead=ahead)
        del shared
        for batch, packed in answers:
            if self._unanswered and self._unanswered.popleft() and self._shared is not None:
                self._shared.outbox.taken(1)
            if batch is not None:
                yield decode_parts(batch, packed, self._exchange.columns), attached_to(packed)
            elif not is_shared(packed):
                yield [], packed or b""
            else:
                inbox = None if self._shared is None else self._shared.inbox
                try:
                    yield decode_parts(None, packed, inbox=inbox), attached_to(packed)
                finally:
                    # Also where the caller asks for nothing more, as this was the last one.
                    if self._shared is not None:
                        self._shared.pair.own.taken += 1
                    del inbox
            # The next answer is to come into this one's memory, while that is in the processor's cache.
            del batch

    def _by_stream(self, messages: Iterable[EncodedMessage], ahead: int) -> Iterator[Message]:
        """In lock-step without a line. What is not sent cannot make both sides wait for each other."""
        return self._exchange.lock_step(
            ((None if values is None else batch_of(values), header, size) for values, header, size in messages),
            ahead=ahead,
        )

    def _encoded(
        self, messages: Iterable[Sequence[OutgoingBlocks]], request: bytes, phases: Phases, *, checksums: bool
    ) -> Iterator[EncodedMessage]:
        """Messages as they are sent."""
        outbox = None
        if self._shared is not None:
            outbox = self._shared.outbox
            if not (isinstance(messages, list) and len(messages) == 1):
                messages = _joined(messages, self._joined_bytes)
        for pieces in messages:
            message = encode_message(pieces, request, checksums=checksums, outbox=outbox)
            self._unanswered.append(message.values is None)
            phases.sent()
            yield message
            request = b""
        phases.sent_all()


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
