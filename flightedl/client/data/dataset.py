"""The user's ``for batch in data``, which reads tasks in batches and reports finished tasks.

A reader thread (``read_ahead``) reads the next chunk in advance, so reading overlaps with computing. This also works
across the ends of epochs: the thread reads tasks that the master has promised, and releases their batches when the
tasks are assigned (``reading``).

The iterator opens each batch, which ensures that this trainer is a member and that its values are fresh. It yields the
batch, and closes it when the script requests the next one. ``domain.trainer.readings`` decides which batch is next,
which batch is repeated with fresh values, and when a task is done.

When the loop ends after the last epoch, the model has its final values, which are equal in all trainers. If the script
leaves the loop early, the model keeps its current values, and the batches whose gradients were not pushed return to the
queue with their task.

Without a model, the script may acknowledge batches itself (``domain.trainer.acknowledged``). Such a loop ends early if
no batch arrives while some batches are unacknowledged, because the script may have to acknowledge them before the next
batch is available. The next loop then continues.

Each batch's gradient is applied exactly once, although the loop body may run more than once for a batch.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from queue import Empty
from typing import Self, cast

import pyarrow as pa
from msgspec.structs import replace

from flightedl.client.data.feed import TaskFeed
from flightedl.client.data.losses import LostData
from flightedl.client.data.read_ahead import Item, ReadAhead
from flightedl.client.data.read_queue import READ_AHEAD_MB
from flightedl.client.data.readers import Transforming
from flightedl.client.data.reading import ReadTask, place_of
from flightedl.client.data.slices import Slices
from flightedl.client.participation import Participation
from flightedl.client.tables.table import Column, Table
from flightedl.client.waiting import Waiting
from flightedl.domain.retries import fault_of, is_transient
from flightedl.domain.topics import is_topic
from flightedl.domain.trainer import readings
from flightedl.domain.trainer.acknowledged import NOT_GIVEN, AcknowledgedLoop, Done
from flightedl.domain.trainer.batches import Batch, CurrentBatch
from flightedl.domain.trainer.feed import AssignedTask
from flightedl.domain.trainer.readings import (
    REJECTION_LIMIT,
    BatchDone,
    BatchLoop,
    Finished,
    GiveUpSum,
    HandBack,
    HandOut,
    LoopStep,
    NeedItem,
    PushSum,
    ReadBatch,
    ReadFailure,
    Unreadable,
)
from flightedl.errors import DataError, FlightedlError, GradientError, UsageError, UserCodeError
from flightedl.formats.chunks import ChangedFileError, chunks_from_rows
from flightedl.formats.dataset_spec import batch_schema_of
from flightedl.formats.following import MARKER
from flightedl.formats.record_places import described, record_ranges
from flightedl.messages.declarations import DeclaredDataset
from flightedl.process.fork_guard import GUARD

_SLICE_S = 0.5
#: Yielded by the inner loop if no batch arrives while some batches are unacknowledged.
_STARVED = object()


LoopOf = Callable[[], BatchLoop]
AcknowledgedOf = Callable[[], AcknowledgedLoop]
#: Receives the column of ids for each table, and a function that returns the next batch if it has been read.
LookAhead = Callable[[Mapping[Table, Column], Callable[[], pa.RecordBatch | None]], None]
#: Like the inner loop, but yields None instead of ``_STARVED``.
Loop = Generator[pa.RecordBatch | None, None, None]


class Dataset:
    """This trainer's share of the data. ``for batch in dataset`` yields batches until all epochs are done.

    One loop iterates over all epochs. After ``break``, a new loop continues with the remaining batches. Each batch is a
    ``pyarrow.RecordBatch`` of at most ``batch_size`` records.
    """

    def __init__(
        self,
        declared: DeclaredDataset,
        feed_factory: Callable[[], TaskFeed],
        read: ReadTask,
        listener: Participation,
        waiting: Callable[[], Waiting],
        grace_s: float,
        end_growth: Callable[[], object],
        begin_again: str = "",
        loop_of: LoopOf = BatchLoop,
        acknowledged_of: AcknowledgedOf = AcknowledgedLoop,
        *,
        explicit_done: bool = False,
        look_ahead: LookAhead = lambda _columns, _peek: None,
        trouble_of_files: Callable[[], str] = str,
        require_lease: Callable[[], None] = lambda: None,
        read_ahead_bytes: int = READ_AHEAD_MB << 20,
        transforming: Transforming | None = None,
        may_lose: bool = False,
        slices: Slices | None = None,
    ) -> None:
        self._declared = declared
        self._slices = slices
        self._feed_factory = feed_factory
        self._listener = listener
        self._waiting = waiting
        self._grace_s = grace_s
        self._end_growth = end_growth
        self._begin_again = begin_again
        self._loop_of = loop_of
        self._acknowledged_of = acknowledged_of
        self._look_ahead = look_ahead
        self._trouble_of_files = trouble_of_files
        self._require_lease = require_lease
        self._may_lose = may_lose
        #: Error that has ended the most recent loop; None if it has not ended with one. The session's end raises it.
        self.error: Exception | None = None
        self._summary: LostData | None = None
        self.explicit_done = explicit_done
        #: State of the current loop if the script acknowledges batches; otherwise None.
        self._acknowledged: AcknowledgedLoop | None = None
        self._is_finished = False
        #: Weak reference to the current loop. Only the script holds a strong one, so the loop ends as soon as the
        #: script leaves it with ``break`` or an exception, and other trainers do not wait for this one.
        self._loop: weakref.ref[Loop] | None = None
        #: The previous loop; a new loop continues it if the script left it with ``break``.
        self._resumable: Loop | None = None
        self._feed: TaskFeed | None = None
        self._transforming = transforming or Transforming()
        self._reading_of = partial(ReadAhead, read, self._transforming, self._place, read_ahead_bytes)
        self._reading = self._reading_of()
        #: (reading, number) -> records of a batch that is unacknowledged or may have to be repeated.
        self._records: dict[tuple[int, int], pa.RecordBatch] = {}
        #: Task of the current batch.
        self._at: AssignedTask | None = None
        #: Number of the current batch within its task.
        self._number = 0
        #: True if the current loop has yielded a batch.
        self._has_batches = False

    @property
    def schema(self) -> pa.Schema:
        """Arrow schema of the batches before ``transform`` (and before ``decode``)."""
        return batch_schema_of(self._declared)

    @property
    def record_count(self) -> int:
        """Number of records in an epoch, over all trainers. With ``follow``, the number at the declaration."""
        return self._declared.record_count

    @property
    def task_count(self) -> int:
        """Number of tasks in an epoch, over all trainers. With ``follow``, the number when the dataset was declared."""
        return self._declared.task_count

    @property
    def epoch(self) -> int:
        """Epoch of the current batch, counted from 0.

        Raises:
            UsageError: no batch is current.
        """
        if self._at is None:
            raise UsageError("no batch is current: read the epoch inside `for batch in data`")
        return self._at.assignment.epoch

    @property
    def step_of_batch(self) -> int:
        """Number of the current batch among its ``steps_per_batch`` repetitions, counted from 0.

        Raises:
            UsageError: no batch is current.
        """
        if self._at is None:
            raise UsageError("no batch is current: read its step inside `for batch in data`")
        return self._number % self._declared.declaration.steps_per_batch

    @property
    def summary(self) -> LostData | None:
        """Number of batches and records that were set aside in all epochs, and number of chunks that a task mixes.

        None before the end of the last epoch.
        """
        return self._summary

    @property
    def is_over(self) -> bool:
        """True if a loop of this trainer has completed all epochs."""
        return self._is_finished

    def done(self, batch: pa.RecordBatch | None = None) -> Done:
        """Acknowledge a batch. Requires a dataset that was declared with ``explicit_done``.

        Args:
            batch: A batch that the loop has yielded; None for the oldest unacknowledged batch.

        Returns:
            ``Done.COUNTED``, or ``Done.TAKEN`` if the master revoked the batch because this trainer was frozen,
            disconnected or stuck. Another trainer then processes the batch, so this trainer must not count it.

        Raises:
            UsageError: the dataset was declared without ``explicit_done``, or there is no such batch.
        """
        if not self.explicit_done:
            raise UsageError(
                "a batch is done when the loop asks for the next one: to call done(), declare explicit_done=True"
            )
        waiting = [] if self._acknowledged is None else self._acknowledged.not_done
        of = self._records
        found = next((e for e in waiting if batch is None or of.get((e.batch.reading, e.batch.number)) is batch), None)
        if found is None or self._acknowledged is None:
            raise UsageError(NOT_GIVEN)
        self._require_lease()
        loop, feed, handed = self._acknowledged, self._feed, found.batch
        assert feed is not None, "a loop has given the batch"
        feed.batch_done(found.task, handed.number)
        done = loop.done(handed, feed.held)
        self._records.pop((handed.reading, handed.number), None)
        if done.report is not None:
            self._report(feed, done.report)
        self._listener.batch_done(handed, is_counted=done.outcome is Done.COUNTED)
        return done.outcome

    def end(self) -> None:
        """End the last epoch of a dataset declared with ``follow``, after the files that exist now have been read.

        Returns when these files have become tasks. Creating a file ``_END`` in their directory has the same effect.

        Raises:
            UsageError: the dataset was declared without ``follow``.
        """
        self._end_growth()

    def prefetching(self, columns: Mapping[Table, Column]) -> Self:
        """Make each step also fetch the rows for the next batch, if that batch has been read by then.

        A lookup of exactly these ids then needs no round trip. In synchronous mode, it returns the same rows as without
        prefetching; in other modes, it returns the rows with their values immediately after the step.

        Args:
            columns: Table -> the column that contains its ids, or a function that computes the ids from a batch, as the
                loop does.
        """
        self._look_ahead(columns, self._peek)
        return self

    def _peek(self) -> pa.RecordBatch | None:
        item = self._reading.queue.first
        return None if item is None else item[1]

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        GUARD.check()
        if self.error is not None and not (isinstance(self.error, FlightedlError) and is_transient(self.error)):
            raise self.error
        if self._is_finished:
            raise UsageError(
                f"this loop has already received all batches of all epochs ({self._declared.declaration.epochs}): "
                f"a single loop covers all of them, see epochs=; {self._begin_again}"
            )
        if self.explicit_done:
            if self.error is not None:
                self._leave_loop(None)
                self._resumable = None
            self._resumable = self._resumable or self._acknowledged_batches()
            return self._until_starved(self._resumable)
        if self._loop is not None:
            self._leave_loop(self._loop())
        loop = self._iterate()
        self._loop = weakref.ref(loop)
        return cast("Iterator[pa.RecordBatch]", loop)

    def _until_starved(self, loop: Loop) -> Iterator[pa.RecordBatch]:
        for batch in loop:
            if batch is None:
                return
            yield batch

    def _leave_loop(self, loop: Loop | None) -> None:
        """Return the tasks of an abandoned loop to the master, for example after Ctrl-C in a notebook."""
        if loop is not None:
            loop.close()
        self.close()
        self._listener.abandon_batch()
        self._reading, self._at = self._reading_of(), None

    @contextmanager
    def _begun(self) -> Iterator[TaskFeed]:
        self._feed = feed = self._feed_factory()
        self._reading.start(feed)
        self._has_batches = False
        self.error = None
        try:
            yield feed
            self._end_loop()
        except GeneratorExit:
            # The script left the loop during this batch, with ``break`` or an exception that the session will report.
            if not GUARD.is_forked:
                self._reading.stopping.set()
                feed.retire(self._at)
            raise
        except BaseException as error:
            self.close()
            self.error = error if isinstance(error, Exception) else None
            raise

    def _end_loop(self) -> None:
        self.close()
        if self._reading.error is not None:
            raise self._reading.error
        self._is_finished = True
        self._listener.loop_over()
        self._summary = replace(self._listener.lost, mixed_chunks=self._declared.mixed_chunks)
        if not self._has_batches:
            sys.stderr.write(
                f"flightedl: the job is done, with all its epochs ({self._declared.declaration.epochs}): "
                f"there are no batches left for this loop; {self._begin_again}\n"
            )
        self._summary.report(may_lose=self._may_lose)

    def _iterate(self) -> Loop:
        loop, listener, queue = self._loop_of(), self._listener, self._reading.queue
        with self._begun() as feed:
            step: LoopStep = loop.next_step()
            while True:
                if isinstance(step, HandOut):
                    batch = step.batch
                    if not self._open(feed, step.task, batch):
                        step = loop.denied(batch)
                        continue
                    yield from self._given(self._records[batch.reading, batch.number])
                    self._at = None
                    states = listener.close_batch()
                    for state in states:
                        if not (state.waits or state.must_repeat):
                            self._records.pop((state.reading, state.number), None)
                    step = loop.next_step(states)
                elif isinstance(step, NeedItem):
                    item = queue.get(0.0) if queue.items else self._next_item(feed)
                    if item is None:
                        break
                    read = self._kept(cast("Item", item))
                    is_taken = isinstance(read, ReadBatch) or feed.is_held(read.task)
                    step = loop.accept(read) if is_taken else loop.next_step()
                elif isinstance(step, PushSum):
                    step = loop.next_step(listener.push_sum())
                elif isinstance(step, GiveUpSum):
                    step = loop.next_step(listener.give_up_sum())
                else:
                    self._report(feed, step)
                    step = loop.next_step()

    def _given(self, batch: pa.RecordBatch) -> Iterable[pa.RecordBatch]:
        return (batch,) if self._slices is None else self._slices.of(batch)

    def _acknowledged_batches(self) -> Loop:
        loop = self._acknowledged = self._acknowledged_of()
        with self._begun() as feed:
            step: LoopStep = loop.next_step()
            while True:
                if isinstance(step, HandOut):
                    if not self._open(feed, step.task, step.batch):
                        self._records.pop((step.batch.reading, step.batch.number), None)
                        step = loop.denied(step.batch, feed.held)
                        continue
                    yield self._records[step.batch.reading, step.batch.number]
                    self._at = None
                    step = loop.next_step()
                elif isinstance(step, NeedItem):
                    while (item := self._next_item(feed)) is _STARVED:
                        yield None
                    if item is None:
                        break
                    step = loop.accept(self._kept(cast("Item", item)), feed.held)
                else:
                    self._report(feed, step)
                    step = loop.next_step()

    def _kept(self, item: Item) -> readings.Item:
        read, records = item
        if not isinstance(read, ReadBatch):
            return read
        if not self.explicit_done and self._records and next(iter(self._records))[0] != read.task.number:
            self._records.clear()
        self._records[read.task.number, read.batch.number] = records
        return read

    def _open(self, feed: TaskFeed, task: AssignedTask, batch: Batch) -> bool:
        """Prepare to yield a batch. Return False if the master has revoked its task."""
        self._require_lease()
        if not feed.is_held(task) or not self._listener.open_batch(batch, partial(self._place, task, batch.number)):
            return False
        self._at, self._number, self._has_batches = task, batch.number, True
        return True

    @staticmethod
    def _report(feed: TaskFeed, step: LoopStep) -> None:
        match step:
            case Finished(task, pservers, placement):
                feed.finished(task, pservers, placement=placement)
            case HandBack(task):
                feed.hand_back(task)
            case BatchDone(task, number):
                feed.batch_done(task, number)
            case Unreadable(failure):
                _report_unreadable(feed, failure)

    def _place(self, task: AssignedTask, number: int) -> str:
        declared, given = self._declared.declaration, task.assignment
        first = number // declared.steps_per_batch * declared.batch_size
        end = first + declared.batch_size
        chunks = chunks_from_rows(given.chunks)
        return described(record_ranges(chunks, first, end, given.seed, given.epoch, given.task))

    def _next_item(self, feed: TaskFeed) -> Item | object | None:
        waiting: Waiting | None = None
        try:
            while True:
                try:
                    item = self._reading.queue.get(_SLICE_S)
                except Empty:
                    waiting = waiting or self._waiting()
                    if trouble := self._trouble_of_files() or feed.trouble:
                        waiting.because(trouble)
                    elif self._acknowledged is not None and self._acknowledged.not_done:
                        return _STARVED
                    else:
                        waiting.patiently(feed.waits_for or self._patience)
                else:
                    return item
        finally:
            if waiting is not None:
                waiting.over()

    @property
    def _patience(self) -> str:
        declared = self._declared.declaration
        what = "new messages" if is_topic(*declared.urls) else f"new files, or {MARKER} beside them"
        more = f", or {what}" if declared.follow else ""
        return f"the other trainers to finish their tasks of this epoch{more}"

    def fail_current(self, current: CurrentBatch, error: str, place: str, fault: str) -> None:
        """Report an exception of the script, with its batch and location, so that the master can isolate the cause."""
        if self._feed is not None and self._at is not None:
            self._feed.failed(self._at, error, current.number, place, fault)

    def registered_again(self) -> None:
        """Drop all tasks. This trainer has a new generation, so other trainers process its tasks."""
        if self._feed is not None:
            self._feed.registered_again()

    def close(self) -> None:
        """Return the held tasks to the master and stop reading. Does nothing if called again."""
        if GUARD.is_forked:
            return
        self._reading.stopping.set()
        if self._feed is not None:
            self._feed.close(self._grace_s)
        self._reading.join(self._grace_s)
        self._transforming.close()


def _report_unreadable(feed: TaskFeed, failure: ReadFailure) -> None:
    """Return the task to the master. Raise the error again if it is the user's, or the data cannot have caused it."""
    error = failure.error
    is_usage = isinstance(error, UsageError) and not isinstance(error, DataError | GradientError)
    if is_usage or isinstance(error, ChangedFileError):
        raise error
    place, problem, fault, text = "", "cannot read a batch", fault_of(error), str(error) or type(error).__name__
    if isinstance(error, GradientError):
        place, fault = place_of(error), "code"
        problem = f"the gradient of a batch was rejected {REJECTION_LIMIT} times"
    elif isinstance(error, UserCodeError):
        if isinstance(error.__cause__, Exception) and not isinstance(error.__cause__, FlightedlError):
            error = error.__cause__
            error.add_note(text)
        place = place_of(error)
    feed.failed(failure.task, text, failure.number, place, fault)
    if isinstance(failure.error, UserCodeError) or not isinstance(error, (FlightedlError, pa.ArrowException, OSError)):
        raise error
    sys.stderr.write(f"flightedl: {problem}, the task returns to the queue: {error}\n")
