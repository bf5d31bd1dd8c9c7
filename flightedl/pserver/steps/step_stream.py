"""The pserver's end of one trainer's stream for steps (``rpc.channel``).

This module transports messages; ``conversation`` and ``session`` interpret them. A trainer on the same host requests
shared memory before its first step (``rpc.same_host``). On TCP, a trainer may send an entire small message in the
metadata, and is answered in the same way.

Values received in shared memory are copied before they are checked, because otherwise the trainer could change them
after the check. The pass that copies them also checks that they are finite.

Values are lent to the trainer in place (``stores.array_span``) until it has read them. An update first moves values
that are lent. A trainer that does not acknowledge values is lent at most a few MiB, and receives copies of the rest.

When a stream ends, for example because its trainer was silent for too long, its loans end, too. Before any of the lent
values change, the shared memory is marked, so that a trainer that is still reading notices this and retries.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import NoReturn

import pyarrow as pa

from flightedl.errors import DeadlineError, MessageError
from flightedl.kernels.compiled import finite_copy
from flightedl.ports import Clock
from flightedl.process.shared_memory import SharedMemory
from flightedl.pserver.meter import Meter
from flightedl.rpc.call import Call
from flightedl.rpc.channel import Channel, Received, ValuesMessage
from flightedl.rpc.line import SMALL_BYTES, Line, LineMessage
from flightedl.rpc.same_host import NotSharedError, SharedPair, is_share_request, refuse_to_share, share
from flightedl.rpc.streams import BrokenOffError, Exchange
from flightedl.wire.parts import STEP_SCHEMA, Place, decode_message, encode_message, place_of
from flightedl.wire.rows import OutgoingBlocks
from flightedl.wire.shared_values import CopyingInbox, Outbox

_log = logging.getLogger(__name__)

#: Seconds to wait for free shared memory before the values of a closed round are sent as copies.
_PATIENCE_S = 0.1
_POLL_S = 0.00005
#: Limits on an answer that is sent without waiting. Limiting the number of parts keeps the header small.
_AT_ONCE_BYTES, _AT_ONCE_PARTS = SMALL_BYTES - (4 << 10), 64
#: Message on a line that announces a message on the stream.
BY_STREAM: LineMessage = (None, b"")


def inbox_of(pair: SharedPair) -> CopyingInbox:
    """Return the inbox for values that a trainer sends."""
    lent, other = None if pair.gradients is None else pair.gradients.values, pair.other
    return CopyingInbox(other.values, finite_copy(), lent, lambda: other.is_over)


class StepStream(Channel):
    """Both directions of one stream. The handler must call ``end`` before it returns.

    Args:
        exchange: The Flight stream.
        call: The stream's call.
        clock: Clock for waits.
        meter: Counters of streams.
        store: Returns the shared memory of the values; None if the values are not shared.
        shares_memory: True if trainers on the same host may map the values' memory.
    """

    __slots__ = (
        "_call",
        "_clock",
        "_has_asked",
        "_meter",
        "_pair",
        "_shares_memory",
        "_store",
        "_stream",
        "member",
    )

    def __init__(
        self,
        exchange: Exchange,
        call: Call,
        clock: Clock,
        meter: Meter,
        store: Callable[[], SharedMemory | None],
        *,
        shares_memory: bool,
    ) -> None:
        super().__init__(exchange, is_inline=False)
        self._stream = exchange
        self._call = call
        self._store = store
        self._clock = clock
        self._meter = meter
        self._shares_memory = shares_memory
        self._has_asked = False
        #: Membership id that the trainer used in its most recent step; 0 if unknown.
        self.member = 0
        self._pair: SharedPair | None = None

    def begin(self) -> None:
        self._stream.begin(STEP_SCHEMA)
        self._meter.stream(1)

    def end(self) -> None:
        self.serves(0)
        self._meter.stream(-1, shared=0 if self._pair is None else -1)
        if self._pair is not None and self._outbox is not None:
            self._pair.own.end()
            self._outbox.end()
        self._pair = self._inbox = self._outbox = self._line = None

    def serves(self, member: int) -> None:
        """Record the member that sends the steps on this stream; 0 if a non-member sends them."""
        is_shared = self._pair is not None
        self._meter.stream_of(self.member, -1, is_shared=is_shared)
        self._meter.stream_of(member, 1, is_shared=is_shared)
        self.member = member

    def request(self) -> Received | None:
        """Receive the first message of the next step, with its request, or None at the end of the stream.

        Raises:
            FlightedlError: The message is invalid or damaged.
        """
        while True:
            message = self._stream.at_rest(self._in_time)
            if message is None:
                return None
            batch, packed = message
            if batch is not None or place_of(packed) is not Place.BATCH:
                return self.decoded(batch, packed)
            if self._has_asked or packed is None or not is_share_request(packed):
                raise MessageError("the first message of a step must have values and a header")
            self._has_asked = True
            self._share_if_possible(packed)

    def read(self) -> Received | None:
        """Receive the next message of a step. Return None after the last one."""
        message = self._in_time()
        if message is None or (message[0] is None and place_of(message[1]) is Place.BATCH):
            return None
        return self.decoded(*message)

    def write(
        self, pieces: Sequence[OutgoingBlocks], attached: bytes = b"", *, checksums: bool, may_wait: bool = False
    ) -> None:
        """Send an answer; see ``encode_message``.

        Set ``may_wait`` if the trainer is only reading. Then wait briefly until the trainer has read earlier values.
        """
        if self._outbox is not None:
            if self._outbox.loans.open:
                self._note_acknowledged()
            if may_wait:
                self._have_room(sum(piece.size_bytes for piece in pieces))
        message = encode_message(pieces, attached, checksums=checksums, outbox=self._outbox, inline=self._is_inline)
        self._post(*message)

    @property
    def line(self) -> Line | None:
        """The stream's line; None if the trainer has not requested shared memory."""
        return self._line

    def request_by_stream(self) -> Received | None:
        """Return the request that was announced on the line."""
        message = self._stream.at_rest(self._stream.read)
        return None if message is None else self.decoded(*message)

    def end_at_rest(self) -> None:
        """Record that the trainer disconnected between two steps, which is not a failure."""
        self._stream.is_complete = True

    def write_at_once(self, pieces: Sequence[OutgoingBlocks], attached: bytes, *, checksums: bool) -> bool:
        """Send an answer on the line without waiting. Return False if it is too large; then use ``write``.

        Raises:
            MessageError: The line is full of unread answers, which a correct trainer never causes.
            UnavailableError: The trainer has disconnected.
        """
        line, size_bytes = self._line, 0
        for piece in pieces:
            if piece.values is not None:
                size_bytes += piece.values.nbytes
        if line is None or size_bytes > _AT_ONCE_BYTES or len(pieces) > _AT_ONCE_PARTS:
            return False
        values, header, _ = encode_message(pieces, attached, checksums=checksums, outbox=self._outbox)
        try:
            is_sent = line.send(values, header)
        except BlockingIOError:
            raise MessageError("a trainer does not read the answers to its steps") from None
        if not is_sent:
            self._line_ended()
        return True

    def write_word(self, word: bytes) -> None:
        self._post(None, word, 0)

    def _in_time(self) -> ValuesMessage | None:
        message = self._next()
        if self._call.is_late:
            raise self._too_late()
        return message

    def decoded(self, batch: pa.RecordBatch | memoryview | None, packed: bytes | None) -> Received:
        # This message will usually update values that earlier answers lent. Take back the values that the trainer has
        # read, so that they can be updated in place.
        if self._outbox is not None and self._outbox.loans.open:
            self._note_acknowledged()
        if batch is None and self._line is None and not self._is_inline:
            self._is_inline = place_of(packed) is Place.HEADER
        return decode_message(batch, packed, self._stream.columns, self._inbox)

    def _share_if_possible(self, request: bytes) -> None:
        if not self._shares_memory:
            refuse_to_share(self._stream, "the pserver has same_host=never")
            return
        try:
            pair = share(self._stream, request, self._clock, self._store())
        except NotSharedError as error:
            _log.debug("a trainer's values are sent by TCP: %s", error)
            return
        self._pair = pair
        store = None if pair.store is None else pair.store.values
        self._share(pair.line, Outbox(pair.own.values, store=store), inbox_of(pair))
        self._meter.stream(0, shared=1)

    def is_over(self) -> bool:
        call = self._call
        return call.is_late or call.closing.is_set() or call.is_cancelled()

    def _line_ended(self) -> NoReturn:
        if self._call.is_late:
            raise self._too_late()
        raise BrokenOffError("the client has closed the stream's line")

    def _too_late(self) -> DeadlineError:
        return DeadlineError(f"{self._call.verb}: the stream's deadline has passed")

    def _have_room(self, size_bytes: int) -> None:
        assert self._outbox is not None
        until = self._clock.now() + _PATIENCE_S
        while not self._outbox.has_room(size_bytes) and self._clock.now() <= until:
            self._clock.sleep(_POLL_S)
            self._note_acknowledged()

    def _note_acknowledged(self) -> None:
        if self._pair is not None and self._outbox is not None and self._outbox.loans.open:
            self._outbox.counted(self._pair.other.consumed)
