"""Event loop of a pserver's lifecycle: passes events to ``domain.pserver.life`` and carries out its effects.

Theory of operation. The lifecycle decides under a lock, under which no thread waits or accesses blocks. The directory
is also read under this lock, so the lifecycle never sees an older state after a newer one.

A separate thread carries out slow effects (building, loading, waiting, reading etcd), one at a time. Meanwhile,
requests are answered with "not ready". Once the lifecycle permits them, pushes and pulls go directly to the ``Shard``.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable
from functools import partial

from msgspec.structs import replace

from flightedl.adapters.patience import PatientFiles, Persistence
from flightedl.adapters.storage import FsspecFiles
from flightedl.coordination.directory import Directory
from flightedl.coordination.keys import JobKeys
from flightedl.domain.checkpoint.pointer import loadable_of, rejected_of
from flightedl.domain.consistency.modes import Mode
from flightedl.domain.model.declared import parameters_of, plan_of, tables_of
from flightedl.domain.model.optimizers import Optimizer
from flightedl.domain.model.parameters import ParameterSpec
from flightedl.domain.model.sharding import ShardPlan, hash_with
from flightedl.domain.moving.server import State, is_surplus
from flightedl.domain.moving.values import placement_in
from flightedl.domain.pserver import life_values as happens
from flightedl.domain.pserver.life import PserverLife
from flightedl.domain.recovery.replay import AppliedSummary
from flightedl.domain.retries import BRIEF, machine_error
from flightedl.errors import FlightedlError, NotReadyError, OutcomeUnknownError, UnavailableError, UsageError
from flightedl.kernels.compiled import CompiledElsewhere, compiling_begins
from flightedl.messages.base import OfPlan, decode
from flightedl.messages.control import (
    AppliedReply,
    AppliedRequest,
    CutRequest,
    ReloadRequest,
    SealRequest,
    SnapshotReply,
    SnapshotRequest,
    ViewReply,
    ViewRequest,
)
from flightedl.messages.declarations import DeclaredModel, ElectionRecord, JobDeclaration, Placement
from flightedl.messages.moving import MoveHeader, MoveReply
from flightedl.messages.scaling import ScaleRequest
from flightedl.messages.status import PserverStatusReply
from flightedl.ports import Clock, Files, Storage
from flightedl.process import machine, tracing
from flightedl.process.shared_memory import SharedMemory
from flightedl.pserver.cuts.kept import RequestedCuts
from flightedl.pserver.cuts.snapshots import Snapshots
from flightedl.pserver.meter import Meter
from flightedl.pserver.moving.copies import Copies
from flightedl.pserver.moving.mover import Mover
from flightedl.pserver.moving.peers import Peers
from flightedl.pserver.moving.standby import Followed, Standby
from flightedl.pserver.readers.consumers import ConsumerPositions
from flightedl.pserver.readers.feed import PserverFeed
from flightedl.pserver.readers.reading import Reading
from flightedl.pserver.restoring import load_newest
from flightedl.pserver.shard import Shard
from flightedl.pserver.stores.building import kernels_of
from flightedl.pserver.stores.interface import distinct
from flightedl.pserver.turns import Turns
from flightedl.recording.recorded import recorded
from flightedl.recording.writer import Recorder
from flightedl.rpc.streams import Incoming

_log = logging.getLogger(__name__)

_PAUSE_S = 0.5
#: Maximum seconds to wait while another process compiles a kernel. Compiling takes several seconds of CPU time.
_COMPILING_PATIENCE_S = 60.0
#: Enough for one attempt.
_NO_PATIENCE_S = 0.1
_CATCH_UP_S = 5.0
_SETTLED = (happens.State.NO_MODEL, happens.State.WAITING, happens.State.SERVING)


class PserverService:
    """Lifecycle of one pserver, and the requests that depend on it. Thread-safe.

    Args:
        directory: Copy of the job's state in etcd.
        keys: The job's keys.
        fail: Called to end the process, because the job cannot continue.
        start_again: Called to end the process, so that a successor starts without its values.
        storage: Storage of the checkpoints; None if there is none.
        clock: Clock for measurements and retries.
        recorder: Recorder of the decisions; None to disable recording.
        row_bytes: Memory limit of the tables' rows; 0 to use all available memory.
        shares_memory: True to place values in memory that trainers on the same host can map.
        peers: Access to the other pservers, for moves; None if blocks never move.
        retire: Called to end the process, because the job no longer has a pserver with this index.
        consumers: Stores what named consumers acknowledge; None to disable it.
    """

    def __init__(
        self,
        directory: Directory,
        keys: JobKeys,
        fail: Callable[[str], None],
        start_again: Callable[[str], None],
        storage: Storage | None,
        clock: Clock,
        recorder: Recorder | None = None,
        row_bytes: int = 0,
        *,
        shares_memory: bool = False,
        peers: Peers | None = None,
        retire: Callable[[], None] = lambda: None,
        consumers: ConsumerPositions | None = None,
    ) -> None:
        self._shares_memory = shares_memory
        self._peers = peers
        self._retire = retire
        self._consumers = consumers
        #: Moves of the blocks; None until the blocks are allocated, and in jobs without a stored placement.
        self._mover: Mover | None = None
        self._row_bytes = row_bytes
        self._is_held: Callable[[], bool] = lambda: False
        #: Returns the number of failed calls by error code. Set when the server exists.
        self.refusals: Callable[[], dict[str, int]] = dict
        self.meter = Meter(now=clock.now)
        self._storage = storage
        #: True if only checkpoints, and no requests, may read all rows of a table.
        self.keeps_checkpoints = storage is not None
        self._clock = clock
        self._directory = directory
        self._keys = keys
        self._fail = fail
        self._start_again = start_again
        self._lock = threading.Lock()
        self._recorder = recorder
        self._life = recorded(recorder, {}, PserverLife, None if storage is None else storage.url)
        #: Slow effects that the builder thread carries out. None ends the thread.
        self._work: queue.SimpleQueue[happens.Effect | None] = queue.SimpleQueue()
        #: The builder thread: the only thread that compiles kernels, allocates blocks and loads checkpoints.
        self._builder: threading.Thread | None = None
        self._is_closing = threading.Event()
        self._turns = Turns(self._is_closing)
        self._specs: list[ParameterSpec] = []
        self._plan: ShardPlan | None = None
        self._shard: Shard | None = None
        self._snapshots: Snapshots | None = None
        self._cuts: RequestedCuts | None = None
        #: Created for the first client that follows the changes.
        self._feed: PserverFeed | None = None
        #: Created for the first standby.
        self._copies: Copies | None = None
        #: The pserver that this process follows, or has followed, as a standby.
        self._standby: Standby | None = None
        self._is_prepared = False
        #: Held while kernels are loaded, by the builder or by the thread of ``prepare``.
        self._kernels_lock = threading.Lock()
        self._has_compiled = False
        #: Numbers and loaders of the kernels that are loaded when the builder has nothing else to do.
        self._later: deque[tuple[int, Callable[[], object]]] = deque()
        #: Progress of loading kernels, for messages.
        self._kernels_loaded = ""
        self._files: Files = PatientFiles(FsspecFiles(), Persistence(BRIEF, clock, self._is_closing))
        #: True once the tables have their declared initial rows. Guarded by ``_loading``.
        self._has_first_rows = False
        self._loading = threading.Lock()
        #: Most recently logged reason why the storage could not be read.
        self._said = ""

    def _apply(self, event: happens.Event) -> None:
        self._find_lease_over()
        self._decide(event)

    def _decide(self, event: happens.Event) -> None:
        with self._lock:
            effects = self._life.apply(event)
        self._carry_out(effects)

    def _apply_facts(self, event: type[happens.Seen | happens.CaughtUp]) -> None:
        self._find_lease_over()
        with self._lock:
            effects = self._life.apply(event(self._facts()))
        self._carry_out(effects)

    def _find_lease_over(self) -> None:
        """Check the lease, so that a process that was frozen does not act on stale state."""
        if self._life.index >= 0 and not self._is_held():
            self._decide(happens.LeaseOver())

    def _carry_out(self, effects: happens.Effects) -> None:
        for effect in effects:
            self._begin(effect)

    def _begin(self, effect: happens.Effect) -> None:
        match effect:
            case happens.Serve(election):
                self._serve(election)
            case happens.Lack():
                _log.warning("the predecessor's values are lost: there is no checkpoint")
            case happens.Fail(why):
                self._fail(why)
            case happens.StartAgain(why):
                self._start_again(why)
            case _:
                self._work.put(effect)
                if self._builder is None:
                    self._builder = threading.Thread(target=self._run, name="flightedl-builder", daemon=True)
                    self._builder.start()

    def acquire_index(self, index: int, generation: int, is_held: Callable[[], bool]) -> None:
        """Record that this pserver holds ``index`` as long as ``is_held`` returns True."""
        self._is_held = is_held
        self._apply(happens.IndexAcquired(index, generation))

    def look(self) -> None:
        self._apply_facts(happens.Seen)
        life, peers = self._life, self._peers
        if peers is None:
            return
        if self._mover is not None and life.may_be_placed:
            self._mover.look()
        reading, desired = peers.read(life.index), self._directory.ps_desired()
        if reading is not None and is_surplus(life.index, reading.placement, desired, is_serving=life.is_serving):
            self._retire()

    def _facts(self, index: int | None = None) -> happens.Facts:
        """Return the job's state, for the pserver with this index; None for this process's index."""
        index = self._life.index if index is None else index
        job = self._directory.entry(self._keys.job)
        election = self._directory.entry(self._keys.init_params)
        pointer = self._directory.entry(self._keys.checkpoint_latest)
        master = self._directory.master()
        model = None if job is None else decode(job.value, JobDeclaration).model
        is_done = election is not None and decode(election.value, ElectionRecord).done
        return happens.Facts(
            model=None if model is None else self._placed(model, index),
            election=election.create_revision if election is not None and is_done else None,
            loadable=None if pointer is None else loadable_of(pointer.value),
            rejected=frozenset() if pointer is None else rejected_of(pointer.value),
            master=0 if master is None else master.generation,
        )

    def _placed(self, model: DeclaredModel, index: int) -> DeclaredModel | None:
        """Return the model with the newest placement; None if the placement does not include this pserver."""
        stored = self._directory.entry(self._keys.placement)
        placement = placement_in(model, None if stored is None else stored.value)
        if placement is None:
            return model
        if index >= placement.pservers:
            return None
        return replace(model, placement=placement, plan_hash=hash_with(model.plan_hash, placement.version))

    def require_lease(self) -> None:
        """Check the lease before a write. A process that was frozen notices here that the lease has expired.

        Raises:
            ReplacedError: The lease has expired.
            NotReadyError: The process is ending for another reason.
        """
        self._find_lease_over()
        self._life.require_lease()

    def close(self) -> None:
        self._is_closing.set()
        self.end_standby()
        if self._consumers is not None:
            self._consumers.close()
        if self._mover is not None:
            self._mover.close()
        self._work.put(None)
        if self._builder is not None:
            self._builder.join(1.0)

    def prepare(self) -> None:
        """While this spare waits for a free index, load the declared model's kernels in the background."""
        model = self._facts().model
        if self._is_prepared or model is None or model.is_former:
            return
        self._is_prepared = True
        threading.Thread(target=self._load_kernels, args=(model,), name="flightedl-kernels", daemon=True).start()

    def begin_standby(self, index: int, generation: int, lag_s: float) -> None:
        """Keep a copy of a pserver's blocks, as its standby with this generation, until an index is acquired."""
        peers = self._peers
        assert peers is not None, "a standby needs other pservers"

        def followed() -> Followed | None:
            facts = self._facts(index)
            model = facts.model
            if model is None or model.is_former or facts.election is None:
                return None
            plan = plan_of(model)
            is_moving = self._directory.entry(self._keys.moving) is not None

            def build() -> Shard:
                self._load_kernels(model)
                return self._new_shard(model, plan, index, generation)

            return Followed(plan.hash, _layout_of(model, plan, index), peers.source(index), build, is_moving)

        self._standby = Standby(index, generation, followed, lag_s, self._clock)

    def placed_count(self, desired: int) -> int:
        """Return how many of the ``desired`` pservers may have blocks. The others are being added."""
        model = self._facts(0).model
        if model is None:
            return 0
        return desired if model.placement is None else min(desired, model.placement.pservers)

    @property
    def lacks_copy(self) -> bool:
        """True if this process is a standby whose first copy is not complete yet."""
        return (standby := self._standby) is not None and standby.lacks_copy

    def end_standby(self) -> None:
        standby, self._standby = self._standby, None
        if standby is not None:
            standby.close()

    def _load_kernels(self, model: DeclaredModel) -> None:
        """Load the model's kernels. The processes of this machine share the work if numba's cache lacks some."""
        declared = model.declaration
        first, later = kernels_of(
            parameters_of(declared), tables_of(declared), Optimizer.from_json(declared.optimizer), declared.wire
        )
        with self._kernels_lock:
            self._load(deque(enumerate(first, start=1)), len(first))
            self._later = deque(enumerate(later, start=len(first) + 1))

    def _load(self, left: deque[tuple[int, Callable[[], object]]], count: int) -> None:
        """Load numbered kernels. If ``count`` is 0, the pserver serves without them: stop if there is other work."""
        passed_over = 0
        while left and (count or (self._work.empty() and not self._is_closing.is_set())):
            number, load = left.popleft()
            patience_s = _COMPILING_PATIENCE_S if passed_over > len(left) else _NO_PATIENCE_S
            with contextlib.ExitStack() as turn:
                compiling_begins.set(partial(self._compiling_began, number, count, turn, patience_s))
                try:
                    load()
                except CompiledElsewhere:
                    left.append((number, load))
                    passed_over += 1
                    continue
            passed_over = 0
            if count:
                self._kernels_loaded = f" ({count - len(left)} of {count})"
        compiling_begins.set(lambda: None)

    def _compiling_began(self, number: int, count: int, turn: contextlib.ExitStack, patience_s: float) -> None:
        """Wait while another process on this machine compiles this kernel and adds it to the cache.

        Raises:
            CompiledElsewhere: Another process compiles it, and other kernels are left.
        """
        if count and not self._has_compiled:
            self._has_compiled = True
            _log.info("compiling up to %d kernels, once on this machine", count)
            self._apply(happens.CompilingBegan())
        turns = Turns(self._is_closing, at_once=1, patience_s=patience_s, purpose=f"kernel-{number}")
        if not turn.enter_context(turns.turn()) and patience_s == _NO_PATIENCE_S:
            raise CompiledElsewhere

    @property
    def is_built(self) -> bool:
        """True if the blocks have been allocated and, if there is a checkpoint, restored."""
        return self._life.is_visible

    @property
    def is_serving(self) -> bool:
        """True if the blocks have values."""
        return self._life.is_serving

    @property
    def is_settled(self) -> bool:
        """True if this process is ready: it has values, or waits only for a trainer's initial values."""
        return self._life.state in _SETTLED

    @property
    def doing(self) -> str:
        return self._life.state.value

    @property
    def is_empty(self) -> bool:
        """True if all blocks have moved to other pservers."""
        return self._mover is not None and self._mover.is_empty

    def leave(self, *, is_cancelled: bool = False) -> None:
        """Ask the master to move all blocks to other pservers, or to stop moving them. May be repeated.

        Raises:
            UsageError: No other pserver can have the blocks.
            UnavailableError: The master cannot be reached.
        """
        if self._peers is None or self._mover is None:
            raise UsageError("the blocks of this job do not move")
        leaving = [(self._life.index, self._life.generation)]
        self._peers.scale(ScaleRequest(job=self._keys.job_name, leaving=leaving, is_cancelled=is_cancelled))

    def drain(self) -> None:
        """Announce that this pserver will end soon, so that the master orders a checkpoint."""
        progress = None if self._snapshots is None else self._snapshots.progress
        self._apply(happens.DrainAsked(None if progress is None else progress.order))

    @property
    def is_drained(self) -> bool:
        """True if a checkpoint contains everything that was pushed before the call of ``drain``."""
        return self._life.is_drained(None if self._snapshots is None else self._snapshots.progress)

    # the thread

    def _next_effect(self) -> happens.Effect | None:
        """Return the next effect. Until there is one, load kernels that the first batches do not need."""
        if self._later:
            with self._kernels_lock:
                self._load(self._later, 0)
        return self._work.get()

    def _run(self) -> None:
        while (effect := self._next_effect()) is not None and not self._is_closing.is_set():
            try:
                self._do(effect)
            except FlightedlError as error:
                self._apply(happens.BuildFailed(str(error), may_pass=error.retryable))
            except MemoryError as error:
                # A predecessor on this machine may still be giving its memory back.
                reason = machine_error(error, "the shard cannot be built")
                self._apply(happens.BuildFailed(str(reason), may_pass=True))
            except Exception as error:
                _log.exception("the shard could not be built")
                self._apply(happens.BuildFailed(f"the shard could not be built: {error}"))
                raise

    def _do(self, effect: happens.Effect) -> None:
        match effect:
            case happens.Build(model):
                self._specs = parameters_of(model.declaration)
                self._plan = plan_of(model)
                self._apply(happens.PlanMade(self._plan.hash))
            case happens.MakeBlocks(model):
                self._apply(self._make_blocks(model))
            case happens.Restore():
                self._apply(self._restore(effect))
            case happens.CatchUp() if self._has_caught_up():
                self._apply_facts(happens.CaughtUp)
            case happens.CatchUp():
                self._apply(happens.CaughtUp(None))
            case _:
                self._is_closing.wait(_PAUSE_S)
                self._apply(happens.PauseOver())

    def _make_blocks(self, model: DeclaredModel) -> happens.BlocksMade:
        assert self._plan is not None, "the plan comes first"
        self._load_kernels(model)
        positions, election = self._plan.positions_of(self._life.index), self._facts().election
        shard, standby = None, self._standby
        if standby is not None and standby.index == self._life.index:
            shard = standby.take(election, _layout_of(model, self._plan, standby.index))
            self._standby = None
        is_copied = shard is not None
        if shard is None:
            with self._turns.turn():
                shard = self._new_shard(model, self._plan, self._life.index, self._life.generation)
            machine.release_startup_memory()
        shard.place(self._plan.hash)
        self._shard = shard
        self._snapshots = Snapshots(
            shard.copying,
            self._storage,
            self._keys.job_name,
            self._life.index,
            self._plan.pserver_count,
            self._clock,
            self._recorder,
        )
        self._cuts = RequestedCuts(shard.copying, self._clock)
        _log.info("model declared blocks=%d size_bytes=%d", shard.block_count, shard.size_bytes_total)
        if self._peers is not None and self._plan.placement:
            state = State(tuple(positions), version=self._plan.placement)
            self._mover = Mover(
                self._life.index,
                self._life.generation,
                state,
                shard,
                self._peers,
                self._clock,
                self._has_moved,
                lambda why: self._apply(happens.BlocksLost(why)),
            )
        return happens.BlocksMade(shard.block_count, is_empty=not positions, copied=election if is_copied else None)

    def _new_shard(self, model: DeclaredModel, plan: ShardPlan, index: int, generation: int) -> Shard:
        return Shard(
            plan,
            index,
            Optimizer.from_json(model.declaration.optimizer),
            Mode.from_json(model.present_mode),
            model.declaration.wire,
            lambda why: self._apply(happens.BlocksLost(why)),
            self._recorder,
            generation,
            self.meter,
            self._row_bytes,
            shares_memory=self._shares_memory,
        )

    def _has_moved(self, placement: Placement) -> None:
        shard = self._blocks()
        shard.place(hash_with(shard.plan_hash, placement.version))
        if self._snapshots is not None:
            self._snapshots.pserver_count = placement.pservers
        self._apply(happens.Placed(shard.plan_hash))

    def _restore(self, wanted: happens.Restore) -> happens.Event:
        shard, plan, storage = self._shard, self._plan, self._storage
        assert shard is not None
        assert plan is not None
        assert storage is not None, "a restore needs a storage"
        began = self._clock.now()
        try:
            with self._turns.turn(), tracing.span("recovery", pserver=self._life.index):
                found = load_newest(
                    storage,
                    self._keys.job_name,
                    self._specs,
                    plan,
                    self._life.index,
                    shard,
                    wanted.loadable,
                    wanted.rejected,
                )
        except UnavailableError as error:
            if str(error) != self._said:
                self._said = str(error)
                _log.warning("waiting for the checkpoints: %s", error)
            return happens.StoreUnreachable(str(error))
        if found.number is None or found.applied is None:
            return happens.NothingLoadable(found.skipped)
        shard.restored(found.applied)
        _log.info(
            "restored checkpoint=%d size_bytes=%d seconds=%.3f",
            found.number,
            shard.size_bytes_total,
            self._clock.now() - began,
        )
        return happens.Restored(found.number, found.skipped)

    def _has_caught_up(self) -> bool:
        try:
            return self._directory.catch_up(self._keys.checkpoint_latest, _CATCH_UP_S)
        except UnavailableError as error:
            _log.warning("waiting for etcd, to read which checkpoints exist: %s", error)
            return False

    def _serve(self, election: int) -> None:
        snapshots = self._snapshots
        assert snapshots is not None, "there are values without blocks"
        threading.Thread(target=snapshots.prepare, name="flightedl-snapshot-memory", daemon=True).start()
        # Exclude the compiler's large heap from future garbage collections, which would delay pushes.
        machine.set_garbage_aside()
        _log.info("serving election=%d", election)

    # requests of trainers

    def shard(self, plan_hash: str) -> Shard:
        """Return the shard for pushes and pulls. Raises the same errors as ``PserverLife.require_values``."""
        if not self._life.serves(plan_hash):
            self.look()
            self._life.require_values(plan_hash)
        return self._blocks()

    def reading(self, plan_hash: str) -> Reading:
        """Return an object that reads the current model. Raises the errors of ``PserverLife.require_values``."""
        shard = self.shard(plan_hash)
        assert self._plan is not None, "there are values without a plan"
        assert self._cuts is not None, "there are values without blocks"
        return Reading(self._keys.job_name, self._plan, shard, self._storage, self._cuts)

    def feed(self, plan_hash: str) -> PserverFeed:
        """Return the feed of the current model. Raises the errors of ``PserverLife.require_values``."""
        shard = self.shard(plan_hash)
        assert self._plan is not None, "there are values without a plan"
        with self._lock:
            if self._feed is None:
                life = self._life
                if self._consumers is not None:
                    self._consumers.start(life.index)
                self._feed = PserverFeed(
                    shard, self._plan, life.election or 0, life.generation, self._clock, self._consumers
                )
                assert self._snapshots is not None, "there are values without blocks"
                self._snapshots.feed = self._feed
            return self._feed

    def copies(self, plan_hash: str) -> tuple[Copies, int]:
        """Return the copies for standbys, and the election of the values. Raises like ``require_values``."""
        shard = self.shard(plan_hash)
        with self._lock:
            if self._copies is None:
                mover = self._mover
                unmoved = contextlib.nullcontext if mover is None else mover.no_unit_is_pinned
                self._copies = Copies(shard, self._life.generation, self._clock, unmoved)
            return self._copies, self._life.election or 0

    def shard_for_init(self, plan_hash: str, election: int) -> Shard | None:
        """Return the shard for initial values. None if the shard already has values, so that new values are ignored."""
        if not self._life.is_visible:
            self.look()
        self._life.require_blocks(plan_hash)
        self._apply(happens.FirstValuesBegin(election))
        self._life.require_blocks(plan_hash)
        return self._blocks() if self._life.accepts_first_values else None

    def first_values_received(self, election: int) -> tuple[int, int]:
        """Record the arrival of initial values. Return the numbers of blocks with values and of all blocks."""
        shard = self._blocks()
        count = shard.initialized_count(election)
        if self._life.accepts_first_values and count == shard.block_count:
            self._load_first_rows(shard)
        self._apply(happens.FirstValuesReceived(election, count))
        return self._life.first_value_count(election, count), shard.block_count

    def _load_first_rows(self, shard: Shard) -> None:
        """Load the tables' declared initial rows, once. A second thread that sends initial values waits."""
        if not any(table.first_rows for table in shard.rows.tables):
            return
        # Imported lazily: Parquet is slow to import, and few jobs declare initial rows.
        from flightedl.pserver.stores.first_rows import load_first_rows

        with self._loading:
            if self._has_first_rows:
                return
            try:
                for span in distinct(shard.rows.spans):
                    span.begin_restore()
                    load_first_rows(span, self._files, self._clock)
            except UsageError as error:
                self._fail(str(error))
                raise
            self._has_first_rows = True

    def _blocks(self) -> Shard:
        assert self._shard is not None, "the blocks are not allocated"
        return self._shard

    # requests of the master

    def _check(self, request: OfPlan) -> None:
        if not self._life.has_plan(request.plan_hash):
            self.look()
        found = self._directory.master()
        with self._lock:
            self._life.observe_master(0 if found is None else found.generation)
            self._life.check_request(request)

    def apply_view(self, view: ViewRequest) -> ViewReply:
        """Apply a newer view. Reject members that would join at a round in the past.

        Raises:
            FencedError: The view belongs to a different shard plan.
            NotReadyError: The blocks are not allocated yet.
        """
        self._check(view)
        self._life.require_visible()
        shard = self._blocks()
        with self._no_unit_is_pinned():
            reply = shard.set_members(view)
        shard.changes.announce()
        return reply

    def _no_unit_is_pinned(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._mover is None else self._mover.no_unit_is_pinned()

    def move(self, header: MoveHeader, incoming: Incoming) -> MoveReply:
        """Receive part of the content of blocks that move here. Raises the errors of ``Mover.receive``."""
        if self._mover is None or not self._life.is_serving:
            return MoveReply(problem=f"pserver {self._life.index} has no values yet")
        return self._mover.receive(header, incoming)

    def snapshot(self, request: SnapshotRequest) -> SnapshotReply:
        """Accept a checkpoint order. Return the progress of the newest order.

        Raises:
            FencedError: The order belongs to a different shard plan.
            NotReadyError: There are no values yet.
        """
        self._check(request)
        self._life.require_snapshots()
        snapshots = self._snapshots
        assert snapshots is not None, "there are values without blocks"
        self._require_no_leftovers()
        with self._no_unit_is_pinned():
            progress = snapshots.order(request)
        return replace(progress, copied_s=snapshots.copied_s, written_s=snapshots.written_s)

    def cut(self, request: CutRequest) -> SnapshotReply:
        """Accept a request for a cut in memory. Return the progress of the newest request.

        Raises:
            FencedError: The request belongs to a different shard plan.
            NotReadyError: There are no values yet, or rows of another pserver are being removed.
        """
        self._check(request)
        self._life.require_snapshots()
        self._require_no_leftovers()
        assert self._cuts is not None, "there are values without blocks"
        with self._no_unit_is_pinned():
            return self._cuts.order(request)

    def expire(self) -> None:
        """Free memory that is no longer needed. Called about once per second."""
        if self._cuts is not None:
            self._cuts.expire()
        if self._feed is not None:
            self._feed.expire()

    def _require_no_leftovers(self) -> None:
        if self._mover is not None and self._mover.is_discarding:
            raise NotReadyError("rows of another pserver are being removed here")

    def applied(self, request: AppliedRequest) -> AppliedReply:
        """Return the batches that all blocks have applied. The master compares them with its completed tasks.

        Raises:
            FencedError: The request belongs to a different shard plan.
            NotReadyError: There are no values yet.
        """
        self._check(request)
        return self._life.applied(lambda: AppliedSummary.of(self._blocks().applied()))

    def set_task_counts(self, request: SealRequest) -> None:
        """Set the number of tasks of each epoch in the request.

        An epoch's record takes no memory after all tasks of the epoch have been applied.

        Raises:
            FencedError: The request belongs to a different shard plan, or comes from a deposed master.
            NotReadyError: There are no values yet.
        """
        self._check(request)
        self._life.require_snapshots()
        self._blocks().set_task_counts(request.epochs, request.open_epoch)

    def reload(self, request: ReloadRequest) -> None:
        """End the process. Its successor restores the values, or waits for initial values.

        Raises:
            FencedError: The request belongs to a different shard plan, or comes from a deposed master.
            NotReadyError: This pserver does not know the model yet.
        """
        self._check(request)
        if self._peers is not None and self._life.index in self._directory.standbys():
            with contextlib.suppress(UnavailableError, OutcomeUnknownError):
                self._peers.dismiss_standby(self._life.index)
        self._apply(happens.ReloadAsked())

    @property
    def store(self) -> SharedMemory | None:
        """Shared memory with the values, for trainers to map; None if the values are not shared."""
        shard = self._shard
        return None if shard is None else shard.memory

    def status(self) -> PserverStatusReply:
        life = self._life
        shard = self._shard if life.is_visible else None
        meter, versions = self.meter, (0, 0) if shard is None else shard.version_range()
        waits_at, waits_for = (0, []) if shard is None else shard.waits_for()
        received_bytes, sent_bytes = meter.size_bytes
        snapshots = self._snapshots
        newest = None if snapshots is None else snapshots.progress
        return PserverStatusReply(
            index=life.index,
            state="serving" if life.is_serving else "waiting",
            blocks=0 if shard is None else shard.block_count,
            buckets=0 if shard is None else len(shard.rows.numbers),
            lowest_version=versions[0],
            highest_version=versions[1],
            size_bytes=0 if shard is None else shard.size_bytes_total,
            pushes=meter.messages,
            rows=meter.rows_by_outcome,
            received_bytes=received_bytes,
            sent_bytes=sent_bytes,
            streams=meter.streams[0],
            shared_streams=meter.streams[1],
            shares_memory=meter.shares_memory(),
            waits_at=waits_at,
            waits_for=waits_for,
            waits_s=meter.waits_s((waits_at, *waits_for)) if waits_for else 0.0,
            copied_s=0.0 if snapshots is None else snapshots.copied_s,
            written_s=0.0 if snapshots is None else snapshots.written_s,
            written_bytes=0 if newest is None or newest.file is None else newest.file.size_bytes,
            plan_hash="" if shard is None else shard.plan_hash,
            facts=machine.host_facts(),
            members=[] if shard is None else shard.members,
            waiting_for=life.waiting_for + (self._kernels_loaded if life.is_compiling else ""),
            is_draining=life.state is happens.State.DRAINING,
            refused_calls=self.refusals(),
            tables=[] if shard is None else shard.rows.counts(),
            staleness={} if shard is None else meter.staleness(shard.members),
            pushed=meter.pushed,
            standby_lag_s=self._standby_lag_s,
        )

    @property
    def _standby_lag_s(self) -> float | None:
        has_standby = self._copies is not None and self._life.index in self._directory.standbys()
        return self._copies.lag_s if has_standby and self._copies is not None else None


def _layout_of(model: DeclaredModel, plan: ShardPlan, index: int) -> object:
    """Return the facts on which a shard is built. Blocks with the same facts can be served by the same shard."""
    return plan.positions_of(index), model.declaration, model.present_mode
