"""In which order the tasks of an epoch are handed out, also when tasks are added meanwhile.

Rules:

* An epoch has as many positions as tasks. Those that were there when it began, ``base``, are in a keyed permutation
  (the identity without shuffle). Tasks that joined an epoch under way follow it in the order of their arrival; from
  the next epoch on they are shuffled among the others. So an epoch's order needs two numbers, however often it grew.
* The sizes of earlier epochs are remembered where they differ, for the newest ``_REMEMBERED`` changes: a dataset that
  never grew needs one entry for all epochs.

Not guaranteed: that epochs before the oldest remembered change can still be reopened; ``find`` says so.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from functools import lru_cache

import numpy as np

from flightedl.domain.intervals import IntervalSet
from flightedl.domain.permutation import Integers, KeyedPermutation, key_of
from flightedl.errors import NotFoundError

_REMEMBERED = 32


class EpochOrder:
    """The bijection between positions and tasks of one epoch."""

    __slots__ = ("_last", "_permutation", "base", "size")

    def __init__(self, base: int, size: int, key: int | None) -> None:
        """``key`` None: the identity."""
        self.base = base
        self.size = size
        self._permutation = None if key is None else KeyedPermutation(base, key)
        #: The last answer of ``at``: who hands out a task asks twice.
        self._last = (-1, -1)

    def at(self, position: int) -> int:
        """The task at ``position``."""
        if self._permutation is None or position >= self.base:
            return position
        known, task = self._last
        if position != known:
            task = self._permutation.at(position)
            self._last = (position, task)
        return task

    def position_of(self, task: int) -> int:
        """Where ``task`` is."""
        if self._permutation is None or task >= self.base:
            return task
        return self._permutation.position_of(task)

    def positions(self, tasks: IntervalSet) -> IntervalSet:
        """Where ``tasks`` are. O(tasks) array work, unless they are all of the base or the order is the identity."""
        if self._permutation is None or tasks.covers(0, self.base):
            return tasks.copy()
        found = tasks.within(self.base, self.size)
        spans = [np.arange(start, end, dtype=np.int64) for start, end in tasks.within(0, self.base)]
        if spans:
            found.update(_runs(np.sort(self._permutation.positions_of(np.concatenate(spans)))))
        return found


def _runs(values: Integers) -> Iterable[tuple[int, int]]:
    """Half-open runs of rising ``values``, (n,) int64, n >= 1."""
    breaks = np.flatnonzero(np.diff(values) != 1) + 1
    starts = values[np.concatenate(([0], breaks))]
    ends = values[np.concatenate((breaks - 1, [values.size - 1]))] + 1
    return zip(starts.tolist(), ends.tolist(), strict=True)


class EpochSizes:
    """How many tasks each epoch has, up to the current one."""

    __slots__ = ("_rows",)

    def __init__(self, rows: Iterable[tuple[int, int, int]]) -> None:
        """``rows``: (first epoch, base, size), rising; each holds until the next one's first epoch."""
        self._rows = list(rows)

    @property
    def rows(self) -> list[tuple[int, int, int]]:
        """As given to the constructor."""
        return list(self._rows)

    @property
    def task_count(self) -> int:
        """Tasks there are now."""
        return self._rows[-1][2]

    def find(self, epoch: int) -> tuple[int, int]:
        """(base, size) of an epoch.

        Raises:
            NotFoundError: so long ago that it is forgotten.
        """
        index = bisect_right(self._rows, epoch, key=lambda row: row[0]) - 1
        if index < 0:
            raise NotFoundError(f"epoch {epoch} is too long ago: the dataset has grown {_REMEMBERED} times since")
        return self._rows[index][1:]

    def begin(self, epoch: int) -> None:
        """A new epoch begins, with all tasks there are in its permutation."""
        size = self.task_count
        if self._rows[-1][1] != size:
            self._rows.append((epoch, size, size))

    def grow(self, epoch: int, task_count: int, is_begun: bool) -> None:
        """Tasks join; ``is_begun``: some of the current ``epoch`` were handed out."""
        base = self.find(epoch)[0] if is_begun else task_count
        row = (epoch, base, task_count)
        if self._rows[-1][0] == epoch:
            self._rows[-1] = row
        else:
            self._rows.append(row)

    def forget(self, needed_epoch: int) -> int:
        """Forget the oldest changes beyond the limit that no epoch from ``needed_epoch`` on needs.

        Returns:
            The oldest epoch that is still known.
        """
        while len(self._rows) > _REMEMBERED and self._rows[1][0] <= needed_epoch:
            del self._rows[0]
        return self._rows[0][0]


@lru_cache(maxsize=16)
def order_of(base: int, size: int, seed: int, epoch: int, shuffle: bool) -> EpochOrder:
    """The order of one epoch."""
    return EpochOrder(base, size, key_of(seed, epoch) if shuffle else None)
