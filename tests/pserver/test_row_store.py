"""The rows of a span compared with the reference, and the contents of cuts."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flightedl.domain.exactly_once.batches import Batch
from flightedl.domain.model.initial import Normal, Uniform, Zeros
from flightedl.domain.model.optimizers import SGD, Adagrad, Adam, Ftrl, Momentum, Optimizer
from flightedl.domain.model.schedules import Constant, StepDecay
from flightedl.domain.tables.evict import Evict
from flightedl.domain.tables.optimizers import RowAdagrad, RowAdam
from flightedl.domain.tables.placement import BUCKETS, bucket_of
from flightedl.domain.tables.spec import TableSpec
from flightedl.errors import GradientError, MessageError, UnavailableError
from flightedl.kernels.row_records import MAX_CUTS
from flightedl.pserver.stores.incoming_rows import IncomingRows
from flightedl.rowstore import norms, threads
from flightedl.rowstore.layout import new_table
from flightedl.rowstore.memory import RowMemory, available_bytes, machine_bytes
from flightedl.rowstore.tables import RowChunk, RowCut, RowTables, TableGradients
from flightedl.wire.table_rows import Kind, Section, encode_sections
from tests.support.reference_table import ReferenceTable

SPEC = TableSpec("t", 2, SGD(1.0))
#: Ids of the tests: from a few buckets, the highest, and some in one line of the index.
IDS = [
    *(row_id for row_id in range(14_000) if bucket_of(row_id, SPEC.salt) in {1, 500, 1023}),
    *(2**64 - 1, 2**63, 0xDEADBEEF),
]
EVICTIONS = [
    None,
    Evict(unused_versions=3),
    Evict(unused_epochs=1),
    Evict(max_rows=3 * BUCKETS),
    Evict(max_rows=4 * BUCKETS, unused_versions=4, unused_epochs=2),
    Evict(norm_below=1.5),
]


def ids(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.uint64)


def ones(count: int, dim: int = 2) -> np.ndarray:
    return np.ones((count, dim), np.float32)


def push(store: RowTables, version: int, *numbers: int, epoch: int = 0) -> None:
    gradients = ones(len(numbers), store.specs[0].dim)
    store.update([TableGradients(0, ids(*numbers), gradients)], version=version, epoch=epoch)


def cut_of(store: RowTables, version: int, epoch: int = 0, *, is_base: bool = True) -> RowCut:
    """Return a base, or an increment on the previous cut."""
    newest = store._changes._newest
    file = str(1 + int(newest or 0))
    return store.begin_cut(version, epoch, file=file, after="" if is_base else newest)


def content(store: RowTables, version: int, epoch: int = 0, *, is_base: bool = True) -> dict[int, list[float]]:
    return values_of(chunks_of(cut_of(store, version, epoch, is_base=is_base)))


def chunks_of(cut: Any, max_bytes: int = 1 << 22) -> list[RowChunk]:
    found: list[RowChunk] = []
    while (chunk := cut.next_rows(max_bytes)) is not None:
        found.append(chunk)
    return found


def values_of(chunks: Sequence[RowChunk]) -> dict[int, list[float]]:
    return {
        key: row
        for chunk in chunks
        if not chunk.is_waiting
        for key, row in zip(chunk.ids.tolist(), chunk.values.tolist(), strict=True)
    }


STEPS = st.lists(
    st.tuples(
        st.lists(st.sampled_from(IDS), unique=True, max_size=12),
        st.sampled_from([0, 0, 0, 1]),
        st.sampled_from(["push", "push", "repeated", "held", "round", "empty", "cut", "cut", "given up", "restore"]),
    ),
    max_size=25,
)


class Pair:
    """A store and the reference, which receive the same calls."""

    def __init__(self, spec: TableSpec) -> None:
        self.spec = spec
        self.store = RowTables([spec], range(1024))
        self.reference = ReferenceTable(spec)
        self.version = self.epoch = 0
        self.random = np.random.default_rng(0)
        #: Base and increments.
        self.chain: list[tuple[list[RowChunk], Any]] = []
        #: Failed cuts, the newest successful one, and the rows removed since then.
        self.given_up = 0
        self.newest = ""
        self.removed: list[int] = []

    def push(self, numbers: Sequence[int], lead: int = 0) -> None:
        """Push a batch whose epoch differs by ``lead`` from the one by which rows expire."""
        self.version += 1
        gradients = self.random.normal(size=(len(numbers), self.spec.dim)).astype(np.float32)
        given: dict[str, Any] = {
            "version": self.version,
            "epoch": max(0, self.epoch + lead),
            "clock": self.epoch,
            "scale": 0.5,
            "rate_factor": 0.7,
        }
        self.reference.update(dict(zip(numbers, gradients.tolist(), strict=True)), **given)
        self.store.update([TableGradients(0, ids(*numbers), gradients)], **given)

    def cut(self, *, is_given_up: bool = False) -> None:
        """Make a cut. The next one is an increment on it, unless it is given up."""
        newest = str(len(self.chain) + self.given_up)
        cut = self.store.begin_cut(
            self.version, self.epoch, file=str(1 + int(newest)), after=self.newest, is_base=not self.chain
        )
        removed = self.reference.remove_small(self.version, self.epoch)
        self.removed = sorted({*self.removed, *removed})
        assert sorted(cut.tables[0].removed.tolist()) == (self.removed if self.chain else [])
        if is_given_up:
            self.given_up += 1
            if len(self.chain) % 2:
                chunks_of(cut, 200)
            else:
                cut.next_rows(200)
            cut.drop()
            return
        self.newest, self.removed = str(1 + int(newest)), []
        self.chain.append((chunks_of(cut, 200), cut))

    def restore(self) -> None:
        """Continue with the contents of a base and its increments."""
        self.cut()
        self.store = RowTables([self.spec], range(1024))
        for chunks, cut in self.chain:
            self.store.restore_removed(0, cut.tables[0].removed, np.ones(1024, np.bool_))
            for chunk in chunks:
                self.store.restore(chunk)
        newest = self.chain[-1][1].tables[0]
        self.store.restore_table(0, newest)
        self.chain.clear()
        self.newest = ""

    def check(self) -> None:
        live = self.reference.live(self.version, self.epoch)
        out = np.empty((len(IDS), self.spec.dim), np.float32)
        found = self.store.read(0, ids(*IDS), self.version, self.epoch, out)
        assert found == len(live)
        for number, row in zip(IDS, out, strict=True):
            expected = live[number].values if number in live else self.reference.first_values(number)
            np.testing.assert_allclose(row, expected, rtol=2e-4, atol=1e-5)


@settings(deadline=None, max_examples=40)
@given(steps=STEPS, evict=st.sampled_from(EVICTIONS), admit_after=st.sampled_from([1, 1, 3]))
def test_a_store_behaves_like_the_reference(
    steps: list[tuple[list[int], int, str]], evict: Evict | None, admit_after: int
) -> None:
    pair = Pair(TableSpec("t", 3, RowAdagrad(lr=0.5), Uniform(1.0), evict=evict, admit_after=admit_after))
    for numbers, more, what in steps:
        pair.epoch += more
        if what in {"push", "round", "held", "repeated"}:
            pair.push(numbers, {"held": 1, "repeated": -1}.get(what, 0))
        elif what == "empty":
            pair.version += 1
        elif what in {"cut", "given up"}:
            pair.cut(is_given_up=what == "given up")
        else:
            pair.restore()
        pair.check()


@pytest.mark.parametrize(
    "optimizer",
    [
        SGD(StepDecay(0.5, 0.5, 2), weight_decay=0.1, clip_value=0.3),
        Momentum(0.1),
        Momentum(0.1, nesterov=True),
        Adagrad(0.1, initial_accumulator=0.1),
        RowAdagrad(0.1, weight_decay=0.1),
        Adam(0.1),
        RowAdam(0.1),
        Ftrl(0.1, l1=0.01, l2=0.1),
        Ftrl(0.0),
    ],
    ids=lambda optimizer: type(optimizer).__name__,
)
def test_every_optimizer_matches_the_reference(optimizer: Optimizer) -> None:
    pair = Pair(TableSpec("t", 5, optimizer, Normal(1.0, 0.5)))
    for count in (3, 20, 43, 7, 43):
        pair.push(IDS[:count])
    pair.check()


@pytest.mark.parametrize("init", [Zeros(), Constant(-0.5), Uniform(0.1), Normal(2.0, 1.0)])
@pytest.mark.parametrize("dim", [1, 4])
def test_first_values_match_the_reference(init: Any, dim: int) -> None:
    spec = TableSpec("t", dim, SGD(0.1), init, seed=9)
    out = np.empty((len(IDS), dim), np.float32)
    assert RowTables([spec], range(1024)).read(0, ids(*IDS), 0, 0, out) == 0
    expected = [init.first_values(spec.key, number, dim) for number in IDS]
    np.testing.assert_array_equal(out, np.array(expected, np.float32))


def test_unknown_ids_read_as_zeros_if_the_table_says_so() -> None:
    out = ones(2)
    for unknown in ("zero", "error"):
        store = RowTables([TableSpec("t", 2, SGD(1.0), Uniform(1.0), unknown=unknown)], range(1024))
        push(store, 1, 5)
        assert store.read(0, ids(4, 5), 1, 0, out) == 1
        assert out[0].tolist() == [0, 0]
        assert out[1].any()


def test_a_round_is_applied_once_and_its_cut_restores_into_two_stores() -> None:
    store = RowTables([SPEC], range(1024))
    store.add([TableGradients(0, ids(9), ones(1))], Batch(0, 0, 0), 2.0, is_first=True)
    store.add([TableGradients(0, ids(1, 2), ones(2))], Batch(0, 0, 0), 2.0, is_first=True)
    store.add([TableGradients(0, ids(2, 3), ones(2))], Batch(0, 0, 1), 1.0, is_first=False)
    store.update_round(version=1, epoch=0, scale=0.5)
    store.update_round(version=2, epoch=0)
    cut = store.begin_cut(2, 0, is_base=True)
    halves = [RowTables([SPEC], range(512)), RowTables([SPEC], range(512, 1024))]
    for chunk in chunks_of(cut):
        for half in halves:
            half.restore(chunk)
    assert sum(half.counts(0).rows for half in halves) == 3
    out = np.empty((4, 2), np.float32)
    assert store.read(0, ids(1, 2, 3, 4), 1, 0, out) == 3
    assert out[:, 0].tolist() == [-1, -1.5, -0.5, 0]


def test_a_deterministic_round_has_the_same_bits_in_any_order_of_arrival() -> None:
    found = []
    parts = [(Batch(0, 0, n), np.full((1, 2), value, np.float32)) for n, value in enumerate((1e8, 1.0, -1e8))]
    for order in (parts, parts[::-1]):
        store = RowTables([SPEC], range(1024))
        for place, (batch, gradients) in enumerate(order):
            store.add([TableGradients(0, ids(1), gradients)], batch, 1.0, is_first=not place)
        store.update_round(version=1, epoch=0, scale={0: 1.0}, is_ordered=True)
        found.append(content(store, 1))
    assert found[0] == found[1]


@settings(deadline=None, max_examples=30)
@given(
    before=st.lists(st.lists(st.sampled_from(IDS), unique=True, min_size=1), min_size=1, max_size=3),
    after=st.lists(st.tuples(st.lists(st.sampled_from(IDS), unique=True), st.integers(0, 3)), max_size=6),
    is_base=st.booleans(),
    evict=st.sampled_from([None, Evict(unused_versions=1), Evict(max_rows=2 * BUCKETS)]),
)
def test_a_cut_contains_the_rows_at_its_start(
    before: list[list[int]], after: list[tuple[list[int], int]], is_base: bool, evict: Evict | None
) -> None:
    spec = TableSpec("t", 2, SGD(1.0), evict=evict)
    store, twin = RowTables([spec], range(1024)), RowTables([spec], range(1024))
    for version, numbers in enumerate(before, 1):
        for one in (store, twin):
            push(one, version, *numbers)
            if version == 1:
                first = cut_of(one, 1)
                if not is_base:
                    chunks_of(first)
    version = len(before)
    expected = content(twin, version, is_base=is_base)
    cut = cut_of(store, version, is_base=is_base)
    found: list[RowChunk] = []
    for numbers, chunks in after:
        version += 1
        push(store, version, *numbers)
        found += [chunk for _ in range(chunks) if (chunk := cut.next_rows(40)) is not None]
    found += chunks_of(cut, 40)
    assert values_of(found) == expected
    assert sum(chunk.ids.size for chunk in found) == len(expected), "a row occurs twice"


@settings(deadline=None, max_examples=40)
@given(
    before=st.lists(st.lists(st.sampled_from(IDS), unique=True, min_size=1), min_size=1, max_size=3),
    after=st.lists(
        st.tuples(st.lists(st.sampled_from(IDS), unique=True), st.sampled_from(["", "read", "cut"]), st.integers(0, 3)),
        max_size=6,
    ),
    evict=st.sampled_from([None, Evict(unused_versions=1), Evict(max_rows=2 * BUCKETS)]),
)
def test_a_kept_cut_is_read_any_number_of_times(
    before: list[list[int]], after: list[tuple[list[int], str, int]], evict: Evict | None
) -> None:
    """Each reader gets the rows at the start of the cut, whatever changes before it begins and while it reads."""
    spec = TableSpec("t", 2, SGD(1.0), evict=evict)
    store, twin = RowTables([spec], range(1024)), RowTables([spec], range(1024))
    for version, numbers in enumerate(before, 1):
        push(store, version, *numbers)
        push(twin, version, *numbers)
    version = len(before)
    expected = content(twin, version)
    kept = store.keep_cut(version, 0)
    readers: list[tuple[RowCut, list[RowChunk]]] = []
    for numbers, what, count in after:
        version += 1
        push(store, version, *numbers)
        if what == "read" and len(readers) < MAX_CUTS - 2:
            readers.append((store.begin_again(kept, [0]), []))
        elif what == "cut":
            store.begin_cut(version, 0, file=f"f{version}").drop()
        for cut, found in readers:
            found += [chunk for _ in range(count) if (chunk := cut.next_rows(40)) is not None]
    readers.append((store.begin_again(kept, [0]), []))
    kept.drop()
    push(store, version + 1, *IDS)
    for cut, found in readers:
        every = [*found, *chunks_of(cut, 40)]
        assert values_of(every) == expected
        assert sum(chunk.ids.size for chunk in every) == len(expected), "a row occurs twice"
    with pytest.raises(UnavailableError, match="no longer kept"):
        store.begin_again(kept, [0])


def test_an_increment_includes_the_changes_of_a_dropped_increment() -> None:
    store = RowTables([SPEC], range(1024))
    push(store, 1, *range(20))
    assert len(content(store, 1)) == 20
    push(store, 2, 3, 50)
    assert content(store, 2, is_base=False) == {3: [-2, -2], 50: [-1, -1]}
    assert content(store, 2, is_base=False) == {}
    newest = store._changes._newest
    push(store, 3, 4)
    cut = store.begin_cut(3, 0, file="dropped", after=newest)
    assert not cut.is_base
    push(store, 4, 5)
    assert cut.next_rows() is not None
    cut.drop()
    assert cut.next_rows() is None
    assert sorted(values_of(chunks_of(store.begin_cut(4, 0, file="whole", after=newest)))) == [4, 5]
    push(store, 5, 6)
    assert sorted(values_of(chunks_of(store.begin_cut(5, 0, file="base", after=newest, is_base=True)))) == [
        *range(20),
        50,
    ]
    push(store, 6, 7)
    assert sorted(values_of(chunks_of(store.begin_cut(6, 0, file="more", after=newest)))) == [4, 5, 6, 7]
    cut = store.begin_cut(7, 0, file="unknown", after="whole")
    assert cut.is_base
    assert len(values_of(chunks_of(cut))) == 21


@pytest.mark.parametrize("words", range(3, 12))
def test_a_table_without_memory_has_an_index(words: int) -> None:
    table = new_table([words, -1, -1, -1, 2, 2], 0, *np.zeros((2, 4096), np.int64), is_counted_by_age=False)
    assert table.lines.size >= 2 * 64 * 8


def test_norms_are_checked_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norms, "TOGETHER", 64)
    monkeypatch.setattr(norms, "A_CUT", 100)
    store = RowTables([TableSpec("t", 2, SGD(1.0), evict=Evict(norm_below=1.5))], range(1024))
    push(store, 1, *range(1000))
    left = []
    for version in range(1, 10):
        chunks_of(cut_of(store, version))
        left.append(store.counts(0).rows)
    assert left == [872, 744, 616, 488, 360, 232, 104, 0, 0]
    push(store, 10, *range(10))
    push(store, 11, *range(5))
    chunks_of(cut_of(store, 11))
    assert sorted(content(store, 11)) == [0, 1, 2, 3, 4]


def test_a_row_removed_and_created_again_is_in_the_increment() -> None:
    spec = TableSpec("t", 2, SGD(1.0), evict=Evict(norm_below=0.5))
    store, other = RowTables([spec], range(1024)), RowTables([spec], range(1024))
    push(store, 1, 1, 2)
    base = store.begin_cut(1, 0, file="base")
    found = [(base, chunks_of(base))]
    store.update([TableGradients(0, ids(1), -ones(1))], version=2, epoch=0)
    chunks_of(store.begin_cut(2, 0, file="failed", after="base"))
    assert store.counts(0).rows == 1, "the row with a small norm was not evicted"
    push(store, 3, 1)
    cut = store.begin_cut(3, 0, file="increment", after="base")
    assert cut.tables[0].removed.tolist() == [1]
    found.append((cut, chunks_of(cut)))
    for one, chunks in found:
        other.restore_removed(0, one.tables[0].removed, np.ones(1024, np.bool_))
        for chunk in chunks:
            other.restore(chunk)
    assert content(other, 3) == {1: [-1, -1], 2: [-1, -1]}


def test_ids_waiting_for_admission_keep_their_counts_in_a_cut() -> None:
    spec = TableSpec("t", 2, SGD(1.0), admit_after=2)
    store, other = RowTables([spec], range(1024)), RowTables([spec], range(1024))
    push(store, 1, 1, 2)
    push(store, 2, 2)
    for chunk in chunks_of(store.begin_cut(2, 0, is_base=True)):
        other.restore(chunk)
    counts = other.counts(0)
    assert (counts.rows, counts.waiting) == (1, 1)
    push(other, 3, 1)
    assert sorted(content(other, 3)) == [1, 2]
    assert other.counts(0).waiting == 0


def test_a_sketch_never_admits_an_id_late() -> None:
    spec = TableSpec("t", 2, SGD(1.0), admit_after=3, admission="sketch", sketch_bytes=1 << 12)
    store = RowTables([spec], range(1024))
    for version in (1, 2):
        push(store, version, *range(100))
    assert store.counts(0).rows < 5
    cut = store.begin_cut(2, 0, is_base=True)
    other = RowTables([spec], range(1024))
    other.restore_table(0, cut.tables[0])
    for one in (store, other):
        push(one, 3, *range(100))
        assert one.counts(0).rows == 100


def test_the_index_grows_row_by_row() -> None:
    store = RowTables([TableSpec("t", 1, SGD(1.0), evict=Evict(unused_versions=1))], range(1024))
    numbers = np.random.default_rng(0).permutation(60_000).astype(np.uint64)
    out = np.empty((numbers.size, 1), np.float32)
    for version, some in enumerate(np.split(numbers, 3), 1):
        store.update([TableGradients(0, some, ones(some.size, 1))], version=version, epoch=0)
    assert store.read(0, numbers, 3, 0, out) == 40_000
    assert out.sum() == -40_000
    push(store, 4, *numbers[40_000:].tolist())
    counts = store.counts(0)
    assert (counts.rows, counts.created) == (20_000, 60_000)
    assert counts.evicted > 10_000, "expired rows were not swept"
    assert counts.size_bytes < 60_000 * 2 * 30


def test_a_full_store_rejects_new_rows_and_updates_existing_rows() -> None:
    store = RowTables([TableSpec("t", 16, SGD(1.0))], range(1024), RowMemory(1 << 20))
    for version in range(1, 31):
        push(store, version, *range(1000 * version, 1000 * version + 1000), 7)
    counts = store.counts(0)
    assert counts.refused + counts.rows == 30_001
    assert 5_000 < counts.rows < 15_000
    assert counts.size_bytes < 1.1 * (1 << 20)
    assert content(store, 30)[7] == [-30.0] * 16


def test_new_rows_are_rejected_when_the_machine_has_no_memory() -> None:
    left = [3 << 30]
    memory = RowMemory(available=lambda: left[0])
    store = RowTables([TableSpec("t", 16, SGD(1.0))], range(1024), memory)
    push(store, 1, *range(1000))
    assert store.counts(0).rows == 1000
    assert memory.taken_bytes == store.size_bytes
    left[0] = 1000
    memory.taken_bytes += 65 << 20
    push(store, 2, *range(1000, 1100), 7)
    counts = store.counts(0)
    assert (counts.rows, counts.refused) == (1000, 100)
    assert content(store, 2)[7] == [-2.0] * 16
    left[0] = 3 << 30
    push(store, 3, *range(1000, 1100))
    assert store.counts(0).rows == 1100


def test_restored_rows_are_not_limited() -> None:
    spec = TableSpec("t", 16, SGD(1.0))
    store, small = RowTables([spec], range(1024)), RowTables([spec], range(1024), RowMemory(1000))
    push(store, 1, *range(2000))
    for chunk in chunks_of(store.begin_cut(1, 0)):
        small.restore(chunk)
    push(small, 2, 1, 5000)
    counts = small.counts(0)
    assert (counts.rows, counts.refused) == (2000, 1)


def test_the_available_memory_is_known() -> None:
    assert 1 << 20 < available_bytes() <= machine_bytes()
    memory = RowMemory()
    assert 0 <= memory.room_bytes() < machine_bytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_threads_behave_like_one(dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The threads push existing rows and others, while a cut is read."""
    random = np.random.default_rng(0)
    steps = [random.choice(6000, 1000 + 7 * step, replace=False).astype(np.uint64) for step in range(6)]
    gradients = [random.standard_normal((len(ids), 4)).astype(np.float32) for ids in steps]
    found = []
    monkeypatch.setattr(threads, "available_cores", lambda: 2)
    threads._second.cache_clear()
    for split_at in (1 << 30, 200):
        monkeypatch.setattr(threads, "SPLIT_AT", split_at)
        assert threads.is_split(1000) == (split_at == 200)
        store = RowTables([TableSpec("t", 4, RowAdagrad(lr=0.1), init=Uniform(0.1), dtype=dtype)], range(BUCKETS))
        cut, chunks = None, []
        for number, (ids, values) in enumerate(zip(steps, gradients, strict=True)):
            push = [TableGradients(0, ids, values)]
            store.update(push, version=number + 1, epoch=0, seed=number)
            if number == 3:
                cut = store.begin_cut(number + 1, 0, is_base=True)
        assert cut is not None
        while (chunk := cut.next_rows()) is not None:
            chunks.append(chunk)
        ids = np.arange(6000, dtype=np.uint64)
        out = np.empty((6000, 4), np.float32)
        rows_found = store.read(0, ids, 6, 0, out)
        cut_rows = {
            int(row): values.tobytes() for chunk in chunks for row, values in zip(chunk.ids, chunk.values, strict=True)
        }
        found.append((rows_found, out.tobytes(), cut_rows))
    assert found[0] == found[1]
    assert 4000 > len(found[0][2]) > 1000


@pytest.mark.parametrize("which", [0, 1])
def test_an_error_of_one_thread_is_raised_after_the_other_has_ended(
    which: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the other thread would go on to change rows after the lock has been released."""
    monkeypatch.setattr(threads, "available_cores", lambda: 2)
    threads._second.cache_clear()
    ended: list[int] = []

    def fail() -> None:
        raise ZeroDivisionError

    def work() -> None:
        threading.Event().wait(0.05)
        ended.append(1)

    with pytest.raises(ZeroDivisionError):
        threads.side_by_side(*((fail, work) if which == 0 else (work, fail)))
    assert ended == [1]
    threads._second.cache_clear()


def test_tables_share_memory_but_not_rows() -> None:
    specs = [TableSpec(name, dim, SGD(1.0)) for name, dim in (("a", 16), ("b", 1))]
    store = RowTables(specs, range(1024), RowMemory(1 << 20))
    for version in range(1, 31):
        numbers = np.arange(1000 * version, 1000 * version + 1000, dtype=np.uint64)
        both = [TableGradients(table, numbers, ones(1000, specs[table].dim)) for table in (0, 1)]
        store.update(both, version=version, epoch=0, scale={0: 1.0, 1: 2.0})
    first, second = (store.counts(table) for table in (0, 1))
    assert first.refused
    assert second.refused
    assert store.size_bytes < 1.1 * (1 << 20)
    out = np.empty((1, 1), np.float32)
    assert store.read(1, ids(1000), 30, 0, out) == 1
    assert out[0, 0] == -2


def test_rows_are_evicted_beyond_max_bytes() -> None:
    spec = TableSpec("t", 16, SGD(1.0), evict=Evict(max_bytes=2 * BUCKETS * 19 * 4))
    store, reference = RowTables([spec], range(1024)), ReferenceTable(spec)
    for version in range(1, 9):
        push(store, version, *range(300 * version, 300 * version + 300))
        gradients = dict.fromkeys(range(300 * version, 300 * version + 300), [1.0] * 16)
        reference.update(gradients, version=version, epoch=0)
    assert sorted(content(store, 8)) == sorted(reference.live(8, 0))
    assert store.counts(0).rows == len(reference.live(8, 0)) < 8 * 300


def test_invalid_pushes_are_rejected() -> None:
    incoming, buckets = IncomingRows([SPEC]), range(512)

    def problem(numbers: np.ndarray, gradients: np.ndarray | None = None, table: int = 0) -> str:
        kind = Kind.WANTED if gradients is None else Kind.GRADIENTS
        try:
            received = incoming.pushed(encode_sections([Section(kind, table, numbers, gradients)]).data, buckets)
        except (MessageError, GradientError) as error:
            return str(error)
        found = received.wanted if gradients is None else received.gradients
        assert [(each.table, each.ids.tolist()) for each in found] == [(0, numbers.tolist())]
        return ""

    inside = [n for n in range(100) if not problem(ids(n))]
    assert 30 < len(inside) < 70
    assert problem(ids(*inside), ones(len(inside))) == ""
    assert problem(ids()) == ""
    assert "an id of table" in problem(ids(inside[0], inside[1], inside[0]), ones(3))
    for gradients in (None, ones(3)):
        assert "not belong to this pserver" in problem(ids(*range(100)), None if gradients is None else ones(100))
    assert "declare" in problem(ids(inside[0]), ones(1, 3))
    for wrong in (np.inf, -np.inf, np.nan):
        assert "NaN or infinity" in problem(ids(*inside[:2]), ones(2) * np.float32([1, wrong]))
    assert "no table number 1" in problem(ids(), table=1)
    with pytest.raises(MessageError, match="unexpected section of kind 1 for table 0"):
        incoming.asked(encode_sections([Section(Kind.GRADIENTS, 0, ids(inside[0]), ones(1))]).data, buckets)


def test_a_lookup_may_name_an_id_twice() -> None:
    store, incoming = RowTables([SPEC], range(1024)), IncomingRows([SPEC])
    push(store, 1, 1, 2)
    asked = incoming.asked(encode_sections([Section(Kind.WANTED, 0, ids(2, 3, 2, 1))]).data, range(1024))
    out = np.empty(4 * SPEC.dim, np.float32)
    assert store.read_all(asked.wanted, 1, 0, out).tolist() == [3]
    first, unknown, again, other = out.reshape(4, -1)
    assert np.array_equal(first, again)
    assert not np.array_equal(first, unknown)
    assert np.array_equal(first, other)


def test_gradients_may_be_unaligned() -> None:
    store = RowTables([SPEC], range(1024))
    raw = b"x" + ids(1, 2).tobytes() + ones(2).tobytes()
    numbers, gradients = np.frombuffer(raw, np.uint64, 2, 1), np.frombuffer(raw, np.float32, 4, 17).reshape(2, 2)
    store.update([TableGradients(0, numbers, gradients)], version=1, epoch=0)
    assert content(store, 1) == {1: [-1, -1], 2: [-1, -1]}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("dim", [2, 3])
def test_stochastic_rounding_is_reproducible_and_unbiased(dtype: Any, dim: int) -> None:
    spec = TableSpec("t", dim, SGD(1.0), Constant(1.0), dtype)
    numbers = np.arange(4000, dtype=np.uint64)
    small = np.full((4000, dim), -(2.0**-12), np.float32)
    found = []
    for seed in (1, 1, 2):
        store = RowTables([spec], range(1024))
        for version in (1, 2):
            push_ = [TableGradients(0, numbers, small)]
            store.update(push_, version=version, epoch=0, seed=seed * 100 + version)
        out = np.empty((4000, dim), np.float32)
        store.read(0, numbers, 2, 0, out)
        found.append(out)
    np.testing.assert_array_equal(found[0], found[1])
    assert (found[0] != found[2]).mean() > 0.02
    assert abs(found[0].astype(np.float64).mean() - 1 - 2 * 2.0**-12) < 2.0**-13


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rounding_to_nearest_loses_small_updates(dtype: Any) -> None:
    spec = TableSpec("t", 3, SGD(1.0), Constant(1.0), dtype, "nearest")
    store, other = RowTables([spec], range(1024)), RowTables([spec], range(1024))
    gradients = np.array([[-(2.0**-13), 1.0, -70_000.0], [1 - 2.0**-20, 1.0, 0.0]], np.float32)
    store.update([TableGradients(0, ids(1, 2), gradients)], version=1, epoch=0)
    for chunk in chunks_of(store.begin_cut(1, 0, is_base=True)):
        assert chunk.values.dtype == np.uint16
        other.restore(chunk)
    out = np.empty((2, 3), np.float32)
    assert other.read(0, ids(1, 2), 1, 0, out) == 2
    largest = 65504.0 if dtype == "float16" else 70144.0
    assert out.tolist() == [[1.0, 0.0, largest], [2.0**-20, 0.0, 1.0]]


@settings(deadline=None, max_examples=40)
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["push", "push", "cut", "file", "read", "read", "drop"]),
            st.lists(st.sampled_from(IDS), unique=True, max_size=12),
        ),
        max_size=40,
    )
)
def test_concurrent_cuts_each_contain_the_rows_at_their_start(steps: list[tuple[str, list[int]]]) -> None:
    spec = TableSpec("t", 2, SGD(1.0), admit_after=2, evict=Evict(unused_versions=6))
    store, reference = RowTables([spec], range(1024)), ReferenceTable(spec)
    version = files = 0
    reading: list[tuple[RowCut, dict[int, list[float]], dict[int, list[float]]]] = []
    for what, numbers in [*steps, *[("read", list[int]())] * 400]:
        if what == "push":
            version += 1
            push(store, version, *numbers)
            gradients = {key: [1.0, 1.0] for key in numbers}
            reference.update(gradients, version=version, epoch=0)
        elif what in {"cut", "file"} and len(reading) < MAX_CUTS:
            files += what == "file"
            cut = store.begin_cut(version, 0, file=str(files) if what == "file" else "", is_base=True)
            now = {key: list(row.values) for key, row in reference.live(version, 0).items()}
            reading.append((cut, now, {}))
        elif reading:
            cut, wanted, found = reading.pop(0)
            if what == "drop":
                cut.drop()
            elif (chunk := cut.next_rows(60)) is not None:
                found |= values_of([chunk])
                reading.append((cut, wanted, found))
            else:
                assert found == wanted
    assert not reading


def test_an_increment_includes_changes_before_a_cut_without_a_file() -> None:
    store = RowTables([SPEC], range(1024))
    push(store, 1, *range(20))
    content(store, 1)
    push(store, 2, 3)
    export = store.begin_cut(2, 0, is_base=True)
    push(store, 3, 5)
    assert sorted(content(store, 3, is_base=False)) == [3, 5]
    assert values_of(chunks_of(export))[5] == [-1, -1]


def test_the_number_of_concurrent_cuts_is_limited() -> None:
    store = RowTables([SPEC], range(1024))
    push(store, 1, *range(20))
    cuts = [store.begin_cut(1, 0, is_base=True) for _ in range(MAX_CUTS)]
    with pytest.raises(UnavailableError, match="try again later"):
        store.begin_cut(1, 0, is_base=True)
    cuts[3].drop()
    push(store, 2, 1)
    assert values_of(chunks_of(store.begin_cut(2, 0, is_base=True)))[1] == [-2, -2]
    assert values_of(chunks_of(cuts[4]))[1] == [-1, -1]


def test_a_cut_that_takes_the_place_of_an_earlier_one_leaves_later_ones_intact() -> None:
    store = RowTables([SPEC], range(1024))
    push(store, 1, *range(20))
    first, second = (store.begin_cut(1, 0, is_base=True) for _ in range(2))
    first.drop()
    third = store.begin_cut(1, 0, is_base=True)
    assert third.line < second.line
    push(store, 2, *range(20))
    former = {number: [-1, -1] for number in range(20)}
    assert values_of(chunks_of(second)) == former
    assert values_of(chunks_of(third)) == former


def test_a_cut_without_memory_for_changed_rows_is_lost_alone() -> None:
    store = RowTables([SPEC], range(1024))
    push(store, 1, *range(5000))
    bounded = store.begin_cut(1, 0, is_base=True, most_bytes=1 << 12)
    checkpoint = store.begin_cut(1, 0, file="1", is_base=True)
    push(store, 2, *range(5000))
    with pytest.raises(UnavailableError, match="memory"):
        bounded.next_rows()
    assert values_of(chunks_of(checkpoint)) == {number: [-1, -1] for number in range(5000)}
