"""The requests to a pserver's blocks: ``domain.pserver.blocks`` decides about them, the stores carry that out.

Rules:

* A span of the protocol has its values in a store (``dense``, ``rows``), and a lock. Under it: get all memory that a
  push may take, let the protocol decide, carry its effects out. A failure between the decision and the last effect is
  the end of this shard (see ``soundness``).
* Nothing is touched before a part was checked: a block of this shard, the right number of bytes, finite.
* A version that has been reached wakes all waiters once per message (see ``changes``), not once per block.
* Values leave as they lie in memory, lent under the span's lock: a reader gets one version, never a mixture.
* A view changes all blocks at once, under all their locks.

``held`` says in which order locks are taken.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np

from flightedl.domain.consistency.modes import Mode
from flightedl.domain.consistency.rounds_values import Pull
from flightedl.domain.exactly_once.applied import AppliedBatches
from flightedl.domain.model.optimizers import Optimizer
from flightedl.domain.model.sharding import ShardPlan, name_same_cut, placement_of_hash
from flightedl.domain.pserver.block_values import (
    AddGradient,
    BlocksDue,
    CopyBlocks,
    Effect,
    Joined,
    Needs,
    Push,
    ReleasedBlocks,
    Split,
    Unmovable,
    Update,
)
from flightedl.domain.pserver.block_values import Pushed as Decided
from flightedl.domain.pserver.blocks import around
from flightedl.errors import BusyError, FencedError, MessageError, StalePlacementError
from flightedl.formats.checkpoint_files import Record
from flightedl.formats.row_batches import TABLE, WAITING, StoredRows
from flightedl.formats.shard_files import StoredBlock
from flightedl.messages.control import OrderNumber, SnapshotRequest, ViewReply, ViewRequest
from flightedl.messages.parameters import Outcome, PushHeader
from flightedl.process.shared_memory import SharedMemory
from flightedl.pserver.changes import Changes
from flightedl.pserver.copying import Copying
from flightedl.pserver.dense import DenseStore
from flightedl.pserver.held import Held
from flightedl.pserver.meter import Meter
from flightedl.pserver.rows.store import RowStore
from flightedl.pserver.rows.stored import CutRows
from flightedl.pserver.rows.values import NO_ROWS, TableRows
from flightedl.pserver.soundness import Soundness
from flightedl.pserver.spans import ArraySpan, BlockArrays
from flightedl.pserver.stores import Pushed, Wanted, distinct, split_span
from flightedl.recording.writer import Recorder
from flightedl.wire.parts import ReceivedBlocks, parts_of
from flightedl.wire.rows import OutgoingBlocks, Row, Rows

_NO_FILE = SnapshotRequest(OrderNumber(0, 0, 0), None, "", plan_hash="")
_UPDATE = Needs(has_update=True)
#: Buckets of a span whose rows move when it is joined with another one.
_JOINED_AT_ONCE = 16


class Shard:
    """The blocks of one pserver. Thread-safe.

    Args:
        plan: Places of all blocks.
        index: Of the pserver.
        optimizer: Of the model.
        mode: That the blocks begin in.
        wire: "bfloat16" or "float16" where float32 elements travel as such.
        on_lost: Called with the reason when the blocks do not belong together any more; ends the process.
        recorder: Records what happens to the blocks; None: nothing does.
        generation: Of the pserver's process, for recordings.
        meter: Takes the figures of what happens; None: one that only this shard has.
        row_bytes: Memory that rows may have; 0: what is there.
        shares_memory: Values lie in memory that trainers of the same host map.
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
        #: That the shard was made for, and whether blocks have come or left since.
        self._placement, self._has_moved = plan.placement, False
        self.meter = Meter() if meter is None else meter
        self.changes = Changes()
        self._index = index
        self.dense = DenseStore(plan, index, optimizer, wire, shares_memory=shares_memory)
        self.rows = RowStore(plan, index, row_bytes)
        self._soundness = Soundness(on_lost)
        #: Of the plan: from this number on there are buckets.
        self.first_bucket = plan.block_count
        self._most_blocks = plan.block_count + plan.bucket_count
        self._held = Held(
            self.dense, self.rows, self.first_bucket, mode, self._soundness, recorder, (index, generation)
        )
        self._protocol, self._deciding = self._held.protocol, self._held.deciding
        self.copying = Copying(self._held, plan.hash)
        #: The block by which updates are counted.
        self._lowest = 0
        self._spans_changed()
        #: Held by the one export that reads all rows.
        self._reading = threading.Lock()

    # figures

    @property
    def memory(self) -> SharedMemory | None:
        """The memory of the values, if trainers of the same host map it."""
        return self.dense.memory

    @property
    def numbers(self) -> list[int]:
        """The blocks' numbers, rising; without buckets."""
        return self.dense.numbers

    @property
    def block_count(self) -> int:
        """Number of blocks, without buckets."""
        return len(self.dense.numbers)

    @property
    def size_bytes_total(self) -> int:
        """Bytes of values, slots and accumulators, and of rows."""
        return self.dense.size_bytes + self.rows.size_bytes

    def blocks(self) -> list[BlockArrays]:
        """Return every block with its state, as it lies in memory; for a caller who knows that nobody pushes."""
        states = [(span, self._protocol.span(span.numbers.start)) for span in distinct(self.dense.spans)]
        return [block for span, state in states for block in span.blocks(state.rounds, state.updates)]

    def version_range(self) -> tuple[int, int]:
        return self._protocol.version_range()

    def waits_for(self) -> tuple[int, list[int]]:
        """Return the lowest version at which others wait, and the members that they wait for; none if nobody waits."""
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
        """Return the numbers of all blocks, for a sender that does not name them.

        Raises:
            StalePlacementError: the sender's placement is from before blocks came here or left.
        """
        if placement_of_hash(plan_hash) < self._placement + self._has_moved:
            raise StalePlacementError("blocks have moved: read the job's placement again")
        return self.numbers

    def require_plan(self, plan_hash: str) -> None:
        """Raise FencedError unless the sender means this shard's cut."""
        if self.plan_hash != plan_hash and not name_same_cut(plan_hash, self.plan_hash):
            raise FencedError("the shard plan is another one: read the job's declaration again")

    # first values

    def initialize(self, election: int, row: Row) -> None:
        """Take first values of a block; a newer election's replace an older one's.

        Raises:
            MessageError: not a block of this pserver, or of another size.
            GradientError: not finite.
        """
        values = self.dense.first_values(row)
        with self._held.locked(row.block) as span:
            place = span.detach_for_write()[span.part(row.block)]
            with self._deciding:
                is_taken = self._protocol.initialize(row.block, election)
            if is_taken:
                place[:] = values

    def initialized_count(self, election: int) -> int:
        return self._protocol.initialized_count(election)

    # pushes

    def push(self, header: PushHeader, parts: Sequence[ReceivedBlocks]) -> list[Pushed]:
        """Take the parts of one message, one after the other. A part is mostly a span: nothing is done per block then.

        Returns:
            The answer to each; the same part again is answered, never applied again.

        Raises:
            MessageError: a foreign block, a wrong size, or a base version from the future; a sum of several batches in
                another mode than async. Parts before it were taken.
            GradientError: not finite; likewise.
        """
        if len(parts) > 1 and sum(len(part.blocks) for part in parts) > self._most_blocks:
            raise MessageError("a message names more blocks than there are")
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
                pushed = self._push(push, span, version, gradient, header, has_gradient=gradient is not None)
            if pushed is not None:
                found.append(pushed)
            else:
                found.extend(self._push_by_span(push, part, header))
        if self.changes.has_news:
            self.changes.announce()
        self.meter.message(self.meter.now() - began, parts, found)
        return found

    def push_rows(self, header: PushHeader, rows: Rows) -> list[Pushed]:
        """As ``push``, with the rows of a plain push, as any Flight client can send it."""
        for place, number in enumerate(rows.blocks):
            self.dense.require_size(range(number, number + 1), rows.offsets[place + 1] - rows.offsets[place])
        return self.push(header, list(parts_of(rows)))

    def _push_rows(self, push: Push, part: ReceivedBlocks, header: PushHeader) -> Iterator[Pushed]:
        """Take a part that is of all buckets."""
        is_whole = True
        for span, received in self.rows.by_span(part.blocks, self.rows.pushed(part)):
            is_whole = span.numbers == part.blocks
            has_gradient = len(received.gradients) > 0
            pushed = self._push(
                push, span, part.version, received, header, has_gradient=has_gradient, asked=received.wanted
            )
            if pushed is not None:
                yield pushed
        if not is_whole:
            self._join_rows(part.blocks)

    def _join_rows(self, blocks: range) -> None:
        """Join spans of buckets that have become alike, a few buckets with each push: a push does not wait long."""
        with self.rows.lock, self._soundness:
            for border in self.rows.borders(blocks):
                with self._deciding:
                    joined = self._protocol.join(border, _JOINED_AT_ONCE)
                if isinstance(joined, Split):
                    self._split(joined)
                    with self._deciding:
                        joined = self._protocol.join(border, _JOINED_AT_ONCE)
                if isinstance(joined, Joined):
                    self.rows.join(joined, self._protocol.version(border))
                    break

    def _push_by_span(self, push: Push, part: ReceivedBlocks, header: PushHeader) -> Iterator[Pushed]:
        """Take a part that is not just one span; spans that it has only some blocks of are split."""
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
            pushed = self._push(push, span, version, gradient, header, has_gradient=gradient is not None)
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
        split_span(self._held.store(split.span), split, self._protocol.version(split.span))

    def _push(
        self,
        push: Push,
        span: Any,
        base_version: int,
        received: Any,
        header: PushHeader,
        *,
        has_gradient: bool,
        asked: TableRows = NO_ROWS,
    ) -> Pushed | None:
        """Push to all blocks of a span; None if it was split meanwhile."""
        protocol, first = self._protocol, span.numbers.start
        with span.lock:
            if self._soundness.lost_because:
                self._soundness.require()
            if span.is_split:
                return None
            needs = _UPDATE
            if protocol.is_synchronous or self.copying.under_way:
                with self._deciding:
                    needs = protocol.prepare(first, push, base_version, has_gradient=has_gradient)
                self._carry_out(span, needs.copies)
            try:
                received = span.get_ready(needs, received)
            except MemoryError:
                name = self._held.store(first).name_of(first)
                raise BusyError(
                    f"pserver {self._index} has no memory left for a gradient of {name}: "
                    "give it more, or the job more pservers"
                ) from None
            try:
                with self._deciding:
                    decided = protocol.push(first, push, base_version, has_gradient=has_gradient)
                if isinstance(decided, Split):
                    self._split(decided)
                    return None
                self._carry_out(span, decided.effects, received, has_checksum=header.pull and header.checksums)
            except BaseException as error:
                self._soundness.interrupted(error)
                raise
            self.changes.has_news |= decided.is_news
            if decided.effects and first == self._lowest:
                self.meter.updates(decided.effects, base_version, push.member)
            if header.pull and decided.is_ready:
                is_for_many = protocol.is_synchronous
                piece = span.piece(span.numbers, decided.version, decided.outcome, asked, is_for_many=is_for_many)
                return Pushed(piece)
            return _answer(span, decided, asked, pull=header.pull)

    def _carry_out(
        self, span: Any, effects: Sequence[Effect], received: Any = None, *, has_checksum: bool = False
    ) -> None:
        """Do what the protocol decided; the span's lock is held."""
        for effect in effects:
            if isinstance(effect, Update | AddGradient):
                span.carry_out(effect, received, has_checksum=has_checksum)
            elif isinstance(effect, CopyBlocks | BlocksDue):
                self.copying.carry_out(span, effect)

    # pulls

    def wanted(self, blocks: Iterable[int], min_versions: Sequence[int]) -> list[Wanted]:
        """Return the blocks, neighbours of one span and one version together.

        Args:
            blocks: Numbers; rising ones are found together.
            min_versions: One for each block, or a single one for all.

        Raises:
            MessageError: a foreign block.
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
        """Return the rows that a lookup asks for, at or above a version.

        Raises:
            MessageError: not all buckets of this pserver, or a damaged request.
        """
        return Wanted(part.blocks, part.version, self.rows.asked(part).wanted)

    def read(self, wanted: Wanted, member: int) -> tuple[list[OutgoingBlocks], list[Wanted]]:
        """Return the wanted values that are there, and the wanted blocks that are not there yet.

        Outcome NOT_MEMBER: the membership is gone, and there are no values.
        """
        pieces: list[OutgoingBlocks] = []
        rest: list[Wanted] = []
        protocol = self._protocol
        number, end, version = wanted.blocks.start, wanted.blocks.stop, wanted.min_version
        while number < end:
            with self._held.locked(number) as span:
                numbers = range(number, min(span.numbers.stop, end))
                rows = wanted.rows if numbers == wanted.blocks else span.within(numbers, wanted.rows)
                state, present = protocol.pull(number, member, version), protocol.version(number)
                if state is Pull.WAIT:
                    rest.append(Wanted(numbers, version, rows))
                elif state is Pull.NOT_MEMBER:
                    pieces.append(OutgoingBlocks(numbers, present, Outcome.NOT_MEMBER, None, ()))
                else:
                    is_for_many = protocol.is_synchronous
                    pieces.append(span.piece(numbers, present, Outcome.NONE, rows, is_for_many=is_for_many))
            number = numbers.stop
        return pieces, rest

    def all_rows(self, table: int) -> Iterator[StoredRows]:
        """Yield the rows of a table as they are when the first of them are taken.

        Raises:
            BusyError: Another caller reads a table, or there is no memory for what changes meanwhile; try again.
        """
        if not self._reading.acquire(blocking=False):
            raise BusyError(f"pserver {self._index} is being read for another export")
        cuts: list[CutRows] = []
        try:
            for span in distinct(self.rows.spans):
                with span.lock:
                    self._soundness.require()
                    cuts.append(CutRows(span, self._protocol.version(span.numbers.start), 0, _NO_FILE, is_base=True))
            for rows in chain.from_iterable(cut.stored() for cut in cuts):
                if rows.table == table and rows.kind not in {TABLE, WAITING}:
                    yield rows
        except MemoryError:
            raise BusyError(f"pserver {self._index} has no memory left to export a table") from None
        finally:
            for cut in cuts:
                cut.drop()
            self._reading.release()

    # views

    @property
    def members(self) -> list[int]:
        return self._protocol.members

    def set_members(self, request: ViewRequest) -> ViewReply:
        """Take over a view, in all blocks at once."""
        with self._held.all_locked(), self._soundness:
            with self._deciding:
                taken = self._protocol.apply_view(request)
            for first, effects in taken.effects:
                self._carry_out(self._held.span(first), effects)
            self.changes.has_news = True
        return taken.reply

    # blocks that move to another pserver

    def release(self, numbers: range) -> tuple[ReleasedBlocks, Any] | Unmovable:
        """Remove neighbouring blocks or buckets of one span and return them with their values.

        Returns:
            Their state, and their values as ``adopt`` takes them; ``Unmovable`` if nothing was done.

        Raises:
            MessageError: they are not together on this pserver.
        """
        with self._held.all_locked(), self._soundness:
            with self._deciding:
                released = self._protocol.release(numbers)
                if isinstance(released, Split):
                    self._split(released)
                    released = self._protocol.release(numbers)
            assert not isinstance(released, Split), "blocks have a span of their own, and it was split again"
            if isinstance(released, Unmovable):
                return released
            values = self._held.store(numbers.start).release(released)
            self._has_moved = True
            self._spans_changed()
        return released, values

    def adopt(self, released: ReleasedBlocks, values: Any) -> Unmovable | None:
        """Add blocks or buckets that another pserver has released; ``Unmovable`` if nothing was done.

        Raises:
            CorruptError: they are damaged, or not of this job.
            MessageError: they are here, or do not fit the epochs here.
            BusyError, MemoryError: there is no room; nothing was done.
        """
        store = self._held.store(released.numbers.start)
        span = store.prepared(released, values)
        is_adopted = False
        try:
            with self._held.all_locked(), self._deciding:
                unmovable = self._protocol.adopt(released)
                if unmovable is None:
                    with self._soundness:
                        is_adopted = True
                        store.adopt(span)
                        self._has_moved = True
                        self._spans_changed()
        finally:
            if not is_adopted:
                span.release()
        return unmovable

    def _spans_changed(self) -> None:
        self._lowest = min([*self.dense.numbers[:1], *self.rows.numbers[:1]], default=0)
        # Who waits for a version of blocks that have left hears of it.
        self.changes.has_news = True
        self.changes.announce()

    # applied batches

    def seal(self, epochs: Sequence[tuple[int, int]]) -> None:
        """Tell (epoch, tasks) of epochs that get no more tasks, see ``AppliedBatches.set_task_count``.

        Raises:
            MessageError: the epoch has more tasks than that.
        """
        with self._deciding:
            self._protocol.seal(epochs)

    def applied(self) -> AppliedBatches:
        """Return a copy of the applied sets."""
        self._soundness.require()
        with self._deciding:
            return self._protocol.applied()

    # checkpoints that are restored, before anybody uses the shard

    def begin_restore(self) -> None:
        """Forget what was restored so far: it was of a checkpoint that is damaged."""
        self.dense.begin_restore()
        self.rows.begin_restore()

    def restore(self, stored: Record) -> None:
        """Take over a record of a checkpoint.

        Raises:
            CorruptError: it is of other blocks, tables or optimizers.
        """
        if isinstance(stored, StoredBlock):
            self.dense.restore(stored)
        else:
            self.rows.restore(stored)

    def restored(self, applied: AppliedBatches) -> None:
        """Complete what was restored; ``applied`` are the sets of all blocks.

        Raises:
            CorruptError: blocks are missing.
        """
        for split in self._protocol.restore(applied, {**self.dense.restored, **self.rows.restored}):
            split_span(self._held.store(split.span), split, 0)
        self.rows.finish_restore()


def _answer(span: Any, decided: Decided, asked: TableRows, *, pull: bool) -> Pushed:
    """Return the answer to a push to all blocks of a span, of which no values leave now."""
    numbers, version, outcome, offsets = span.numbers, decided.version, decided.outcome, span.offsets
    if outcome is Outcome.PARTLY_APPLIED:
        bits, count = decided.having, len(numbers) if offsets else 1
        starts = list(range(0, (count + 1) * len(bits), len(bits))) if offsets else ()
        return Pushed(OutgoingBlocks(numbers, version, outcome, np.frombuffer(bits * count, np.uint8), starts))
    wanted = None
    if pull and decided.follows is not None:
        # What was received is gone when the round closes.
        wanted = Wanted(numbers, decided.follows, asked.copy() if len(asked) else asked)
    return Pushed(OutgoingBlocks(numbers, version, outcome, None, offsets), wanted)
