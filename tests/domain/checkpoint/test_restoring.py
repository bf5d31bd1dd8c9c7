"""Restoring on another number of pservers: complete blocks move, with their applied sets."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from flightedl.domain.checkpoint.manifest import Manifest, shard_name
from flightedl.domain.checkpoint.restoring import applied_of, recut, saved_plan
from flightedl.domain.exactly_once.applied import AppliedBatches
from flightedl.domain.exactly_once.batches import Batch
from flightedl.domain.model.optimizers import SGD
from flightedl.domain.model.parameters import ParameterSpec
from flightedl.domain.model.sharding import BLOCK_BYTES, placed, placement_of, plan_for, plan_shards, reassigned
from flightedl.domain.tables.placement import BUCKETS
from flightedl.domain.tables.spec import TableSpec
from flightedl.errors import UsageError
from flightedl.messages.base import encode
from flightedl.messages.declarations import DeclaredModel, JobDeclaration, ModelDeclaration

from .checkpoint_shell import shard_file

PARAMETERS = [
    ParameterSpec("w", (3_000, 1_000)),
    ParameterSpec("b", (1_000,)),
    ParameterSpec("u", (700_000,), "float64"),
]


def manifest(pserver_count: int, cut_for: int) -> Manifest:
    plan = plan_for(PARAMETERS, pserver_count, cut_for)
    return Manifest(
        job="job",
        number=1,
        plan_hash=plan.hash,
        pserver_count=pserver_count,
        cut_for=cut_for,
        round=None,
        created_s=0.0,
        shards=tuple(shard_file(i, 1, shard_name(1, i, pserver_count, 1, 1), b"x") for i in range(pserver_count)),
    )


def test_the_blocks_remain_and_their_owners_change():
    first = plan_shards(PARAMETERS, 3)
    for count in (1, 2, 4, 7):
        moved = reassigned(first, count)
        assert (moved.block_starts == first.block_starts).all()
        assert (moved.block_stops == first.block_stops).all()
        assert moved.hash != first.hash
        loads = [int(moved.block_bytes[moved.blocks_of(index)].sum()) for index in range(count)]
        assert max(loads) <= sum(loads) / count + BLOCK_BYTES


def test_the_plan_depends_only_on_the_first_cut_and_the_current_count():
    first = plan_shards(PARAMETERS, 3)
    assert reassigned(reassigned(first, 5), 2).hash == reassigned(first, 2).hash == plan_for(PARAMETERS, 2, 3).hash
    assert plan_for(PARAMETERS, 3, 3).hash == plan_for(PARAMETERS, 3).hash == first.hash
    with pytest.raises(UsageError):
        reassigned(first, 0)


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1), (2, 5), (4, 3), (2, 2)])
def test_every_block_is_read_once_from_its_file(before, after):
    stored = manifest(before, before)
    saved = saved_plan(stored, PARAMETERS)
    plan = plan_for(PARAMETERS, after, before)
    sets = {}
    for file in stored.shards:
        numbers = saved.blocks_of(file.index).tolist()
        sets[file.name] = AppliedBatches(numbers)
        for number in numbers:
            sets[file.name].mark([number], Batch(0, number, 0), 1)
    read = []
    for index in range(after):
        parts = recut(stored, saved, plan, index)
        mine = plan.blocks_of(index).tolist()
        assert sorted(number for part in parts for number in part.blocks) == mine
        read += mine
        applied = applied_of(parts, sets)
        for number in mine:
            assert [b for b in range(plan.block_count) if applied.has(number, Batch(0, b, 0))] == [number]
        if before == after:
            assert [(part.file.index, part.is_complete) for part in parts] == [(index, True)]
    assert sorted(read) == list(range(plan.block_count))


def test_other_parameters_and_other_cuts_are_refused():
    stored = manifest(2, 2)
    with pytest.raises(UsageError, match="other parameters"):
        saved_plan(stored, PARAMETERS[:2])
    with pytest.raises(UsageError, match="plan_for"):
        recut(stored, saved_plan(stored, PARAMETERS), plan_shards(PARAMETERS, 7), 0)


@pytest.mark.parametrize("changed", ["block_starts", "block_parameters"])
def test_an_equal_number_of_blocks_with_another_cut_is_refused(changed):
    stored = manifest(2, 2)
    saved = saved_plan(stored, PARAMETERS)
    other = getattr(saved, changed).copy()
    other[-1] = 0
    with pytest.raises(UsageError, match="plan_for"):
        recut(stored, saved, replace(saved, **{changed: other}), 0)


def test_arrays_of_a_reassigned_plan_are_its_own_and_read_only():
    first = plan_shards(PARAMETERS, 2)
    moved = reassigned(first, 3)
    assert not np.shares_memory(first.block_starts, moved.block_starts)
    assert not moved.block_pservers.flags.writeable


TABLES = [TableSpec("users", 4, SGD(lr=0.1))]


def with_tables(pserver_count: int) -> Manifest:
    """A manifest of a job that has tables and parameters."""
    declared = ModelDeclaration(parameters=[], optimizer={}, mode={}, tables=[each.to_json() for each in TABLES])
    plan = plan_for(PARAMETERS, pserver_count, tables=TABLES)
    model = DeclaredModel(declaration=declared, pservers=pserver_count, plan_hash=plan.hash)
    return msgspec.structs.replace(
        manifest(pserver_count, pserver_count),
        plan_hash=plan.hash,
        declaration=msgspec.Raw(encode(JobDeclaration(model=model))),
    )


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1), (2, 5), (4, 3), (2, 2)])
def test_each_bucket_has_one_owner_and_brings_its_applied_batches(before, after):
    made = with_tables(before)
    saved, plan = saved_plan(made, PARAMETERS), plan_for(PARAMETERS, after, before, TABLES)
    count, seen = plan.block_count, []
    for index in range(after):
        parts = recut(made, saved, plan, index)
        found = [part.split(count) for part in parts]
        seen += [number for _, buckets in found for number in buckets]
        assert sorted(number for blocks, _ in found for number in blocks) == plan.blocks_of(index).tolist()
        sets = {}
        for part in parts:
            applied = AppliedBatches(saved.positions_of(part.file.index))
            applied.mark(applied.numbers, Batch(0, part.file.index, 0), 2)
            sets[part.file.name] = applied
        applied = applied_of(parts, sets)
        owners = {number: part.file.index for part in parts for number in part.blocks}
        assert applied.numbers == plan.positions_of(index)
        assert all(applied.has(number, Batch(0, owners[number], 0)) for number in applied.numbers)
    assert seen == list(range(count, count + BUCKETS))


def test_a_checkpoint_has_a_placement_or_the_computed_one():
    made = with_tables(3)
    computed = saved_plan(made, PARAMETERS)
    declared = ModelDeclaration(parameters=[], optimizer={}, mode={}, tables=[each.to_json() for each in TABLES])
    placement = placement_of(computed, 4)
    plan = placed(computed, placement)
    model = DeclaredModel(declaration=declared, pservers=3, plan_hash=plan.hash, placement=placement)
    stored = msgspec.structs.replace(
        made, plan_hash=plan.hash, declaration=msgspec.Raw(encode(JobDeclaration(model=model)))
    )
    found = saved_plan(stored, PARAMETERS)
    assert (found.placement, found.hash) == (4, plan.hash)
    for index in range(3):
        assert found.positions_of(index) == computed.positions_of(index)
        (part,) = recut(made, computed, found, index)
        assert part.is_complete
    with pytest.raises(UsageError, match="other parameters"):
        saved_plan(stored, PARAMETERS[:1])


def test_tables_are_part_of_the_plan():
    plan = plan_for(PARAMETERS, 2, tables=TABLES)
    assert plan.hash != plan_for(PARAMETERS, 2).hash
    assert plan.hash != plan_for(PARAMETERS, 2, tables=[TableSpec("users", 5, SGD(lr=0.1))]).hash
    assert plan.hash == plan_for(PARAMETERS, 2, tables=[TableSpec("users", 4, SGD(lr=0.5))]).hash, "settings may change"
    assert not plan_for(PARAMETERS, 2).buckets_of(0)
    with pytest.raises(UsageError, match="two tables named 'users'"):
        plan_for(PARAMETERS, 2, tables=TABLES * 2)
    alone = plan_for([], 3, tables=TABLES)
    assert [alone.positions_of(index)[0] for index in range(3)] == [0, 342, 683]
    other = plan_for(PARAMETERS, 2, tables=[TableSpec("items", 4, SGD(lr=0.1))])
    with pytest.raises(UsageError, match="the job's plan must be"):
        recut(with_tables(2), plan, other, 0)
