"""Lock-step: messages there and answers back on one stream, a few messages ahead of the answers.

Keeps data in the processor's cache, and neither side can wait for the other for ever: what is unanswered is limited in
bytes, and a message above the limit travels alone. A *carrier* moves the messages: the Flight stream by itself, or a
line (``line``) beside it for what is small.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import pyarrow as pa

from flightedl.errors import OutcomeUnknownError
from flightedl.ports import Clock
from flightedl.rpc.client_streams import ClientExchange
from flightedl.rpc.line import AHEAD_BYTES, SMALL_BYTES, Line
from flightedl.rpc.streams import ValuesMessage

#: Windows of 8 MiB and more have been seen to stop both sides for ever, though not on every machine; up to 6 never.
LOCK_STEP_LIMIT_BYTES = 4 << 20
#: The kernel's share of a message that travels by a line.
_OVERHEAD_BYTES = 1 << 10

#: Values, or None if the message cannot have any; a header; bytes of the values.
SentMessage = tuple[Sequence[memoryview] | None, bytes, int]
AsBatch = Callable[[Sequence[memoryview]], pa.RecordBatch]


class Carrier(Protocol):
    """One open stream, as the client uses it. For one thread."""

    def cost(self, header: bytes, size_bytes: int) -> tuple[int, int]:
        """Return the bytes that an unanswered message occupies on the line and on the stream."""
        ...

    def send(self, values: Sequence[memoryview] | None, header: bytes, size_bytes: int) -> None:
        """Send a message; raises the server's error if the server has ended the stream."""
        ...

    def receive(self) -> ValuesMessage:
        """Return the next answer; raises OutcomeUnknownError if none comes."""
        ...


class StreamCarrier:
    """The Flight stream by itself.

    Args:
        exchange: The stream.
        as_batch: Makes a batch of the stream's schema from a message's values.
    """

    def __init__(self, exchange: ClientExchange, as_batch: AsBatch) -> None:
        self._exchange = exchange
        self._as_batch = as_batch
        self.receive = exchange.answer

    def cost(self, header: bytes, size_bytes: int) -> tuple[int, int]:  # noqa: ARG002 - a line's cost depends on it
        """See ``Carrier``."""
        return 0, size_bytes

    def send(self, values: Sequence[memoryview] | None, header: bytes, size_bytes: int) -> None:
        """See ``Carrier``."""
        if values is None:
            self._exchange.write_metadata(header)
        else:
            self._exchange.write(self._as_batch(values), header, size_bytes=size_bytes)


class LineCarrier:
    """A stream with a line beside it, which carries whatever is small.

    Args:
        line: The client's end.
        exchange: The stream.
        clock: For the stream's deadline.
        as_batch: As of ``StreamCarrier``.
    """

    def __init__(self, line: Line, exchange: ClientExchange, clock: Clock, as_batch: AsBatch) -> None:
        self._line = line
        self._exchange = exchange
        self._clock = clock
        self._stream = StreamCarrier(exchange, as_batch)
        # The stream's own time is over by then.
        self._ends_at = clock.now() + exchange.timeout_s

    def _is_over(self) -> bool:
        return self._clock.now() > self._ends_at

    def cost(self, header: bytes, size_bytes: int) -> tuple[int, int]:
        """See ``Carrier``."""
        if size_bytes + len(header) <= SMALL_BYTES:
            return _OVERHEAD_BYTES + size_bytes + len(header), 0
        return _OVERHEAD_BYTES, size_bytes

    def send(self, values: Sequence[memoryview] | None, header: bytes, size_bytes: int) -> None:
        """See ``Carrier``."""
        if size_bytes + len(header) <= SMALL_BYTES:
            if not self._line.send(values, header, self._is_over):
                self._raise_reason()
        elif self._line.send(None, b"", self._is_over):
            self._stream.send(values, header, size_bytes)
        else:
            self._raise_reason()

    def receive(self) -> ValuesMessage:
        """See ``Carrier``."""
        found = self._line.receive(self._is_over)
        if found is None:
            self._raise_reason()
            raise AssertionError("unreachable")
        return found if found[0] is not None or found[1] else self._exchange.answer()

    def _raise_reason(self) -> None:
        """Raise the server's error from the stream, or what became of the stream."""
        self._exchange.answer()
        raise OutcomeUnknownError("the server has ended the line, and goes on with the stream")


def lock_step(carrier: Carrier, messages: Iterable[SentMessage], *, ahead: int) -> Iterator[ValuesMessage]:
    """Send messages to a server that answers each with a message of about its size; yield the answers in order.

    Further messages of the server follow the answers: leave the loop at the last one that is expected. An answer that
    is dropped before the next is asked for leaves its memory to that.

    Args:
        carrier: The open stream.
        messages: Made when they are about to be sent.
        ahead: Maximum number of unanswered messages; fewer where ``LOCK_STEP_LIMIT_BYTES`` or ``AHEAD_BYTES`` limit
            them.

    Raises:
        FlightedlError: the server's error.
        OutcomeUnknownError: the server ended the stream before the caller left the loop.
    """
    unanswered: deque[tuple[int, int]] = deque()
    by_line = by_stream = 0
    for values, header, size_bytes in messages:
        cost = carrier.cost(header, size_bytes)
        by_line, by_stream = by_line + cost[0], by_stream + cost[1]
        while unanswered and (by_line > AHEAD_BYTES or by_stream > LOCK_STEP_LIMIT_BYTES):
            yield carrier.receive()
            first = unanswered.popleft()
            by_line, by_stream = by_line - first[0], by_stream - first[1]
        carrier.send(values, header, size_bytes)
        unanswered.append(cost)
        if len(unanswered) >= ahead:
            yield carrier.receive()
            first = unanswered.popleft()
            by_line, by_stream = by_line - first[0], by_stream - first[1]
    while True:
        yield carrier.receive()
