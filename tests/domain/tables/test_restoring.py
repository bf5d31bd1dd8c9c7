"""Restoring of rows from the descriptions of tables in files."""

from __future__ import annotations

from flightedl.domain.model.optimizers import SGD
from flightedl.domain.tables.evict import Evict
from flightedl.domain.tables.restoring import FileBuckets, RestoredSpans, buckets_of_chain
from flightedl.domain.tables.spec import TableSpec
from tests.support.reference_table import ReferenceTable, Row


def taken() -> RestoredSpans[str]:
    """Two files with a span each, and one with two, of a chain."""
    found: RestoredSpans[str] = RestoredSpans()
    own = range(10, 40)
    found.table(10, 0, "of a base")
    found.span(range(10, 20), own, 7, 3, 1)
    found.table(10, 0, "a")
    found.span(range(20, 30), own, 7, 3, 2)
    found.table(20, 0, "b")
    found.span(range(30, 50), own, 9, 4, 0)
    found.table(30, 0, "c")
    return found


def test_rows_of_a_bucket_begin_with_the_newest_file_that_has_all_of_them() -> None:
    files = [({1, 2, 3}, ()), ({1, 2, 4}, [4]), ({1, 3, 4}, [3])]
    assert buckets_of_chain(files) == [
        FileBuckets(frozenset({1}), is_newest=False),
        FileBuckets(frozenset({1, 4}), is_newest=False),
        FileBuckets(frozenset({1, 3, 4}), is_newest=True),
    ]
    assert buckets_of_chain(files[:1]) == [FileBuckets(frozenset({1, 2, 3}), is_newest=True)]


def test_positions_are_those_of_this_pserver() -> None:
    positions = taken().positions
    assert positions.keys() == set(range(10, 40))
    assert {positions[10], positions[29]} == {(7, 3)}
    assert positions[39] == (9, 4)


def test_the_last_file_of_a_chain_counts_in_its_own_buckets() -> None:
    assert taken().cuts_of(0, range(10, 30)) == [(range(10, 20), "a"), (range(20, 30), "b")]
    assert taken().cuts_of(0, range(30, 40)) == [(range(30, 50), "c")]
    assert taken().cuts_of(1, range(30, 40)) == []


def test_merged_spans_have_the_highest_epoch() -> None:
    assert taken().epoch_of(range(10, 30)) == 2
    assert taken().epoch_of(range(30, 40)) == 0


def test_ids_waiting_in_another_checkpoint_are_forgotten() -> None:
    found = taken()
    found.clear()
    assert found.positions == {}
    assert found.cuts_of(0, range(10, 40)) == []
    assert found.epoch_of(range(10, 40)) == 0


def row(version: int, *values: float, epoch: int = 0, updates: int = 1) -> Row:
    return Row(list(values), [], updates, version, epoch)


def test_a_chain_is_read_file_by_file_and_rows_expired_at_its_end_are_dropped() -> None:
    spec = TableSpec("t", 1, SGD(lr=1.0), evict=Evict(unused_versions=3), admit_after=2)
    table = ReferenceTable(spec, lambda row_id: row_id)
    for row_id, each in {1: row(1, 1.0), 2: row(2, 2.0), 3: row(2), 4: row(2, 4.0)}.items():
        table.restore(row_id, each)
    table.remove([2, 9])
    for row_id, each in {3: row(6, 3.0), 4: row(6)}.items():
        table.restore(row_id, each)
    assert table.waiting.keys() == {4}
    assert table.rows.keys() == {1, 3, 4}
    table.expire({row_id: table.oldest_at(row_id, 7) for row_id in (2, 3, 4)}, 0)
    assert table.rows.keys() == {1, 3}, "4 was waiting, and its row had expired; 1 was not mentioned"
    assert table.waiting.keys() == {4}


def test_restored_rows_are_independent() -> None:
    table, given = ReferenceTable(TableSpec("t", 1, SGD(lr=1.0))), row(1, 1.0)
    table.restore(1, given)
    table.update({1: [1.0]}, version=2, epoch=0)
    assert (given.values, given.updates) == ([1.0], 1)
    assert (table.rows[1].values, table.rows[1].updates) == ([0.0], 2)


def test_unused_rows_expire_by_epochs() -> None:
    table = ReferenceTable(TableSpec("t", 1, SGD(lr=1.0), evict=Evict(unused_epochs=1)), lambda _: 0)
    for row_id, epoch in enumerate((0, 1, 2)):
        table.restore(row_id, row(1, 1.0, epoch=epoch))
    table.expire({0: 0}, 1)
    assert table.rows.keys() == {1, 2}
    assert table.oldest_at(0, 100) == 0
