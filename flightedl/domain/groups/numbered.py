"""Batches by number: for trainings that count the batches that their model has, and ask for just these.

With torchft, that count is ``manager.batches_committed()``. It is part of the model's state and the same for all
replica groups, also for one that has healed. The groups of a step take the batches from this number on, one each. If
the step is not committed, the next one takes the same numbers. So a batch counts once in the model, however many groups
take part in each step, and no group has to give back what another one had.

Rules:

* The batches of an epoch are consecutive records in the order of its tasks (see ``plan``); the last one is smaller.
* Any number may be asked for at any time. Behind the last batch of the last epoch there are batches without records.

Memory: 24 bytes for each task.
"""

from __future__ import annotations

import numpy as np

from flightedl.domain.groups.plan import Piece, Round
from flightedl.domain.queue.permutation import Integers, KeyedPermutation, key_of


class NumberedBatches:
    """The batches of all epochs.

    Args:
        sizes: Records of each task, (task count,) int64.
        epochs: Number of epochs; None: endless.
        seed: Shuffles the order of the tasks in each epoch; None: they are taken in order.
        batch_size: Records of a batch.
    """

    def __init__(self, sizes: Integers, *, epochs: int | None, seed: int | None, batch_size: int) -> None:
        self._sizes = sizes
        self._seed = seed
        self._batch_size = batch_size
        self._record_count = int(sizes.sum())
        self._per_epoch = -(-self._record_count // batch_size)
        #: Number of all batches; None: endless.
        self.count = None if epochs is None else epochs * self._per_epoch
        #: Epoch, its tasks in order, and the records up to the end of each.
        self._order: tuple[int, Integers, Integers] | None = None

    def batch(self, number: int) -> Round:
        """Return the records of a batch.

        Raises:
            ValueError: the number is negative.
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
