"""Placements that change while trainers step: an operation keeps its owners, and the next one uses the new owners."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from flightedl.client.tables.requests import DistinctIds
from flightedl.domain.consistency.modes import Async, Mode, Sync
from flightedl.domain.model.initial import Uniform
from flightedl.domain.model.optimizers import SGD
from flightedl.domain.model.sharding import plan_shards
from flightedl.domain.tables.placement import BUCKETS
from flightedl.domain.tables.spec import TableSpec
from flightedl.errors import StalePlacementError, UnavailableError, UsageError
from tests.client.pserver_bench import Cluster, Trainer

SHAPES = {"a": (5, 3), "b": (7,), "c": (40, 300), "d": (3,)}
BLOCKS = 4


def gradients(value: float) -> dict[str, np.ndarray]:
    return {name: np.full(shape, value, np.float32) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("mode", [Async(), Sync()], ids=["async", "sync"])
def test_steps_continue_with_the_owners_of_the_new_placement(mode: Mode) -> None:
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


def test_all_blocks_may_move_from_one_pserver_to_a_new_one() -> None:
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


def test_a_partly_pushed_batch_continues_with_the_new_owners() -> None:
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


def test_streams_to_remaining_pservers_are_reused() -> None:
    with Cluster(SHAPES, Async(), pservers=2, is_placed=True) as cluster:
        trainer = cluster.trainer()
        before = [shard.channel for shard in trainer.parameters._layout.shards]
        assert cluster.move(0, 1 - int(cluster.plan.block_pservers[0]))
        trainer.parameters.swap(cluster.plan)
        trainer.begin(0)
        trainer.step(0, gradients(1.0))
        assert trainer.parameters.plan is cluster.plan
        assert [shard.channel for shard in trainer.parameters._layout.shards] == before


def test_a_placement_of_other_blocks_is_rejected() -> None:
    with Cluster(SHAPES, Async(), pservers=2, is_placed=True) as cluster:
        trainer = cluster.trainer()
        with pytest.raises(UsageError, match="other blocks"):
            trainer.parameters.swap(plan_shards(cluster.specs[:2], 2))
        assert trainer.parameters.plan is cluster.plan


def test_a_pserver_without_the_block_reports_a_stale_placement() -> None:
    with Cluster(SHAPES, Async(), pservers=2, is_placed=True) as cluster:
        trainer = cluster.trainer(newest_plan=None)
        assert cluster.move(0, 1 - int(cluster.plan.block_pservers[0]))
        trainer.begin(0)
        with pytest.raises(StalePlacementError, match="read the job's placement again"):
            trainer.step(0, gradients(1.0))


@pytest.mark.parametrize(
    ("wire", "more"),
    [
        ("", {}),
        ("", {"clip_norm": 1e-9, "unclipped": [*SHAPES]}),
        ("bfloat16", {}),
        ("bfloat16", {"error_feedback": True}),
    ],
    ids=["plain", "clip", "short", "feedback"],
)
def test_a_step_looks_up_the_placement_and_follows_the_blocks(wire: str, more: dict[str, object]) -> None:
    with Cluster(SHAPES, Async(), pservers=2, is_placed=True, wire=wire) as cluster:
        trainer = cluster.trainer(**more)
        for batch in range(6):
            for block in range(batch % BLOCKS + 1):
                assert cluster.move(block, 1 - int(cluster.plan.block_pservers[block]))
            trainer.begin(batch)
            trainer.step(batch, gradients(1.0))
            assert not trainer.lost
            assert trainer.parameters.plan is cluster.plan
        assert {float(value) for array in trainer.parameters.values() for value in array.flat} == {-6.0}


def test_a_sum_is_pushed_to_the_current_owners() -> None:
    with Cluster(SHAPES, Async(push_every=2), pservers=2, is_placed=True) as cluster:
        trainer = cluster.trainer()
        for batch in range(8):
            trainer.begin(batch)
            if batch % 2:
                assert cluster.move(batch // 2, 1 - int(cluster.plan.block_pservers[batch // 2]))
            trainer.step(batch, gradients(1.0))
        trainer.parameters.refresh()
        found = {float(value) for array in trainer.parameters.values() for value in array.flat}
        assert found in ({-4.0}, {-8.0})


def test_a_pull_looks_up_the_placement() -> None:
    with Cluster(SHAPES, Async(), pservers=2, is_placed=True) as cluster:
        trainer = cluster.trainer()
        for block in range(BLOCKS):
            assert cluster.move(block, 1 - int(cluster.plan.block_pservers[block]))
        trainer.parameters.pull()
        assert trainer.parameters.plan is cluster.plan
        for block in range(BLOCKS):
            if cluster.plan.block_pservers[block]:
                assert cluster.move(block, 0)
        trainer.parameters.pull()
        assert trainer.parameters.plan is cluster.plan
        assert cluster.move(0, 1)
        trainer.parameters.pull("a")
        assert trainer.parameters.plan is cluster.plan


def test_a_request_without_block_names_learns_that_blocks_have_moved() -> None:
    with Cluster(SHAPES, Async(), pservers=2, is_placed=True) as cluster:
        shard, before = cluster.shards[0], cluster.plan.hash
        number = shard.numbers[0]
        assert shard.all_numbers(before) == shard.numbers
        assert cluster.move(number, 1)
        with pytest.raises(StalePlacementError):
            shard.all_numbers(before)
        assert number not in shard.all_numbers(cluster.plan.hash)
        after_one, second = cluster.plan.hash, shard.numbers[0]
        assert cluster.move(second, 1)
        with pytest.raises(StalePlacementError):
            shard.all_numbers(after_one)
        assert second not in shard.all_numbers(cluster.plan.hash)


def test_a_step_fails_if_the_block_is_missing_under_every_placement() -> None:
    with Cluster(SHAPES, Async(), pservers=2, is_placed=True) as cluster:
        trainer = cluster.trainer(give_up_s=0.5)
        before = cluster.plan
        assert cluster.move(0, 1 - int(cluster.plan.block_pservers[0]))
        cluster.plan = before
        current = trainer.begin(0)
        with pytest.raises(UnavailableError, match="gave up after"):
            trainer.step(0, gradients(1.0))
        assert current.must_repeat


def test_rows_are_looked_up_and_pushed_while_blocks_move() -> None:
    table = TableSpec("users", 4, SGD(lr=1.0))
    with Cluster(SHAPES, Async(), pservers=2, is_placed=True, tables=[table]) as cluster:
        trainer = cluster.trainer()
        ids = np.arange(50, dtype=np.uint64)
        first = trainer.parameters.look_up({0: DistinctIds(ids)}).rows(0).copy()
        for batch in range(4):
            trainer.begin(batch)
            trainer.parameters.push_rows(0, ids, np.ones((50, 4), np.float32))
            assert cluster.move(batch, 1 - int(cluster.plan.block_pservers[batch]))
            trainer.step(batch, gradients(1.0))
        rows = trainer.parameters.look_up({0: DistinctIds(ids)}).rows(0)
        np.testing.assert_allclose(rows, first - 4.0, atol=1e-5)


def run_while_moving(
    cluster: Cluster, train: Callable[[Trainer, int], None], batches: int, move: Callable[[list[Trainer]], bool]
) -> list[Trainer]:
    """Train with two trainers while another thread moves something again and again; return the trainers.

    Args:
        cluster: Their pservers.
        train: Trains the current batch, of which it gets the number.
        batches: Number of batches of each trainer.
        move: Moves something and returns True, or returns False if nothing can move now.
    """
    trainers, failures, moves = [cluster.trainer(member) for member in (1, 2)], list[BaseException](), 0

    def step(trainer: Trainer, member: int) -> None:
        try:
            for batch in range(batches):
                trainer.begin(1000 * member + batch, of=10_000, step=batch + 1)
                train(trainer, batch)
                assert trainer.current is not None
                assert not trainer.current.must_repeat
                trainer.parameters.close_batch()
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=step, args=each) for each in zip(trainers, (1, 2), strict=True)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        moves += move(trainers)
        # Without a pause, a step would never find its blocks: join() returns immediately once a thread has ended.
        time.sleep(0.02)
    for thread in threads:
        thread.join()
    assert not failures
    assert moves
    return trainers


@pytest.mark.parametrize("mode", [Async(), Sync()], ids=["async", "sync"])
def test_two_trainers_step_while_blocks_move_and_every_batch_counts_once(mode: Mode) -> None:
    """A third thread swaps some placements; the two trainers discover the other changes themselves."""
    batches, chance = 25, random.Random(1)
    with Cluster(SHAPES, mode, pservers=2, members=2, is_placed=True) as cluster:

        def move(trainers: list[Trainer]) -> bool:
            block = chance.randrange(BLOCKS)
            if not cluster.move(block, 1 - int(cluster.plan.block_pservers[block])):
                return False
            if chance.random() < 0.5:
                chance.choice(trainers).parameters.swap(cluster.plan)
            return True

        for trainer in run_while_moving(
            cluster, lambda trainer, _: trainer.parameters.step(gradients(1.0)), batches, move
        ):
            trainer.parameters.refresh()
            found = {float(value) for array in trainer.parameters.values() for value in array.flat}
            assert found == {-float(batches if isinstance(mode, Sync) else 2 * batches)}


@pytest.mark.parametrize("mode", [Async(), Sync()], ids=["async", "sync"])
def test_two_trainers_look_up_and_push_rows_while_buckets_move_and_every_batch_counts_once(mode: Mode) -> None:
    tables = [TableSpec("items", 3, SGD(lr=1.0), Uniform(1.0), dtype="bfloat16"), TableSpec("users", 2, SGD(lr=1.0))]
    ids = np.arange(400, dtype=np.uint64)
    batches, chance = 20, random.Random(2)

    def train(trainer: Trainer, batch: int) -> None:
        trainer.parameters.look_up({0: DistinctIds(ids[:40]), 1: DistinctIds(ids[batch:])})
        trainer.parameters.push_rows(1, ids, np.ones((len(ids), 2), np.float32))
        trainer.parameters.step(gradients(1.0))

    with Cluster(SHAPES, mode, pservers=2, members=2, is_placed=True, tables=tables) as cluster:
        expected = -float(batches if isinstance(mode, Sync) else 2 * batches)
        for trainer in run_while_moving(
            cluster, train, batches, lambda _: cluster.move_buckets(chance.randrange(BUCKETS))
        ):
            found = trainer.parameters.look_up({1: DistinctIds(ids)}).rows(1)
            assert found.shape == (len(ids), 2)
            assert set(found.reshape(-1).tolist()) == {expected}
