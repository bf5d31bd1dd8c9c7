"""One trainer's stream of steps and row lookups. Its requests are served one after the other.

The first message of a step contains the request. Each message gets one answer, and the last answer marks the end of the
step (see ``session``). A row lookup is a single message, which may have several answers.

The stream's handler thread serves the conversation. If the trainer's steps are small and arrive on a line, the handler
lends the conversation to the loop that serves small steps on all lines (``line_loop``). The handler then serves only
requests that the loop hands back.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import msgspec

from flightedl.errors import MessageError
from flightedl.messages.base import decode
from flightedl.messages.decoding import decoder_of
from flightedl.messages.parameters import LookupHeader, Opening, PushHeader
from flightedl.ports import Clock
from flightedl.process import tracing
from flightedl.pserver.shard import Shard
from flightedl.pserver.steps.line_loop import LineLoop
from flightedl.pserver.steps.session import LITTLE_BYTES, MOMENT_S, SLICE_S, StepSession, awaited_values, pushed
from flightedl.pserver.steps.step_stream import BY_STREAM, StepStream
from flightedl.rpc.call import Call
from flightedl.rpc.channel import Received
from flightedl.rpc.line import LineMessage
from flightedl.wire.parts import STEP_END, ReceivedBlocks
from flightedl.wire.rows import OutgoingBlocks

if TYPE_CHECKING:
    from flightedl.pserver.service import PserverService

_step_decoder = decoder_of(PushHeader)
_UNDECODABLE = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)
#: Maximum bytes of values in a step that the loop serves. Copying and optimizing larger steps would delay the other
#: conversations.
SMALL_STEP_BYTES = LITTLE_BYTES
#: Interval, in seconds, at which a handler checks its stream while the loop serves the conversation.
_LOOK_S = 0.1
#: Maximum time, in seconds, for which a request waits for blocks that are about to move.
_MOVE_S = 0.25


class _Word(Enum):
    BY_STREAM = "the next request arrives on the stream"


@dataclass(slots=True)
class _Begun:
    """A step that has been received completely, but not answered completely."""

    session: StepSession
    checksums: bool
    #: Answers that are sent together with the next message.
    pieces: list[OutgoingBlocks]
    began: float
    deadline: float
    #: Count of changes when the awaited values were last checked.
    seen: int = -1
    #: Time at which the outcomes are sent even if no values are available yet.
    moment: float = 0.0


#: Object that the loop hands back: a request, a step to finish, a signal, an error, or None at the end of the stream.
Handed = Received | _Begun | _Word | BaseException | None


class Conversation:
    """One stream's steps and lookups.

    Args:
        stream: The pserver's end of the stream.
        service: The pserver's service.
        clock: Clock for waits.
        call: The stream's call.
        lines: Loop that serves small steps.
    """

    def __init__(self, stream: StepStream, service: PserverService, clock: Clock, call: Call, lines: LineLoop) -> None:
        self._stream = stream
        self._service = service
        self._clock = clock
        self._call = call
        self._lines = lines
        #: True if the most recent step was small.
        self._is_small = False
        #: A step that the loop keeps until a round closes.
        self._parked: _Begun | None = None
        #: Time at which the loop must check the parked step; None if no step is parked.
        self.due_at: float | None = None
        #: The stream's line; None until it has one.
        self._line = stream.line
        self._handed: queue.SimpleQueue[Handed] = queue.SimpleQueue()

    def serve(self) -> None:
        """Serve the stream until the trainer ends it. Runs on the handler's thread."""
        self._lines.enter()
        try:
            while self.serve_one():
                pass
        finally:
            self._lines.leave()

    def serve_one(self) -> bool:
        """Serve one request. Return False if the trainer has ended the stream."""
        self._line = self._stream.line
        if not self._is_small or self._line is None:
            return self.handle(self._stream.request())
        return self.handle(self._lent())

    def handle(self, handed: Handed) -> bool:
        """Serve a request, or an object that the loop handed back. Return False if the trainer has ended the stream."""
        if isinstance(handed, _Word):
            handed = self._stream.request_by_stream()
        if isinstance(handed, BaseException):
            raise handed
        if handed is None:
            return False
        if isinstance(handed, _Begun):
            self._finish(handed)
        else:
            self._answer(*handed)
        return True

    # the handler's thread

    def _lent(self) -> Handed:
        self._call.is_resting = True
        try:
            self._lines.lend(self)
            while True:
                try:
                    handed = self._handed.get(timeout=_LOOK_S)
                except queue.Empty:
                    if not self._stream.is_over():
                        continue
                    self._lines.take_back(self)
                    handed = self._rest() if self._handed.empty() else self._handed.get()
                return handed
        finally:
            self._call.is_resting = False

    def _rest(self) -> _Begun | None:
        """Remove and return the parked step. If no step is parked, the stream ends normally."""
        parked, self._parked, self.due_at = self._parked, None, None
        if parked is None:
            self._stream.end_at_rest()
        return parked

    def _answer(self, parts: list[ReceivedBlocks], request: bytes) -> None:
        if self._call.is_late or self._call.closing.is_set():
            self._call.check_begin()
        began = self._clock.now()
        header = _opened(request)
        if isinstance(header, LookupHeader):
            self._lookup(header, parts)
            return
        shard = self._service.shard(header.plan_hash)
        self._is_small = _is_small(shard, header, parts)
        if header.member != self._stream.member:
            self._stream.serves(header.member)
        with tracing.serves("pserver", "step", header.traceparent):
            self._serve_step(StepSession(shard, header), parts, header)
        shard.meter.step(self._clock.now() - began)

    def _serve_step(self, session: StepSession, parts: list[ReceivedBlocks], header: PushHeader) -> None:
        stream, checksums, shard = self._stream, header.checksums, session.shard
        while True:
            if shard.is_moving:
                shard.await_moves([part.blocks for part in parts], _MOVE_S)
            self._service.require_lease()
            pieces = session.feed(parts)
            if session.is_over:
                stream.write(pieces, STEP_END, checksums=checksums)
                return
            stream.write(pieces, checksums=checksums)
            # Free this message's memory, so that the next message reuses it while it is in the cache. Also drop the
            # references to its values, because an update copies values that are still referenced.
            del parts, pieces
            if session.has_all:
                break
            parts = self._next_parts(session)
        self._drain(session, min(self._clock.now() + header.wait_s, self._call.deadline), checksums=checksums)

    def _drain(self, session: StepSession, deadline: float, *, checksums: bool) -> None:
        for pieces in while_wanted(session.drain(self._clock, deadline), self._call):
            # A separate end message would cost as much as this message.
            end = STEP_END if session.is_over else b""
            self._stream.write(pieces, end, checksums=checksums, may_wait=True)
        if not session.is_over:
            self._stream.write_word(STEP_END)

    def _finish(self, begun: _Begun) -> None:
        session = begun.session
        if session.is_over:
            self._stream.write(begun.pieces, STEP_END, checksums=begun.checksums)
        else:
            if begun.pieces:
                self._stream.write(begun.pieces, checksums=begun.checksums)
            self._drain(session, begun.deadline, checksums=begun.checksums)
        self._service.meter.step(self._clock.now() - begun.began)

    def _lookup(self, header: LookupHeader, parts: Sequence[ReceivedBlocks]) -> None:
        shard, stream = self._service.shard(header.plan_hash), self._stream
        if len(parts) != 1:
            raise MessageError(f"a lookup must have exactly one part, not {len(parts)}")
        if shard.is_moving:
            shard.await_moves([parts[0].blocks], _MOVE_S, is_read=True)
        pieces, rest = shard.read(shard.lookup(parts[0]), header.member)
        shard.meter.sent(sum(piece.size_bytes for piece in pieces))
        if pieces or not rest:
            stream.write(pieces, b"" if rest else STEP_END, checksums=header.checksums)
        if rest:
            deadline = min(self._clock.now() + header.wait_s, self._call.deadline)
            waiting = deque(rest)
            found = awaited_values(shard, header.member, waiting, self._clock, deadline)
            for more in while_wanted(found, self._call):
                stream.write(more, b"" if waiting else STEP_END, checksums=header.checksums, may_wait=True)
            if waiting:
                stream.write_word(STEP_END)

    def _next_parts(self, session: StepSession) -> list[ReceivedBlocks]:
        received = self._stream.read()
        if received is None:
            raise MessageError(session.missing)
        parts, attached = received
        if attached:
            raise MessageError(f"a step begins before the previous one has ended: {session.missing}")
        return parts

    # the loop's thread

    # called only by the loop's thread, while the conversation is lent to it

    @property
    def fileno(self) -> int:
        assert self._line is not None, "a conversation is only lent if it has a line"
        return self._line.fileno

    def fail(self, error: BaseException) -> None:
        """Hand the conversation back because of an error."""
        self._handed.put(error)

    def receive(self) -> bool:
        """Receive a message from the line and serve it. Return False if the conversation was handed back."""
        stream, call, line = self._stream, self._call, self._line
        assert line is not None, "a conversation is only lent if it has a line"
        try:
            message = line.receive()
        except BlockingIOError:
            return True
        if message is None or message == BY_STREAM or call.is_late or self._parked is not None:
            return self._hand_back(message)
        received = stream.decoded(*message)
        parts, request = received
        if call.closing.is_set():
            call.check_begin()
        header = _opened(request)
        shard = self._service.shard(header.plan_hash)
        if isinstance(header, LookupHeader) or shard.is_moving or not _is_small(shard, header, parts):
            self._handed.put(received)
            return False
        self._service.require_lease()
        call.is_resting = False
        began, seen = self._clock.now(), shard.changes.count
        if header.member != stream.member:
            stream.serves(header.member)
        pieces, waiting = pushed(shard, header, parts)
        if not waiting and stream.write_at_once(pieces, STEP_END, checksums=header.checksums):
            shard.meter.step(self._clock.now() - began)
            call.is_resting = True
            return True
        session = StepSession(shard, header, waiting)
        begun = _Begun(session, header.checksums, pieces, began, min(began + header.wait_s, call.deadline), seen)
        if not waiting:
            self._handed.put(begun)
            return False
        begun.moment = self.due_at = began + MOMENT_S
        shard.changes.wake = self._lines.wake
        self._parked = begun
        return True

    def _hand_back(self, message: LineMessage | None) -> bool:
        if message is None or self._call.is_late:
            self._handed.put(self._rest())
        elif self._parked is not None:
            raise MessageError(f"a step begins before the previous one has ended: {self._parked.session.missing}")
        else:
            self._handed.put(_Word.BY_STREAM)
        return False

    def look(self, now: float) -> bool:
        """Send the available part of the parked step's answer. Return False if the conversation was handed back."""
        parked, due_at = self._parked, self.due_at
        assert parked is not None, "no step is parked"
        assert due_at is not None, "no step is parked"
        session, count = parked.session, parked.session.changes
        if count == parked.seen and now < due_at:
            return True
        parked.seen = count
        parked.pieces += session.ready()
        is_over = session.is_over or now >= parked.deadline
        if is_over or (parked.pieces and now >= parked.moment):
            pieces, parked.pieces = parked.pieces, []
            if not self._stream.write_at_once(pieces, STEP_END if is_over else b"", checksums=parked.checksums):
                parked.pieces = pieces
                self._handed.put(self._rest())
                return False
        if is_over:
            self._parked = self.due_at = None
            self._service.meter.step(now - parked.began)
            self._call.is_resting = True
            return True
        self.due_at = min(parked.deadline, now + SLICE_S, *([parked.moment] if parked.pieces else []))
        return True


def _is_small(shard: Shard, header: PushHeader, parts: Sequence[ReceivedBlocks]) -> bool:
    """Return True if the loop may serve the step: a single small message that contains all of its gradients."""
    size_bytes, rows, first_bucket = 0, header.rows, shard.first_bucket
    for part in parts:
        blocks, data = part.blocks, part.data
        if not data or blocks.start >= first_bucket:
            return False
        size_bytes += len(data)
        rows -= len(blocks)
    return not rows and 0 < size_bytes <= SMALL_STEP_BYTES and tracing.tracer is None


def _opened(request: bytes) -> PushHeader | LookupHeader:
    """First try to decode the request as a step, because nearly all requests are steps. Otherwise decode the verb."""
    try:
        header = _step_decoder.decode(request)
    except _UNDECODABLE:
        if decode(request, Opening).verb == "lookup":
            return decode(request, LookupHeader)
        # Raises with an explanation.
        header = decode(request, PushHeader)
    return header if header.verb != "lookup" else decode(request, LookupHeader)


def while_wanted(found: Iterator[list[OutgoingBlocks]], call: Call) -> Iterator[list[OutgoingBlocks]]:
    """Yield the messages that are not empty. Raises an error if the client is no longer waiting."""
    for pieces in found:
        if pieces:
            yield pieces
        if not pieces or call.closing.is_set():
            call.check()
