"""The store of parameters: the arrays of a pserver's blocks, in spans (see ``spans``), and the checks of what comes."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from flightedl.domain.model.optimizers import Optimizer
from flightedl.domain.model.sharding import ShardPlan, runs_of
from flightedl.domain.pserver.block_values import ReleasedBlocks
from flightedl.errors import CorruptError, GradientError, MessageError, StalePlacementError, UnavailableError
from flightedl.formats.shard_files import StoredBlock
from flightedl.process.shared_memory import NONCE_BYTES, SharedMemory, host_mark
from flightedl.pserver.arena import ALIGNMENT_BYTES, Arena
from flightedl.pserver.building import SpanMaker
from flightedl.pserver.spans import ArraySpan
from flightedl.pserver.stores import distinct
from flightedl.wire.rows import Row

Array = npt.NDArray[np.generic]


class DenseStore:
    """The blocks of parameters on one pserver.

    Args:
        plan: Places of all blocks.
        index: Of the pserver.
        optimizer: Of the model.
        wire: "bfloat16" or "float16" where float32 elements travel as such.
        shares_memory: Values lie in memory that trainers of the same host map.
    """

    def __init__(self, plan: ShardPlan, index: int, optimizer: Optimizer, wire: str, *, shares_memory: bool) -> None:
        self._plan = plan
        #: Holds the values as long as there is room; None if they lie in memory of this process alone.
        self.memory = _shared_memory(plan, index) if shares_memory else None
        self._arena = Arena(None if self.memory is None else self.memory.values)
        self._maker = SpanMaker(plan, optimizer, wire, self._arena)
        spans = self._maker.spans_of(index)
        self.spans: dict[int, ArraySpan] = {number: span for span in spans for number in span.numbers}
        #: The most slots of any block.
        self.slot_count = max((len(span.slots) for span in spans), default=0)
        self.restored: dict[int, tuple[int, int]] = {}

    @property
    def numbers(self) -> list[int]:
        """Numbers of the blocks, rising."""
        return list(self.spans)

    @property
    def size_bytes(self) -> int:
        """Bytes of values, slots and accumulators."""
        return self._arena.size_bytes

    def span(self, number: int) -> ArraySpan:
        """Return the span of a block.

        Raises:
            StalePlacementError: another pserver owns the block now, or will.
            MessageError: there is no such block here.
        """
        span = self.spans.get(number)
        if span is None:
            if self._plan.placement and number < self._plan.block_count:
                raise StalePlacementError(f"block {number} is not on this pserver: read the job's placement again")
            raise MessageError(f"block {number} does not lie on this pserver")
        return span

    def name_of(self, number: int) -> str:
        return repr(self._plan.parameters[self._plan.block(number).parameter].name)

    def copied_arrays(self) -> list[tuple[int, int, int, np.dtype[np.generic]]]:
        """Return (block, number of the array, elements, dtype) of each array that a copy of all blocks has."""
        return [
            (place.number, number, place.size, array.dtype)
            for span in distinct(self.spans)
            for place in span.places
            for number, array in enumerate((span.values, *span.slots))
        ]

    # what comes

    def gradient(self, span: ArraySpan, numbers: range, data: memoryview, *, is_finite: bool) -> Array:
        """Return the elements of neighbouring blocks of a span.

        Args:
            span: Of the blocks.
            numbers: Of the blocks.
            data: As many bytes as the blocks have.
            is_finite: Floats of the values' own size are known to be finite.

        Raises:
            GradientError: NaN or infinity.
        """
        gradient = span.incoming(data) if span.wire else np.frombuffer(data, span.values.dtype)
        # Behind 16-bit floats of the same message, its elements may not be made of the words that were looked at.
        if is_finite and not span.wire and gradient.flags.aligned:
            return gradient
        if not span.kernels.all_finite(gradient):
            raise self._not_finite(span, numbers, gradient)
        return gradient

    def first_values(self, row: Row) -> Array:
        """Return the elements of one block, which never travel narrower than they were declared.

        Raises:
            MessageError: another number of bytes, or a block of another pserver.
            GradientError: NaN or infinity.
        """
        span, place = self.span(row.block), self._plan.block(row.block)
        spec = self._plan.parameters[place.parameter]
        size_bytes = place.size * spec.seen_item_bytes
        if len(row.values) != size_bytes:
            raise MessageError(f"block {row.block} of {spec.name!r} has {size_bytes} bytes, not {len(row.values)}")
        sent = span.incoming(row.values) if spec.short_kind else row.array(span.values.dtype)
        if not span.kernels.all_finite(sent):
            raise self._not_finite(span, range(row.block, row.block + 1), sent)
        return sent

    def _not_finite(self, span: ArraySpan, numbers: range, array: Array) -> GradientError:
        first = span.numbers.start
        wrong = int(np.flatnonzero(~np.isfinite(array))[0])
        number = next(n for n in numbers if wrong < span.bounds[n + 1 - first] - span.bounds[numbers.start - first])
        return GradientError(f"{self.name_of(number)} has NaN or infinity in block {number}: nothing of it was applied")

    def sent_bytes(self, blocks: range) -> int:
        """Return the bytes that the values of neighbouring blocks travel as. MessageError: one does not lie here."""
        size_bytes, number = 0, blocks.start
        while number < blocks.stop:
            span = self.span(number)
            first, stop = span.numbers.start, min(span.numbers.stop, blocks.stop)
            size_bytes += span.offsets[stop - first] - span.offsets[number - first]
            number = stop
        return size_bytes

    def require_size(self, blocks: range, size_bytes: int) -> None:
        """Raise MessageError unless this is nothing, or the size of these blocks' values."""
        if size_bytes and size_bytes != (right := self.sent_bytes(blocks)):
            named = f"block {blocks.start} of {self.name_of(blocks.start)}"
            more = f" and {len(blocks) - 1} behind it have" if len(blocks) > 1 else " has"
            raise MessageError(f"{named}{more} {right} bytes, not {size_bytes}")

    # from checkpoints

    def begin_restore(self) -> None:
        self.restored.clear()

    def restore(self, stored: StoredBlock) -> None:
        self._fill(self.span(stored.number), stored)
        self.restored[stored.number] = (stored.version, stored.updates)

    def _fill(self, span: ArraySpan, stored: StoredBlock) -> None:
        place, at = self._plan.block(stored.number), span.part(stored.number)
        if (
            (stored.parameter, stored.start, stored.stop) != (place.parameter, place.start, place.stop)
            or (stored.values.size, stored.values.dtype) != (place.size, span.values.dtype)
            or [(slot.size, slot.dtype) for slot in stored.slots] != [(place.size, slot.dtype) for slot in span.slots]
        ):
            raise CorruptError(f"block {stored.number} is not the one of this job's model and optimizer")
        np.copyto(span.values[at], stored.values)
        for slot, saved in zip(span.slots, stored.slots, strict=True):
            np.copyto(slot[at], saved)

    def finish_restore(self) -> None:
        """Blocks are complete one by one."""

    # blocks that move

    def release(self, released: ReleasedBlocks) -> list[StoredBlock]:
        numbers = released.numbers
        span = self.spans[numbers.start]
        assert span.numbers == numbers, "blocks leave that have no span of their own"
        self.spans = {number: other for number, other in self.spans.items() if other is not span}
        blocks = []
        for place in span.places:
            values, *slots = (array[span.part(place.number)].copy() for array in (span.values, *span.slots))
            state = (released.version, released.updates, values, tuple(slots))
            blocks.append(StoredBlock(place.number, place.parameter, place.start, place.stop, *state))
        span.release()
        return blocks

    def prepared(self, released: ReleasedBlocks, blocks: Sequence[StoredBlock]) -> ArraySpan:
        first = blocks[0].number
        numbers = range(first, first + len(blocks))
        if not 0 <= first <= numbers.stop <= self._plan.block_count or [each.number for each in blocks] != [*numbers]:
            raise CorruptError(f"blocks that move have to be neighbours, and not {[each.number for each in blocks]}")
        if numbers != released.numbers:
            raise CorruptError(f"values of the blocks {numbers} came with the state of {released.numbers}")
        span = self._maker.span(numbers)
        try:
            for stored in blocks:
                self._fill(span, stored)
        except CorruptError:
            span.release()
            raise
        return span

    def adopt(self, span: ArraySpan) -> None:
        self.spans = dict(sorted([*self.spans.items(), *((number, span) for number in span.numbers)]))


def _shared_memory(plan: ShardPlan, index: int) -> SharedMemory | None:
    """Memory for all values of a pserver, and as many again: those that change while somebody reads them are moved."""
    if not host_mark():
        return None
    blocks = [plan.block(number) for run in runs_of(plan, index) for number in run]
    sizes = (block.size * np.dtype(plan.parameters[block.parameter].storage_dtype).itemsize for block in blocks)
    size_bytes = 2 * (sum(sizes) + ALIGNMENT_BYTES * len(blocks))
    try:
        return SharedMemory.create(secrets.token_bytes(NONCE_BYTES), size_bytes, "flightedl-model")
    except UnavailableError:
        return None
