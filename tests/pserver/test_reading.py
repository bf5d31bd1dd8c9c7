"""Any range of rows is read exactly: of the present values, and of cuts that are kept while training continues."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from flightedl.domain.consistency.modes import Async, Mode, Sync
from flightedl.domain.model.optimizers import SGD
from flightedl.domain.model.parameters import ParameterSpec
from flightedl.domain.model.sharding import plan_shards
from flightedl.domain.pserver.block_values import CopyBlocks
from flightedl.domain.tables.placement import BUCKETS, as_ids, buckets_of
from flightedl.domain.tables.spec import TableSpec
from flightedl.errors import BusyError, MessageError, NotFoundError, StalePlacementError
from flightedl.messages.control import CutRequest, OrderNumber, SnapshotReply, ViewMember, ViewRequest
from flightedl.messages.parameters import BatchIdentity, PushHeader
from flightedl.messages.reading import ReadTicket
from flightedl.pserver.cuts.kept import KEPT_S, KeptCut, RequestedCuts
from flightedl.pserver.readers.reading import Reading
from flightedl.pserver.shard import Shard
from flightedl.rowstore.tables import MAX_CUTS
from flightedl.wire.parts import ReceivedBlocks
from flightedl.wire.rows import Row
from flightedl.wire.table_rows import Kind, Section, encode_sections
from tests.support.clock import FakeClock

#: The blocks of the matrix end within rows.
MATRIX, VECTOR = ParameterSpec("matrix", (5000, 5)), ParameterSpec("vector", (7,))
TABLE = TableSpec("users", 2, SGD(lr=1.0))
IDS = as_ids(np.arange(200))
PLACES = buckets_of(IDS, TABLE.salt)
FIRST = {MATRIX.name: np.arange(25_000, dtype=np.float32), VECTOR.name: np.arange(7, dtype=np.float32)}


class Bench:
    """A pserver that trains, and reads of its model."""

    def __init__(self, mode: Mode) -> None:
        self.plan = plan_shards([MATRIX, VECTOR], 1, tables=[TABLE], block_bytes=1 << 15)
        assert len(self.plan.block_range(MATRIX.name)) > 2
        self.clock = FakeClock(100.0)
        self.shard = Shard(self.plan, 0, SGD(lr=1.0), mode, on_lost=pytest.fail)
        self.cuts = RequestedCuts(self.shard.copying, self.clock)
        self.reading = Reading("j", self.plan, self.shard, None, self.cuts)
        for number in range(self.plan.block_count):
            block = self.plan.block(number)
            values = FIRST[self.plan.parameters[block.parameter].name][block.start : block.stop]
            self.shard.initialize(1, Row(number, 0, memoryview(values).cast("B")))
        member = ViewMember(trainer="t", generation=1, member=1, first_round=0)
        self.shard.set_members(ViewRequest(plan_hash="p", master_generation=1, serial=1, members=[member]))
        self.trained = 0

    def train(self) -> None:
        """Add one to all elements and rows."""
        plan, base = self.plan, self.trained
        size = FIRST[MATRIX.name].size + FIRST[VECTOR.name].size
        rows = encode_sections([Section(Kind.GRADIENTS, 0, IDS, np.full((len(IDS), 2), -1, np.float32))])
        parts = [
            ReceivedBlocks(range(plan.block_count), base, 0, memoryview(np.full(size, -1, np.float32)).cast("B")),
            ReceivedBlocks(plan.buckets_of(0), base, 0, memoryview(rows).cast("B")),
        ]
        identity = BatchIdentity(epoch=0, task=0, batch=base, batch_count=100)
        header = PushHeader(
            trainer="t", generation=1, plan_hash="p", member=1, identity=identity, weight=1.0, rows=plan.block_count
        )
        self.shard.push(header, parts)
        self.trained += 1

    def order(self, number: int, at_round: int | None = None) -> SnapshotReply:
        return self.cuts.order(CutRequest(OrderNumber(3, number, 1), at_round, plan_hash="p"))

    def read(self, name: str, start: int, stop: int, cut: int | None = None, **more: Any) -> pa.Table:
        kind: Any = "table" if name == TABLE.name else "parameter"
        number = None if cut is None else (3, cut)
        ticket = ReadTicket(plan_hash="p", name=name, kind=kind, start=start, stop=stop, cut=number, **more)
        answer = self.reading.answer(ticket)
        return pa.Table.from_batches([batch for batch, _ in answer.messages if batch is not None], answer.schema)

    def elements(self, name: str, start: int, stop: int, cut: int | None = None, **more: Any) -> list[float]:
        column = self.read(name, start, stop, cut, **more).column(0).combine_chunks()
        return (column.flatten() if pa.types.is_fixed_size_list(column.type) else column).to_numpy().tolist()

    def rows(self, start: int, stop: int, cut: int | None = None) -> dict[int, list[float]]:
        found = self.read(TABLE.name, start, stop, cut)
        return dict(zip(found["id"].to_pylist(), found["values"].to_pylist(), strict=True))


@pytest.fixture(params=[Async(), Sync()], ids=["async", "sync"])
def bench(request: pytest.FixtureRequest) -> Bench:
    return Bench(request.param)


@pytest.mark.parametrize("cut", [None, 1], ids=["present", "kept"])
def test_every_range_of_rows_is_read_exactly(bench: Bench, cut: int | None) -> None:
    bench.train()
    if cut is not None:
        assert bench.order(cut).state == "taken"
        bench.train()
    plan = bench.plan
    ends = {place.start for place in map(plan.block, plan.block_range(MATRIX.name))} | {25_000}
    bounds = sorted({min(max(end + more, 0), 25_000) for end in ends for more in (-1, 0, 1)})
    for start, stop in itertools.combinations_with_replacement(bounds, 2):
        expected = FIRST[MATRIX.name][start:stop] + 1
        assert bench.elements(MATRIX.name, start, stop, cut, is_flat=True) == expected.tolist(), (start, stop)
    for start, stop in itertools.combinations_with_replacement(sorted({bound // 5 for bound in bounds}), 2):
        assert bench.elements(MATRIX.name, start, stop, cut) == (FIRST[MATRIX.name][5 * start : 5 * stop] + 1).tolist()
    for start, stop in itertools.combinations_with_replacement(range(8), 2):
        assert bench.elements(VECTOR.name, start, stop, cut) == [number + 1.0 for number in range(start, stop)]
    with pytest.raises(MessageError, match="it has rows 0 to 7"):
        bench.read(VECTOR.name, 0, 8, cut)
    with pytest.raises(NotFoundError, match="no 'other'"):
        bench.read("other", 0, 1, cut)


@pytest.mark.parametrize("cut", [None, 1], ids=["present", "kept"])
def test_ranges_of_buckets_contain_each_row_once(bench: Bench, cut: int | None) -> None:
    bench.train()
    if cut is not None:
        bench.order(cut)
        bench.train()
    for start, stop in ((0, BUCKETS), (0, 512), (512, BUCKETS), (int(PLACES[0]), int(PLACES[0]) + 1), (7, 7)):
        mine = IDS[(start <= PLACES) & (stop > PLACES)].tolist()
        assert bench.rows(start, stop, cut) == {number: [1.0, 1.0] for number in mine}


def test_a_kept_cut_is_read_again_and_again_while_training_continues(bench: Bench) -> None:
    bench.train()
    bench.order(1)
    for count in range(1, 4):
        bench.train()
        # Any number of reads is possible, also of those that were not read to the end.
        for _ in range(2 * MAX_CUTS):
            answer = bench.reading.answer(
                ReadTicket(plan_hash="p", name=TABLE.name, kind="table", start=0, stop=BUCKETS, cut=(3, 1))
            )
            messages: Any = answer.messages
            next(messages)
            messages.close()
        assert set(bench.elements(VECTOR.name, 0, 1, 1)) == {1.0}
        assert set(bench.elements(VECTOR.name, 0, 1)) == {1.0 + count}
        assert bench.rows(0, BUCKETS, 1) == {number: [1.0, 1.0] for number in IDS.tolist()}
        assert bench.rows(0, BUCKETS) == {number: [1.0 + count] * 2 for number in IDS.tolist()}


def test_a_cut_is_kept_until_a_newer_one_is_made_or_its_time_is_over(bench: Bench) -> None:
    bench.train()
    with pytest.raises(NotFoundError, match="no longer kept"):
        bench.elements(VECTOR.name, 0, 1, 1)
    assert bench.order(1).state == "taken"
    bench.train()
    # A request that is repeated, or older, does not make a new cut.
    assert bench.order(1).order.number == bench.order(0).order.number == 1
    assert bench.elements(VECTOR.name, 0, 1, 1) == [1.0]
    for other in (0, 2):
        with pytest.raises(NotFoundError, match="no longer kept"):
            bench.elements(VECTOR.name, 0, 1, other)
    bench.order(2)
    assert bench.elements(VECTOR.name, 0, 1, 2) == [2.0]
    with pytest.raises(NotFoundError, match="no longer kept"):
        bench.elements(VECTOR.name, 0, 1, 1)
    bench.clock.advance(KEPT_S - 1)
    bench.cuts.expire()
    assert bench.elements(VECTOR.name, 0, 1, 2) == [2.0]
    bench.clock.advance(1)
    bench.cuts.expire()
    with pytest.raises(NotFoundError, match="no longer kept"):
        bench.elements(VECTOR.name, 0, 1, 2)
    assert not bench.shard.copying.under_way


def test_cuts_that_are_replaced_or_expire_free_their_memory(bench: Bench) -> None:
    """A cut that is not dropped stays among the cuts of the rows, of which there is a limited number."""
    bench.train()
    for number in range(1, 2 * MAX_CUTS):
        assert bench.order(number).state == "taken"
        bench.train()
        if number % 2:
            bench.clock.advance(KEPT_S)
            bench.cuts.expire()
    bench.order(2 * MAX_CUTS)
    bench.clock.advance(KEPT_S)
    bench.cuts.expire()
    (span,) = set(bench.shard.dense.spans.values())
    place = span.values.ctypes.data
    bench.train()
    assert span.values.ctypes.data == place, "values that nobody keeps are updated in place"
    assert not bench.shard.copying.under_way


def test_a_cut_at_a_round_is_taken_when_all_blocks_have_reached_it() -> None:
    bench = Bench(Sync())
    bench.train()
    assert bench.order(1, at_round=2).state == "waiting"
    with pytest.raises(NotFoundError, match="no longer kept"):
        bench.elements(VECTOR.name, 0, 1, 1)
    bench.train()
    bench.train()
    assert bench.order(1, at_round=2).state == "taken"
    assert bench.elements(VECTOR.name, 0, 1, 1) == [2.0]
    assert bench.rows(0, BUCKETS, 1) == {number: [2.0, 2.0] for number in IDS.tolist()}
    # The cut is over, so later pushes copy nothing.
    assert not bench.shard.copying.under_way
    assert bench.order(2, at_round=1).state == "refused"
    with pytest.raises(NotFoundError, match="no longer kept"):
        bench.elements(VECTOR.name, 0, 1, 2)


def test_blocks_that_arrived_after_a_cut_are_not_in_it(bench: Bench) -> None:
    bench.train()
    bench.order(1)
    kept = bench.cuts.kept((3, 1))
    assert kept.versions == (1, 1)
    assert len(kept.values_of(range(bench.plan.block_count))) == bench.plan.block_count
    del kept.values[1]
    with pytest.raises(StalePlacementError, match="before these rows moved here"):
        kept.values_of(range(2))
    assert list(kept.begin_reading((), range(BUCKETS))) != []
    with pytest.raises(StalePlacementError, match="before these rows moved here"):
        list(kept.begin_reading((), range(BUCKETS + 1)))


def test_rows_that_are_cut_after_their_cut_was_dropped_are_dropped_too(bench: Bench) -> None:
    bench.train()
    (span,) = set(bench.shard.rows.spans.values())
    for _ in range(2 * MAX_CUTS):
        kept = KeptCut([*span.numbers], None)
        kept.drop()
        with span.lock:
            kept.copy_rows(span, CopyBlocks(0, span.numbers, 1, 1))
        assert kept.rows[0].cut.is_over


def test_what_a_kept_cut_lists_does_not_change_with_the_rows(bench: Bench) -> None:
    bench.train()
    (span,) = set(bench.shard.rows.spans.values())
    kept = KeptCut([*span.numbers], None)
    span.rows.removed.append((0, IDS[:3]))
    with span.lock:
        kept.copy_rows(span, CopyBlocks(0, span.numbers, 1, 1))
    arrived = kept.rows[0].arrived.copy()
    span.rows.removed.clear()
    span.rows.arrived[:] += 5
    assert [(table, ids.tolist()) for table, ids in kept.rows[0].removed] == [(0, IDS[:3].tolist())]
    assert (kept.rows[0].arrived == arrived).all()


def test_readers_of_all_rows_are_limited_and_a_reader_that_fails_makes_room(bench: Bench) -> None:
    bench.train()
    bench.order(1)
    for _ in range(3):
        readers: list[Any] = [bench.shard.all_rows(0, range(BUCKETS), bench.cuts.kept((3, 1))) for _ in range(2)]
        for reader in readers:
            next(reader)
        with pytest.raises(BusyError, match="read by 2 others"):
            bench.rows(0, BUCKETS)
        for reader in readers:
            reader.close()
    kept = bench.cuts.kept((3, 1))
    bench.clock.advance(KEPT_S)
    bench.cuts.expire()
    for _ in range(3):
        with pytest.raises(StalePlacementError):
            next(bench.shard.all_rows(0, range(BUCKETS + 1), kept))
    assert len(bench.rows(0, BUCKETS)) == len(IDS)
