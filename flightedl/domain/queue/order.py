"""In which order the tasks of an epoch are handed out, also when tasks are added meanwhile.

Rules:

* An epoch has as many positions as tasks. Those that were there when it began, ``base``, are in a keyed permutation
  (the identity without shuffle). Tasks that joined an epoch under way follow it in the order of their arrival; from
  the next epoch on they are shuffled among the others. So an epoch's order needs two numbers, however often it grew.
* The sizes of earlier epochs are remembered where they differ, for as long as a pserver may come back from a checkpoint
  that lacks them: a dataset that never grew needs one entry for all epochs. The newest entries are ``recent``; from
  time to time the oldest of these become ``older`` ones, which are stored apart, because they hardly ever change.

Not guaranteed: that epochs before the newest ``REMEMBERED`` changes can still be reopened; ``find`` says so.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from functools import lru_cache

import numpy as np

from flightedl.domain.exactly_once.intervals import IntervalSet
from flightedl.domain.queue.permutation import Integers, KeyedPermutation, key_of
from flightedl.errors import NotFoundError

REMEMBERED = 10_000
#: So many entries become older ones at once; at least as many stay recent.
_PUT_AWAY = 16


#: (first epoch, base, size)
SizeRow = tuple[int, int, int]


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
        if self._permutation is None or position >= self.base:
            return position
        known, task = self._last
        if position != known:
            task = self._permutation.at(position)
            self._last = (position, task)
        return task

    def position_of(self, task: int) -> int:
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

    __slots__ = ("_older_count", "_rows")

    def __init__(self, recent: Iterable[SizeRow], older: Iterable[SizeRow] = ()) -> None:
        """Rows rise, the ``older`` ones come first; each holds until the next one's first epoch."""
        self._rows = list(older)
        self._older_count = len(self._rows)
        self._rows += recent

    @property
    def recent(self) -> list[SizeRow]:
        """The newest rows, at least one; they change as the dataset grows."""
        return self._rows[self._older_count :]

    @property
    def older(self) -> list[SizeRow]:
        """All others, which change only with ``put_away``."""
        return self._rows[: self._older_count]

    @property
    def task_count(self) -> int:
        return self._rows[-1][2]

    @property
    def oldest_epoch(self) -> int:
        """Nothing is known of the epochs before this."""
        return self._rows[0][0]

    def find(self, epoch: int) -> tuple[int, int]:
        """(base, size) of an epoch.

        Raises:
            NotFoundError: so long ago that it is forgotten.
        """
        index = bisect_right(self._rows, epoch, key=lambda row: row[0]) - 1
        if index < 0:
            raise NotFoundError(f"epoch {epoch + 1} is too long ago: the dataset has grown {REMEMBERED} times since")
        return self._rows[index][1:]

    def begin(self, epoch: int) -> None:
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

    def put_away(self, needed_epoch: int) -> bool:
        """Let the oldest recent rows become older ones when there are many; whether ``older`` has changed.

        Then the oldest of all are forgotten beyond the limit, unless an epoch from ``needed_epoch`` on needs them.
        """
        if len(self._rows) - self._older_count < 2 * _PUT_AWAY:
            return False
        self._older_count += _PUT_AWAY
        while self._older_count > REMEMBERED and self._rows[1][0] <= needed_epoch:
            del self._rows[0]
            self._older_count -= 1
        return True


@lru_cache(maxsize=16)
def order_of(base: int, size: int, seed: int | None, epoch: int) -> EpochOrder:
    """The order of one epoch; ``seed`` None: it is not shuffled."""
    return EpochOrder(base, size, None if seed is None else key_of(seed, epoch))
