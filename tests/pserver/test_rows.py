"""The rows of one pserver: pushed, looked up, saved, and restored by other pservers."""

from __future__ import annotations

import contextlib
import itertools
import threading
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flightedl.adapters.clock import SystemClock
from flightedl.adapters.storage import FsspecFiles
from flightedl.client.tables.requests import DistinctIds
from flightedl.client.tables.traffic import Lookup, RowMessages
from flightedl.domain.checkpoint.chains import Chains, Offer
from flightedl.domain.checkpoint.manifest import Manifest, ShardFile, manifest_name
from flightedl.domain.consistency.modes import Async, Mode, Sync
from flightedl.domain.model.initial import Uniform
from flightedl.domain.model.optimizers import SGD, Ftrl, Momentum
from flightedl.domain.model.parameters import ParameterSpec
from flightedl.domain.model.schedules import Piecewise
from flightedl.domain.model.sharding import ShardPlan, plan_for
from flightedl.domain.tables.evict import Evict
from flightedl.domain.tables.placement import buckets_of
from flightedl.domain.tables.spec import TableSpec
from flightedl.errors import BusyError, GradientError, MessageError, UnavailableError, UsageError
from flightedl.formats.checkpoint_files import found_checkpoints
from flightedl.formats.stored_tables import stored_rows
from flightedl.kernels import compiled, compiled_rows
from flightedl.kernels.compiled_rows import distinct_kernels
from flightedl.kernels.half_precision import float32_of
from flightedl.messages.base import encode
from flightedl.messages.control import OrderNumber, SnapshotReply, SnapshotRequest, ViewMember, ViewRequest
from flightedl.messages.declarations import DeclaredModel, JobDeclaration, ModelDeclaration, Placement
from flightedl.messages.parameters import BatchIdentity, Outcome, PushHeader
from flightedl.pserver.cuts.copier import SnapshotCopier
from flightedl.pserver.cuts.snapshots import Snapshots
from flightedl.pserver.restoring import load_newest
from flightedl.pserver.shard import Shard
from flightedl.pserver.stores.building import kernels_of
from flightedl.pserver.stores.first_rows import load_first_rows
from flightedl.pserver.stores.interface import Pushed, distinct
from flightedl.rowstore.memory import RowMemory
from flightedl.rowstore.tables import MAX_CUTS, RowTables, TableGradients
from flightedl.wire.parts import ReceivedBlocks
from flightedl.wire.table_rows import Kind, Section, decode_sections, encode_sections
from tests.support.contracts.coordinator import eventually
from tests.support.memory import MemoryStorage

SPECS = [ParameterSpec("w", (100,))]
TABLES = [
    TableSpec("plain", 2, SGD(lr=1.0)),
    TableSpec("half", 3, Momentum(lr=1.0, momentum=0.5), dtype="bfloat16", rounding="nearest"),
    TableSpec("late", 1, SGD(lr=1.0), admit_after=2, evict=Evict(unused_versions=50)),
]
IDS = np.arange(300, dtype=np.uint64)
DIMS = [table.dim for table in TABLES]


class Pserver:
    """A shard, and a member that pushes the same gradient to all tables."""

    def __init__(self, storage: MemoryStorage, mode: Mode, index: int = 0, count: int = 1) -> None:
        self.plan = plan_for(SPECS, count, 1, TABLES)
        self.index, self.storage = index, storage
        self.shard = Shard(self.plan, index, SGD(lr=1.0), mode, on_lost=pytest.fail)
        self.snapshots = Snapshots(self.shard.copying, storage, "j", index, count, SystemClock())
        self.view(1, 0)

    def view(self, serial: int, first_round: int) -> None:
        """Apply a view with the only member."""
        member = ViewMember(trainer="t", generation=1, member=serial, first_round=first_round)
        self.shard.set_members(ViewRequest(plan_hash="p", master_generation=1, serial=serial, members=[member]))
        self.member = serial

    def mine(self, table: int) -> np.ndarray:
        """Return the ids that belong to this pserver."""
        return IDS[self.plan.bucket_pservers[buckets_of(IDS, TABLES[table].salt)] == self.index]

    def push(self, batch: int, base: int = 0, wanted: bool = False, every: int = 1) -> list[Pushed]:
        """Push to the ids that are multiples of ``every``."""
        sections = [
            Section(Kind.GRADIENTS, table, mine, -np.ones((len(mine), dim), np.float32))
            for table, dim in enumerate(DIMS)
            for mine in (self.mine(table)[self.mine(table) % every == 0],)
        ]
        if wanted:
            sections += [Section(Kind.WANTED, 0, self.mine(0)[::2])]
        return self.push_sections(batch, base, sections)

    def push_sections(self, batch: int, base: int, sections: list[Section]) -> list[Pushed]:
        header = PushHeader(
            trainer="t",
            generation=1,
            plan_hash=self.plan.hash,
            member=self.member,
            identity=BatchIdentity(epoch=0, task=0, batch=batch, batch_count=100),
            weight=1.0,
            rows=1024,
        )
        self.message = bytearray(encode_sections(sections).tobytes())
        data = memoryview(self.message)
        return self.shard.push(header, [ReceivedBlocks(self.plan.buckets_of(self.index), base, 0, data)])

    def read(self, table: int) -> np.ndarray:
        """Return the rows of this pserver's ids from all spans of buckets."""
        rows = RowMessages(self.plan, {}, lookup := Lookup(self.plan, {table: DistinctIds(IDS)}))
        asked = rows.asked(self.index)
        assert asked is not None
        wanted = self.shard.lookup(ReceivedBlocks(self.plan.buckets_of(self.index), 0, 0, memoryview(asked)))
        pieces, rest = self.shard.read(wanted, 0)
        assert not rest
        for piece in pieces:
            rows.take(self.index, piece.blocks, piece.version, memoryview(piece.values))
        assert self.index not in lookup.missing()
        return lookup.rows(table)[np.isin(IDS, self.mine(table))]

    def checkpoint(self, number: int, offer: Offer | None = None) -> ShardFile:
        name, order = f"c-{number}/shard-{self.index}.arrow", OrderNumber(1, number, 1)
        more = () if offer is None else (offer.after, offer.is_base)
        self.snapshots.order(SnapshotRequest(order, None, name, *more, plan_hash="p"))

        def file() -> ShardFile | None:
            progress = self.snapshots.progress
            assert progress is not None
            assert progress.state != "failed", progress
            return None if progress.file is None else ShardFile.of(self.index, 10 + self.index, progress.file)

        return eventually(file)

    def restore(self) -> int | None:
        found = load_newest(self.storage, "j", SPECS, self.plan, self.index, self.shard)
        if found.applied is not None:
            self.shard.restored(found.applied)
            self.view(2, 1)
        return found.number

    def check(self) -> None:
        self.shard._protocol.check()


def manifest_of(
    number: int, files: Sequence[ShardFile], plan: ShardPlan, placement: Placement | None = None
) -> Manifest:
    """Return the manifest of a checkpoint whose parameters were cut for one pserver."""
    declared = ModelDeclaration(parameters=[], optimizer={}, mode={}, tables=[each.to_json() for each in plan.tables])
    model = DeclaredModel(declaration=declared, pservers=len(files), plan_hash=plan.hash, placement=placement)
    return Manifest(
        job="j",
        number=number,
        plan_hash=plan.hash,
        pserver_count=len(files),
        cut_for=1,
        round=None,
        created_s=0.0,
        shards=tuple(files),
        declaration=msgspec.Raw(encode(JobDeclaration(model=model))),
    )


def publish(storage: MemoryStorage, number: int, *files: ShardFile) -> None:
    manifest = manifest_of(number, files, plan_for(SPECS, len(files), 1, TABLES))
    storage.publish(manifest_name(number), [manifest.encode()])


def expected(pushes: int) -> list[np.ndarray]:
    """Return a row of each table after ``pushes`` pushes of minus one."""
    momentum = [0.0, 1.0, 2.5, 4.25][pushes]
    return [np.full(2, pushes), np.full(3, momentum), np.full(1, max(0, pushes - 1))]


def require(pserver: Pserver, pushes: int) -> None:
    for table, row in enumerate(expected(pushes)):
        found = pserver.read(table)
        assert len(found) == len(pserver.mine(table))
        assert (found == row).all()


@pytest.mark.parametrize("mode", [Async(), Sync(reduce="sum"), Sync()], ids=["async", "sum", "mean"])
def test_rows_are_restored_with_slots_and_counts_and_training_continues(mode: Mode) -> None:
    storage = MemoryStorage()
    old, new = Pserver(storage, mode), Pserver(storage, mode)
    old.push(0)
    publish(storage, 1, old.checkpoint(1))
    old.push(1, base=1)
    require(old, 2)
    assert new.restore() == 1
    require(new, 1)
    assert [one.piece.outcome for one in new.push(0, base=1)] == [Outcome.ALREADY_APPLIED]
    base = 2 if isinstance(mode, Sync) else 1
    assert [one.piece.outcome for one in new.push(1, base=base)] == [Outcome.ACCEPTED]
    require(new, 2)
    new.check()


def test_orders_that_fail_or_are_replaced_leave_nothing_behind() -> None:
    """The number of cuts is limited, so cuts that are never dropped would prevent all further checkpoints."""
    begun, going_on = threading.Event(), threading.Event()

    class Failing(MemoryStorage):
        def publish(self, name: str, parts: object) -> int:
            begun.set()
            assert going_on.wait(20.0)
            raise UnavailableError("no space left")

    pserver = Pserver(Failing(), Async())
    pserver.push(0)
    (rows,) = {span.rows for span in pserver.shard.rows.spans.values()}

    def order(number: int) -> SnapshotReply | None:
        name = f"c-{number}/s.arrow"
        pserver.snapshots.order(SnapshotRequest(OrderNumber(1, number, 1), None, name, plan_hash="p"))
        assert begun.wait(20.0)
        begun.clear()
        return pserver.snapshots.progress

    for number in range(1, 2 * MAX_CUTS, 2):
        going_on.clear()
        for newest in (number, number + 1):
            progress = order(newest)
            assert progress is not None
            assert (progress.order.number, progress.state) == (newest, "taken")
        going_on.set()
        eventually(lambda: pserver.snapshots.progress.state == "failed")  # type: ignore[union-attr]
        progress = pserver.snapshots.progress
        assert progress is not None
        assert (progress.order.number, progress.reason) == (number + 1, "no space left")
        eventually(lambda: all(cut.is_over for cut in rows._cuts.values()))
        assert not pserver.shard.copying.under_way


def test_two_readers_at_a_time_read_all_rows_without_a_checkpoint() -> None:
    pserver = Pserver(MemoryStorage(), Async())
    pserver.push(0)
    pserver.push(1, base=1)
    reading = pserver.shard.all_rows(0)
    first = next(reading)
    with contextlib.closing(pserver.shard.all_rows(1)) as other:
        next(other)
        with pytest.raises(BusyError, match="read by 2 others"):
            next(pserver.shard.all_rows(1))
    assert [one.piece.outcome for one in pserver.push(2, base=2)] == [Outcome.ACCEPTED]
    rows = [first, *reading]
    assert sorted(np.concatenate([some.ids for some in rows]).tolist()) == IDS.tolist()
    for pushes, some in [*((2, some) for some in rows), *((3, some) for some in pserver.shard.all_rows(0))]:
        assert (some.values == expected(pushes)[0]).all()
    for _ in range(2 * MAX_CUTS):
        broken_off = pserver.shard.all_rows(0)
        next(broken_off)
        broken_off.close()
    assert len(next(pserver.shard.all_rows(2)).ids) == IDS.size, "rows that wait for admission are exported"


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 2), (2, 1)])
def test_rows_with_different_histories_are_restored_on_another_number_of_pservers(before: int, after: int) -> None:
    storage = MemoryStorage()
    olds = [Pserver(storage, Async(), index, before) for index in range(before)]
    for old in olds:
        old.push(0)
    olds[0].push(1, base=1)
    publish(storage, 1, *(old.checkpoint(1) for old in olds))
    for index in range(after):
        new = Pserver(storage, Async(), index, after)
        assert new.restore() == 1
        versions = {new.shard._protocol.version(span.numbers.start) for span in distinct(new.shard.rows.spans)}
        assert versions <= {1, 2}
        assert len(distinct(new.shard.rows.spans)) == len(versions), "spans are not split by history"
        new.check()
        outcomes = {one.piece.outcome for one in new.push(1, base=1)}
        assert outcomes <= {Outcome.ACCEPTED, Outcome.ALREADY_APPLIED}
        require(new, 2)
        assert sum(counts.rows for counts in new.shard.rows.counts()) == sum(len(new.mine(t)) for t in range(3))


class Cluster:
    """Pservers whose checkpoints are chains."""

    def __init__(self, count: int) -> None:
        self.storage, self.chains = MemoryStorage(), Chains(8, None)
        self.pservers = [Pserver(self.storage, Async(), index, count) for index in range(count)]

    def push(self, batch: int, every: int = 1) -> None:
        for pserver in self.pservers:
            pserver.push(batch, base=batch, every=every)

    def checkpoint(self, number: int, *, is_published: bool = True) -> list[ShardFile]:
        files = []
        for pserver in self.pservers:
            offer = self.chains.offer(pserver.index, 10 + pserver.index, number, ())
            linked = self.chains.linked(pserver.checkpoint(number, offer), offer)
            assert linked is not None
            files.append(linked)
        if is_published:
            publish(self.storage, number, *files)
            self.chains.completed(number, files)
        return files

    def rows(self) -> list[dict[int, list[float]]]:
        """Return the rows of each table by id."""
        return rows_of(self.pservers)

    def restored(self, count: int) -> list[Pserver]:
        found = [Pserver(self.storage, Async(), index, count) for index in range(count)]
        self.numbers = {pserver.restore() for pserver in found}
        for pserver in found:
            pserver.check()
        return found


def rows_of(pservers: list[Pserver]) -> list[dict[int, list[float]]]:
    found: list[dict[int, list[float]]] = [{} for _ in TABLES]
    for pserver in pservers:
        for table, rows in enumerate(found):
            rows.update(zip(pserver.mine(table).tolist(), pserver.read(table).tolist(), strict=True))
    return found


@pytest.mark.parametrize(("before", "after"), [(2, 2), (1, 3), (2, 1)])
def test_a_chain_is_restored_even_if_an_increment_failed(before: int, after: int) -> None:
    cluster = Cluster(before)
    cluster.push(0)
    assert not any(file.links for file in cluster.checkpoint(1))
    cluster.push(1, every=7)
    base = cluster.rows()
    cluster.checkpoint(2, is_published=False)
    cluster.push(2, every=11)
    files = cluster.checkpoint(3)
    assert {tuple(link.number for link in file.links) for file in files} == {(1,)}
    assert rows_of(cluster.restored(after)) == cluster.rows() != base
    cluster.push(3, every=7)
    files = cluster.checkpoint(4)
    assert {tuple(link.number for link in file.links) for file in files} == {(1, 3)}
    assert max(file.row_bytes for file in files) < min(file.links[0].row_bytes for file in files) / 2
    expected = cluster.rows()
    counts = [[counts.rows for counts in pserver.shard.rows.counts()] for pserver in cluster.pservers]
    cluster.push(4)
    restored = cluster.restored(after)
    assert cluster.numbers == {4}
    assert rows_of(restored) == expected
    found = [[counts.rows for counts in pserver.shard.rows.counts()] for pserver in restored]
    assert np.sum(found, axis=0).tolist() == np.sum(counts, axis=0).tolist()
    for pserver in restored:
        pserver.push(4, base=4)
    assert rows_of(restored) == cluster.rows(), "slots and counts differ"


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_chain_of_an_older_version_is_restored(count: int) -> None:
    """Two pservers wrote it when files did not name complete buckets: a base after one push, then an increment."""
    cluster = Cluster(2)
    with zipfile.ZipFile(Path(__file__).parent / "chain_of_two_pservers.zip") as stored:
        for name in stored.namelist():
            cluster.storage.publish(name, [stored.read(name)])
    restored = cluster.restored(count)
    cluster.push(0)
    cluster.push(1, every=7)
    assert cluster.numbers == {2}
    assert rows_of(restored) == cluster.rows()
    (manifest, *_) = (each for each in found_checkpoints(cluster.storage, "j") if isinstance(each, Manifest))
    assert sum(len(rows.ids) for rows in stored_rows(cluster.storage, manifest, 0, TABLES[0])) == IDS.size


def test_the_rows_of_a_chain_are_exported_unchanged() -> None:
    cluster = Cluster(2)
    for number, every in enumerate((1, 7, 11)):
        cluster.push(number, every=every)
        cluster.checkpoint(1 + number)
    (manifest, *_) = (each for each in found_checkpoints(cluster.storage, "j") if isinstance(each, Manifest))
    assert all(len(file.links) > 1 for file in manifest.shards)
    for number, spec in enumerate(TABLES):
        found: dict[int, list[float]] = {}
        for rows in stored_rows(cluster.storage, manifest, number, spec):
            values = float32_of(rows.values, spec.dtype) if rows.values.dtype == np.uint16 else rows.values
            assert not found.keys() & set(rows.ids.tolist()), "a row occurs twice"
            found.update(zip(rows.ids.tolist(), values.tolist(), strict=True))
        table = cluster.rows()[number]
        expected = {key: row for key, row in table.items() if any(row)}
        assert {key: row for key, row in found.items() if any(row)} == expected


def test_a_table_starts_with_the_rows_of_a_file(tmp_path: Path) -> None:
    first = Pserver(MemoryStorage(), Async(), 0, 2)
    span = distinct(first.shard.rows.spans)[0]
    path = tmp_path / "rows.parquet"
    values = np.arange(600, dtype=np.float32).reshape(300, 2)
    columns = {"id": IDS.view(np.int64), "values": pa.FixedSizeListArray.from_arrays(values.reshape(-1), 2)}
    pq.write_table(pa.table(columns), path)
    span.rows.specs[0] = replace(TABLES[0], first_rows=str(path))
    load_first_rows(span, FsspecFiles(), SystemClock())
    np.testing.assert_array_equal(first.read(0), values[first.mine(0).astype(np.int64)])
    assert [counts.rows for counts in first.shard.rows.counts()] == [len(first.mine(0)), 0, 0]
    first.push(0)
    np.testing.assert_array_equal(first.read(0), values[first.mine(0).astype(np.int64)] + 1)
    span.rows.memory = RowMemory(100)
    with pytest.raises(UsageError, match="no memory for all rows"):
        load_first_rows(span, FsspecFiles(), SystemClock())


def test_nothing_of_a_chain_with_a_damaged_file_is_loaded() -> None:
    cluster = Cluster(2)
    cluster.push(0)
    cluster.checkpoint(1)
    expected = cluster.rows()
    for number in (2, 3):
        cluster.push(number - 1)
        name = cluster.checkpoint(number)[1].name
    data = bytearray(cluster.storage.read(name))
    data[len(data) // 2] ^= 1
    cluster.storage.publish(name, [bytes(data)])
    restored = cluster.restored(1)
    assert cluster.numbers == {2}
    cluster.storage.publish(cluster.chains.offer(1, 11, 4, ()).after.replace("c-3", "c-2"), [b"x"])
    restored = cluster.restored(1)
    assert cluster.numbers == {1}
    assert rows_of(restored) == expected
    assert restored[0].shard.rows.counts()[2].rows == 0, "a row is there that only the lost second push had admitted"


def test_the_first_checkpoint_of_a_restored_pserver_is_a_base() -> None:
    cluster = Cluster(1)
    cluster.push(0)
    (file,) = cluster.checkpoint(1)
    cluster.pservers = cluster.restored(1)
    assert not cluster.pservers[0].shard.rows.knows(file.name)
    (file,) = cluster.checkpoint(2)
    assert not file.links
    assert cluster.pservers[0].shard.rows.knows(file.name)


def test_a_checkpoint_excludes_changes_made_while_it_is_written() -> None:
    storage = MemoryStorage()
    old, new = Pserver(storage, Async()), Pserver(storage, Async())
    old.push(0)
    old.snapshots.order(SnapshotRequest(OrderNumber(1, 1, 1), None, "c-1/shard-0.arrow", plan_hash="p"))
    old.push(1, base=1)
    old.push(2, base=2)
    publish(storage, 1, ShardFile.of(0, 10, eventually(lambda: old.snapshots.progress.file)))
    assert new.restore() == 1
    require(new, 1)
    require(old, 3)


def test_a_push_gets_its_requested_rows_when_its_round_closes() -> None:
    pserver = Pserver(MemoryStorage(), Sync(reduce="sum"))
    (pushed,) = pserver.push(0, wanted=True)
    assert pushed.piece.version == 1
    assert pushed.wanted is None
    assert pushed.piece.size_bytes > 4 * 2 * 150


def test_a_push_gets_the_rows_that_it_has_requested_although_its_message_is_overwritten() -> None:
    pserver = Pserver(MemoryStorage(), Sync(reduce="sum"))
    members = [ViewMember(trainer=name, generation=1, member=n, first_round=0) for n, name in ((1, "t"), (2, "u"))]
    view = ViewRequest(plan_hash="p", master_generation=1, serial=2, members=members)
    pserver.shard.set_members(view)
    (pushed,) = pserver.push(0, wanted=True)
    assert pushed.wanted is not None, "the round does not wait for the other member"
    pserver.message[:] = bytes(len(pserver.message))
    pserver.shard.set_members(msgspec.structs.replace(view, serial=3, members=members[:1]))
    (piece,), rest = pserver.shard.read(pushed.wanted, 1)
    assert not rest
    (section,) = decode_sections(memoryview(piece.values).cast("B"), np.array(DIMS), (Kind.ROWS,))
    assert (section.values == pserver.read(0)[::2]).all()
    assert section.values.size == IDS.size


def test_a_gradient_that_waits_for_its_round_outlives_its_message_although_the_buckets_are_split() -> None:
    pserver = Pserver(MemoryStorage(), Sync(reduce="sum"))
    members = [ViewMember(trainer=name, generation=1, member=n, first_round=0) for n, name in ((1, "t"), (2, "u"))]
    view = ViewRequest(plan_hash="p", master_generation=1, serial=2, members=members)
    pserver.shard.set_members(view)
    pserver.push(0)
    pserver.message[:] = bytes(len(pserver.message))
    blocks = pserver.plan.buckets_of(0)
    middle = blocks.start + len(blocks) // 2
    into = [range(blocks.start, middle), range(middle, blocks.stop)]
    pserver.shard._split(pserver.shard._protocol.split(blocks.start, into))
    pserver.shard.set_members(msgspec.structs.replace(view, serial=3, members=members[:1]))
    assert (pserver.read(0) == 1.0).all()


@pytest.mark.parametrize("unknown", ["init", "zero", "error"])
def test_optional_ids_without_a_row_read_as_zeros(unknown: str) -> None:
    table = TableSpec("t", 2, SGD(lr=1.0), init=Uniform(0.5), unknown=unknown)
    plan = plan_for(SPECS, 2, 1, [table])
    shards = [Shard(plan, index, SGD(lr=1.0), Async(), on_lost=pytest.fail) for index in range(2)]
    member = ViewMember(trainer="t", generation=1, member=1, first_round=0)
    owners = plan.bucket_pservers[buckets_of(IDS[:20], table.salt)]
    for index, shard in enumerate(shards):
        shard.set_members(ViewRequest(plan_hash="p", master_generation=1, serial=1, members=[member]))
        mine = IDS[:20][(owners == index) & (IDS[:20] % 2 == 0)]
        header = PushHeader(
            trainer="t",
            generation=1,
            plan_hash=plan.hash,
            member=1,
            identity=BatchIdentity(epoch=0, task=0, batch=0, batch_count=100),
            weight=1.0,
            rows=1024,
        )
        data = encode_sections([Section(Kind.GRADIENTS, 0, mine, np.ones((len(mine), 2), np.float32))])
        shard.push(header, [ReceivedBlocks(plan.buckets_of(index), 0, 0, memoryview(bytearray(data.tobytes())))])
    # The ids 0 to 5 are optional, and 4 and 5 are also requested.
    rows = RowMessages(plan, {}, lookup := Lookup(plan, {0: DistinctIds(IDS[4:8].copy(), optional=IDS[:6].copy())}))
    for index, shard in enumerate(shards):
        if (asked := rows.asked(index)) is not None:
            data = memoryview(bytearray(asked.tobytes()))
            pieces, _ = shard.read(shard.lookup(ReceivedBlocks(plan.buckets_of(index), 0, 0, data)), 0)
            for piece in pieces:
                rows.take(index, piece.blocks, piece.version, memoryview(piece.values))
    found = lookup.rows(0)
    assert [bool(row.any()) for row in found[:6]] == [True, False] * 3
    assert [bool(row.any()) for row in found[6:]] == [True, unknown == "init"] * 2
    assert np.array_equal(found[4], found[6])
    assert sorted(lookup.unknown.get(0, [])) == ([5, 7] if unknown == "error" else [])


GRADIENT = Section(Kind.GRADIENTS, 0, IDS[:2], np.ones((2, 2), np.float32))


@pytest.mark.parametrize(
    ("section", "text"),
    [
        (GRADIENT._replace(table=3), "no table number 3"),
        (GRADIENT._replace(ids=IDS[[1, 1]]), "an id of table 'plain' twice"),
        (GRADIENT._replace(values=np.array([[1, 1], [np.nan, 1]], np.float32)), "'plain' has NaN or infinity for id 1"),
        (GRADIENT._replace(values=np.ones((2, 3), np.float32)), "declare"),
        (Section(Kind.ROWS, 0, IDS[:0], np.ones((2, 2), np.float32)), "kind 3"),
    ],
)
def test_an_invalid_push_of_rows_is_rejected_and_not_applied(section: Section, text: str) -> None:
    pserver = Pserver(MemoryStorage(), Async())
    with pytest.raises((MessageError, GradientError), match=text):
        pserver.push_sections(0, 0, [section])
    assert pserver.shard.version_range() == (0, 0)


def test_ids_of_another_pserver_are_rejected() -> None:
    pserver = Pserver(MemoryStorage(), Async(), 0, 2)
    with pytest.raises(MessageError, match=r"id .* of table 'plain' does not belong to this pserver"):
        pserver.push_sections(0, 0, [Section(Kind.WANTED, 0, IDS)])
    for shard_of in (pserver.shard.lookup, pserver.shard.rows.pushed):
        with pytest.raises(MessageError, match="must cover all buckets"):
            shard_of(ReceivedBlocks(range(605, 609), 0, 0, memoryview(b"")))
    with pytest.raises(MessageError, match="must cover all buckets"):
        pserver.shard.rows.pushed(ReceivedBlocks(range(5, 9), 0, 0, memoryview(b"")))


def loaded_kernels() -> int:
    return compiled.machine_code.cache_info().misses


def forget_kernels() -> None:
    for known in (compiled.machine_code, compiled.block_kernels, compiled.half_kernels, compiled.finite_copy):
        known.cache_clear()
    for known in (compiled_rows.row_kernel, compiled_rows._loop):
        known.cache_clear()


def push_and_read(store: RowTables) -> None:
    for version in range(1, 5):
        for table, spec in enumerate(store.specs):
            gradients = TableGradients(table, IDS, np.ones((len(IDS), spec.dim), np.float32))
            store.update([gradients], version=version, epoch=0)
            store.read(table, IDS, version, 0, np.empty((len(IDS), spec.dim), np.float32))


def test_the_kernels_of_a_first_batch_come_first() -> None:
    """Trainers do not wait for the compilation of the others."""
    forget_kernels()
    tables = [
        TableSpec("plain", 2, SGD(lr=1.0)),
        TableSpec("aging", 2, SGD(lr=1.0), evict=Evict(max_rows=100, unused_epochs=1)),
        TableSpec("seldom", 2, SGD(lr=1.0), admit_after=2),
    ]
    first, later = kernels_of(SPECS, tables, SGD(lr=1.0), "")
    for load in first:
        load()
    before = loaded_kernels()
    push_and_read(RowTables(tables, range(1024)))
    Shard(plan_for(SPECS, 1), 0, SGD(lr=1.0), Async(), on_lost=pytest.fail)
    assert loaded_kernels() == before
    for load in later:
        load()
    assert loaded_kernels() == before + len(later), "they were loaded before"


def test_all_kernels_are_loaded_before_training(tmp_path: Path) -> None:
    """Pushes, checkpoints, recovery and eviction need no other kernel, so none of them waits for the compiler."""
    forget_kernels()
    evicted = [
        TableSpec("small", 2, Ftrl(lr=Piecewise([1], [1.0, 0.0])), evict=Evict(norm_below=1e9, max_rows=100)),
        TableSpec("seldom", 2, SGD(lr=1.0), dtype="float16", admit_after=2, admission="sketch"),
    ]
    parameters = [*SPECS, ParameterSpec("half", (3,), "bfloat16"), ParameterSpec("wide", (3,), "float64")]
    for load in itertools.chain(*kernels_of(parameters, [*TABLES, *evicted], SGD(lr=1.0), "float16")):
        load()
    # The tests' own clients load them.
    distinct_kernels()
    before = loaded_kernels()
    for mode in (Async(), Sync(), Sync(reduce="sum")):
        test_rows_are_restored_with_slots_and_counts_and_training_continues(mode)
    test_rows_with_different_histories_are_restored_on_another_number_of_pservers(1, 3)
    test_a_chain_is_restored_even_if_an_increment_failed(2, 1)
    test_a_table_starts_with_the_rows_of_a_file(tmp_path)
    test_a_push_gets_its_requested_rows_when_its_round_closes()
    store = RowTables(evicted, range(1024))
    push_and_read(store)
    cut = store.begin_cut(5, 0, is_base=True)
    while cut.next_rows() is not None:
        pass
    plan = plan_for(parameters, 1)
    Shard(plan, 0, SGD(lr=1.0), Async(), "float16", on_lost=pytest.fail)
    assert loaded_kernels() == before


def test_an_order_that_is_replaced_leaves_no_cut_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    pserver = Pserver(MemoryStorage(), Async())
    pserver.push(0)
    with monkeypatch.context() as patch:
        # The copies never become complete, although the cuts of all rows have begun.
        patch.setattr(SnapshotCopier, "wait", lambda _self, _timeout_s: False)
        for serial in range(1, 2 * MAX_CUTS):
            name = f"c-1/shard-0-{serial}.arrow"
            pserver.snapshots.order(SnapshotRequest(OrderNumber(1, 1, serial), None, name, plan_hash="p"))
    pserver.checkpoint(2)
    cuts = [cut for span in distinct(pserver.shard.rows.spans) for cut in span.rows._cuts.values()]
    eventually(lambda: all(cut.is_over for cut in cuts))
