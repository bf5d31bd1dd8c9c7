"""The pserver's end of a trainer's stream of steps (``rpc.channel``).

What a message means is not known here (``steps``, ``flight``). A trainer on the same host asks for shared memory before
its first step (``rpc.same_host``). By TCP a trainer may write small messages whole in their metadata, and is then
answered so.

Values that come by memory are copied before anybody looks at them: the trainer could change them between the check and
the use. The same pass says whether they are finite.
Values that leave are lent where they lie (``spans``) until the trainer has taken them: whatever changes them before
moves them first. A trainer that does not take its values has a few MiB of them, and gets copies of the rest. A stream
that ends, for example because its trainer was silent for too long, ends what it has lent. Before any of it changes, the
memory says so, and a trainer that still reads there finds out and asks again.
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
from flightedl.rpc.channel import Channel, Received, ValuesMessage
from flightedl.rpc.line import SMALL_BYTES, Line, LineMessage
from flightedl.rpc.routes import Call
from flightedl.rpc.same_host import NotSharedError, SharedPair, is_share_request, refuse_to_share, share
from flightedl.rpc.streams import BrokenOffError, Exchange
from flightedl.wire.parts import STEP_SCHEMA, Place, decode_message, encode_message, place_of
from flightedl.wire.rows import OutgoingBlocks
from flightedl.wire.shared_values import CopyingInbox, Outbox

_log = logging.getLogger(__name__)

#: How long values that nobody asked for just now wait for room in the memory, before they are sent.
_PATIENCE_S = 0.1
_POLL_S = 0.00005
#: Limits of an answer that is sent without waiting: its values, and its parts, so that its header is small.
_AT_ONCE_BYTES, _AT_ONCE_PARTS = SMALL_BYTES - (4 << 10), 64
#: The word of a line that the next message comes by the stream.
BY_STREAM: LineMessage = (None, b"")


class StepStream(Channel):
    """Both directions of one stream; end it when its handler returns.

    Args:
        exchange: The stream.
        call: Of the stream.
        clock: For waits.
        meter: Counts streams.
        store: Gives the memory in which the values lie, if they lie in one.
        shares_memory: Whether values may lie in memory that the trainer maps.
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
        "_taken",
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
        #: The member whose stream it is, as its newest step says.
        self.member = 0
        self._pair: SharedPair | None = None
        #: Messages of the outbox that the trainer said to have taken.
        self._taken = 0

    def begin(self) -> None:
        """Announce what the answers look like."""
        self._stream.begin(STEP_SCHEMA)
        self._meter.stream(1)

    def end(self) -> None:
        """Let go of the memory."""
        self.serves(0)
        self._meter.stream(-1, shared=0 if self._pair is None else -1)
        if self._pair is not None and self._outbox is not None:
            self._pair.own.end()
            self._outbox.end()
        self._pair = self._inbox = self._outbox = self._line = None

    def serves(self, member: int) -> None:
        """Note that steps of this member begin; 0 if of nobody."""
        is_shared = self._pair is not None
        self._meter.stream_of(self.member, -1, is_shared=is_shared)
        self._meter.stream_of(member, 1, is_shared=is_shared)
        self.member = member

    def request(self) -> Received | None:
        """The message that begins the next step, and what is attached to it; None: the trainer wants no more of them.

        Raises:
            FlightedlError: it is unsound or damaged.
        """
        while True:
            message = self._stream.at_rest(self._in_time)
            if message is None:
                return None
            batch, packed = message
            if batch is not None or place_of(packed) is not Place.BATCH:
                return self.decoded(batch, packed)
            if self._has_asked or packed is None or not is_share_request(packed):
                raise MessageError("a step begins with a message that has values and a header")
            self._has_asked = True
            self._share_if_possible(packed)

    def read(self) -> Received | None:
        """The next message of a step; None: none comes."""
        message = self._in_time()
        if message is None or (message[0] is None and place_of(message[1]) is Place.BATCH):
            return None
        return self.decoded(*message)

    def write(
        self, pieces: Sequence[OutgoingBlocks], attached: bytes = b"", *, checksums: bool, may_wait: bool = False
    ) -> None:
        """Send an answer; see ``encode_message``.

        ``may_wait``: wait until the trainer, which reads and sends nothing, has taken earlier values.
        """
        if self._outbox is not None:
            if self._outbox.untaken:
                self._note_taken()
            if may_wait:
                self._have_room(sum(piece.size_bytes for piece in pieces))
        message = encode_message(pieces, attached, checksums=checksums, outbox=self._outbox, inline=self._is_inline)
        self._post(*message)

    @property
    def line(self) -> Line | None:
        """The line by which small messages come, if there is one."""
        return self._line

    def request_by_stream(self) -> Received | None:
        """Return the request that the line announced."""
        message = self._stream.at_rest(self._stream.read)
        return None if message is None else self.decoded(*message)

    def end_at_rest(self) -> None:
        """Note that the trainer is gone while nothing was under way, which is no failure."""
        self._stream.is_complete = True

    def write_at_once(self, pieces: Sequence[OutgoingBlocks], attached: bytes, *, checksums: bool) -> bool:
        """Send an answer by the line, without waiting. False if it is not small, and has to be sent by ``write``.

        Raises:
            MessageError: the trainer has left many answers unread, which no step needs.
            UnavailableError: the trainer is gone.
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
        """Send a word without values."""
        self._post(None, word, 0)

    def _in_time(self) -> ValuesMessage | None:
        message = self._next()
        if self._call.is_late:
            raise self._too_late()
        return message

    def decoded(self, batch: pa.RecordBatch | memoryview | None, packed: bytes | None) -> Received:
        # This message mostly changes what earlier answers lent: in place, if nobody reads it any more.
        if self._outbox is not None and self._outbox.untaken:
            self._note_taken()
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
            _log.debug("values of a trainer travel by TCP: %s", error)
            return
        self._pair = pair
        store = None if pair.store is None else pair.store.values
        self._share(pair.line, Outbox(pair.own.values, store=store), CopyingInbox(pair.other.values, finite_copy()))
        self._meter.stream(0, shared=1)

    def is_over(self) -> bool:
        """See ``Channel``."""
        call = self._call
        return call.is_late or call.closing.is_set() or call.is_cancelled()

    def _line_ended(self) -> NoReturn:
        if self._call.is_late:
            raise self._too_late()
        raise BrokenOffError("the client has ended the line beside the stream")

    def _too_late(self) -> DeadlineError:
        return DeadlineError(f"{self._call.verb}: the time for this stream is over")

    def _have_room(self, size_bytes: int) -> None:
        assert self._outbox is not None
        until = self._clock.now() + _PATIENCE_S
        while not self._outbox.has_room(size_bytes) and self._clock.now() <= until:
            self._clock.sleep(_POLL_S)
            self._note_taken()

    def _note_taken(self) -> None:
        if self._pair is None or self._outbox is None or not self._outbox.untaken:
            return
        # Whatever a trainer writes there, it only loses what it says to have taken already.
        news = min(self._pair.other.taken - self._taken, self._outbox.untaken)
        if news > 0:
            self._taken += news
            self._outbox.taken(news)
