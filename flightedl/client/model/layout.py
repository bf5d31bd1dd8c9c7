"""A trainer's view of the model's placement: which pserver owns each block, and everything derived from it."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from flightedl.client.model.shard_client import ShardClient
from flightedl.client.model.step_plan import StepPlans
from flightedl.domain.model.sharding import ShardPlan, runs_of


class Owners(NamedTuple):
    """The blocks and buckets of each pserver."""

    #: Adjacent blocks that share a message; see ``runs_of``.
    runs: Sequence[Sequence[range]]
    buckets: Sequence[range]

    @classmethod
    def of(cls, plan: ShardPlan) -> Owners:
        pservers = range(plan.pserver_count)
        return cls([runs_of(plan, index) for index in pservers], list(map(plan.buckets_of, pservers)))

    @property
    def blocks(self) -> list[list[int]]:
        """The blocks of each pserver in the form used by ``Steps``: the first bucket represents all buckets."""
        return [
            [*(number for run in runs for number in run), *buckets[:1]]
            for runs, buckets in zip(self.runs, self.buckets, strict=True)
        ]


class ModelLayout(NamedTuple):
    """One placement of the model's blocks. An operation uses one layout from beginning to end.

    Layouts are immutable. When the placement changes, a single assignment replaces the layout.
    """

    plan: ShardPlan
    owners: Owners
    #: The client of each pserver, by the pserver's index.
    shards: Sequence[ShardClient]
    #: Plans for pushes to the owners in this placement.
    plans: StepPlans
    #: Has one thread per pserver.
    pool: ThreadPoolExecutor

    def close(self, after: ModelLayout | None = None) -> None:
        """Close the streams and threads that the next layout (``after``) does not use."""
        kept = [] if after is None else [shard.channel for shard in after.shards]
        for shard in self.shards:
            if shard.channel not in kept:
                shard.close()
        if after is None or after.pool is not self.pool:
            self.pool.shutdown(wait=True, cancel_futures=True)
