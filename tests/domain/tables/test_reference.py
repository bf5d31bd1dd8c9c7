"""What becomes of rows: created, admitted, updated, expired."""

from __future__ import annotations

import numpy as np
import pytest

from flightedl.domain.model.initial import Uniform
from flightedl.domain.model.optimizers import SGD, Adagrad, Adam, Ftrl, Momentum, Optimizer
from flightedl.domain.tables.evict import Evict
from flightedl.domain.tables.optimizers import RowAdagrad, RowAdam
from flightedl.domain.tables.reference import ReferenceTable, batch_seed, combined
from flightedl.domain.tables.rules import first_slots, update_row
from flightedl.domain.tables.spec import TableSpec
from flightedl.testing.reference_updates import initial_slots, update


def table(**given: object) -> ReferenceTable:
    return ReferenceTable(TableSpec("t", 2, SGD(1.0), **given))  # type: ignore[arg-type]


def push(rows: ReferenceTable, version: int, *ids: int, epoch: int = 0) -> None:
    rows.update(dict.fromkeys(ids, (1.0, 2.0)), version=version, epoch=epoch, number=version - 1)


def test_a_read_makes_no_row_and_the_first_push_does() -> None:
    rows = table(init=Uniform(0.5))
    first = rows.first_values(7)
    assert rows.read(7, 0, 0) is None
    assert not rows.rows
    push(rows, 1, 7)
    assert rows.read(7, 1, 0) == [first[0] - 1, first[1] - 2]
    assert rows.rows[7].updates == 1


def test_an_id_is_admitted_by_its_nth_push() -> None:
    rows = table(admit_after=3)
    for version in (1, 2):
        push(rows, version, 7)
        assert rows.read(7, version, 0) is None
    push(rows, 3, 7)
    assert rows.read(7, 3, 0) == [-1, -2]
    assert not rows.waiting


def test_rows_expire_by_versions() -> None:
    rows = table(evict=Evict(unused_versions=2))
    push(rows, 1, 7)
    assert rows.read(7, 3, 0) is not None
    assert rows.read(7, 4, 0) is None
    push(rows, 4, 7)  # It was there at version 3, which its trainer has read.
    assert rows.read(7, 4, 0) == [-2, -4]
    push(rows, 8, 7)
    assert rows.read(7, 8, 0) == [-1, -2]


def test_rows_expire_by_epochs_and_so_does_what_waits() -> None:
    rows = table(evict=Evict(unused_epochs=1), admit_after=2)
    push(rows, 1, 7)
    push(rows, 2, 7, epoch=2)
    assert rows.read(7, 2, 2) is None
    push(rows, 3, 7, epoch=3)
    assert rows.read(7, 3, 4) == [-1, -2]
    assert rows.read(7, 3, 5) is None


def test_the_oldest_rows_go_when_there_are_too_many() -> None:
    rows = table(evict=Evict(max_rows=3))
    push(rows, 1, 1, 2)
    push(rows, 2, 3)
    assert sorted(rows.live(2, 0)) == [1, 2, 3]
    push(rows, 3, 1, 4)
    assert sorted(rows.live(3, 0)) == [1, 3, 4]
    push(rows, 4, 10, 11, 12, 13)
    assert sorted(rows.live(4, 0)) == [10, 11, 12, 13], "the newest rows stay in any case"
    push(rows, 5, 1)
    assert sorted(rows.live(5, 0)) == [1]
    assert rows.read(1, 5, 0) == [-1, -2], "it began again"


def test_small_rows_go_with_a_checkpoint() -> None:
    rows = table(evict=Evict(norm_below=3.0))
    push(rows, 1, 1, 2)
    push(rows, 2, 2)
    assert rows.remove_small(2, 0) == [1]
    assert sorted(rows.rows) == [2]
    assert table().remove_small(0, 0) == []


@pytest.mark.parametrize(
    "optimizer",
    [
        SGD(0.1, weight_decay=0.1, clip_value=0.5),
        Momentum(0.1),
        Momentum(0.1, nesterov=True),
        Adagrad(0.1),
        Adam(0.1),
        Ftrl(0.1, l1=0.01),
        Ftrl(0.0),
    ],
    ids=lambda optimizer: type(optimizer).__name__,
)
def test_rules_of_single_elements_are_those_of_dense_parameters(optimizer: Optimizer) -> None:
    random = np.random.default_rng(0)
    values = random.normal(size=4)
    row, row_slots, slots = values.tolist(), first_slots(optimizer, 4), initial_slots(optimizer, 4, "float64")
    for version in range(3):
        gradient = random.normal(size=4)
        update(optimizer, values, gradient, slots, version, 0.5)
        update_row(optimizer, row, gradient.tolist(), row_slots, version, optimizer.rate_at(version), 0.5)
    np.testing.assert_allclose(row, values, rtol=1e-12)
    np.testing.assert_allclose(row_slots or (), slots, rtol=1e-12)


@pytest.mark.parametrize(("row_wise", "dense"), [(RowAdagrad(0.1, eps=1e-10), Adagrad(0.1)), (RowAdam(0.1), Adam(0.1))])
def test_a_row_wise_rule_is_the_other_where_all_elements_are_equal(row_wise: Optimizer, dense: Optimizer) -> None:
    rows = [[1.0] * 3, [1.0] * 3]
    slots = [first_slots(row_wise, 3), first_slots(dense, 3)]
    for version in range(3):
        for optimizer, row, own in zip((row_wise, dense), rows, slots, strict=True):
            update_row(optimizer, row, [0.5 - version] * 3, own, version, 0.1)
    assert rows[0] == pytest.approx(rows[1], rel=1e-12)
    assert len(slots[0][-1]) == 1


def test_a_round_is_summed_by_id() -> None:
    sums = combined([(2.0, {1: (1, 2), 2: (0, 1)}), (1.0, {1: (10, 20)})])
    assert sums == {1: [12, 24], 2: [0, 2]}


def test_batches_have_seeds_of_their_own() -> None:
    assert len({batch_seed(e, t, b) for e in range(3) for t in range(3) for b in range(3)}) == 27
