"""Task layout: the consecutive chunks that form each task.

A layout consists of two arrays with 8 bytes per task, so a million tasks take 16 MB. Every lookup takes constant time.
A task may span several files, but it never ends inside a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from flightedl.domain.queue.batching import batch_count
from flightedl.errors import UsageError
from flightedl.formats.chunk_index import ChunkIndex
from flightedl.formats.chunks import Chunk


class TaskLayout:
    """The tasks of an index. Immutable.

    Args:
        index: Index of the dataset.
        batch_size: Records per batch.
        steps_per_batch: Number of consecutive batches with the same records.
        chunks_per_task: Number of chunks per task. The last task may have fewer.
        records_per_task: Approximate number of records per task, instead of ``chunks_per_task``. A task contains all
            chunks that *start* within the same multiple of this number, so it may be up to one chunk longer. 0 to use
            ``chunks_per_task``.
        bounds: Increasing chunk numbers at which the dataset grew. At each of them, a task starts, and counting
            restarts from 0, so the tasks before it are the same as in an index that ends there.

    Raises:
        UsageError: a number is out of range.
    """

    def __init__(
        self,
        index: ChunkIndex,
        batch_size: int,
        *,
        steps_per_batch: int = 1,
        chunks_per_task: int = 1,
        records_per_task: int = 0,
        bounds: Sequence[int] = (),
    ) -> None:
        if batch_size < 1 or chunks_per_task < 1 or records_per_task < 0:
            raise UsageError("batch_size and the size of a task have to be at least 1")
        self._index = index
        self._batch_size = batch_size
        self.steps_per_batch = steps_per_batch
        records = index.records
        ends = [*bounds, len(index)]
        parts = [
            start + _firsts(records[start:end], chunks_per_task, records_per_task)
            for start, end in zip([0, *bounds], ends, strict=True)
        ]
        firsts = np.concatenate(parts)
        #: Number of each task's first chunk.
        self._firsts: npt.NDArray[np.int64] = firsts.astype(np.int64, copy=False)
        self._records: npt.NDArray[np.int64] = np.add.reduceat(records, firsts) if len(firsts) else records[:0]

    @property
    def index(self) -> ChunkIndex:
        return self._index

    @property
    def batch_size(self) -> int:
        return self._batch_size

    @property
    def task_count(self) -> int:
        return len(self._firsts)

    @property
    def record_count(self) -> int:
        return self._index.record_count

    @property
    def task_records(self) -> npt.NDArray[np.int64]:
        """Number of records in each task before filtering, (task_count,)."""
        return self._records

    def records(self, task: int) -> int:
        return int(self._records[self._valid(task)])

    def batch_count(self, task: int) -> int:
        return self.steps_per_batch * batch_count(self.records(task), self._batch_size)

    def records_of(self, task: int, batches: range) -> range:
        """Return the positions of these batches' records in the task."""
        first = batches.start // self.steps_per_batch * self._batch_size
        end = -(-batches.stop // self.steps_per_batch) * self._batch_size
        return range(first, min(end, self.records(task)))

    def chunk_range(self, task: int) -> range:
        self._valid(task)
        end = self._firsts[task + 1] if task + 1 < self.task_count else len(self._index)
        return range(int(self._firsts[task]), int(end))

    def chunks_of(self, task: int) -> list[Chunk]:
        """Return the chunks of a task, in order. Raises IndexError if there is no such task."""
        return [self._index.chunk(number) for number in self.chunk_range(task)]

    def _valid(self, task: int) -> int:
        if not 0 <= task < self.task_count:
            raise IndexError(f"there is no task {task} of {self.task_count}")
        return task


def _firsts(records: npt.NDArray[np.int64], chunks_per_task: int, records_per_task: int) -> npt.NDArray[np.int64]:
    """Return the number of each task's first chunk. ``records``: each chunk's number of records, (chunk_count,)."""
    if not records_per_task:
        return np.arange(0, len(records), chunks_per_task, dtype=np.int64)
    cell = (np.cumsum(records) - records) // records_per_task
    return np.flatnonzero(np.diff(cell, prepend=-1))
