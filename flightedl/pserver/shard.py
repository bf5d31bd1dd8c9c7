"""What a pserver's blocks are asked, and what ``domain.pserver.blocks`` decides about it, carried out with arrays.

Rules:

* A span of the protocol has its arrays here (see ``spans``), and a lock. Under it: get all memory that a push may take,
  let the protocol decide, carry its effects out. What fails between the decision and the last effect is the end of
  this shard (see ``soundness``).
* Nothing is touched before a row was checked (see ``incoming``): a block of this shard, the right number of bytes,
  finite.
* A version that has been reached wakes all waiters once per message (see ``changes``), not once per block.
* Values leave as they lie in memory, lent under the span's lock: what a reader gets is one version, never a mixture.
* A view changes all blocks at once, under all their locks.

Lock order: spans by rising number, then what they share, then the changes. No lock is held while waiting or sending.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from flightedl.domain.consistency.modes import Mode
from flightedl.domain.consistency.rounds_values import Pull
from flightedl.domain.exactly_once.applied import AppliedBatches
from flightedl.domain.model.optimizers import Optimizer
from flightedl.domain.model.sharding import ShardPlan
from flightedl.domain.pserver.block_values import Needs, Push, Split
from flightedl.domain.pserver.block_values import Pushed as Decided
from flightedl.domain.pserver.blocks import around
from flightedl.errors import BusyError, FencedError, MessageError
from flightedl.messages.control import ViewReply, ViewRequest
from flightedl.messages.parameters import Outcome, PushHeader
from flightedl.pserver.incoming import IncomingValues
from flightedl.pserver.meter import Meter
from flightedl.pserver.shard_rows import Pushed, ShardRows, Wanted
from flightedl.pserver.spans import ArraySpan
from flightedl.recording.writer import Recorder
from flightedl.wire.parts import ReceivedBlocks, parts_of
from flightedl.wire.rows import OutgoingBlocks, Row, Rows

Array = npt.NDArray[np.generic]


class ShardState(ShardRows):
    """The blocks of one pserver, and what they are asked. Thread-safe.

    Args: as ``HeldBlocks``, and
        meter: Takes the figures of what happens; None: one that only this shard has.
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
        found = Meter() if meter is None else meter
        super().__init__(
            plan,
            index,
            optimizer,
            mode,
            wire,
            on_lost,
            recorder,
            generation,
            found,
            row_bytes,
            shares_memory=shares_memory,
        )
        self._incoming = IncomingValues(plan)
        #: Of the plan: from this position on there are buckets.
        self._first_bucket = plan.block_count

    # first values

    def initialize(self, election: int, row: Row) -> None:
        """First values of a block; a newer election's replace an older one's.

        Raises:
            MessageError: not a block of this pserver, or of another size.
            GradientError: not finite.
        """
        values = self._incoming.first_values(self._span(row.block), row)
        with self._locked(row.block) as span:
            place = span.detach_for_write()[span.part(row.block)]
            with self._deciding:
                is_taken = self._protocol.initialize(row.block, election)
            if is_taken:
                place[:] = values

    def initialized_count(self, election: int) -> int:
        """Blocks that have the first values of this election."""
        return self._protocol.initialized_count(election)

    # pushes

    def push(self, header: PushHeader, parts: Sequence[ReceivedBlocks]) -> list[Pushed]:
        """Take the parts of one message, one after the other. A part is mostly a span: nothing is done per block then.

        Returns:
            What became of them; the same part again is answered, never applied again.

        Raises:
            MessageError: a foreign block, a wrong size, or a base version from the future; a sum of several batches in
                another mode than async. Parts before it were taken.
            GradientError: not finite; likewise.
        """
        if len(parts) > 1 and sum(len(part.blocks) for part in parts) > self.block_count + len(self.buckets):
            raise MessageError("a message names more blocks than there are")
        began = self.meter.now()
        push = Push.of(header)
        found: list[Pushed] = []
        for part in parts:
            blocks, version, _, data, is_finite = part
            if blocks.start >= self._first_bucket:
                found.extend(self.push_to_rows(push, part, header.pull))
                continue
            span = self._span(blocks.start)
            pushed = None
            if blocks == span.numbers and (len(data) == span.offsets[-1] or not data):
                pushed = self._push(push, span, version, data, header, is_finite=is_finite)
            if pushed is not None:
                found.append(pushed)
            else:
                found.extend(self._push_by_span(push, part, header))
        if self.changes.has_news:
            self.changes.announce()
        self.meter.message(self.meter.now() - began, parts, found)
        return found

    def push_rows(self, header: PushHeader, rows: Rows) -> list[Pushed]:
        """The same with the rows of a plain push, as any Flight client can send it."""
        for place, number in enumerate(rows.blocks):
            size_bytes = rows.offsets[place + 1] - rows.offsets[place]
            if size_bytes and size_bytes != self._sent_bytes(range(number, number + 1)):
                raise self._wrong_size(range(number, number + 1), size_bytes)
        return self.push(header, list(parts_of(rows)))

    def _push_by_span(self, push: Push, part: ReceivedBlocks, header: PushHeader) -> Iterator[Pushed]:
        """A part that is not just one span; spans that it has only some blocks of are split."""
        blocks, version, _, data, is_finite = part
        if data and len(data) != self._sent_bytes(blocks):
            raise self._wrong_size(blocks, len(data))
        number = blocks.start
        while number < blocks.stop:
            span = self._span(number)
            stop = min(span.numbers.stop, blocks.stop)
            size_bytes = self._sent_bytes(range(number, stop)) if data else 0
            if number > span.numbers.start or stop < span.numbers.stop:
                if data:
                    self._incoming.gradient(span, range(number, stop), data[:size_bytes], is_finite=is_finite)
                with span.lock, self._soundness:
                    if not span.is_split:
                        with self._deciding:
                            parts = around(span.numbers, range(number, stop))
                            split = self._protocol.split(span.numbers.start, parts)
                        self._split(split, self._protocol.version(number))
                continue
            pushed = self._push(push, span, version, data[:size_bytes], header, is_finite=is_finite)
            if pushed is not None:
                yield pushed
                number, data = stop, data[size_bytes:]

    def _sent_bytes(self, blocks: range) -> int:
        """Of the values of neighbouring blocks. MessageError: one of them does not lie here."""
        size_bytes, number = 0, blocks.start
        while number < blocks.stop:
            span = self._span(number)
            first, stop = span.numbers.start, min(span.numbers.stop, blocks.stop)
            size_bytes += span.offsets[stop - first] - span.offsets[number - first]
            number = stop
        return size_bytes

    def _wrong_size(self, blocks: range, size_bytes: int) -> MessageError:
        named = f"block {blocks.start} of {self._incoming.name_of(blocks.start)!r}"
        more = f" and {len(blocks) - 1} behind it have" if len(blocks) > 1 else " has"
        return MessageError(f"{named}{more} {self._sent_bytes(blocks)} bytes, not {size_bytes}")

    def _push(
        self, push: Push, span: ArraySpan, base_version: int, data: memoryview, header: PushHeader, *, is_finite: bool
    ) -> Pushed | None:
        """All blocks of a span; None: it was split meanwhile."""
        gradient = self._incoming.gradient(span, span.numbers, data, is_finite=is_finite) if len(data) else None
        protocol, first, has_gradient = self._protocol, span.numbers.start, gradient is not None
        has_checksum = header.pull and header.checksums
        with span.lock:
            if self._soundness.lost_because:
                self._soundness.require()
            if span.is_split:
                return None
            with self._deciding:
                needs = protocol.prepare(first, push, base_version, has_gradient=has_gradient)
            kept = self._get_ready(span, needs, gradient)
            try:
                with self._deciding:
                    decided = protocol.push(first, push, base_version, has_gradient=has_gradient)
                if isinstance(decided, Split):
                    self._split(decided, protocol.version(first))
                    return None
                self._carry_out(span, decided.effects, gradient if kept is None else kept, has_checksum=has_checksum)
            except BaseException as error:
                self._soundness.broke_off(error)
                raise
            if decided.is_news:
                self.changes.has_news = True
            pushed = self._answer(span, decided, header.pull)
            if not span.local.start and decided.effects:
                self.meter.updates(decided.effects, base_version, push.member)
        return pushed

    def _get_ready(self, span: ArraySpan, needs: Needs, gradient: Array | None) -> Array | None:
        """Have all memory that a push may take, before it is taken; the span's lock is held.

        Returns:
            The gradient, where it is to be kept until the round closes.

        Raises:
            BusyError: there is none.
        """
        copies, has_update, has_sum, is_kept = needs
        try:
            for copy in copies:
                self._copy(span, copy)
            if has_update:
                span.detach_for_write()
            if has_sum:
                span.have_accumulator()
            if is_kept and gradient is not None:
                return span.copy_of(gradient)
        except MemoryError:
            name = self._incoming.name_of(span.numbers.start)
            raise BusyError(
                f"pserver {self._index} has no memory left for a gradient of {name!r}: "
                "give it more, or the job more pservers"
            ) from None
        return None

    def _answer(self, span: ArraySpan, decided: Decided, pull: bool) -> Pushed:
        """What became of a push to all blocks of a span, with the values that follow it if they can leave."""
        numbers, outcome = span.numbers, decided.outcome
        if outcome is Outcome.PARTLY_APPLIED:
            bits, count = decided.having, len(numbers)
            offsets = list(range(0, (count + 1) * len(bits), len(bits)))
            return Pushed(
                OutgoingBlocks(numbers, decided.version, outcome, np.frombuffer(bits * count, np.uint8), offsets), None
            )
        if pull and decided.is_ready:
            return Pushed(
                span.piece(numbers, decided.version, outcome, is_for_many=self._protocol.is_synchronous), None
            )
        wanted = Wanted(numbers, decided.follows) if pull and decided.follows is not None else None
        return Pushed(OutgoingBlocks(numbers, decided.version, outcome, None, span.offsets), wanted)

    # pulls

    def wanted(self, blocks: Iterable[int], min_versions: Sequence[int]) -> list[Wanted]:
        """The blocks, neighbours of one span and one version together.

        Args:
            blocks: Numbers; rising ones are found together.
            min_versions: One for each block, or a single one for all.

        Raises:
            MessageError: a foreign block.
        """
        found: list[Wanted] = []
        last: ArraySpan | None = None
        for place, number in enumerate(blocks):
            span = self._span(number)
            version = min_versions[place if len(min_versions) > 1 else 0]
            if span is last and found[-1].blocks.stop == number and found[-1].min_version == version:
                found[-1] = Wanted(range(found[-1].blocks.start, number + 1), version)
            else:
                found.append(Wanted(range(number, number + 1), version))
            last = span
        return found

    def read(self, wanted: Wanted, member: int) -> tuple[list[OutgoingBlocks], list[Wanted]]:
        """What is there of the wanted blocks, and what is not yet there.

        Outcome NOT_MEMBER: the membership is gone, and there are no values.
        """
        if wanted.blocks.start >= self._first_bucket:
            return self.read_rows(wanted, member)
        pieces: list[OutgoingBlocks] = []
        rest: list[Wanted] = []
        number, end, version = wanted.blocks.start, wanted.blocks.stop, wanted.min_version
        while number < end:
            with self._locked(number) as span:
                numbers = range(number, min(span.numbers.stop, end))
                state = self._protocol.pull(number, member, version)
                if state is Pull.WAIT:
                    rest.append(Wanted(numbers, version))
                elif state is Pull.NOT_MEMBER:
                    present = self._protocol.version(number)
                    pieces.append(OutgoingBlocks(numbers, present, Outcome.NOT_MEMBER, None, ()))
                else:
                    present, is_for_many = self._protocol.version(number), self._protocol.is_synchronous
                    pieces.append(span.piece(numbers, present, Outcome.NONE, is_for_many=is_for_many))
            number = numbers.stop
        return pieces, rest

    # views

    @property
    def members(self) -> list[int]:
        """Whom the blocks know."""
        return self._protocol.members

    def set_members(self, request: ViewRequest) -> ViewReply:
        """Take over a view, in all blocks at once."""
        with self._all_locks(), self._soundness:
            with self._deciding:
                taken = self._protocol.take_view(request)
            for first, effects in taken.effects:
                self._carry_out(self._spans[first], effects)
            self.changes.has_news = True
        return taken.reply

    # what is applied

    def seal(self, epochs: Sequence[tuple[int, int]]) -> None:
        """(epoch, tasks) of epochs that get no more tasks, see ``AppliedBatches.seal``.

        Raises:
            MessageError: the epoch has more tasks than that.
        """
        with self._deciding:
            self._protocol.seal(epochs)

    def applied(self) -> AppliedBatches:
        """What is applied now: a copy."""
        self._soundness.require()
        with self._deciding:
            return self._protocol.applied()

    def require_plan(self, plan_hash: str) -> None:
        """Raise FencedError unless the sender means this shard's plan."""
        if self.plan_hash != plan_hash:
            raise FencedError("the shard plan is another one: read the job's declaration again")
