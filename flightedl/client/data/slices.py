"""Slices of a batch, on which a script trains its own copy of the model before it pushes one difference (local SGD).

The queue, the servers and all modes know only the whole batch, the *outer batch*: it is pushed, refused and repeated as
one, because a difference cannot be divided.
"""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa


class Slices:
    """Cuts each batch into slices. One object belongs to the session's model and to its dataset.

    Args:
        every: Number of slices in a batch; the last batch of a task may have fewer.
    """

    def __init__(self, every: int) -> None:
        self.every = every
        #: Number of records in a slice.
        self.size = 1
        #: Number of the current slice in its batch, and number of slices in this batch; 0 if no batch is current.
        self.number = self.count = 0

    def of(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """Yield the slices of a batch. One without records has one slice."""
        self.count = max(-(-batch.num_rows // self.size), 1)
        try:
            for start in range(0, self.count * self.size, self.size):
                self.number = start // self.size
                yield batch.slice(start, self.size)
        finally:
            self.number = self.count = 0

    @property
    def are_open(self) -> bool:
        """True if some slices of the current batch are still to come."""
        return self.number + 1 < self.count
