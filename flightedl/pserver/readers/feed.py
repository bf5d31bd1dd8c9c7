"""The feed of one pserver: answers to clients that follow the changes of the pserver's blocks and rows.

``domain.feed.server`` numbers the changes and decides between a base and an increment. Nothing is recorded during
training: when a client requests changes, counts show which blocks have changed, and the bits that cuts maintain show
which rows. When a number is assigned, values are borrowed and rows are cut, so the answer has the state of that moment,
however slowly it is read. If the client reads too slowly, the cut is lost, and the client must repeat the request.
The same happens if it has stopped reading while another client needs its place.

The memory kept for clients that are away is limited: ids of removed rows (``ServerFeed``, ``RowTables``), the copies
of values that change before they are sent, and the copies for one checkpoint.

If a client wants to stop at checkpoints, the copies for the next checkpoint's file have a ``KeptCut`` as a companion.
Answers that end at the checkpoint have its content.
"""

from __future__ import annotations

import contextlib
import math
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np
from msgspec.structs import replace

from flightedl.domain.feed.server import Removed, ServerFeed
from flightedl.domain.model.sharding import ShardPlan, adjacent
from flightedl.domain.tables.placement import BUCKETS
from flightedl.errors import BusyError
from flightedl.kernels.half_precision import shortened
from flightedl.messages.base import encode
from flightedl.messages.control import OrderNumber
from flightedl.messages.feed import ChangesHeader, ChangesTicket
from flightedl.ports import Clock
from flightedl.pserver.cuts.kept import KEPT_S, KeptCut, KeptRows
from flightedl.pserver.readers.consumers import ConsumerPositions
from flightedl.pserver.shard import Shard
from flightedl.pserver.stores.interface import distinct
from flightedl.pserver.stores.row_span import RowSpan
from flightedl.rowstore.tables import RowCut
from flightedl.rpc.call import Call, Message
from flightedl.rpc.routes import Outgoing
from flightedl.wire.changes import CHANGES_SCHEMA, HEADER_KEY, Change, encode_changes
from flightedl.wire.rows import Array

#: Maximum number of answers being sent at the same time. The remaining cuts are reserved for checkpoints and readers.
_ANSWERS = 2
#: Seconds after which a client that accepts no message may lose its place to another client.
_STALLED_S = 10.0
#: Seconds after a request with ``marks`` for which checkpoints are marked.
_MARKED_S = 20.0
#: Interval in seconds between two checks for changes.
_LOOK_S = 0.02
#: Memory for the old content of a table's rows that change before they are sent.
_UNDO_BYTES = 256 << 20
_CHUNK_BYTES = 1 << 20


class PserverFeed:
    """Feed of one pserver. Thread-safe.

    Args:
        shard: The pserver's blocks and rows.
        plan: Plan of the model.
        life: Election of the model's initial values.
        generation: Generation of the process.
        clock: Clock for waits.
        consumers: Stores what named consumers acknowledge; None to disable it.
    """

    def __init__(
        self,
        shard: Shard,
        plan: ShardPlan,
        life: int,
        generation: int,
        clock: Clock,
        consumers: ConsumerPositions | None = None,
    ) -> None:
        self._shard = shard
        self._plan = plan
        self._clock = clock
        self._consumers = consumers
        self._feed = ServerFeed(life, generation)
        self._lock = threading.Lock()
        self._admission = threading.Lock()
        #: Cuts and values of the answers that are being sent. Guarded by ``_admission``.
        self._sending: list[_Sending] = []
        #: Order and cut of the newest checkpoint that clients can stop at, and the time when it was ordered.
        self._mark: tuple[OrderNumber, KeptCut, float] | None = None
        #: Time of the newest request with ``marks``.
        self._marks_wanted = -math.inf

    def reserve_mark(self) -> int:
        """Return a number for the mark of the next checkpoint; 0 if no client wants to stop at it."""
        with self._lock:
            self._drop_mark()
            wanted = self._clock.now() - self._marks_wanted < _MARKED_S
            return self._feed.mark(self._shard.states()) if wanted else 0

    def begin_mark(self, checkpoint: OrderNumber, cut: KeptCut) -> None:
        """Keep the cut of a checkpoint, which may be incomplete."""
        with self._lock:
            self._drop_mark()
            self._mark = checkpoint, cut, self._clock.now()

    def expire(self) -> None:
        """Drop a mark that has been kept for long enough, and the cuts of answers that were never sent."""
        with self._admission:
            self._end_unsent()
        with self._lock:
            now = self._clock.now()
            if self._mark is not None and (now - self._mark[2] > KEPT_S or now - self._marks_wanted > _MARKED_S):
                self._drop_mark()

    def _drop_mark(self) -> None:
        if self._mark is not None:
            self._mark[1].drop()
            self._mark = None

    def _mark_for(self, ticket: ChangesTicket) -> tuple[OrderNumber, KeptCut, float] | None:
        """Return the mark at which a client must stop next, even if its cut is incomplete."""
        mark = self._mark
        if mark is None or not ticket.marks or mark[1].is_abandoned:
            return None
        start = self._feed.start_of(ticket.since)
        return None if start is not None and start >= mark[1].number else mark

    def changes(self, ticket: ChangesTicket, call: Call) -> Outgoing:
        """Return a base or increment as soon as there is a change or the wait times out.

        Raises:
            BusyError: too many clients are being answered, or there is no memory.
        """
        if ticket.marks:
            self._marks_wanted = self._clock.now()
        if self._consumers is not None and ticket.since is not None and self._feed.has(ticket.since):
            self._consumers.acknowledged(ticket, ticket.since, self._feed.number)
        self._wait(ticket, call)
        answer = self._admitted(ticket)
        try:
            header, as_of = self._begin(answer, ticket)
            answer.sending.moved = self._clock.now()
        except BaseException as error:
            answer.sending.end()
            if isinstance(error, MemoryError):
                raise BusyError("this pserver has no memory left to send its changes") from None
            raise
        if self._consumers is not None:
            self._consumers.answered(ticket, header.position.number, as_of)
        schema = CHANGES_SCHEMA.with_metadata({HEADER_KEY: encode(header)})
        return Outgoing(schema, answer.messages())

    def _admitted(self, ticket: ChangesTicket) -> _Answer:
        """Return an empty answer. If there is no place for it, it takes the place of a client that does not read."""
        with self._admission:
            self._end_unsent()
            stalled = (each for each in self._sending if self._clock.now() - each.moved > _STALLED_S)
            if len(self._sending) >= _ANSWERS and (other := next(stalled, None)) is not None:
                other.end()
                self._sending.remove(other)
            if len(self._sending) >= _ANSWERS:
                raise BusyError(f"this pserver sends its changes to {_ANSWERS} others: try again later")
            answer = _Answer(self._plan, ticket.wire, self._clock)
            self._sending.append(answer.sending)
            return answer

    def _end_unsent(self) -> None:
        for each in self._sending:
            if each.answer() is None:
                each.end()
        self._sending = [each for each in self._sending if not each.is_over]

    def _begin(self, answer: _Answer, ticket: ChangesTicket) -> tuple[ChangesHeader, float]:
        """Capture an answer's state. Return its header, and an instant that is not later than the state."""
        shard, feed = self._shard, self._feed
        with self._lock, shard.placing:
            began = self._clock.now()
            start = feed.start_of(ticket.since)
            mark = self._mark_for(ticket)
            if mark is not None and mark[1].is_complete.is_set():
                feed.note(shard.states())
                return answer.begin_mark(mark[1], mark[0], feed, start), mark[2]
            if start != feed.number or self._is_behind():
                feed.note(shard.states())
                answer.begin(shard, feed, start)
            header = ChangesHeader(
                position=feed.position(shard.placement),
                since=start,
                blocks=[(each.numbers.start, each.numbers.stop) for each in distinct(shard.dense.spans)],
                buckets=[(each.buckets.start, each.buckets.stop) for each in distinct(shard.rows.spans)],
                wire=ticket.wire,
                leaving=[(numbers.start, numbers.stop) for numbers in shard.leaving],
            )
        return header, began

    def _is_behind(self) -> bool:
        """True if anything has changed since the most recent number."""
        shard, spans = self._shard, distinct(self._shard.rows.spans)
        return self._feed.is_behind(shard.states()) or any(each.rows.removed_count for each in spans)

    def _wait(self, ticket: ChangesTicket, call: Call) -> None:
        """Wait as long as the client already has all changes."""
        deadline = min(self._clock.now() + ticket.wait_s, call.deadline)
        while self._clock.now() < deadline:
            mark = self._mark_for(ticket)
            if mark is None:
                if self._feed.start_of(ticket.since) != self._feed.number or self._is_behind():
                    return
            elif mark[1].is_complete.is_set():
                return
            call.check()
            call.closing.wait(_LOOK_S)


class _Sending:
    """Cuts and values that an answer holds while it is being sent. Thread-safe.

    Args:
        answer: The answer. If it is garbage, nothing more is sent.
    """

    def __init__(self, answer: _Answer) -> None:
        self.answer = weakref.ref(answer)
        self.cuts: list[tuple[RowSpan | KeptRows, RowCut]] = []
        self._values: deque[tuple[int, Array, int]] = deque()
        #: Time at which the newest message was handed to the transport; infinite while the state is being captured.
        self.moved = math.inf
        #: Set before a cut is dropped, because a dropped cut looks like one that was read to the end.
        self.is_over = False

    def add_values(self, first: int, values: Array, version: int) -> None:
        self._values.append((first, values, version))

    def next_values(self) -> tuple[int, Array, int] | None:
        with contextlib.suppress(IndexError):
            return self._values.popleft()
        return None

    def end(self) -> None:
        """Drop the cuts and values."""
        self.is_over = True
        self._values.clear()
        cuts = list(self.cuts)
        self.cuts.clear()
        for span, cut in cuts:
            with span.lock:
                cut.drop()


class _Answer:
    """A base or increment being sent. Its cuts are dropped at the end, even if nothing was sent.

    Args:
        plan: Plan of the model.
        wire: See ``ChangesTicket``.
        clock: Clock that measures how long the client has not accepted a message.
    """

    def __init__(self, plan: ShardPlan, wire: str, clock: Clock) -> None:
        self._plan = plan
        self._wire = wire
        self._clock = clock
        self.sending = _Sending(self)
        self._removed: Sequence[Removed] = ()

    def begin(self, shard: Shard, feed: ServerFeed, start: int | None) -> None:
        """Capture the current state. Raises MemoryError if there is not enough memory for it."""
        for begun in shard.feed_cuts(feed.number, start, _UNDO_BYTES, feed.remove):
            self.sending.cuts.append(begun)
        self._removed = feed.removed_after(start)
        blocks = [number for number in feed.changed_after(start) if number < shard.first_bucket]
        for run in adjacent(blocks):
            left = run
            while left:
                values, version, count = shard.values(left)
                self.sending.add_values(left.start, values, version)
                left = left[count:]

    def begin_mark(self, kept: KeptCut, checkpoint: OrderNumber, feed: ServerFeed, start: int | None) -> ChangesHeader:
        """Capture the state of a kept cut. Raises MemoryError if there is not enough memory to read it."""
        values, unchanged = kept.values, feed.unchanged_after(start)
        for begun in kept.begin_reading(range(len(self._plan.tables)), after=start):
            self.sending.cuts.append(begun)
        removed = [each for each in feed.removed_after(start) if each.number <= kept.number]
        waiting = [] if start is None else [each for rows in kept.rows for each in rows.removed]
        self._removed = [*removed, *(Removed(kept.number, table, ids.tobytes()) for table, ids in waiting)]
        for number in sorted(values.keys() - unchanged):
            self.sending.add_values(number, *values[number])
        position = feed.position(kept.placement)
        return ChangesHeader(
            position=replace(position, number=kept.number),
            since=start,
            blocks=[(each.start, each.stop) for each in adjacent(values)],
            buckets=[(each.buckets.start, each.buckets.stop) for each in kept.rows],
            checkpoint=checkpoint.number,
            proposal=checkpoint.serial,
            wire=self._wire,
        )

    def messages(self) -> Iterator[Message]:
        count = 0
        try:
            for changes in self._changes():
                count += len(changes)
                yield self._message(changes)
            yield self._message([Change("end", block=count)])
        finally:
            self.sending.end()

    def _message(self, changes: list[Change]) -> Message:
        if self.sending.is_over:
            raise BusyError(f"this client has accepted no changes for {_STALLED_S:g} s, and others wait: ask again")
        self.sending.moved = self._clock.now()
        return encode_changes(changes), None

    def _changes(self) -> Iterator[list[Change]]:
        while (values := self.sending.next_values()) is not None:
            yield list(self._blocks(*values))
        tables, cuts = self._plan.tables, self.sending.cuts
        for span, cut in cuts:
            ranges = [span.buckets] if cut.is_base else list(adjacent(cut.complete))
            if ranges:
                yield [Change("clear", start=each.start, stop=each.stop) for each in ranges]
        if self._removed:
            yield [Change("removed", tables[each.table].name, ids=each.ids) for each in self._removed]
        for span, cut in cuts:
            yield from self._rows(span, cut)
            expiry = list(self._expiry(span, cut))
            if expiry:
                yield expiry

    def _blocks(self, first: int, values: Array, version: int) -> Iterator[Change]:
        """Yield adjacent blocks, beginning with block ``first``, whose concatenated values are ``values``."""
        number, at, plan = first, 0, self._plan
        while at < values.size:
            block = plan.block(number)
            spec = plan.parameters[block.parameter]
            part = np.ascontiguousarray(values[at : at + block.size])
            data = self._sent(part, spec.short_kind or self._wire)
            yield Change("values", spec.name, number, block.start, block.stop, version, values=data)
            at += block.size
            number += 1

    def _rows(self, span: RowSpan | KeptRows, cut: RowCut) -> Iterator[list[Change]]:
        while True:
            with span.lock:
                chunk = cut.next_rows(_CHUNK_BYTES)
            if chunk is None:
                return
            if chunk.ids.size:
                columns = (
                    np.ascontiguousarray(each) for each in (chunk.ids, chunk.versions, chunk.epochs, chunk.values)
                )
                ids, versions, epochs, values = columns
                name, sent = self._plan.tables[chunk.table].name, self._sent(values, self._wire)
                yield [Change("rows", name, ids=ids, versions=versions, epochs=epochs, values=sent)]

    @staticmethod
    def _sent(values: Array, kind: str) -> Array:
        """Return values of float32 rounded to a 16-bit type, and all others unchanged."""
        is_short = kind != "" and values.dtype == np.float32
        return shortened(values.reshape(-1), kind) if is_short else values  # type: ignore[arg-type]

    def _expiry(self, span: RowSpan | KeptRows, cut: RowCut) -> Iterator[Change]:
        buckets = span.buckets
        for spec, state in zip(self._plan.tables, cut.tables, strict=True):
            if spec.evict is not None and (spec.evict.needs_version or spec.evict.needs_epoch):
                shifts = state.shifts if state.shifts.size else np.zeros(BUCKETS, np.int64)
                oldest = np.maximum(state.oldest + shifts, state.given_up)[buckets.start : buckets.stop]
                yield Change(
                    "expiry",
                    spec.name,
                    start=buckets.start,
                    stop=buckets.stop,
                    epoch=state.oldest_epoch,
                    versions=np.ascontiguousarray(oldest),
                )
