"""A pserver of the simulated cluster: the production rounds, views, applied sets and snapshots around plain lists."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from flightedl.domain.checkpoint.manifest import Manifest, ShardFile, manifest_name
from flightedl.domain.checkpoint.pointer import loadable_of, rejected_of
from flightedl.domain.checkpoint.restoring import FilePart, applied_of, recut
from flightedl.domain.checkpoint.snapshot import PserverSnapshots
from flightedl.domain.checkpoint.values import SnapshotCommand, SnapshotProgress
from flightedl.domain.consistency.modes import Async, Mode, Sync
from flightedl.domain.consistency.rounds import BlockRounds
from flightedl.domain.consistency.rounds_values import Accumulate, Apply, Arrived, NotMember, Pull, Stale
from flightedl.domain.consistency.views import PserverView, View, ViewVerdict, view_of
from flightedl.domain.exactly_once.accumulation import having_bits, lacking_of
from flightedl.domain.exactly_once.applied import AppliedBatches
from flightedl.domain.exactly_once.batches import Batch
from flightedl.domain.pserver import life_values as happens
from flightedl.domain.pserver.first_values import FirstValues
from flightedl.domain.pserver.life_values import State
from flightedl.domain.pserver.search import CheckpointSearch, Found, ListFiles, LoadBlocks, ReadManifest, Step
from flightedl.domain.recovery.replay import AppliedSummary
from flightedl.errors import CorruptError, FlightedlError, MessageError, ReplacedError
from flightedl.messages.base import OfPlan, decode
from flightedl.messages.control import (
    AppliedReply,
    AppliedRequest,
    ReloadRequest,
    SealRequest,
    SnapshotReply,
    SnapshotRequest,
    ViewReply,
    ViewRequest,
)
from flightedl.messages.declarations import JobDeclaration
from flightedl.messages.status import PserverStatusReply
from flightedl.recording.pserver import pserver_life
from flightedl.testing.simulation.etcd import ADDRESS, DONE, INIT, STATE, Transaction, claimed
from flightedl.testing.simulation.job import blocks_of, plan_of
from flightedl.testing.simulation.store import StoredShard
from flightedl.testing.simulation.world import Action, Process, Reply, Violation

if TYPE_CHECKING:
    from flightedl.testing.simulation.cluster import Cluster

LEASE_TTL_S = 2.0
_PULL_S = 1.0
_DRAIN_S = 5.0
_SERVING = (State.SERVING, State.DRAINING)


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
    """One process: drives the life of a pserver in a modelled etcd and store."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        super().__init__(cluster.world, name)
        self.cluster = cluster
        self.flaws = cluster.flaws
        self.lease = cluster.etcd.grant(self, LEASE_TTL_S)
        self.life = pserver_life(cluster.recorder("pserver", name), "the store")
        self.plan = plan_of(cluster.pserver_count, cluster.shape.cut_for)
        self.first_values = FirstValues()
        self.blocks: dict[int, Block] = {}
        self.ordered: list[Block] = []
        self.positions: dict[int, int] = {}
        self.applied = AppliedBatches(0)
        self.view = PserverView()
        self.snapshots = PserverSnapshots()
        self.copies: dict[int, tuple[int, int, tuple[int, ...]]] = {}
        self._waiting: list[tuple[PullRequest, Reply, float]] = []
        self._is_looking = False
        cluster.etcd.watch(self, self._look_around)
        self.later(0.05, self._claim)

    @property
    def index(self) -> int:
        """-1: it has none yet."""
        return self.life.index

    @property
    def generation(self) -> int:
        """Of the process that holds the index."""
        return self.life.generation

    @property
    def is_serving(self) -> bool:
        """Whether it has values."""
        return self.life.is_serving

    def end(self, why: str) -> None:
        """Exit; the supervisor starts another one."""
        self.world.note("{} ends: {}", self.name, why)
        self.cluster.ended(self)

    def _apply(self, event: happens.Event) -> None:
        """Tell the life, and do what follows."""
        effects = self.life.apply(event)
        self.life.check()
        for effect in effects:
            self._carry_out(effect)

    def _carry_out(self, effect: happens.Effect) -> None:  # noqa: C901 - a line for each effect
        match effect:
            case happens.Build():
                self._apply(happens.PlanMade(self.plan.hash))
            case happens.MakeBlocks(model):
                self._make_blocks(Mode.from_json(model.present_mode))
                self._apply(happens.BlocksMade(len(self.ordered)))
            case happens.Restore(loadable, rejected):
                search = CheckpointSearch("job", loadable, rejected)
                self._search(search, search.begin())
            case happens.Pause():
                self.later(0.2, lambda: self._apply(happens.PauseOver()))
            case happens.CatchUp():
                self._read(lambda facts: self._apply(happens.CaughtUp(facts)))
            case happens.Lack(election):
                self.world.note("{} lacks the values of election {}", self.name, election)
            case happens.Serve(election, checkpoint):
                self.world.note("{} serves election {} from checkpoint {}", self.name, election, checkpoint)
                if any(block.model is None for block in self.ordered):
                    raise Violation(f"{self.name} serves blocks that have no first values")
            case happens.Fail(why):
                self.cluster.gave_up(self, why)
            case happens.StartAgain(why):
                self.end(why)

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
                self.world.note("{} holds index {}, generation {}", self.name, index, generation)
                self._apply(happens.IndexTaken(index, generation))
                self._look()
            else:
                self._claim()

        transaction = Transaction(created={key: 0}, puts={key: self}, lease=self.lease)
        self.world.call(
            self, cluster.etcd, cluster.etcd.transact, transaction, answered, lambda: self.end("no answer to its claim")
        )

    # what etcd says

    def _look_around(self) -> None:
        init = self.directory.get(INIT)
        if not self.is_serving or (init is not None and init.value == DONE and init.created != self.life.election):
            self._look()

    def _look(self) -> None:
        """Tell the life what etcd says, and again, for as long as it waits for something there."""
        if self._is_looking or self.life.state not in {State.NO_MODEL, State.LACKING, State.WAITING, *_SERVING}:
            return
        self._is_looking = True

        def read(facts: happens.Facts | None) -> None:
            self._is_looking = False
            if facts is not None:
                self._apply(happens.Seen(facts))
            if not self.is_serving:
                self.later(0.3, self._look)

        self._read(read)

    def _read(self, done: Callable[[happens.Facts | None], None]) -> None:
        """What etcd says now; None: it does not answer."""

        def read(found: dict[str, Any]) -> None:
            init, state = found[INIT], found[STATE]
            model = None if state is None else decode(state.value["declaration"], JobDeclaration).model
            election = init.created if init is not None and init.value == DONE else None
            pointer = None if state is None else state.value["checkpoints"]
            loadable = None if pointer is None else loadable_of(pointer)
            rejected = frozenset() if pointer is None else rejected_of(pointer)
            done(happens.Facts(model, election, loadable, rejected))

        etcd = self.cluster.etcd
        self.world.call(self, etcd, etcd.read, [INIT, STATE], read, lambda: done(None))

    # values

    def _make_blocks(self, mode: Mode) -> None:
        numbers = blocks_of(self.cluster.pserver_count, self.cluster.shape.cut_for, self.index)
        self.applied = AppliedBatches(len(numbers))
        self.view = PserverView(mode)
        for position, number in enumerate(numbers):
            block = Block(number, BlockRounds(mode), [0] * self.cluster.shape.element_count)
            self.blocks[number] = block
            self.ordered.append(block)
            self.positions[number] = position

    def initialize(self, message: tuple[int, int], reply: Reply) -> None:
        """First values, of an election, for one block after the other; the stream may break off anywhere."""
        generation, election = message
        if generation != self.generation or not self._has_lease():
            return
        try:
            self.life.require_blocks(self.plan.hash)
        except FlightedlError:
            return
        self._apply(happens.FirstValuesBegin(election))
        breaks = self.world.are_faults_on and self.world.random.random() < self.cluster.break_rate
        count = self.world.random.randrange(len(self.ordered) + 1) if breaks else len(self.ordered)
        for block in self.ordered[:count]:
            if self.life.takes_first_values and self.first_values.may_take(block.number, election):
                self.first_values.took(block.number, election)
                block.model = (self.cluster.life, election)
        if not breaks:
            given = self.first_values.count(election)
            self._apply(happens.FirstValuesCame(election, given))
            if self.life.first_value_count(election, given) == len(self.ordered):
                reply(("given",))

    # loading

    def _search(self, search: CheckpointSearch, step: Step) -> None:
        """Take the next step of a search for a checkpoint."""

        def unreachable() -> None:
            self._apply(happens.StoreUnreachable("the store is down"))

        def go_on(step: Step) -> None:
            self._search(search, step)

        store = self.cluster.store
        match step:
            case ListFiles():
                store.list(self, lambda sizes: go_on(search.listed(sizes)), unreachable)
            case ReadManifest(number):

                def read(found: tuple[bytes, bool] | None) -> None:
                    go_on(search.unusable("it is gone") if found is None else search.manifest_read(found[0]))

                store.read(self, manifest_name(number), read, unreachable)
            case LoadBlocks(manifest):

                def loaded(is_usable: bool) -> None:
                    go_on(search.loaded() if is_usable else search.unusable("a file cannot be used"))

                saved = plan_of(manifest.pserver_count, manifest.cut_for)
                self._load(manifest, list(recut(manifest, saved, self.plan, self.index)), [], loaded, unreachable)
            case Found(number, skipped):
                self._apply(happens.Restored(number, skipped))
            case _:
                self._apply(happens.NothingLoadable(step.skipped))

    def _load(
        self,
        manifest: Manifest,
        parts: list[FilePart],
        found: list[StoredShard],
        done: Callable[[bool], None],
        failed: Action,
    ) -> None:
        """Read the files one after the other; whether all can be used, and the blocks have what is in them."""
        if len(found) == len(parts):
            self._fill(list(zip(parts, found, strict=True)))
            done(True)
            return

        def read(stored: tuple[StoredShard, bool] | None) -> None:
            if stored is None or (stored[1] and "hashes are not compared" not in self.flaws):
                done(False)
            else:
                self._load(manifest, parts, [*found, stored[0]], done, failed)

        self.cluster.store.read(self, parts[len(found)].file.name, read, failed)

    def _fill(self, found: list[tuple[FilePart, StoredShard]]) -> None:
        if "snapshot without applied" not in self.flaws:
            sets = {part.file.name: AppliedBatches.decode(shard.applied) for part, shard in found}
            self.applied = applied_of([part for part, _ in found], sets)
        for part, shard in found:
            for number in part.blocks:
                block, place = self.blocks[number], shard.blocks.index(number)
                block.rounds = BlockRounds(block.rounds.mode, shard.versions[place])
                block.values, block.model = list(shard.values[place]), shard.model

    # the master

    def highest(self) -> int:
        """What a member that joins now has to start at, or later."""
        return max((block.rounds.position for block in self.ordered), default=0)

    def _has_lease(self) -> bool:
        if not self.lease.is_held() and "no lease check" not in self.flaws:
            self._apply(happens.LeaseOver())
        return self.is_alive

    def _serves(self, pserver_generation: int, reply: Reply) -> bool:
        """Whether a request may be carried out."""
        if not self._has_lease():
            return False
        if pserver_generation != self.generation:
            reply(("fenced",))
            return False
        try:
            self.life.require_values(self.plan.hash)
        except FlightedlError:
            reply(("not ready",))
            return False
        return True

    def control(self, message: tuple[int, OfPlan], reply: Reply) -> None:
        """A request of a master's, to a process of this generation; the reply, or the error that it gets instead."""
        generation, request = message
        if not self._has_lease():
            reply(ReplacedError(f"the lease of {self.name} is over"))
            return
        try:
            if generation != self.generation:
                raise ReplacedError(f"this is generation {self.generation}, not {generation}")
            leader = self.directory.get(ADDRESS)
            self.life.hear_of_master(0 if leader is None else leader.value.generation)
            self.life.check_request(request)
            reply(self._controlled(request))
        except FlightedlError as error:
            reply(error)
            return
        if isinstance(request, ReloadRequest):
            self._apply(happens.ReloadAsked())
        elif isinstance(request, ViewRequest):
            self._serve_waiting()

    def _controlled(self, request: OfPlan) -> AppliedReply | SnapshotReply | ViewReply | None:
        match request:
            case ViewRequest():
                self.life.require_visible()
                verdict = self._adopt(view_of(request))
                return verdict.reply(request.serial, self._highest_after(verdict))
            case SnapshotRequest():
                self.life.require_snapshots()
                return self._take_order(SnapshotCommand.of(request)).reply()
            case SealRequest():
                self.life.require_snapshots()
                for epoch, task_count in request.epochs:
                    self.applied.seal(epoch, task_count)
                return None
            case AppliedRequest():
                return self.life.applied(lambda: AppliedSummary.of(self.applied))
            case _:
                return None

    def status(self, generation: int, reply: Reply) -> None:
        """What it says of itself to a master."""
        if generation != self.generation or not self._has_lease():
            return
        versions = [block.rounds.version for block in self.ordered] if self.life.is_visible else []
        reply(
            PserverStatusReply(
                index=self.index,
                state="",
                blocks=len(versions),
                lowest_version=min(versions, default=0),
                highest_version=max(versions, default=0),
                size_bytes=0,
                pushes=0,
                rows_accepted=0,
                rows_repeated=0,
                rows_refused=0,
                members=[],
                is_draining=self.life.state is State.DRAINING,
            )
        )

    def told_to_end(self) -> None:
        """SIGTERM: it waits a little for a checkpoint that has everything that was pushed until now."""
        if self.life.state is not State.SERVING:
            self.end("it was told to end")
            return
        progress = self.snapshots.progress
        self._apply(happens.DrainAsked(None if progress is None else progress.order))
        values = {block.number: tuple(block.values) for block in self.ordered}
        self.later(_DRAIN_S, lambda: self.end("it was told to end, and nothing has saved what it has"))
        self._await_checkpoint(values)

    def _await_checkpoint(self, values: dict[int, tuple[int, ...]]) -> None:
        if self.life.is_drained(self.snapshots.progress):
            self.cluster.account.drained(self, values)
            self.end("it was told to end, and a checkpoint has everything")
        else:
            self._look()
            self.later(0.1, lambda: self._await_checkpoint(values))

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
        self._cut_if_due(block)
        if block.rounds.version != verdict.switch_round:
            raise Violation(f"{self.name}, block {block.number}: begins {verdict.switch} at {block.rounds.version}")

    def _take_order(self, order: SnapshotCommand) -> SnapshotProgress:
        """Begin to copy, if the order is newer than all before; how far the newest one is."""
        versions = [block.rounds.version for block in self.ordered]
        if self.snapshots.take(order, versions, self.highest()) is not None:
            self.copies = {}
            self._name = order.name
            for block in self.ordered:
                self._cut_if_due(block)
            self._save()
        progress = self.snapshots.progress
        assert progress is not None
        return progress

    # snapshots

    def _cut_if_due(self, block: Block) -> None:
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
            self._update(block, elements)
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
            self._update(block, elements)
            self._cut_if_due(block)
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

    def _update(self, block: Block, elements: Sequence[int]) -> None:
        block.updates += 1
        for element in elements:
            block.values[element] += 1
            if block.values[element] > 1:
                raise Violation(f"{self.name}, block {block.number}: element {element} has a batch twice")

    def _settle(self, block: Block) -> None:
        """Close what is full; see that the rule was kept."""
        rounds = block.rounds
        backup = rounds.mode.backup if isinstance(rounds.mode, Sync) else len(block.first_rounds)
        while rounds.closable():
            version = rounds.version
            due = {member for member, first in block.first_rounds.items() if first <= version}
            if len(due - block.arrived) > backup:
                raise Violation(f"{self.name}, block {block.number}: round {version} closed without {due}")
            if rounds.close().has_update:
                self._update(block, block.accumulator)
            block.arrived = set()
            self._cut_if_due(block)
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
