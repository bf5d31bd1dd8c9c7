"""Stored owners of blocks: identified by a version, while the cut remains the same."""

from __future__ import annotations

import pytest

from flightedl.domain.model.optimizers import SGD
from flightedl.domain.model.parameters import ParameterSpec
from flightedl.domain.model.sharding import ShardPlan, placed, placement_of, plan_for
from flightedl.domain.tables.spec import TableSpec
from flightedl.errors import UsageError
from flightedl.messages.base import decode, encode
from flightedl.messages.declarations import Placement

SPECS = [ParameterSpec("w", (300_000,)), ParameterSpec("b", (10,)), ParameterSpec("u", (900_000,))]
TABLES = [TableSpec("t", 2, SGD(lr=1.0))]


def owners(plan: ShardPlan) -> list[list[int]]:
    return [plan.positions_of(index) for index in range(plan.pserver_count)]


@pytest.mark.parametrize("tables", [[], TABLES])
@pytest.mark.parametrize(("pservers", "cut_for"), [(1, 1), (3, 3), (2, 3), (5, 2)])
def test_stored_and_computed_placements_agree(pservers: int, cut_for: int, tables: list[TableSpec]) -> None:
    computed = plan_for(SPECS, pservers, cut_for, tables)
    stored = decode(encode(placement_of(computed)), Placement)
    found = plan_for(SPECS, 7, cut_for, tables, stored)
    assert owners(found) == owners(computed)
    assert (found.pserver_count, found.placement) == (pservers, 1)
    assert "." not in computed.hash, "jobs without a stored placement keep their hash"


def test_a_plan_is_identified_by_its_cut_and_the_version_of_its_placement() -> None:
    cut = plan_for(SPECS, 3, 3, TABLES)
    first, second = (placed(cut, placement_of(plan_for(SPECS, 4 - version, 3, TABLES), version)) for version in (1, 2))
    assert owners(first) != owners(second)
    assert (first.hash.partition(".")[0], first.hash) == (second.hash.partition(".")[0], f"{first.hash[:32]}.1")
    other = plan_for(SPECS[:2], 3, 3, TABLES)
    assert placed(other, placement_of(other)).hash[:32] != first.hash[:32]


@pytest.mark.parametrize("change", [{"blocks": ((0, 1),)}, {"buckets": ()}, {"pservers": 1}])
def test_a_placement_of_other_blocks_or_pservers_is_refused(change: dict[str, object]) -> None:
    plan = plan_for(SPECS, 3, 3, TABLES)
    known = placement_of(plan)
    fields = {"version": 1, "pservers": 3, "blocks": known.blocks, "buckets": known.buckets} | change
    with pytest.raises(UsageError, match="placement 1 belongs to other blocks"):
        placed(plan, Placement(**fields))  # type: ignore[arg-type]
