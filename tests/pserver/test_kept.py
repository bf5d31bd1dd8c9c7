"""Cuts on request: kept for a minute, replaced by newer ones, and given up if nobody waits for them."""

from __future__ import annotations

import numpy as np
import pytest

from flightedl.domain.consistency.modes import Sync
from flightedl.domain.model.optimizers import SGD
from flightedl.domain.model.parameters import ParameterSpec
from flightedl.domain.model.sharding import plan_shards
from flightedl.errors import NotFoundError
from flightedl.messages.control import CutRequest, OrderNumber, ViewMember, ViewRequest
from flightedl.messages.parameters import BatchIdentity, PushHeader
from flightedl.pserver.cuts.kept import _ASKED_S, KEPT_S, RequestedCuts
from flightedl.pserver.shard import Shard
from flightedl.wire.rows import decode_batch, encode_rows
from tests.support.clock import FakeClock


class Bench:
    """The cuts of a pserver in sync mode, whose only member closes a round with each push."""

    def __init__(self) -> None:
        self.clock = FakeClock(100.0)
        self.shard = Shard(plan_shards([ParameterSpec("w", (7,))], 1), 0, SGD(lr=1.0), Sync(), on_lost=pytest.fail)
        member = ViewMember(trainer="t", generation=1, member=1, first_round=0)
        self.shard.set_members(ViewRequest(plan_hash="p", master_generation=1, serial=1, members=[member]))
        self.copying = self.shard.copying
        self.cuts = RequestedCuts(self.copying, self.clock)

    def push(self, batch: int) -> None:
        header = PushHeader(
            trainer="t",
            generation=1,
            plan_hash="p",
            member=1,
            identity=BatchIdentity(epoch=0, task=0, batch=batch, batch_count=10),
            weight=1.0,
            rows=1,
        )
        self.shard.push_rows(header, decode_batch(encode_rows([0], [batch], [np.ones(7, np.float32)])))

    def order(self, number: int, at_round: int) -> str:
        return self.cuts.order(CutRequest(OrderNumber(1, number, 0), at_round, plan_hash="p")).state

    def versions(self, number: int) -> tuple[int, int]:
        return self.cuts.kept((1, number)).versions


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_cut_has_the_state_of_its_round_and_is_kept_for_a_minute(bench: Bench) -> None:
    assert bench.order(1, 1) == "waiting"
    with pytest.raises(NotFoundError, match="request a new one"):
        bench.versions(1)
    for batch in range(3):
        bench.push(batch)
    assert bench.order(1, 1) == "taken"
    assert bench.versions(1) == (1, 1)
    assert bench.copying.under_way == {}
    bench.clock.advance(KEPT_S - 1)
    bench.cuts.expire()
    assert bench.versions(1) == (1, 1)
    bench.clock.advance(1)
    bench.cuts.expire()
    with pytest.raises(NotFoundError, match="request a new one"):
        bench.versions(1)


def test_a_newer_request_replaces_a_cut(bench: Bench) -> None:
    bench.push(0)
    assert bench.order(1, 1) == "taken"
    assert bench.order(2, 0) == "refused", "the round is over"
    with pytest.raises(NotFoundError):
        bench.versions(1)
    assert bench.order(3, 1) == "taken"
    assert bench.versions(3) == (1, 1)
    assert bench.order(1, 1) == "taken", "the progress of the newest request"
    assert bench.versions(3) == (1, 1)


def test_a_cut_for_which_the_master_no_longer_waits_does_not_keep_blocks_from_moving(bench: Bench) -> None:
    for _ in range(3):
        assert bench.order(1, 5) == "waiting"
        bench.clock.advance(_ASKED_S - 1)
        bench.cuts.expire()
    assert len(bench.copying.under_way) == 1
    bench.clock.advance(1)
    bench.cuts.expire()
    assert bench.copying.under_way == {}
    assert bench.order(1, 5) == "failed"
    bench.push(0)
    assert bench.order(2, 1) == "taken"
    assert bench.versions(2) == (1, 1)
