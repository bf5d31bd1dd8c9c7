"""Real pservers in this process, without etcd, and a trainer's parameters connected to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np

from flightedl.adapters.clock import SystemClock
from flightedl.client.model.parameters import Parameters
from flightedl.client.waiting import Waiting
from flightedl.domain.consistency.modes import Mode
from flightedl.domain.exactly_once import batches
from flightedl.domain.exactly_once.accumulation import SumAgain
from flightedl.domain.exactly_once.applied import AppliedBatches
from flightedl.domain.model.optimizers import SGD, Optimizer
from flightedl.domain.model.parameters import ParameterSpec
from flightedl.domain.model.sharding import ShardPlan, placed, placement_of, plan_shards
from flightedl.domain.tables.spec import TableSpec
from flightedl.domain.trainer.batches import Batch, CurrentBatch
from flightedl.domain.trainer.membership import Begun, TrainerMembership
from flightedl.errors import FencedError, FlightedlError, UnavailableError
from flightedl.messages.control import ViewMember, ViewRequest
from flightedl.messages.declarations import Placement
from flightedl.messages.parameters import BatchIdentity, PushHeader
from flightedl.process.shared_memory import SharedMemory
from flightedl.pserver.flight import PserverFlight
from flightedl.pserver.meter import Meter
from flightedl.pserver.shard import Shard
from flightedl.rpc import Connection, FlightServer, ServerIdentity
from flightedl.wire.rows import Row

from ..pserver.carrier import carry
from ..pserver.plans import require_plan

CLOCK = SystemClock()


@dataclass
class OneShard:
    """A serving pserver, as the verbs see it."""

    state: Shard
    has_lease: bool = True
    meter: Meter = field(default_factory=Meter)

    def shard(self, plan_hash: str) -> Shard:
        require_plan(self.state, plan_hash)
        return self.state

    def shard_for_init(self, plan_hash: str, election: int) -> Shard:
        return self.shard(plan_hash)

    def first_values_received(self, election: int) -> tuple[int, int]:
        return self.state.initialized_count(election), self.state.block_count

    @property
    def store(self) -> SharedMemory | None:
        return self.state.memory

    def require_lease(self) -> None:
        if not self.has_lease:
            raise FencedError("the lease is over")


class Trainer:
    """One member's parameters, and the scope that they consult."""

    def __init__(self, cluster: Cluster, member: int, **more: object) -> None:
        self.trainer, self.generation = f"t{member}", member
        self.membership = TrainerMembership()
        self.membership.member = self._member = member
        #: The newest batch.
        self.current: CurrentBatch | None = None
        self.parameters = cluster.parameters(self, **more)
        self.parameters.refresh()

    def require_final(self, index: int, generation: int) -> None:
        """The job has not ended."""

    @property
    def lost(self) -> bool:
        """True if the member must join again."""
        return self.membership.member == 0

    def begin(
        self, batch: int, of: int = 100, records: int = 1, again: SumAgain | None = None, step: int = 0
    ) -> CurrentBatch:
        self.parameters.open_batch(
            Batch(0, 0, 0, batch, of, records, again=again), Begun(self._member, step or batch + 1)
        )
        self.current = self.parameters.steps.current
        assert self.current is not None
        return self.current

    def step(self, batch: int, gradients: Mapping[str, np.ndarray]) -> None:
        self.parameters.step(gradients)
        assert self.current is not None
        if not self.current.must_repeat:
            self.parameters.close_batch()


def waiting(give_up_s: float = 20.0) -> Waiting:
    """Return a wait that stays silent at first."""
    return Waiting(CLOCK, 5.0, give_up_s, lambda _: None)


class Cluster:
    """Pservers that have the first values, and a view of members."""

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
        initial: Mapping[str, np.ndarray] | None = None,
        tables: Sequence[TableSpec] = (),
        shares_memory: bool = True,
        is_placed: bool = False,
    ) -> None:
        self.shares_memory = shares_memory
        self.mode, self.wire = mode, wire
        self.initial = initial
        self.specs = [
            ParameterSpec(name, tuple(shape), dtype if initial is None else initial[name].dtype.name)
            for name, shape in shapes.items()
        ]
        self.optimizer = optimizer or SGD(lr=1.0)
        self.plan: ShardPlan = plan_shards(self.specs, pservers, tables=tables)
        if is_placed:
            self.plan = placed(self.plan, placement_of(self.plan))
        self.shards: list[Shard] = []
        self.services: list[OneShard] = []
        #: All servers, including replaced ones.
        self.servers: list[FlightServer] = []
        self.connections: list[Connection] = []
        #: Present process of each index: its generation and connection, or the error of looking for it.
        self.present: list[tuple[int, Connection] | FlightedlError] = []
        for index in range(pservers):
            self.present.append(self._started(index, 1))
        self.trainers: list[Trainer] = []
        self._view: ViewRequest | None = None
        self.view(*range(1, members + 1))

    def _started(self, index: int, generation: int) -> tuple[int, Connection]:
        """Start a pserver with the first values."""
        shard = Shard(self.plan, index, self.optimizer, self.mode, self.wire, shares_memory=self.shares_memory)
        for number in shard.numbers:
            shard.initialize(1, Row(number, 0, memoryview(self._first_values(number)).cast("B")))
        identity = ServerIdentity("bench", "pserver", index, generation)
        service = OneShard(shard)
        server = FlightServer(PserverFlight(service, CLOCK).routes(), identity, clock=CLOCK)
        server.start_serving(identity)
        self.servers.append(server)
        self.connections.append(Connection(server.address, expected=identity, shares_memory=self.shares_memory))
        self.shards[index : index + 1] = [shard]
        self.services[index : index + 1] = [service]
        return generation, self.connections[-1]

    def _first_values(self, number: int) -> np.ndarray:
        """Return the bytes of a block's first values: zeros by default."""
        block = self.plan.block(number)
        spec = self.specs[block.parameter]
        if self.initial is None:
            return np.zeros(block.size * spec.seen_item_bytes, np.uint8)
        return np.ascontiguousarray(self.initial[spec.name]).reshape(-1)[block.start : block.stop].view(np.uint8)

    def replace(self, index: int, generation: int) -> None:
        """Replace a pserver by a new process that has only the first values."""
        self.present[index] = self._started(index, generation)
        assert self._view is not None
        self.shards[index].set_members(self._view)

    def move(self, block: int, to: int) -> bool:
        """Move a block to another pserver and make the next placement. Return False if a round has begun."""
        owners = self.plan.block_pservers.copy()
        if not carry(self.shards[owners[block]], self.shards[to], range(block, block + 1)):
            return False
        owners[block] = to
        placement = placement_of(replace(self.plan, block_pservers=owners), self.plan.placement + 1)
        self._place(placement)
        return True

    def move_buckets(self, to: int) -> bool:
        """Move the border between the buckets of two pservers towards ``to``, at most to the end of a span.

        Return False if a round has begun, or spans have just been joined.
        """
        assert self.plan.bucket_pservers is not None
        at = self.plan.buckets_of(0).stop
        to += self.plan.block_count
        source, target = (1, 0) if to > at else (0, 1)
        span = self.shards[source].rows.span(at if to > at else at - 1).numbers
        numbers = range(at, min(to, span.stop)) if to > at else range(max(to, span.start), at)
        try:
            if not carry(self.shards[source], self.shards[target], numbers):
                return False
        except UnavailableError:
            return False
        owners = self.plan.bucket_pservers.copy()
        owners[numbers.start - self.plan.block_count : numbers.stop - self.plan.block_count] = target
        placement = placement_of(replace(self.plan, bucket_pservers=owners), self.plan.placement + 1)
        self._place(placement)
        return True

    def _place(self, placement: Placement) -> None:
        self.plan = placed(self.plan, placement)
        for shard in self.shards:
            shard.place(self.plan.hash)

    def view(self, *members: int, serial: int = 1, trainer: str = "", first_round: int = 0) -> None:
        messages = [
            ViewMember(trainer=trainer or f"t{m}", generation=m, member=m, first_round=first_round) for m in members
        ]
        self._view = ViewRequest(plan_hash=self.plan.hash, master_generation=1, serial=serial, members=messages)
        for shard in self.shards:
            shard.set_members(self._view)
            shard.changes.announce()

    def header(self, batch: int, **wrong: object) -> PushHeader:
        """Return the header of the first member's step for all blocks of the first pserver."""
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
        present = self.present[index]
        if isinstance(present, FlightedlError):
            raise present
        return present

    def parameters(self, scope: Any, give_up_s: float = 20.0, **more: object) -> Parameters:
        given = {
            "clip_norm": self.optimizer.clip_norm,
            "unclipped": self.optimizer.unclipped(spec.name for spec in self.specs),
            "assigned": self.optimizer.assigned(spec.name for spec in self.specs),
            "newest_plan": lambda _plan, _wait_s: self.plan,
            **more,
        }
        return Parameters(self.plan, self.mode, self, scope, lambda: waiting(give_up_s), CLOCK, wire=self.wire, **given)

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
            shard._protocol.check()


def missing_batches(applied: AppliedBatches, epoch: int, task: int, batch_count: int) -> list[int]:
    """Return the batches of a task that some block lacks."""
    blocks = applied.numbers
    return [
        b for b in range(batch_count) if not all(applied.has(block, batches.Batch(epoch, task, b)) for block in blocks)
    ]
