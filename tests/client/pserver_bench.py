"""Real pservers in this process, without etcd, and a trainer's parameters connected to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from flightedl.adapters.clock import SystemClock
from flightedl.client.batches import CurrentBatch
from flightedl.client.parameters import Parameters
from flightedl.client.waiting import Waiting
from flightedl.domain.modes import Mode
from flightedl.domain.optimizers import SGD, Optimizer
from flightedl.domain.parameters import ParameterSpec
from flightedl.domain.sharding import ShardPlan, plan_shards
from flightedl.errors import FencedError
from flightedl.pserver.flight import PserverFlight
from flightedl.pserver.shard import ShardState
from flightedl.rpc import Connection, FlightServer, ServerIdentity
from flightedl.wire.messages_orders import ViewMemberMessage, ViewRequest
from flightedl.wire.messages_parameters import BatchIdentity, PushHeader
from flightedl.wire.messages_work import Assignment
from flightedl.wire.rows import Row

CLOCK = SystemClock()


@dataclass
class OneShard:
    """What the verbs ask a pserver's service for, once it serves."""

    state: ShardState
    has_lease: bool = True

    def shard(self, plan_hash: str) -> ShardState:
        self.state.require_plan(plan_hash)
        return self.state

    shard_for_init = shard

    def require_lease(self) -> None:
        if not self.has_lease:
            raise FencedError("the lease is over")

    def look_at_election(self) -> None:
        """It has values."""


class Trainer:
    """One member's parameters; also the scope that they ask."""

    def __init__(self, cluster: Cluster, member: int, **more: object) -> None:
        self.trainer, self.generation, self.member = f"t{member}", member, member
        self.current: CurrentBatch | None = None
        self.lost = 0
        self.parameters = Parameters(
            cluster.plan, cluster.mode, cluster, self, _waiting, CLOCK, wire=cluster.wire, **more
        )
        self.parameters.refresh()

    def lost_membership(self) -> None:
        self.lost += 1

    def begin(self, batch: int) -> CurrentBatch:
        assignment = Assignment(epoch=0, position=0, task=0, attempt=0, first_batch=0, end_batch=100, batch_count=100)
        self.current = CurrentBatch(assignment, batch, 1, member=self.member, step=batch + 1)
        return self.current

    def step(self, batch: int, gradients: Mapping[str, np.ndarray]) -> None:
        self.parameters.step(gradients)
        assert self.current is not None
        self.parameters.arrive(self.current)


def _waiting() -> Waiting:
    return Waiting(CLOCK, 5.0, 20.0, lambda _: None)


class Cluster:
    """Pservers with the first values in place, and a view of members."""

    def __init__(
        self,
        shapes: Mapping[str, Sequence[int]],
        mode: Mode,
        *,
        pservers: int = 1,
        members: int = 1,
        optimizer: Optimizer | None = None,
        wire: str = "",
        dtype: str = "float32",
    ) -> None:
        self.mode, self.wire = mode, wire
        specs = [ParameterSpec(name, tuple(shape), dtype) for name, shape in shapes.items()]
        self.plan: ShardPlan = plan_shards(specs, pservers)
        self.shards = [ShardState(self.plan, i, optimizer or SGD(lr=1.0), mode, wire) for i in range(pservers)]
        self.services = [OneShard(shard) for shard in self.shards]
        self.servers = []
        self.connections = []
        for index, shard in enumerate(self.shards):
            for number in shard.numbers:
                zeros = np.zeros(self.plan.block(number).size * specs[0].seen_item_bytes, np.uint8)
                shard.initialize(1, Row(number, 0, memoryview(zeros).cast("B")))
            identity = ServerIdentity("bench", "pserver", index, 1)
            routes = PserverFlight(self.services[index], CLOCK, lambda: None).routes()
            server = FlightServer(routes, identity, clock=CLOCK)
            server.start_serving(identity)
            self.servers.append(server)
            self.connections.append(Connection(server.address, expected=identity))
        self.trainers: list[Trainer] = []
        self.view(*range(1, members + 1))

    def view(self, *members: int, serial: int = 1) -> None:
        messages = [ViewMemberMessage(trainer=f"t{m}", generation=m, member=m, first_round=0) for m in members]
        for shard in self.shards:
            shard.set_members(
                ViewRequest(plan_hash=shard.plan_hash, master_generation=1, serial=serial, members=messages)
            )
            shard.announce_changes()

    def header(self, batch: int, **wrong: object) -> PushHeader:
        """Of a step of the first member, to all blocks of the first pserver."""
        values = {
            "trainer": "t1",
            "generation": 1,
            "plan_hash": self.plan.hash,
            "member": 1,
            "identity": BatchIdentity(epoch=0, task=batch, batch=0, batch_count=1),
            "weight": 1.0,
            "rows": len(self.shards[0].numbers),
        }
        return PushHeader(**(values | wrong))

    def pserver(self, index: int) -> tuple[int, Connection]:
        return 1, self.connections[index]

    def trainer(self, member: int = 1, **more: object) -> Trainer:
        made = Trainer(self, member, **more)
        self.trainers.append(made)
        return made

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for trainer in self.trainers:
            trainer.parameters.close()
        for connection in self.connections:
            connection.close()
        for server in self.servers:
            server.stop(0.5)
        for shard in self.shards:
            for unit in shard._units:
                unit.rounds.check()
            shard._applied.check()
