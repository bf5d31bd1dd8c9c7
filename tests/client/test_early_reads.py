"""What is read before it is given is the same as what is read then."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pytest
from msgspec.structs import replace

from flightedl.client.data.reading import EarlyReads
from flightedl.domain.trainer.feed import AssignedTask
from flightedl.messages.tasks import Assignment


def assignment(task: int, epoch: int = 1, attempt: int = 0) -> Assignment:
    return Assignment(
        epoch=epoch, position=task, task=task, attempt=attempt, first_batch=0, end_batch=5, batch_count=5, seed=3
    )


class Reader:
    """Reads five batches of a task, the last one of task 9 is broken; notes what is read."""

    def __init__(self) -> None:
        self.read: list[tuple[int, int]] = []

    def __call__(self, task: AssignedTask) -> Iterator[pa.RecordBatch]:
        for number in range(5):
            self.read.append((task.assignment.task, number))
            if (task.assignment.task, number) == (9, 1):
                raise pa.ArrowInvalid("broken")
            yield pa.record_batch({"k": [10 * task.assignment.task + number]})


def values(batches: Iterator[pa.RecordBatch]) -> list[int]:
    return [batch["k"][0].as_py() for batch in batches]


def test_the_first_batches_are_read_once_and_the_rest_when_it_is_given() -> None:
    reader = Reader()
    early = EarlyReads(reader, 2)
    early.begin(assignment(4))
    assert reader.read == [(4, 0), (4, 1)]
    assert values(early.batches(AssignedTask(assignment(4, attempt=8), 1))) == [40, 41, 42, 43, 44]
    assert reader.read == [(4, number) for number in range(5)]


def test_another_task_or_another_part_or_seed_is_read_for_itself() -> None:
    reader = Reader()
    early = EarlyReads(reader, 5)
    early.begin(assignment(4))
    reader.read.clear()
    for other in (assignment(5), replace(assignment(4), first_batch=1), replace(assignment(4), seed=4)):
        assert len(values(early.batches(AssignedTask(other)))) == 5
    assert len(reader.read) == 15
    assert values(early.batches(AssignedTask(assignment(4, attempt=3)))) == [40, 41, 42, 43, 44]
    assert len(reader.read) == 15


def test_it_serves_one_reading_only() -> None:
    reader = Reader()
    early = EarlyReads(reader, 1)
    early.begin(assignment(4))
    for attempt in (1, 2):
        assert values(early.batches(AssignedTask(assignment(4, attempt=attempt)))) == [40, 41, 42, 43, 44]
    assert len(reader.read) == 10


def test_what_cannot_be_read_is_found_when_it_is_given() -> None:
    early = EarlyReads(Reader(), 4)
    early.begin(assignment(9))
    with pytest.raises(pa.ArrowInvalid):
        values(early.batches(AssignedTask(assignment(9, attempt=1))))


@pytest.mark.parametrize("by_being_given", [True, False])
def test_what_was_read_of_an_epoch_that_is_over_is_let_go(by_being_given: bool) -> None:
    reader = Reader()
    early = EarlyReads(reader, 1)
    early.begin(assignment(4))
    if by_being_given:
        early.batches(AssignedTask(assignment(5, epoch=2)))
    else:
        early.begin(assignment(5, epoch=2))
    reader.read.clear()
    assert len(values(early.batches(AssignedTask(assignment(4))))) == 5
    assert len(reader.read) == 5
