"""A standby copies the rows and blocks of a pserver that trains, and can serve them as of any complete copy."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from flightedl.adapters.clock import SystemClock
from flightedl.domain.consistency.modes import Async, Mode, Sync
from flightedl.domain.model.optimizers import SGD
from flightedl.domain.tables.evict import Evict
from flightedl.domain.tables.placement import BUCKETS
from flightedl.domain.tables.spec import TableSpec
from flightedl.errors import BusyError, CorruptError, DeadlineError, NotReadyError, UnavailableError
from flightedl.messages.base import decode
from flightedl.messages.moving import CopyId, CopyTicket
from flightedl.messages.parameters import BatchIdentity, Outcome, PushHeader
from flightedl.pserver.moving.copies import Copies
from flightedl.pserver.moving.parcels import CopyEnd, CopyHead
from flightedl.pserver.moving.parcels import decode as decode_parcel
from flightedl.pserver.moving.standby import Followed, Standby
from flightedl.pserver.stores.interface import Pushed, distinct
from flightedl.rowstore.tables import MAX_CUTS, ChangedSince, RowTables, TableGradients
from flightedl.wire.parts import ReceivedBlocks
from tests.calls import call_of
from tests.pserver.test_rows import DIMS, IDS, Pserver, require
from tests.support.clock import FakeClock
from tests.support.memory import MemoryStorage

_CLOCK = SystemClock()
ELECTION = 3


class Carrier:
    """Carries copies from a pserver to its standby in memory. The stream breaks after ``parts_left`` parts."""

    def __init__(self, source: Pserver) -> None:
        self.copies = Copies(source.shard, 7, _CLOCK, contextlib.nullcontext)
        self.parts_left = 1 << 60
        #: Bytes of each copy.
        self.received: list[int] = []
        self.tickets: list[CopyTicket] = []
        #: Called before each part of a copy is received, with the number of the part.
        self.before: Callable[[int], object] = lambda _: None

    @contextlib.contextmanager
    def get(self, ticket: bytes, **_: object) -> Iterator[Iterator[Any]]:
        self.tickets.append(decode(ticket, CopyTicket))
        stream = self.copies.copy(self.tickets[-1], ELECTION, call_of("copy")).messages
        try:
            self.received.append(0)
            yield self._parts(stream)
        finally:
            stream.close()  # type: ignore[attr-defined]

    def _parts(self, stream: Iterator[Any]) -> Iterator[Any]:
        for number, (batch, metadata) in enumerate(stream):
            self.before(number)
            if not self.parts_left:
                raise UnavailableError("the connection is broken")
            self.parts_left -= 1
            self.received[-1] += batch.nbytes
            yield batch, metadata

    def abort_calls(self) -> None:
        """Do nothing: a call cannot block."""


def _push_dense(pserver: Pserver, batch: int, base: int) -> list[Pushed]:
    header = PushHeader(
        trainer="t",
        generation=1,
        plan_hash=pserver.plan.hash,
        member=pserver.member,
        identity=BatchIdentity(epoch=0, task=0, batch=batch, batch_count=100),
        weight=1.0,
        rows=1,
    )
    gradient = memoryview(np.full(100, batch + 1, np.float32)).cast("B")
    return pserver.shard.push(header, [ReceivedBlocks(range(pserver.plan.block_count), base, 0, gradient, False)])


class Pair:
    """A pserver and its standby, which copies only on the test's thread, when the test asks for a copy."""

    def __init__(self, mode: Mode) -> None:
        self.source, self.target = Pserver(MemoryStorage(), mode), Pserver(MemoryStorage(), mode)
        self.carrier = Carrier(self.source)
        self.layout, self.placement, self.is_moving = "first", "", False
        self.standby = Standby(0, 9, self._followed, 1000.0, _CLOCK)
        self.copy()

    def _followed(self) -> Followed:
        if threading.current_thread() is not threading.main_thread():
            raise NotReadyError("only the test's thread copies")
        plan_hash = self.source.plan.hash + self.placement
        return Followed(plan_hash, self.layout, self.carrier, lambda: self.target.shard, self.is_moving)  # type: ignore[arg-type]

    def push(self, batch: int, base: int = 0, every: int = 1) -> None:
        """Push a batch to the tables and to the parameter."""
        self.source.push(batch, base, every=every)
        _push_dense(self.source, batch, base)

    def copy(self) -> None:
        self.standby._has_source = True
        self.standby._follow(self._followed())

    def take(self, first_round: int = 0) -> Pserver | None:
        taken = self.standby.take(ELECTION, "first")
        if taken is None:
            return None
        self.target.view(2, first_round)
        self.target.check()
        return self.target


@pytest.fixture(params=[Async(), Sync()], ids=["async", "sync"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    made = Pair(request.param)
    yield made
    made.standby.close()


def test_a_standby_serves_what_it_has_copied(pair: Pair) -> None:
    pair.push(0)
    pair.copy()
    pair.push(1, base=1)
    pair.copy()
    pair.push(2, base=2)
    target = pair.take(first_round=2)
    assert target is not None
    require(target, 2)
    assert (target.shard.values(range(1))[0] == -3).all()
    base = 3 if isinstance(pair.source.shard._protocol.mode, Sync) else 2
    for batch, at, outcome in ((1, 2, Outcome.ALREADY_APPLIED), (2, base, Outcome.ACCEPTED)):
        found = [*target.push(batch, base=at), *_push_dense(target, batch, at)]
        assert [one.piece.outcome for one in found] == [outcome, outcome]
    require(target, 3)
    assert np.array_equal(target.shard.values(range(1))[0], pair.source.shard.values(range(1))[0])


def test_later_copies_contain_only_changed_rows(pair: Pair) -> None:
    pair.push(0)
    pair.copy()
    pair.push(1, base=1, every=100)
    pair.copy()
    pair.copy()
    _, everything, changes, nothing = pair.carrier.received
    assert nothing < changes < everything / 2
    assert [ticket.has and ticket.has.number for ticket in pair.carrier.tickets] == [None, 1, 2, 3]


@pytest.mark.parametrize("is_copied", [False, True], ids=["everything", "the joined rows"])
def test_rows_that_were_removed_on_another_pserver_are_removed_from_the_copy(pair: Pair, is_copied: bool) -> None:
    pair.push(0)
    pair.copy()
    (span,) = distinct(pair.source.shard.rows.spans)
    moved = span.rows.release(range(BUCKETS), 1, 0)
    if is_copied:
        pair.copy()
    kept = [chunk.chosen(chunk.ids % 3 != 0) for chunk in moved.chunks]
    span.rows.take(moved._replace(chunks=tuple(kept)), 1)
    pair.copy()
    pair.copy()
    assert [ticket.has is None for ticket in pair.carrier.tickets][-1:] == [False]
    target = pair.take()
    assert target is not None
    for table in range(len(DIMS)):
        assert np.array_equal(target.read(table), pair.source.read(table))


@pytest.mark.parametrize("parts", [0, 1, 2, 4])
def test_a_copy_that_breaks_off_changes_nothing(pair: Pair, parts: int) -> None:
    pair.push(0)
    pair.copy()
    pair.push(1, base=1)
    pair.carrier.parts_left = parts
    with pytest.raises(UnavailableError):
        pair.copy()
    target = pair.take()
    assert target is not None
    require(target, 1)


def test_everything_is_copied_again_after_a_copy_has_broken_off(pair: Pair) -> None:
    pair.push(0)
    pair.copy()
    pair.push(1, base=1, every=100)
    pair.carrier.parts_left = 3
    with pytest.raises(UnavailableError):
        pair.copy()
    pair.carrier.parts_left = 2
    with pytest.raises(UnavailableError):
        pair.copy()
    assert pair.standby._core.has is None, "a copy of everything overwrites the earlier content"
    pair.carrier.parts_left = 1 << 60
    pair.copy()
    target = pair.take()
    assert target is not None
    for table in range(len(DIMS)):
        assert np.array_equal(target.read(table), pair.source.read(table))


def test_a_copy_that_arrives_after_the_blocks_were_taken_over_changes_nothing(pair: Pair) -> None:
    """A standby takes its blocks over although its thread still waits for a slow source."""
    pair.push(0)
    pair.copy()
    pair.carrier.parts_left = 1
    with pytest.raises(UnavailableError):
        pair.copy()
    pair.carrier.parts_left = 1 << 60
    taken: list[Pserver | None] = []
    pair.carrier.before = lambda number: None if number else taken.append(pair.take())
    with pytest.raises(NotReadyError):
        pair.copy()
    (target,) = taken
    assert target is not None
    require(target, 1)
    assert (target.shard.values(range(1))[0] == -1).all()


@pytest.mark.parametrize("number", range(7))
def test_blocks_that_are_taken_over_during_a_copy_have_the_values_of_the_one_before(pair: Pair, number: int) -> None:
    pair.push(0)
    pair.copy()
    pair.push(1, base=1)
    taken: list[Pserver | None] = []

    def take(current: int) -> None:
        if current == number:
            taken.append(pair.take())

    pair.carrier.before = take
    with contextlib.suppress(NotReadyError):
        pair.copy()
    (target,) = taken
    assert target is not None
    require(target, 1)
    assert (target.shard.values(range(1))[0] == -1).all()


def test_a_copy_that_is_wrong_at_its_end_is_not_served(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows have already replaced those of the copy before."""
    pair.push(0)
    pair.copy()
    pair.push(1, base=1)

    def damaged(*_: object) -> None:
        raise CorruptError("no set of batches")

    monkeypatch.setattr("flightedl.pserver.moving.standby.AppliedBatches.decode", damaged)
    with pytest.raises(CorruptError):
        pair.copy()
    monkeypatch.undo()
    assert pair.standby._core.has is None
    pair.copy()
    assert pair.carrier.tickets[-1].has is None
    target = pair.take()
    assert target is not None
    require(target, 2)


def test_values_of_another_election_or_layout_are_not_served() -> None:
    for election, layout in ((ELECTION + 1, "first"), (ELECTION, "second")):
        pair = Pair(Async())
        assert pair.standby.take(election, layout) is None


def test_a_new_layout_begins_with_a_copy_of_everything(pair: Pair) -> None:
    pair.push(0)
    pair.layout = "second"
    pair.target = Pserver(MemoryStorage(), Async())
    pair.copy()
    assert pair.carrier.tickets[-1].has is None
    assert pair.standby.take(ELECTION, "first") is None


def test_a_new_layout_is_copied_when_no_more_blocks_move(pair: Pair) -> None:
    pair.is_moving, pair.placement = True, "/1"
    pair.push(0)
    pair.copy()
    assert pair.carrier.tickets[-1].has is not None, "other blocks move"
    pair.layout = "second"
    copies = len(pair.carrier.tickets)
    assert not pair.standby.lacks_copy
    with pytest.raises(NotReadyError, match="its blocks are moving"):
        pair.copy()
    assert pair.standby.lacks_copy
    # A pause between two moves.
    pair.is_moving, pair.placement = False, "/2"
    with pytest.raises(NotReadyError, match="its blocks are moving"):
        pair.copy()
    assert len(pair.carrier.tickets) == copies
    pair.target = Pserver(MemoryStorage(), Async())
    pair.copy()
    assert pair.carrier.tickets[-1].has is None
    assert not pair.standby.lacks_copy


def test_a_damaged_part_is_noticed(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    pair.push(0)
    parts = pair.carrier._parts

    def swapped(stream: Iterator[Any]) -> Iterator[Any]:
        head, first, second, *rest = parts(stream)
        yield from (head, second, first, *rest)

    monkeypatch.setattr(pair.carrier, "_parts", swapped)
    with pytest.raises(Exception, match="damaged"):
        pair.copy()


def test_only_one_standby_is_sent_a_copy_at_a_time(pair: Pair) -> None:
    ticket = msgspec.structs.replace(pair.carrier.tickets[0], standby=10)
    stream = pair.carrier.copies.copy(ticket, ELECTION, call_of("copy")).messages
    next(stream)
    with pytest.raises(BusyError, match="another standby"):
        pair.copy()
    stream.close()  # type: ignore[attr-defined]
    assert not pair.source.shard.copying.under_way
    pair.copy()


def test_rows_that_a_checkpoint_removes_are_removed_from_the_copy() -> None:
    tables = RowTables([TableSpec("t", 1, SGD(lr=1.0), evict=Evict(norm_below=0.5))], range(BUCKETS))
    tables.update([TableGradients(0, IDS[:2], np.array([[-1.0], [-0.1]], np.float32))], version=1, epoch=0)
    copy = ChangedSince()
    tables.begin_copy(1, 0, copy).drop()
    tables.begin_cut(1, 0, file="c-1").drop()
    changes = tables.begin_copy(1, 0, copy)
    assert changes.tables[0].removed.tolist() == [1]
    changes.drop()
    assert not tables.begin_copy(1, 0, copy).tables[0].removed.size


class Source:
    """The copies of a pserver whose clock and calls a test controls."""

    def __init__(self, mode: Mode) -> None:
        self.clock = FakeClock(100.0)
        self.pserver = Pserver(MemoryStorage(), mode)
        self.is_pinned = False
        self.copies = Copies(self.pserver.shard, 7, self.clock, self._unmoved)
        #: Called whenever the copy checks its call.
        self.check: Callable[[], object] = lambda: None

    @contextlib.contextmanager
    def _unmoved(self) -> Iterator[None]:
        if self.is_pinned:
            raise NotReadyError("blocks are about to move")
        yield

    def copy(self, has: CopyId | None = None, standby: int = 9) -> CopyId:
        """Send a copy completely."""
        ticket = CopyTicket(plan_hash=self.pserver.plan.hash, standby=standby, has=has)
        call: Any = SimpleNamespace(check=self.check)
        parts = [decode_parcel(batch.columns, metadata) for batch, metadata in self._sent(ticket, call)]
        assert isinstance(parts[0].content, CopyHead)
        assert isinstance(parts[-1].content, CopyEnd)
        return parts[0].content.copy

    def _sent(self, ticket: CopyTicket, call: Any) -> Iterator[Any]:
        return self.copies.copy(ticket, ELECTION, call).messages

    def can_copy(self) -> bool:
        """Return True if no copy uses memory, and another one may begin."""
        self.copy()
        return not self.pserver.shard.copying.under_way


def test_no_copy_begins_while_blocks_are_about_to_move() -> None:
    source = Source(Async())
    source.pserver.push(0)
    source.is_pinned = True
    with pytest.raises(NotReadyError, match="about to move"):
        source.copy()
    assert not source.pserver.shard.copying.under_way
    source.is_pinned = False
    assert source.can_copy()


def round_that_does_not_end(source: Source) -> None:
    source.check = lambda: source.clock.advance(3.0)


def client_that_has_gone(source: Source) -> None:
    def check() -> None:
        raise DeadlineError("the client gave up")

    source.check = check


@pytest.mark.parametrize(
    ("trouble", "error"),
    [(round_that_does_not_end, BusyError), (client_that_has_gone, DeadlineError)],
    ids=["endless round", "no client"],
)
def test_a_copy_that_cannot_be_completed_is_dropped(trouble: Callable[[Source], None], error: type[Exception]) -> None:
    source = Source(Sync())
    source.pserver.push(0)
    # The tables are a round ahead of the parameter, at which everything would have to be copied.
    trouble(source)
    with pytest.raises(error):
        source.copy()
    assert not source.pserver.shard.copying.under_way
    source.check = lambda: None
    _push_dense(source.pserver, 0, 0)
    for _ in range(2 * MAX_CUTS):
        assert source.can_copy()


def test_a_copy_that_is_not_read_to_its_end_leaves_nothing_behind() -> None:
    source = Source(Async())
    source.pserver.push(0)
    for _ in range(2 * MAX_CUTS):
        ticket = CopyTicket(plan_hash=source.pserver.plan.hash, standby=9, has=None)
        call: Any = SimpleNamespace(check=source.check)
        sent: Any = source._sent(ticket, call)
        next(sent)
        sent.close()
        assert not source.pserver.shard.copying.under_way
    assert source.can_copy()


def test_a_standby_that_ends_does_not_wait_for_the_source(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    aborted: list[str] = []
    monkeypatch.setattr(pair.carrier, "abort_calls", lambda: aborted.append("calls"))
    pair.standby.close()
    assert aborted == ["calls"]


def test_the_lag_of_a_standby_is_the_age_of_the_copy_that_it_is_known_to_have() -> None:
    source = Source(Async())
    source.pserver.push(0)
    assert source.copies.lag_s is None
    first = source.copy()
    source.clock.advance(10.0)
    assert source.copies.lag_s is None, "nobody knows yet whether the copy has arrived"
    second = source.copy(first)
    assert source.copies.lag_s == 10.0
    source.clock.advance(5.0)
    # A standby that requests the same copy again, or that has another one, is not known to have the newest.
    source.copy(first)
    assert source.copies.lag_s == 15.0
    assert source.copy(second).after == 0
    assert source.copies.lag_s == 15.0


def test_changes_are_recorded_only_as_long_as_a_standby_follows() -> None:
    source = Source(Async())
    source.pserver.push(0)
    (rows,) = {span.rows for span in source.pserver.shard.rows.spans.values()}
    copy = source.copy()
    for _ in range(3):
        source.pserver.push(source.pserver.shard.version_range()[1] + 1)
        copy = source.copy(copy)
        assert copy.after == copy.number - 1
        assert len(rows._copies) == 1
    # Another standby receives everything, and what has changed for the former one is forgotten.
    assert source.copy(standby=10).after == 0
    assert len(rows._copies) == 1
