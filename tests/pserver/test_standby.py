"""A standby copies the rows and blocks of a pserver that trains, and can serve them as of any complete copy."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
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
from flightedl.errors import BusyError, NotReadyError, UnavailableError
from flightedl.messages.base import decode
from flightedl.messages.moving import CopyTicket
from flightedl.messages.parameters import BatchIdentity, Outcome, PushHeader
from flightedl.pserver.moving.copies import Copies
from flightedl.pserver.moving.standby import Followed, Standby
from flightedl.pserver.rows.tables import ChangedSince, RowTables, TableGradients
from flightedl.pserver.shard import Shard
from flightedl.pserver.stores import Pushed
from flightedl.rpc.call import Call
from flightedl.rpc.identity import Caller
from flightedl.testing.memory import MemoryStorage
from flightedl.wire.parts import ReceivedBlocks
from tests.pserver.test_rows import DIMS, IDS, Pserver, require

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
        #: Called before the first part of a copy is received.
        self.before: Callable[[], object] = lambda: None

    @contextlib.contextmanager
    def get(self, ticket: bytes, **_: object) -> Iterator[Iterator[Any]]:
        self.tickets.append(decode(ticket, CopyTicket))
        stream = self.copies.copy(self.tickets[-1], ELECTION, _call()).messages
        try:
            self.received.append(0)
            self.before()
            yield self._parts(stream)
        finally:
            stream.close()  # type: ignore[attr-defined]

    def _parts(self, stream: Iterator[Any]) -> Iterator[Any]:
        for batch, metadata in stream:
            if not self.parts_left:
                raise UnavailableError("the connection is broken")
            self.parts_left -= 1
            self.received[-1] += batch.nbytes
            yield batch, metadata

    def abort_calls(self) -> None:
        """Do nothing: a call cannot block."""


def _call() -> Call:
    return Call(
        verb="copy",
        caller=Caller(),
        role=None,
        peer="",
        headers={},
        deadline=_CLOCK.now() + 60.0,
        clock=_CLOCK,
        closing=threading.Event(),
        cancelled=lambda: False,
    )


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
        self.standby = Standby(0, 9, self._followed, self._build, 1000.0, _CLOCK)
        self.copy()

    def _followed(self) -> Followed:
        if threading.current_thread() is not threading.main_thread():
            raise NotReadyError("only the test's thread copies")
        plan_hash = self.source.plan.hash + self.placement
        return Followed(plan_hash, self.layout, self.carrier, self.is_moving)  # type: ignore[arg-type]

    def _build(self) -> Shard:
        return self.target.shard

    def push(self, batch: int, base: int = 0, every: int = 1) -> None:
        """Push a batch to the tables and to the parameter."""
        self.source.push(batch, base, every=every)
        _push_dense(self.source, batch, base)

    def copy(self) -> None:
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
    pair.carrier.before = lambda: taken.append(pair.take())
    with pytest.raises(NotReadyError):
        pair.copy()
    (target,) = taken
    assert target is not None
    require(target, 1)
    assert (target.shard.values(range(1))[0] == -1).all()


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
    with pytest.raises(NotReadyError, match="its blocks are moving"):
        pair.copy()
    # A pause between two moves.
    pair.is_moving, pair.placement = False, "/2"
    with pytest.raises(NotReadyError, match="its blocks are moving"):
        pair.copy()
    assert len(pair.carrier.tickets) == copies
    pair.target = Pserver(MemoryStorage(), Async())
    pair.copy()
    assert pair.carrier.tickets[-1].has is None


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
    stream = pair.carrier.copies.copy(ticket, ELECTION, _call()).messages
    next(stream)
    with pytest.raises(BusyError, match="another standby"):
        pair.copy()
    stream.close()  # type: ignore[attr-defined]
    assert not pair.source.shard.copying.under_way
    pair.copy()


def test_rows_that_a_checkpoint_removes_are_removed_from_the_copy() -> None:
    tables = RowTables([TableSpec("t", 1, SGD(lr=1.0), evict=Evict(norm_below=0.5))], range(BUCKETS))
    tables.update([TableGradients(0, IDS[:2], np.array([[-1.0], [-0.1]], np.float32))], version=1, epoch=0, number=0)
    copy = ChangedSince()
    tables.begin_copy(1, 0, copy).drop()
    tables.begin_cut(1, 0, file="c-1").drop()
    changes = tables.begin_copy(1, 0, copy)
    assert changes.tables[0].removed.tolist() == [1]
    changes.drop()
    assert not tables.begin_copy(1, 0, copy).tables[0].removed.size
