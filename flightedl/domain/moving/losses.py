"""Blocks' loss numbers, which determine whether a report of finished work is valid after moves and replacements.

Each block has a *loss number*: the generation of the process that last loaded the block from a checkpoint or
initialized it. A move does not change the loss number, and loss numbers never decrease, because generations do not. The
acknowledgement of a push contains the block's loss number, and a report of finished work contains each block's lowest
loss number over the report's batches.

A process is *settled* once the master has compared the batches applied there with the work that is recorded as done,
and reopened the difference. No block moves to or from a process before it is settled, so a new process has itself
loaded all blocks of its pserver, and their loss number is its generation. A report is valid if none of its loss numbers
is lower than the block's current loss number. Otherwise, the block was loaded from an older state after the push and
may lack it.

So for each block, at any time: either its owner is settled, and the block has applied all work that is recorded as
done; or the owner has yet to report its applied batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec
from msgspec.structs import replace

from flightedl.domain.moving.values import Owners


class Losses(msgspec.Struct, frozen=True, array_like=True):
    """Known loss numbers. Stored in one transaction with the queue to which they belong."""

    #: Index -> generation of the pserver's last settled process; 0 if there was none.
    settled: tuple[int, ...]
    #: Block -> its loss number when its owner was last settled.
    numbers: tuple[int, ...]

    @classmethod
    def initial(cls, pserver_count: int, block_count: int) -> Losses:
        """Return a state in which no process is settled."""
        return cls((0,) * pserver_count, (0,) * block_count)

    def with_settled(self, index: int, generation: int, owners: Owners) -> Losses:
        """Return the state after a process has been settled."""
        settled, numbers = list(self.settled), list(self.numbers)
        settled[index] = generation
        for block in owners.blocks_of(index):
            numbers[block] = generation
        return replace(self, settled=tuple(settled), numbers=tuple(numbers))

    def is_settled(self, seen: Mapping[int, int], indexes: Iterable[int]) -> bool:
        """Return True if the current processes of these pservers are settled.

        Args:
            seen: Index -> generation of the present process.
            indexes: Indexes of the pservers.
        """
        return all(index in seen and self.settled[index] == seen[index] for index in indexes)

    def accepts(self, reported: Sequence[int], seen: Mapping[int, int], owners: Owners) -> bool:
        """Return True if a report of finished work is valid.

        Args:
            reported: Block -> lowest loss number of the acknowledgements.
            seen: Index -> generation of the newest process seen.
            owners: Current owners of the blocks.
        """
        return all(
            number >= self._number_now(block, owner, seen.get(owner, 0))
            for block, (number, owner) in enumerate(zip(reported, owners.pservers, strict=True))
        )

    def _number_now(self, block: int, owner: int, generation: int) -> int:
        return self.numbers[block] if generation <= self.settled[owner] else generation
