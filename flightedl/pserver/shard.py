"""Operations on a pserver's blocks: ``domain.pserver.blocks`` makes the decisions, and the stores carry them out.

Rules:

* Each span of the protocol has a lock, and its values are in a store (see ``stores``). A push holds the lock while
  it allocates memory, lets the protocol decide, and carries out the effects. A failure between the decision and the
  last effect ends this shard (see ``stores.soundness``).
* Every part of a message is validated before anything changes: its blocks must belong to this shard, its size must
  match, and its numbers must be finite.
* A new version wakes the waiting clients once per message, not once per block (see ``stores.changes``).
* Values are sent directly from the span's memory, which is borrowed under the span's lock. A reader always gets values
  of a single version.
* A new view takes effect on all blocks at the same time, under all their locks.

``stores.held`` defines the lock order.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from flightedl.domain.consistency.modes import Mode
from flightedl.domain.consistency.rounds_values import Pull
from flightedl.domain.exactly_once.applied import AppliedBatches
from flightedl.domain.feed.server import State
from flightedl.domain.model.optimizers import Optimizer
from flightedl.domain.model.sharding import ShardPlan, placement_of_hash
from flightedl.domain.pserver.block_values import (
    AddGradient,
    BlocksDue,
    CopyBlocks,
    Effect,
    Needs,
    Push,
    ReleasedBlocks,
    Split,
    Unmovable,
    Update,
)
from flightedl.domain.pserver.block_values import Pushed as Decided
from flightedl.domain.pserver.blocks import around
from flightedl.domain.tables.placement import buckets_of
from flightedl.errors import BusyError, MessageError, StalePlacementError
from flightedl.formats.checkpoint_files import Record
from flightedl.formats.row_batches import ROWS_OF, StoredRows
from flightedl.formats.shard_files import StoredBlock
from flightedl.messages.control import ViewReply, ViewRequest
from flightedl.messages.parameters import Outcome, PushHeader
from flightedl.process.shared_memory import SharedMemory
from flightedl.pserver.cuts.copying import Copying
from flightedl.pserver.cuts.kept import KeptCut, KeptRows
from flightedl.pserver.meter import Meter
from flightedl.pserver.stores.array_span import ArraySpan, BlockArrays, ReceivedArray
from flightedl.pserver.stores.changes import Changes
from flightedl.pserver.stores.dense import DenseStore
from flightedl.pserver.stores.held import AnySpan, Held
from flightedl.pserver.stores.interface import Content, Pushed, Span, Wanted, distinct
from flightedl.pserver.stores.row_span import ReceivedRows, RowSpan
from flightedl.pserver.stores.rows import RowStore
from flightedl.pserver.stores.soundness import Soundness
from flightedl.recording.writer import Recorder
from flightedl.rowstore.tables import RowCut
from flightedl.rowstore.values import TableRows
from flightedl.wire.parts import ReceivedBlocks, parts_of
from flightedl.wire.rows import Array, OutgoingBlocks, Row, Rows

#: Maximum number of simultaneous readers of all rows.
_READERS = 2
#: Size of the rows that are sent together.
_CHUNK_BYTES = 1 << 20
_UPDATE = Needs(has_update=True)
#: Maximum wait for moving blocks between two checks, in case a change was announced just before the wait.
_LOOK_S = 0.02


class Shard:
    """The blocks of one pserver. Thread-safe.

    Args:
        plan: Shard plan of the model.
        index: Index of the pserver.
        optimizer: Optimizer of the model.
        mode: Initial mode of the blocks.
        wire: "bfloat16" or "float16" if float32 elements are sent with 16 bits; otherwise empty.
        on_lost: Called with the reason when the blocks have become inconsistent. Ends the process.
        recorder: Recorder of the protocol's calls; None to disable recording.
        generation: Generation of the pserver's process, for recordings.
        meter: Counters; None to create counters for this shard alone.
        row_bytes: Memory limit of the rows; 0 to use all available memory.
        shares_memory: True to place values in memory that trainers on the same host can map.
    """

    def __init__(
        self,
        plan: ShardPlan,
        index: int,
        optimizer: Optimizer,
        mode: Mode,
        wire: str = "",
        on_lost: Callable[[str], None] = lambda _: None,
        recorder: Recorder | None = None,
        generation: int = 0,
        meter: Meter | None = None,
        row_bytes: int = 0,
        *,
        shares_memory: bool = False,
    ) -> None:
        self.plan_hash = plan.hash
        #: Placement at startup or after the newest move here, and a flag: True if blocks have moved since then.
        self._placement, self._has_moved = plan.placement, False
        #: Held while blocks leave or arrive and ``placement`` changes.
        self.placing = threading.RLock()
        self.meter = Meter() if meter is None else meter
        self.changes = Changes()
        self._index = index
        self.dense = DenseStore(plan, index, optimizer, wire, shares_memory=shares_memory)
        self.rows = RowStore(plan, index, row_bytes)
        self._soundness = Soundness(on_lost)
        #: Lowest number of a bucket. Parameter blocks have lower numbers.
        self.first_bucket = plan.block_count
        self._most_blocks = plan.block_count + plan.bucket_count
        self._held = Held(
            self.dense, self.rows, self.first_bucket, mode, self._soundness, recorder, (index, generation)
        )
        self._protocol, self._deciding = self._held.protocol, self._held.deciding
        self.copying = Copying(self._held, plan.hash)
        #: The block whose updates the status shows.
        self._lowest = 0
        #: Adjacent blocks that accept no pushes after the end of their open round, because they move to another
        #: pserver.
        self.leaving: list[range] = []
        #: Blocks that are frozen, and blocks that are about to be adopted.
        self._frozen: list[range] = []
        self._approaching: list[range] = []
        self._spans_changed()
        #: Block or bucket -> number of times that it has been adopted.
        self._arrivals: Counter[int] = Counter()
        #: Held by each reader of all rows. It limits the readers, so that one cut is always left for checkpoints.
        self._reading = threading.BoundedSemaphore(_READERS)

    # figures

    @property
    def memory(self) -> SharedMemory | None:
        """Shared memory with the values, if trainers on the same host can map it."""
        return self.dense.memory

    @property
    def numbers(self) -> list[int]:
        return self.dense.numbers

    @property
    def block_count(self) -> int:
        return len(self.dense.numbers)

    @property
    def size_bytes_total(self) -> int:
        """Memory of values, slots, accumulators and rows, in bytes."""
        return self.dense.size_bytes + self.rows.size_bytes

    def blocks(self) -> list[BlockArrays]:
        """Return all blocks with views of their arrays. Must not be called while pushes are in progress."""
        states = [(span, self._protocol.span(span.numbers.start)) for span in distinct(self.dense.spans)]
        return [block for span, state in states for block in span.blocks(state.rounds, state.updates)]

    def version_range(self) -> tuple[int, int]:
        return self._protocol.version_range()

    def waits_for(self) -> tuple[int, list[int]]:
        """Return the lowest version at which a round is waiting, and the members that the round waits for, if any."""
        waits: list[tuple[int, list[int]]] = []
        for span in self._held.spans():
            with span.lock:
                if span.is_split:
                    continue
                rounds = self._protocol.span(span.numbers.start).rounds
                if members := rounds.holds_up():
                    waits.append((rounds.version, members))
        return min(waits, default=(0, []))

    def all_numbers(self, plan_hash: str) -> list[int]:
        """Return the numbers of all blocks. Used for senders that do not name blocks.

        Raises:
            StalePlacementError: Blocks were adopted or released after the placement that the sender knows.
        """
        with self.placing:
            if placement_of_hash(plan_hash) < self._placement + self._has_moved:
                raise StalePlacementError("blocks have moved: read the job's placement again")
            return self.numbers

    def place(self, plan_hash: str) -> None:
        """Record that another placement now determines this pserver's blocks."""
        self.plan_hash = self.copying.plan_hash = plan_hash
        if self._has_moved:
            self._placement, self._has_moved = self.placement, False

    # first values

    def initialize(self, election: int, row: Row) -> None:
        """Accept initial values for a block. Values from a newer election replace values from an older one.

        Raises:
            MessageError: The block is not on this pserver, or has a different size.
            GradientError: The values are not finite.
        """
        values = self.dense.first_values(row)
        with self._held.locked(self.dense, row.block) as span:
            place = span.detach_for_write()[span.part(row.block)]
            with self._deciding:
                is_accepted = self._protocol.initialize(row.block, election)
            if is_accepted:
                place[:] = values

    def initialized_count(self, election: int) -> int:
        return self._protocol.initialized_count(election)

    # pushes

    def push(self, header: PushHeader, parts: Sequence[ReceivedBlocks]) -> list[Pushed]:
        """Push the parts of a message one after the other.

        Normally, a part is exactly a span, and its cost does not depend on the number of blocks. A repeated part is
        answered, but not applied again.

        Returns:
            The answers, in the order of the parts.

        Raises:
            MessageError: A block is not here, a size is wrong, a base version is in the future, or the mode does not
                permit sums of several batches. Earlier parts were applied.
            GradientError: A gradient is not finite. Earlier parts were applied.
        """
        if len(parts) > 1 and sum(len(part.blocks) for part in parts) > self._most_blocks:
            raise MessageError("a message names more blocks than the model has")
        began = self.meter.now()
        push = Push.of(header)
        found: list[Pushed] = []
        for part in parts:
            blocks, version, data, is_finite = part.blocks, part.version, part.data, part.is_finite
            if blocks.start >= self.first_bucket:
                found.extend(self._push_rows(push, part, header))
                continue
            span = self.dense.spans.get(blocks.start)
            pushed = None
            if span is not None and blocks == span.numbers and (len(data) == span.offsets[-1] or not data):
                gradient = self.dense.gradient(span, blocks, data, is_finite=is_finite) if data else None
                received = ReceivedArray(gradient, header.pull and header.checksums, self._protocol.is_synchronous)
                pushed = self._push(push, span, version, received, header, has_gradient=gradient is not None)
            if pushed is not None:
                found.append(pushed)
            else:
                found.extend(self._push_by_span(push, part, header))
        if self.changes.has_news:
            self.changes.announce()
        self.meter.message(self.meter.now() - began, parts, found)
        return found

    def push_rows(self, header: PushHeader, rows: Rows) -> list[Pushed]:
        """Push the rows in a plain DoPut, which any Flight client can send; see ``push``."""
        for place, number in enumerate(rows.blocks):
            self.dense.require_size(range(number, number + 1), rows.offsets[place + 1] - rows.offsets[place])
        return self.push(header, list(parts_of(rows)))

    def _push_rows(self, push: Push, part: ReceivedBlocks, header: PushHeader) -> Iterator[Pushed]:
        is_one_span = True
        for span, received in self.rows.by_span(part.blocks, self.rows.pushed(part)):
            is_one_span = span.numbers == part.blocks
            has_gradient = len(received.gradients) > 0
            pushed = self._push(push, span, part.version, received, header, has_gradient=has_gradient)
            if pushed is not None:
                yield pushed
        if not is_one_span:
            self._join_rows(part.blocks)

    def _join_rows(self, blocks: range) -> None:
        """Join spans of buckets whose states have become equal, a few buckets per push, so that pushes stay fast."""
        with self.rows.lock, self._soundness:
            for border in self.rows.borders(blocks):
                with self._deciding:
                    joined = self._protocol.join(border, self.rows.joined_at_once())
                if joined is not None:
                    self.rows.join(joined, self._protocol.version(border))
                    break

    def _push_by_span(self, push: Push, part: ReceivedBlocks, header: PushHeader) -> Iterator[Pushed]:
        """Push a part that is not exactly one span. If the part contains only some blocks of a span, split the span."""
        blocks, version, data, is_finite = part.blocks, part.version, part.data, part.is_finite
        self.dense.require_size(blocks, len(data))
        number = blocks.start
        while number < blocks.stop:
            span = self.dense.span(number)
            numbers = range(number, min(span.numbers.stop, blocks.stop))
            size_bytes = self.dense.sent_bytes(numbers) if data else 0
            gradient = None
            if data:
                gradient = self.dense.gradient(span, numbers, data[:size_bytes], is_finite=is_finite)
            if numbers != span.numbers:
                self._split_around(span, numbers)
                continue
            received = ReceivedArray(gradient, header.pull and header.checksums, self._protocol.is_synchronous)
            pushed = self._push(push, span, version, received, header, has_gradient=gradient is not None)
            if pushed is not None:
                yield pushed
                number, data = numbers.stop, data[size_bytes:]

    def _split_around(self, span: ArraySpan, numbers: range) -> None:
        with span.lock, self._soundness:
            if not span.is_split:
                with self._deciding:
                    split = self._protocol.split(span.numbers.start, around(span.numbers, numbers))
                self._split(split)

    def _split(self, split: Split) -> None:
        self._held.split(split, self._protocol.version(split.span))

    def _push(
        self,
        push: Push,
        span: Span[Content],
        base_version: int,
        received: Content,
        header: PushHeader,
        *,
        has_gradient: bool,
    ) -> Pushed | None:
        """Push to all blocks of a span. Return None if the span has been split; the caller then pushes to its parts."""
        protocol, first = self._protocol, span.numbers.start
        with span.lock:
            if self._soundness.lost_because:
                self._soundness.require()
            if span.is_split:
                return None
            if self.leaving:
                self._require_thawed(span.numbers)
            needs = _UPDATE
            if protocol.is_synchronous or self.copying.under_way:
                with self._deciding:
                    needs = protocol.prepare(first, push, base_version, has_gradient=has_gradient)
                self._carry_out(span, needs.copies, received)
            try:
                received = span.get_ready(needs, received)
            except MemoryError:
                name = self.dense.name_of(first) if first < self.first_bucket else "rows"
                raise BusyError(
                    f"pserver {self._index} has no memory left for a gradient of {name}: "
                    "increase its memory or the number of pservers"
                ) from None
            try:
                with self._deciding:
                    decided = protocol.push(first, push, base_version, has_gradient=has_gradient)
                if isinstance(decided, Split):
                    self._split(decided)
                    return None
                self._carry_out(span, decided.effects, received)
            except BaseException as error:
                self._soundness.interrupted(error)
                raise
            self.changes.has_news |= decided.is_news
            if decided.effects and first == self._lowest:
                self.meter.updates(decided.effects, base_version, push.member)
            if header.pull and decided.is_ready:
                return Pushed(span.piece(span.numbers, decided.version, decided.outcome, received))
            return _answer(span, decided, received.wanted, pull=header.pull)

    def _carry_out(self, span: Span[Content], effects: Sequence[Effect], received: Content) -> None:
        for effect in effects:
            if isinstance(effect, Update | AddGradient):
                span.carry_out(effect, received)
            elif isinstance(effect, CopyBlocks | BlocksDue):
                self.copying.carry_out(span, effect)

    # pulls

    def wanted(self, blocks: Iterable[int], min_versions: Sequence[int]) -> list[Wanted]:
        """Return reads of these blocks. Adjacent blocks with the same span and version are combined into one read.

        Args:
            blocks: Block numbers, preferably ascending.
            min_versions: A version for each block, or one version for all.

        Raises:
            MessageError: A block is not on this pserver.
        """
        found: list[Wanted] = []
        last: ArraySpan | None = None
        for place, number in enumerate(blocks):
            span = self.dense.span(number)
            version = min_versions[place if len(min_versions) > 1 else 0]
            if span is last and found[-1].blocks.stop == number and found[-1].min_version == version:
                found[-1] = Wanted(range(found[-1].blocks.start, number + 1), version)
            else:
                found.append(Wanted(range(number, number + 1), version))
            last = span
        return found

    def lookup(self, part: ReceivedBlocks) -> Wanted:
        """Return the read that corresponds to a lookup.

        Raises:
            MessageError: The lookup is damaged, or its buckets are not on this pserver.
        """
        return Wanted(part.blocks, part.version, self.rows.asked(part).wanted)

    def read(self, wanted: Wanted, member: int) -> tuple[list[OutgoingBlocks], list[Wanted]]:
        """Return the available values of a read, and reads of the blocks that have not reached their version yet.

        If the membership has ended, the outcome is NOT_MEMBER, and there are no values.
        """
        pieces: list[OutgoingBlocks] = []
        rest: list[Wanted] = []
        protocol = self._protocol
        number, end, version = wanted.blocks.start, wanted.blocks.stop, wanted.min_version
        while number < end:
            with self._held.locked(self._held.store(number), number) as span:
                numbers = range(number, min(span.numbers.stop, end))
                rows = wanted.rows
                if numbers != wanted.blocks and isinstance(span, RowSpan):
                    rows = rows.within(span.buckets_of(numbers), self.rows.tables)
                state, present = protocol.pull(number, member, version), protocol.version(number)
                if state is Pull.WAIT:
                    rest.append(Wanted(numbers, version, rows))
                elif state is Pull.NOT_MEMBER:
                    pieces.append(OutgoingBlocks(numbers, present, Outcome.NOT_MEMBER, None, ()))
                elif isinstance(span, RowSpan):
                    pieces.append(span.piece(numbers, present, Outcome.NONE, ReceivedRows(wanted=rows)))
                else:
                    received = ReceivedArray(is_for_many=protocol.is_synchronous)
                    pieces.append(span.piece(numbers, present, Outcome.NONE, received))
            number = numbers.stop
        return pieces, rest

    def values(self, numbers: range) -> tuple[Array, int, int]:
        """Return the values of the first of these adjacent blocks, as many as have the same span.

        Returns:
            (n,) values, which do not change while the array is alive; their version; and the number of blocks.
        """
        with self._held.locked(self.dense, numbers.start) as span:
            found = range(numbers.start, min(span.numbers.stop, numbers.stop))
            return span.borrow(found), self._protocol.version(found.start), len(found)

    def states(self) -> dict[int, State]:
        """Return the states of all blocks; the first bucket of a span stands for all of its buckets.

        A block may still have the value before the last update.
        """
        found: dict[int, State] = {}
        for span in self._protocol.spans:
            numbers, is_rows = span.numbers, span.numbers.start >= self.first_bucket
            changes = span.rounds.version if is_rows else span.updates
            for number in numbers[:1] if is_rows else numbers:
                found[number] = State(self._arrivals[number], changes)
        return found

    @property
    def placement(self) -> int:
        """Version of the placement that describes the blocks on this pserver, for holders of ``placing``."""
        return placement_of_hash(self.plan_hash)

    def feed_cuts(
        self, number: int, after: int | None, most_bytes: int, note_removed: Callable[[int, bytes], None]
    ) -> Iterator[tuple[RowSpan, RowCut]]:
        """Yield cuts of rows whose last change has a higher number in the feed; see ``RowTables.begin_feed_cut``.

        ``note_removed`` is called with the tables and ids of rows that cuts have removed.
        """
        for span in distinct(self.rows.spans):
            with span.lock:
                self._soundness.require()
                version = self._protocol.version(span.numbers.start)
                cut = span.rows.begin_feed_cut(version, span.epoch, number, after, most_bytes)
                for table, ids in span.rows.take_removed():
                    note_removed(table, ids.tobytes())
            yield span, cut

    def all_rows(
        self, table: int, buckets: range | None = None, kept: KeptCut | None = None, plan_hash: str = ""
    ) -> Iterator[StoredRows]:
        """Yield the rows of a table, in their state in a kept cut or at the time of the first iteration.

        Without ``buckets``, the rows of all buckets of this pserver are read. With ``plan_hash``, these must be exactly
        the buckets that the plan assigns to it.

        Raises:
            StalePlacementError: Buckets have moved.
            BusyError: Other callers are reading tables, or there is not enough memory for concurrent changes. Retry.
        """
        if not self._reading.acquire(blocking=False):
            raise BusyError(f"pserver {self._index} is being read by {_READERS} others: try again later")
        cuts: list[tuple[RowSpan | KeptRows, RowCut]] = []
        try:
            for begun in () if kept is None else kept.begin_reading((table,), buckets or range(0)):
                cuts.append(begun)  # noqa: PERF402 - those that have begun are dropped if another one fails
            with self.placing:
                if plan_hash and placement_of_hash(plan_hash) != self.placement:
                    raise StalePlacementError("blocks have moved: read the job's placement again")
                for bucket in (buckets or ()) if kept is None else ():
                    self.rows.span(self.first_bucket + bucket)
                for span in distinct(self.rows.spans) if kept is None else ():
                    with span.lock:
                        self._soundness.require()
                        version = self._protocol.version(span.numbers.start)
                        cuts.append((span, span.rows.begin_cut(version, span.epoch, is_base=True, only=(table,))))
            for rows, cut in cuts:
                yield from _rows_of(rows, cut, self.rows.tables[table].salt, buckets)
        except MemoryError:
            raise BusyError(f"pserver {self._index} has no memory left to read a table") from None
        finally:
            for rows, cut in cuts:
                with rows.lock:
                    cut.drop()
            self._reading.release()

    # views

    @property
    def members(self) -> list[int]:
        return self._protocol.members

    def set_members(self, request: ViewRequest) -> ViewReply:
        with self._held.all_locked(), self._soundness:
            with self._deciding:
                applied = self._protocol.apply_view(request)
            for first, effects in applied.effects:
                if first < self.first_bucket:
                    self._carry_out(self.dense.span(first), effects, ReceivedArray())
                else:
                    self._carry_out(self.rows.span(first), effects, ReceivedRows())
            self.changes.has_news = True
        return applied.reply

    # Moves of blocks to another pserver

    def adopt(self, released: ReleasedBlocks, span: AnySpan) -> Unmovable | None:
        """Add a prepared span of blocks or buckets released by another pserver.

        If this fails or returns ``Unmovable``, nothing was changed, and the span is released.

        Raises:
            CorruptError: The released blocks are damaged, or belong to another job.
            MessageError: The blocks are already here, or do not match the epochs here.
        """
        is_adopted = False
        try:
            with self._held.all_locked(), self._deciding:
                unmovable = self._protocol.adopt(released)
                if unmovable is None:
                    with self._soundness:
                        is_adopted = True
                        self._arrivals.update(released.numbers)
                        if isinstance(span, RowSpan):
                            self.rows.adopt(span)
                        else:
                            self.dense.adopt(span)
                        self._has_moved = True
                        self._spans_changed()
        finally:
            if not is_adopted:
                span.release()
        return unmovable

    def drop(self, numbers: range) -> None:
        """Remove adjacent frozen blocks or buckets, which another pserver owns now."""
        while numbers:
            store = self._held.store(numbers.start)
            with self._held.all_locked(), self._soundness:
                span = store.span(numbers.start).numbers
                some = range(numbers.start, min(span.stop, numbers.stop))
                with self._deciding:
                    released = self._protocol.release(some)
                    if isinstance(released, Split):
                        released = self._protocol.release(some)
                assert isinstance(released, ReleasedBlocks), f"frozen blocks cannot be released: {released}"
                store.drop(released)
                self._has_moved = True
                self._spans_changed()
            numbers = range(some.stop, numbers.stop)

    def freeze(self, numbers: range) -> bool:
        """Stop accepting pushes to adjacent blocks when their open round ends. Return True if it has ended."""
        if numbers not in self.leaving:
            self.leaving = [*self.leaving, numbers]
        with contextlib.ExitStack() as held:
            for lock in dict.fromkeys(span.lock for span in self.spans_in(numbers)):
                held.enter_context(lock)
            self._soundness.require()
            is_frozen = self._protocol.is_at_edge(numbers)
        if is_frozen:
            self._frozen = [*self._frozen, numbers]
        return is_frozen

    def approach(self, numbers: range) -> None:
        """Make requests for these blocks wait, because the blocks are about to be adopted."""
        self._approaching = [*self._approaching, numbers]

    @property
    def is_moving(self) -> bool:
        """True if requests may have to wait until blocks have left or arrived."""
        return bool(self.leaving or self._approaching)

    def await_moves(self, numbers: Iterable[range], timeout_s: float, *, is_read: bool = False) -> None:
        """Wait until none of these blocks is frozen or about to be adopted, at most ``timeout_s`` seconds.

        With ``is_read``, frozen blocks are ignored, because they can be read.
        """
        wanted = list(numbers)
        deadline = self.meter.now() + timeout_s
        while held := self._approaching if is_read else [*self._frozen, *self._approaching]:
            seen, left_s = self.changes.count, deadline - self.meter.now()
            if left_s <= 0 or not any(a.start < b.stop and b.start < a.stop for a in wanted for b in held):
                return
            self.changes.wait(seen, min(left_s, _LOOK_S))

    def thaw(self, numbers: range) -> None:
        """Undo ``freeze`` and ``approach`` of adjacent blocks if the first of these blocks is in ``numbers``."""
        self.leaving = [other for other in self.leaving if other.start not in numbers]
        self._frozen = [other for other in self._frozen if other.start not in numbers]
        self._approaching = [other for other in self._approaching if other.start not in numbers]
        self.changes.has_news = True
        self.changes.announce()

    def _require_thawed(self, numbers: range) -> None:
        for frozen in self.leaving:
            if numbers.start < frozen.stop and frozen.start < numbers.stop and self._protocol.is_at_edge(numbers):
                raise StalePlacementError(f"the blocks {numbers} are moving: read the job's placement again")

    def spans_in(self, numbers: range) -> Iterator[AnySpan]:
        """Yield the spans that contain any of these blocks; spans may be split at any moment."""
        number = numbers.start
        while number < numbers.stop:
            span = self._held.store(number).span(number)
            yield span
            number = span.numbers.stop

    def version(self, number: int) -> int:
        """Return the version of a block or bucket. The caller holds the lock of its span."""
        return self._protocol.version(number)

    def unadoptable(self, released: ReleasedBlocks) -> Unmovable | None:
        """Return the reason why these blocks cannot be adopted at the moment, or None."""
        with self._deciding:
            return self._protocol.unadoptable(released)

    def buckets_of(self, numbers: range) -> range:
        """Return the buckets at some positions of the plan."""
        return range(numbers.start - self.first_bucket, numbers.stop - self.first_bucket)

    def states_of(self, numbers: range) -> list[ReleasedBlocks]:
        """Return the state of frozen blocks, for each of their spans."""
        spans = [span.numbers for span in self.spans_in(numbers)]
        parts = [range(max(span.start, numbers.start), min(span.stop, numbers.stop)) for span in spans]
        with self._deciding:
            return [self._protocol.state_of(part) for part in parts]

    def _spans_changed(self) -> None:
        self._lowest = min([*self.dense.numbers[:1], *self.rows.numbers[:1]], default=0)
        self.meter.blocks_moved()
        # Wake all waiting clients, because the blocks for which they wait may have left.
        self.changes.has_news = True
        self.changes.announce()

    # applied batches

    def set_task_counts(self, epochs: Sequence[tuple[int, int]], open_epoch: int = 0) -> None:
        """See ``BlockProtocol.set_task_counts``.

        Raises:
            MessageError: An epoch has more tasks than stated.
        """
        with self._deciding:
            self._protocol.set_task_counts(epochs, open_epoch)

    def applied(self) -> AppliedBatches:
        """Return a copy of the set of applied batches."""
        self._soundness.require()
        with self._deciding:
            return self._protocol.applied()

    # Restoring, before the shard is in use

    def begin_restore(self) -> None:
        self.dense.begin_restore()
        self.rows.begin_restore()

    def restore(self, stored: Record) -> None:
        """Restore a record of a checkpoint.

        Raises:
            CorruptError: The record does not match the blocks, tables or optimizers.
        """
        if isinstance(stored, StoredBlock):
            self.dense.restore(stored)
        else:
            self.rows.restore(stored)

    def restored(self, applied: AppliedBatches) -> None:
        """Complete a restore. ``applied`` contains the applied batches of all blocks.

        Raises:
            CorruptError: Blocks are missing.
        """
        for split in self._protocol.restore(applied, {**self.dense.restored, **self.rows.restored}):
            self._held.split(split, 0)
        self.rows.finish_restore()


def _rows_of(span: RowSpan | KeptRows, cut: RowCut, salt: int, buckets: range | None) -> Iterator[StoredRows]:
    while True:
        with span.lock:
            chunk = cut.next_rows(_CHUNK_BYTES)
        if chunk is None:
            return
        if buckets is not None:
            found = buckets_of(chunk.ids, salt)
            chunk = chunk.chosen((found >= buckets.start) & (found < buckets.stop))
        yield StoredRows(span.numbers.start, chunk.table, f"{ROWS_OF}{chunk.values.dtype.name}", *chunk[2:])


def _answer(span: Span[Content], decided: Decided, asked: TableRows, *, pull: bool) -> Pushed:
    numbers, version, outcome, offsets = span.numbers, decided.version, decided.outcome, span.offsets
    if outcome is Outcome.PARTLY_APPLIED:
        bits, count = decided.having, len(numbers) if offsets else 1
        starts = list(range(0, (count + 1) * len(bits), len(bits))) if offsets else ()
        return Pushed(OutgoingBlocks(numbers, version, outcome, np.frombuffer(bits * count, np.uint8), starts))
    wanted = None
    if pull and decided.follows is not None:
        # Copy it, because the message's memory is reused before the round closes.
        wanted = Wanted(numbers, decided.follows, asked.copy() if len(asked) else asked)
    return Pushed(OutgoingBlocks(numbers, version, outcome, None, offsets), wanted)
