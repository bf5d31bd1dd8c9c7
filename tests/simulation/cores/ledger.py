"""A ledger that replaces the arrays of a simulated pserver. It records which update added each batch to each block.

The ledger carries out and checks the decisions of ``domain.pserver.blocks``. It raises ``Violation`` if

* a block gets a batch twice, or an update contains batches other than those that it names;
* a gradient has a wrong weight, or is not divided as the mean or the learning rate requires;
* the optimizer runs with a wrong step number, or at a version other than the version of the values;
* a round closes without an expected member.

For each element, a block stores the number of the update that added the element's batch. The block's *slot* stands for
an optimizer's state. It is a sum over all updates: the update's number times the number of elements that it changed. So
``require_sound`` can check that the values, the slot and the update count belong to the same moment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from typing import Self

from flightedl.domain.consistency.modes import Async, Mode
from flightedl.domain.consistency.rounds import BlockRounds
from flightedl.domain.pserver.block_values import AddGradient, CopyBlocks, EmptyRound, SpanPlace, Update
from flightedl.domain.pserver.blocks import BlockProtocol
from flightedl.messages.control import SnapshotRequest
from tests.simulation.cores.job import Gradient, JobShape
from tests.simulation.cores.row_account import require_history, require_limit, require_rows
from tests.simulation.cores.rows import Changed, Moment, SpanRows, StoredTable
from tests.simulation.cores.world import Violation


@dataclass(slots=True)
class Block:
    """A block's values and slot."""

    number: int
    #: Element -> number of the update that added its batch, counted from 1; 0 if the batch has not been added.
    values: list[int]
    slot: int = 0
    updates: int = 0
    #: Version that the last update produced.
    updated_to: int = 0
    #: The initial values from which the block descends; see ``StoredShard``.
    model: tuple[int, int] | None = None
    #: Elements that have changed since the last cut.
    changed: set[int] = field(default_factory=set)
    #: History of the block's rows, if the block is treated as a bucket.
    history: list[Moment] = field(default_factory=list)
    span: LedgerSpan = field(init=False, repr=False)

    def copy(self) -> Block:
        """Return a copy, which belongs to no span."""
        values, changed, history = list(self.values), set(self.changed), list(self.history)
        return Block(self.number, values, self.slot, self.updates, self.updated_to, self.model, changed, history)

    @property
    def rounds(self) -> BlockRounds:
        return self.span.protocol.span(self.number).rounds


class LedgerSpan(SpanPlace):
    """Adjacent blocks with the same history, which the protocol treats as a unit."""

    __slots__ = ("accumulator", "arrived", "blocks", "protocol", "shape")

    def __init__(self, numbers: range, protocol: BlockProtocol, blocks: Sequence[Block], shape: JobShape) -> None:
        super().__init__(numbers)
        self.protocol = protocol
        self.blocks = blocks
        self.shape = shape
        for block in blocks:
            block.span = self
        #: The round's sum of weighted gradients, for each block.
        self.accumulator: list[dict[int, Fraction | int]] = [{} for _ in blocks]
        #: Members that have arrived in the open round.
        self.arrived: set[int] = set()

    def parts(self, into: Sequence[range]) -> list[Self]:
        """Split the span. Each part gets its own part of the ledger."""
        parts = []
        for numbers in into:
            first = numbers.start - self.numbers.start
            at = slice(first, first + len(numbers))
            part = type(self)(numbers, self.protocol, self.blocks[at], self.shape)
            part.accumulator, part.arrived = [dict(total) for total in self.accumulator[at]], self.arrived.copy()
            parts.append(part)
        return parts

    def add(self, effect: AddGradient, gradients: Sequence[Gradient]) -> None:
        """Add each block's gradient to the sum of the round."""
        weight = _exact(effect.weight)
        if effect.is_first:
            self.accumulator = [{} for _ in self.blocks]
        for total, gradient in zip(self.accumulator, gradients, strict=True):
            for element, amount in gradient.items():
                total[element] = total.get(element, 0) + weight * amount

    def update(self, effect: Update, mode: Mode, gradients: Sequence[Gradient], base: int) -> None:
        """Apply the round's sum or the pushed gradients to the values.

        Args:
            effect: The protocol's effect.
            mode: The mode in which the protocol decided.
            gradients: The pushed gradient of each block.
            base: The version that the gradients were computed at.
        """
        factor = _exact(effect.scale) * _exact(effect.rate_factor)
        batches = [batch for batch, _ in effect.batches]
        for place, block in enumerate(self.blocks):
            added = self.accumulator[place] if effect.is_of_round else gradients[place]
            moved = {element: factor * amount for element, amount in added.items()}
            right = self.shape.shares(batches, block.number, mode)
            if not effect.is_of_round and moved.keys() == right.keys():
                # If a sum is pushed again, the sender's worker checks its shares.
                rate = Fraction(1, 1 + effect.from_version - base) if _slows(mode) else 1
                right = {element: rate * amount for element, amount in added.items()}
            if moved != right:
                raise Violation(f"block {block.number}: an update of {batches} adds {_text(moved)}, not {_text(right)}")
            self._move(block, effect, moved)

    def _move(self, block: Block, effect: Update, moved: Gradient) -> None:
        if effect.number != block.updates or effect.from_version < block.updated_to:
            raise Violation(
                f"block {block.number}: {effect} after {block.updates} updates to version {block.updated_to}"
            )
        block.updates += 1
        block.updated_to = effect.to_version
        for element in moved:
            if block.values[element]:
                raise Violation(f"block {block.number}: element {element} gets its batch twice")
            block.values[element] = block.updates
            block.changed.add(element)
            block.slot += block.updates * (1 + element)

    def round_over(self, effect: Update | EmptyRound, first_rounds: Mapping[int, int], backup: int) -> None:
        """Check a round that has closed: all expected members have arrived, except up to ``backup`` of them."""
        due = {member for member, first in first_rounds.items() if first < effect.to_version}
        if len(due - self.arrived) > backup:
            raise Violation(f"blocks {self.numbers}: round {effect.from_version} closed without {due - self.arrived}")
        self.arrived = set()


def require_sound(name: str, number: int, values: Sequence[int], slot: int, updates: int) -> None:
    """Raise Violation unless a block's values, slot and update count belong to the same moment."""
    steps = {value for value in values if value}
    if steps != set(range(1, updates + 1)):
        raise Violation(f"{name}: block {number} had {updates} updates, but values of updates {sorted(steps)}")
    right = sum(value * element for element, value in enumerate(values, 1))
    if slot != right:
        raise Violation(f"{name}: the slot of block {number} is {slot}, but {right} belongs to its values")


class BucketSpan(LedgerSpan):
    """Blocks that are treated as buckets of rows. Files with them may contain only changes."""

    __slots__ = ("rows",)

    def __init__(self, numbers: range, protocol: BlockProtocol, blocks: Sequence[Block], shape: JobShape) -> None:
        super().__init__(numbers, protocol, blocks, shape)
        assert shape.table is not None, "buckets have rows of a table"
        self.rows = SpanRows(shape.table, numbers)

    def parts(self, into: Sequence[range]) -> list[Self]:
        parts = super().parts(into)
        for part in parts:
            part.rows = self.rows.part(part.numbers)
        return parts

    def update(self, effect: Update, mode: Mode, gradients: Sequence[Gradient], base: int) -> None:
        super().update(effect, mode, gradients, base)
        batches = [batch for batch, _ in effect.batches]
        elements = [self.shape.element_of(each) for each in batches if self.shape.has_gradient(each, self.numbers[0])]
        oldest = self.rows.table.oldest.copy()
        self.rows.update(elements, max(batch.epoch for batch in batches), effect.to_version)
        require_limit(self.rows, oldest, effect.to_version)
        self._note(effect.to_version, elements)

    def _note(self, version: int, elements: Sequence[int] | None) -> None:
        for block in self.blocks:
            block.history.append(self.rows.moment(block.number, version, elements))

    def cut(
        self, command: SnapshotRequest, copy: CopyBlocks, *, is_increment: bool
    ) -> tuple[Changed | None, StoredTable]:
        """Return the changes since the file that the order names (None if unknown), and the rows for the new file."""
        elements = {(block.number, element) for block in self.blocks for element in block.changed}
        for block in self.blocks:
            block.changed.clear()
        found = self.rows.cut(command, copy.version, copy.updates, elements, is_increment=is_increment)
        self._note(copy.version, None)
        return found

    def require_sound(self, name: str) -> None:
        """Raise Violation unless the rows follow from the blocks' histories."""
        histories = {block.number: block.history for block in self.blocks}
        for block in self.blocks:
            require_history(name, block.number, block.values, block.history)
        require_rows(name, self.rows, histories, self.protocol.version(self.numbers.start))


def _slows(mode: Mode) -> bool:
    return isinstance(mode, Async) and mode.staleness_scaled


@lru_cache(maxsize=1024)
def _exact(factor: float) -> Fraction:
    """Return the exact number that the product rounds to a float: a weight, or a weight divided by an integer."""
    return Fraction(factor).limit_denominator(10_000)


def _text(gradient: Gradient) -> str:
    return ", ".join(f"{amount} to {element}" for element, amount in sorted(gradient.items()))
