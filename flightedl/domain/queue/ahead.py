"""Promises of tasks of the next epoch, so that trainers can read their first batches before the epoch begins.

Rules:

* When all tasks of an epoch are assigned, a trainer that asks for work is *promised* up to ``PROMISED_COUNT`` tasks of
  the next epoch: the first ones not promised to another trainer. The trainer may read them, but does not hold them. A
  promise has no attempt number, so its task cannot be trained on, reported or lost. Promises are not stored.
* When the epoch begins, promised tasks wait like all others. A trainer gets its promised tasks first. Other trainers
  get these tasks only if no other tasks remain, so no task waits for a trainer that never returns.
* No tasks are promised while the dataset is growing, because the order of the next epoch may still change.

Promises may be broken. A trainer that is assigned other tasks has read the promised tasks in vain.
"""

from __future__ import annotations

from collections.abc import Collection

#: Number of tasks promised to a trainer: one to train on first, and one to read ahead.
PROMISED_COUNT = 2


class Promises:
    """The promised positions of one epoch."""

    __slots__ = ("_by_trainer", "_count", "_epoch")

    def __init__(self) -> None:
        self._epoch = 0
        self._by_trainer: dict[str, list[int]] = {}
        self._count = 0

    def make(self, trainer: str, epoch: int, size: int) -> list[int]:
        """Promise positions of a future epoch with ``size`` tasks. Repeated calls return the same positions."""
        if epoch != self._epoch:
            self._epoch, self._by_trainer, self._count = epoch, {}, 0
        if trainer not in self._by_trainer:
            end = min(self._count + PROMISED_COUNT, size)
            self._by_trainer[trainer] = list(range(self._count, end))
            self._count = end
        return self._by_trainer[trainer]

    def count(self, epoch: int) -> int:
        """Return the position after the last promised one of an epoch."""
        return self._count if epoch == self._epoch else 0

    def next_of(self, trainer: str, epoch: int) -> int | None:
        """Remove and return the first position of an epoch that is promised to a trainer, or None if there is none."""
        mine = self._by_trainer.get(trainer) if epoch == self._epoch else None
        return mine.pop(0) if mine else None

    def others(self, epoch: int) -> Collection[int]:
        if epoch != self._epoch:
            return ()
        return {position for mine in self._by_trainer.values() for position in mine}

    def forget(self, trainer: str) -> None:
        if trainer in self._by_trainer:
            self._by_trainer[trainer] = []
