"""Batches by number (``domain.groups.numbered``): the script requests the batches that its model needs next.

A thread reads the next batch in advance, assuming that batch numbers continue to increase by the same amount.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYetError
from dataclasses import dataclass, field
from functools import partial

import pyarrow as pa

from flightedl.client.data.read_queue import read_in_time
from flightedl.client.waiting import Waiting
from flightedl.domain.groups.numbered import NumberedBatches
from flightedl.domain.groups.plan import Round
from flightedl.errors import UsageError
from flightedl.formats.dataset_spec import schema_of
from flightedl.messages.declarations import DeclaredDataset
from flightedl.process.fork_guard import GUARD


@dataclass(slots=True, eq=False)
class NumberedDataset:
    """Training data for scripts whose model counts its batches, as with torchft.

    Args:
        declared: The dataset.
        batches: The batches by number.
        read: Reads a batch.
        batch_done: Called with a batch's number of records when the next batch is requested.
        waiting: Begins a wait of the user's thread.
        trouble_of_files: Returns the cause of a wait for files; empty if there is none.
    """

    _declared: DeclaredDataset
    _batches: NumberedBatches
    _read: Callable[[Round], pa.RecordBatch]
    _batch_done: Callable[[int], None]
    _waiting: Callable[[], Waiting]
    _trouble_of_files: Callable[[], str]
    #: There is only one thread, because the reader is not thread-safe.
    _reader: ThreadPoolExecutor = field(init=False, default_factory=partial(ThreadPoolExecutor, 1, "flightedl-reader"))
    #: Number and round of the batch that is being read ahead, and the future that returns this batch.
    _ahead: tuple[int, Round, Future[pa.RecordBatch]] | None = field(init=False, default=None)
    _number: int | None = field(init=False, default=None)
    _step: Round | None = field(init=False, default=None)
    _row_count: int = field(init=False, default=0)

    @property
    def schema(self) -> pa.Schema:
        """Arrow schema of the records with all their columns, before ``decode``."""
        return schema_of(self._declared)

    @property
    def record_count(self) -> int:
        return self._declared.record_count

    @property
    def batch_count(self) -> int | None:
        """Number of batches in all epochs; None if there is no last epoch."""
        return self._batches.count

    @property
    def current(self) -> tuple[int, int] | None:
        """Number of records and epoch of the most recent batch; None before the first batch."""
        return None if self._step is None else (self._row_count, self._step.epoch)

    def batch(self, number: int) -> pa.RecordBatch:
        """Return the batch with this number, counted from 0 over all epochs. After the last batch, return an empty one.

        Raises:
            UsageError: the number is not a non-negative integer.
            DataError: a file cannot be read.
        """
        GUARD.check()
        if not isinstance(number, int) or number < 0:
            raise UsageError(f"number is {number!r:.80}, but must be a whole number from 0 on")
        if self._step is not None:
            self._batch_done(self._row_count)
        if self._ahead is None or self._ahead[0] != number:
            self._read_ahead(number)
        assert self._ahead is not None
        _, step, reading = self._ahead
        try:
            batch = self._result(reading)
        except BaseException:
            # The next call reads the batch again.
            self._ahead = None
            raise
        stride = 1 if self._number is None or number <= self._number else number - self._number
        self._number, self._step, self._row_count = number, step, batch.num_rows
        self._read_ahead(number + stride)
        return batch

    def close(self) -> None:
        self._reader.shutdown(cancel_futures=True)

    def _read_ahead(self, number: int) -> None:
        if self._ahead is not None:
            self._ahead[2].cancel()
        step = self._batches.batch(number)
        self._ahead = number, step, self._reader.submit(self._read, step)

    def _result(self, reading: Future[pa.RecordBatch]) -> pa.RecordBatch:
        if reading.done():
            return reading.result()
        return read_in_time(reading.result, NotYetError, self._waiting(), self._trouble_of_files)
