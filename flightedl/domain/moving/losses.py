"""Loss numbers of blocks: they decide which reports of finished work count after moves and replacements.

Each block carries a *loss number*: the generation of the process that loaded it last, from a checkpoint or as first
values. It stays the same while the block moves, and only rises, since generations do. An acknowledged push names the
loss number of its block, and a report of finished work the lowest one of each block over its batches.

A process is *settled* when what it has was compared with what counts as done, and the difference was reopened. Its
blocks neither come nor go before that. So when a new process of a pserver is seen, it has loaded all blocks of that
pserver itself, and their loss number is its generation. A report counts if no loss number in it is below that of the
block now. Otherwise the block was loaded from something older after the push, and may lack it.

So at any time, for each block: either its owner is settled, and then done ⊆ applied in it; or the owner is going to
say what it has.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec
from msgspec.structs import replace

from flightedl.domain.moving.values import Owners


class Losses(msgspec.Struct, frozen=True, array_like=True):
    """Loss numbers as far as they are known. Stored in one transaction with the queue that they belong to."""

    #: Index -> generation of the settled process; 0: none was.
    settled: tuple[int, ...]
    #: Block -> its loss number when its owner was settled, or later.
    numbers: tuple[int, ...]

    @classmethod
    def at_first(cls, pserver_count: int, block_count: int) -> Losses:
        """Return the state in which no process has settled."""
        return cls((0,) * pserver_count, (0,) * block_count)

    def with_settled(self, index: int, generation: int, owners: Owners) -> Losses:
        """Return the state after a process has said what it has, and the difference was reopened."""
        settled, numbers = list(self.settled), list(self.numbers)
        settled[index] = generation
        for block in owners.blocks_of(index):
            numbers[block] = generation
        return replace(self, settled=tuple(settled), numbers=tuple(numbers))

    def is_settled(self, seen: Mapping[int, int], indexes: Iterable[int]) -> bool:
        """Return True if the present processes of these pservers are settled.

        Args:
            seen: Index -> generation of the process that is there.
            indexes: The pservers.
        """
        return all(index in seen and self.settled[index] == seen[index] for index in indexes)

    def accepts(self, reported: Sequence[int], seen: Mapping[int, int], owners: Owners) -> bool:
        """Return True if a report of finished work counts.

        Args:
            reported: Block -> lowest loss number over the acknowledgements.
            seen: Index -> generation of the newest process that was there.
            owners: Of the blocks now.
        """
        return all(
            number >= self._number_now(block, owner, seen.get(owner, 0))
            for block, (number, owner) in enumerate(zip(reported, owners.pservers, strict=True))
        )

    def _number_now(self, block: int, owner: int, generation: int) -> int:
        return self.numbers[block] if generation <= self.settled[owner] else generation
