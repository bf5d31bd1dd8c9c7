"""A base and increments are restored from files by other pservers, whatever was removed in between."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from flightedl.domain.model.initial import Uniform
from flightedl.domain.model.parameters import ParameterSpec
from flightedl.domain.model.sharding import ShardPlan, plan_for
from flightedl.domain.tables.evict import Evict
from flightedl.domain.tables.optimizers import RowAdam
from flightedl.domain.tables.placement import BUCKETS, bucket_of, buckets_of, salt_of
from flightedl.domain.tables.restoring import buckets_of_chain
from flightedl.domain.tables.spec import TableSpec
from flightedl.formats.row_batches import TABLE, StoredRows, StoredRowSpan
from flightedl.messages.control import OrderNumber, SnapshotRequest
from flightedl.pserver.stores.interface import distinct
from flightedl.pserver.stores.rows import RowStore
from flightedl.pserver.stores.stored_rows import CutRows
from flightedl.rowstore.tables import RowTables, TableGradients

#: Ids in three buckets.
IDS = np.array([one for one in range(9_000) if bucket_of(one, salt_of("t")) in {10, 500, 1000}][:14], np.uint64)
EVICTIONS = [
    Evict(norm_below=1.0),
    Evict(norm_below=1.0, unused_versions=3),
    Evict(norm_below=1.0, unused_epochs=1),
    Evict(max_rows=2 * BUCKETS, norm_below=0.5),
]
STEPS = st.lists(
    st.tuples(
        st.sets(st.sampled_from(IDS.tolist())),
        st.sampled_from([-1.0, -0.5, 0.5, 1.0]),
        st.sampled_from([0, 0, 0, 1]),
        st.sampled_from(["push", "push", "cut", "given up", "unread"]),
    ),
    min_size=3,
    max_size=20,
)


class Rows:
    """The rows of all pservers, which receive the same pushes."""

    def __init__(self, spec: TableSpec, count: int) -> None:
        self.spec = spec
        self.plan: ShardPlan = plan_for([ParameterSpec("w", (10,))], count, 1, [spec])
        self.stores = [RowStore(self.plan, index, 0) for index in range(count)]
        self.spans = [span for store in self.stores for span in distinct(store.spans)]

    def push(self, ids: set[int], gradient: float, version: int, epoch: int) -> None:
        for span in self.spans:
            span.epoch = epoch
            own = np.array(sorted(ids), np.uint64)
            own = own[np.isin(buckets_of(own, self.spec.salt), span.buckets)]
            gradients = np.full((own.size, 2), gradient, np.float32)
            push = [TableGradients(0, own, gradients)]
            span.rows.update(push, version=version, epoch=epoch)

    def read(self, version: int, epoch: int) -> dict[int, list[float]]:
        found = {}
        for span in self.spans:
            for row_id in IDS:
                one, out = np.array([row_id], np.uint64), np.empty((1, 2), np.float32)
                if bucket_of(int(row_id), self.spec.salt) in span.buckets and span.rows.read(
                    0, one, version, epoch, out
                ):
                    found[int(row_id)] = out[0].tolist()
        return found


@settings(deadline=None, max_examples=25)
@given(
    steps=STEPS,
    evict=st.sampled_from(EVICTIONS),
    admit_after=st.sampled_from([1, 2]),
    counts=st.sampled_from([(1, 1), (1, 2), (2, 1), (3, 2)]),
)
def test_restored_rows_behave_like_the_original_rows(
    steps: list[tuple[set[int], float, int, str]], evict: Evict, admit_after: int, counts: tuple[int, int]
) -> None:
    spec = TableSpec("t", 2, RowAdam(lr=0.4), Uniform(1.0), evict=evict, admit_after=admit_after)
    old, new = Rows(spec, counts[0]), Rows(spec, counts[1])
    chains = chains_of(old, steps)
    if not chains[0]:
        return
    restore(new, chains)
    # What came after the last cut, once more.
    version, epoch = chains[0][-1][0].version, chains[0][-1][0].epoch
    later = steps[version:]
    for ids, gradient, more, _ in later:
        version, epoch = version + 1, epoch + more
        new.push(ids, gradient, version, epoch)
    # Else later cuts have removed rows.
    if all(what == "push" for *_, what in later):
        assert new.read(version, epoch) == old.read(version, epoch)


Chain = list[tuple[StoredRowSpan, list[StoredRows]]]


def chains_of(old: Rows, steps: list[tuple[set[int], float, int, str]]) -> list[Chain]:
    """Return the contents of the files of all successful cuts, by span."""
    chains: list[Chain] = [[] for _ in old.spans]
    newest, epoch = "", 0
    for version, (ids, gradient, more, what) in enumerate(steps, 1):
        epoch += more
        old.push(ids, gradient, version, epoch)
        if what == "push":
            continue
        command = SnapshotRequest(
            OrderNumber(1, version, 1), None, f"c-{version}", newest, is_base=False, plan_hash="p"
        )
        for span, chain in zip(old.spans, chains, strict=True):
            cut = CutRows(span, version, version, command, is_base=not newest)
            stored: list[Any] = [] if what == "unread" else list(cut.stored())
            cut.drop()
            if what == "cut":
                chain.append((cut.span, stored))
        if what == "cut":
            newest = command.name
    return chains


def restore(new: Rows, chains: list[Chain]) -> None:
    for store in new.stores:
        store.begin_restore()
        for chain in chains:
            files = [(saved.numbers, saved.complete) for saved, _ in chain]
            for buckets, (saved, stored) in zip(buckets_of_chain(files), chain, strict=True):
                store.restore(buckets)
                if buckets.is_newest:
                    store.restore(saved)
                for rows in stored:
                    store.restore(rows)
        store.finish_restore()


def test_a_file_contains_the_version_offsets_of_buckets() -> None:
    spec = TableSpec("t", 2, RowAdam(lr=0.4), evict=Evict(unused_versions=10))
    elsewhere, old, new = RowTables([spec], range(BUCKETS)), Rows(spec, 1), Rows(spec, 2)
    for version, row_id in ((15, IDS[:1]), (20, IDS[1:2])):
        push = [TableGradients(0, row_id, np.ones((1, 2), np.float32))]
        elsewhere.update(push, version=version, epoch=0)
    (span,) = old.spans
    span.rows.take(elsewhere.release(range(BUCKETS), 20, 0), 2)
    command = SnapshotRequest(OrderNumber(1, 1, 1), None, "c", "", is_base=True, plan_hash="p")
    cut = CutRows(span, 2, 2, command, is_base=True)
    restore(new, [[(cut.span, list(cut.stored()))]])
    for version in (2, 7, 8, 12, 13):
        assert new.read(version, 0) == old.read(version, 0)
    assert (len(new.read(7, 0)), len(new.read(8, 0)), len(new.read(13, 0))) == (2, 1, 0)


def test_a_file_with_limits_by_table_reports_its_evictions() -> None:
    spec = TableSpec("t", 2, RowAdam(lr=0.4), evict=Evict(max_rows=4 * BUCKETS))
    old, new = Rows(spec, 1), Rows(spec, 1)
    for version, row_id in enumerate(IDS[:4].tolist(), 1):
        old.push({row_id}, 1.0, version, 0)
    command = SnapshotRequest(OrderNumber(1, 1, 1), None, "c", "", is_base=True, plan_hash="p")
    cut = CutRows(old.spans[0], 4, 4, command, is_base=True)
    stored = [
        replace(rows, updates=rows.updates[:0], oldest=3) if rows.kind == TABLE else rows for rows in cut.stored()
    ]
    restore(new, [[(cut.span, stored)]])
    assert sorted(new.read(4, 0)) == sorted(IDS[2:4].tolist())


def test_counters_that_are_not_by_bucket_are_ignored() -> None:
    spec = TableSpec("t", 2, RowAdam(lr=0.4), admit_after=2, admission="sketch")
    old, new = Rows(spec, 1), Rows(spec, 2)
    old.push(set(IDS.tolist()), 1.0, 1, 0)
    cut = CutRows(old.spans[0], 1, 1, SnapshotRequest(OrderNumber(1, 1, 1), None, "c", "", plan_hash="p"), is_base=True)
    (stored,) = cut.stored()
    for rows, count in ((stored, len(IDS)), (replace(stored, epochs=stored.epochs[:0]), 0)):
        restore(new, [[(cut.span, [rows])]])
        new.push(set(IDS.tolist()), 1.0, 2, 0)
        assert len(new.read(2, 0)) == count
