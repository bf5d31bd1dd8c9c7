"""By which seed each epoch is shuffled: the order of its tasks, and of the records within each.

Rules:

* A job that is resumed may be given another seed, or begin or cease to be shuffled. That counts from the first epoch of
  which nothing was handed out. An epoch under way keeps its seed, and so does one that is done again: a position names
  a task, and a batch names records, by the seed that they were first read by. Under another one, pservers that have
  a batch would miss some records and count others twice.
* All seeds that ever counted are remembered, a row for each change, because a pserver may come back from a checkpoint
  that lacks whatever epoch. They are part of the queue's stored state, and whoever is given work is told its seed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

#: (first epoch, seed below 2**64; None: nothing is shuffled)
SeedRow = tuple[int, int | None]


class EpochSeeds:
    """The seed of each epoch, also of those to come."""

    __slots__ = ("_rows",)

    def __init__(self, rows: Iterable[SeedRow]) -> None:
        """Rows rise, and the first one is of epoch 0; each holds until the next one's first epoch."""
        self._rows = list(rows)

    @property
    def rows(self) -> list[SeedRow]:
        return list(self._rows)

    @property
    def last(self) -> int | None:
        """Of the epochs that are furthest away."""
        return self._rows[-1][1]

    def find(self, epoch: int) -> int | None:
        """What an epoch is shuffled by; None: by nothing."""
        return self._rows[bisect_right(self._rows, epoch, key=lambda row: row[0]) - 1][1]

    def change(self, epoch: int, seed: int | None) -> None:
        """From ``epoch`` on, of which nothing was handed out, another seed counts."""
        while self._rows and self._rows[-1][0] >= epoch:
            del self._rows[-1]
        if not self._rows or self.last != seed:
            self._rows.append((epoch, seed))
