"""Batches requested by number, for training loops whose model counts its batches.

With torchft, the count is ``manager.batches_committed()``. It is part of the model's state and the same for all replica
groups, even one that has just recovered. In a step, the participating groups use the batches starting with this number,
one per group. If the step is not committed, the next step uses the same numbers.

So the model is trained on each batch once, and two groups never get the same batch.

Rules:

* An epoch's batches consist of consecutive records of its only lane (see ``lanes``), because any group may need any
  batch. The last batch may be smaller.
* Batches may be requested in any order. Batches after the last epoch have no records.
"""

from __future__ import annotations

from flightedl.domain.groups.plan import Order, Piece, Round


class NumberedBatches:
    """Batches of all epochs.

    Args:
        record_count: Number of records in an epoch.
        epochs: Number of epochs, or None if it is unlimited.
        order: Order of every epoch, with one lane.
        batch_size: Number of records per batch.
    """

    def __init__(self, record_count: int, *, epochs: int | None, order: Order, batch_size: int) -> None:
        self._order = order
        self._batch_size = batch_size
        self._record_count = record_count
        self._per_epoch = -(-record_count // batch_size)
        #: Total number of batches; None if unlimited.
        self.count = None if epochs is None else epochs * self._per_epoch

    def batch(self, number: int) -> Round:
        """Return the records in a batch.

        Raises:
            ValueError: The number is negative.
        """
        if number < 0:
            raise ValueError(f"batches are numbered from 0, not {number}")
        epoch, within = divmod(number, self._per_epoch)
        if self.count is not None and number >= self.count:
            return Round(epoch, number, 0, 0, self._order, ())
        first = within * self._batch_size
        end = min(first + self._batch_size, self._record_count)
        return Round(epoch, within, first, end, self._order, (Piece(0, first, end),))
