"""What a simulated job is: its tasks, its blocks, and the account of what is in them.

The ledger program: batch k adds 1 to element k of every block. Kept finer than that: each block has an element for each
batch *of each epoch*, which must end as exactly 1, and must never be 2. Then every element of the real program, which
adds an epoch's batches to the same elements, ends as the number of epochs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from flightedl.domain.batches import Batch
from flightedl.domain.modes import Mode
from flightedl.domain.parameters import ParameterSpec
from flightedl.domain.sharding import ShardPlan, plan_for
from flightedl.domain.tasks_values import QueueSettings
from flightedl.messages.declarations import JobDeclaration, ModelDeclaration, ModelReply

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
    #: Batches of each task.
    batch_counts: tuple[int, ...]
    epochs: int
    seed: int
    shuffle: bool
    #: For how many pservers the parameters were cut.
    cut_for: int
    recovery: str

    @property
    def queue_settings(self) -> QueueSettings:
        """Time limits in simulated seconds; nothing is ever given up."""
        return QueueSettings(
            task_count=len(self.batch_counts),
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
        model=ModelReply(declaration=declared, pservers=pserver_count, plan_hash=plan_hash, cut_for=cut_for)
    )


def lacking(values: Sequence[int]) -> list[int]:
    """Elements that are not exactly 1."""
    return [element for element, value in enumerate(values) if value != 1]
