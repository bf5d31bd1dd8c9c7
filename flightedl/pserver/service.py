"""A pserver's life: wait for the job's declaration, for first values, then serve; and its view of the members.

States, in order: ``waiting for the model``, ``waiting for first values``, ``serving``. The model of a job that was
resumed is waited for until a trainer has declared it again: its optimizer may then have other settings, and nothing is
ever done by the former ones. A pserver that finds the
election already done is a replacement: it loads the newest checkpoint that can be loaded, and nobody sees its blocks
before that. Where none was ever complete, the values are gone with its predecessor: it says so to the master, which
lets the model begin anew (``domain.beginnings``). Where there are some and none can be loaded, the job has failed.

Building and restoring have a thread of their own: meanwhile everybody is answered "not ready", also views, because
blocks that are at no version yet cannot say from which round on they can wait for a member.
"""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable

from flightedl.coordination.directory import Directory
from flightedl.coordination.keys import JobKeys
from flightedl.domain.checkpoints_pointer import loadable_of
from flightedl.domain.checkpoints_replay import AppliedSummary
from flightedl.domain.checkpoints_values import OrderNumber, SnapshotOrder
from flightedl.domain.kernels import block_kernels, kernel_for
from flightedl.domain.modes import Mode
from flightedl.domain.optimizers import Optimizer
from flightedl.domain.parameters import ParameterSpec
from flightedl.domain.sharding import ShardPlan, plan_for
from flightedl.errors import FencedError, FlightedlError, NotReadyError, ReplacedError, UnavailableError
from flightedl.messages.base import OfPlan, decode
from flightedl.messages.control import (
    AppliedReply,
    AppliedRequest,
    OfMaster,
    SealRequest,
    SnapshotReply,
    SnapshotRequest,
    ViewReply,
    ViewRequest,
)
from flightedl.messages.declarations import ElectionRecord, JobDeclaration, ModelReply
from flightedl.messages.status import PserverStatusReply
from flightedl.ports import Clock, Storage
from flightedl.pserver.restoring import Restored, load_newest
from flightedl.pserver.shard import ShardState
from flightedl.pserver.snapshots import Snapshots
from flightedl.pserver.startup_memory import release_startup_memory
from flightedl.pserver.turns import Turns

_log = logging.getLogger(__name__)

_STORE_RETRY_S = 0.5
_LACKING_SLICE_S = 0.5


class PserverService:
    """One pserver's state beside its blocks. Thread-safe.

    Args:
        directory: Tells the job's declaration and the election.
        keys: The job's keys.
        fail: Ends the process because the job cannot go on.
        start_again: Ends it because its values are of no use any more; a successor can load them.
        storage: Where the checkpoints lie; None: there are none.
        clock: Measures, and paces what is tried again.
    """

    def __init__(
        self,
        directory: Directory,
        keys: JobKeys,
        fail: Callable[[str], None],
        start_again: Callable[[str], None],
        storage: Storage | None,
        clock: Clock,
    ) -> None:
        #: -1 until one is taken; nothing is served before.
        self._index = -1
        self._is_held: Callable[[], bool] = lambda: False
        #: What the server counts, set once there is one.
        self.refusals: Callable[[], dict[str, int]] = dict
        self._generation = 0
        self._storage = storage
        self._clock = clock
        self._directory = directory
        self._keys = keys
        self._fail = fail
        self._start_again = start_again
        self._lock = threading.Lock()
        #: Builds the shard, which compiles kernels and loads a checkpoint; there is only ever one.
        self._builder: threading.Thread | None = None
        self._is_closing = threading.Event()
        self._turns = Turns(self._is_closing)
        self._doing = ""
        #: Of the declared model, once this pserver has computed the same.
        self._plan_hash: str | None = None
        self._shard: ShardState | None = None
        self._snapshots: Snapshots | None = None
        self._restored: Restored | None = None
        self._is_draining = False
        self._is_prepared = False
        #: The election whose values went with the predecessor.
        self._lacks_election: int | None = None
        self._order_before_drain: OrderNumber | None = None
        self._is_serving = False
        #: The highest generation of a master that was heard of.
        self._newest_master = 0
        #: The newest view.
        self._view: ViewRequest | None = None

    def take_index(self, index: int, generation: int, is_held: Callable[[], bool]) -> None:
        """This pserver holds ``index`` from now on, as long as ``is_held`` says so."""
        self._index, self._generation, self._is_held = index, generation, is_held

    def require_lease(self) -> None:
        """Nothing is written once the lease is over: a process that was frozen finds out here, before it does harm.

        Raises:
            ReplacedError: it is over.
        """
        if not self._is_held():
            raise ReplacedError(f"the lease of pserver {self._index} is over: look its successor up")

    def close(self) -> None:
        """Give up what is being built."""
        self._is_closing.set()
        if self._builder is not None:
            self._builder.join(1.0)

    def prepare(self) -> None:
        """There is no free index yet: load the kernels that the declared model needs, so as to be quick later."""
        if self._is_prepared:
            return
        declared = self._declared()
        if declared is None:
            return
        self._is_prepared = True
        optimizer = Optimizer.from_json(declared.declaration.optimizer)
        for p in declared.declaration.parameters:
            spec = ParameterSpec(p.name, tuple(p.shape), p.dtype)
            kernel_for(optimizer.for_parameter(spec.name), spec.storage_dtype)
            block_kernels(spec.storage_dtype)

    @property
    def is_built(self) -> bool:
        """Whether the blocks are made, and restored where there was something: the rest takes little."""
        return self._shard is not None

    @property
    def is_serving(self) -> bool:
        """Whether it has values."""
        return self._is_serving

    @property
    def has_written(self) -> bool:
        """Whether a snapshot that was ordered since ``drain`` is in the store."""
        progress = None if self._snapshots is None else self._snapshots.progress
        return (
            progress is not None
            and progress.state == "written"
            and progress.order.is_newer_than(self._order_before_drain)
        )

    def drain(self) -> None:
        """This pserver is going to end: tell the master, which then wants a checkpoint."""
        progress = None if self._snapshots is None else self._snapshots.progress
        self._order_before_drain = None if progress is None else progress.order
        self._is_draining = True

    # what the directory tells

    def look_at_job(self) -> None:
        """The ``job`` key may have changed: build the shard when the model is declared."""
        if self._index < 0:
            return
        declared = self._declared()
        if declared is None:
            return
        with self._lock:
            if self._builder is not None:
                return
            self._builder = threading.Thread(
                target=self._build, args=(declared,), name="flightedl-builder", daemon=True
            )
        self._builder.start()

    def _declared(self) -> ModelReply | None:
        """The model to work with; None: there is none yet, or none since the job was resumed."""
        entry = self._directory.entry(self._keys.job)
        declared = None if entry is None else decode(entry.value, JobDeclaration).model
        return None if declared is None or declared.is_former else declared

    def _build(self, declared: ModelReply) -> None:
        try:
            self._build_shard(declared)
        except FlightedlError as error:
            self._fail(str(error))
        except Exception as error:
            _log.exception("the shard could not be built")
            self._fail(f"the shard could not be built: {error}")
            raise

    def _build_shard(self, declared: ModelReply) -> None:
        specs = [ParameterSpec(p.name, tuple(p.shape), p.dtype) for p in declared.declaration.parameters]
        plan = plan_for(specs, declared.pservers, declared.cut_for)
        if plan.hash != declared.plan_hash:
            self._fail("this pserver computes another shard plan: run the same flightedl version everywhere")
            return
        self._plan_hash = plan.hash
        self._doing = "its blocks to be made"
        with self._turns.turn():
            shard = ShardState(
                plan,
                self._index,
                Optimizer.from_json(declared.declaration.optimizer),
                Mode.from_json(declared.present_mode),
                declared.declaration.wire,
                self._start_again,
            )
        release_startup_memory()
        self._doing = ""
        if not self._get_values(shard, specs, plan):
            return
        snapshots = Snapshots(
            shard, self._storage, self._keys.job_name, self._index, declared.pservers, self._generation, self._clock
        )
        with self._lock:
            self._snapshots = snapshots
            self._shard = shard
        _log.info("model declared blocks=%d size_bytes=%d", shard.block_count, shard.size_bytes_total)
        self.look_at_election()

    def _get_values(self, shard: ShardState, specs: list[ParameterSpec], plan: ShardPlan) -> bool:
        """Take over what there is, or wait until there are to be new first values; False: it is over."""
        while (election := self._finished_election()) is not None and not self._is_closing.is_set():
            # The model had first values before this pserver came: they are in a checkpoint, or gone.
            if self._loadable() is not None:
                self._lacks_election = None
                return self._restore(shard, specs, plan)
            if self._lacks_election != election:
                _log.warning("there is no checkpoint of the values that were here")
                self._lacks_election = election
                self._doing = "first values again: its predecessor's are gone, and there is no checkpoint"
            self._directory.wait_until(lambda _: self._has_news(election), _LACKING_SLICE_S)
        self._lacks_election, self._doing = None, ""
        return not self._is_closing.is_set()

    def _has_news(self, election: int) -> bool | None:
        return True if self._finished_election() != election or self._loadable() is not None else None

    def _finished_election(self) -> int | None:
        """The election that gave the model its first values; None: it has none."""
        entry = self._directory.entry(self._keys.init_params)
        is_done = entry is not None and decode(entry.value, ElectionRecord).done
        return entry.create_revision if entry is not None and is_done else None

    def _loadable(self) -> range | None:
        """The checkpoints that may be loaded, as etcd names them; None: there are none."""
        entry = self._directory.entry(self._keys.checkpoint_latest)
        return None if entry is None else loadable_of(entry.value)

    def _restore(self, shard: ShardState, specs: list[ParameterSpec], plan: ShardPlan) -> bool:
        """Load the newest checkpoint; False: none can be loaded, and the job has failed."""
        began = self._clock.now()
        said = ""
        why = "this pserver was started without --checkpoint: give it the URL that the master has"
        while self._storage is not None and not self._is_closing.is_set():
            self._doing = "the checkpoint to be loaded"
            try:
                with self._turns.turn():
                    restored = load_newest(
                        self._storage, self._keys.job_name, specs, plan, self._index, shard, self._loadable
                    )
            except UnavailableError as error:
                if str(error) != said:
                    said = str(error)
                    _log.warning("waiting for the checkpoints: %s", error)
                self._doing = f"the checkpoints: {error}"
                self._is_closing.wait(_STORE_RETRY_S)
                continue
            self._doing = ""
            if restored.number is None or restored.applied is None:
                reasons = "; ".join(f"checkpoint {each.number}: {each.reason}" for each in restored.skipped[:3])
                why = f"no checkpoint at {self._storage.url} can be loaded ({reasons or 'none is there'})"
                break
            shard.restored(restored.applied)
            self._restored = restored
            _log.info(
                "restored checkpoint=%d size_bytes=%d seconds=%.3f",
                restored.number,
                shard.size_bytes_total,
                self._clock.now() - began,
            )
            return True
        if not self._is_closing.is_set():
            self._fail(f"the values of pserver {self._index} are gone with its predecessor, and {why}")
        return False

    def look_at_election(self) -> None:
        """The ``init_params`` key may have changed: serve when the first values are complete and final."""
        shard = self._shard
        if shard is None or self._is_serving:
            return
        entry = self._directory.entry(self._keys.init_params)
        if entry is None or not decode(entry.value, ElectionRecord).done:
            self._lacks_election = None
            return
        if shard.initialized_count(entry.create_revision) == shard.block_count:
            self._is_serving = True
            self._prepare_snapshots()
            # The compiler leaves a heap behind that would be searched for garbage again and again, between two pushes.
            gc.collect()
            gc.freeze()
            _log.info("serving election=%d", entry.create_revision)
        else:
            # An election so big that its end could not name this pserver.
            self._lacks_election = entry.create_revision

    def _prepare_snapshots(self) -> None:
        snapshots = self._snapshots
        if snapshots is not None:
            threading.Thread(target=snapshots.prepare, name="flightedl-snapshot-memory", daemon=True).start()

    # what trainers ask

    def shard(self, plan_hash: str) -> ShardState:
        """The shard, to push to and pull from."""
        shard = self.shard_for_init(plan_hash)
        if not self._is_serving:
            self.look_at_election()
            if not self._is_serving:
                raise NotReadyError(f"pserver {self._index} waits for the first values of the model")
        return shard

    def shard_for_init(self, plan_hash: str) -> ShardState:
        """The shard, also before it has values."""
        if self._shard is None:
            self.look_at_job()
        shard = self._shard
        if shard is None:
            # The trainer that asks has just declared the model itself.
            doing = f"waits for {self._doing}" if self._doing else "has not read the model's declaration yet"
            raise NotReadyError(f"pserver {self._index} {doing}")
        shard.require_plan(plan_hash)
        return shard

    # what the master asks

    def require_plan(self, request: OfPlan) -> None:
        """The master has to mean the shard plan that this pserver has.

        Raises:
            FencedError: it means another one.
            NotReadyError: the model is not known here yet.
        """
        if self._plan_hash is None:
            raise NotReadyError(f"pserver {self._index} waits for the model to be declared")
        if request.plan_hash != self._plan_hash:
            raise FencedError("the master means another shard plan: read the job's declaration again")

    def require_order(self, order: OfMaster) -> None:
        """An order has to come from the newest master that is known, here or in etcd, and mean this shard plan.

        Raises:
            FencedError: it does not.
            NotReadyError: the model is not known here yet.
        """
        self.require_plan(order)
        found = self._directory.master()
        self._note_master(0 if found is None else found.generation)
        if order.master_generation < self._newest_master:
            raise FencedError(f"master {order.master_generation} is deposed: {self._newest_master} leads")
        self._note_master(order.master_generation)

    def _note_master(self, generation: int) -> None:
        with self._lock:
            self._newest_master = max(self._newest_master, generation)

    def take_view(self, view: ViewRequest) -> ViewReply:
        """Adopt a newer view; joins are refused for rounds that have already gone by.

        Raises:
            FencedError: the view is of another shard plan.
            NotReadyError: there are no blocks yet.
        """
        self.require_plan(view)
        self._note_master(view.master_generation)
        with self._lock:
            shard = self._shard
            if shard is None:
                raise NotReadyError(f"pserver {self._index} waits for {self._doing or 'the model to be declared'}")
            known = self._view
            if known is not None and (view.master_generation, view.serial) < (known.master_generation, known.serial):
                return ViewReply(serial=view.serial, outdated=True)
            self._view = view
            verdict = shard.set_members(view)
        shard.announce_changes()
        highest = shard.highest_version() if verdict.refuses_mode else shard.highest_open_round()
        return verdict.reply(view.serial, highest)

    def snapshot(self, request: SnapshotRequest) -> SnapshotReply:
        """Carry out an order, or say how far the newest one is.

        Raises:
            FencedError: the order is of another shard plan.
            NotReadyError: there are no values yet.
        """
        self.require_plan(request)
        self._note_master(request.master_generation)
        snapshots = self._snapshots
        if snapshots is None or not self._is_serving:
            raise NotReadyError(f"pserver {self._index} has no values yet")
        return snapshots.order(SnapshotOrder.of(request)).reply(snapshots.copied_s, snapshots.written_s)

    def applied(self, request: AppliedRequest) -> AppliedReply:
        """What all blocks have, for the master to compare with what it takes for done.

        Raises:
            FencedError: another shard plan is asked about.
            NotReadyError: there are no values yet.
        """
        self.require_plan(request)
        shard = self._shard
        # Read once: without an election this would say that there are no blocks.
        lacks_election = self._lacks_election
        if not self._is_serving and lacks_election is not None:
            return AppliedReply(summary=AppliedSummary().encode(), lacks_election=lacks_election)
        if shard is None or not self._is_serving:
            raise NotReadyError(f"pserver {self._index} has no values yet")
        restored = self._restored
        return AppliedReply(
            summary=AppliedSummary.of(shard.applied()).encode(),
            checkpoint=None if restored is None else restored.number,
            skipped=[] if restored is None else [f"checkpoint {s.number}: {s.reason}" for s in restored.skipped],
            rejected=[] if restored is None else [each.number for each in restored.skipped],
        )

    def seal(self, request: SealRequest) -> None:
        """Epochs are over: what is applied of them takes no more memory once all of it is.

        Raises:
            FencedError: the epochs are of another shard plan, or a deposed master tells of them.
            NotReadyError: there are no values yet.
        """
        self.require_order(request)
        shard = self._shard
        if shard is None or not self._is_serving:
            raise NotReadyError(f"pserver {self._index} has no values yet")
        shard.seal(request.epochs)

    def status(self) -> PserverStatusReply:
        """What this pserver says of itself."""
        shard = self._shard
        if shard is None:
            waiting, counts, versions = self._doing or "the model to be declared", None, (0, 0)
        else:
            waiting = "" if self._is_serving else "the first values of the model"
            counts, versions = shard.counts, shard.version_range()
        return PserverStatusReply(
            index=self._index,
            state="serving" if self._is_serving else "waiting",
            blocks=0 if shard is None else shard.block_count,
            lowest_version=versions[0],
            highest_version=versions[1],
            size_bytes=0 if shard is None else shard.size_bytes_total,
            pushes=0 if counts is None else counts.messages,
            rows_accepted=0 if counts is None else counts.accepted,
            rows_repeated=0 if counts is None else counts.repeated,
            rows_refused=0 if counts is None else counts.refused,
            members=[] if self._view is None else [m.member for m in self._view.members],
            waiting_for=waiting,
            is_draining=self._is_draining,
            refused_calls=self.refusals(),
        )
