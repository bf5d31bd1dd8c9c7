"""A step without its stream: the answer to each message, and the values that follow."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import pytest

from flightedl.domain.consistency.modes import Async, Mode, Sync
from flightedl.domain.model.optimizers import LAMB
from flightedl.domain.model.parameters import ParameterSpec
from flightedl.domain.model.sharding import plan_shards
from flightedl.errors import MessageError
from flightedl.messages.control import ViewMember, ViewRequest
from flightedl.messages.parameters import BatchIdentity, Outcome, PushHeader
from flightedl.pserver.shard import Shard
from flightedl.pserver.steps.session import StepSession, awaited_values
from flightedl.pserver.stores.interface import Wanted
from flightedl.wire.parts import ReceivedBlocks
from flightedl.wire.rows import OutgoingBlocks
from tests.support.clock import FakeClock

COUNT, SIZE = 4, 16


class Bench:
    """A shard with single blocks, and members that step."""

    def __init__(self, mode: Mode, *members: int) -> None:
        plan = plan_shards([ParameterSpec(f"p{i}", (SIZE,)) for i in range(COUNT)], 1)
        self.shard = Shard(plan, 0, LAMB(lr=0.1), mode)
        self.clock = FakeClock()
        known = [ViewMember(trainer=f"t{m}", generation=m, member=m, first_round=0) for m in members]
        self.shard.set_members(ViewRequest(plan_hash="p", master_generation=1, serial=1, members=known))

    def step(self, member: int, batch: int, rows: int = COUNT, *, pull: bool = True) -> StepSession:
        header = PushHeader(
            trainer=f"t{member}",
            generation=member,
            plan_hash=self.shard.plan_hash,
            member=member,
            identity=BatchIdentity(epoch=0, task=0, batch=batch, batch_count=100),
            weight=1.0,
            rows=rows,
            pull=pull,
        )
        return StepSession(self.shard, header)

    def drained(self, session: StepSession, timeout_s: float = 0.0) -> list[list[OutgoingBlocks]]:
        return list(session.drain(self.clock, self.clock.now() + timeout_s))


def part(*blocks: int, base: int = 0) -> ReceivedBlocks:
    values = np.ones(SIZE * len(blocks), np.float32)
    return ReceivedBlocks(range(blocks[0], blocks[-1] + 1), base, 0, memoryview(values).cast("B"))


def found(pieces: Sequence[OutgoingBlocks]) -> list[tuple[range, int, int, bool]]:
    return [(piece.blocks, piece.version, piece.outcome, piece.values is not None) for piece in pieces]


def one(block: int) -> range:
    return range(block, block + 1)


def test_available_values_are_sent_with_the_answer() -> None:
    bench = Bench(Async(), 1)
    session = bench.step(1, 0)
    for block in range(COUNT):
        assert not session.has_all
        assert found(session.feed([part(block)])) == [(one(block), 1, Outcome.ACCEPTED, True)]
    assert session.has_all
    assert session.is_over


def test_values_of_a_later_round_are_sent_with_a_later_answer() -> None:
    bench = Bench(Sync(), 1, 2)
    first, second = bench.step(1, 0), bench.step(2, 1)
    assert found(first.feed([part(0)])) == [(one(0), 0, Outcome.ACCEPTED, False)]
    second.feed([part(0)])
    assert found(first.feed([part(1)])) == [
        (one(1), 0, Outcome.ACCEPTED, False),
        (one(0), 1, Outcome.NONE, True),
    ]


def test_an_unavailable_value_ends_the_search() -> None:
    bench = Bench(Sync(), 1, 2)
    first, second = bench.step(1, 0), bench.step(2, 1)
    first.feed([part(0)])
    first.feed([part(1)])
    second.feed([part(1)])
    assert found(first.feed([part(2)])) == [(one(2), 0, Outcome.ACCEPTED, False)]


def test_remaining_values_follow_after_the_last_message() -> None:
    bench = Bench(Sync(), 1, 2)
    first, second = bench.step(1, 0), bench.step(2, 1)
    first.feed([part(*range(COUNT))])
    assert first.has_all
    assert not first.is_over
    second.feed([part(0, 1)])
    (pieces,) = bench.drained(first)
    assert found(pieces) == [(one(0), 1, Outcome.NONE, True), (one(1), 1, Outcome.NONE, True)]
    assert not first.is_over, "values of two blocks are missing"
    second.feed([part(2, 3)])
    bench.drained(first)
    assert first.is_over


def test_a_step_is_over_when_its_last_value_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flightedl.pserver.steps.session.TARGET_BYTES", SIZE * 4)
    bench = Bench(Sync(), 1, 2)
    first = bench.step(1, 0)
    first.feed([part(*[number]) for number in range(COUNT)])
    assert not first.is_over
    bench.step(2, 1).feed([part(*[number]) for number in range(COUNT)])
    over = [first.is_over for _ in first.drain(bench.clock, bench.clock.now() + 1.0)]
    assert over == [False, False, False, True]


def test_a_push_without_a_request_for_values_gets_none() -> None:
    bench = Bench(Async(), 1)
    session = bench.step(1, 0, pull=False)
    pieces = session.feed([part(*range(COUNT))])
    assert not any(piece.values is not None for piece in pieces)
    assert session.is_over


def test_more_or_fewer_rows_than_announced_are_an_error() -> None:
    bench = Bench(Async(), 1)
    session = bench.step(1, 0, rows=2)
    session.feed([part(0)])
    assert session.missing == "1 of 2 announced rows are missing"
    with pytest.raises(MessageError, match="received 1 more rows"):
        session.feed([part(1, 2)])
    assert bench.shard.version_range() == (0, 1), "part of the message was applied"


def test_a_step_with_an_ended_membership_is_answered_immediately() -> None:
    bench = Bench(Sync(), 1, 2)
    session = bench.step(1, 0)
    session.feed([part(*range(COUNT))])
    bench.shard.set_members(ViewRequest(plan_hash="p", master_generation=1, serial=2, members=[]))
    (pieces,) = bench.drained(session)
    assert {piece.outcome for piece in pieces} == {Outcome.NOT_MEMBER}
    assert session.is_over


def test_the_caller_can_check_the_client_while_nothing_changes() -> None:
    bench = Bench(Sync(), 1)
    waiting = deque([Wanted(range(COUNT), 1)])
    awaited = awaited_values(bench.shard, 0, waiting, bench.clock, bench.clock.now() + 1e-9)
    assert next(awaited) == []
    bench.clock.advance(1.0)
    assert list(awaited) == []
    assert [wanted.blocks for wanted in waiting] == [one(block) for block in range(COUNT)]
