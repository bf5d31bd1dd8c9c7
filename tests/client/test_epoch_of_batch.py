"""A dataset's loop knows the epoch of its current batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pyarrow as pa
import pytest

from flightedl.adapters.clock import SystemClock
from flightedl.client.data.dataset import Dataset
from flightedl.client.data.feed import TaskFeed
from flightedl.client.data.losses import LostData
from flightedl.client.waiting import Waiting
from flightedl.domain.trainer.batches import Batch, BatchState
from flightedl.domain.trainer.feed import Ask, AssignedTask
from flightedl.errors import UsageError
from flightedl.messages.declarations import DatasetDeclaration, DeclaredDataset
from flightedl.messages.tasks import Assignment, TasksReply

RECORDS = pa.record_batch({"k": [1]})


class Listener:
    def open_batch(self, batch: Batch, place: Callable[[], str]) -> bool:
        return True

    def close_batch(self) -> tuple[BatchState, ...]:
        return ()

    def push_sum(self) -> tuple[BatchState, ...]:
        return ()

    def give_up_sum(self) -> tuple[BatchState, ...]:
        return ()

    lost = LostData()

    def loop_over(self) -> None: ...


def test_each_batch_has_its_epoch_and_there_is_none_outside_the_loop() -> None:
    todo = [
        Assignment(epoch=epoch, position=0, task=0, attempt=epoch, first_batch=0, end_batch=2, batch_count=2, seed=None)
        for epoch in range(3)
    ]

    def fetch(ask: Ask) -> TasksReply:
        given, todo[:] = todo[: ask.want], todo[ask.want :]
        outcome = "given" if given else "none_now" if todo or ask.holding else "epochs_done"
        return TasksReply(assignments=given, outcome=outcome, retry_after_s=0.01)

    def read(_: AssignedTask) -> Iterator[pa.RecordBatch]:
        yield RECORDS
        yield RECORDS

    clock = SystemClock()
    declared = DeclaredDataset(
        index_hash="", task_count=1, record_count=2, schema="", declaration=DatasetDeclaration(urls=["x"], batch_size=1)
    )
    data = Dataset(
        declared,
        lambda: TaskFeed(fetch, lambda: None, clock),
        read,
        Listener(),
        lambda: Waiting(clock, 5.0, 5.0, lambda _: None),
        5.0,
        lambda: None,
    )
    with pytest.raises(UsageError, match="no batch is current"):
        _ = data.epoch
    seen = []
    for _ in data:
        seen.append(data.epoch)
        if len(seen) == 4:
            break
    data.close()
    assert seen == [0, 0, 1, 1]
