"""Which first values each block has.

A trainer that was elected sends the first values of every block. It may die on the way, and another one is elected:
the values of a newer election replace those of an older one, block by block, and never the other way round. The values
count when all blocks have those of one election and that election is done.

The caller holds the block's lock around ``may_take``, what it does then, and ``took``.
"""

from __future__ import annotations


class FirstValues:
    """Block number -> the election (its create_revision) whose values it has."""

    def __init__(self) -> None:
        self._elections: dict[int, int] = {}

    def may_take(self, block: int, election: int) -> bool:
        """Whether a block takes values of this election: they are as new as those that it has, or newer."""
        return election >= self._elections.get(block, 0)

    def took(self, block: int, election: int) -> None:
        """A block has the values of this election now."""
        self._elections[block] = election

    def count(self, election: int) -> int:
        """Blocks that have the values of this election."""
        return sum(known == election for known in self._elections.values())
