"""Batches requested by number, for training loops whose model counts its batches.

With torchft, the count is ``manager.batches_committed()``. It is part of the model's state and the same for all replica
groups, even one that has just recovered. In a step, the participating groups use the batches starting with this number,
one per group. If the step is not committed, the next step uses the same numbers.

So the model is trained on each batch once, and two groups never get the same batch.

Rules:

* An epoch's batches consist of consecutive records, in the order of the epoch's tasks (see ``plan``). Its last batch
  may be smaller.
* Batches may be requested in any order. Batches after the last epoch have no records.

Memory: 24 bytes per task.
"""

from __future__ import annotations

import numpy as np

from flightedl.domain.groups.plan import Piece, Round
from flightedl.domain.queue.permutation import Integers, KeyedPermutation, key_of


class NumberedBatches:
    """Batches of all epochs.

    Args:
        sizes: Number of records of each task, (task count,) int64.
        epochs: Number of epochs, or None if it is unlimited.
        seed: Seed with which each epoch's tasks are shuffled; None for their original order.
        batch_size: Number of records per batch.
    """

    def __init__(self, sizes: Integers, *, epochs: int | None, seed: int | None, batch_size: int) -> None:
        self._sizes = sizes
        self._seed = seed
        self._batch_size = batch_size
        self._record_count = int(sizes.sum())
        self._per_epoch = -(-self._record_count // batch_size)
        #: Total number of batches; None if unlimited.
        self.count = None if epochs is None else epochs * self._per_epoch
        #: Cached (epoch, its tasks in order, number of records up to the end of each task).
        self._order: tuple[int, Integers, Integers] | None = None

    def batch(self, number: int) -> Round:
        """Return the records in a batch.

        Raises:
            ValueError: The number is negative.
        """
        if number < 0:
            raise ValueError(f"batches are numbered from 0, not {number}")
        if self._per_epoch == 0 or (self.count is not None and number >= self.count):
            return Round(number // max(self._per_epoch, 1), number, 0, ())
        epoch, within = divmod(number, self._per_epoch)
        first = within * self._batch_size
        return Round(epoch, within, first, tuple(self._pieces(epoch, first)))

    def _pieces(self, epoch: int, first: int) -> list[Piece]:
        tasks, ends = self._order_of(epoch)
        end = min(first + self._batch_size, self._record_count)
        place = int(np.searchsorted(ends, first, side="right"))
        pieces: list[Piece] = []
        while first < end:
            task, task_end = int(tasks[place]), int(ends[place])
            before = task_end - int(self._sizes[task])
            if first < task_end:
                pieces.append(Piece(task, first - before, min(end, task_end) - before))
            first, place = max(first, min(end, task_end)), place + 1
        return pieces

    def _order_of(self, epoch: int) -> tuple[Integers, Integers]:
        if self._order is None or self._order[0] != epoch:
            tasks = np.arange(len(self._sizes))
            if self._seed is not None:
                tasks = KeyedPermutation(len(tasks), key_of(self._seed, epoch)).elements_at(tasks)
            self._order = epoch, tasks, np.cumsum(self._sizes[tasks])
        return self._order[1:]
