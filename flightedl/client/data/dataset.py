"""The user's ``for batch in data``: tasks become batches, finished tasks become reports.

A reader thread stays ahead by the next chunk (``read_ahead``), so that reading overlaps with computing, also across the
ends of epochs: it reads what this trainer will probably be given, and passes it on when it is (``reading``). The
iterator opens each batch (this trainer is a member, its values are fresh), hands it out, and closes it when the next
one is asked for.
Which one is next, which is handed out again (the loop body simply runs once more with fresh values), and when a task is
done is decided by ``domain.trainer.readings``.

When all is done, the loop ends with the model's final values, which are the same in every trainer. A loop that is left
early keeps the values that it had.

A loop that is left gives up the sum that is not pushed: its batches go back with their task.

Where there is no model, a batch may also count as done when the user says so (``domain.trainer.acknowledged``). Then a
loop ends early where nothing comes and batches are not done, for what comes next may wait for just these; another one
goes on from there.

What is not guaranteed: that the loop body runs exactly once for a batch. That its gradient counts exactly once is.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from queue import Empty
from typing import Self, cast

import pyarrow as pa

from flightedl.client.data.feed import TaskFeed
from flightedl.client.data.read_ahead import Item, ReadAhead
from flightedl.client.data.read_queue import READ_AHEAD_MB
from flightedl.client.data.readers import Transforming
from flightedl.client.data.reading import ReadTask, place_of
from flightedl.client.data.transforms import UnusableTransformError
from flightedl.client.participation import Participation
from flightedl.client.tables.table import Column, Table
from flightedl.client.waiting import Waiting
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
from flightedl.errors import FlightedlError, GradientError, UsageError
from flightedl.formats.chunks import ChangedFileError, chunks_from_rows
from flightedl.formats.dataset_spec import batch_schema_of
from flightedl.formats.following import MARKER
from flightedl.formats.record_places import described, record_ranges
from flightedl.messages.declarations import DeclaredDataset

_SLICE_S = 0.5
#: Nothing comes, while batches are not done.
_STARVED = object()


#: Makes what decides about a loop.
LoopOf = Callable[[], BatchLoop]
AcknowledgedOf = Callable[[], AcknowledgedLoop]
#: Told which columns have ids of tables, and how to see the next batch.
LookAhead = Callable[[Mapping[Table, Column], Callable[[], pa.RecordBatch | None]], None]
#: None: nothing comes, while batches are not done.
Loop = Generator[pa.RecordBatch | None, None, None]


class Dataset:
    """An elastic pass over the data: ``for batch in dataset`` gives this trainer's share, until all epochs are done.

    Iterate once; a loop that was left may be begun again, and goes on with what is left. Batches are
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
    ) -> None:
        self._declared = declared
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
        #: The user says which batches are done.
        self.explicit_done = explicit_done
        #: Of the loop that is under way, if so.
        self._acknowledged: AcknowledgedLoop | None = None
        self._is_finished = False
        #: The loop over the data, from its beginning. Only whoever goes through it keeps it: when they leave it, by
        #: ``break`` or by an exception, it ends there and then, and nobody waits for this trainer.
        self._loop: weakref.ref[Loop] | None = None
        #: One that may be left and gone on with.
        self._resumable: Loop | None = None
        self._feed: TaskFeed | None = None
        self._transforming = transforming or Transforming()
        self._reading_of = partial(ReadAhead, read, self._transforming, self._place, read_ahead_bytes)
        self._reading = self._reading_of()
        #: (reading, number) -> the records of a batch that may be handed out again, or that is not done.
        self._records: dict[tuple[int, int], pa.RecordBatch] = {}
        #: What the user's code is at.
        self._at: AssignedTask | None = None
        #: Of the batch within its task.
        self._number = 0
        #: The present loop was given a batch.
        self._has_batches = False

    @property
    def schema(self) -> pa.Schema:
        """Arrow schema of the batches; with ``decode``, of the records that it is given."""
        return batch_schema_of(self._declared)

    @property
    def record_count(self) -> int:
        """Records of one epoch, over all trainers; of one that is followed, when it was declared."""
        return self._declared.record_count

    @property
    def task_count(self) -> int:
        """Tasks of one epoch, over all trainers; of one that is followed, when it was declared."""
        return self._declared.task_count

    @property
    def epoch(self) -> int:
        """The epoch of the batch that the loop has now, counted from 0.

        Raises:
            UsageError: no batch is current.
        """
        if self._at is None:
            raise UsageError("no batch is current: ask for the epoch inside `for batch in data`")
        return self._at.assignment.epoch

    @property
    def step_of_batch(self) -> int:
        """Of data declared with ``steps_per_batch``: which of its steps the current batch is for, counted from 0.

        Raises:
            UsageError: no batch is current.
        """
        if self._at is None:
            raise UsageError("no batch is current: ask for its step inside `for batch in data`")
        return self._number % self._declared.declaration.steps_per_batch

    @property
    def is_over(self) -> bool:
        """Whether a loop has seen that all batches of all epochs are done, by whichever trainer."""
        return self._is_finished

    def done(self, batch: pa.RecordBatch | None = None) -> Done:
        """Say that a batch is done; for a dataset declared with ``explicit_done``.

        Args:
            batch: A batch that the loop gave; None: the oldest one that is not done.

        Returns:
            ``Done.COUNTED``, or ``Done.TAKEN`` if the batch was taken from this trainer, which was frozen, cut off or
            stuck: then another trainer does it, and it must not count here.

        Raises:
            UsageError: it was declared without ``explicit_done``, or there is no such batch.
        """
        if not self.explicit_done:
            raise UsageError("batches are done as the loop goes on: to say it yourself, declare explicit_done=True")
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
        """Of a dataset declared with ``follow``: no files are to come, so let the last epoch end with those there are.

        Returns when these have joined. The same as putting a file ``_END`` beside them.

        Raises:
            UsageError: it was declared without ``follow``.
        """
        self._end_growth()

    def prefetching(self, columns: Mapping[Table, Column]) -> Self:
        """From now on the rows of the next batch come with the step of the batch before it, as far as that is known.

        A lookup of just these ids then costs no round trip. In synchronous mode what it returns is the same as without;
        in other modes rows are as they were right after that step.

        Args:
            columns: Table -> the column of the batches that has its ids, or a function that makes them of a batch, as
                the loop does.
        """
        self._look_ahead(columns, self._peek)
        return self

    def _peek(self) -> pa.RecordBatch | None:
        """The batch that was read behind the current one; None: that is not known."""
        item = self._reading.queue.first
        return None if item is None else item[1]

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        if self._is_finished:
            raise UsageError(
                f"this loop has had all batches of all epochs ({self._declared.declaration.epochs}): "
                f"one loop over a dataset goes through all of them, see epochs=; {self._begin_again}"
            )
        if self.explicit_done:
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
        """The loop before was left in its midst, as by Ctrl-C in a notebook: what it held goes back."""
        if loop is not None:
            loop.close()
        self.close()
        self._listener.abandon_batch()
        self._reading, self._at = self._reading_of(), None

    @contextmanager
    def _begun(self) -> Iterator[TaskFeed]:
        """Fetch and read ahead inside the ``with`` block, which is left when the loop is."""
        self._feed = feed = self._feed_factory()
        self._reading.start(feed)
        self._has_batches = False
        try:
            yield feed
        except GeneratorExit:
            # The loop was left at a batch: by ``break``, or by an exception, of which the session hears in a moment.
            self._reading.stopping.set()
            feed.retire(self._at)
            raise
        except BaseException:
            self.close()
            raise
        self.close()
        if self._reading.error is not None:
            raise self._reading.error
        self._is_finished = True
        self._listener.loop_over()
        if not self._has_batches:
            sys.stderr.write(
                f"flightedl: the job is done, with all its epochs ({self._declared.declaration.epochs}): "
                f"there are no batches left for this loop; {self._begin_again}\n"
            )

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
                    yield self._records[batch.reading, batch.number]
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
                    # Whether a batch's task is held is looked at when the batch is handed out.
                    is_taken = isinstance(read, ReadBatch) or feed.is_held(read.task)
                    step = loop.take(read) if is_taken else loop.next_step()
                elif isinstance(step, PushSum):
                    step = loop.next_step(listener.push_sum())
                elif isinstance(step, GiveUpSum):
                    step = loop.next_step(listener.give_up_sum())
                else:
                    self._report(feed, step)
                    step = loop.next_step()

    def _acknowledged_batches(self) -> Loop:
        """Yield batches where the user says which are done; None if nothing comes while some are not."""
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
                    step = loop.take(self._kept(cast("Item", item)), feed.held)
                else:
                    self._report(feed, step)
                    step = loop.next_step()

    def _kept(self, item: Item) -> readings.Item:
        """Keep the records of an item for as long as its batch may be handed out."""
        read, records = item
        if not isinstance(read, ReadBatch):
            return read
        if not self.explicit_done and self._records and next(iter(self._records))[0] != read.task.number:
            self._records.clear()
        self._records[read.task.number, read.batch.number] = records
        return read

    def _open(self, feed: TaskFeed, task: AssignedTask, batch: Batch) -> bool:
        """Get ready to hand a batch out; False if the work was taken away."""
        self._require_lease()
        if not feed.is_held(task) or not self._listener.open_batch(batch, partial(self._place, task, batch.number)):
            return False
        self._at, self._number, self._has_batches = task, batch.number, True
        return True

    @staticmethod
    def _report(feed: TaskFeed, step: LoopStep) -> None:
        """Tell the feed."""
        match step:
            case Finished(task, pservers):
                feed.finished(task, pservers)
            case HandBack(task):
                feed.hand_back(task)
            case BatchDone(task, number):
                feed.batch_done(task, number)
            case Unreadable(failure):
                _report_unreadable(feed, failure)

    def _place(self, task: AssignedTask, number: int) -> str:
        """Where the records of a batch lie."""
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
                        waiting.patiently(self._patience)
                else:
                    return item
        finally:
            if waiting is not None:
                waiting.over()

    @property
    def _patience(self) -> str:
        """What there is to wait for when the master has no work."""
        more = f", or new files, or {MARKER} beside them" if self._declared.declaration.follow else ""
        return f"the other trainers to finish their tasks of this epoch{more}"

    def fail_current(self, current: CurrentBatch, error: str, place: str) -> None:
        """The user's code raised at this batch, at this place of it: report it, so that a poisonous record is found."""
        if self._feed is not None and self._at is not None:
            self._feed.failed(self._at, error, current.number, place)

    def registered_again(self) -> None:
        """This trainer has a new generation: what it held belongs to others now."""
        if self._feed is not None:
            self._feed.registered_again()

    def close(self) -> None:
        """Hand back what is held and stop reading. Closing twice is fine."""
        self._reading.stopping.set()
        if self._feed is not None:
            self._feed.close(self._grace_s)
        self._reading.join(self._grace_s)
        self._transforming.close()


def _report_unreadable(feed: TaskFeed, failure: ReadFailure) -> None:
    """The task goes back; what no data can cause is raised."""
    error = failure.error
    if isinstance(error, ChangedFileError | UnusableTransformError):
        raise error
    place, problem = "", "cannot read a batch"
    if isinstance(error, GradientError):
        place, problem = place_of(error), f"the gradient of a batch was rejected {REJECTION_LIMIT} times"
    feed.failed(failure.task, str(error) or type(error).__name__, failure.number, place)
    if not isinstance(error, (FlightedlError, pa.ArrowException, OSError)):
        raise error
    sys.stderr.write(f"flightedl: {problem}, the task goes back: {error}\n")
