"""Epoch seeds. A seed determines the order of an epoch's tasks and the order of the records in each task.

Rules:

* A resumed job may get another seed, or turn shuffling on or off. The change takes effect with the first epoch that has
  not begun.
* Running and repeated epochs keep their seed, because the seed determines which task a position refers to, and which
  records a batch contains. With another seed, pservers that have applied a batch would miss some records and count
  others twice.
* All earlier seeds are kept, with one row per change, because a pserver may restart from a checkpoint that lacks any of
  the epochs. They are stored with the queue, and every assignment contains its seed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

#: (first epoch, seed below 2**64, or None without shuffling)
SeedRow = tuple[int, int | None]


class EpochSeeds:
    """Seeds of all epochs, including future ones.

    Args:
        rows: Rows in increasing order, beginning with epoch 0. Each is valid until the first epoch of the next one.
    """

    __slots__ = ("_rows",)

    def __init__(self, rows: Iterable[SeedRow]) -> None:
        self._rows = list(rows)

    @property
    def rows(self) -> list[SeedRow]:
        return list(self._rows)

    @property
    def last(self) -> int | None:
        """Seed of all epochs since the last change; None if they are not shuffled."""
        return self._rows[-1][1]

    def find(self, epoch: int) -> int | None:
        """Return the seed of an epoch, or None if the epoch is not shuffled."""
        return self._rows[bisect_right(self._rows, epoch, key=lambda row: row[0]) - 1][1]

    def change(self, epoch: int, seed: int | None) -> None:
        """Use another seed from ``epoch`` on. This epoch must not have begun."""
        while self._rows and self._rows[-1][0] >= epoch:
            del self._rows[-1]
        if not self._rows or self.last != seed:
            self._rows.append((epoch, seed))
