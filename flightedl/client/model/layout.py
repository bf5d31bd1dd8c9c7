"""The owners of a model's blocks as a trainer knows them, and everything that depends on the owners."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from flightedl.client.model.shard_client import ShardClient
from flightedl.client.model.step_plan import StepPlans
from flightedl.domain.model.sharding import ShardPlan, runs_of


class Owners(NamedTuple):
    """The blocks and buckets of each pserver."""

    #: Blocks that share a message; see ``runs_of``.
    runs: Sequence[Sequence[range]]
    buckets: Sequence[range]

    @classmethod
    def of(cls, plan: ShardPlan) -> Owners:
        pservers = range(plan.pserver_count)
        return cls([runs_of(plan, index) for index in pservers], list(map(plan.buckets_of, pservers)))

    @property
    def blocks(self) -> list[list[int]]:
        """The blocks of each pserver as ``Steps`` knows them: the first bucket stands for all buckets."""
        return [
            [*(number for run in runs for number in run), *buckets[:1]]
            for runs, buckets in zip(self.runs, self.buckets, strict=True)
        ]


class ModelLayout(NamedTuple):
    """One placement of the model's blocks. An operation uses the same layout from beginning to end.

    A layout is immutable, and is replaced by a single assignment.
    """

    plan: ShardPlan
    owners: Owners
    #: Conversation with each pserver, by index.
    shards: Sequence[ShardClient]
    #: Plans for pushes to these owners.
    plans: StepPlans
    #: Has one thread per pserver.
    pool: ThreadPoolExecutor

    def close(self, after: ModelLayout | None = None) -> None:
        """Close the streams and threads, except those that the layout ``after`` uses."""
        kept = [] if after is None else [shard.channel for shard in after.shards]
        for shard in self.shards:
            if shard.channel not in kept:
                shard.close()
        if after is None or after.pool is not self.pool:
            self.pool.shutdown(wait=True, cancel_futures=True)
