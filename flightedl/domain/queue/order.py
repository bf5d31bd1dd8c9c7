"""Order in which an epoch's tasks are assigned. It stays valid when tasks are added.

Rules:

* An epoch has one position per task. A keyed permutation (the identity if the epoch is not shuffled) orders the
  ``base`` tasks that existed when the epoch began.
* Tasks that are added to a running epoch follow in the order of their arrival; from the next epoch on they are shuffled
  with the others. Two numbers, ``base`` and ``size``, thus describe the order of an epoch completely.
* The sizes of earlier epochs are kept, because a pserver may restart from a checkpoint that lacks these epochs. Only
  changes in size are stored, so a dataset that never grew takes one entry. The newest entries are in ``recent``. They
  move in groups to ``older``, which is stored separately because it rarely changes.

Epochs before the newest ``REMEMBERED`` changes of size are forgotten and cannot be reopened: ``find`` raises an error.
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
#: Number of entries that move to ``older`` together. At least this many remain in ``recent``.
_PUT_AWAY = 16


#: (first epoch, base, size)
SizeRow = tuple[int, int, int]


class EpochOrder:
    """Bijection between the positions and the tasks of one epoch.

    Args:
        base: Number of tasks at the beginning of the epoch.
        size: Number of tasks now.
        key: Key of the permutation; None for the identity.
    """

    __slots__ = ("_last", "_permutation", "base", "size")

    def __init__(self, base: int, size: int, key: int | None) -> None:
        self.base = base
        self.size = size
        self._permutation = None if key is None else KeyedPermutation(base, key)
        #: Cache for ``at``, which is called twice per assigned task.
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
        """Return the positions of ``tasks``. Takes O(tasks), unless they cover the base or nothing is shuffled."""
        if self._permutation is None or tasks.covers(0, self.base):
            return tasks.copy()
        found = tasks.within(self.base, self.size)
        spans = [np.arange(start, end, dtype=np.int64) for start, end in tasks.within(0, self.base)]
        if spans:
            found.update(_runs(np.sort(self._permutation.positions_of(np.concatenate(spans)))))
        return found


def _runs(values: Integers) -> Iterable[tuple[int, int]]:
    """Return the runs of consecutive integers in ``values``, (n,) int64, n >= 1, increasing, as half-open ranges."""
    breaks = np.flatnonzero(np.diff(values) != 1) + 1
    starts = values[np.concatenate(([0], breaks))]
    ends = values[np.concatenate((breaks - 1, [values.size - 1]))] + 1
    return zip(starts.tolist(), ends.tolist(), strict=True)


class EpochSizes:
    """Number of tasks in each epoch up to the current one.

    Args:
        recent: Recent rows, in increasing order. Each row is valid until the first epoch of the next one.
        older: Older rows, which precede the recent ones.
    """

    __slots__ = ("_older_count", "_rows")

    def __init__(self, recent: Iterable[SizeRow], older: Iterable[SizeRow] = ()) -> None:
        self._rows = list(older)
        self._older_count = len(self._rows)
        self._rows += recent

    @property
    def recent(self) -> list[SizeRow]:
        return self._rows[self._older_count :]

    @property
    def older(self) -> list[SizeRow]:
        """The older rows. Only ``put_away`` changes them."""
        return self._rows[: self._older_count]

    @property
    def task_count(self) -> int:
        return self._rows[-1][2]

    @property
    def oldest_epoch(self) -> int:
        return self._rows[0][0]

    def find(self, epoch: int) -> tuple[int, int]:
        """Return (base, size) of an epoch.

        Raises:
            NotFoundError: the epoch's size was forgotten.
        """
        index = bisect_right(self._rows, epoch, key=lambda row: row[0]) - 1
        if index < 0:
            raise NotFoundError(f"the size of epoch {epoch + 1} was forgotten after {REMEMBERED} more changes")
        return self._rows[index][1:]

    def begin(self, epoch: int) -> None:
        size = self.task_count
        if self._rows[-1][1] != size:
            self._rows.append((epoch, size, size))

    def grow(self, epoch: int, task_count: int, is_begun: bool) -> None:
        """Add tasks. ``is_begun`` is True if tasks of the current ``epoch`` have already been assigned."""
        base = self.find(epoch)[0] if is_begun else task_count
        row = (epoch, base, task_count)
        if self._rows[-1][0] == epoch:
            self._rows[-1] = row
        else:
            self._rows.append(row)

    def put_away(self, needed_epoch: int) -> bool:
        """Move the oldest recent rows to ``older`` if there are too many. True if this changed ``older``.

        Also forget the oldest rows if there are too many, but keep those that ``needed_epoch`` or a later epoch needs.
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
    """Return the order of one epoch. The epoch is not shuffled if ``seed`` is None."""
    return EpochOrder(base, size, None if seed is None else key_of(seed, epoch))
