"""A trainer's loop over its data, with in-process pservers and an in-memory master."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Self

import numpy as np
import pyarrow as pa

from flightedl.client.data.dataset import Dataset
from flightedl.client.data.feed import TaskFeed
from flightedl.client.data.losses import LostData
from flightedl.domain.trainer.batches import Batch, BatchState, CurrentBatch
from flightedl.domain.trainer.feed import Ask, AssignedTask
from flightedl.domain.trainer.membership import Begun, TrainerMembership
from flightedl.messages.declarations import DatasetDeclaration, DeclaredDataset
from flightedl.messages.tasks import Assignment, FailedTask, FinishedTask, ReturnedTask, TasksReply

from .pserver_bench import CLOCK, Cluster, waiting

_DECLARED = DeclaredDataset(
    index_hash="", task_count=1, record_count=1, schema="", declaration=DatasetDeclaration(urls=["data"], batch_size=1)
)


class Master:
    """Master that assigns a number of equal tasks and records the reports about them."""

    def __init__(self, tasks: int, batches: int) -> None:
        self.todo = [_assignment(number, batches) for number in range(tasks)]
        self.finished: list[FinishedTask] = []
        self.failed: list[FailedTask] = []
        self.returned: list[ReturnedTask] = []
        self._lock = threading.Lock()

    def fetch(self, ask: Ask) -> TasksReply:
        reports = ask.reports
        with self._lock:
            self.finished += reports.finished
            self.failed += reports.failed
            self.returned += reports.returned
            given, self.todo = self.todo[: ask.want], self.todo[ask.want :]
            outcome = "given" if given else "none_now" if self.todo or ask.holding else "epochs_done"
            return TasksReply(assignments=given, outcome=outcome, retry_after_s=0.01)


def _assignment(number: int, batches: int) -> Assignment:
    return Assignment(
        epoch=0,
        position=number,
        task=number,
        attempt=100 + number,
        first_batch=0,
        end_batch=batches,
        batch_count=batches,
        seed=None,
    )


class Loop:
    """One trainer's data and parameters.

    Args:
        cluster: The pservers.
        batches: Number of batches of each task.
        tasks: Number of tasks.
        records: Function from a batch's number to its number of records.
        more: Further arguments of the parameters.
    """

    def __init__(
        self,
        cluster: Cluster,
        batches: int,
        tasks: int = 1,
        records: Callable[[int], int] = lambda _: 1,
        **more: object,
    ) -> None:
        self.cluster, self.master = cluster, Master(tasks, batches)
        self.trainer, self.generation = "t1", 1
        self.membership = TrainerMembership()
        self.membership.member = 1
        self._batches, self._records = batches, records
        self._serial = 1
        self.parameters = cluster.parameters(self, **more)
        self.parameters.refresh()
        self.data = Dataset(
            _DECLARED,
            lambda: TaskFeed(self.master.fetch, lambda: None, CLOCK),
            self._read,
            self,
            waiting,
            5.0,
            lambda: None,
        )

    def _read(self, task: AssignedTask) -> Iterator[pa.RecordBatch]:
        for number in range(task.assignment.first_batch, task.assignment.end_batch):
            yield pa.record_batch({"number": [number] * self._records(number)})

    def __iter__(self) -> Iterator[int]:
        """Yield the numbers of batches in the order of the loop."""
        for batch in self.data:
            yield batch["number"][0].as_py()

    def end_membership(self) -> None:
        """Remove this member from the pservers' view."""
        self._serial += 1
        self.cluster.view(serial=self._serial)

    def take_away(self) -> None:
        """Revoke everything that this trainer holds."""
        feed = self.data._feed
        assert feed is not None
        with feed._changed:
            feed._feed._lose({task.assignment.attempt for task in feed._feed.held}, CLOCK.now())

    # --- called by parameters ---

    def require_final(self, index: int, generation: int) -> None:
        """The job has not ended."""

    # --- called by the dataset ---

    @property
    def current(self) -> CurrentBatch | None:
        return self.parameters.steps.current

    def open_batch(self, batch: Batch, place: Callable[[], str]) -> bool:
        membership = self.membership
        if not membership.member:
            self._serial += 1
            membership.member = self.generation = self._serial
            first = max(shard._protocol.highest_open_round() for shard in self.cluster.shards)
            self.cluster.view(membership.member, serial=self._serial, trainer=self.trainer, first_round=first)
            self.parameters.refresh()
        self.parameters.open_batch(batch, Begun(membership.member, 0))
        return True

    def close_batch(self) -> Sequence[BatchState]:
        return self.parameters.close_batch()

    def push_sum(self) -> Sequence[BatchState]:
        return self.parameters.push_sum()

    def give_up_sum(self) -> Sequence[BatchState]:
        return self.parameters.give_up_sum()

    lost = LostData()

    def loop_over(self) -> None:
        self.parameters.pull()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.data.close()
        self.parameters.close()


def value_of(cluster: Cluster, name: str) -> float:
    """Return the common value of all elements of a parameter on the pservers."""
    number = next(number for number, spec in enumerate(cluster.specs) if spec.name == name)
    blocks = [block for shard in cluster.shards for block in shard.blocks() if block.place.parameter == number]
    (value,) = {float(value) for block in blocks for value in block.values}
    return value


def gradients(cluster: Cluster, value: float = -1.0) -> Mapping[str, np.ndarray]:
    """Return gradients of all parameters, with equal elements."""
    return {spec.name: np.full(spec.shape, value, np.float32) for spec in cluster.specs}
