"""Store for parameters: the arrays of a pserver's blocks, in spans (see ``array_span``). Validates received values."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import numpy as np

from flightedl.domain.model.optimizers import Optimizer
from flightedl.domain.model.sharding import ShardPlan, runs_of
from flightedl.domain.pserver.block_values import ReleasedBlocks
from flightedl.domain.pserver.blocks import around
from flightedl.errors import CorruptError, GradientError, MessageError, StalePlacementError, UnavailableError
from flightedl.formats.shard_files import StoredBlock
from flightedl.process.shared_memory import NONCE_BYTES, SharedMemory, host_mark
from flightedl.pserver.stores.arena import ALIGNMENT_BYTES, Arena
from flightedl.pserver.stores.array_span import ArraySpan
from flightedl.pserver.stores.building import SpanMaker
from flightedl.pserver.stores.interface import distinct
from flightedl.wire.rows import Array, Dtype, Row


class DenseStore:
    """The parameter blocks of one pserver.

    Args:
        plan: Shard plan of the model.
        index: Index of the pserver.
        optimizer: Optimizer of the model.
        wire: "bfloat16" or "float16" if float32 elements are sent with 16 bits; otherwise empty.
        shares_memory: True to place values in memory that trainers on the same host can map.
    """

    def __init__(self, plan: ShardPlan, index: int, optimizer: Optimizer, wire: str, *, shares_memory: bool) -> None:
        self._plan = plan
        #: Shared memory for values, used as long as it has room; None if values are in private memory.
        self.memory = _shared_memory(plan, index) if shares_memory else None
        self._arena = Arena(None if self.memory is None else self.memory.values)
        self._maker = SpanMaker(plan, optimizer, wire, self._arena)
        spans = self._maker.spans_of(index)
        #: Block number -> span. Unless the span's lock is held, the span may be split concurrently.
        self.spans: dict[int, ArraySpan] = {number: span for span in spans for number in span.numbers}
        self.restored: dict[int, tuple[int, int]] = {}

    @property
    def numbers(self) -> list[int]:
        return list(self.spans)

    @property
    def size_bytes(self) -> int:
        return self._arena.size_bytes

    def span(self, number: int) -> ArraySpan:
        """Return the span of a block.

        Raises:
            StalePlacementError: Another pserver owns the block, or is about to own it.
            MessageError: The block is not on this pserver.
        """
        span = self.spans.get(number)
        if span is None:
            if self._plan.placement and number < self._plan.block_count:
                raise StalePlacementError(f"block {number} is not on this pserver: read the job's placement again")
            raise MessageError(f"block {number} is not on this pserver")
        return span

    def name_of(self, number: int) -> str:
        return repr(self._plan.parameters[self._plan.block(number).parameter].name)

    def copied_arrays(self) -> list[tuple[int, int, int, Dtype]]:
        """Return (block, index of the array, element count, dtype) for every array in a copy of all blocks."""
        return [
            (place.number, number, place.size, array.dtype)
            for span in distinct(self.spans)
            for place in span.places
            for number, array in enumerate((span.values, *span.slots))
        ]

    # received values

    def gradient(self, span: ArraySpan, numbers: range, data: memoryview, *, is_finite: bool) -> Array:
        """Return the elements of adjacent blocks of one span.

        Args:
            span: Span of the blocks.
            numbers: Numbers of the blocks.
            data: Bytes of the blocks' elements.
            is_finite: True if the message's words, read as floats of the values' size, are known to be finite.

        Raises:
            GradientError: An element is NaN or infinite.
        """
        gradient = span.incoming(data) if span.wire else np.frombuffer(data, span.values.dtype)
        # If 16-bit floats precede these elements in the message, the elements may not be aligned with the words that
        # were checked.
        if is_finite and not span.wire and gradient.flags.aligned:
            return gradient
        if not span.kernels.all_finite(gradient):
            raise self._not_finite(span, numbers, gradient)
        return gradient

    def first_values(self, row: Row) -> Array:
        """Return the elements of one block. They are always sent in the declared dtype.

        Raises:
            MessageError: The size is wrong, or the block is not on this pserver.
            GradientError: An element is NaN or infinite.
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
        """Return the wire size of the values of adjacent blocks. Raises the same errors as ``span``."""
        size_bytes, number = 0, blocks.start
        while number < blocks.stop:
            span = self.span(number)
            first, stop = span.numbers.start, min(span.numbers.stop, blocks.stop)
            size_bytes += span.offsets[stop - first] - span.offsets[number - first]
            number = stop
        return size_bytes

    def require_size(self, blocks: range, size_bytes: int) -> None:
        """Raise MessageError unless ``size_bytes`` is 0 or the exact size of these blocks' values."""
        if size_bytes and size_bytes != (right := self.sent_bytes(blocks)):
            named = f"block {blocks.start} of {self.name_of(blocks.start)}"
            more = f" and the next {len(blocks) - 1} have" if len(blocks) > 1 else " has"
            raise MessageError(f"{named}{more} {right} bytes, not {size_bytes}")

    # restoring

    def begin_restore(self) -> None:
        self.restored.clear()

    def restore(self, stored: StoredBlock) -> None:
        """Restore one record of a checkpoint. Must be called before the store is used.

        Raises:
            CorruptError: The record does not match the block or its optimizer.
        """
        self._fill(self.span(stored.number), stored)
        self.restored[stored.number] = (stored.version, stored.updates)

    def _fill(self, span: ArraySpan, stored: StoredBlock) -> None:
        place, at = self._plan.block(stored.number), span.part(stored.number)
        if (
            (stored.parameter, stored.start, stored.stop) != (place.parameter, place.start, place.stop)
            or (stored.values.size, stored.values.dtype) != (place.size, span.values.dtype)
            or [(slot.size, slot.dtype) for slot in stored.slots] != [(place.size, slot.dtype) for slot in span.slots]
        ):
            raise CorruptError(f"block {stored.number} does not match this job's model and optimizer")
        np.copyto(span.values[at], stored.values)
        for slot, saved in zip(span.slots, stored.slots, strict=True):
            np.copyto(slot[at], saved)

    # moving blocks

    def drop(self, released: ReleasedBlocks) -> None:
        """Remove adjacent blocks of one span. The caller holds the locks of all spans."""
        numbers, others = released.numbers, {}
        span = self.spans[numbers.start]
        if span.numbers != numbers:
            span.is_split = True
            for part in span.parts(around(span.numbers, numbers)):
                if part.numbers == numbers:
                    span = part
                else:
                    others.update(dict.fromkeys(part.numbers, part))
        kept = {number: other for number, other in self.spans.items() if not other.is_split and other is not span}
        self.spans = dict(sorted((kept | others).items()))
        span.release()

    def blocks_of(self, state: ReleasedBlocks) -> list[StoredBlock]:
        """Return frozen blocks with their arrays, which do not change until the blocks are dropped or thawed."""
        span, found = self.span(state.numbers.start), []
        for number in state.numbers:
            place = self._plan.block(number)
            values, *slots = (array[span.part(number)] for array in (span.values, *span.slots))
            content = (state.version, state.updates, values, tuple(slots))
            found.append(StoredBlock(number, place.parameter, place.start, place.stop, *content))
        return found

    def prepared(self, released: ReleasedBlocks, blocks: Sequence[StoredBlock]) -> ArraySpan:
        """Return a span with the values of released blocks. Clients cannot see it until ``adopt``.

        Raises:
            CorruptError: The values do not match these blocks of this job.
            MemoryError: There is not enough memory.
        """
        first = blocks[0].number
        numbers = range(first, first + len(blocks))
        if not 0 <= first <= numbers.stop <= self._plan.block_count or [each.number for each in blocks] != [*numbers]:
            raise CorruptError(f"moving blocks must be adjacent, but are {[each.number for each in blocks]}")
        if numbers != released.numbers:
            raise CorruptError(f"the values are of the blocks {numbers}, but the state is of {released.numbers}")
        span = self._maker.span(numbers)
        try:
            for stored in blocks:
                self._fill(span, stored)
        except CorruptError:
            span.release()
            raise
        return span

    def adopt(self, span: ArraySpan) -> None:
        """Add a span of blocks that have arrived. The caller holds the locks of all spans."""
        self.spans = dict(sorted([*self.spans.items(), *((number, span) for number in span.numbers)]))


def _shared_memory(plan: ShardPlan, index: int) -> SharedMemory | None:
    """Create shared memory of twice the values' size, because values with readers are moved before they change."""
    if not host_mark():
        return None
    own = {number for run in runs_of(plan, index) for number in run}
    blocks = [plan.block(number) for number in range(plan.block_count)]
    sizes = [
        block.size * np.dtype(plan.parameters[block.parameter].storage_dtype).itemsize + ALIGNMENT_BYTES
        for block in blocks
    ]
    # Leave room for blocks that may move here later, up to this pserver's equal share.
    size_bytes = 2 * max(sum(sizes[number] for number in own), sum(sizes) // plan.pserver_count + ALIGNMENT_BYTES)
    try:
        return SharedMemory.create(secrets.token_bytes(NONCE_BYTES), size_bytes, "flightedl-model")
    except UnavailableError:
        return None
