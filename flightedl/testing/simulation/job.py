"""What a simulated job is: its tasks, its blocks, and the account of what is in them.

The ledger program: batch k adds 1 to element k of every block. Kept finer than that: each block has an element for each
batch *of each epoch*, which must end as exactly 1, and must never be 2. Then every element of the real program, which
adds an epoch's batches to the same elements, ends as the number of epochs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from msgspec.structs import replace

from flightedl.domain.consistency.modes import Mode
from flightedl.domain.exactly_once.batches import Batch
from flightedl.domain.model.parameters import ParameterSpec
from flightedl.domain.model.sharding import ShardPlan, plan_for
from flightedl.domain.queue.tasks import TaskQueue
from flightedl.domain.queue.values import QueueSettings
from flightedl.messages.declarations import ArrivalRecord, DeclaredModel, JobDeclaration, ModelDeclaration

#: A model of four blocks, whose plan is the production one.
PARAMETERS = (ParameterSpec("w", (200,)), ParameterSpec("b", (10,)), ParameterSpec("u", (30_000,)))


@lru_cache(maxsize=64)
def plan_of(pserver_count: int, cut_for: int) -> ShardPlan:
    """The production plan."""
    return plan_for(PARAMETERS, pserver_count, cut_for)


@lru_cache(maxsize=64)
def blocks_of(pserver_count: int, cut_for: int, index: int) -> tuple[int, ...]:
    """Block numbers of a pserver."""
    return tuple(plan_of(pserver_count, cut_for).blocks_of(index).numbers.tolist())


@dataclass(frozen=True, slots=True)
class JobShape:
    """What stays the same for the life of a job."""

    mode: Mode
    #: Batches of each task, also of those that join while the job runs.
    batch_counts: tuple[int, ...]
    epochs: int
    seed: int
    shuffle: bool
    #: For how many pservers the parameters were cut.
    cut_for: int
    recovery: str
    #: Tasks that are there at the beginning; more: the dataset grows.
    first_count: int

    @property
    def grows(self) -> bool:
        """Whether tasks join while the job runs."""
        return self.first_count < len(self.batch_counts)

    def queue_settings(self, task_count: int) -> QueueSettings:
        """Time limits in simulated seconds; nothing is ever given up. ``task_count``: tasks that have joined."""
        return QueueSettings(
            task_count=task_count,
            follow=self.grows,
            batch_counts=self.batch_counts.__getitem__,
            epochs=self.epochs,
            seed=self.seed,
            shuffle=self.shuffle,
            attempts_limit=100_000,
            timeout_floor_s=4.0,
            timeout_ceiling_s=15.0,
        )

    @property
    def element_count(self) -> int:
        """Batches of all epochs."""
        return self.epochs * sum(self.batch_counts)

    @property
    def block_count(self) -> int:
        """Blocks on all pservers."""
        return plan_of(self.cut_for, self.cut_for).block_count

    def element_of(self, batch: Batch) -> int:
        """The element that a batch of an epoch adds to."""
        return batch.epoch * sum(self.batch_counts) + sum(self.batch_counts[: batch.task]) + batch.batch


def declaration_of(mode: Mode, pserver_count: int, cut_for: int) -> JobDeclaration:
    """What the trainers of a job have declared."""
    declared = ModelDeclaration(parameters=[], optimizer={}, mode=mode.to_json())
    plan_hash = plan_of(pserver_count, cut_for).hash
    return JobDeclaration(
        model=DeclaredModel(declaration=declared, pservers=pserver_count, plan_hash=plan_hash, cut_for=cut_for)
    )


def with_tasks(declaration: JobDeclaration, task_count: int) -> JobDeclaration:
    """As it is saved: with the tasks that have joined, which a real job finds by their files."""
    return replace(declaration, arrivals=[ArrivalRecord(files=[("tasks", task_count, "")])])


def tasks_of(declaration: JobDeclaration) -> int:
    """The tasks in what ``with_tasks`` made."""
    return declaration.arrivals[0].files[0][1]


def wrong(values: Sequence[int], shape: JobShape, queue: TaskQueue, *, is_stopped: bool) -> list[int]:
    """Elements that do not have their batch exactly once, of the tasks that this queue has had or is to have.

    Of a job that was stopped, batches that do not count as done may be there or not.
    """
    found = []
    for epoch in range(shape.epochs):
        size = queue.epoch_size(epoch) if epoch <= queue.epoch else queue.task_count
        for task, batch_count in enumerate(shape.batch_counts):
            first = shape.element_of(Batch(epoch, task, 0))
            if task >= size:
                expected: set[int] = set()
            elif is_stopped:
                stretches = queue.batches(epoch, task).done if epoch < queue.begun_epochs else ()
                expected = {first + batch for start, end in stretches for batch in range(start, end)}
            else:
                expected = set(range(first, first + batch_count))
            for element in range(first, first + batch_count):
                is_right = values[element] == 1 if element in expected else values[element] <= is_stopped
                if not is_right:
                    found.append(element)
    return found
