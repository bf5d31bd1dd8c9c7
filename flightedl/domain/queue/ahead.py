"""What trainers may read of an epoch that has not begun, so that its first batches are there when it begins.

Rules:

* When nothing of an epoch is left to be handed out, whoever asks for work is *promised* the first tasks of the next
  one: at most ``PROMISED_COUNT``, different ones for each trainer. It may open and read them. It does not hold them: a
  promise has no attempt, nothing of it can be trained, reported or lost, and it is not stored.
* When the epoch begins, promised tasks wait to be handed out again like any others, each to the trainer that was
  promised it if that one asks; to others only when there is nothing else. So what was read is mostly what is given, and
  nobody waits for a trainer that does not come back.
* Nothing is promised of a dataset that grows: its next epoch may have another order.

Not guaranteed: that a promise is kept. Who is given something else has read in vain.
"""

from __future__ import annotations

from collections.abc import Collection

#: The task that is trained first, and the one read ahead behind it.
PROMISED_COUNT = 2


class Promises:
    """The promised positions of one epoch."""

    __slots__ = ("_by_trainer", "_count", "_epoch")

    def __init__(self) -> None:
        self._epoch = 0
        self._by_trainer: dict[str, list[int]] = {}
        self._count = 0

    def make(self, trainer: str, epoch: int, size: int) -> list[int]:
        """Promise positions of an epoch with so many, which has not begun; the same ones when asked again."""
        if epoch != self._epoch:
            self._epoch, self._by_trainer, self._count = epoch, {}, 0
        if trainer not in self._by_trainer:
            end = min(self._count + PROMISED_COUNT, size)
            self._by_trainer[trainer] = list(range(self._count, end))
            self._count = end
        return self._by_trainer[trainer]

    def count(self, epoch: int) -> int:
        """The positions of an epoch below this were promised."""
        return self._count if epoch == self._epoch else 0

    def next_of(self, trainer: str, epoch: int) -> int | None:
        """The first position that a trainer was promised of an epoch and did not get; from now on it is not."""
        mine = self._by_trainer.get(trainer) if epoch == self._epoch else None
        return mine.pop(0) if mine else None

    def others(self, epoch: int) -> Collection[int]:
        """Positions of an epoch that were promised and not asked for yet."""
        if epoch != self._epoch:
            return ()
        return {position for mine in self._by_trainer.values() for position in mine}

    def forget(self, trainer: str) -> None:
        """It is gone: what it was promised is anybody's."""
        if trainer in self._by_trainer:
            self._by_trainer[trainer] = []
