"""Buckets of tables that move between pservers: rows, checkpoints and restored rows are the same as without moves."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from flightedl.adapters.clock import SystemClock
from flightedl.domain.checkpoint.chains import Chains
from flightedl.domain.checkpoint.manifest import Manifest, ShardFile, manifest_name
from flightedl.domain.consistency.modes import Async, Mode, Sync
from flightedl.domain.exactly_once.batches import Batch
from flightedl.domain.model.optimizers import SGD
from flightedl.domain.model.parameters import ParameterSpec
from flightedl.domain.model.schedules import Piecewise
from flightedl.domain.model.sharding import ShardPlan, placed, plan_for
from flightedl.domain.tables.optimizers import RowAdam
from flightedl.domain.tables.placement import BUCKETS, buckets_of
from flightedl.errors import BusyError, NotReadyError, StalePlacementError, UnavailableError
from flightedl.formats.checkpoint_files import verify
from flightedl.formats.row_batches import ROWS_OF
from flightedl.formats.shard_files import read_rows
from flightedl.formats.stored_tables import stored_rows
from flightedl.messages.control import CutRequest, OrderNumber, SnapshotRequest, ViewMember, ViewRequest
from flightedl.messages.declarations import Placement
from flightedl.messages.parameters import BatchIdentity, Outcome, PushHeader
from flightedl.pserver.cuts.kept import RequestedCuts
from flightedl.pserver.cuts.snapshots import Snapshots
from flightedl.pserver.moving.arrival import Arrival
from flightedl.pserver.moving.departure import Departure
from flightedl.pserver.restoring import load_newest
from flightedl.pserver.shard import Shard
from flightedl.pserver.stores import rows as row_store
from flightedl.pserver.stores.interface import distinct
from flightedl.rowstore.tables import MAX_CUTS
from flightedl.wire.parts import ReceivedBlocks
from flightedl.wire.table_rows import Kind, Section, decode_sections, encode_sections
from tests.support.contracts.coordinator import eventually
from tests.support.memory import MemoryStorage

from .carrier import carry, hand_over, stage
from .test_moved_buckets import IDS, SPECS
from .test_rows import manifest_of

PARAMETERS = [ParameterSpec("w", (100,))]
TABLES = [
    replace(SPECS[0], optimizer=RowAdam(lr=Piecewise(boundaries=(7, 15), values=(0.3, 0.1, 0.5)))),
    *SPECS[1:],
]
DIMS = np.array([spec.dim for spec in TABLES], np.int64)
PLACES = [buckets_of(IDS, spec.salt) for spec in TABLES]
MEMBERS = (1, 2)


@pytest.fixture(autouse=True)
def _few_buckets_are_joined_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_store, "_JOINED_BYTES", 1 << 13)


def plan_of(borders: Sequence[int], version: int) -> ShardPlan:
    """Return the plan in which each pserver has the buckets between two consecutive borders."""
    count = len(borders) - 1
    plan = plan_for(PARAMETERS, count, 1, TABLES)
    buckets = tuple((index, borders[index + 1] - borders[index]) for index in range(count))
    placement = Placement(version=version, pservers=count, blocks=((0, plan.block_count),), buckets=buckets)
    return placed(plan, placement)


class Cluster:
    """Several shards under a view of two members, which together have all buckets."""

    def __init__(self, mode: Mode, borders: Sequence[int]) -> None:
        self.mode, self.borders, self.placement = mode, list(borders), 1
        plan = plan_of(borders, 1)
        self.first = plan.block_count
        self.shards = [
            Shard(plan, index, SGD(lr=1.0), mode, on_lost=pytest.fail) for index in range(plan.pserver_count)
        ]
        for each in self.shards:
            members = [ViewMember(trainer=f"t{m}", generation=m, member=m, first_round=0) for m in MEMBERS]
            each.set_members(ViewRequest(plan_hash="p", master_generation=1, serial=1, members=members))
        self.storage, self.chains = MemoryStorage(), Chains(8, None)
        self.snapshots = [
            Snapshots(each.copying, self.storage, "j", index, len(self.shards), SystemClock())
            for index, each in enumerate(self.shards)
        ]

    def numbers(self, index: int) -> range:
        return range(self.first + self.borders[index], self.first + self.borders[index + 1])

    def part(self, numbers: range, base: int, sections: Sequence[Section]) -> ReceivedBlocks:
        """Return a message for some buckets, with the ids that are in them."""
        found = []
        for kind, table, ids, values, _ in sections:
            places = buckets_of(ids, TABLES[table].salt) + self.first
            is_there = (places >= numbers.start) & (places < numbers.stop)
            found.append(Section(kind, table, ids[is_there], None if values is None else values[is_there]))
        return ReceivedBlocks(numbers, base, 0, memoryview(encode_sections(found).tobytes()))

    def push(
        self,
        index: int,
        member: int,
        batch: int,
        epoch: int,
        ids: Sequence[int],
        base: int,
        numbers: range | None = None,
    ) -> list[Outcome]:
        numbers = self.numbers(index) if numbers is None else numbers
        if not numbers:
            return []
        wanted = np.array(sorted(ids), np.uint64)
        sections = []
        for table, dim in enumerate(DIMS.tolist()):
            gradients = np.sin(np.add.outer(wanted.astype(np.float32), np.arange(dim)) + batch + member)
            sections.append(Section(Kind.GRADIENTS, table, wanted, gradients.astype(np.float32)))
        header = PushHeader(
            trainer=f"t{member}",
            generation=member,
            plan_hash="p",
            member=member,
            identity=BatchIdentity(epoch=epoch, task=member, batch=batch, batch_count=1000),
            weight=1.0,
            rows=len(numbers),
        )
        return [one.piece.outcome for one in self.shards[index].push(header, [self.part(numbers, base, sections)])]

    def move(self, border: int, to: int, *, discards: bool = True) -> None:
        """Move a border, and thereby the buckets between its old and its new position."""
        at = self.borders[border]
        source, target = (border, border - 1) if to > at else (border - 1, border)
        numbers = range(self.first + min(at, to), self.first + max(at, to))
        assert carry(self.shards[source], self.shards[target], numbers, discards=discards)
        self.borders[border] = to
        self.placement += 1

    def read(self) -> list[Any]:
        """Return the results of lookups by table and id."""
        found: list[Any] = []
        asked = [Section(Kind.WANTED, table, IDS) for table in range(len(TABLES))]
        for index, shard in enumerate(self.shards):
            numbers = self.numbers(index)
            if not numbers:
                continue
            pieces, rest = shard.read(shard.lookup(self.part(numbers, 0, asked)), 0)
            assert not rest
            for piece in pieces:
                for section in decode_sections(memoryview(piece.values).cast("B"), DIMS, (Kind.ROWS,)):
                    places = PLACES[section.table] + self.first
                    ids = IDS[(places >= piece.blocks.start) & (places < piece.blocks.stop)].tolist()
                    found += [(section.table, *each) for each in zip(ids, map(bytes, section.values), strict=True)]
        counts = [[count.rows for count in shard.rows.counts()] for shard in self.shards]
        # Expired rows are counted exactly only after they were removed.
        return [np.delete(np.sum(counts, axis=0), 3).tolist(), *sorted(found)]

    def created(self) -> list[int]:
        """Return the number of rows that were created, by table."""
        counts = [[count.created for count in shard.rows.counts()] for shard in self.shards]
        found: list[int] = np.sum(counts, axis=0).tolist()
        return found

    def updates(self) -> dict[int, tuple[int, int, int]]:
        """Return versions, updates and the highest epoch, by bucket."""
        return {
            number: (state.rounds.version, state.updates, span.epoch)
            for shard in self.shards
            for number, span in shard.rows.spans.items()
            for state in [shard._protocol.span(number)]
        }

    def checkpoint(self, number: int, *, is_published: bool = True) -> Manifest:
        plan = plan_of(self.borders, self.placement)
        files = []
        for index, snapshots in enumerate(self.snapshots):
            offer = self.chains.offer(index, 10 + index, number, ())
            name = f"c-{number}/shard-{index}.arrow"
            self.shards[index].copying.plan_hash = plan.hash
            order = OrderNumber(1, number, 1)
            snapshots.order(SnapshotRequest(order, None, name, offer.after, offer.is_base, plan_hash="p"))
            file = ShardFile.of(index, 10 + index, eventually(lambda s=snapshots, o=order: written(s, o)))
            linked = self.chains.linked(file, offer)
            assert linked is not None
            files.append(linked)
        placement = Placement(
            version=self.placement,
            pservers=len(self.shards),
            blocks=((0, plan.block_count),),
            buckets=tuple((index, len(self.numbers(index))) for index in range(len(self.shards))),
        )
        manifest = manifest_of(number, files, plan, placement)
        if is_published:
            self.storage.publish(manifest_name(number), [manifest.encode()])
            self.chains.completed(number, files)
        return manifest

    def restored(self, number: int, borders: Sequence[int]) -> Cluster:
        found = Cluster(self.mode, borders)
        plan = plan_of(borders, 1)
        for index, shard in enumerate(found.shards):
            loaded = load_newest(self.storage, "j", PARAMETERS, plan, index, shard)
            assert (loaded.number, loaded.skipped) == (number, ())
            assert loaded.applied is not None
            shard.restored(loaded.applied)
        return found

    def check(self) -> None:
        for shard in self.shards:
            shard._protocol.check()
            for span in distinct(shard.rows.spans):
                assert shard._protocol.span(span.numbers.start).numbers == span.numbers


class CopyingCluster(Cluster):
    """Shards whose buckets are copied while members push, as the movers of pservers do."""

    #: Border, its new position, and both ends of the copy in progress; None if no copy is in progress.
    copied: tuple[int, int, Departure, Arrival] | None = None

    def move(self, border: int, to: int) -> None:
        self.begin(border, to)
        self.finish()

    def begin(self, border: int, to: int) -> None:
        """Begin to copy the buckets that a border's move brings to another pserver."""
        at = self.borders[border]
        source, target = (border, border - 1) if to > at else (border - 1, border)
        numbers = range(self.first + min(at, to), self.first + max(at, to))
        departure = Departure(self.shards[source], numbers)
        self.copied = border, to, departure, Arrival(self.shards[target], numbers, departure.size_bytes)
        stage(departure.copy(), self.copied[3])

    def update(self) -> None:
        """Send the rows that have changed since the last message."""
        assert self.copied is not None
        stage(self.copied[2].copy(), self.copied[3])

    def finish(self) -> None:
        """Freeze the buckets, send the rest, and make the target their owner."""
        if self.copied is None:
            return
        border, to, departure, arrival = self.copied
        at = self.borders[border]
        source = self.shards[border if to > at else border - 1]
        numbers = range(self.first + min(at, to), self.first + max(at, to))
        assert source.freeze(numbers)
        with pytest.raises(StalePlacementError):
            self.push(self.shards.index(source), 1, 999, 0, (), 0, numbers)
        stage(departure.rest(), arrival)
        departure.end()
        hand_over(source, numbers, arrival)
        self.copied = None
        self.borders[border] = to
        self.placement += 1

    def checkpoint(self, number: int, *, is_published: bool = True) -> Manifest:
        self.finish()
        return super().checkpoint(number, is_published=is_published)


def written(snapshots: Snapshots, order: OrderNumber) -> Any:
    progress = snapshots.progress
    assert progress is not None
    assert progress.state != "failed", progress
    return progress.file if progress.order == order else None


def exported(cluster: Cluster, manifest: Manifest) -> list[Any]:
    """Return the rows of a checkpoint's files."""
    found = []
    for table, spec in enumerate(TABLES):
        for rows in stored_rows(cluster.storage, manifest, table, spec):
            columns = (rows.ids.tolist(), rows.updates.tolist(), rows.epochs.tolist(), rows.slots, rows.values)
            found += [(table, *each[:3], *map(bytes, each[3:])) for each in zip(*columns, strict=True)]
    assert len({each[:2] for each in found}) == len(found), "a row occurs twice"
    return sorted(found)


@pytest.mark.parametrize("mode", [Async(), Sync()], ids=["async", "sync"])
@pytest.mark.parametrize("seed", range(3))
def test_buckets_that_move_from_2_to_4_pservers_and_back_behave_as_if_they_had_stayed(mode: Mode, seed: int) -> None:
    chance = random.Random(seed)
    stayed, moved = Cluster(mode, [0, BUCKETS]), Cluster(mode, [0, 512, BUCKETS, BUCKETS, BUCKETS])
    epoch = 0
    for step in range(16):
        epoch += chance.random() < 0.1
        push_to_both(stayed, moved, step, epoch, chance)
        for _ in range(chance.randrange(3)):
            move_one(moved, chance)
        if step == 15:
            for border, to in ((3, BUCKETS), (2, BUCKETS), (1, 512)):
                moved.move(border, to)
        assert moved.read() == stayed.read()
        assert moved.created() == stayed.created()
        moved.check()
        if chance.random() < 0.25:
            require_same_checkpoints(stayed, moved, step + 1, chance)
    assert [len(moved.numbers(index)) for index in range(4)] == [512, 512, 0, 0]


@pytest.mark.parametrize("mode", [Async(), Sync()], ids=["async", "sync"])
@pytest.mark.parametrize("seed", range(3))
def test_buckets_that_are_copied_while_members_push_behave_as_if_they_had_stayed(mode: Mode, seed: int) -> None:
    chance = random.Random(seed)
    stayed, moved = Cluster(mode, [0, BUCKETS]), CopyingCluster(mode, [0, 512, BUCKETS, BUCKETS, BUCKETS])
    epoch = moves = 0
    for step in range(20):
        epoch += chance.random() < 0.1
        push_to_both(stayed, moved, step, epoch, chance, may_move=False)
        if moved.copied is None:
            move_one(moved, chance, CopyingCluster.begin)
        elif chance.random() < 0.5:
            moved.update()
        else:
            moved.finish()
            moves += 1
        assert moved.read() == stayed.read()
        assert moved.created() == stayed.created()
        moved.check()
        if chance.random() < 0.2:
            require_same_checkpoints(stayed, moved, step + 1, chance)
    assert moves > 2


@pytest.mark.parametrize("cuts", ["checkpoint", "feed", "table"])
def test_rows_that_have_changed_before_a_cut_of_another_kind_move_along(cuts: str) -> None:
    stayed, moved = Cluster(Async(), [0, BUCKETS]), CopyingCluster(Async(), [0, 512, BUCKETS])
    for batch in range(2):
        stayed.push(0, 1, batch, 0, IDS[batch::2].tolist(), 0)
        for index in range(2):
            moved.push(index, 1, batch, 0, IDS[batch::2].tolist(), 0)
        if batch == 0:
            moved.begin(1, 100)
    source = moved.shards[0]
    if cuts == "checkpoint":
        Cluster.checkpoint(moved, 1, is_published=False)
    elif cuts == "feed":
        for _, cut in source.feed_cuts(1, None, 1 << 20, lambda *_: None):
            cut.drop()
    else:
        assert list(source.all_rows(0))
    moved.finish()
    assert moved.read() == stayed.read()
    moved.check()


@pytest.mark.parametrize(("border", "unit"), [(600, range(512, 600)), (400, range(400, 512))], ids=["first", "last"])
def test_a_copy_fails_if_some_of_its_buckets_have_joined_other_tables(border: int, unit: range) -> None:
    """A push may join spans while the departure is created. It moves a few buckets at the start or end of a unit."""
    cluster = Cluster(Async(), [0, 512, BUCKETS])
    for index in range(2):
        cluster.push(index, 1, 0, 0, IDS.tolist(), 0)
    cluster.move(1, border)
    index = int(border < 512)
    source = cluster.shards[index]
    spans_in = source.spans_in

    def spans_before_they_are_joined(numbers: range) -> Iterator[Any]:
        yield from spans_in(numbers)
        cluster.push(index, 1, 1, 0, IDS.tolist(), 0)

    numbers = range(cluster.first + unit.start, cluster.first + unit.stop)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(source, "spans_in", spans_before_they_are_joined)
        departure = Departure(source, numbers)
    assert len({id(source.rows.span(number).rows) for number in numbers}) == 2, "no bucket was joined"
    with pytest.raises(UnavailableError, match="while they were copied"):
        list(departure.copy())
    departure.end()


def test_a_pserver_without_room_for_the_rows_rejects_their_copy() -> None:
    cluster = CopyingCluster(Async(), [0, 512, BUCKETS])
    cluster.push(0, 1, 0, 0, IDS.tolist(), 0)
    cluster.shards[1].rows._memory._limit_bytes = 1
    with pytest.raises(BusyError, match="increase --table-memory-mb"):
        cluster.begin(1, 256)


def push_to_both(
    stayed: Cluster, moved: Cluster, step: int, epoch: int, chance: random.Random, *, may_move: bool = True
) -> None:
    """Push a batch of each member. In asynchronous mode, buckets move when some pservers have applied it."""
    ids = chance.sample(IDS.tolist(), chance.randrange(40))
    for member in MEMBERS:
        base = step if isinstance(moved.mode, Sync) else 0
        stayed.push(0, member, step, epoch, ids, base)
        if isinstance(moved.mode, Async):
            for index in chance.sample(range(4), chance.randrange(4)):
                moved.push(index, member, step, epoch, ids, base)
            if may_move:
                move_one(moved, chance)
        for index in range(4):
            outcomes = moved.push(index, member, step, epoch, ids, base)
            assert set(outcomes) <= {Outcome.ACCEPTED, Outcome.ALREADY_APPLIED}


def require_same_checkpoints(stayed: Cluster, moved: Cluster, number: int, chance: random.Random) -> None:
    """Make checkpoints of both, and compare what is exported and restored from them."""
    is_published = chance.random() < 0.7
    manifests = [each.checkpoint(number, is_published=is_published) for each in (moved, stayed)]
    if is_published:
        assert exported(moved, manifests[0]) == exported(stayed, manifests[1])
        verify(moved.storage, manifests[0])
        again = moved.restored(number, chance.choice([[0, BUCKETS], [0, 300, BUCKETS], moved.borders]))
        assert again.read() == stayed.read()
        assert again.updates() == moved.updates() == stayed.updates()
        again.check()


def move_one(cluster: Any, chance: random.Random, move: Callable[[Any, int, int], None] = Cluster.move) -> None:
    border = chance.randrange(1, len(cluster.borders) - 1)
    low, high = cluster.borders[border - 1], cluster.borders[border + 1]
    to = chance.randint(low, high)
    if to != cluster.borders[border]:
        move(cluster, border, to)


@pytest.mark.parametrize("mode", [Async(), Sync()], ids=["async", "sync"])
def test_each_push_joins_a_few_buckets_of_spans_with_equal_states(mode: Mode) -> None:
    cluster = Cluster(mode, [0, 512, BUCKETS])
    stayed = Cluster(mode, [0, BUCKETS])
    for step in range(40):
        base = step if isinstance(mode, Sync) else 0
        for member in MEMBERS:
            for index in range(2):
                cluster.push(index, member, step, 0, IDS[step::5].tolist(), base)
            stayed.push(0, member, step, 0, IDS[step::5].tolist(), base)
        if step == 3:
            cluster.move(1, 200)
        if step == 4:
            cluster.move(1, 600)
            assert len(distinct(cluster.shards[0].rows.spans)) > 1
        cluster.check()
        assert cluster.read() == stayed.read()
    assert [len(distinct(shard.rows.spans)) for shard in cluster.shards] == [1, 1]
    assert [(span.buckets, span.rows.buckets) for shard in cluster.shards for span in distinct(shard.rows.spans)] == [
        (range(600), range(600)),
        (range(600, BUCKETS), range(600, BUCKETS)),
    ]


def test_a_message_for_buckets_on_another_pserver_is_rejected_as_stale() -> None:
    cluster = Cluster(Async(), [0, 512, BUCKETS])
    before = cluster.numbers(0)
    cluster.push(0, 1, 0, 0, IDS.tolist(), 0)
    cluster.move(1, 400)
    wanted = cluster.part(before, 0, [Section(Kind.WANTED, 0, IDS)])
    with pytest.raises(StalePlacementError, match="read the job's placement again"):
        cluster.push(0, 1, 1, 0, IDS.tolist(), 0, before)
    with pytest.raises(StalePlacementError, match="read the job's placement again"):
        cluster.shards[0].read(cluster.shards[0].lookup(wanted), 0)
    assert not cluster.shards[0].applied().has(cluster.first, Batch(0, 1, 1)), "part of the message was applied"
    # Senders with the old placement can still push to the former buckets of pserver 1, which are a separate span.
    assert cluster.push(1, 1, 1, 0, IDS.tolist(), 0, range(before.stop, cluster.first + BUCKETS)) == [Outcome.ACCEPTED]


def test_pushes_and_lookups_work_with_buckets_that_are_not_adjacent() -> None:
    cluster, stayed = Cluster(Async(), [0, 512, BUCKETS]), Cluster(Async(), [0, BUCKETS])
    for batch in range(3):
        for index in range(2):
            if batch == 0:
                cluster.push(index, 1, batch, 0, IDS.tolist(), 0)
        stayed.push(0, 1, batch, 0, IDS.tolist(), 0)
        if batch == 0:
            assert carry(*cluster.shards, range(cluster.first + 100, cluster.first + 200))
            continue
        for index, start, stop in ((0, 0, 100), (0, 200, 512), (1, 100, 200), (1, 512, BUCKETS)):
            numbers = range(cluster.first + start, cluster.first + stop)
            assert cluster.push(index, 1, batch, 0, IDS.tolist(), 0, numbers) == [Outcome.ACCEPTED]
    found_by = {}
    for index, start, stop in ((0, 0, 100), (0, 200, 512), (1, 100, 200), (1, 512, BUCKETS)):
        shard, numbers = cluster.shards[index], range(cluster.first + start, cluster.first + stop)
        (piece,), _ = shard.read(shard.lookup(cluster.part(numbers, 0, [Section(Kind.WANTED, 0, IDS)])), 0)
        (section,) = decode_sections(memoryview(piece.values).cast("B"), DIMS, (Kind.ROWS,))
        ids = IDS[(PLACES[0] >= start) & (PLACES[0] < stop)].tolist()
        found_by.update(zip(ids, map(bytes, section.values), strict=True))
    assert sorted((0, *each) for each in found_by.items()) == [each for each in stayed.read()[1:] if each[0] == 0]


def test_buckets_cannot_move_during_an_open_round_or_a_cut() -> None:
    cluster = Cluster(Sync(), [0, 512, BUCKETS])
    for index in range(2):
        cluster.push(index, 1, 0, 0, IDS.tolist(), 0)
    source, target = cluster.shards
    assert not carry(source, target, cluster.numbers(0)), "a round is open"
    for index in range(2):
        cluster.push(index, 2, 0, 0, IDS.tolist(), 0)
    numbers = range(cluster.first + 100, cluster.first + 200)
    cut = source._protocol.begin_cut(None).cut
    assert not carry(source, target, numbers), "a cut is open"
    source._protocol.drop_cut(cut)
    departure = Departure(source, numbers)
    arrival = Arrival(target, numbers, departure.size_bytes)
    stage(departure.copy(), arrival)
    assert source.freeze(numbers)
    stage(departure.rest(), arrival)
    departure.end()
    members = [ViewMember(trainer=f"t{m}", generation=m, member=m, first_round=0) for m in MEMBERS]
    view = ViewRequest(plan_hash="p", master_generation=1, serial=2, members=members)
    target.set_members(view)
    with pytest.raises(NotReadyError, match="different views"):
        arrival.prepare()
    source.set_members(view)
    before = target.rows._memory.taken_bytes
    stage(departure.rest(), arrival)
    hand_over(source, numbers, arrival)
    assert target.rows._memory.taken_bytes > before


def test_an_increment_contains_all_rows_of_adopted_buckets_and_no_others() -> None:
    cluster = Cluster(Async(), [0, 512, BUCKETS])
    for index in range(2):
        cluster.push(index, 1, 0, 0, IDS.tolist(), 0)
    cluster.checkpoint(1)
    cluster.move(1, 500)
    for step in range(2):
        for index in range(2):
            cluster.push(index, 1, 1 + step, 0, IDS[:1].tolist(), 0)
    manifest = cluster.checkpoint(2)
    assert [len(file.links) for file in manifest.shards] == [1, 1]
    for file in manifest.shards:
        header, _, stored = read_rows(cluster.storage, file.name, file.size_bytes)
        came = {number - cluster.first for span in header.rows for number in span.complete}
        assert came == (set(range(500, 512)) if file.index else set())
        for rows in (each for each in stored if each.kind.startswith(ROWS_OF)):
            places = buckets_of(rows.ids, TABLES[rows.table].salt)
            assert all(place in came or row == IDS[0] for place, row in zip(places, rows.ids, strict=True))
    assert exported(cluster, manifest)
    again = cluster.restored(2, [0, 700, BUCKETS])
    assert again.read() == cluster.read()


@pytest.mark.parametrize("to", [[500, 900], [900, 512], [0, 512], [BUCKETS, 512]], ids=str)
def test_a_kept_cut_can_be_read_after_its_buckets_have_left(to: list[int]) -> None:
    cluster = Cluster(Async(), [0, 512, BUCKETS])

    def push(batch: int) -> None:
        for index in range(2):
            cluster.push(index, 1, batch, 0, IDS.tolist(), 0)

    push(0)
    kept = []
    for each in cluster.shards:
        cuts = RequestedCuts(each.copying, SystemClock())
        assert cuts.order(CutRequest(OrderNumber(1, 1, 0), None, plan_hash="p")).state == "taken"
        kept.append(cuts.kept((1, 1)))

    def read() -> list[Any]:
        return sorted(
            (table, one_id, version, bytes(values))
            for shard, cut, buckets in zip(cluster.shards, kept, (range(512), range(512, BUCKETS)), strict=True)
            for table in range(len(TABLES))
            for rows in shard.all_rows(table, buckets, cut)
            for one_id, version, values in zip(rows.ids.tolist(), rows.versions.tolist(), rows.values, strict=True)
        )

    before = read()
    assert before
    for batch, border in enumerate(to):
        cluster.move(1, border)
        assert read() == before
        push(1 + batch)
        while any(shard.rows.has_leftovers for shard in cluster.shards):
            for shard in cluster.shards:
                shard.rows.discard_some()
        push(11 + batch)
        assert read() == before


def table_rows(shard: Shard) -> Iterator[Any]:
    for table in range(len(TABLES)):
        for rows in shard.all_rows(table):
            yield from zip([table] * len(rows.ids), rows.ids.tolist(), map(bytes, rows.values), strict=True)


def cut_rows(shard: Shard, *, is_feed: bool) -> Iterator[Any]:
    for span in distinct(shard.rows.spans):
        version, number = shard.version(span.numbers.start), 1 + span.rows.feed_number
        if is_feed:
            cut = span.rows.begin_feed_cut(version, span.epoch, number, None, 1 << 30)
        else:
            cut = span.begin_cut(version)
        while (chunk := cut.next_rows()) is not None:
            kinds = [(chunk.table, chunk.is_waiting)] * chunk.ids.size
            yield from zip(kinds, chunk.ids.tolist(), map(bytes, chunk.values), strict=True)


READERS: dict[str, Callable[[Shard], Iterator[Any]]] = {
    "exports": table_rows,
    "feeds": lambda shard: cut_rows(shard, is_feed=True),
    "copies": lambda shard: cut_rows(shard, is_feed=False),
}


@pytest.mark.parametrize("reader", READERS)
def test_rows_that_have_left_are_neither_read_nor_counted_before_they_are_discarded(reader: str) -> None:
    """Including those of buckets that have come back, of which the memory has two states."""
    stayed, moved = Cluster(Async(), [0, BUCKETS]), Cluster(Async(), [0, 512, BUCKETS])
    for batch, border in enumerate([512, 400, 512, 700, 512]):
        if batch:
            moved.move(1, border, discards=False)
        for cluster in (stayed, moved):
            for index in range(len(cluster.shards)):
                cluster.push(index, 1, batch, 0, IDS[batch :: 1 + batch].tolist(), 0)
        found, expected = (
            sorted(row for shard in cluster.shards for row in READERS[reader](shard)) for cluster in (moved, stayed)
        )
        assert found == expected
        assert moved.read() == stayed.read(), "the counts differ"
    assert all(shard.rows.has_leftovers for shard in moved.shards)

    def counts() -> list[tuple[int, int]]:
        return [(count.rows, count.waiting) for shard in moved.shards for count in shard.rows.counts()]

    before = counts()
    for shard in moved.shards:
        while shard.rows.has_leftovers:
            shard.rows.discard_some()
    assert counts() == before
    assert moved.read() == stayed.read()


def test_a_table_is_read_only_with_exactly_the_buckets_of_the_senders_plan() -> None:
    """Otherwise, rows that move between two pservers' answers would be missing, or be read twice."""
    cluster = Cluster(Async(), [0, 512, BUCKETS])
    cluster.push(0, 1, 0, 0, IDS.tolist(), 0)
    source = cluster.shards[0]
    before, after = plan_of([0, 512, BUCKETS], 1).hash, plan_of([0, 400, BUCKETS], 2).hash
    reading = source.all_rows(0, plan_hash=before)
    late, part = source.all_rows(0, plan_hash=before), source.all_rows(0, range(400, 500))
    assert next(reading)
    cluster.move(1, 400)
    source.place(after)
    list(reading)
    for each in (late, part):
        with pytest.raises(StalePlacementError):
            next(each)
    assert list(source.all_rows(0, plan_hash=after))
    with pytest.raises(StalePlacementError):
        list(cluster.shards[1].all_rows(0, plan_hash=after)), "it has not read the placement yet"


@pytest.mark.parametrize("reads", ["everything", "a part", "nothing"])
def test_a_move_that_is_given_up_leaves_nothing_behind(reads: str) -> None:
    """Neither cuts, of which there is a limited number, nor records of changes, nor a ban on joining spans."""
    cluster = Cluster(Async(), [0, 512, BUCKETS])
    cluster.push(0, 1, 0, 0, IDS.tolist(), 0)
    source, numbers = cluster.shards[0], range(cluster.first + 100, cluster.first + 200)
    (rows,) = {span.rows for span in source.rows.spans.values()}
    for batch in range(2 * MAX_CUTS):
        departure = Departure(source, numbers)
        assert source.rows.copying == 1
        assert source.rows.borders(cluster.numbers(0)) == []
        content = departure.copy()
        if reads == "everything":
            assert list(content)
            cluster.push(0, 1, 1 + batch, 0, IDS.tolist(), 0)
            assert departure.changed_rows
        elif reads == "a part":
            next(content)
            content.close()  # type: ignore[attr-defined]
        departure.end()
        assert source.rows.copying == 0
        assert not rows._copies
        source.freeze(numbers)
        source.thaw(numbers)


def test_all_rows_of_buckets_that_have_left_are_discarded() -> None:
    """Rows that stay would be in the next checkpoint, and be loaded in place of newer ones."""
    cluster = Cluster(Async(), [0, 512, BUCKETS])
    cluster.push(0, 1, 0, 0, IDS.tolist(), 0)
    source = cluster.shards[0]
    (rows,) = {span.rows for span in source.rows.spans.values()}
    unit = range(cluster.first + 400, cluster.first + 512)
    assert source.freeze(unit)
    source.drop(unit)
    source.thaw(unit)
    count = 0
    while source.rows.has_leftovers:
        source.rows.discard_some()
        count += 1
    assert count == len(unit)
    for table, spec in enumerate(TABLES):
        cut, left = rows.begin_cut(9, 0, is_base=True), set[int]()
        while (chunk := cut.next_rows()) is not None:
            left |= set(buckets_of(chunk.ids, TABLES[chunk.table].salt).tolist())
        assert left, (table, spec.name)
        assert max(left) < 400
    source.rows.discard_some()
