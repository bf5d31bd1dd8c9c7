"""Buckets that move between stores behave as in a store that they never left."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flightedl.domain.exactly_once.batches import Batch
from flightedl.domain.model.initial import Uniform
from flightedl.domain.tables.evict import Evict
from flightedl.domain.tables.optimizers import RowAdam
from flightedl.domain.tables.placement import BUCKETS, bucket_of, buckets_of, salt_of
from flightedl.domain.tables.spec import TableSpec
from flightedl.errors import BusyError
from flightedl.rowstore.tables import RowChunk, RowTables, TableGradients

#: Ids of one table, all in a few buckets.
IDS = np.array([one for one in range(30_000) if bucket_of(one, salt_of("limited")) % 128 == 5], np.uint64)
SPECS = [
    TableSpec("plain", 3, RowAdam(lr=0.3), Uniform(1.0)),
    TableSpec("half", 3, RowAdam(lr=0.3), Uniform(1.0), dtype="bfloat16"),
    TableSpec("aged", 2, RowAdam(lr=0.3), Uniform(1.0), evict=Evict(unused_versions=3), admit_after=2),
    TableSpec("epochs", 2, RowAdam(lr=0.3), Uniform(1.0), evict=Evict(unused_epochs=1, unused_versions=6)),
    TableSpec("limited", 2, RowAdam(lr=0.3), evict=Evict(max_rows=4 * BUCKETS)),
    TableSpec("sketched", 2, RowAdam(lr=0.3), admit_after=3, admission="sketch", sketch_bytes=1 << 10),
    TableSpec("norms", 2, RowAdam(lr=0.3), Uniform(1.0), evict=Evict(norm_below=0.6), admit_after=2),
]
#: A step: action, ids of the push, number of new epochs, and a number that selects the buckets that move.
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["push", "push", "push", "move", "cut"]),
        st.sets(st.sampled_from(IDS.tolist()), max_size=40),
        st.sampled_from([0, 0, 0, 1]),
        st.integers(0, 2**20),
    ),
    max_size=25,
)


class Stores:
    """Several stores, each with its own version, that together have all buckets."""

    def __init__(self, versions: Sequence[int]) -> None:
        share = BUCKETS // len(versions)
        self.versions = list(versions)
        self.owners = np.arange(BUCKETS) // share
        self.stores = [RowTables(SPECS, range(at * share, (at + 1) * share)) for at in range(len(versions))]
        #: Number of cuts.
        self.files = 0

    def push(self, ids: Sequence[int], number: int, epoch: int) -> None:
        for at, store in enumerate(self.stores):
            self.versions[at] += 1
            pushed = []
            for table, spec in enumerate(SPECS):
                own = self.own(ids, spec, at)
                gradients = np.sin(np.add.outer(own.astype(np.float32), np.arange(spec.dim)) + number)
                pushed.append(TableGradients(table, own, gradients.astype(np.float32)))
            store.update(pushed, version=self.versions[at], epoch=epoch, seed=number)

    def own(self, ids: Sequence[int], spec: TableSpec, at: int) -> np.ndarray:
        wanted = np.array(sorted(ids), np.uint64)
        return wanted[self.owners[buckets_of(wanted, spec.salt)] == at]

    def move(self, choice: int, epoch: int) -> None:
        """Move some buckets from one store to another."""
        source, target = choice % len(self.stores), choice // 7 % len(self.stores)
        buckets = np.flatnonzero((self.owners == source) & (np.random.default_rng(choice).random(BUCKETS) < 0.4))
        if source == target or not buckets.size:
            return
        moved = self.stores[source].release(buckets.tolist(), self.versions[source], epoch)
        self.stores[target].take(moved, self.versions[target])
        self.owners[buckets] = target

    def read(self, epoch: int) -> list[Any]:
        """Return the rows by table and id, and the number of ids that have a row."""
        found: list[Any] = []
        for table, spec in enumerate(SPECS):
            count = 0
            for at, store in enumerate(self.stores):
                ids = self.own(IDS.tolist(), spec, at)
                out = np.empty((ids.size, spec.dim), np.float32)
                count += store.read(table, ids, self.versions[at], epoch, out)
                found += [(table, *each) for each in zip(ids.tolist(), map(bytes, out), strict=True)]
            found.append((table, -1, count))
        return sorted(found)

    def cut(self, epoch: int) -> list[Any]:
        """Return the rows of a checkpoint with their ages. Each store makes a base or an increment, as it can."""
        self.files += 1
        found: list[Any] = []
        for version, store in zip(self.versions, self.stores, strict=True):
            cut = store.begin_cut(version, epoch, file=str(self.files))
            while (chunk := cut.next_rows(300)) is not None:
                found += self._rows_of(chunk, version + store.shifts)
        return sorted(found)

    @staticmethod
    def _rows_of(chunk: RowChunk, versions: np.ndarray) -> list[Any]:
        """Return rows with the versions since their last update."""
        spec = SPECS[chunk.table]
        ages = versions[buckets_of(chunk.ids, spec.salt)] - chunk.versions if chunk.versions.any() else chunk.versions
        columns = (chunk.ids, chunk.updates, ages, chunk.epochs)
        rows = zip(*(column.tolist() for column in columns), chunk.slots, chunk.values, strict=True)
        return [(chunk.table, chunk.is_waiting, *row[:4], row[4].tobytes(), row[5].tobytes()) for row in rows]


@settings(deadline=None, max_examples=20)
@given(steps=STEPS, versions=st.sampled_from([(0, 0), (5, 0, 900, 40)]))
def test_stores_with_moving_buckets_behave_like_one_store(
    steps: list[tuple[str, set[int], int, int]], versions: tuple[int, ...]
) -> None:
    one, several = Stores([0]), Stores(versions)
    number = epoch = 0
    for what, ids, more, choice in steps:
        epoch += more
        if what == "push":
            one.push(sorted(ids), number, epoch)
            several.push(sorted(ids), number, epoch)
            number += 1
        elif what == "move":
            several.move(choice, epoch)
        else:
            assert one.cut(epoch) == several.cut(epoch)
        assert one.read(epoch) == several.read(epoch)


def test_rows_older_than_their_store_expire_by_the_versions_of_their_bucket() -> None:
    spec = TableSpec("t", 3, RowAdam(lr=0.3), evict=Evict(unused_versions=10))
    old, new = RowTables([spec], range(BUCKETS)), RowTables([spec], range(BUCKETS))
    old.update(ones(1), version=15, epoch=0)
    old.update(ones(2), version=20, epoch=0)
    new.take(old.release(range(BUCKETS), 20, 0), 2)
    both, out = np.array([1, 2], np.uint64), np.empty((2, 3), np.float32)
    assert new.read(0, both, 2, 0, out) == new.read(0, both, 7, 0, out) == 2
    assert new.read(0, both, 8, 0, out) == new.read(0, both, 12, 0, out) == 1
    assert new.read(0, both, 13, 0, out) == 0
    assert new.counts(0).rows == 2
    (again,) = (chunk for chunk in new.release(range(BUCKETS), 12, 0).chunks if not chunk.is_waiting)
    assert (again.ids.tolist(), again.versions.tolist()) == ([2], [20])


def ones(*ids: int) -> list[TableGradients]:
    return [TableGradients(0, np.array(ids, np.uint64), np.ones((len(ids), 3), np.float32))]


IDS_OF_FEED = np.arange(50, dtype=np.uint64)


def all_rows(cut: Any) -> set[int]:
    found: set[int] = set()
    while (chunk := cut.next_rows()) is not None:
        found.update(chunk.ids.tolist())
    return found


def test_a_cut_contains_the_rows_of_buckets_released_since_it_began() -> None:
    store = RowTables(SPECS[:1], range(BUCKETS))
    store.update(ones(*range(50)), version=1, epoch=0)
    cut = store.begin_cut(1, 0, file="a")
    store.release(range(512), 1, 0)
    assert all_rows(cut) == set(range(50))
    assert 0 < len(all_rows(store.begin_cut(1, 0))) < 50


def test_buckets_cannot_move_while_a_round_is_open() -> None:
    store = RowTables(SPECS[:1], range(BUCKETS))
    store.update(ones(1, 2), version=1, epoch=0)
    store.add(ones(1), Batch(0, 0, 0), 1.0, is_first=True)
    with pytest.raises(BusyError, match="while a round is open"):
        store.release(range(BUCKETS), 1, 0)
    store.update_round(version=2, epoch=0)
    assert len(store.release(range(BUCKETS), 2, 0).chunks) == 2


@pytest.mark.parametrize("count", [10, 20_000])
def test_a_bucket_is_found_by_its_range_of_the_index(count: int) -> None:
    """With fewer segments than buckets, and with more."""
    store = RowTables(SPECS[:1], range(BUCKETS))
    ids = np.arange(count, dtype=np.uint64)
    for start in range(0, count, 4096):
        store.update(ones(*range(start, min(start + 4096, count))), version=1, epoch=0)
    places = buckets_of(ids, SPECS[0].salt)
    for bucket in (int(places[0]), 0, 1023):
        (rows, waiting) = store.release([bucket], 1, 0).chunks
        assert sorted(rows.ids.tolist()) == ids[places == bucket].tolist()
        assert not waiting.ids.size


def test_followers_receive_buckets_that_have_arrived_completely_and_once() -> None:
    """Rows that another pserver has changed are not marked as changed here."""
    source, target = RowTables(SPECS[:1], range(512)), RowTables(SPECS[:1], range(512, BUCKETS))
    places = buckets_of(IDS_OF_FEED, SPECS[0].salt)
    lower, upper = IDS_OF_FEED[places < 512].tolist(), IDS_OF_FEED[places >= 512].tolist()
    source.update(ones(*lower), version=1, epoch=0)
    target.update(ones(*upper), version=1, epoch=0)

    def followed(number: int, after: int | None) -> tuple[set[int], set[int]]:
        """Return the ids of the rows in an answer, and its complete buckets."""
        cut = target.begin_feed_cut(2, 0, number, after, 1 << 20)
        complete = set(target.buckets) if cut.is_base else set(cut.complete)
        return all_rows(cut), complete

    assert followed(1, None) == (set(upper), set(range(512, BUCKETS)))
    assert followed(2, 1) == (set(), set())
    target.take(source.release(range(512), 1, 0), 1)
    target.buckets = range(BUCKETS)
    assert followed(3, 2) == (set(lower), set(range(512)))
    assert followed(4, 3) == (set(), set())
    # A client that has an older state receives them, too.
    assert followed(5, 1) == (set(lower), set(range(512)))


def test_changes_after_a_kept_cut_have_a_higher_number() -> None:
    """Otherwise a follower that stops at the cut would never receive them."""
    store = RowTables(SPECS[:1], range(BUCKETS))
    store.update(ones(1, 2), version=1, epoch=0)
    store.begin_feed_cut(1, 0, 1, None, 1 << 20).drop()
    store.update(ones(2), version=2, epoch=0)
    kept = store.keep_cut(2, 0, 2)
    store.update(ones(3), version=3, epoch=0)
    again = store.begin_again(kept, range(1), 1)
    assert all_rows(again) == {2}
    # Another cut settles what has changed so far.
    store.begin_cut(3, 0, file="a").drop()
    assert all_rows(store.begin_feed_cut(3, 0, 3, 2, 1 << 20)) == {3}
