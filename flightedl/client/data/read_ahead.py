"""Reader thread of a loop: reads tasks, transforms their batches, and puts them into the queue."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import pyarrow as pa

from flightedl.client.data.feed import TaskFeed
from flightedl.client.data.read_queue import SLICE_S, KeptBytes, ReadQueue
from flightedl.client.data.readers import Result, Transforming
from flightedl.client.data.reading import EarlyReads, ReadTask
from flightedl.client.data.transforms import as_exception
from flightedl.domain.trainer import readings
from flightedl.domain.trainer.feed import AssignedTask
from flightedl.domain.trainer.readings import ReadBatch, ReadFailure, TaskEnd

#: Number of a task's batches to read before the task is assigned.
_EARLY_BATCHES = 5

#: A batch that has been read, and its records; or an event without records.
Item = tuple[readings.Item, pa.RecordBatch | None]


class ReadAhead:
    """The reading of one loop.

    Args:
        read: Reads a task.
        transforming: Transforms all batches.
        place: Returns the location of the records of a task's batch.
        limit_bytes: Memory limit of the queue.
    """

    def __init__(
        self,
        read: ReadTask,
        transforming: Transforming,
        place: Callable[[AssignedTask, int], str],
        limit_bytes: int,
    ) -> None:
        self._read = read
        self._transforming = transforming
        self._place = place
        #: Queue of items in reading order. None marks the end.
        self.queue: ReadQueue[Item | None] = ReadQueue(limit_bytes)
        self.stopping = threading.Event()
        #: Error that ended the reader thread; None at the end of the data.
        self.error: Exception | None = None
        self._kept = KeptBytes()
        #: Number of the task whose most recently yielded batch failed.
        self._failed: int | None = None
        self._thread: threading.Thread | None = None

    def start(self, feed: TaskFeed) -> None:
        self._thread = threading.Thread(target=self._run, args=(feed,), name="flightedl-reader", daemon=True)
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        """Wait until the thread has ended. Set ``stopping`` first. Does not wait if the thread was never started."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self, feed: TaskFeed) -> None:
        early = EarlyReads(self._read, _EARLY_BATCHES)
        try:
            while not self.stopping.is_set() and not feed.is_done:
                if (task := feed.next(SLICE_S)) is not None:
                    self._read_task(task, early.batches)
                elif (promised := feed.next_ahead()) is not None:
                    early.begin(promised)
        except Exception as error:  # noqa: BLE001 - raised in the user's thread
            self.error = error
        self._transforming.put(None, str, lambda _: self._put(None))

    def _read_task(self, task: AssignedTask, read: ReadTask) -> None:
        number = task.assignment.first_batch
        try:
            for records in read(task):
                place = partial(self._place, task, number)
                self._transforming.put(records, place, partial(self._deliver, task, number))
                if self.stopping.is_set():
                    return
                number += 1
        except BaseException as error:  # noqa: BLE001 - raised or reported in place of the batch
            end: readings.Item = ReadFailure(task, number, as_exception(error))
        else:
            end = TaskEnd(task)
        self._transforming.put(None, str, lambda _: self._end(end))

    def _deliver(self, task: AssignedTask, number: int, result: Result) -> None:
        if self._failed == task.number:
            return
        if isinstance(result, pa.RecordBatch):
            self._put((ReadBatch.of(task, number, result.num_rows), result), *self._kept.of(result))
        elif result is not None:
            self._failed = task.number
            self._put((ReadFailure(task, number, result), None))

    def _end(self, end: readings.Item) -> None:
        if self._failed != end.task.number:
            self._put((end, None))

    def _put(self, item: Item | None, new_bytes: int = 0, own_bytes: int = 0) -> None:
        self.queue.put_unless(self.stopping, item, new_bytes, own_bytes)
