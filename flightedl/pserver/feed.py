"""The feed of one pserver: answers to clients that follow the changes of the pserver's blocks and rows.

``domain.feed.server`` numbers the changes and decides between a base and an increment. Nothing is recorded during
training: when a client requests changes, versions show which blocks have changed, and the bits that cuts maintain show
which rows. When a number is assigned, values are borrowed and rows are cut, so the answer has the state of that moment,
however slowly it is read. If the client reads too slowly, the cut is lost, and the client must repeat the request.

If a client wants to stop at checkpoints, the copies for the next checkpoint's file have a ``KeptCut`` as a companion.
Answers that end at the checkpoint have its content.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from flightedl.domain.feed.server import Removed, ServerFeed
from flightedl.domain.model.sharding import ShardPlan
from flightedl.domain.tables.placement import BUCKETS
from flightedl.errors import BusyError
from flightedl.kernels.half_precision import shortened
from flightedl.messages.base import encode
from flightedl.messages.feed import ChangesHeader, ChangesTicket
from flightedl.ports import Clock
from flightedl.pserver.consumers import ConsumerPositions
from flightedl.pserver.kept import KEPT_S, KeptCut, KeptRows
from flightedl.pserver.rows.span import RowSpan
from flightedl.pserver.rows.tables import RowCut
from flightedl.pserver.shard import Shard
from flightedl.pserver.stores import distinct
from flightedl.rpc.call import Call, Message
from flightedl.rpc.routes import Outgoing
from flightedl.wire.changes import CHANGES_SCHEMA, HEADER_KEY, Change, encode_changes

Array = npt.NDArray[np.generic]

#: Maximum number of answers being sent at the same time. The remaining cuts are reserved for checkpoints and readers.
_ANSWERS = 2
#: Seconds after a request with ``marks`` for which checkpoints are marked.
_MARKED_S = 20.0
#: Interval in seconds between two checks for changes.
_LOOK_S = 0.02
#: Memory for the old content of a table's rows that change before they are sent.
_UNDO_BYTES = 256 << 20
_CHUNK_BYTES = 1 << 20
_NO_MEMORY = "this pserver has no memory left to send its changes"


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
        self._answers = threading.BoundedSemaphore(_ANSWERS)
        #: Number and cut of the newest checkpoint that clients can stop at, and the time when it was ordered.
        self._mark: tuple[int, KeptCut, float] | None = None
        #: Time of the newest request with ``marks``.
        self._marks_wanted = -math.inf

    def reserve_mark(self) -> int:
        """Return a number for the mark of the next checkpoint; 0 if no client wants to stop at it."""
        with self._lock:
            self._drop_mark()
            wanted = self._clock.now() - self._marks_wanted < _MARKED_S
            return self._feed.mark(self._shard.states()) if wanted else 0

    def begin_mark(self, checkpoint: int, cut: KeptCut) -> None:
        """Keep the cut of a checkpoint, which may be incomplete."""
        with self._lock:
            self._drop_mark()
            self._mark = checkpoint, cut, self._clock.now()

    def expire(self) -> None:
        """Drop a mark that has been kept for long enough."""
        with self._lock:
            now = self._clock.now()
            if self._mark is not None and (now - self._mark[2] > KEPT_S or now - self._marks_wanted > _MARKED_S):
                self._drop_mark()

    def _drop_mark(self) -> None:
        if self._mark is not None:
            self._mark[1].drop()
            self._mark = None

    def _mark_for(self, ticket: ChangesTicket) -> tuple[int, KeptCut, float] | None:
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
        if not self._answers.acquire(blocking=False):
            raise BusyError(f"this pserver sends its changes to {_ANSWERS} others: try again later")
        answer = _Answer(self._plan, self._answers, ticket.wire)
        shard, feed = self._shard, self._feed
        with self._lock, shard.placing:
            began = self._clock.now()
            start = feed.start_of(ticket.since)
            mark = self._mark_for(ticket)
            if mark is not None and mark[1].is_complete.is_set():
                feed.note(shard.states())
                try:
                    header = answer.begin_mark(mark[1], mark[0], feed, start)
                except MemoryError:
                    raise BusyError(_NO_MEMORY) from None
                return self._outgoing(ticket, header, answer, mark[2])
            if start != feed.number or self._is_behind():
                feed.note(shard.states())
                try:
                    answer.begin(shard, feed, start)
                except MemoryError:
                    raise BusyError(_NO_MEMORY) from None
            header = ChangesHeader(
                position=feed.position(shard.placement),
                since=start,
                blocks=[(each.numbers.start, each.numbers.stop) for each in distinct(shard.dense.spans)],
                buckets=[(each.buckets.start, each.buckets.stop) for each in distinct(shard.rows.spans)],
                wire=ticket.wire,
                leaving=[(numbers.start, numbers.stop) for numbers in shard.leaving],
            )
        return self._outgoing(ticket, header, answer, began)

    def _outgoing(self, ticket: ChangesTicket, header: ChangesHeader, answer: _Answer, as_of: float) -> Outgoing:
        """Return an answer whose state is not older than the instant ``as_of``."""
        if self._consumers is not None:
            self._consumers.answered(ticket, header.position.number, as_of)
        schema = CHANGES_SCHEMA.with_metadata({HEADER_KEY: encode(header)})
        return Outgoing(schema, answer.messages())

    def _is_behind(self) -> bool:
        """True if anything has changed since the most recent number."""
        shard = self._shard
        return self._feed.is_behind(shard.states()) or any(each.rows.removed for each in distinct(shard.rows.spans))

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


class _Answer:
    """A base or increment being sent. Its cuts are always dropped at the end, even if nothing was sent.

    Args:
        plan: Plan of the model.
        place: Released at the end.
        wire: See ``ChangesTicket``.
    """

    def __init__(self, plan: ShardPlan, place: threading.BoundedSemaphore, wire: str) -> None:
        self._plan = plan
        self._wire = wire
        self._place: threading.BoundedSemaphore | None = place
        self._values: list[tuple[int, Array, int]] = []
        self._cuts: list[tuple[RowSpan | KeptRows, RowCut]] = []
        self._removed: Sequence[Removed] = ()

    def begin(self, shard: Shard, feed: ServerFeed, start: int | None) -> None:
        """Capture the current state. Raises MemoryError if there is not enough memory for it."""
        self._cuts = list(shard.feed_cuts(feed.number, start, _UNDO_BYTES, feed.remove))
        self._removed = feed.removed_after(start)
        blocks = [number for number in feed.changed_after(start) if number < shard.first_bucket]
        place = 0
        while place < len(blocks):
            end = place + 1
            while end < len(blocks) and blocks[end] == blocks[place] + end - place:
                end += 1
            values, version, count = shard.values(range(blocks[place], blocks[place] + end - place))
            self._values.append((blocks[place], values, version))
            place += count

    def begin_mark(self, kept: KeptCut, checkpoint: int, feed: ServerFeed, start: int | None) -> ChangesHeader:
        """Capture the state of a kept cut. Raises MemoryError if there is not enough memory to read it."""
        values, unchanged = kept.values, feed.unchanged_after(start)
        for begun in kept.begin_reading(range(len(self._plan.tables)), after=start):
            self._cuts = [*self._cuts, begun]
        removed = [each for each in feed.removed_after(start) if each.number <= kept.number]
        waiting = [] if start is None else [each for rows in kept.rows for each in rows.removed]
        self._removed = [*removed, *(Removed(kept.number, table, ids.tobytes()) for table, ids in waiting)]
        self._values = [(number, *values[number]) for number in sorted(values) if number not in unchanged]
        position = feed.position(kept.placement)
        return ChangesHeader(
            position=replace(position, number=kept.number),
            since=start,
            blocks=[(each.start, each.stop) for each in _ranges(sorted(values))],
            buckets=[(each.buckets.start, each.buckets.stop) for each in kept.rows],
            checkpoint=checkpoint,
            wire=self._wire,
        )

    def messages(self) -> Iterator[Message]:
        count = 0
        try:
            for changes in self._changes():
                count += len(changes)
                yield encode_changes(changes), None
            yield encode_changes([Change("end", block=count)]), None
        finally:
            self._end()

    def _changes(self) -> Iterator[list[Change]]:
        while self._values:
            yield list(self._blocks(*self._values.pop(0)))
        tables = self._plan.tables
        for span, cut in self._cuts:
            ranges = [span.buckets] if cut.is_base else _ranges(cut.complete)
            if ranges:
                yield [Change("clear", start=each.start, stop=each.stop) for each in ranges]
        if self._removed:
            yield [Change("removed", tables[each.table].name, ids=each.ids) for each in self._removed]
        for span, cut in self._cuts:
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

    def _end(self) -> None:
        cuts, place = self._cuts, self._place
        self._cuts, self._values, self._place = [], [], None
        if place is not None:
            _drop(cuts, place)

    def __del__(self) -> None:
        if self._place is not None:
            # The answer was never sent. The thread running the garbage collector may hold a span's lock.
            threading.Thread(target=_drop, args=(self._cuts, self._place), name="flightedl-feed-end").start()


def _drop(cuts: Sequence[tuple[RowSpan | KeptRows, RowCut]], place: threading.BoundedSemaphore) -> None:
    for span, cut in cuts:
        with span.lock:
            cut.drop()
    place.release()


def _ranges(buckets: Sequence[int]) -> list[range]:
    """Return ascending numbers as ranges."""
    found: list[range] = []
    for bucket in buckets:
        if found and found[-1].stop == bucket:
            found[-1] = range(found[-1].start, bucket + 1)
        else:
            found.append(range(bucket, bucket + 1))
    return found
