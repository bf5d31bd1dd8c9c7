"""The owners of a model's blocks, as a trainer knows them, and everything that follows from who owns which block."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from flightedl.client.model.shard_client import ShardClient
from flightedl.client.model.step_plan import StepPlans
from flightedl.domain.model.sharding import ShardPlan, runs_of


class Owners(NamedTuple):
    """The blocks and buckets of each pserver."""

    #: Blocks that travel in one message, see ``runs_of``.
    runs: Sequence[Sequence[range]]
    buckets: Sequence[range]

    @classmethod
    def of(cls, plan: ShardPlan) -> Owners:
        """Return the owners by a plan."""
        pservers = range(plan.pserver_count)
        return cls([runs_of(plan, index) for index in pservers], list(map(plan.buckets_of, pservers)))

    @property
    def blocks(self) -> list[list[int]]:
        """The blocks of each pserver as ``Steps`` knows them: its first bucket stands for all of them."""
        return [
            [*(number for run in runs for number in run), *buckets[:1]]
            for runs, buckets in zip(self.runs, self.buckets, strict=True)
        ]


class ModelLayout(NamedTuple):
    """One placement of the model's blocks. An operation uses one layout from its begin to its end.

    It is replaced as a whole, in one assignment, and nothing of it is changed.
    """

    plan: ShardPlan
    owners: Owners
    #: The conversations with the pservers, by index.
    shards: Sequence[ShardClient]
    #: The ways of the gradients to the owners.
    plans: StepPlans
    #: Has a thread for each pserver.
    pool: ThreadPoolExecutor

    def close(self, after: ModelLayout | None = None) -> None:
        """Let go of the streams, and of the threads, that the layout ``after`` does not use."""
        kept = [] if after is None else [shard.channel for shard in after.shards]
        for shard in self.shards:
            if shard.channel not in kept:
                shard.close()
        if after is None or after.pool is not self.pool:
            self.pool.shutdown(wait=True, cancel_futures=True)
