"""A pserver's life as a state machine: what it builds, loads, waits for and serves, and what it answers meanwhile.

In order: it takes an index; waits for the model to be declared; makes its blocks; gets values; serves; ends. The model
of a job that was resumed is waited for until a trainer has declared it again: its optimizer may then have other
settings, and nothing is ever done by the former ones.

**Values.** When the blocks are made, etcd says which of three it is:

* No election is done: the model has no first values yet. The pserver *waits* for them, and its members can join.
* One is done, and there are checkpoints: it is a replacement, which *restores* the newest one that can be loaded.
  Nobody sees its blocks before, also no view does, because blocks that are at no version yet cannot say from which
  round on they can wait for a member. Where none can be loaded, the job has failed; but only if etcd itself, asked
  after the store was, still names the same ones: a copy of etcd may lag behind, and retention may have deleted what it
  names. A store that cannot be reached is asked again for ever: to begin without the values would be worse.
* One is done, and there was never a checkpoint: its values are gone with its predecessor. It *lacks* them, and says so
  to the master, which lets the model begin again (``domain.recovery.reinitialization``).

Values belong to an election: first values of it, or what grew from them. So a pserver whose values are of another
election than the one that etcd names as done ends, and its successor looks again. So does one whose blocks could have
been seen already and whose values turn out to be in a checkpoint.

**The end.** An ended machine stays as it is and answers nobody: the process ends as soon as it can.
"""

from __future__ import annotations

from collections.abc import Callable

from flightedl.domain.checkpoint.manifest import Skipped
from flightedl.domain.model.sharding import name_same_cut
from flightedl.domain.pserver.life_values import (
    BlocksLost,
    BlocksMade,
    Build,
    BuildFailed,
    CatchUp,
    CaughtUp,
    CompilingBegan,
    DrainAsked,
    Effects,
    Event,
    Facts,
    Fail,
    FirstValuesBegin,
    FirstValuesCame,
    IndexTaken,
    Lack,
    LeaseOver,
    MakeBlocks,
    NothingLoadable,
    Pause,
    PauseOver,
    PlanMade,
    ReloadAsked,
    Restore,
    Restored,
    Seen,
    Serve,
    StartAgain,
    State,
    StoreUnreachable,
)
from flightedl.domain.recovery.replay import AppliedSummary
from flightedl.errors import FencedError, NotReadyError, ReplacedError
from flightedl.messages.base import OfPlan
from flightedl.messages.control import AppliedReply, OfMaster, OrderNumber, SnapshotReply, SnapshotRequest, ViewRequest
from flightedl.messages.declarations import DeclaredModel

_SERVING = (State.SERVING, State.DRAINING)
#: States in which the blocks can be seen: they have values, or wait for first ones.
_VISIBLE = (State.WAITING, *_SERVING)
_MADE = (State.RESTORING, State.LACKING, *_VISIBLE)
_WAITING_FOR = {
    State.NO_INDEX: "the model to be declared",
    State.NO_MODEL: "the model to be declared",
    State.BUILDING: "its blocks to be allocated",
    State.LACKING: "first values again: its predecessor's are gone, and there is no checkpoint",
    State.WAITING: "the first values of the model",
}


class PserverLife:
    """Where a pserver is in its life.

    Args:
        storage: Where checkpoints lie, for people; None: this process was not told.
    """

    def __init__(self, storage: str | None) -> None:
        self._storage = storage
        self.state = State.NO_INDEX
        self.index = -1
        self.generation = 0
        self._facts = Facts()
        #: The highest generation of a master that was heard of.
        self.newest_master = 0
        #: Of the declared model, once this process has computed the same.
        self._plan_hash: str | None = None
        #: That the blocks are made of.
        self._model: DeclaredModel | None = None
        self._block_count = 0
        self._is_compiling = False
        #: Whether somebody may have seen the blocks, before they had values.
        self._was_visible = False
        #: The newest election whose first values began to come, and whether all blocks have them.
        self._given = 0
        self._is_given = False
        #: While a checkpoint is loaded: for which election, and from which ones.
        self._wanted: tuple[int, Restore] | None = None
        #: Those that the last search could not load; None: it is not over.
        self._found_none: tuple[Skipped, ...] | None = None
        #: Why the checkpoints cannot be read at the moment.
        self._trouble = ""
        #: The election whose values it has, or should have.
        self.election: int | None = None
        self.checkpoint: int | None = None
        self.skipped: tuple[Skipped, ...] = ()
        self._is_lease_over = False
        #: The newest order when it was asked to end.
        self._before_drain: OrderNumber | None = None
        self._why_ended = ""
        self._handlers: dict[type[Event], Callable[..., Effects]] = {
            IndexTaken: self._take_index,
            Seen: self._see,
            PlanMade: self._take_plan,
            CompilingBegan: self._compile,
            BlocksMade: self._take_blocks,
            BuildFailed: lambda event: self._fail(event.why),
            Restored: self._restored,
            NothingLoadable: self._found_nothing,
            StoreUnreachable: self._wait_for_store,
            CaughtUp: self._caught_up,
            PauseOver: lambda _: self._seek_values() if self.state is State.RESTORING else (),
            FirstValuesBegin: self._begin_first_values,
            FirstValuesCame: self._take_first_values,
            DrainAsked: self._drain,
            ReloadAsked: lambda _: self._end("it goes back to the newest checkpoint, or to first values, as all do"),
            LeaseOver: self._lose_lease,
            BlocksLost: lambda event: self._end(event.why),
        }

    def apply(self, event: Event) -> Effects:
        """Something has happened; what follows."""
        return () if self.state is State.ENDED else self._handlers[type(event)](event)

    # what etcd says

    def _take_index(self, event: IndexTaken) -> Effects:
        self.index, self.generation = event.index, event.generation
        self.state = State.NO_MODEL
        return self._look()

    def _see(self, event: Seen) -> Effects:
        self._facts = event.facts
        self.hear_of_master(event.facts.master)
        return self._look()

    def _look(self) -> Effects:
        """What follows from the facts in the present state."""
        election = self._facts.election
        if self.state is State.NO_MODEL:
            return self._begin_to_build()
        if self.state in {State.LACKING, State.WAITING}:
            return self._seek_values()
        if self.state in _SERVING and election not in {None, self.election}:
            return self._end("the model was given first values again")
        # A search goes on until it is over: then the facts of that moment count.
        return ()

    def _begin_to_build(self) -> Effects:
        model = self._facts.model
        if model is None or model.is_former:
            return ()
        self.state, self._model = State.BUILDING, model
        return (Build(model),)

    def _take_plan(self, event: PlanMade) -> Effects:
        model = self._model
        assert model is not None, "no model was to be built"
        if event.plan_hash != model.plan_hash:
            return self._fail("this pserver computes another shard plan: run the same flightedl version everywhere")
        self._plan_hash = event.plan_hash
        return (MakeBlocks(model),)

    def _compile(self, _: CompilingBegan) -> Effects:
        self._is_compiling = self.state is State.BUILDING
        return ()

    def _take_blocks(self, event: BlocksMade) -> Effects:
        self._block_count = event.block_count
        return self._seek_values()

    # values

    def _seek_values(self) -> Effects:
        """The blocks have no values: wait for them, load them, or lack them."""
        election, loadable = self._facts.election, self._facts.loadable
        if self._wanted is not None and (election is None or loadable is None):
            return self._end("its blocks have a part of a checkpoint, and the model is to get first values")
        if election is None:
            self.state, self.election, self._was_visible = State.WAITING, None, True
            return ()
        if self._was_visible and self._is_given and self._given == election:
            return self._serve(election, None)
        if loadable is not None and self._was_visible:
            return self._end("its values are in a checkpoint, which only a process that nobody has seen can load")
        if loadable is not None:
            return self._restore(election, Restore(loadable, self._facts.rejected))
        if self.state is State.LACKING and self.election == election:
            return ()
        self.state, self.election = State.LACKING, election
        return (Lack(election),)

    def _serve(self, election: int, checkpoint: int | None) -> Effects:
        self.state, self.election, self.checkpoint = State.SERVING, election, checkpoint
        return (Serve(election, checkpoint),)

    def _begin_first_values(self, event: FirstValuesBegin) -> Effects:
        if self.state in _SERVING and self.election is not None and event.election > self.election:
            return self._end("a trainer sends first values of a newer election")
        if self.state is State.WAITING and event.election > self._given:
            self._given, self._is_given = event.election, False
        return ()

    def _take_first_values(self, event: FirstValuesCame) -> Effects:
        if self.state is not State.WAITING or event.election < self._given:
            return ()
        self._given, self._is_given = event.election, event.block_count == self._block_count
        return self._seek_values()

    # a checkpoint

    def _restore(self, election: int, restore: Restore) -> Effects:
        self.state, self.election = State.RESTORING, election
        self._wanted, self._found_none = (election, restore), None
        if self._storage is None:
            return self._fail(
                self._gone("this pserver was started without --checkpoint: give it the URL that the master has")
            )
        return (restore,)

    def _gone(self, why: str) -> str:
        return f"the values of pserver {self.index} are gone with its predecessor, and {why}"

    def _restored(self, event: Restored) -> Effects:
        assert self._wanted is not None, "nothing was to be restored"
        election, _ = self._wanted
        if self._facts.election != election:
            return self._end("the model was given first values again while a checkpoint was loaded")
        self.skipped, self._trouble = event.skipped, ""
        return self._serve(election, event.number)

    def _found_nothing(self, event: NothingLoadable) -> Effects:
        self._found_none, self._trouble = event.skipped, ""
        return (CatchUp(),)

    def _caught_up(self, event: CaughtUp) -> Effects:
        if event.facts is None:
            return (Pause(),)
        assert self._wanted is not None, "nothing was to be restored"
        self._facts = facts = event.facts
        election, restore = self._wanted
        is_the_same = (facts.election, facts.loadable, facts.rejected) == (election, restore.loadable, restore.rejected)
        if self._found_none is not None and is_the_same:
            tried = "; ".join(f"checkpoint {each.number}: {each.reason}" for each in self._found_none[:3])
            return self._fail(
                self._gone(f"no checkpoint at {self._storage} can be loaded ({tried or 'none is there'})")
            )
        return self._seek_values()

    def _wait_for_store(self, event: StoreUnreachable) -> Effects:
        self._trouble = event.why
        return (Pause(),)

    # the end

    def _drain(self, event: DrainAsked) -> Effects:
        if self.state is State.SERVING:
            self.state = State.DRAINING
            self._before_drain = event.order
        return ()

    @property
    def _newest_checkpoint(self) -> int | None:
        return None if self._facts.loadable is None else self._facts.loadable[-1]

    def is_drained(self, progress: SnapshotReply | None) -> bool:
        """Whether a checkpoint that was ordered since it was to end is complete, this pserver's part included."""
        newest = self._newest_checkpoint
        return (
            self.state is State.DRAINING
            and progress is not None
            and progress.state == "written"
            and progress.order.is_newer_than(self._before_drain)
            and newest is not None
            and newest >= progress.order.number
        )

    def _lose_lease(self, _: LeaseOver) -> Effects:
        if self.state is State.NO_INDEX:
            return ()
        self._is_lease_over = True
        return self._end("its lease could not be renewed")

    def _fail(self, why: str) -> Effects:
        self.state, self._why_ended = State.ENDED, why
        return (Fail(why),)

    def _end(self, why: str) -> Effects:
        self.state, self._why_ended = State.ENDED, why
        return (StartAgain(why),)

    # what it answers

    @property
    def is_serving(self) -> bool:
        """Whether it has values."""
        return self.state in _SERVING

    @property
    def is_visible(self) -> bool:
        """Whether the blocks are made, and have values or wait for first ones: the rest takes little."""
        return self.state in _VISIBLE

    @property
    def is_compiling(self) -> bool:
        """True if the blocks cannot be made before kernels are compiled."""
        return self.state is State.BUILDING and self._is_compiling

    @property
    def waiting_for(self) -> str:
        """For people; empty: nothing."""
        if self.state is State.RESTORING:
            return f"the checkpoints: {self._trouble}" if self._trouble else "the checkpoint to be loaded"
        if self.is_compiling:
            return "its kernels to be compiled"
        return _WAITING_FOR.get(self.state, "")

    def require_lease(self) -> None:
        """Raise ReplacedError if there is no lease any more, or not yet, and NotReadyError if the process ends."""
        if self.state in _SERVING and not self._is_lease_over:
            return
        if self._is_lease_over or self.state is State.NO_INDEX:
            raise ReplacedError(f"the lease of pserver {self.index} is over: look its successor up")
        if self.state is State.ENDED:
            raise self._not_ready("")

    def require_blocks(self, plan_hash: str) -> None:
        """Raise NotReadyError if the blocks are not allocated, and FencedError if the trainer means another plan."""
        if self.state not in _VISIBLE:
            if self.state in {State.NO_INDEX, State.NO_MODEL}:
                # The trainer that asks has just declared the model itself.
                raise self._not_ready("has not read the model's declaration yet")
            raise self._not_ready(f"waits for {self.waiting_for}")
        assert self._plan_hash is not None, "there are no blocks without a plan"
        if plan_hash != self._plan_hash and not name_same_cut(plan_hash, self._plan_hash):
            raise FencedError("the shard plan is another one: read the job's declaration again")

    def serves(self, plan_hash: str) -> bool:
        """True if a trainer with this plan may push and pull."""
        return self.state in _SERVING and plan_hash == self._plan_hash

    def require_values(self, plan_hash: str) -> None:
        """Whether a trainer may push and pull. Raises as ``require_blocks``, also while it waits for first values."""
        self.require_blocks(plan_hash)
        if self.state not in _SERVING:
            raise self._not_ready(f"waits for {self.waiting_for}")

    @property
    def takes_first_values(self) -> bool:
        """Whether first values are taken; one that serves has them already."""
        return self.state is State.WAITING

    def first_value_count(self, election: int, block_count: int) -> int:
        """How many blocks have the values of an election, where so many were sent them."""
        return self._block_count if self.is_serving and election == self.election else block_count

    def check_request(self, request: OfPlan) -> None:
        """Whether what a master wants may be looked at: it means this shard plan, and is not deposed.

        Raises:
            FencedError: it does not, or it is.
            NotReadyError: the model is not known here yet.
        """
        if self._plan_hash is None:
            raise self._not_ready("waits for the model to be declared")
        if request.plan_hash != self._plan_hash:
            raise FencedError("the master means another shard plan: read the job's declaration again")
        if isinstance(request, OfMaster):
            if request.master_generation < self.newest_master:
                raise FencedError(f"master {request.master_generation} is deposed: {self.newest_master} leads")
            self.hear_of_master(request.master_generation)
        # These have numbers of their own.
        elif isinstance(request, ViewRequest):
            self.hear_of_master(request.master_generation)
        elif isinstance(request, SnapshotRequest):
            self.hear_of_master(request.order.master_generation)

    def hear_of_master(self, generation: int) -> None:
        """A master of this generation leads, or led."""
        self.newest_master = max(self.newest_master, generation)

    def require_visible(self) -> None:
        """Whether a view can be taken. NotReadyError: no."""
        if self.state not in _VISIBLE:
            raise self._not_ready(f"waits for {self.waiting_for}")

    def require_snapshots(self) -> None:
        """Whether there are values to copy, and to tell of. NotReadyError: no."""
        if self.state not in _SERVING:
            raise self._not_ready("has no values yet")

    def _not_ready(self, text: str) -> NotReadyError:
        return NotReadyError(f"pserver {self.index} {f'ends: {self._why_ended}' if self._why_ended else text}")

    def applied(self, summary: Callable[[], AppliedSummary]) -> AppliedReply:
        """What all blocks have, for the master to compare with what it takes for done.

        Args:
            summary: Of what is applied; asked for only when there are values.

        Raises:
            NotReadyError: there are none yet.
        """
        if self.state is State.LACKING:
            return AppliedReply(summary=AppliedSummary().encode(), lacks_election=self.election)
        self.require_snapshots()
        return AppliedReply(
            summary=summary().encode(),
            checkpoint=self.checkpoint,
            skipped=[f"checkpoint {each.number}: {each.reason}" for each in self.skipped],
            rejected=[each.number for each in self.skipped],
        )

    def check(self) -> None:
        """Assert every invariant."""
        state = self.state
        assert (self.index >= 0) == (state is not State.NO_INDEX) or state is State.ENDED, "an index comes first"
        assert self._plan_hash is not None or state not in _MADE, "there are no blocks without a plan"
        assert (self.election is not None) == (state in {State.RESTORING, State.LACKING, *_SERVING}) or (
            state is State.ENDED
        ), "values belong to an election"
        assert state is not State.RESTORING or not self._was_visible, "blocks that were seen are never overwritten"
        assert state not in _SERVING or self.checkpoint is not None or self._is_given, "there are no values"
        assert bool(self._why_ended) == (state is State.ENDED), "an end has a reason"
        assert not self._is_lease_over or state is State.ENDED, "it goes on without a lease"
