"""A trainer's stream of steps and lookups, which are served one after the other.

A step's first message brings the request. Each message is answered by one, and the last answer says that the step is
over (see ``steps``). A lookup of rows is one message and its answers.

The thread of the stream's handler serves the conversation. If the trainer's steps are small and come by a line, the
handler lends the conversation to the loop that serves all such lines (``line_loop``), and only does what the loop hands
back.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import msgspec

from flightedl.errors import MessageError
from flightedl.messages.base import decode
from flightedl.messages.decoding import decoder_of
from flightedl.messages.parameters import LookupHeader, Opening, PushHeader
from flightedl.ports import Clock
from flightedl.process import tracing
from flightedl.pserver.line_loop import LineLoop
from flightedl.pserver.meter import Meter
from flightedl.pserver.shard import Shard
from flightedl.pserver.step_stream import BY_STREAM, StepStream
from flightedl.pserver.steps import LITTLE_BYTES, MOMENT_S, SLICE_S, StepSession, awaited_values, pushed
from flightedl.rpc.channel import Received
from flightedl.rpc.line import LineMessage
from flightedl.rpc.routes import Call
from flightedl.wire.parts import STEP_END, ReceivedBlocks
from flightedl.wire.rows import OutgoingBlocks

_step_decoder = decoder_of(PushHeader)
_UNDECODABLE = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)
#: Limit of a step's values for the loop: it is not to be held up by copies and optimizers.
SMALL_STEP_BYTES = LITTLE_BYTES
#: Seconds between two looks of a handler at its stream, while the loop has the conversation.
_LOOK_S = 0.1


class _Word(Enum):
    """A word of the loop to the handler."""

    BY_STREAM = "the next request comes by the stream"


class Answers(Protocol):
    """The service of a pserver, as conversations ask it."""

    meter: Meter

    def shard(self, plan_hash: str) -> Shard:
        """Return the blocks; raises FencedError if the plan is another one."""
        ...

    def require_lease(self) -> None:
        """Raise FencedError if the pserver's lease is over."""
        ...


@dataclass(slots=True)
class _Begun:
    """A step of which everything has come, and whose answers have not all left."""

    session: StepSession
    checksums: bool
    #: Answers to be sent with the next message.
    pieces: list[OutgoingBlocks]
    began: float
    deadline: float
    #: The count of changes at the newest look at what is waited for.
    seen: int = -1
    #: Instant at which the outcomes leave without values.
    moment: float = 0.0


#: What the loop hands back: a request, a step to go on with, a word, an error, or None if the trainer wants no more.
Handed = Received | _Begun | _Word | BaseException | None


class Conversation:
    """One stream's steps and lookups.

    Args:
        stream: The pserver's end of the stream.
        service: Gives the blocks.
        clock: For waits.
        call: Of the stream.
        lines: Serves small steps.
    """

    def __init__(self, stream: StepStream, service: Answers, clock: Clock, call: Call, lines: LineLoop) -> None:
        self._stream = stream
        self._service = service
        self._clock = clock
        self._call = call
        self._lines = lines
        #: True if the newest step was small.
        self._is_small = False
        #: A step that waits for a round, in the loop, and the instant at which it has to be looked at.
        self._parked: _Begun | None = None
        self.due_at: float | None = None
        #: The stream's line, once it has one.
        self._line = stream.line
        self._handed: queue.SimpleQueue[Handed] = queue.SimpleQueue()

    def serve(self) -> None:
        """Serve the stream until the trainer wants no more. For the handler's thread."""
        self._lines.enter()
        try:
            while self.take_one():
                pass
        finally:
            self._lines.leave()

    def take_one(self) -> bool:
        """Serve one request. False if the trainer wants no more."""
        self._line = self._stream.line
        if not self._is_small or self._line is None:
            return self.take(self._stream.request())
        return self.take(self._lent())

    def take(self, handed: Handed) -> bool:
        """Serve a request, or do what the loop hands back. False if the trainer wants no more."""
        if isinstance(handed, _Word):
            handed = self._stream.request_by_stream()
        if isinstance(handed, BaseException):
            raise handed
        if handed is None:
            return False
        if isinstance(handed, _Begun):
            self._go_on(handed)
        else:
            self._answer(*handed)
        return True

    # the handler's thread

    def _lent(self) -> Handed:
        """Lend the conversation to the loop, and return what the loop hands back."""
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
        """Return the parked step, or None, if the stream ends."""
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
            self._take_step(StepSession(shard, header), parts, header)
        shard.meter.step(self._clock.now() - began)

    def _take_step(self, session: StepSession, parts: list[ReceivedBlocks], header: PushHeader) -> None:
        stream, checksums = self._stream, header.checksums
        while True:
            self._service.require_lease()
            pieces = session.feed(parts)
            if session.is_over:
                stream.write(pieces, STEP_END, checksums=checksums)
                return
            stream.write(pieces, checksums=checksums)
            # The next message is to come into this one's memory, while that is in the processor's cache. And of values
            # that somebody holds, others' gradients make a copy first.
            del parts, pieces
            if session.has_all:
                break
            parts = self._next_parts(session)
        self._drain(session, min(self._clock.now() + header.wait_s, self._call.deadline), checksums=checksums)

    def _drain(self, session: StepSession, deadline: float, *, checksums: bool) -> None:
        """Send the values of rounds that close before the deadline."""
        for pieces in while_wanted(session.drain(self._clock, deadline), self._call):
            # A word of its own costs as much as the message before it.
            end = STEP_END if session.is_over else b""
            self._stream.write(pieces, end, checksums=checksums, may_wait=True)
        if not session.is_over:
            self._stream.write_word(STEP_END)

    def _go_on(self, begun: _Begun) -> None:
        """Finish a step that the loop has begun."""
        session = begun.session
        if session.is_over:
            self._stream.write(begun.pieces, STEP_END, checksums=begun.checksums)
        else:
            if begun.pieces:
                self._stream.write(begun.pieces, checksums=begun.checksums)
            self._drain(session, begun.deadline, checksums=begun.checksums)
        self._service.meter.step(self._clock.now() - begun.began)

    def _lookup(self, header: LookupHeader, parts: Sequence[ReceivedBlocks]) -> None:
        """Answer with rows of tables: those that are there leave with the word that this is all."""
        shard, stream = self._service.shard(header.plan_hash), self._stream
        if len(parts) != 1:
            raise MessageError(f"a lookup is about the buckets of a pserver, and has {len(parts)} parts")
        pieces, rest = shard.read(shard.lookup(parts[0]), header.member)
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
            raise MessageError(f"a step begins before the one before it ended: {session.missing}")
        return parts

    # the loop's thread

    @property
    def fileno(self) -> int:
        """See ``line_loop.Lent``."""
        assert self._line is not None, "it is lent for its line"
        return self._line.fileno

    def fail(self, error: BaseException) -> None:
        """See ``line_loop.Lent``."""
        self._handed.put(error)

    def take_turn(self) -> bool:
        """See ``line_loop.Lent``."""
        stream, call, line = self._stream, self._call, self._line
        assert line is not None, "it is lent for its line"
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
        if isinstance(header, LookupHeader) or not _is_small(shard, header, parts):
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
        """Hand the conversation back because of a message that begins no step here, or because the line has ended."""
        if message is None or self._call.is_late:
            self._handed.put(self._rest())
        elif self._parked is not None:
            raise MessageError(f"a step begins before the one before it ended: {self._parked.session.missing}")
        else:
            self._handed.put(_Word.BY_STREAM)
        return False

    def look(self, now: float) -> bool:
        """See ``line_loop.Lent``."""
        parked, due_at = self._parked, self.due_at
        assert parked is not None, "the loop looks at parked steps"
        assert due_at is not None, "the loop looks at parked steps"
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
    """Return True if the loop may take a step that begins so: one small message of blocks that all have values."""
    size_bytes, rows, first_bucket = 0, header.rows, shard.first_bucket
    for part in parts:
        blocks, data = part.blocks, part.data
        if not data or blocks.start >= first_bucket:
            return False
        size_bytes += len(data)
        rows -= len(blocks)
    return not rows and 0 < size_bytes <= SMALL_STEP_BYTES and tracing.tracer is None


def _opened(request: bytes) -> PushHeader | LookupHeader:
    """Decode a request. It is nearly always a step: to look at the verb first costs as much again."""
    try:
        header = _step_decoder.decode(request)
    except _UNDECODABLE:
        if decode(request, Opening).verb == "lookup":
            return decode(request, LookupHeader)
        # Says what is wrong.
        header = decode(request, PushHeader)
    return header if header.verb != "lookup" else decode(request, LookupHeader)


def while_wanted(found: Iterator[list[OutgoingBlocks]], call: Call) -> Iterator[list[OutgoingBlocks]]:
    """Yield messages that have something in them, as long as somebody waits for them."""
    for pieces in found:
        if pieces:
            yield pieces
        if not pieces or call.closing.is_set():
            call.check()
