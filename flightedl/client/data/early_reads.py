"""What was read of tasks that are promised and not given yet: the first batches of the next epoch.

Only reading is early. Nothing of it reaches the user's code before the task is given: it is then that its batches are
asked for, and whether they were read before makes no difference but time. What cannot be read early is read again, and
reported, when it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, islice

import pyarrow as pa
from msgspec.structs import replace

from flightedl.domain.trainer.feed import AssignedTask
from flightedl.messages.tasks import Assignment

#: Reads the batches of a task, in order.
ReadTask = Callable[[AssignedTask], Iterator[pa.RecordBatch]]


class EarlyReads:
    """Of one reader. Not thread-safe.

    Args:
        read: Reads a task.
        limit: So many batches of a task are read early.
    """

    def __init__(self, read: ReadTask, limit: int) -> None:
        self._read = read
        self._limit = limit
        #: Of one epoch: what was promised, its first batches, and those behind them.
        self._begun: list[tuple[Assignment, list[pa.RecordBatch], Iterator[pa.RecordBatch]]] = []

    def begin(self, promised: Assignment) -> None:
        """Read the first batches of what will probably be given."""
        self._begun = [each for each in self._begun if each[0].epoch == promised.epoch]
        batches = self._read(AssignedTask(promised))
        try:
            first = list(islice(batches, self._limit))
        except Exception:  # noqa: BLE001 - whatever it is, it comes again and is reported when the task is given
            return
        self._begun.append((promised, first, batches))

    def batches(self, task: AssignedTask) -> Iterator[pa.RecordBatch]:
        """All batches of a task that is given."""
        given = replace(task.assignment, attempt=0)
        found = next((each for each in self._begun if each[0] == given), None)
        self._begun = [each for each in self._begun if each is not found and each[0].epoch >= given.epoch]
        return self._read(task) if found is None else chain(found[1], found[2])
