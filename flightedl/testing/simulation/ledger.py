"""What a simulated pserver keeps instead of arrays: how often each batch is in each block.

It carries out what ``domain.pserver.blocks`` decides, believes nothing of it, and raises ``Violation`` when a batch is
in a block twice, an update is not of the batches that it names, or a round has closed without somebody who was due.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from flightedl.domain.consistency.rounds import BlockRounds
from flightedl.domain.pserver.block_values import AddGradient, BlockSpan, EmptyRound, Update
from flightedl.testing.simulation.world import Violation


@dataclass(slots=True)
class Block:
    """One block."""

    number: int
    #: By element: how often its batch is in the block.
    values: list[int]
    updates: int = 0
    #: The version that the last update made.
    updated_to: int = 0
    #: Which first values they grew from, see ``StoredShard``.
    model: tuple[int, int] | None = None
    span: LedgerSpan = field(init=False, repr=False)

    @property
    def rounds(self) -> BlockRounds:
        """Those of its span."""
        return self.span.rounds


class LedgerSpan(BlockSpan):
    """Neighbouring blocks with the same history."""

    __slots__ = ("accumulator", "arrived", "blocks")

    def __init__(self, numbers: range, local: range, rounds: BlockRounds, blocks: Sequence[Block]) -> None:
        super().__init__(numbers, local, rounds)
        self.blocks = blocks
        for block in blocks:
            block.span = self
        #: Elements of the batches in the sum.
        self.accumulator: list[int] = []
        #: Who arrived in the open round.
        self.arrived: set[int] = set()

    def parts(self, into: Sequence[range]) -> list[LedgerSpan]:
        """A span for each stretch of blocks, with its part of the account."""
        parts = []
        for numbers in into:
            first = numbers.start - self.numbers.start
            blocks = self.blocks[first : first + len(numbers)]
            part = LedgerSpan(numbers, self.local_of(numbers), self.rounds, blocks)
            part.accumulator, part.arrived = self.accumulator.copy(), self.arrived.copy()
            parts.append(part)
        return parts

    def add(self, effect: AddGradient, elements: Iterable[int]) -> None:
        """Add a gradient to the sum of the round."""
        if effect.is_first:
            self.accumulator = []
        self.accumulator.extend(elements)

    def update(self, effect: Update, pushed: Sequence[int], named: Sequence[int]) -> None:
        """Put the sum, or what was pushed, into the values.

        Args:
            effect: What the protocol says.
            pushed: Elements of the batches that were pushed.
            named: Those of the batches that the effect names.
        """
        elements = self.accumulator if effect.is_of_round else pushed
        if sorted(elements) != sorted(named):
            raise Violation(f"blocks {self.numbers}: an update has {elements}, and names {named}")
        for block in self.blocks:
            if effect.number != block.updates:
                raise Violation(f"block {block.number}: update {effect.number} after {block.updates}")
            block.updates += 1
            block.updated_to = effect.to_version
            for element in elements:
                block.values[element] += 1
                if block.values[element] > 1:
                    raise Violation(f"block {block.number}: element {element} has a batch twice")

    def round_over(self, effect: Update | EmptyRound, first_rounds: Mapping[int, int], backup: int) -> None:
        """A round was closed: everybody who was due has arrived, but for ``backup`` of them."""
        due = {member for member, first in first_rounds.items() if first < effect.to_version}
        if len(due - self.arrived) > backup:
            raise Violation(f"blocks {self.numbers}: round {effect.from_version} closed without {due - self.arrived}")
        self.arrived = set()
