"""Placements that change while trainers step: an operation keeps its owners, and the next one uses the new ones."""

from __future__ import annotations

import numpy as np
import pytest

from flightedl.domain.consistency.modes import Async, Mode, Sync
from flightedl.domain.model.sharding import plan_shards
from flightedl.errors import StalePlacementError, UsageError
from tests.client.pserver_bench import Cluster

SHAPES = {"a": (5, 3), "b": (7,), "c": (40, 300), "d": (3,)}
BLOCKS = 4


def gradients(value: float) -> dict[str, np.ndarray]:
    return {name: np.full(shape, value, np.float32) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("mode", [Async(), Sync()], ids=["async", "sync"])
def test_steps_go_on_with_the_owners_of_the_new_placement(mode: Mode) -> None:
    with Cluster(SHAPES, mode, pservers=2, is_placed=True) as cluster:
        trainer = cluster.trainer()
        assert cluster.plan.block_count == BLOCKS
        moved = 0
        for batch in range(12):
            block = batch % BLOCKS
            if cluster.move(block, 1 - int(cluster.plan.block_pservers[block])):
                moved += 1
                trainer.parameters.swap(cluster.plan)
            trainer.begin(batch)
            trainer.step(batch, gradients(1.0))
            assert {float(value) for array in trainer.parameters.values() for value in array.flat} == {-1.0 - batch}
        assert moved == 12
        assert set(trainer.parameters.versions.values()) == {12}


def test_all_blocks_may_leave_a_pserver_and_a_new_one_may_come() -> None:
    with Cluster(SHAPES, Async(), pservers=2, is_placed=True) as cluster:
        trainer = cluster.trainer()
        for batch in range(4):
            for block in range(BLOCKS):
                if cluster.plan.block_pservers[block] != batch % 2:
                    assert cluster.move(block, batch % 2)
            trainer.parameters.swap(cluster.plan)
            trainer.begin(batch)
            trainer.step(batch, gradients(1.0))
            trainer.parameters.pull()
        assert {float(value) for array in trainer.parameters.values() for value in array.flat} == {-4.0}
        assert [len(shard.numbers) for shard in cluster.shards] == [0, BLOCKS]


def test_an_open_batch_that_was_pushed_in_part_goes_on_with_the_new_owners() -> None:
    with Cluster(SHAPES, Async(), pservers=2, is_placed=True) as cluster:
        trainer = cluster.trainer()
        trainer.begin(0)
        trainer.parameters.push({"a": gradients(1.0)["a"]})
        for block in range(BLOCKS):
            assert cluster.move(block, 1 - int(cluster.plan.block_pservers[block]))
        trainer.parameters.swap(cluster.plan)
        trainer.parameters.push({name: array for name, array in gradients(1.0).items() if name != "a"})
        trainer.parameters.close_batch()
        trainer.parameters.refresh()
        assert {float(value) for array in trainer.parameters.values() for value in array.flat} == {-1.0}


def test_streams_are_used_on_where_the_pserver_stays() -> None:
    with Cluster(SHAPES, Async(), pservers=2, is_placed=True) as cluster:
        trainer = cluster.trainer()
        before = [shard.channel for shard in trainer.parameters._layout.shards]
        assert cluster.move(0, 1 - int(cluster.plan.block_pservers[0]))
        trainer.parameters.swap(cluster.plan)
        trainer.begin(0)
        trainer.step(0, gradients(1.0))
        assert trainer.parameters.plan is cluster.plan
        assert [shard.channel for shard in trainer.parameters._layout.shards] == before


def test_a_placement_of_other_blocks_is_refused() -> None:
    with Cluster(SHAPES, Async(), pservers=2, is_placed=True) as cluster:
        trainer = cluster.trainer()
        with pytest.raises(UsageError, match="other blocks"):
            trainer.parameters.swap(plan_shards(cluster.specs[:2], 2))
        assert trainer.parameters.plan is cluster.plan


def test_a_pserver_without_the_block_says_that_the_placement_is_stale() -> None:
    with Cluster(SHAPES, Async(), pservers=2, is_placed=True) as cluster:
        trainer = cluster.trainer()
        assert cluster.move(0, 1 - int(cluster.plan.block_pservers[0]))
        trainer.begin(0)
        with pytest.raises(StalePlacementError, match="read the job's placement again"):
            trainer.step(0, gradients(1.0))
