"""A dataset loop turns tasks into batches. Every reported task is complete, even if tasks are revoked and reassigned.

The feed's master is the product's own task queue, behind an exchange of reports and requests.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import pyarrow as pa
import pytest

from flightedl.adapters.clock import SystemClock
from flightedl.client.data import dataset, read_ahead, read_queue
from flightedl.client.data.dataset import Dataset
from flightedl.client.data.feed import TaskFeed
from flightedl.client.data.losses import LostData
from flightedl.client.data.readers import Transforming
from flightedl.client.waiting import Waiting
from flightedl.domain.master.effects import Outbox
from flightedl.domain.master.work import Work
from flightedl.domain.queue.tasks import TaskQueue
from flightedl.domain.queue.values import QueueSettings, TaskGiven
from flightedl.domain.trainer.batches import Batch, BatchState
from flightedl.domain.trainer.feed import Ask, AssignedTask
from flightedl.errors import (
    EXIT_FAILED,
    DataError,
    LostDataError,
    StoreError,
    UnavailableError,
    UnsupportedError,
    UsageError,
    UserCodeError,
    exit_code_of,
)
from flightedl.formats.chunks import CorruptChunkError
from flightedl.messages.declarations import DatasetDeclaration, DeclaredDataset
from flightedl.messages.tasks import FailedTask, TasksReply

from . import transforms_of_tests as of_tests

BATCHES = 6
DECLARED = DeclaredDataset(
    declaration=DatasetDeclaration(urls=["a"], batch_size=1),
    schema="",
    index_hash="",
    record_count=0,
    task_count=0,
    mixed_chunks=7,
)


class Master:
    """Master that answers from a task queue, without a network."""

    def __init__(self, task_count: int, batch_count: int = BATCHES, **settings: object) -> None:
        self.queue = TaskQueue(QueueSettings(task_count, lambda _: batch_count, **settings))  # type: ignore[arg-type]
        self._work = Work(self.queue, Outbox())
        self.generation, self.now = 1, 0.0
        self.changed = threading.Condition()
        self.assigned: list[int] = []
        self.failed: list[FailedTask] = []

    def fetch(self, ask: Ask) -> TasksReply:
        ticket = ask.ticket("a", self.generation)
        self.failed += ticket.failed
        with self.changed:
            lost = self._work.apply_reports(ticket, self.now)
            given, outcome, _ = self._work.hand_out(ticket, self.now, 1)
            self.assigned += [assignment.attempt for assignment in given]
            self.changed.notify_all()
            return TasksReply(assignments=given, outcome=outcome, lost=lost, retry_after_s=0.01)


class Listener:
    """Listener that counts completed batches, and rejects, fails or repeats the planned ones."""

    def __init__(self) -> None:
        self.done: list[tuple[int, int, int]] = []
        self.abandoned = self.finished = 0
        self.refuse: Callable[[Batch], bool] = lambda _: False
        self.repeat: Callable[[Batch], bool] = lambda _: False

    def open_batch(self, batch: Batch, _: Callable[[], str]) -> bool:
        self.current = batch
        return not self.refuse(batch)

    def close_batch(self) -> list[BatchState]:
        batch = self.current
        if self.repeat(batch):
            return [BatchState(batch.reading, batch.number, must_repeat=True)]
        self.done.append((batch.epoch, batch.task, batch.number))
        return [BatchState(batch.reading, batch.number, generations={0: 7})]

    def abandon_batch(self) -> None:
        self.abandoned += 1

    def push_sum(self) -> list[BatchState]:
        return []

    def give_up_sum(self) -> list[BatchState]:
        return []

    lost = LostData()

    def loop_over(self) -> None:
        self.finished += 1


#: Arrow imports pandas when it first converts a list, which may exceed a test's timeout.
_NUMBERS = pa.array([0])


def empty_batches(task: AssignedTask) -> Iterator[pa.RecordBatch]:
    for number in range(task.assignment.first_batch, task.assignment.end_batch):
        yield pa.RecordBatch.from_pydict({"k": [number]})


Read = Callable[[AssignedTask], Iterator[pa.RecordBatch]]
Make = Callable[..., Dataset]


@pytest.fixture
def make() -> Iterator[Make]:
    feeds: list[TaskFeed] = []

    def dataset(
        master: Master, listener: Listener, read: Read = empty_batches, transforming: Transforming | None = None
    ) -> Dataset:
        clock = SystemClock()

        def feed() -> TaskFeed:
            feeds.append(TaskFeed(master.fetch, lambda: None, clock))
            return feeds[-1]

        waiting = lambda: Waiting(clock, 60.0, 60.0, lambda _: None)  # noqa: E731
        return Dataset(DECLARED, feed, read, listener, waiting, 5.0, lambda: None, transforming=transforming)

    yield dataset
    for each in feeds:
        each.close(5.0)


def once(awaited: tuple[int, int]) -> Callable[[Batch], bool]:
    """True for a batch (task, number), the first time."""
    seen: list[Batch] = []

    def is_first(current: Batch) -> bool:
        if (current.task, current.number) != awaited or seen:
            return False
        seen.append(current)
        return True

    return is_first


def every_batch(task_count: int, epochs: int = 1) -> list[tuple[int, int, int]]:
    return [(e, t, b) for e in range(epochs) for t in range(task_count) for b in range(BATCHES)]


def test_the_loop_yields_every_batch_of_every_epoch_once(make: Make) -> None:
    master, listener = Master(3, epochs=2), Listener()
    assert len(list(make(master, listener))) == 3 * 2 * BATCHES
    assert listener.done == every_batch(3, 2)
    assert master.queue.is_done


@pytest.mark.timeout(10)
def test_the_loop_ends_as_soon_as_all_tasks_are_done(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop ends without waiting for its next poll, and the reader's thread does not spin until then."""
    monkeypatch.setattr(dataset, "_SLICE_S", 1000.0)
    for module in (read_ahead, read_queue):
        monkeypatch.setattr(module, "SLICE_S", 1000.0)
    assert len(list(make(Master(1), Listener()))) == BATCHES


def test_a_task_denied_half_way_is_repeated_from_its_first_batch(make: Make) -> None:
    """A late answer says "you hold no work". The reading ends, and the next one begins with the first batch."""
    master, listener = Master(2), Listener()
    listener.refuse = once((0, 2))
    denied = threading.Event()

    def read(task: AssignedTask) -> Iterator[pa.RecordBatch]:
        for number, batch in enumerate(empty_batches(task)):
            if task.assignment.task == 0 and number == 3 and not denied.is_set():
                # The rest of the first reading arrives after the task has been assigned again.
                denied.set()
                with master.changed:
                    master.changed.wait_for(lambda: len(master.assigned) > 2, 5.0)
            yield batch

    list(make(master, listener, read))
    assert sorted(set(listener.done)) == every_batch(2)
    assert master.queue.is_done


def test_work_of_the_next_epoch_survives_a_copy_that_another_trainer_finished(make: Make) -> None:
    """The epoch ends while this trainer waits to join for its copy, and the feed has work of the next epoch."""
    master, listener = Master(2, epochs=2, batch_count=2), Listener()
    # Another trainer works on the last task of the epoch for longer than the first task took.
    for now in (0.0, 1.0):
        answer = master.queue.request("b", now)
        assert isinstance(answer, TaskGiven)
        slow = answer.assignment
        if now == 0.0:
            master.queue.finish("b", slow.epoch, slow.position, slow.attempt, 1.0)
    master.now = 9.0
    refused: list[Batch] = []

    def refuse(current: Batch) -> bool:
        if refused:
            return False
        refused.append(current)
        with master.changed:
            master.queue.finish("b", slow.epoch, slow.position, slow.attempt, master.now)
        # The trainer processes the answer to its join only after it has begun to read work of the next epoch.
        assert begun.wait(5.0)
        return True

    def read(task: AssignedTask) -> Iterator[pa.RecordBatch]:
        for number, batch in enumerate(empty_batches(task)):
            if task.assignment.epoch == 1 and number == 1:
                # This reading begins before the answer is processed, and ends afterwards.
                begun.set()
                with master.changed:
                    master.changed.wait_for(lambda: master.assigned.count(task.assignment.attempt) > 1, 0.5)
            yield batch

    begun = threading.Event()
    listener.refuse = refuse
    list(make(master, listener, read))
    assert refused[0].epoch == 0
    assert listener.done == [(1, task, number) for task in range(2) for number in range(2)]
    assert master.queue.is_done


def test_a_task_with_a_skipped_batch_is_not_reported_as_finished(make: Make) -> None:
    master, listener = Master(2), Listener()

    def read(task: AssignedTask) -> Iterator[pa.RecordBatch]:
        batches = list(empty_batches(task))
        short = task.assignment.attempt == 1
        yield from batches[: BATCHES - 1] if short else batches

    list(make(master, listener, read))
    assert sorted(set(listener.done)) == every_batch(2)
    assert len(listener.done) == 3 * BATCHES - 1, "the first task was repeated completely"


def test_the_loop_yields_a_batch_again_that_must_be_repeated(make: Make) -> None:
    master, listener = Master(1), Listener()
    listener.repeat = once((0, 2))
    assert len(list(make(master, listener))) == BATCHES + 1
    assert listener.done == every_batch(1)


def test_all_tasks_are_read_again_after_a_new_registration(make: Make) -> None:
    master, listener = Master(2), Listener()
    dataset = make(master, listener)
    for count, _ in enumerate(dataset):
        if count == 3:
            with master.changed:
                master.queue.trainer_departed("a", 0.0)
                master.generation = 2
            dataset.registered_again()
    assert sorted(set(listener.done)) == every_batch(2)
    assert master.queue.is_done


def test_an_unreadable_batch_fails_only_its_task(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    master, listener = Master(2), Listener()
    failed: list[int] = []

    def read(task: AssignedTask) -> Iterator[pa.RecordBatch]:
        if task.assignment.task == 0 and not failed:
            failed.append(1)
            raise DataError("the file is torn")
        yield from empty_batches(task)

    list(make(master, listener, read))
    assert sorted(set(listener.done)) == every_batch(2)
    assert "the file is torn" in capsys.readouterr().err


@pytest.mark.parametrize("error", [ZeroDivisionError("a bug in decode"), UsageError("decode= applies to RecordIO")])
def test_an_error_of_the_reader_or_of_the_declaration_ends_the_loop(error: Exception, make: Make) -> None:
    def read(_task: AssignedTask) -> Iterator[pa.RecordBatch]:
        raise error
        yield

    with pytest.raises(type(error), match=str(error)):
        list(make(Master(1), Listener(), read))


def test_a_loop_that_was_left_half_way_can_be_restarted_with_the_remaining_batches(make: Make) -> None:
    """Ctrl-C in a notebook has this effect: the traceback keeps the loop of the cell alive."""
    master, listener = Master(3), Listener()
    data = make(master, listener)
    first = iter(data)
    for _ in range(BATCHES + 3):
        next(first)
    second = iter(data)
    next(second)
    assert (listener.abandoned, listener.finished) == (1, 0)
    for _ in second:
        pass
    assert (listener.abandoned, listener.finished) == (1, 1)
    assert sorted(set(listener.done)) == every_batch(3)
    assert master.queue.is_done
    with pytest.raises(StopIteration):
        next(first)


def test_a_loop_interrupted_during_a_wait_can_be_restarted(make: Make) -> None:
    master, listener = Master(2), Listener()

    def interrupt(current: Batch) -> bool:
        if interrupted := once((0, 2))(current):
            listener.refuse = lambda _: False
            raise KeyboardInterrupt
        return interrupted

    listener.refuse = interrupt
    data = make(master, listener)
    with pytest.raises(KeyboardInterrupt):
        list(data)
    list(data)
    assert sorted(set(listener.done)) == every_batch(2)
    assert master.queue.is_done


def test_a_loop_over_finished_data_reports_that(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    master, listener = Master(1), Listener()
    data = make(master, listener)
    list(data)
    assert capsys.readouterr().err == ""
    with pytest.raises(UsageError, match=r"this loop has already received all batches of all epochs \(1\)"):
        iter(data)
    assert list(make(master, listener)) == []
    assert "the job is done, with all its epochs (1): there are no batches left" in capsys.readouterr().err


def numbers(task: AssignedTask) -> Iterator[pa.RecordBatch]:
    for number in range(task.assignment.first_batch, task.assignment.end_batch):
        yield pa.RecordBatch.from_pydict({"n": [10 * task.assignment.task + number]})


@pytest.mark.parametrize("readers", [0, 2])
def test_the_loop_yields_transformed_batches_also_after_a_restart(readers: int, make: Make) -> None:
    master, listener = Master(3), Listener()
    data = make(master, listener, numbers, Transforming(of_tests.doubled, readers))
    first = iter(data)
    found = [next(first)["n"][0].as_py() for _ in range(BATCHES + 3)]
    found += [batch["n"][0].as_py() for batch in data]
    assert set(found) == {20 * task + 2 * number for task in range(3) for number in range(BATCHES)}
    assert sorted(set(listener.done)) == every_batch(3)
    assert master.queue.is_done


@pytest.mark.parametrize("readers", [0, 2])
def test_an_error_of_the_transform_is_raised_in_the_script_with_its_line(
    readers: int, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Dataset, "_place", staticmethod(lambda task, number: f"batch {number}"))
    master, listener = Master(2, batch_count=10), Listener()
    found = []
    with pytest.raises(UserCodeError if readers else ValueError, match="no sevens, please") as caught:
        found += make(master, listener, numbers, Transforming(of_tests.broken_at_seven, readers))
    text = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
    assert "transform=broken_at_seven failed at batch 7: ValueError: no sevens, please (" in text
    assert "transforms_of_tests.py:24" in text
    (report,) = {each.attempt: each for each in master.failed}.values()
    assert (report.fault, report.batch, len(listener.done)) == ("code", 7, 7)
    assert report.place.startswith(f"{type(caught.value).__name__} at ")
    assert exit_code_of(UserCodeError("")) == EXIT_FAILED, "a bad record may be the cause"


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (StoreError("expired"), "store"),
        (MemoryError(), "machine"),
        (UnsupportedError("no lz4"), "machine"),
        (CorruptChunkError("cut"), "decoder"),
        (DataError("odd"), ""),
    ],
)
def test_a_failed_read_is_reported_with_what_is_at_fault(error: Exception, fault: str, make: Make) -> None:
    def broken(task: AssignedTask) -> Iterator[pa.RecordBatch]:
        yield from empty_batches(task)
        if not master.failed:
            raise error

    master = Master(2)
    with contextlib.suppress(MemoryError):
        list(make(master, Listener(), broken))
    assert [each.fault for each in master.failed[:1]] == [fault]


def test_a_transform_that_readers_cannot_import_ends_the_loop(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_tests.doubled, "__qualname__", "no_such_function")
    with pytest.raises(UsageError, match="a reader cannot use transform=no_such_function: AttributeError"):
        list(make(Master(1), Listener(), numbers, Transforming(of_tests.doubled, 1)))


def test_a_loop_that_is_left_returns_its_tasks_and_stops_reading_although_the_session_goes_on(make: Make) -> None:
    master, read = Master(20), list[int]()

    def reading(task: AssignedTask) -> Iterator[pa.RecordBatch]:
        for batch in empty_batches(task):
            read.append(task.number)
            yield batch

    data = make(master, Listener(), reading)
    loop = iter(data)
    next(loop)
    loop.close()  # type: ignore[attr-defined]
    assert data._reading.stopping.is_set(), "the reader goes on for nobody"
    with master.changed:
        assert master.changed.wait_for(lambda: not master.queue.holders(), 20.0), "other trainers wait for its tasks"
    data._reading.join(20.0)
    count = len(read)
    assert count < 20 * BATCHES
    threading.Event().wait(0.05)
    assert len(read) == count


def test_records_of_batches_that_are_done_are_released(make: Make) -> None:
    master = Master(5)
    data = make(master, Listener())
    for _ in data:
        assert len(data._records) <= BATCHES + 1
    assert len(data._records) <= 1


def test_an_error_that_ends_the_feed_ends_the_loop(make: Make) -> None:
    master = Master(3)
    fetch, fetched = master.fetch, list[Ask]()

    def refuse(ask: Ask) -> TasksReply:
        if fetched:
            raise UsageError("the master refuses this trainer")
        fetched.append(ask)
        return fetch(ask)

    master.fetch = refuse  # type: ignore[method-assign]
    data = make(master, Listener())
    with pytest.raises(UsageError, match="refuses this trainer"):
        for _ in data:
            pass
    assert not data.is_over, "a loop that has failed counts as complete"


def test_an_error_that_ends_a_loop_is_raised_by_the_next_one(make: Make) -> None:
    errors = [ZeroDivisionError("a bug in decode")]

    def read(task: AssignedTask) -> Iterator[pa.RecordBatch]:
        if errors:
            raise errors.pop()
        return empty_batches(task)

    data = make(Master(1), Listener(), read)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError, match="a bug in decode"):
            list(data)
    assert isinstance(data.error, ZeroDivisionError)


def test_a_loop_can_be_restarted_after_a_transient_error(make: Make) -> None:
    listener = Listener()
    close_batch, errors = listener.close_batch, [UnavailableError("no pserver for 5 minutes")]

    def fail_once() -> list[BatchState]:
        if errors:
            raise errors.pop()
        return close_batch()

    listener.close_batch = fail_once  # type: ignore[method-assign]
    data = make(Master(2), listener)
    with pytest.raises(UnavailableError):
        list(data)
    assert data.error is not None, "the session's end raises it"
    list(data)
    assert data.error is None
    assert sorted(set(listener.done)) == every_batch(2)


@pytest.mark.parametrize("may_lose", [False, True])
def test_a_loop_that_lost_batches_ends_with_an_error_after_its_last_batch(
    make: Make, capsys: pytest.CaptureFixture[str], may_lose: bool
) -> None:
    listener = Listener()
    listener.lost = LostData(8, 2, ("a.parquet, records 0-7: torn",))
    data = make(Master(2), listener)
    data._may_lose = may_lose
    sentence = "2 batches with 8 records were set aside and not trained on: a.parquet, records 0-7: torn"
    with nullcontext() if may_lose else pytest.raises(LostDataError, match=sentence):
        list(data)
    assert sorted(set(listener.done)) == every_batch(2)
    assert listener.finished == 1, "the final values were not pulled"
    assert data.summary is not None
    assert (data.summary.batches, data.summary.records, data.summary.mixed_chunks) == (2, 8, 7)
    assert (sentence in capsys.readouterr().err) == may_lose
    with pytest.raises(UsageError if may_lose else LostDataError):
        iter(data)
