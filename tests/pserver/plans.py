"""The check of a message's shard plan, as in ``PserverLife.require_blocks``, for shards without a pserver process."""

from __future__ import annotations

from flightedl.domain.model.sharding import name_same_cut
from flightedl.errors import FencedError
from flightedl.pserver.shard import Shard


def require_plan(shard: Shard, plan_hash: str) -> None:
    if shard.plan_hash != plan_hash and not name_same_cut(plan_hash, shard.plan_hash):
        raise FencedError("the sender has a different shard plan")
