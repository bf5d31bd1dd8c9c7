"""Rows between two calls of a script: prefetched rows that may be used, and messages of a batch that is sent again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flightedl.client.tables.requests import DistinctIds
from flightedl.client.tables.rows import TableRows
from flightedl.client.tables.table import Table
from flightedl.client.tables.traffic import Lookup
from flightedl.domain.model.optimizers import SGD
from flightedl.domain.model.sharding import ShardPlan, placed, plan_shards
from flightedl.domain.tables.placement import BUCKETS, as_ids
from flightedl.domain.tables.spec import TableSpec
from flightedl.domain.trainer.transfers import Push, Transfer
from flightedl.messages.declarations import Placement
from flightedl.messages.status import TableCounts

SPEC = TableSpec("t", 2, SGD(lr=1.0))
PLAN = plan_shards([], 2, tables=[SPEC])
IDS = as_ids(np.arange(50))
FIRST, SECOND = (PLAN.buckets_of(pserver).start for pserver in (0, 1))


def moved() -> ShardPlan:
    """Move all buckets to the first pserver."""
    return placed(PLAN, Placement(version=2, pservers=2, blocks=(), buckets=((0, BUCKETS),)))


def wanted() -> dict[int, DistinctIds]:
    return {0: DistinctIds(IDS)}


@pytest.fixture
def rows() -> TableRows:
    """A trainer's rows, of which the next batch's have been prefetched at version 5."""
    made = TableRows(PLAN)
    made._ahead = Lookup(PLAN, wanted())
    for pserver in (0, 1):
        made._ahead._versions[pserver] = 5
        made._ahead._received[pserver] = len(PLAN.buckets_of(pserver))
    return made


@pytest.mark.parametrize(("versions", "is_used"), [(5, True), (4, False), (6, False), (None, True)])
def test_prefetched_rows_are_used_only_at_their_version(rows: TableRows, versions: int | None, is_used: bool) -> None:
    known = None if versions is None else {FIRST: 5, SECOND: versions}
    assert (rows.prefetched(wanted(), known) is not None) == is_used


def test_prefetched_rows_are_used_only_if_all_have_arrived_where_they_are_now(rows: TableRows) -> None:
    assert rows.prefetched({0: DistinctIds(IDS[1:])}, None) is None
    assert rows.prefetched(wanted(), None) is None, "rows for other ids are dropped"
    rows._ahead = Lookup(PLAN, wanted())
    rows._ahead._versions = {0: 5, 1: 5}
    rows._ahead._received = {0: len(PLAN.buckets_of(0)), 1: 3}
    assert rows.prefetched(wanted(), None) is None, "rows of some buckets are missing"


def test_rows_that_were_prefetched_from_former_owners_are_dropped(rows: TableRows) -> None:
    rows.place(moved())
    assert rows.prefetched(wanted(), None) is None


def test_a_lookup_ends_with_its_block_also_by_an_error(rows: TableRows) -> None:
    lookup = Lookup(PLAN, wanted())

    def fail() -> None:
        with rows.looking_up(lookup):
            assert rows._looking_up is lookup
            raise ValueError("a pserver refuses")

    with pytest.raises(ValueError, match="refuses"):
        fail()
    assert rows._looking_up is None


def pushing(batch: Any) -> Transfer:
    calls: Any = tuple(Push([PLAN.buckets_of(pserver).start], {}) for pserver in (0, 1))
    return Transfer(1, 1, batch, calls)


def sizes(rows: TableRows, transfer: Transfer) -> list[int]:
    """Return the number of bytes that the transfer sends to each pserver."""
    made = rows.of(transfer)
    payloads = [made.pushed(pserver, pull=False) for pserver in (0, 1)]
    return [0 if payload is None else len(bytes(memoryview(payload.data))) for payload in payloads]


def test_a_batch_that_is_sent_again_has_the_same_gradients_for_the_present_owners() -> None:
    rows, batch = TableRows(PLAN), object()
    rows.pending.add(0, IDS, np.ones((IDS.size, 2), np.float32))
    before = sizes(rows, pushing(batch))
    assert all(before)
    rows.pending.add(0, IDS, np.ones((IDS.size, 2), np.float32))
    assert sizes(rows, pushing(batch)) == before
    rows.place(moved())
    after = sizes(rows, pushing(batch))
    assert after[0] > max(before), "gradients are sent to former owners"
    rows.forget()
    assert not rows.pending
    assert sizes(rows, pushing(batch)) < before, "gradients of a batch that is over are sent again"


class Traffic:
    """Rows with given values, and the gradients that were pushed."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values
        self.pushed: dict[int, list[float]] = {}

    def look_up(self, ids: dict[int, DistinctIds]) -> Any:
        return SimpleNamespace(unknown={}, rows=lambda _: self.values[ids[0].ids.astype(np.int64)])

    def push_rows(self, _number: int, ids: np.ndarray, sums: np.ndarray) -> None:
        self.pushed = dict(zip(ids.tolist(), sums[:, 0].tolist(), strict=True))

    def where(self) -> str:
        return "a batch"


def test_the_gradient_of_a_maximum_belongs_to_the_bags_that_were_pulled() -> None:
    """Bags with the same ids, but other borders or other ids, have other maxima."""
    traffic: Any = Traffic(np.array([[0.0], [3.0], [2.0], [1.0]], np.float32))
    table = Table(TableSpec("t", 1, SGD(lr=1.0)), lambda _: (0, traffic), lambda name: TableCounts(name=name))
    gradients = np.array([[1.0], [10.0]], np.float32)
    ids = np.array([1, 2, 3])
    for offsets, expected in (([0, 1], {1: 1.0, 2: 10.0, 3: 0.0}), ([0, 2], {1: 1.0, 2: 0.0, 3: 10.0})):
        assert table.pull(ids, offsets=offsets, combiner="max").tolist()[0] == [3.0]
        table.push(ids, gradients, offsets=offsets, combiner="max")
        assert traffic.pushed == expected
    with pytest.raises(Exception, match="pull the bags before"):
        table.push(ids, gradients, offsets=[0, 1], combiner="max")
    with pytest.raises(Exception, match="pull the bags before"):
        table.push(ids[::-1], gradients, offsets=[0, 2], combiner="max")
