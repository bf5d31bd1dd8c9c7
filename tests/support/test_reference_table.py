"""The reference table: creation, admission, updates and expiry of rows."""

from __future__ import annotations

import numpy as np
import pytest

from flightedl.domain.model.initial import Uniform
from flightedl.domain.model.optimizers import SGD, Adagrad, Adam, Optimizer
from flightedl.domain.tables.evict import Evict
from flightedl.domain.tables.optimizers import RowAdagrad, RowAdam
from flightedl.domain.tables.spec import TableSpec, batch_seed
from tests.support.reference_table import ReferenceTable
from tests.support.reference_updates import initial_slots, update_row


def table(**given: object) -> ReferenceTable:
    return ReferenceTable(TableSpec("t", 2, SGD(1.0), **given))  # type: ignore[arg-type]


def push(rows: ReferenceTable, version: int, *ids: int, epoch: int = 0) -> None:
    rows.update(dict.fromkeys(ids, (1.0, 2.0)), version=version, epoch=epoch)


def test_the_first_push_creates_a_row_and_a_read_does_not() -> None:
    rows = table(init=Uniform(0.5))
    first = rows.first_values(7)
    assert rows.read(7, 0, 0) is None
    assert not rows.rows
    push(rows, 1, 7)
    assert rows.read(7, 1, 0) == [first[0] - 1, first[1] - 2]
    assert rows.rows[7].updates == 1


def test_the_nth_push_admits_an_id() -> None:
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
    push(rows, 4, 7)  # The row existed at version 3, which the trainer read.
    assert rows.read(7, 4, 0) == [-2, -4]
    push(rows, 8, 7)
    assert rows.read(7, 8, 0) == [-1, -2]


def test_rows_and_waiting_ids_expire_by_epochs() -> None:
    rows = table(evict=Evict(unused_epochs=1), admit_after=2)
    push(rows, 1, 7)
    push(rows, 2, 7, epoch=2)
    assert rows.read(7, 2, 2) is None
    push(rows, 3, 7, epoch=3)
    assert rows.read(7, 3, 4) == [-1, -2]
    assert rows.read(7, 3, 5) is None


def test_the_oldest_rows_are_evicted_beyond_the_limit() -> None:
    rows = ReferenceTable(TableSpec("t", 2, SGD(1.0), evict=Evict(max_rows=3 * 1024)), lambda row_id: row_id // 100)
    push(rows, 1, 1, 2)
    push(rows, 2, 3)
    assert sorted(rows.live(2, 0)) == [1, 2, 3]
    push(rows, 3, 1, 4)
    assert sorted(rows.live(3, 0)) == [1, 3, 4]
    push(rows, 4, 10, 11, 12, 13)
    assert sorted(rows.live(4, 0)) == [10, 11, 12, 13], "the newest rows are always kept"
    push(rows, 5, 1)
    assert sorted(rows.live(5, 0)) == [1]
    assert rows.read(1, 5, 0) == [-1, -2], "the row was created again"
    push(rows, 6, 101)
    push(rows, 7, 2, 3, 102, 103)
    assert sorted(rows.live(7, 0)) == [1, 2, 3, 101, 102, 103], "each bucket counts its own rows"


def test_a_checkpoint_removes_rows_with_a_small_norm() -> None:
    rows = table(evict=Evict(norm_below=3.0))
    push(rows, 1, 1, 2)
    push(rows, 2, 2)
    assert rows.remove_small(2, 0) == [1]
    assert sorted(rows.rows) == [2]
    assert table().remove_small(0, 0) == []


@pytest.mark.parametrize(("row_wise", "dense"), [(RowAdagrad(0.1, eps=1e-10), Adagrad(0.1)), (RowAdam(0.1), Adam(0.1))])
def test_a_row_wise_rule_equals_the_plain_rule_if_all_elements_are_equal(row_wise: Optimizer, dense: Optimizer) -> None:
    rows = [np.ones(3), np.ones(3)]
    slots = [initial_slots(row_wise, 3, float), initial_slots(dense, 3, float)]
    for version in range(3):
        for optimizer, row, own in zip((row_wise, dense), rows, slots, strict=True):
            update_row(optimizer, row, np.full(3, 0.5 - version), own, version, 0.1)
    np.testing.assert_allclose(rows[0], rows[1], rtol=1e-12)
    assert len(slots[0][-1]) == 1


def test_batches_have_different_seeds() -> None:
    assert len({batch_seed(e, t, b) for e in range(3) for t in range(3) for b in range(3)}) == 27
