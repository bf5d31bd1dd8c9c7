"""The thread that reads ahead: what it puts into the queue, and in which order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from flightedl.client.data.read_ahead import ReadAhead
from flightedl.client.data.readers import Transforming
from flightedl.domain.trainer.feed import AssignedTask
from flightedl.domain.trainer.readings import ReadBatch, ReadFailure, TaskEnd
from flightedl.errors import DataError
from flightedl.messages.tasks import Assignment
from tests.support.contracts.coordinator import eventually


class Feed:
    """A feed that has some tasks of four batches, and then is done."""

    def __init__(self, *numbers: int) -> None:
        self._numbers = list(numbers)

    @property
    def is_done(self) -> bool:
        return not self._numbers

    def next(self, _timeout_s: float) -> Any:
        number = self._numbers.pop(0)
        assignment = Assignment(
            epoch=0, position=0, task=number, attempt=number, first_batch=0, end_batch=4, batch_count=4, seed=None
        )
        return AssignedTask(assignment, number)

    def next_ahead(self) -> None:
        return None


def batches(task: Any) -> Iterator[pa.RecordBatch]:
    for number in range(4):
        yield pa.record_batch({"k": pa.array([10 * task.number + number])})


def read(
    feed: Any,
    transform: Callable[[pa.RecordBatch], pa.RecordBatch] | None = None,
    reading: Callable[[Any], Iterator[pa.RecordBatch]] = batches,
) -> list[tuple[str, int, object]]:
    """Return (kind, task, number of the batch) of all items."""
    made = ReadAhead(reading, Transforming(transform), lambda _, number: f"batch {number}", 1 << 30)
    made.start(feed)
    found: list[tuple[str, int, object]] = []
    while (item := made.queue.get(20.0)) is not None:
        event, records = item
        if isinstance(event, ReadBatch):
            assert records is not None
            found.append(("batch", event.task.number, records["k"][0].as_py()))
        elif isinstance(event, ReadFailure):
            found.append(("failure", event.task.number, event.number))
        else:
            assert isinstance(event, TaskEnd)
            found.append(("end", event.task.number, None))
    made.stopping.set()
    made.join(20.0)
    assert not made.queue.items
    return found


def test_each_task_ends_after_its_batches() -> None:
    expected = [(("batch", task, 10 * task + n)) for task in (1, 2) for n in range(4)]
    expected.insert(4, ("end", 1, None))  # type: ignore[arg-type]
    assert read(Feed(1, 2)) == [*expected, ("end", 2, None)]


def test_after_a_failed_transform_nothing_more_of_its_task_is_read() -> None:
    def odd(batch: pa.RecordBatch) -> pa.RecordBatch:
        if batch["k"][0].as_py() == 11:
            raise ValueError("odd")
        return batch

    found = read(Feed(1, 2), odd)
    assert found[:2] == [("batch", 1, 10), ("failure", 1, 1)]
    assert [task for _, task, _ in found[2:]] == [2] * 5, "a task that has failed is continued or reported as finished"


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_a_transform_that_raises_no_exception_fails_at_its_batch(error: type[BaseException]) -> None:
    """The reader thread would end silently, and the loop would wait for it."""

    def ending(batch: pa.RecordBatch) -> pa.RecordBatch:
        if batch["k"][0].as_py() == 11:
            raise error
        return batch

    found = read(Feed(1, 2), ending)
    assert found[:2] == [("batch", 1, 10), ("failure", 1, 1)]
    assert [task for _, task, _ in found[2:]] == [2] * 5


def test_a_task_that_cannot_be_read_fails_at_its_batch_and_the_next_one_is_read() -> None:
    def broken(task: Any) -> Iterator[pa.RecordBatch]:
        for place, batch in enumerate(batches(task)):
            if (task.number, place) == (1, 2):
                raise DataError("the file is damaged")
            yield batch

    found = read(Feed(1, 2), None, broken)
    assert found[:3] == [("batch", 1, 10), ("batch", 1, 11), ("failure", 1, 2)]
    assert [kind for kind, _, _ in found[3:]] == ["batch"] * 4 + ["end"]


def test_a_reader_that_is_stopped_reads_no_further_batch() -> None:
    taken: list[int] = []
    go_on = threading.Event()

    def slow(task: Any) -> Iterator[pa.RecordBatch]:
        for batch in batches(task):
            taken.append(task.number)
            yield batch
            assert go_on.wait(20.0)

    feed: Any = Feed(1, 2)
    made = ReadAhead(slow, Transforming(), lambda *_: "", 1 << 30)
    made.start(feed)
    eventually(lambda: taken)
    made.stopping.set()
    go_on.set()
    made.join(20.0)
    assert taken in ([1], [1, 1])


def test_an_error_of_the_feed_is_kept_for_the_loop() -> None:
    def refuse(_: float) -> Any:
        raise ValueError("a bug")

    feed: Any = SimpleNamespace(is_done=False, next=refuse)
    made = ReadAhead(batches, Transforming(), lambda *_: "", 1 << 30)
    made.start(feed)
    assert made.queue.get(20.0) is None
    with pytest.raises(ValueError, match="a bug"):
        raise made.error or AssertionError("the end of the data looks regular")
    made.join(20.0)
