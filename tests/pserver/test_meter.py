"""Counters of a pserver: outcomes of blocks, rounds, staleness, and members that others wait for."""

from __future__ import annotations

import numpy as np

from flightedl.domain.consistency.modes import Async, Bounded, Mode, Sync
from flightedl.domain.model.optimizers import SGD
from flightedl.domain.model.parameters import ParameterSpec
from flightedl.domain.model.sharding import plan_shards
from flightedl.messages.control import ViewMember, ViewRequest
from flightedl.messages.parameters import BatchIdentity, PushHeader
from flightedl.pserver.meter import ROUND_SECONDS, STALENESS, Meter
from flightedl.pserver.shard import Shard
from flightedl.wire.parts import ReceivedBlocks
from flightedl.wire.rows import Row, Rows
from tests.support.memory_instruments import MemoryInstruments

VALUES = memoryview(np.ones(4, np.float32)).cast("B")


class Measured:
    """A shard with one block, two members, and a clock that the test sets."""

    def __init__(self, mode: Mode) -> None:
        self.instruments = MemoryInstruments()
        self.now = 0.0
        self.meter = Meter(self.instruments, lambda: self.now)
        plan = plan_shards([ParameterSpec("w", (4,))], 1)
        self.shard = Shard(plan, 0, SGD(lr=1.0), mode, meter=self.meter)
        self.shard.initialize(1, Row(0, 0, VALUES))
        members = [ViewMember(trainer=f"t{m}", generation=m, member=m, first_round=0) for m in (1, 2)]
        self.shard.set_members(ViewRequest(plan_hash="p", master_generation=1, serial=1, members=members))

    def push(self, member: int, batch: int, base: int = 0, step: int = 0) -> None:
        identity = BatchIdentity(epoch=0, task=member, batch=batch, batch_count=9)
        header = PushHeader(
            trainer=f"t{member}",
            generation=member,
            plan_hash="p",
            member=member,
            identity=identity,
            weight=1.0,
            rows=1,
            step=step,
        )
        self.shard.push_rows(header, Rows([0], [base], [0], [0, len(VALUES)], VALUES))


def test_pushed_blocks_are_counted_by_outcome() -> None:
    measured = Measured(Async())
    for member, batch in ((1, 0), (1, 0), (2, 0), (3, 0)):
        measured.push(member, batch)
    assert measured.meter.rows_by_outcome == {
        "accepted": 2,
        "already_applied": 1,
        "stale": 0,
        "not_member": 1,
        "partly_applied": 0,
    }


def test_staleness_is_the_number_of_updates_that_a_gradient_missed() -> None:
    measured = Measured(Async())
    for batch, base in enumerate((0, 0, 2)):
        measured.push(1, batch, base)
    assert measured.instruments.values[STALENESS.name, ""] == [0, 1, 0]


def test_round_time_is_measured_between_the_ends_of_rounds() -> None:
    measured = Measured(Sync())
    for version in range(3):
        measured.push(1, version, version)
        assert measured.shard.waits_for() == (version, [2])
        measured.now += 0.5
        measured.push(2, version, version)
        assert measured.shard.waits_for() == (0, [])
    assert measured.instruments.values[ROUND_SECONDS.name, ""] == [0.5, 0.5]


def test_bounded_staleness_waits_for_the_slowest_member() -> None:
    measured = Measured(Bounded(staleness=1))
    measured.push(1, 0, step=1)
    assert measured.shard.waits_for() == (0, [])
    measured.push(1, 1, step=2)
    assert measured.shard.waits_for() == (2, [2])


def test_waiting_time_starts_when_the_awaited_members_change() -> None:
    measured = Measured(Sync())
    meter = measured.meter
    assert meter.waits_s((1, 2)) == 0
    measured.now = 4.0
    assert meter.waits_s((1, 2)) == 4
    assert meter.waits_s((2, 2)) == 0


def test_staleness_is_reported_by_member_and_forgotten_with_it() -> None:
    measured = Measured(Async())
    for batch, member in enumerate((1, 2, 2)):
        measured.push(member, batch)
    assert measured.meter.staleness([1, 2]) == {1: 0.0, 2: 1.1}
    assert measured.meter.staleness([2]) == {2: 1.1}


def test_bytes_are_counted_by_range_of_blocks_until_blocks_move() -> None:
    meter = Meter()
    data = memoryview(bytes(100))
    meter.message(0.1, [ReceivedBlocks(range(2), 0, 0, data), ReceivedBlocks(range(2, 9), 0, 0, data[:40])], [])
    meter.message(0.1, [ReceivedBlocks(range(2, 9), 0, 0, data), ReceivedBlocks(range(9, 10), 0, 0, data[:0])], [])
    assert sorted(meter.pushed) == [(0, 2, 1, 100), (2, 7, 2, 140)]
    meter.message(0.1, [ReceivedBlocks(range(number, number + 1), 0, 0, data) for number in range(2000)], [])
    assert len(meter.pushed) == 128
    assert meter.pushed[0] == (2, 7, 2, 140)
    meter.blocks_moved()
    assert meter.pushed == []
    assert meter.size_bytes == (200_240, 0)
