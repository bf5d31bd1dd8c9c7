"""A pserver of the simulated cluster: the production rounds, views, applied sets and snapshots around plain lists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from flightedl.domain.accumulation import having_bits, lacking_of
from flightedl.domain.applied import AppliedBatches
from flightedl.domain.batches import Batch
from flightedl.domain.checkpoints_manifest import Manifest, ShardFile, Skipped, candidates, examine, manifest_name
from flightedl.domain.checkpoints_pointer import latest_of
from flightedl.domain.checkpoints_replay import AppliedSummary
from flightedl.domain.checkpoints_restore import applied_of, recut
from flightedl.domain.checkpoints_snapshot import PserverSnapshots
from flightedl.domain.checkpoints_values import SnapshotOrder, SnapshotProgress
from flightedl.domain.modes import Async, Sync
from flightedl.domain.rounds import BlockRounds
from flightedl.domain.rounds_values import Accumulate, Apply, Arrived, NotMember, Pull, Stale
from flightedl.domain.views import PserverView, View, ViewVerdict, view_of
from flightedl.errors import CorruptError, FencedError, FlightedlError, MessageError, NotReadyError, ReplacedError
from flightedl.messages.base import OfPlan
from flightedl.messages.control import (
    AppliedReply,
    AppliedRequest,
    OfMaster,
    ReloadRequest,
    SealRequest,
    SnapshotReply,
    SnapshotRequest,
    ViewReply,
    ViewRequest,
)
from flightedl.testing.simulation.etcd import ADDRESS, DONE, INIT, STATE, Transaction, claimed
from flightedl.testing.simulation.job import blocks_of, plan_of
from flightedl.testing.simulation.store import StoredShard
from flightedl.testing.simulation.world import Process, Reply, Violation

if TYPE_CHECKING:
    from flightedl.testing.simulation.cluster import Cluster

LEASE_TTL_S = 2.0
_PULL_S = 1.0


class Push(NamedTuple):
    """One batch, or several added up, for all blocks of one pserver."""

    trainer: str
    generation: int
    member: int
    pserver_generation: int
    batches: tuple[Batch, ...]
    #: Of their task.
    batch_count: int
    #: (block, base version, weight)
    rows: tuple[tuple[int, int, float], ...]
    step: int


class PullRequest(NamedTuple):
    """Asks for blocks at or above versions."""

    member: int
    pserver_generation: int
    wanted: tuple[tuple[int, int], ...]


@dataclass(slots=True)
class Block:
    """One block: how often each batch is in it, and what waits in the open round."""

    number: int
    rounds: BlockRounds
    values: list[int]
    updates: int = 0
    accumulator: list[int] = field(default_factory=list)
    #: The simulation's own account, which the rounds are checked against.
    first_rounds: dict[int, int] = field(default_factory=dict)
    arrived: set[int] = field(default_factory=set)
    #: Which first values they grew from, see ``StoredShard``.
    model: tuple[int, int] | None = None


class Pserver(Process):
    """One process; it takes an index, loads a checkpoint, announces what it has, and serves."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        super().__init__(cluster.world, name)
        self.cluster = cluster
        self.flaws = cluster.flaws
        self.index = -1
        self.generation = 0
        self.lease = cluster.etcd.grant(self, LEASE_TTL_S)
        self.loaded: int | None = None
        #: Checkpoints that could not be loaded, by their numbers.
        self.skipped: dict[int, Skipped] = {}
        #: The highest generation of a master that was heard of.
        self._newest_master = 0
        self.blocks: dict[int, Block] = {}
        self.ordered: list[Block] = []
        self.positions: dict[int, int] = {}
        self.applied = AppliedBatches(0)
        self.view = PserverView()
        self.snapshots = PserverSnapshots()
        self.copies: dict[int, tuple[int, int, tuple[int, ...]]] = {}
        self.is_serving = False
        self._waiting: list[tuple[PullRequest, Reply, float]] = []
        #: The election whose values it should have, and has not.
        self.lacks: int | None = None
        #: The election whose values were sent to it.
        self.given: int | None = None
        cluster.etcd.watch(self, self._look_around)
        self.later(0.05, self._claim)

    def _look_around(self) -> None:
        self._look_at_election()

    def _look_at_election(self) -> None:
        """First values that were sent to it count when the election is done."""
        init = self.directory.get(INIT)
        if self.is_serving or self.given is None or init is None or init.value != DONE:
            return
        if init.created == self.given:
            self._begin(None, [])

    def end(self, why: str) -> None:
        """Exit; the supervisor starts another one."""
        self.world.note("{} ends: {}", self.name, why)
        self.cluster.ended(self)

    # an index

    def _claim(self) -> None:
        cluster = self.cluster
        if self.index >= 0:
            return
        if self.lease.is_lost:
            self.end("its lease was lost before it had an index")
            return
        taken = self.directory
        free = [i for i in range(cluster.pserver_count) if f"ps/{i}" not in taken]
        if not free:
            self.later(0.2, self._claim)
            return
        index = free[0]
        key = f"ps/{index}"

        def answered(result: Any) -> None:
            if self.index >= 0:
                return
            if generation := claimed(result, key, self):
                self.index, self.generation = index, generation
                self.world.note("{} holds index {}, generation {}", self.name, index, generation)
                self._get_values()
            else:
                self._claim()

        transaction = Transaction(created={key: 0}, puts={key: self}, lease=self.lease)
        self.world.call(
            self, cluster.etcd, cluster.etcd.transact, transaction, answered, lambda: self.end("no answer to its claim")
        )

    # values

    def _get_values(self) -> None:
        """Load them where there are some; else say that they are lacking, or wait for the first ones."""

        def read(found: dict[str, Any]) -> None:
            if self.is_serving:
                return
            init, state = found[INIT], found[STATE]
            pointer = None if state is None else latest_of(state.value["checkpoints"])
            if init is None or init.value != DONE:
                self.lacks = None
                self._wait_for_values()
            elif init.created == self.given:
                self._begin(None, [])
            elif pointer is not None:
                self.lacks = None
                self._load(None)
            else:
                if self.lacks is None:
                    self.world.note("{} lacks the values of election {}", self.name, init.created)
                self.lacks = init.created
                self._wait_for_values()

        etcd = self.cluster.etcd
        self.world.call(self, etcd, etcd.read, [INIT, STATE], read, self._wait_for_values)

    def _wait_for_values(self) -> None:
        self.later(0.3, lambda: None if self.is_serving else self._get_values())

    def initialize(self, message: tuple[int, int], reply: Reply) -> None:
        """First values, of an election."""
        generation, election = message
        if generation != self.generation or self.is_serving or not self.lease.is_held():
            return
        if self.given is None or election >= self.given:
            self.given = election
            reply(("given",))

    # loading

    def _load(self, below: int | None) -> None:
        """Find the newest checkpoint that can be read, below a number."""
        cluster = self.cluster

        def listed(sizes: dict[str, int]) -> None:
            numbers = [n for n in candidates(sizes) if below is None or n < below]
            loadable = cluster.loadable()
            if loadable is not None:
                numbers = [n for n in numbers if n in loadable]
            if numbers:
                self._examine(numbers[0], sizes)
            else:
                self._begin(None, [])

        cluster.store.list(self, listed, lambda: self.later(0.2, lambda: self._load(below)))

    def _examine(self, number: int, sizes: dict[str, int]) -> None:
        def read(found: tuple[bytes, bool] | None) -> None:
            result = None if found is None else examine(number, found[0], sizes, "job")
            if isinstance(result, Manifest):
                plan = plan_of(self.cluster.pserver_count, self.cluster.shape.cut_for)
                saved = plan_of(result.pserver_count, result.cut_for)
                self._read_parts(result, list(recut(result, saved, plan, self.index)), [])
            else:
                self.skipped[number] = result or Skipped(number, "its manifest is gone")
                self.world.note("{} skips checkpoint {}: {}", self.name, number, result)
                self._load(number)

        self.cluster.store.read(self, manifest_name(number), read, lambda: self.later(0.2, lambda: self._load(None)))

    def _read_parts(self, manifest: Manifest, parts: list[Any], found: list[StoredShard]) -> None:
        if len(found) == len(parts):
            self._begin(manifest, list(zip(parts, found, strict=True)))
            return
        name = parts[len(found)].file.name

        def read(stored: tuple[StoredShard, bool] | None) -> None:
            if stored is None or (stored[1] and "hashes are not compared" not in self.flaws):
                self.world.note("{} cannot use {}", self.name, name)
                self.skipped[manifest.number] = Skipped(manifest.number, f"{name} cannot be used")
                self._load(manifest.number)
            else:
                self._read_parts(manifest, parts, [*found, stored[0]])

        self.cluster.store.read(self, name, read, lambda: self.later(0.2, lambda: self._load(None)))

    def _begin(self, manifest: Manifest | None, found: list[tuple[Any, StoredShard]]) -> None:
        """Build the blocks, announce, serve."""
        cluster = self.cluster
        numbers = blocks_of(cluster.pserver_count, cluster.shape.cut_for, self.index)
        self.loaded = None if manifest is None else manifest.number
        saved: dict[int, tuple[int, int, tuple[int, ...]]] = {}
        first = None if self.given is None or manifest is not None else (cluster.life, self.given)
        models: dict[int, tuple[int, int] | None] = dict.fromkeys(numbers, first)
        if found:
            sets = {part.file.name: AppliedBatches.decode(shard.applied) for part, shard in found}
            self.applied = applied_of([part for part, _ in found], sets)
            for part, shard in found:
                for number in part.blocks:
                    place = shard.blocks.index(number)
                    saved[number] = (shard.versions[place], 0, shard.values[place])
                    models[number] = shard.model
        else:
            self.applied = AppliedBatches(len(numbers))
        if "snapshot without applied" in self.flaws and manifest is not None:
            self.applied = AppliedBatches(len(numbers))
        mode = cluster.stored_mode()
        self.view = PserverView(mode)
        for position, number in enumerate(numbers):
            version, updates, values = saved.get(number, (0, 0, (0,) * cluster.shape.element_count))
            block = Block(number, BlockRounds(mode, version), list(values), updates)
            block.model = models[number]
            self.blocks[number] = block
            self.ordered.append(block)
            self.positions[number] = position
        self.world.note("{} index {} loaded checkpoint {}", self.name, self.index, self.loaded)
        self.is_serving = True
        self.lacks = None

    # the master

    def highest(self) -> int:
        """What a member that joins now has to start at, or later."""
        return max((block.rounds.position for block in self.ordered), default=0)

    def _serves(self, pserver_generation: int, reply: Reply) -> bool:
        """Whether a request may be carried out."""
        if not self.lease.is_held() and "no lease check" not in self.flaws:
            self.end("its lease was lost")
            return False
        if not self.is_serving:
            reply(("not ready",))
            return False
        if pserver_generation != self.generation:
            reply(("fenced",))
            return False
        return True

    def control(self, message: tuple[int, OfPlan], reply: Reply) -> None:
        """A request of a master's, to a process of this generation; the reply, or the error that it gets instead."""
        generation, request = message
        if not self.lease.is_held() and "no lease check" not in self.flaws:
            reply(ReplacedError(f"the lease of {self.name} is over"))
            self.end("its lease was lost")
            return
        try:
            if generation != self.generation:
                raise ReplacedError(f"this is generation {self.generation}, not {generation}")
            reply(self._controlled(request))
        except FlightedlError as error:
            reply(error)
            return
        if isinstance(request, ReloadRequest):
            self.end("it goes back to the newest checkpoint, or to first values")
        elif isinstance(request, ViewRequest):
            self._serve_waiting()

    def _controlled(self, request: OfPlan) -> AppliedReply | SnapshotReply | ViewReply | None:
        if request.plan_hash != plan_of(self.cluster.pserver_count, self.cluster.shape.cut_for).hash:
            raise FencedError("the master means another shard plan")
        self._hear_of_master(request)
        if isinstance(request, ReloadRequest):
            return None
        if isinstance(request, AppliedRequest) and self.lacks is not None and not self.is_serving:
            return AppliedReply(summary=AppliedSummary().encode(), lacks_election=self.lacks)
        if not self.is_serving:
            raise NotReadyError(f"{self.name} has no values yet")
        if isinstance(request, ViewRequest):
            verdict = self._adopt(view_of(request))
            return verdict.reply(request.serial, self._highest_after(verdict))
        if isinstance(request, SnapshotRequest):
            order = SnapshotOrder.of(request)
            return self._take_order(order).reply()
        if isinstance(request, SealRequest):
            for epoch, task_count in request.epochs:
                self.applied.seal(epoch, task_count)
            return None
        assert isinstance(request, AppliedRequest)
        return AppliedReply(
            summary=AppliedSummary.of(self.applied).encode(),
            checkpoint=self.loaded,
            skipped=[f"checkpoint {each.number}: {each.reason}" for each in self.skipped.values()],
            rejected=list(self.skipped),
        )

    def _hear_of_master(self, request: OfPlan) -> None:
        """Know the newest master; an older one's orders are refused."""
        if not isinstance(request, OfMaster | ViewRequest | SnapshotRequest):
            return
        leader = self.directory.get(ADDRESS)
        known = max(self._newest_master, 0 if leader is None else leader.value.generation)
        if isinstance(request, OfMaster) and request.master_generation < known:
            raise FencedError(f"master {request.master_generation} is deposed: {known} leads")
        self._newest_master = max(self._newest_master, request.master_generation)

    def _adopt(self, view: View) -> ViewVerdict:
        """Take a view over in all blocks."""
        before = self.view.number
        if "old views are taken" in self.flaws:
            self.view._master_generation = 0  # noqa: SLF001 - a planted bug
        if (first_mode := self.view.begins_in(view)) is not None:
            for block in self.ordered:
                block.rounds = BlockRounds(first_mode, block.rounds.version)
        verdict = self.view.consider(
            view,
            lambda first: all(b.rounds.can_admit(first) for b in self.ordered),
            lambda at: "a mode begins anywhere" in self.flaws or all(b.rounds.can_switch(at) for b in self.ordered),
        )
        if self.view.number < before:
            raise Violation(f"{self.name} took view {self.view.number} after {before}")
        admit = {member.member_id: member.first_round for member in verdict.admit}
        for block in self.ordered:
            if verdict.switch is not None:
                self._switch(block, verdict)
            block.rounds.change(admit, verdict.remove)
            for member in verdict.remove:
                block.first_rounds.pop(member, None)
            block.first_rounds.update(admit)
            self._settle(block)
        return verdict

    def _highest_after(self, verdict: ViewVerdict) -> int:
        return max((b.rounds.version for b in self.ordered), default=0) if verdict.refuses_mode else self.highest()

    def _switch(self, block: Block, verdict: ViewVerdict) -> None:
        """Close what is open, then begin at the round of the view."""
        assert verdict.switch is not None
        block.rounds.change({}, verdict.remove)
        for member in verdict.remove:
            block.first_rounds.pop(member, None)
        self._settle(block)
        at_round = verdict.switch_round
        if "a mode begins anywhere" in self.flaws:
            at_round = block.rounds.version
        block.rounds.switch(verdict.switch, at_round)
        self._settle(block)
        self._look(block)
        if block.rounds.version != verdict.switch_round:
            raise Violation(f"{self.name}, block {block.number}: begins {verdict.switch} at {block.rounds.version}")

    def _take_order(self, order: SnapshotOrder) -> SnapshotProgress:
        """Begin to copy, if the order is newer than all before; how far the newest one is."""
        versions = [block.rounds.version for block in self.ordered]
        if self.snapshots.take(order, versions, self.highest()) is not None:
            self.copies = {}
            self._name = order.name
            for block in self.ordered:
                self._look(block)
            self._save()
        progress = self.snapshots.progress
        assert progress is not None
        return progress

    # snapshots

    def _look(self, block: Block) -> None:
        """Cut a block when it is time."""
        cut = self.snapshots.cut
        if cut is None or not cut.is_due(self.positions[block.number], block.rounds.version):
            return
        held = () if "marks of the open round are saved" in self.flaws else block.rounds.held
        version = cut.cut(self.positions[block.number], block.rounds.version, held)
        self.copies[block.number] = (version, block.updates, tuple(block.values))

    def _save(self) -> None:
        """When all blocks are cut: write the file."""
        cut = self.snapshots.cut
        if cut is None or not cut.is_complete:
            return
        progress = self.snapshots.progress
        assert progress is not None
        order = progress.order
        is_flawed = "marks after the cut are saved" in self.flaws
        applied = self.applied.copy() if is_flawed else cut.applied(self.applied)
        self.snapshots.taken(order)
        numbers = tuple(self.blocks)
        versions = tuple(self.copies[n][0] for n in numbers)
        model = next((block.model for block in self.ordered), None)
        shard = StoredShard(numbers, versions, tuple(self.copies[n][2] for n in numbers), applied.encode(), model)
        size_bytes = 100 + len(shard.applied) + len(numbers)
        file = ShardFile(
            index=self.index,
            generation=self.generation,
            name=self._name,
            size_bytes=size_bytes,
            hash=f"{hash((self._name, shard.versions)) & (1 << 128) - 1:032x}",
            blocks=len(numbers),
            lowest_version=min(versions, default=0),
            highest_version=max(versions, default=0),
        )

        def done() -> None:
            self.snapshots.written(order, file)

        def failed() -> None:
            self.snapshots.failed(order, "the store failed")

        if "reported before it is written" in self.flaws:
            done()
        self.cluster.store.publish(self, file.name, shard, size_bytes, done, failed)

    # trainers

    def push(self, push: Push, reply: Reply) -> None:
        """A batch; each row is decided for itself. A stream may break off after any row."""
        if not self._serves(push.pserver_generation, reply):
            return
        rows = push.rows
        breaks = self.world.are_faults_on and self.world.random.random() < self.cluster.break_rate
        if breaks:
            self.world.fault("stream broken")
            rows = rows[: self.world.random.randrange(len(rows) + 1)]
        outcomes = []
        for number, base, weight in rows:
            try:
                outcomes.append((number, *self._push_row(self.blocks[number], push, base, weight)))
            except MessageError:
                # It has values of another life of this pserver: it has to pull again.
                outcomes.append((number, "stale", ()))
        self._save()
        self._serve_waiting()
        if not breaks:
            reply(("pushed", tuple(outcomes)))

    def _push_row(self, block: Block, push: Push, base: int, weight: float) -> tuple[str, Sequence[int]]:
        """What becomes of a row, and the places of the batches that are lacking, where a sum was refused."""
        flaws, rounds = self.flaws, block.rounds
        elements = [self.cluster.shape.element_of(batch) for batch in push.batches]
        is_member = self.view.is_member(push.member, push.trainer, push.generation)
        if "apply before check" in flaws and not is_member and weight:
            self._apply(block, elements)
        if not is_member and "no membership check" not in flaws:
            return "not member", ()
        position = self.positions[block.number]
        having = self._having(block, push)
        has = all(having)
        if any(having) and not has and "sums are taken twice" not in flaws:
            return "partly", lacking_of(having_bits(having), len(having))
        before = rounds.version
        outcome = rounds.arrive(
            push.member,
            base,
            weight,
            already_applied=has and "no dedupe" not in flaws,
            batch=push.batches[0],
            batch_count=push.batch_count,
            step=push.step,
        )
        if isinstance(outcome, NotMember | Stale):
            return "not member" if isinstance(outcome, NotMember) else "stale", ()
        if base == before:
            block.arrived.add(push.member)
        if not isinstance(outcome, Arrived) or not has:
            self._mark(position, push)
        if isinstance(outcome, Accumulate):
            if outcome.is_first:
                block.accumulator = []
            block.accumulator.extend(elements)
        elif isinstance(outcome, Apply):
            self._apply(block, elements)
            self._look(block)
        self._settle(block)
        return "done", ()

    def _having(self, block: Block, push: Push) -> list[bool]:
        """Which of the batches the block has; sums come in async mode only."""
        if len(push.batches) > 1 and not isinstance(block.rounds.mode, Async):
            raise Violation(f"{push.trainer} pushes a sum in mode {block.rounds.mode}")
        return [self.applied.has(self.positions[block.number], batch) for batch in push.batches]

    def _mark(self, position: int, push: Push) -> None:
        batches = push.batches[:1] if "only the first of a sum is marked" in self.flaws else push.batches
        for batch in batches:
            if self.applied.mark(position, batch, push.batch_count) and self.snapshots.cut is not None:
                self.snapshots.cut.marked(position, batch, push.batch_count)

    def _apply(self, block: Block, elements: Sequence[int]) -> None:
        block.updates += 1
        for element in elements:
            block.values[element] += 1
            if block.values[element] > 1:
                raise Violation(f"{self.name}, block {block.number}: element {element} has a batch twice")

    def _settle(self, block: Block) -> None:
        """Close what is full; see that the rule was kept."""
        rounds = block.rounds
        is_sync = isinstance(rounds.mode, Sync)
        while rounds.closable():
            version = rounds.version
            due = {member for member, first in block.first_rounds.items() if first <= version}
            if is_sync and not due <= block.arrived:
                raise Violation(f"{self.name}, block {block.number}: round {version} closed without {due}")
            if rounds.close().has_update:
                self._apply(block, block.accumulator)
            block.arrived = set()
            self._look(block)
        self._save()

    def pull(self, request: PullRequest, reply: Reply) -> None:
        """Answers what can be read, when all can be or the time is up."""
        if not self._serves(request.pserver_generation, reply):
            return
        if not self._answer(request, reply, is_last=False):
            deadline = self.world.now + _PULL_S
            self._waiting.append((request, reply, deadline))
            self.later(_PULL_S, self._serve_waiting)

    def _answer(self, request: PullRequest, reply: Reply, *, is_last: bool) -> bool:
        ready = []
        for number, version in request.wanted:
            rounds = self.blocks[number].rounds
            state = rounds.pull(request.member, version)
            if state is Pull.NOT_MEMBER:
                reply(("not member",))
                return True
            if state is Pull.READY:
                ready.append((number, rounds.version))
        if len(ready) < len(request.wanted) and not is_last:
            return False
        reply(("pulled", tuple(ready)))
        return True

    def _serve_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for request, reply, deadline in waiting:
            if not self._answer(request, reply, is_last=self.world.now >= deadline - 1e-9):
                self._waiting.append((request, reply, deadline))

    def check(self) -> None:
        """Assert the invariants of what it is made of."""
        self.applied.check()
        for block in self.ordered:
            block.rounds.check()


__all__ = ["Block", "CorruptError", "Pserver", "PullRequest", "Push"]
