"""Task layout: the chunks, or parts of chunks, that form each task.

By default, a task consists of consecutive chunks. A layout then has two arrays with 8 bytes per task, so a million
tasks take 16 MB. Every lookup takes constant time. A task may span several files. ``Pieces`` describe other tasks, of
shuffled data and of mixtures (see ``domain.queue``).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from flightedl.domain.queue.batching import batch_count
from flightedl.domain.queue.mixture import Pieces
from flightedl.errors import UsageError
from flightedl.formats.chunk_index import ChunkIndex
from flightedl.formats.chunks import Chunk


class TaskLayout:
    """The tasks of an index. Immutable.

    Args:
        index: Index of the dataset.
        batch_size: Records per batch.
        steps_per_batch: Number of consecutive batches with the same records.
        records_per_task: Approximate number of records per task. A task contains all chunks that *start* within the
            same multiple of this number, so it may be up to one chunk longer. 0 to make each chunk one task.
        bounds: Increasing chunk numbers at which the dataset grew. At each of them, a task starts, and counting
            restarts from 0, so the tasks before it are the same as in an index that ends there.
        pieces: The tasks, if they do not consist of consecutive chunks. The previous two arguments are then ignored.

    Raises:
        UsageError: a number is out of range.
    """

    def __init__(
        self,
        index: ChunkIndex,
        batch_size: int,
        *,
        steps_per_batch: int = 1,
        records_per_task: int = 0,
        bounds: Sequence[int] = (),
        pieces: Pieces | None = None,
    ) -> None:
        if batch_size < 1 or records_per_task < 0:
            raise UsageError("batch_size and the size of a task have to be at least 1")
        self.index = index
        self.batch_size = batch_size
        self.steps_per_batch = steps_per_batch
        self.pieces = pieces
        records = index.records if pieces is None else pieces.records
        #: Number of each task's first chunk or piece.
        self._firsts: npt.NDArray[np.int64]
        if pieces is None:
            parts = [
                start + _firsts(records[start:end], records_per_task)
                for start, end in zip([0, *bounds], [*bounds, len(index)], strict=True)
            ]
            self._firsts = np.concatenate(parts).astype(np.int64, copy=False)
        else:
            self._firsts = pieces.firsts
        self._end = len(records)
        #: Number of records in each task before filtering, (task_count,).
        self.task_records: npt.NDArray[np.int64] = (
            np.add.reduceat(records, self._firsts) if len(self._firsts) else records[:0]
        )

    @property
    def task_count(self) -> int:
        return len(self._firsts)

    @property
    def record_count(self) -> int:
        return int(self.task_records.sum())

    def task_batches(self) -> list[tuple[int, int]]:
        """Return (number of batches, number of tasks that have so many); see ``DeclaredDataset``."""
        counts = self.steps_per_batch * -(-self.task_records // self.batch_size)
        units = 10 ** np.maximum(np.log10(np.maximum(counts, 1)).astype(np.int64) - 2, 0)
        found = np.unique(counts // units * units, return_counts=True)
        return list(zip(*(each.tolist() for each in found), strict=True))

    def records(self, task: int) -> int:
        return int(self.task_records[self._valid(task)])

    def batch_count(self, task: int) -> int:
        return self.steps_per_batch * batch_count(self.records(task), self.batch_size)

    def records_of(self, task: int, batches: range) -> range:
        """Return the positions of these batches' records in the task."""
        first = batches.start // self.steps_per_batch * self.batch_size
        end = -(-batches.stop // self.steps_per_batch) * self.batch_size
        return range(first, min(end, self.records(task)))

    def chunk_range(self, task: int) -> range:
        """Return the numbers of a task's chunks or pieces. Raises IndexError if there is no such task."""
        self._valid(task)
        end = self._firsts[task + 1] if task + 1 < self.task_count else self._end
        return range(int(self._firsts[task]), int(end))

    def chunks_of(self, task: int) -> list[Chunk]:
        """Return the chunks of a task, in order. Raises IndexError if there is no such task."""
        numbers = self.chunk_range(task)
        if self.pieces is None:
            return [self.index.chunk(number) for number in numbers]
        columns = (self.pieces.chunks, self.pieces.skipped, self.pieces.records)
        rows = zip(*(column[numbers.start : numbers.stop].tolist() for column in columns), strict=True)
        return [self.index.chunk(chunk).part(skipped, records) for chunk, skipped, records in rows]

    def _valid(self, task: int) -> int:
        if not 0 <= task < self.task_count:
            raise IndexError(f"there is no task {task} of {self.task_count}")
        return task


def _firsts(records: npt.NDArray[np.int64], records_per_task: int) -> npt.NDArray[np.int64]:
    """Return the number of each task's first chunk. ``records``: each chunk's number of records, (chunk_count,)."""
    if not records_per_task:
        return np.arange(len(records), dtype=np.int64)
    cell = (np.cumsum(records) - records) // records_per_task
    return np.flatnonzero(np.diff(cell, prepend=-1))
