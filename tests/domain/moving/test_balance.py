"""Moves towards an equal distribution: any sequence of changes ends, and is valid at every point."""

import random

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from flightedl.domain.model.optimizers import SGD
from flightedl.domain.model.parameters import ParameterSpec
from flightedl.domain.model.sharding import ShardPlan, placed, placement_of, plan_for
from flightedl.domain.moving.balance import next_moves
from flightedl.domain.tables.spec import TableSpec

SPECS = [ParameterSpec("w", (9_000_000,)), ParameterSpec("b", (10,)), ParameterSpec("u", (3_000_000,))]
TABLES = [TableSpec("t", 2, SGD(lr=1.0))]


def shares(plan: ShardPlan) -> tuple[list[int], list[int]]:
    indexes = range(plan.pserver_count)
    of_blocks = [int(plan.block_bytes[plan.blocks_of(index)].sum()) for index in indexes]
    return of_blocks, [len(plan.buckets_of(index)) for index in indexes]


def scaled(plan: ShardPlan, pservers: set[int], choice: random.Random) -> ShardPlan:
    """Return the plan after the moves to these pservers, in random order, some of which are not committed at first."""
    placement = placement_of(plan, plan.placement or 1)
    placement = placement.resized(max(plan.pserver_count, max(pservers) + 1))
    plan = placed(plan, placement)
    for _ in range(100):
        moves = next_moves(plan, pservers)
        if not moves:
            return plan
        assert len({block for move in moves for block in move.blocks}) == sum(move.count for move in moves)
        choice.shuffle(moves)
        for move in moves[: choice.randint(1, len(moves))]:
            assert {placement.owners[block] for block in move.blocks} == {move.source}
            placement = placement.moved([(move.blocks, move.destination)], 7)
            # Raises an error if the buckets of a pserver are not neighbors.
            plan = placed(plan, placement)
    raise AssertionError("the moves do not end")


@settings(max_examples=25, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(
    st.integers(1, 4),
    st.lists(st.sets(st.integers(0, 5), min_size=1), min_size=1, max_size=4),
    st.integers(0, 999),
    st.sampled_from([[], TABLES]),
)
def test_any_pservers_get_equal_shares(first: int, targets: list[set[int]], seed: int, tables: list[TableSpec]) -> None:
    plan = plan_for(SPECS, first, tables=tables)
    biggest = int(plan.block_bytes.max())
    for pservers in targets:
        plan = scaled(plan, pservers, random.Random(seed))
        of_blocks, of_buckets = shares(plan)
        for index in range(plan.pserver_count):
            if index not in pservers:
                assert (of_blocks[index], of_buckets[index]) == (0, 0)
            else:
                assert abs(of_blocks[index] - sum(of_blocks) / len(pservers)) <= biggest
                assert not tables or abs(of_buckets[index] - 1024 / len(pservers)) < 1


def test_only_necessary_blocks_move_to_added_pservers() -> None:
    plan = placed(plan_for(SPECS, 2, tables=TABLES), placement_of(plan_for(SPECS, 2, tables=TABLES)).resized(4))
    moves = next_moves(plan, range(4))
    assert {move.source for move in moves} == {0, 1}
    assert {move.destination for move in moves} == {2, 3}
    moved = sum(int(plan.block_bytes[list(move.blocks)].sum()) for move in moves if move.block < plan.block_count)
    assert moved == pytest.approx(plan.block_bytes.sum() / 2, rel=0.1)
    assert [move.count for move in moves if move.block >= plan.block_count] == [128, 128]


def test_pservers_with_equal_shares_exchange_nothing() -> None:
    assert next_moves(plan_for([], 3, tables=TABLES), range(3)) == []
