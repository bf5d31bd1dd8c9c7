"""A simulated pserver answers a master as a real one does, also without values and after its lease."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from flightedl.domain.consistency.modes import Sync
from flightedl.domain.pserver.life_values import Facts, Seen
from flightedl.domain.recovery.replay import AppliedSummary
from flightedl.errors import FencedError, MessageError, NotReadyError, ReplacedError
from flightedl.messages.base import OfPlan
from flightedl.messages.control import (
    AppliedReply,
    AppliedRequest,
    OrderNumber,
    ReloadRequest,
    SealRequest,
    SnapshotReply,
    SnapshotRequest,
    ViewMember,
    ViewReply,
    ViewRequest,
)
from flightedl.messages.declarations import DeclaredModel
from tests.simulation.cores.cluster import Cluster
from tests.simulation.cores.job import declaration_of
from tests.simulation.cores.pserver import Pserver

#: A generation higher than that of every master in these runs.
MASTER = 1_000_000


class Asked:
    """A pserver of a job without faults, and its answers."""

    def __init__(self) -> None:
        self.cluster = Cluster(3, fault_scale=0.0, mode="sync", recovery="replay")
        self.pserver = next(p for p in self.cluster.processes if isinstance(p, Pserver))
        self.plan_hash = self.model().plan_hash

    def model(self) -> DeclaredModel:
        model = declaration_of(Sync(), self.cluster.pserver_count, self.cluster.shape.cut_for).model
        assert model is not None
        return model

    def run_until_it_serves(self) -> None:
        while not self.pserver.is_serving:
            assert self.cluster.world.step()

    def run_until_it_has_an_index(self) -> None:
        while not self.pserver.generation:
            assert self.cluster.world.step()

    def ask(self, request: OfPlan, generation: int | None = None) -> Any:
        answers: list[Any] = []
        self.pserver.control((self.pserver.generation if generation is None else generation, request), answers.append)
        (answer,) = answers
        return answer

    def applied(self) -> AppliedRequest:
        return AppliedRequest(plan_hash=self.plan_hash)

    def view(self, serial: int, *members: ViewMember, master: int = MASTER) -> ViewRequest:
        return ViewRequest(
            plan_hash=self.plan_hash, master_generation=master, serial=serial, members=list(members), mode=None
        )

    def snapshot(self, number: int, at_round: int | None = None) -> SnapshotRequest:
        name = f"c-{number}/shard"
        return SnapshotRequest(OrderNumber(MASTER, number, 1), at_round, name, plan_hash=self.plan_hash)

    def seal(self, master: int = MASTER) -> SealRequest:
        return SealRequest(plan_hash=self.plan_hash, master_generation=master, epochs=[(0, 1)])

    def reload(self, master: int = MASTER) -> ReloadRequest:
        return ReloadRequest(plan_hash=self.plan_hash, master_generation=master)


@pytest.fixture
def asked() -> Asked:
    return Asked()


def test_a_pserver_without_values_accepts_views_and_reloads(asked: Asked):
    asked.run_until_it_has_an_index()
    assert isinstance(asked.ask(asked.view(1)), NotReadyError), "there are no blocks yet"
    asked.pserver.apply(Seen(Facts(asked.model())))
    for request in (asked.applied(), asked.snapshot(1), asked.seal()):
        assert isinstance(asked.ask(request), NotReadyError)
    assert isinstance(asked.ask(asked.view(1)), ViewReply)
    assert asked.ask(asked.reload()) is None
    assert not asked.pserver.is_alive


def test_a_pserver_without_its_values_reports_that(asked: Asked):
    asked.run_until_it_has_an_index()
    asked.pserver.apply(Seen(Facts(asked.model(), election=7)))
    reply = asked.ask(asked.applied())
    assert isinstance(reply, AppliedReply)
    assert reply.lacks_election == 7
    assert not AppliedSummary.decode(reply.summary).done


def test_a_pserver_reports_its_batches_and_skipped_checkpoints(asked: Asked):
    asked.run_until_it_serves()
    reply = asked.ask(asked.applied())
    assert isinstance(reply, AppliedReply)
    assert (reply.checkpoint, reply.skipped, reply.rejected, reply.lacks_election) == (None, [], [], None)
    assert AppliedSummary.decode(reply.summary).has_blocks


def test_a_view_is_accepted_and_an_older_one_is_outdated(asked: Asked):
    asked.run_until_it_serves()
    member = ViewMember(trainer="t", generation=1, member=900, first_round=0)
    taken = asked.ask(asked.view(2, member))
    assert isinstance(taken, ViewReply)
    assert (taken.serial, taken.refused, taken.outdated) == (2, [], False)
    assert asked.pserver._blocks().protocol.members == [900]
    assert asked.ask(asked.view(1)).outdated
    again = msgspec.structs.replace(member, first_round=5)
    assert isinstance(asked.ask(asked.view(3, again)), MessageError)


def test_the_same_request_orders_a_snapshot_and_asks_for_its_progress(asked: Asked):
    asked.run_until_it_serves()
    first = asked.ask(asked.snapshot(50))
    assert isinstance(first, SnapshotReply)
    assert first.state == "waiting"
    while (reply := asked.ask(asked.snapshot(50))).state in {"waiting", "taken"}:
        assert asked.cluster.world.step()
    assert reply.state == "written"
    assert reply.file is not None
    assert reply.file.name == "c-50/shard"
    assert asked.ask(asked.snapshot(49)).order.number == 50


def test_requests_for_another_plan_or_process_or_from_an_old_master_are_rejected(asked: Asked):
    asked.run_until_it_serves()
    for request in (asked.applied(), asked.view(1), asked.snapshot(1), asked.seal(), asked.reload()):
        other = msgspec.structs.replace(request, plan_hash="0" * 32)
        assert type(asked.ask(other)) is FencedError
        assert isinstance(asked.ask(request, asked.pserver.generation + 1), ReplacedError)
    asked.ask(asked.view(1))
    for request in (asked.seal(master=MASTER - 1), asked.reload(master=MASTER - 1)):
        assert type(asked.ask(request)) is FencedError
    assert asked.ask(asked.seal()) is None
    assert asked.pserver.is_alive


def test_a_pserver_without_its_lease_rejects_requests_and_ends(asked: Asked):
    asked.run_until_it_serves()
    asked.cluster.etcd.revoke(asked.pserver.lease)
    assert isinstance(asked.ask(asked.applied()), ReplacedError)
    assert not asked.pserver.is_alive
