"""Reading a task before its assignment yields the same batches as reading it afterwards."""

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
    """Reader of five batches per task that records its reads. The last batch of task 9 is broken."""

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


def test_the_first_batches_are_read_early_and_the_rest_after_the_assignment() -> None:
    reader = Reader()
    early = EarlyReads(reader, 2)
    early.begin(assignment(4))
    assert reader.read == [(4, 0), (4, 1)]
    assert values(early.batches(AssignedTask(assignment(4, attempt=8), 1))) == [40, 41, 42, 43, 44]
    assert reader.read == [(4, number) for number in range(5)]


def test_another_task_or_part_or_seed_is_read_separately() -> None:
    reader = Reader()
    early = EarlyReads(reader, 5)
    early.begin(assignment(4))
    reader.read.clear()
    for other in (assignment(5), replace(assignment(4), first_batch=1), replace(assignment(4), seed=4)):
        assert len(values(early.batches(AssignedTask(other)))) == 5
    assert len(reader.read) == 15
    assert values(early.batches(AssignedTask(assignment(4, attempt=3)))) == [40, 41, 42, 43, 44]
    assert len(reader.read) == 15


def test_an_early_read_is_used_only_once() -> None:
    reader = Reader()
    early = EarlyReads(reader, 1)
    early.begin(assignment(4))
    for attempt in (1, 2):
        assert values(early.batches(AssignedTask(assignment(4, attempt=attempt)))) == [40, 41, 42, 43, 44]
    assert len(reader.read) == 10


def test_an_unreadable_task_raises_once_it_is_assigned() -> None:
    early = EarlyReads(Reader(), 4)
    early.begin(assignment(9))
    with pytest.raises(pa.ArrowInvalid):
        values(early.batches(AssignedTask(assignment(9, attempt=1))))


@pytest.mark.parametrize("by_being_given", [True, False])
def test_early_reads_of_a_past_epoch_are_dropped(by_being_given: bool) -> None:
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
