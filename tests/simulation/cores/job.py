"""A simulated job: its tasks, its blocks, and the expected content of the blocks.

The job runs the ledger program: each block has an element for every batch of every epoch, and the batch's gradient is 1
for that element. So an update adds the batch's share to the element: 1 in a sum, the fraction of its records in a mean.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from random import Random

from msgspec.structs import replace

from flightedl.domain.consistency.modes import Async, Mode, Sync
from flightedl.domain.exactly_once.batches import Batch
from flightedl.domain.model.parameters import ParameterSpec
from flightedl.domain.model.sharding import ShardPlan, placed, placement_of, plan_for, runs_of
from flightedl.domain.pserver.block_values import Extent
from flightedl.domain.queue.tasks import TaskQueue
from flightedl.domain.queue.values import QueueSettings, TaskBatches
from flightedl.domain.tables.spec import TableSpec
from flightedl.messages.declarations import (
    ArrivalRecord,
    DatasetDeclaration,
    DeclaredDataset,
    DeclaredModel,
    JobDeclaration,
    ModelDeclaration,
    ParameterDeclaration,
    Placement,
)
from flightedl.messages.parameters import BatchIdentity

_SCALED_SHARE = 0.2

#: A model of four blocks, divided by the product's plan.
PARAMETERS = (ParameterSpec("w", (200,)), ParameterSpec("b", (10,)), ParameterSpec("u", (30_000,)))

#: Element -> amount that is pushed or added.
Gradient = Mapping[int, Fraction | int]
#: Numbers of records in successive batches. A batch whose records were all filtered out has no share in a mean.
_RECORDS = (3, 1, 4, 1, 5, 0, 2, 3)


@lru_cache(maxsize=64)
def plan_of(pserver_count: int, cut_for: int) -> ShardPlan:
    """Return the product's plan for the model."""
    return plan_for(PARAMETERS, pserver_count, cut_for)


@lru_cache(maxsize=256)
def plan_in(placement: Placement, cut_for: int) -> ShardPlan:
    """Return the plan with a stored placement."""
    return placed(plan_of(cut_for, cut_for), placement)


@dataclass(frozen=True, slots=True)
class JobShape:
    """Properties of a job that never change."""

    mode: Mode
    #: Number of batches in each task, including tasks that are added while the job runs.
    batch_counts: tuple[int, ...]
    epochs: int
    seed: int
    shuffle: bool
    #: Number of pservers for which the parameters were divided into blocks.
    cut_for: int
    recovery: str
    #: Number of tasks at the beginning. If ``batch_counts`` has more, the dataset grows.
    first_count: int
    #: Number of batches in each task of the data that is evaluated before and after training; may be empty.
    evaluation: tuple[int, ...] = ()
    #: (task, batch) that cannot be trained on in any epoch -> True if reading it kills the trainer.
    faulty: Mapping[tuple[int, int], bool] = field(default_factory=dict)
    #: Failures that make a piece split, and further failures of a single batch that make it quarantined.
    attempts_limit: int = 100_000
    confirmations: int = 2
    #: Minimum time before a running piece is taken back, once a task has been finished.
    timeout_floor_s: float = 4.0
    #: True if a batch may have a gradient for some blocks and none for others.
    is_patchy: bool = False
    #: The table; blocks that are pushed to and copied together represent its buckets. None without rows.
    table: TableSpec | None = None
    #: Lowest number of a block that represents buckets; None for the last run of each pserver's blocks.
    first_bucket: int | None = None

    @property
    def grows(self) -> bool:
        return self.first_count < len(self.batch_counts)

    @property
    def has_rows(self) -> bool:
        return self.table is not None

    def queue_settings(self, task_count: int) -> QueueSettings:
        """Return the queue's settings, with time limits in simulated seconds, for the tasks that exist now."""
        return QueueSettings(
            task_count=task_count,
            follow=self.grows,
            batch_counts=self.batch_counts.__getitem__,
            epochs=self.epochs,
            seed=self.seed,
            shuffle=self.shuffle,
            attempts_limit=self.attempts_limit,
            confirmations=self.confirmations,
            timeout_floor_s=self.timeout_floor_s,
            stuck_after_s=max(15.0, self.timeout_floor_s),
        )

    def evaluation_settings(self) -> QueueSettings:
        return QueueSettings(
            task_count=len(self.evaluation),
            batch_counts=self.evaluation.__getitem__,
            attempts_limit=100_000,
            timeout_floor_s=4.0,
            stuck_after_s=15.0,
        )

    def declared_evaluation(self) -> DeclaredDataset:
        """Return the evaluation's dataset as a master declares it, without files and records."""
        declaration = DatasetDeclaration(urls=[], batch_size=1)
        count = len(self.evaluation)
        return DeclaredDataset(index_hash="", task_count=count, record_count=0, schema="", declaration=declaration)

    def measured(self, task: int, batch: int) -> tuple[float, float]:
        """Return the contribution and the weight of a batch of the evaluation's data (see ``evaluating``)."""
        weight = 1.0 + self.records_of(Batch(0, task, batch))
        return weight * 16.0 ** (sum(self.evaluation[:task]) + batch), weight

    @property
    def element_count(self) -> int:
        return self.epochs * sum(self.batch_counts)

    @property
    def block_count(self) -> int:
        return plan_of(self.cut_for, self.cut_for).block_count

    def batches(self) -> Iterator[Batch]:
        for epoch in range(self.epochs):
            for task, count in enumerate(self.batch_counts):
                yield from (Batch(epoch, task, batch) for batch in range(count))

    def buckets(self, plan: ShardPlan, index: int) -> range:
        """Return those blocks of a pserver that represent its many buckets of rows; empty in a job without rows."""
        if not self.has_rows or index >= plan.pserver_count:
            return range(0)
        if self.first_bucket is None:
            return next(reversed(runs_of(plan, index)), range(0))
        own = [number for number in plan.blocks_of(index).tolist() if number >= self.first_bucket]
        return range(own[0], own[-1] + 1) if own else range(0)

    def extents(self, plan: ShardPlan, index: int) -> list[Extent]:
        """Return the extents of a pserver's first spans."""
        buckets = self.buckets(plan, index)
        runs = [part for run in runs_of(plan, index) for part in _without(run, buckets)]
        extents = [*(Extent(run) for run in runs), *([Extent(buckets, is_copied_at_once=True)] if buckets else [])]
        return sorted(extents, key=lambda extent: extent.numbers.start)

    def shards(self, plan: ShardPlan) -> list[list[int]]:
        """Return each pserver's blocks as a trainer's core sees them: the first bucket represents all buckets."""
        return [
            [number for number in plan.blocks_of(index).tolist() if number not in self.buckets(plan, index)[1:]]
            for index in range(plan.pserver_count)
        ]

    def has_gradient(self, batch: Batch, block: int) -> bool:
        """True if a batch has a gradient for a block. Some batches have none for some or all blocks."""
        return (batch.epoch + 2 * batch.task + 3 * batch.batch + (block if self.is_patchy else 0)) % 7 != 5

    @staticmethod
    def records_of(batch: Batch) -> int:
        """Return the number of records in a batch, which is its weight in a mean."""
        return _RECORDS[(batch.epoch + 3 * batch.task + 5 * batch.batch) % len(_RECORDS)]

    def shares(self, batches: Sequence[Batch], block: int, mode: Mode) -> Gradient:
        """Return the amounts that an update with these batches adds to a block."""
        is_combined = isinstance(mode, Sync) or (isinstance(mode, Async) and mode.push_every > 1)
        is_mean = is_combined and mode.reduce == "mean"  # type: ignore[attr-defined]
        parts = {
            self.element_of(batch): self.records_of(batch) if is_mean else 1
            for batch in batches
            if self.has_gradient(batch, block)
        }
        whole = sum(parts.values()) if is_mean else 1
        return {element: Fraction(part, whole) for element, part in parts.items() if part}

    def element_of(self, batch: Batch) -> int:
        """Return the element to which a batch adds."""
        return batch.epoch * sum(self.batch_counts) + sum(self.batch_counts[: batch.task]) + batch.batch


def _without(run: range, buckets: range) -> list[range]:
    parts = range(run.start, min(run.stop, buckets.start)), range(max(run.start, buckets.stop), run.stop)
    return [part for part in parts if part] if buckets else [run]


def batch_of(identity: BatchIdentity) -> Batch:
    """Return the batch that a message names."""
    return Batch(identity.epoch, identity.task, identity.batch)


def some_async(random: Random) -> Async:
    """Draw an asynchronous mode, with a number of batches per push and of steps between pulls."""
    return Async(
        push_every=random.choice((1, 2, 2, 3)),
        pull_every=random.choice((1, 1, 2, 3)),
        staleness_scaled=random.random() < _SCALED_SHARE,
        reduce=random.choice(("mean", "mean", "sum")),
    )


def declaration_of(mode: Mode, pserver_count: int, cut_for: int, version: int = 1) -> JobDeclaration:
    """Return the declaration that the job's trainers have made, with this version of the placement."""
    parameters = [ParameterDeclaration(name=each.name, shape=list(each.shape), dtype=each.dtype) for each in PARAMETERS]
    declared = ModelDeclaration(parameters=parameters, optimizer={}, mode=mode.to_json())
    placement = placement_of(plan_of(pserver_count, cut_for), version)
    plan_hash = plan_in(placement, cut_for).hash
    return JobDeclaration(
        model=DeclaredModel(
            declaration=declared, pservers=pserver_count, plan_hash=plan_hash, cut_for=cut_for, placement=placement
        )
    )


def with_tasks(declaration: JobDeclaration, task_count: int) -> JobDeclaration:
    """Return a declaration for a checkpoint, including the number of tasks, which a real job derives from its files."""
    return replace(declaration, arrivals=[ArrivalRecord(files=[("tasks", task_count, "")])])


def tasks_of(declaration: JobDeclaration) -> int:
    """Return the number of tasks that ``with_tasks`` stored in a declaration."""
    return declaration.arrivals[0].files[0][1]


def wrong(values: Sequence[int], block: int, shape: JobShape, queue: TaskQueue, *, is_stopped: bool) -> list[int]:
    """Return the elements of a block that lack a required batch or contain a forbidden one.

    Quarantined batches may be present or absent, because a trainer may push a batch and then be killed by another one.
    Batches that cannot be trained on must be absent. After a stop, unfinished batches may be absent too.
    """
    found = []
    for epoch in range(shape.epochs):
        has_begun = epoch < queue.begun_epochs
        size = queue.epoch_size(epoch) if epoch <= queue.epoch else queue.task_count
        for task, batch_count in enumerate(shape.batch_counts):
            batches = queue.batches(epoch, task) if has_begun and task < size else _NOTHING
            done, failed = _members(batches.done), _members(batches.failed)
            for batch in range(batch_count):
                which = Batch(epoch, task, batch)
                has_any, element = shape.has_gradient(which, block), shape.element_of(which)
                if (task, batch) in shape.faulty or task >= size:
                    is_wrong = bool(values[element]) or batch in done
                elif not has_any:
                    is_wrong = bool(values[element])
                elif batch in failed or (is_stopped and batch not in done) or not shape.records_of(which):
                    is_wrong = False
                else:
                    is_wrong = not values[element]
                if is_wrong:
                    found.append(element)
    return found


def torn(blocks: Collection[tuple[int, Sequence[int]]], shape: JobShape, queue: TaskQueue) -> list[Batch]:
    """Return the batches, except quarantined ones, that are in only some of the blocks (number, values)."""
    aside = set_aside(queue)
    found = []
    for batch in shape.batches():
        is_known = batch.epoch < queue.begun_epochs and batch.task < queue.epoch_size(batch.epoch)
        if not is_known or tuple(batch) in aside or not shape.records_of(batch):
            continue
        element = shape.element_of(batch)
        if len({bool(values[element]) for number, values in blocks if shape.has_gradient(batch, number)}) > 1:
            found.append(batch)
    return found


def set_aside(queue: TaskQueue) -> set[tuple[int, int, int]]:
    """Return (epoch, task, batch) for every quarantined batch."""
    tasks = [(epoch, task) for epoch in range(queue.begun_epochs) for task in range(queue.epoch_size(epoch))]
    return {(*task, batch) for task in tasks for batch in _members(queue.batches(*task).failed)}


_NOTHING = TaskBatches((), (), (), (), ())


def _members(stretches: tuple[tuple[int, int], ...]) -> set[int]:
    return {batch for first, end in stretches for batch in range(first, end)}
