"""Spans: arrays of adjacent blocks updated together, so that many tiny parameters cost no more than a large one.

The blocks of a *span* have the same history: the same version, open round and applied batches. As long as every message
covers whole spans, as in normal training, a span is checked, updated and sent as a unit. A message that covers only
some blocks of a span splits the span permanently, which costs only speed.

**Values are sent without a copy.** A reader borrows a view of the span's memory (``borrow``), which never changes while
the view is alive: if the values have readers, ``detach_for_write`` first moves them to other memory. So a borrowed view
contains a single version, however long it takes to send. A view dies when the transport releases it. Moves are rare,
because during training all readers have usually read a version before the next one is computed.

Only the thread that holds ``lock`` may use a span's state. The parts of a split span share one lock.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar, Protocol

import msgspec
import numpy as np

from flightedl.domain.consistency.rounds import BlockRounds
from flightedl.domain.exactly_once.batches import Batch
from flightedl.domain.model.optimizers import Delta
from flightedl.domain.model.sharding import Block
from flightedl.domain.pserver.block_values import AddGradient, CopyBlocks, Needs, SpanPlace, Update
from flightedl.kernels.compiled import BlockKernels, half_kernels
from flightedl.kernels.compiled import Update as UpdateKernel
from flightedl.kernels.half_precision import item_bytes
from flightedl.messages.parameters import Outcome
from flightedl.pserver.stores.arena import Arena
from flightedl.rowstore.values import NO_ROWS, TableRows
from flightedl.wire.rows import Array, Checksums, OutgoingBlocks, RunningChecksum


class BlockCopies(Protocol):
    """Receives the blocks of spans for a cut."""

    def copy(self, span: ArraySpan, copy: CopyBlocks) -> None:
        """Copy blocks of a span, as decided by the protocol. The caller holds the span's lock."""


class ReceivedArray(msgspec.Struct, frozen=True):
    """The validated content of a message about parameters."""

    #: Parameters are read as a whole.
    wanted: ClassVar[TableRows] = NO_ROWS
    #: None if the message has no gradient.
    gradient: Array | None = None
    #: True if the values that follow an update will be sent with a checksum.
    has_checksum: bool = False
    #: True to keep the values that are sent for other readers.
    is_for_many: bool = False


@dataclass(frozen=True, slots=True)
class BlockArrays:
    """State of one block, as views of its span's arrays."""

    place: Block
    rounds: BlockRounds
    updates: int
    values: Array
    slots: Sequence[Array]


class ArraySpan(SpanPlace):
    """Arrays and state of adjacent blocks, guarded by ``lock``.

    Args:
        numbers: Numbers of the blocks in the plan.
        places: The blocks' positions in their parameters.
        values: (n,) concatenated values of all blocks.
        slots: (n,) arrays of the optimizer.
        update: The optimizer's kernel.
        kernels: Kernels of the dtype.
        arena: Memory allocator.
        lock: Lock of the span.
        wire: "bfloat16" or "float16" if float32 elements are sent with 16 bits; otherwise empty.
    """

    __slots__ = (
        "_arena",
        "_checksums",
        "_lent",
        "_sent",
        "accumulator",
        "assign",
        "bounds",
        "contributions",
        "kernels",
        "lock",
        "offsets",
        "places",
        "slots",
        "update",
        "values",
        "wire",
    )

    def __init__(
        self,
        numbers: range,
        places: Sequence[Block],
        values: Array,
        slots: Sequence[Array],
        update: UpdateKernel,
        kernels: BlockKernels,
        arena: Arena,
        lock: threading.Lock,
        wire: str = "",
    ) -> None:
        super().__init__(numbers)
        self.places = places
        #: Start of each block, and end of the last one, in elements.
        self.bounds: list[int] = [0, *accumulate(place.size for place in places)]
        self.wire = wire if values.dtype == np.float32 else ""
        element_bytes = item_bytes(wire, values.dtype.name)
        #: Start of each block, and end of the last one, in bytes on the wire.
        self.offsets: Sequence[int] = [bound * element_bytes for bound in self.bounds]
        self.values = values
        self.slots = slots
        self.update = update
        #: See ``Delta``; empty for all other optimizers.
        self.assign = update.optimizer.assign if isinstance(update.optimizer, Delta) else ""
        self.kernels = kernels
        self._arena = arena
        self.lock = lock
        #: Sum of the open round's gradients; allocated when the first gradient arrives.
        self.accumulator: Array | None = None
        #: (batch, weight, gradient) of each contribution to the open round; used in deterministic mode and to assign.
        self.contributions: list[tuple[Batch, float, Array]] = []
        #: Views that readers may still be using.
        self._lent: list[weakref.ref[Array]] = []
        #: The current values in encoded form; None unless they are kept for other readers.
        self._sent: Array | None = None
        #: Cached checksums of the current values as they are sent.
        self._checksums = Checksums()

    def blocks(self, rounds: BlockRounds, updates: int) -> list[BlockArrays]:
        """Return the blocks with their arrays and state."""
        return [
            BlockArrays(place, rounds, updates, self.values[at], [slot[at] for slot in self.slots])
            for place in self.places
            for at in (self.part(place.number),)
        ]

    def part(self, number: int) -> slice[int, int, int]:
        """Return the range that a block occupies in the arrays."""
        place = number - self.numbers.start
        return slice(self.bounds[place], self.bounds[place + 1])

    def offsets_of(self, numbers: range) -> Sequence[int]:
        """Return the start of each of these adjacent blocks and the end of the last one, in bytes from the first."""
        if numbers == self.numbers:
            return self.offsets
        first = numbers.start - self.numbers.start
        start = self.offsets[first]
        return [offset - start for offset in self.offsets[first : first + len(numbers) + 1]]

    def borrow(self, numbers: range) -> Array:
        """Return the (n,) values of adjacent blocks. They do not change while the result or a part of it is alive."""
        first = self.numbers.start
        part = self.values[self.bounds[numbers.start - first] : self.bounds[numbers.stop - first]]
        # A slice of an array refers to the array that owns the memory. Only the memoryview makes it refer to ``view``.
        view: Array = np.asarray(part.data)
        view.flags.writeable = False
        self._lent.append(weakref.ref(view))
        return view

    def piece(self, numbers: range, version: int, outcome: Outcome, received: ReceivedArray) -> OutgoingBlocks:
        """Return the values of some of the blocks."""
        if numbers != self.numbers:
            return OutgoingBlocks(numbers, version, outcome, self._outgoing(numbers), self.offsets_of(numbers))
        values = self._sent
        if values is None:
            if self.wire:
                values = self._outgoing(numbers)
            else:
                # This is a copy of ``borrow``, inlined because every small push executes it.
                values = self.values[:]
                values.flags.writeable = False
                self._lent.append(weakref.ref(values))
        if received.is_for_many:
            self._sent = values
        return OutgoingBlocks(numbers, version, outcome, values, self.offsets, self._checksums)

    def _outgoing(self, numbers: range) -> Array:
        lent = self.borrow(numbers)
        if not self.wire:
            return lent
        bits = np.empty(lent.size, np.uint16)
        half_kernels(self.wire).to_half(lent, bits)  # type: ignore[arg-type]
        return bits

    def incoming(self, data: memoryview) -> Array:
        """Decode received elements to an (n,) array of the values' dtype."""
        if not self.wire:
            return np.frombuffer(data, self.values.dtype)
        wide = np.empty(len(data) // 2, np.float32)
        half_kernels(self.wire).to_float32(np.frombuffer(data, np.uint16), wide)
        return wide

    def detach_for_write(self) -> Array:
        """Return the values for modification. If their memory still has readers, move them first."""
        self._sent, self._checksums = None, Checksums()
        for lent in self._lent:
            if lent() is not None:
                self.values = self._arena.move(self.values, [each for each in self._lent if each() is not None])
                break
        self._lent = []
        return self.values

    def parts(self, into: Sequence[range]) -> list[ArraySpan]:
        """Return a span for each range of blocks, with the corresponding part of the arrays."""
        parts = []
        for numbers in into:
            first, stop = numbers.start - self.numbers.start, numbers.stop - self.numbers.start
            bounds = self.bounds[first : stop + 1]
            at = slice(bounds[0], bounds[-1])
            part = ArraySpan(
                numbers,
                self.places[first:stop],
                self.values[at],
                [slot[at] for slot in self.slots],
                self.update,
                self.kernels,
                self._arena,
                self.lock,
                self.wire,
            )
            part.accumulator = None if self.accumulator is None else self.accumulator[at]
            part.contributions = [(batch, weight, gradient[at]) for batch, weight, gradient in self.contributions]
            part._lent = list(self._lent)
            parts.append(part)
        self._sent = None
        return parts

    def release(self) -> None:
        self.is_split = True
        others = [*self.slots, *([] if self.accumulator is None else [self.accumulator])]
        self._arena.release(self.values, self._lent, others)

    def have_accumulator(self) -> Array:
        if self.accumulator is None:
            self.accumulator = self._arena.allocate(self.values.size, self.values.dtype)
        return self.accumulator

    def accumulate(self, gradient: Array, weight: float, *, is_first: bool) -> None:
        add = self.kernels.accumulate_first if is_first else self.kernels.accumulate
        add(self.have_accumulator(), gradient, weight)

    def get_ready(self, needs: Needs, received: ReceivedArray) -> ReceivedArray:
        _, has_update, has_sum, is_kept = needs
        if has_update:
            self.detach_for_write()
        if has_sum:
            self.have_accumulator()
        is_kept = is_kept or (has_sum and bool(self.assign))
        if not is_kept or received.gradient is None:
            return received
        return ReceivedArray(self._arena.copy(received.gradient), received.has_checksum, received.is_for_many)

    def carry_out(self, effect: AddGradient | Update, received: ReceivedArray) -> None:
        gradient = received.gradient
        if isinstance(effect, AddGradient):
            assert gradient is not None, "there is no gradient to add"
            if effect.is_ordered or self.assign:
                self.contributions.append((effect.batch, effect.weight, gradient))
            else:
                self.accumulate(gradient, effect.weight, is_first=effect.is_first)
            return
        if effect.is_of_round:
            self._add_kept()
            gradient = self.accumulator
        assert gradient is not None, "there is nothing to update from"
        if self._lent:
            self.detach_for_write()
        values, counts = self.values, (effect.from_version, effect.number)
        if self.assign:
            np.copyto(values, gradient)
        elif received.has_checksum and not self.wire:
            checksum = RunningChecksum()
            self.update(values, gradient, self.slots, *counts, effect.scale, effect.rate_factor, checksum.update)
            self._checksums.whole = checksum.intdigest()
        else:
            self.update(values, gradient, self.slots, *counts, effect.scale, effect.rate_factor)

    def _add_kept(self) -> None:
        kept = sorted(self.contributions, key=_batch_of)
        if self.assign == "latest":
            kept = [(batch, 1.0, gradient) for batch, _, gradient in kept[-1:]]
        total = sum(weight for _, weight, _ in kept) if self.assign else 1.0
        for number, (_batch, weight, gradient) in enumerate(kept):
            self.accumulate(gradient, weight / total, is_first=number == 0)
        self.contributions.clear()

    def cut(self, copies: BlockCopies, copy: CopyBlocks) -> None:
        copies.copy(self, copy)


def _batch_of(contribution: tuple[Batch, float, Array]) -> Batch:
    return contribution[0]
