"""State machine of a pserver's lifecycle, and its answers to requests in each state.

A pserver acquires an index, waits until the model is declared, allocates its blocks, gets values, serves, and ends. In
a resumed job it waits until a trainer has declared the model again. That declaration may change the optimizer's
settings, so the pserver must not use the old settings.

**Values.** When the blocks have been allocated, the job's state in etcd determines where their values come from:

* No election is complete. The model has no first values yet, so the pserver *waits* for them. Trainers can already
  become members.
* An election is complete, and there are checkpoints. The pserver is a replacement and *restores* the newest readable
  checkpoint. Until then the blocks are hidden even from views, because a block needs a version to determine the first
  round in which it must wait for a member. If the store is unreachable, the pserver retries forever, because starting
  without the values would be worse.
* If no checkpoint is readable, the job has failed. Before the pserver concludes this, it reads etcd again: a cached
  copy of etcd may lag behind, and retention may have deleted the checkpoints that it names.
* An election is complete, and this process was the predecessor's standby. The blocks have the values that it has
  copied, and the pserver *serves* them. It is like a replacement that has loaded a recent checkpoint.
* An election is complete, and the placement assigns no blocks to this pserver. It has nothing to restore, and *serves*
  the blocks that move here later.
* An election is complete, and there has never been a checkpoint. The values were lost together with the predecessor.
  The pserver *lacks* them and reports this to the master, which causes the model to be initialized again
  (``domain.recovery.reinitialization``).

Values belong to an election: they are the first values that its winner sent, or were derived from them by updates.
Therefore, a pserver ends if its values belong to an election other than the completed one in etcd, and its successor
starts over. A pserver also ends if a checkpoint turns out to contain its blocks' values after clients may have seen the
blocks.

**The end.** A state machine that has ended never changes again and answers no requests. The process exits as soon as it
can.
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
    FirstValuesReceived,
    IndexAcquired,
    Lack,
    LeaseOver,
    MakeBlocks,
    NothingLoadable,
    Pause,
    PauseOver,
    Placed,
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
from flightedl.marks import sometimes
from flightedl.messages.base import OfPlan
from flightedl.messages.control import AppliedReply, OfMaster, OrderNumber, SnapshotReply, SnapshotRequest, ViewRequest
from flightedl.messages.declarations import DeclaredModel

_SERVING = (State.SERVING, State.DRAINING)
#: States in which clients can see the blocks: the blocks have values or wait for first values.
_VISIBLE = (State.WAITING, *_SERVING)
_MADE = (State.RESTORING, State.LACKING, *_VISIBLE)
_WAITING_FOR = {
    State.NO_INDEX: "the model to be declared",
    State.NO_MODEL: "the model to be declared",
    State.BUILDING: "its blocks to be allocated",
    State.LACKING: "new first values, because its predecessor's values are lost and there is no checkpoint",
    State.WAITING: "the first values of the model",
}


class PserverLife:
    """Lifecycle of a pserver: its states, and the transitions between them.

    Args:
        storage: URL of the checkpoints, for messages; None if the process was started without it.
    """

    def __init__(self, storage: str | None) -> None:
        self._storage = storage
        self.state = State.NO_INDEX
        self.index = -1
        self.generation = 0
        self._facts = Facts()
        #: Highest generation of any master that this process knows of.
        self.newest_master = 0
        #: Hash of the declared model's plan; empty until this process has computed the plan itself.
        self._plan_hash: str | None = None
        #: The model whose blocks this pserver holds.
        self._model: DeclaredModel | None = None
        self._block_count = 0
        self._is_empty = False
        #: Election of the values that were copied from the predecessor; None if there are none.
        self._copied: int | None = None
        self._is_compiling = False
        #: True if clients may have seen the blocks before the blocks had values.
        self._was_visible = False
        #: The newest election whose first values have begun to arrive.
        self._given = 0
        #: True if all blocks have received the first values of that election.
        self._is_given = False
        #: The election whose values are being restored, and the checkpoints from which they may be loaded.
        self._wanted: tuple[int, Restore] | None = None
        #: Checkpoints that the last search failed to load; None during a search.
        self._found_none: tuple[Skipped, ...] | None = None
        #: Why the checkpoints cannot be read at the moment.
        self._trouble = ""
        #: Election whose values the blocks have or are about to get.
        self.election: int | None = None
        self.checkpoint: int | None = None
        self.skipped: tuple[Skipped, ...] = ()
        self._is_lease_over = False
        #: The newest checkpoint order at the time when the pserver was asked to end.
        self._before_drain: OrderNumber | None = None
        self._why_ended = ""
        self._handlers: dict[type[Event], Callable[..., Effects]] = {
            IndexAcquired: self._acquire_index,
            Seen: self._see,
            PlanMade: self._check_plan,
            Placed: self._place,
            CompilingBegan: self._compile,
            BlocksMade: self._accept_blocks,
            BuildFailed: lambda event: (self._end if event.may_pass else self._fail)(event.why),
            Restored: self._restored,
            NothingLoadable: self._found_nothing,
            StoreUnreachable: self._wait_for_store,
            CaughtUp: self._caught_up,
            PauseOver: lambda _: self._seek_values() if self.state is State.RESTORING else (),
            FirstValuesBegin: self._begin_first_values,
            FirstValuesReceived: self._accept_first_values,
            DrainAsked: self._drain,
            ReloadAsked: lambda _: self._end("all pservers return to the newest checkpoint or to first values"),
            LeaseOver: self._lose_lease,
            BlocksLost: lambda event: self._end(event.why),
        }

    def apply(self, event: Event) -> Effects:
        """Apply an event and return its effects."""
        return () if self.state is State.ENDED else self._handlers[type(event)](event)

    # the job's state in etcd

    def _acquire_index(self, event: IndexAcquired) -> Effects:
        self.index, self.generation = event.index, event.generation
        self.state = State.NO_MODEL
        return self._look()

    def _see(self, event: Seen) -> Effects:
        self._facts = event.facts
        self.observe_master(event.facts.master)
        return self._look()

    def _look(self) -> Effects:
        election = self._facts.election
        if self.state is State.NO_MODEL:
            return self._begin_to_build()
        if self.state in {State.LACKING, State.WAITING}:
            return self._seek_values()
        if self.state in _SERVING and election not in {None, self.election}:
            return self._end("the model was initialized again")
        # First let the search in progress end, then use the newest facts.
        return ()

    def _begin_to_build(self) -> Effects:
        model = self._facts.model
        if model is None or model.is_former:
            return ()
        self.state, self._model = State.BUILDING, model
        return (Build(model),)

    def _check_plan(self, event: PlanMade) -> Effects:
        model = self._model
        assert model is not None, "no plan was requested"
        if event.plan_hash != model.plan_hash:
            return self._fail("this pserver computes a different shard plan: run the same flightedl version everywhere")
        self._plan_hash = event.plan_hash
        return (MakeBlocks(model),)

    def _place(self, event: Placed) -> Effects:
        self._plan_hash = event.plan_hash
        return ()

    def _compile(self, _: CompilingBegan) -> Effects:
        self._is_compiling = self.state is State.BUILDING
        return ()

    def _accept_blocks(self, event: BlocksMade) -> Effects:
        self._block_count, self._is_empty, self._copied = event.block_count, event.is_empty, event.copied
        return self._seek_values()

    # values

    def _seek_values(self) -> Effects:
        election, loadable = self._facts.election, self._facts.loadable
        if self._copied is not None:
            if self._copied != election:
                return self._end("the model was initialized again after its blocks had been copied")
            return self._serve(election, None)
        if self._wanted is not None and (election is None or loadable is None):
            return self._end("its blocks contain part of a checkpoint, but the model needs first values")
        if election is None:
            self.state, self.election, self._was_visible = State.WAITING, None, True
            return ()
        if self._is_empty or (self._was_visible and self._is_given and self._given == election):
            return self._serve(election, None)
        if loadable is not None and self._was_visible:
            sometimes("a pserver restarted to load a checkpoint")
            return self._end("its values are in a checkpoint, which only a fresh process can load")
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
            return self._end("a trainer is sending first values of a newer election")
        if self.state is State.WAITING and event.election > self._given:
            self._given, self._is_given = event.election, False
        return ()

    def _accept_first_values(self, event: FirstValuesReceived) -> Effects:
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
                self._lost("this pserver was started without --checkpoint: pass it the same URL as the master")
            )
        return (restore,)

    def _lost(self, why: str) -> str:
        return f"the values of pserver {self.index} were lost with its predecessor, and {why}"

    def _restored(self, event: Restored) -> Effects:
        assert self._wanted is not None, "no restore was requested"
        election, _ = self._wanted
        if self._facts.election != election:
            sometimes("the model was initialized again during the load of a checkpoint")
            return self._end("the model was initialized again while a checkpoint was being loaded")
        self.skipped, self._trouble = event.skipped, ""
        return self._serve(election, event.number)

    def _found_nothing(self, event: NothingLoadable) -> Effects:
        self._found_none, self._trouble = event.skipped, ""
        return (CatchUp(),)

    def _caught_up(self, event: CaughtUp) -> Effects:
        if event.facts is None:
            return (Pause(),)
        assert self._wanted is not None, "no restore was requested"
        self._facts = facts = event.facts
        election, restore = self._wanted
        is_the_same = (facts.election, facts.loadable, facts.rejected) == (election, restore.loadable, restore.rejected)
        if self._found_none is not None and is_the_same:
            tried = "; ".join(f"checkpoint {each.number}: {each.reason}" for each in self._found_none[:3])
            return self._fail(
                self._lost(f"no checkpoint at {self._storage} can be loaded ({tried or 'there is none'})")
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
        """True if a checkpoint ordered after the request to end is complete, including this pserver's part."""
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

    # answers

    @property
    def is_serving(self) -> bool:
        """True if the blocks have values."""
        return self.state in _SERVING

    @property
    def is_visible(self) -> bool:
        """True if the blocks are allocated, and either have values or wait for first values."""
        return self.state in _VISIBLE

    @property
    def may_be_placed(self) -> bool:
        """True if a newer placement may assign other blocks to this pserver.

        A pserver that lacks its values must know the newest placement, because otherwise it could not report this.
        """
        return self.state is State.LACKING or self.is_visible

    @property
    def is_compiling(self) -> bool:
        """True if kernels must be compiled before the blocks can be allocated."""
        return self.state is State.BUILDING and self._is_compiling

    @property
    def waiting_for(self) -> str:
        """Description, for users, of what the pserver is waiting for; empty if it is not waiting."""
        if self.state is State.RESTORING:
            return f"the checkpoints: {self._trouble}" if self._trouble else "the checkpoint to be loaded"
        if self.is_compiling:
            return "its kernels to be compiled"
        return _WAITING_FOR.get(self.state, "")

    def require_lease(self) -> None:
        """Raise ReplacedError if the lease is lost, and NotReadyError if the process is about to end."""
        if self.state in _SERVING and not self._is_lease_over:
            return
        if self._is_lease_over or self.state is State.NO_INDEX:
            raise ReplacedError(f"the lease of pserver {self.index} has expired: look up its successor")
        if self.state is State.ENDED:
            raise self._not_ready("")

    def require_blocks(self, plan_hash: str) -> None:
        """Raise NotReadyError if the blocks are not allocated, and FencedError if the trainer's plan is different."""
        if self.state not in _VISIBLE:
            if self.state in {State.NO_INDEX, State.NO_MODEL}:
                # The trainer declared the model just before it sent this request.
                raise self._not_ready("has not read the model's declaration yet")
            raise self._not_ready(f"is waiting for {self.waiting_for}")
        assert self._plan_hash is not None, "there are no blocks without a plan"
        if plan_hash != self._plan_hash and not name_same_cut(plan_hash, self._plan_hash):
            raise FencedError("the trainer has a different shard plan: read the job's declaration again")

    def has_plan(self, plan_hash: str) -> bool:
        """True if this pserver's blocks belong to this plan."""
        return plan_hash == self._plan_hash

    def serves(self, plan_hash: str) -> bool:
        """True if a trainer with this plan may push and pull."""
        return self.state in _SERVING and plan_hash == self._plan_hash

    def require_values(self, plan_hash: str) -> None:
        """Raise the errors of ``require_blocks``, or NotReadyError while the blocks wait for first values."""
        self.require_blocks(plan_hash)
        if self.state not in _SERVING:
            raise self._not_ready(f"is waiting for {self.waiting_for}")

    @property
    def accepts_first_values(self) -> bool:
        """True if the pserver accepts first values. A serving pserver already has values."""
        return self.state is State.WAITING

    def first_value_count(self, election: int, block_count: int) -> int:
        """Return the number of blocks with an election's values. ``block_count`` blocks have received first values."""
        return self._block_count if self.is_serving and election == self.election else block_count

    def check_request(self, request: OfPlan) -> None:
        """Raise an error if the master's request names another shard plan, or if the master has been deposed.

        Raises:
            FencedError: The plan is different, or the master is deposed.
            NotReadyError: This pserver does not know the model yet, or knows another version of the placement.
        """
        if self._plan_hash is None:
            raise self._not_ready("is waiting for the model to be declared")
        if request.plan_hash != self._plan_hash:
            if name_same_cut(request.plan_hash, self._plan_hash):
                raise self._not_ready("has another placement of the blocks than the master")
            raise FencedError("the master has a different shard plan: read the job's declaration again")
        if isinstance(request, OfMaster):
            if request.master_generation < self.newest_master:
                sometimes("a request of a deposed master was rejected")
                raise FencedError(f"master {request.master_generation} is deposed: {self.newest_master} leads")
            self.observe_master(request.master_generation)
        # Outdated views and orders are recognized by their numbers.
        elif isinstance(request, ViewRequest):
            self.observe_master(request.master_generation)
        elif isinstance(request, SnapshotRequest):
            self.observe_master(request.order.master_generation)

    def observe_master(self, generation: int) -> None:
        """Record that a master of this generation exists or has existed."""
        self.newest_master = max(self.newest_master, generation)

    def require_visible(self) -> None:
        """Raise NotReadyError if the blocks cannot accept a view."""
        if self.state not in _VISIBLE:
            raise self._not_ready(f"is waiting for {self.waiting_for}")

    def require_snapshots(self) -> None:
        """Raise NotReadyError if the blocks have no values to copy or report."""
        if self.state not in _SERVING:
            raise self._not_ready("has no values yet")

    def _not_ready(self, text: str) -> NotReadyError:
        return NotReadyError(f"pserver {self.index} {f'is ending: {self._why_ended}' if self._why_ended else text}")

    def applied(self, summary: Callable[[], AppliedSummary]) -> AppliedReply:
        """Return the batches that all blocks have applied. The master compares them with its finished tasks.

        Args:
            summary: Returns the summary of the applied batches; called only if there are values.

        Raises:
            NotReadyError: There are no values yet.
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
        assert (self.index >= 0) == (state is not State.NO_INDEX) or state is State.ENDED, "a state needs an index"
        assert self._plan_hash is not None or state not in _MADE, "there are no blocks without a plan"
        assert (self.election is not None) == (state in {State.RESTORING, State.LACKING, *_SERVING}) or (
            state is State.ENDED
        ), "values belong to an election"
        assert state is not State.RESTORING or not self._was_visible, "blocks that were seen are never overwritten"
        has_values = self.checkpoint is not None or self._is_given or self._is_empty or self._copied is not None
        assert state not in _SERVING or has_values, "there are no values"
        assert bool(self._why_ended) == (state is State.ENDED), "an end has a reason"
        assert not self._is_lease_over or state is State.ENDED, "it continues without a lease"
