"""A simulated pserver: the product's lifecycle and blocks, a ledger, and a modeled etcd and store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec.structs import replace

from flightedl.domain.checkpoint.manifest import manifest_name
from flightedl.domain.checkpoint.pointer import loadable_of, rejected_of
from flightedl.domain.checkpoint.restoring import FilePart, recut, saved_plan
from flightedl.domain.consistency.modes import Mode
from flightedl.domain.exactly_once.applied import AppliedBatches
from flightedl.domain.exactly_once.batches import Batch
from flightedl.domain.moving.server import is_surplus
from flightedl.domain.moving.standby import CopyId, claims, has_unclaimed, index_to_follow, keeps_following
from flightedl.domain.pserver import life_values as happens
from flightedl.domain.pserver.life import PserverLife
from flightedl.domain.pserver.life_values import State
from flightedl.domain.pserver.search import CheckpointSearch, Found, ListFiles, LoadBlocks, ReadManifest, Step
from flightedl.domain.recovery.replay import AppliedSummary
from flightedl.errors import FlightedlError, NotReadyError, ReplacedError, UsageError
from flightedl.messages.base import OfPlan, decode
from flightedl.messages.control import (
    AppliedReply,
    AppliedRequest,
    OrderNumber,
    ReloadRequest,
    SealRequest,
    SnapshotReply,
    SnapshotRequest,
    ViewReply,
    ViewRequest,
    WrittenFile,
)
from flightedl.messages.declarations import DeclaredModel, JobDeclaration, Placement
from flightedl.messages.moving import CopyTicket
from flightedl.messages.scaling import ScaleRequest
from flightedl.messages.status import PserverStatusReply
from flightedl.recording.recorded import recorded
from tests.simulation.cores.etcd import (
    ADDRESS,
    DECLARATION,
    DONE,
    INIT,
    POINTER,
    Transaction,
    claimed,
    desired_in,
    placement_read,
    pointer_in,
    pservers_in,
    standby_key,
    standbys_in,
)
from tests.simulation.cores.job import PARAMETERS, Gradient, plan_in, plan_of
from tests.simulation.cores.ledger import Block
from tests.simulation.cores.moving import Mover, Sent
from tests.simulation.cores.shard import Shard
from tests.simulation.cores.standby import Copies, Standby
from tests.simulation.cores.store import StoredShard, put_together
from tests.simulation.cores.world import Action, Process, Reply, Violation

if TYPE_CHECKING:
    from tests.simulation.cores.cluster import Cluster

LEASE_TTL_S = 2.0
_DRAIN_S = 5.0
_LEAVE_S = 3.0
_SERVING = (State.SERVING, State.DRAINING)


class Push(NamedTuple):
    """A batch, or a sum of several batches, pushed to all blocks of one pserver."""

    trainer: str
    generation: int
    member: int
    pserver_generation: int
    batches: tuple[Batch, ...]
    #: Batches of their task.
    batch_count: int
    #: (block, base version, gradient). The gradient of an arrival is empty.
    rows: tuple[tuple[int, int, Gradient], ...]
    #: Weight in a mean.
    weight: float
    step: int


class PullRequest(NamedTuple):
    """A request for blocks at the given versions or later."""

    member: int
    pserver_generation: int
    wanted: tuple[tuple[int, int], ...]


class Pserver(Process):
    """A pserver process, which drives the product's lifecycle."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        super().__init__(cluster.world, name)
        self.cluster = cluster
        self.flaws = cluster.flaws
        self.lease = cluster.etcd.grant(self, LEASE_TTL_S)
        self.recorder = cluster.recorder("pserver", name)
        self.life = recorded(
            self.recorder, {}, PserverLife, "the store" if cluster.scenario.keeps_checkpoints else None
        )
        self.plan = plan_of(cluster.pserver_count, cluster.shape.cut_for)
        self.shard: Shard | None = None
        #: Moves of the blocks; None until the blocks exist, and in jobs without a stored placement.
        self.mover: Mover | None = None
        #: The pserver that this process follows as a standby, and the copies that it sends to its own standby.
        self.standby: Standby | None = None
        self.copies: Copies | None = None
        self._is_becoming_standby = False
        #: Time since which an index without a standby has been free.
        self._unclaimed_at = cluster.world.now
        self._is_looking = False
        cluster.etcd.watch(self, self._look_around)
        self.later(0.05, self._claim)

    @property
    def ordered(self) -> Sequence[Block]:
        """Blocks by rising number."""
        return () if self.shard is None else self.shard.blocks

    def _blocks(self) -> Shard:
        assert self.shard is not None, "the life knows of blocks that are not there"
        return self.shard

    @property
    def index(self) -> int:
        """Index of the pserver; -1 until it has one."""
        return self.life.index

    @property
    def generation(self) -> int:
        """Generation of this process's claim to its index."""
        return self.life.generation

    @property
    def is_serving(self) -> bool:
        """True if it has values."""
        return self.life.is_serving

    def end(self, why: str) -> None:
        """Exit. The supervisor starts another process."""
        self.world.note("{} ends: {}", self.name, why)
        self.cluster.ended(self)

    def apply(self, event: happens.Event) -> None:
        """Check the lease, pass an event to the lifecycle, and carry out the effects."""
        if self.index >= 0 and not isinstance(event, happens.LeaseOver):
            self._has_lease()
        effects = self.life.apply(event)
        self.life.check()
        for effect in effects:
            self._carry_out(effect)

    def _carry_out(self, effect: happens.Effect) -> None:  # noqa: C901 - a line for each effect
        match effect:
            case happens.Build(model):
                if model.placement is not None:
                    self.plan = plan_in(model.placement, self.cluster.shape.cut_for)
                self.apply(happens.PlanMade(self.plan.hash))
            case happens.MakeBlocks(model):
                mode, shape = Mode.from_json(model.present_mode), self.cluster.shape
                recorded = (self.recorder, (self.index, self.generation))
                self.shard = Shard(self, self.plan, self.index, shape, mode, self._publish, *recorded)
                self.shard.contributed = self.cluster.account.contributed
                self.shard.updated = lambda numbers: self.cluster.account.updated(self, numbers)
                copied = self._take_copy(model)
                if model.placement is not None:
                    self.mover = Mover(self, self.shard, model.placement)
                self.copies = Copies(self, self.shard)
                self.apply(happens.BlocksMade(len(self.ordered), is_empty=not self.ordered, copied=copied))
            case happens.Restore(loadable, rejected):
                search = CheckpointSearch("job", loadable, rejected)
                self._search(search, search.begin())
            case happens.Pause():
                self.later(0.2, lambda: self.apply(happens.PauseOver()))
            case happens.CatchUp():
                self._read(lambda facts: self.apply(happens.CaughtUp(facts)))
            case happens.Lack(election):
                self.world.note("{} lacks the values of election {}", self.name, election)
            case happens.Serve(election, checkpoint):
                self.world.note("{} serves election {} from checkpoint {}", self.name, election, checkpoint)
                if any(block.model is None for block in self.ordered):
                    raise Violation(f"{self.name} serves blocks that have no first values")
                self.cluster.account.serves(self)
                self._look_at_moves()
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
        keys = self.directory
        count, standbys = desired_in(keys) or cluster.pserver_count, standbys_in(keys)
        own = None if self.standby is None else (self.standby.index, self.standby.generation)
        if not has_unclaimed(count, pservers_in(keys), standbys):
            self._unclaimed_at = self.world.now
        claim = next(claims(count, pservers_in(keys), standbys, own), None)
        if claim is None or self._is_becoming_standby:
            if cluster.scenario.has_standbys and not self._is_becoming_standby:
                self._keep_standby(count, standbys, own)
            self.later(0.2, self._claim)
            return
        index = claim.index
        key, standby = f"ps/{index}", standby_key(index)

        def answered(result: Any) -> None:
            if self.index >= 0:
                return
            if generation := claimed(result, key, self):
                self.world.note("{} holds index {}, generation {}", self.name, index, generation)
                self._begin(index, generation)
            else:
                self._claim()

        transaction = Transaction(
            created={key: 0, standby: claim.standby},
            puts={key: self},
            deletes=(standby,) if claim.standby else (),
            lease=self.lease,
        )
        self.world.call(
            self, cluster.etcd, cluster.etcd.transact, transaction, answered, lambda: self.end("no answer to its claim")
        )

    def _begin(self, index: int, generation: int) -> None:
        """Begin once the directory is at least as new as the key of the index."""
        if self.directory_revision < generation and self.lease.is_held():
            self.later(0.01, lambda: self._begin(index, generation))
        elif self.index < 0:
            self.apply(happens.IndexAcquired(index, generation))
            self._look()

    # standbys

    def _keep_standby(self, desired: int, standbys: dict[int, int], own: tuple[int, int] | None) -> None:
        """Become the standby of a pserver, or end being one."""
        etcd, keys = self.cluster.etcd, self.directory
        if own is not None:
            unclaimed_s = self.world.now - self._unclaimed_at
            if not keeps_following(own, desired, self.directory_revision, standbys, unclaimed_s):
                assert self.standby is not None, "a standby follows a pserver"
                self.standby.close()
                self.standby, key = None, standby_key(own[0])
                released = Transaction(created={key: own[1]}, deletes=(key,))
                self.world.call(self, etcd, etcd.transact, released, lambda _: None, lambda: None)
            return
        index = index_to_follow(desired, pservers_in(keys), standbys)
        if index is None:
            return
        key = standby_key(index)

        def answered(result: Any) -> None:
            self._is_becoming_standby = False
            if generation := claimed(result, key, self):
                self.world.note("{} follows pserver {}", self.name, index)
                self.standby = Standby(self, index, generation, self._layout_of)

        self._is_becoming_standby = True
        transaction = Transaction(created={key: 0}, puts={key: self}, lease=self.lease)
        failed = lambda: self.end("no answer to its claim")  # noqa: E731
        self.world.call(self, etcd, etcd.transact, transaction, answered, failed)

    def _layout_of(self, index: int) -> tuple[Sequence[int], object, str] | None:
        """Return the blocks of a pserver, the facts that determine its blocks, and the hash of its plan."""
        declared = self.directory.get(DECLARATION)
        model = None if declared is None else self._placed(decode(declared.value, JobDeclaration).model, index)
        if model is None or model.placement is None:
            return None
        plan = plan_in(model.placement, self.cluster.shape.cut_for)
        blocks = plan.blocks_of(index).tolist()
        return blocks, (blocks, model.present_mode), plan.hash

    def _take_copy(self, model: DeclaredModel) -> int | None:
        """Fill the new blocks with the copy of them, if there is one. Return the election of its values."""
        standby, self.standby = self.standby, None
        init = self.directory.get(INIT)
        election = init.created if init is not None and init.value == DONE else None
        layout = (self.plan.blocks_of(self.index).tolist(), model.present_mode)
        taken = None if standby is None else standby.take(election, layout)
        if taken is None:
            return None
        copy, stored = taken
        self.world.note("{} takes over {} as of {}", self.name, stored.blocks, copy)
        self.cluster.account.took_over(self, copy)
        self._blocks().fill(AppliedBatches.decode(stored.applied, stored.blocks), [(stored.blocks, stored)])
        return election

    def copy(self, ticket: CopyTicket, reply: Reply) -> None:
        """Begin a copy for a standby. Replies with None if that is impossible at the moment."""
        if not self._has_lease():
            return
        try:
            self.life.require_values(ticket.plan_hash)
            self._require_unpinned()
        except FlightedlError:
            reply(None)
        else:
            assert self.copies is not None, "there are values without blocks"
            self.copies.begin(ticket, reply)

    def copied_part(self, wanted: tuple[CopyId, int], reply: Reply) -> None:
        """Reply with a part of a copy; None if it is no longer there."""
        if self.copies is None or not self._has_lease():
            reply(None)
        else:
            self.copies.part(wanted, reply)

    def _reload(self) -> None:
        """End, after the standby's copy has been made unusable."""

        def reload(_: Any = None) -> None:
            self.apply(happens.ReloadAsked())

        key, etcd = standby_key(self.index), self.cluster.etcd
        if key in self.directory:
            self.world.call(self, etcd, etcd.transact, Transaction(deletes=(key,)), reload, reload)
        else:
            reload()

    # what etcd says

    def _placed(self, model: DeclaredModel | None, index: int) -> DeclaredModel | None:
        """Return the model with the newest placement; None if the placement does not include the pserver."""
        placement = placement_read(self.directory)
        if model is None or model.placement is None:
            return model
        if placement is None or index >= placement.pservers:
            return None
        plan_hash = plan_in(placement, self.cluster.shape.cut_for).hash
        return replace(model, placement=placement, plan_hash=plan_hash)

    def placed(self, placement: Placement) -> None:
        """Record that this pserver has the blocks that a newer placement assigns to it."""
        self.plan = plan_in(placement, self.cluster.shape.cut_for)
        self.apply(happens.Placed(self.plan.hash))
        self._blocks().serve_waiting()

    def _look_at_moves(self) -> None:
        if self.mover is not None and self.life.may_be_placed:
            self.mover.look()
        placement, desired = placement_read(self.directory), desired_in(self.directory)
        if not self.is_alive or self.index < 0 or placement is None:
            return
        if is_surplus(self.index, placement, desired, is_serving=self.is_serving):
            self.end("the job has fewer pservers now")

    def _look_around(self) -> None:
        self._look_at_moves()
        init = self.directory.get(INIT)
        if not self.is_serving or (init is not None and init.value == DONE and init.created != self.life.election):
            self._look()

    def _look(self) -> None:
        """Pass etcd's state to the lifecycle, repeatedly while the lifecycle waits for a change."""
        if self._is_looking or self.life.state not in {State.NO_MODEL, State.LACKING, State.WAITING, *_SERVING}:
            return
        self._is_looking = True

        def read(facts: happens.Facts | None) -> None:
            self._is_looking = False
            if facts is not None:
                self.apply(happens.Seen(facts))
            if not self.is_serving:
                self.later(0.3, self._look)

        self._read(read)

    def _read(self, done: Callable[[happens.Facts | None], None]) -> None:
        """Read etcd's state; None if etcd does not answer."""

        def read(found: dict[str, Any]) -> None:
            init, declared = found[INIT], found[DECLARATION]
            model = None if declared is None else decode(declared.value, JobDeclaration).model
            election = init.created if init is not None and init.value == DONE else None
            pointer = pointer_in(found)
            loadable = None if pointer is None else loadable_of(pointer)
            rejected = frozenset() if pointer is None else rejected_of(pointer)
            done(happens.Facts(self._placed(model, self.index), election, loadable, rejected))

        etcd = self.cluster.etcd
        self.world.call(self, etcd, etcd.read, [INIT, DECLARATION, POINTER], read, lambda: done(None))

    # values

    def initialize(self, message: tuple[int, int], reply: Reply) -> None:
        """Receive the initial values of an election, block by block. The stream may break at any point."""
        generation, election = message
        if generation != self.generation or not self._has_lease():
            return
        try:
            self.life.require_blocks(self.plan.hash)
        except FlightedlError:
            return
        self.apply(happens.FirstValuesBegin(election))
        breaks = self.world.are_faults_on and self.world.random.random() < self.cluster.break_rate
        count = self.world.random.randrange(len(self.ordered) + 1) if breaks else len(self.ordered)
        for block in self.ordered[:count]:
            if self.life.accepts_first_values:
                self._blocks().initialize(block, election, (self.cluster.life, election))
        if not breaks:
            given = self._blocks().protocol.initialized_count(election)
            self.apply(happens.FirstValuesReceived(election, given))
            reply(("given", self.life.first_value_count(election, given), len(self.ordered)))

    # loading

    def _search(self, search: CheckpointSearch, step: Step) -> None:
        """Take the next step in a search for a checkpoint."""

        def unreachable() -> None:
            self.apply(happens.StoreUnreachable("the store is down"))

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

                def loaded(damaged: str) -> None:
                    go_on(search.unusable("a file cannot be used", damaged) if damaged else search.loaded())

                saved = saved_plan(manifest, PARAMETERS)
                parts = list(recut(manifest, saved, self.plan, self.index))
                self._load(parts, [file.name for part in parts for file in part.file.chain], [], loaded, unreachable)
            case Found(number, skipped):
                self.apply(happens.Restored(number, skipped))
            case _:
                self.apply(happens.NothingLoadable(step.skipped))

    def _load(
        self,
        parts: list[FilePart],
        names: list[str],
        found: list[StoredShard],
        done: Callable[[str], None],
        failed: Action,
    ) -> None:
        """Read the files one by one, then load the blocks. ``done`` receives the name of a damaged file, or ""."""
        if len(found) == len(names):
            left = iter(found)
            shards = [put_together([next(left) for _ in part.file.chain]) for part in parts]
            self._blocks().restore(list(zip(parts, shards, strict=True)))
            done("")
            return

        def read(stored: tuple[StoredShard, bool] | None) -> None:
            if stored is None or (stored[1] and "hashes are not compared" not in self.flaws):
                done(names[len(found)])
            else:
                self._load(parts, names, [*found, stored[0]], done, failed)

        self.cluster.store.read(self, names[len(found)], read, failed)

    # the master

    def _has_lease(self) -> bool:
        if not self.lease.is_held():
            self.apply(happens.LeaseOver())
        return self.is_alive

    def _serves(self, pserver_generation: int, reply: Reply) -> bool:
        """True if a request may be carried out. Otherwise reply with the reason for refusing it."""
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
        """Carry out a master's request to a process of this generation. The reply may be an error."""
        generation, request = message
        if not self._has_lease():
            reply(ReplacedError(f"the lease of {self.name} is over"))
            return
        try:
            if generation != self.generation:
                raise ReplacedError(f"this is generation {self.generation}, not {generation}")
            leader = self.directory.get(ADDRESS)
            if not self.life.has_plan(request.plan_hash):
                self._look_at_moves()
            self.life.observe_master(0 if leader is None else leader.value.generation)
            self.life.check_request(request)
            reply(self._controlled(request))
        except FlightedlError as error:
            reply(error)
            return
        if isinstance(request, ReloadRequest):
            self._reload()
        elif isinstance(request, ViewRequest):
            self._blocks().serve_waiting()

    def _controlled(self, request: OfPlan) -> AppliedReply | SnapshotReply | ViewReply | None:
        match request:
            case ViewRequest():
                self.life.require_visible()
                self._require_unpinned()
                return self._blocks().apply_view(request)
            case SnapshotRequest():
                self.life.require_snapshots()
                self._require_unpinned()
                return self._blocks().take_order(request)
            case SealRequest():
                self.life.require_snapshots()
                self._blocks().protocol.set_task_counts(request.epochs)
                return None
            case AppliedRequest():
                return self.life.applied(lambda: AppliedSummary.of(self._blocks().protocol.applied()))
            case _:
                return None

    def _require_unpinned(self) -> None:
        if self.mover is not None and self.mover.is_pinned:
            raise NotReadyError("blocks are about to move: send the request again")

    def status(self, generation: int, reply: Reply) -> None:
        """Reply with this pserver's status to a master."""
        if generation != self.generation or not self._has_lease():
            return
        versions = self._blocks().protocol.versions() if self.life.is_visible else []
        reply(
            PserverStatusReply(
                index=self.index,
                state="",
                blocks=len(versions),
                lowest_version=min(versions, default=0),
                highest_version=max(versions, default=0),
                size_bytes=0,
                pushes=sum(block.updates for block in self.ordered),
                # Loads for rebalancing: the blocks differ, and each update counts as some megabytes.
                pushed=[(block.number, 1, 0, block.updates * (1 + block.number) << 22) for block in self.ordered],
                rows={},
                members=[],
                is_draining=self.life.state is State.DRAINING,
            )
        )

    def drain(self) -> None:
        """Handle SIGTERM: move the blocks away, or wait briefly for a checkpoint of everything pushed so far."""
        if self.life.state is not State.SERVING:
            self.end("it was told to end")
        elif self.mover is not None and self.cluster.scenario.has_moves:
            self._leave(self.world.now + _LEAVE_S)
        else:
            self._drain()

    def _leave(self, deadline_s: float) -> None:
        """Ask the master to move all blocks away, until it has done so or the time has passed."""
        assert self.mover is not None, "blocks leave a pserver that has some"
        if self.mover.is_empty:
            self.end("it was told to end, and its blocks have moved away")
            return
        master, is_late = self.directory.get(ADDRESS), self.world.now >= deadline_s

        def refused(reply: Any) -> None:
            if isinstance(reply, UsageError) and not is_left:
                over()

        is_left = False

        def over() -> None:
            nonlocal is_left
            is_left = True
            self._drain()

        if master is not None:
            leaving = [(self.index, self.life.generation)]
            request = ScaleRequest(job="job", leaving=leaving, is_cancelled=is_late)
            self.world.call(self, master.value, master.value.scale, request, refused, lambda: None)
        if is_late:
            over()
        else:
            self.later(0.2, lambda: None if is_left else self._leave(deadline_s))

    def _drain(self) -> None:
        progress = self._blocks().snapshots.progress
        self.apply(happens.DrainAsked(None if progress is None else progress.order))
        values = {block.number: tuple(block.values) for block in self.ordered}
        self.later(_DRAIN_S, lambda: self.end("it was told to end, and no checkpoint has its values"))
        self._await_checkpoint(values)

    def _await_checkpoint(self, values: dict[int, tuple[int, ...]]) -> None:
        if self.life.is_drained(self._blocks().snapshots.progress):
            self.cluster.account.drained(self, values)
            self.end("it was told to end, and a checkpoint has everything")
        else:
            self._look()
            self.later(0.1, lambda: self._await_checkpoint(values))

    # snapshots

    def _publish(self, order: OrderNumber, name: str, shard: StoredShard) -> None:
        snapshots = self._blocks().snapshots
        # File sizes chosen so that a chain has a base and several increments, if there are rows.
        row_bytes = 0 if not self.cluster.shape.has_rows else 300 if shard.after else 3000
        size_bytes = 100 + len(shard.applied) + len(shard.blocks) + row_bytes
        file = WrittenFile(
            name=name,
            size_bytes=size_bytes,
            hash=f"{hash((name, shard.versions)) & (1 << 128) - 1:032x}",
            blocks=len(shard.blocks),
            lowest_version=min(shard.versions, default=0),
            highest_version=max(shard.versions, default=0),
            row_bytes=row_bytes,
            after=shard.after,
        )

        def done() -> None:
            snapshots.written(order, file)

        def failed() -> None:
            snapshots.failed(order, "the store failed")

        if "reported before it is written" in self.flaws:
            done()
        self.cluster.store.publish(self, name, shard, size_bytes, done, failed)

    # trainers

    def _buckets(self) -> range:
        return self.cluster.shape.buckets(self.plan, self.index)

    def push(self, push: Push, reply: Reply) -> None:
        """Apply a batch or a sum. The stream may break after any row."""
        if not self._serves(push.pserver_generation, reply):
            return
        rows = push.rows
        breaks = self.world.are_faults_on and self.world.random.random() < self.cluster.break_rate
        if breaks:
            self.world.fault("stream broken")
            rows = rows[: self.world.random.randrange(len(rows) + 1)]
            if rows and rows[-1][0] in (buckets := self._buckets())[:-1]:
                # All gradients for buckets arrive in one message.
                rows = tuple(row for row in rows if row[0] not in buckets)
        shard, sender = self._blocks(), (push.trainer, push.generation, push.member)
        batches = [(batch, push.batch_count) for batch in push.batches]
        outcomes, is_misplaced = shard.push(sender, batches, rows, push.weight, push.step)
        shard.serve_waiting()
        if not breaks:
            reply(("pushed", outcomes, is_misplaced))

    def pull(self, request: PullRequest, reply: Reply) -> None:
        """Reply with values once they have the requested versions or the time limit has passed."""
        if self._serves(request.pserver_generation, reply):
            self._blocks().pull(request.member, request.wanted, reply)

    def receive(self, sent: Sent, reply: Reply) -> None:
        """Receive a message about blocks that move here. Replies with a problem, or with an empty text."""
        if not self._has_lease():
            return
        if self.mover is None or not self.is_serving:
            reply("this pserver has no values yet")
        else:
            self.mover.receive(sent, reply)

    def check(self) -> None:
        """Assert the invariants of this pserver's blocks and rows."""
        self._blocks().protocol.check()
        self._blocks().require_sound_rows()
