"""A pserver's life: the effect of each event in each state, and the answers in that state."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import msgspec
import pytest

from flightedl.domain.checkpoint.manifest import ShardFile, Skipped
from flightedl.domain.consistency.modes import Sync
from flightedl.domain.exactly_once.applied import AppliedBatches
from flightedl.domain.exactly_once.batches import Batch
from flightedl.domain.pserver.life import PserverLife
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
from flightedl.messages.control import (
    AppliedRequest,
    OfMaster,
    OrderNumber,
    ReloadRequest,
    SealRequest,
    SnapshotReply,
    SnapshotRequest,
    ViewRequest,
)
from flightedl.messages.declarations import DeclaredModel, ModelDeclaration

HASH = "a" * 32
BLOCKS = 3
MODEL = DeclaredModel(
    declaration=ModelDeclaration(parameters=[], optimizer={}, mode=Sync().to_json()), pservers=1, plan_hash=HASH
)
FORMER = msgspec.structs.replace(MODEL, is_former=True)
TORN = (Skipped(4, "torn"),)


class Lived:
    """A life whose invariants are asserted after each event."""

    def __init__(self, storage: str | None = "store") -> None:
        self.life = PserverLife(storage)
        self.election: int | None = None
        self.loadable: range | None = None

    def apply(self, *events: Event) -> Effects:
        """Return the effects of the last of these events."""
        effects: Effects = ()
        for event in events:
            effects = self.life.apply(event)
            self.life.check()
        return effects

    def facts(self) -> Facts:
        return Facts(MODEL, self.election, self.loadable)

    def see(self, election: int | None = None, loadable: range | None = None) -> Effects:
        self.election, self.loadable = election, loadable
        return self.apply(Seen(self.facts()))

    def build(self) -> Effects:
        """A life with blocks."""
        self.apply(IndexAcquired(0, 7), Seen(self.facts()), PlanMade(HASH))
        return self.apply(BlocksMade(BLOCKS))

    def serve(self) -> None:
        """A life with the initial values of election 5."""
        self.build()
        self.apply(FirstValuesBegin(5), FirstValuesReceived(5, BLOCKS))
        self.see(5)
        assert self.life.state is State.SERVING

    def restore(self) -> Effects:
        """A life that searches for a checkpoint of 2 to 4, of election 5."""
        self.election, self.loadable = 5, range(2, 5)
        return self.build()


@pytest.fixture
def lived() -> Lived:
    return Lived()


def ends(effects: Effects) -> bool:
    return [type(effect) for effect in effects] == [StartAgain]


# values that were copied from the predecessor


def test_copied_values_are_served_although_there_are_checkpoints(lived: Lived):
    lived.election, lived.loadable = 5, range(2, 5)
    lived.apply(IndexAcquired(0, 7), Seen(lived.facts()), PlanMade(HASH))
    assert lived.apply(BlocksMade(BLOCKS, copied=5)) == (Serve(5, None),)
    assert lived.life.state is State.SERVING
    assert ends(lived.see(6)), "the model was initialized again"


def test_copied_values_of_another_election_are_not_served(lived: Lived):
    lived.election = 6
    lived.apply(IndexAcquired(0, 7), Seen(lived.facts()), PlanMade(HASH))
    assert ends(lived.apply(BlocksMade(BLOCKS, copied=5)))


# until the blocks exist


def test_nothing_is_built_before_the_index_is_claimed(lived: Lived):
    assert lived.apply(Seen(lived.facts())) == ()
    assert lived.life.state is State.NO_INDEX
    assert lived.apply(IndexAcquired(2, 9)) == (Build(MODEL),)
    assert (lived.life.index, lived.life.generation) == (2, 9)


def test_the_model_of_a_former_run_is_not_built(lived: Lived):
    lived.apply(IndexAcquired(0, 7))
    assert lived.apply(Seen(Facts())) == ()
    assert lived.apply(Seen(Facts(FORMER))) == ()
    assert lived.life.state is State.NO_MODEL
    assert lived.apply(Seen(Facts(MODEL))) == (Build(MODEL),)
    assert lived.apply(Seen(Facts(MODEL))) == (), "only once"


def test_another_plan_than_the_declared_one_fails_the_job(lived: Lived):
    (effect,) = lived.apply(IndexAcquired(0, 7), Seen(lived.facts()), PlanMade("b" * 32))
    assert isinstance(effect, Fail)
    assert "flightedl version" in effect.why


def test_blocks_are_made_by_the_declared_plan(lived: Lived):
    assert lived.apply(IndexAcquired(0, 7), Seen(lived.facts()), PlanMade(HASH)) == (MakeBlocks(MODEL),)


def test_blocks_that_cannot_be_built_fail_the_job(lived: Lived):
    assert lived.apply(IndexAcquired(0, 7), Seen(lived.facts()), BuildFailed("a bug")) == (Fail("a bug"),)


def test_a_pserver_without_memory_for_its_blocks_starts_again(lived: Lived):
    failed = BuildFailed("no memory", may_pass=True)
    assert lived.apply(IndexAcquired(0, 7), Seen(lived.facts()), failed) == (StartAgain("no memory"),)


# initial values


def test_a_new_job_serves_when_all_initial_values_have_arrived_and_the_election_is_done(lived: Lived):
    assert lived.build() == ()
    assert lived.life.state is State.WAITING
    assert lived.apply(FirstValuesBegin(5), FirstValuesReceived(5, BLOCKS - 1)) == ()
    assert lived.apply(FirstValuesReceived(5, BLOCKS)) == ()
    assert lived.see(5) == (Serve(5),)
    assert lived.life.is_serving
    assert lived.see(5) == ()


def test_values_that_arrive_after_their_election_is_done_are_served(lived: Lived):
    lived.build()
    lived.see(5)
    assert lived.life.state is State.LACKING
    lived.see(None)
    lived.apply(FirstValuesBegin(6), FirstValuesReceived(6, BLOCKS))
    assert lived.see(6) == (Serve(6),)


@pytest.mark.parametrize("given", [4, 6])
def test_values_of_another_election_are_not_served(lived: Lived, given: int):
    lived.build()
    lived.apply(FirstValuesBegin(given), FirstValuesReceived(given, BLOCKS))
    assert lived.see(5) == (Lack(5),)


def test_values_that_another_trainer_has_begun_to_replace_do_not_count(lived: Lived):
    lived.build()
    lived.apply(FirstValuesBegin(5), FirstValuesReceived(5, BLOCKS), FirstValuesBegin(6))
    assert lived.see(5) == (Lack(5),)


def test_values_that_are_sent_again_are_still_present(lived: Lived):
    lived.build()
    lived.apply(FirstValuesBegin(5), FirstValuesReceived(5, BLOCKS), FirstValuesBegin(5))
    assert lived.see(5) == (Serve(5),)


def test_late_values_of_an_older_election_change_nothing(lived: Lived):
    lived.build()
    lived.apply(FirstValuesBegin(5), FirstValuesReceived(5, BLOCKS), FirstValuesBegin(4), FirstValuesReceived(4, 0))
    assert lived.see(5) == (Serve(5),)


def test_repeated_initial_values_are_counted_and_not_applied(lived: Lived):
    lived.serve()
    assert lived.apply(FirstValuesBegin(5)) == ()
    assert not lived.life.accepts_first_values
    assert lived.life.first_value_count(5, 0) == BLOCKS
    assert lived.life.first_value_count(4, 0) == 0


def test_initial_values_of_a_newer_election_end_a_serving_process(lived: Lived):
    lived.serve()
    assert ends(lived.apply(FirstValuesBegin(6)))


@pytest.mark.parametrize("is_restored", [False, True])
def test_a_newer_finished_election_ends_a_serving_process(lived: Lived, is_restored: bool):
    if is_restored:
        lived.restore()
        lived.apply(Restored(4))
    else:
        lived.serve()
    assert lived.see(None) == (), "there is none: etcd may have been cleared, but no pserver has other values yet"
    assert ends(lived.see(6))


# lost values


def test_a_replacement_without_a_checkpoint_lacks_its_values_and_reports_it_once(lived: Lived):
    lived.election = 5
    assert lived.build() == (Lack(5),)
    assert lived.see(5) == ()
    assert lived.see(6) == (Lack(6),)
    assert lived.life.applied(pytest.fail).lacks_election == 6


def test_a_pserver_that_lacks_its_values_waits_for_new_ones_when_the_election_is_deleted(lived: Lived):
    lived.election = 5
    lived.build()
    assert lived.see(None) == ()
    assert lived.life.state is State.WAITING
    lived.apply(FirstValuesBegin(6), FirstValuesReceived(6, BLOCKS))
    assert lived.see(6) == (Serve(6),)


def test_a_pserver_that_lacks_its_values_loads_a_checkpoint_that_completes(lived: Lived):
    lived.election = 5
    lived.build()
    assert lived.see(5, range(1, 2)) == (Restore(range(1, 2)),)


def test_blocks_that_were_visible_are_never_overwritten(lived: Lived):
    lived.build()
    lived.see(5)
    assert lived.life.state is State.LACKING
    assert ends(lived.see(5, range(1, 2)))


# a checkpoint


def test_a_replacement_loads_an_allowed_checkpoint_and_serves(lived: Lived):
    assert lived.restore() == (Restore(range(2, 5)),)
    assert lived.see(5, range(2, 6)) == (), "one search at a time"
    assert lived.apply(Restored(3, TORN)) == (Serve(5, 3),)
    reply = lived.life.applied(AppliedSummary)
    assert (reply.checkpoint, reply.rejected, reply.skipped) == (3, [4], ["checkpoint 4: torn"])


def test_without_a_store_the_values_are_lost():
    lived = Lived(None)
    (effect,) = lived.restore()
    assert isinstance(effect, Fail)
    assert "without --checkpoint" in effect.why


def test_an_unreachable_store_is_retried_indefinitely(lived: Lived):
    lived.restore()
    for _ in range(3):
        assert lived.apply(StoreUnreachable("it is down")) == (Pause(),)
        assert lived.life.waiting_for == "the checkpoints: it is down"
        assert lived.apply(PauseOver()) == (Restore(range(2, 5)),)
    assert lived.apply(Restored(4)) == (Serve(5, 4),)
    assert lived.life.waiting_for == ""


def test_the_job_fails_when_etcd_still_names_an_unloadable_checkpoint(lived: Lived):
    lived.restore()
    assert lived.apply(NothingLoadable(TORN)) == (CatchUp(),)
    assert lived.life.state is State.RESTORING
    (effect,) = lived.apply(CaughtUp(lived.facts()))
    assert isinstance(effect, Fail)
    assert "checkpoint 4: torn" in effect.why


def test_a_checkpoint_named_by_an_old_copy_of_etcd_does_not_fail_the_job(lived: Lived):
    """Retention deletes the pointer's former checkpoint; the directory learns late that the pointer has moved."""
    lived.restore()
    lived.apply(NothingLoadable())
    lived.loadable = range(2, 6)
    assert lived.apply(CaughtUp(lived.facts())) == (Restore(range(2, 6)),)
    assert lived.apply(Restored(5)) == (Serve(5, 5),)


def test_a_checkpoint_that_one_pserver_could_not_load_is_not_loaded_by_others(lived: Lived):
    lived.restore()
    lived.apply(NothingLoadable())
    facts = Facts(MODEL, 5, range(2, 5), frozenset({4}))
    assert lived.apply(CaughtUp(facts)) == (Restore(range(2, 5), frozenset({4})),)


def test_nothing_fails_while_the_state_of_etcd_is_unknown(lived: Lived):
    lived.restore()
    assert lived.apply(NothingLoadable(TORN), CaughtUp(None)) == (Pause(),)
    assert lived.apply(PauseOver()) == (Restore(range(2, 5)),)


def test_values_of_a_model_that_was_initialized_again_are_not_served(lived: Lived):
    lived.restore()
    lived.see(6, range(2, 5))
    assert ends(lived.apply(Restored(4)))


def test_blocks_with_a_part_of_a_checkpoint_never_get_initial_values(lived: Lived):
    lived.restore()
    lived.see(None, range(2, 5))
    assert ends(lived.apply(StoreUnreachable("it is down"), PauseOver()))


def test_a_search_continues_for_a_newer_election(lived: Lived):
    lived.restore()
    lived.see(6, range(4, 5))
    assert lived.apply(StoreUnreachable("it is down"), PauseOver()) == (Restore(range(4, 5)),)
    assert lived.apply(Restored(4)) == (Serve(6, 4),)


# draining


def progress(number: int, state: str = "written") -> SnapshotReply:
    file = ShardFile(
        index=0, generation=7, name="f", size_bytes=1, hash="", blocks=3, lowest_version=0, highest_version=0
    )
    return SnapshotReply(OrderNumber(1, number, 1), state, file=file)


def test_it_is_drained_when_a_later_checkpoint_is_complete(lived: Lived):
    lived.restore()
    lived.apply(Restored(4), DrainAsked(OrderNumber(1, 5, 1)))
    assert lived.life.state is State.DRAINING
    assert lived.life.is_serving, "later pushes are accepted"
    assert not lived.life.is_drained(None)
    assert not lived.life.is_drained(progress(6)), "its part is written, but not the others'"
    lived.see(5, range(2, 6))
    assert not lived.life.is_drained(progress(5)), "it was ordered before"
    assert not lived.life.is_drained(progress(6)), "another one is complete, which was ordered before"
    assert not lived.life.is_drained(progress(6, "taken"))
    lived.see(5, range(2, 7))
    assert lived.life.is_drained(progress(6))


def test_a_pserver_without_values_has_nothing_to_drain(lived: Lived):
    lived.build()
    assert lived.apply(DrainAsked(None)) == ()
    assert lived.life.state is State.WAITING


def test_a_second_request_to_drain_changes_nothing(lived: Lived):
    lived.serve()
    lived.apply(DrainAsked(OrderNumber(1, 5, 1)), DrainAsked(OrderNumber(1, 6, 1)))
    lived.see(5, range(6, 7))
    assert lived.life.is_drained(progress(6))


# the end


@pytest.mark.parametrize("begin", [Lived.build, Lived.serve, Lived.restore])
@pytest.mark.parametrize("event", [ReloadAsked(), LeaseOver(), BlocksLost("a kernel failed")], ids=type)
def test_an_ended_process_answers_and_continues_nothing(lived: Lived, begin: Callable[[Lived], object], event: Event):
    begin(lived)
    assert ends(lived.apply(event))
    assert lived.apply(event) == ()
    assert lived.see(9, range(9, 10)) == ()
    assert lived.apply(Restored(4)) == ()
    life = lived.life
    assert not life.is_serving
    for ask in (
        life.require_lease,
        lambda: life.require_values(HASH),
        lambda: life.require_blocks(HASH),
        life.require_visible,
        life.require_snapshots,
        lambda: life.applied(pytest.fail),
    ):
        with pytest.raises((NotReadyError, ReplacedError)):
            ask()
    life.check_request(ReloadRequest(plan_hash=HASH, master_generation=1))


def test_only_an_ended_lease_sends_trainers_to_a_successor(lived: Lived):
    lived.serve()
    lived.life.require_lease()
    lived.apply(LeaseOver())
    with pytest.raises(ReplacedError):
        lived.life.require_lease()


def test_before_it_has_an_index_it_has_no_lease_to_lose(lived: Lived):
    with pytest.raises(ReplacedError):
        lived.life.require_lease()
    assert lived.apply(LeaseOver()) == ()
    assert lived.apply(IndexAcquired(0, 7)) == ()
    lived.life.require_lease()


# requests of trainers


def at_each_state() -> Iterator[tuple[State, Lived]]:
    """A life in each state except the last."""
    for state in State:
        lived = Lived()
        if state is State.NO_MODEL:
            lived.apply(IndexAcquired(0, 7))
        elif state is State.BUILDING:
            lived.apply(IndexAcquired(0, 7), Seen(lived.facts()), PlanMade(HASH))
        elif state is State.RESTORING:
            lived.restore()
        elif state is State.LACKING:
            lived.election = 5
            lived.build()
        elif state is State.WAITING:
            lived.build()
        elif state in {State.SERVING, State.DRAINING}:
            lived.serve()
            if state is State.DRAINING:
                lived.apply(DrainAsked(None))
        elif state is State.ENDED:
            continue
        assert lived.life.state is state
        yield state, lived


def allowed(ask: Callable[[PserverLife], object]) -> set[State]:
    """Return the states in which this is not refused as "not ready"."""
    found = set()
    for state, lived in at_each_state():
        with contextlib.suppress(NotReadyError):
            ask(lived.life)
            found.add(state)
        lived.life.check()
    return found


SERVING = {State.SERVING, State.DRAINING}


def test_each_state_allows_its_requests():
    assert allowed(lambda life: life.require_values(HASH)) == SERVING
    assert allowed(lambda life: life.require_blocks(HASH)) == {State.WAITING, *SERVING}
    assert allowed(lambda life: life.require_visible()) == {State.WAITING, *SERVING}
    assert allowed(lambda life: life.require_snapshots()) == SERVING
    assert allowed(lambda life: life.applied(AppliedSummary)) == {State.LACKING, *SERVING}
    knows_the_plan = set(State) - {State.NO_INDEX, State.NO_MODEL, State.ENDED}
    assert allowed(lambda life: life.check_request(AppliedRequest(plan_hash=HASH))) == knows_the_plan
    assert {state for state, lived in at_each_state() if lived.life.accepts_first_values} == {State.WAITING}
    assert {state for state, lived in at_each_state() if lived.life.is_visible} == {State.WAITING, *SERVING}
    may_be_placed = {state for state, lived in at_each_state() if lived.life.may_be_placed}
    assert may_be_placed == {State.LACKING, State.WAITING, *SERVING}, "otherwise, it could not answer the master"


def test_each_state_has_a_description_of_its_wait():
    texts = {state: lived.life.waiting_for for state, lived in at_each_state()}
    assert {state for state, text in texts.items() if not text} == SERVING
    assert texts[State.NO_MODEL] == "the model to be declared"
    assert texts[State.BUILDING] == "its blocks to be allocated"
    assert texts[State.RESTORING] == "the checkpoint to be loaded"
    assert texts[State.LACKING].startswith("new first values")
    assert texts[State.WAITING] == "the first values of the model"


def test_the_compilation_of_kernels_is_reported(lived: Lived):
    assert lived.apply(CompilingBegan()) == ()
    assert not lived.life.is_compiling, "a spare compiles, and no process waits for it"
    lived.apply(IndexAcquired(0, 1), Seen(Facts(MODEL, None, None)))
    assert lived.apply(CompilingBegan()) == ()
    assert lived.life.waiting_for == "its kernels to be compiled"
    lived.apply(PlanMade(HASH), BlocksMade(BLOCKS))
    assert lived.life.waiting_for == "the first values of the model"


def test_another_plan_is_refused(lived: Lived):
    lived.serve()
    for ask in (lived.life.require_blocks, lived.life.require_values):
        with pytest.raises(FencedError):
            ask("b" * 32)
    with pytest.raises(FencedError, match="different shard plan"):
        lived.life.check_request(AppliedRequest(plan_hash="b" * 32))


# requests of the master


def of_master(master: int) -> list[OfMaster]:
    return [
        ReloadRequest(plan_hash=HASH, master_generation=master),
        SealRequest(plan_hash=HASH, master_generation=master, epochs=[]),
    ]


def view(master: int) -> ViewRequest:
    return ViewRequest(plan_hash=HASH, master_generation=master, serial=1, members=[])


def snapshot(master: int) -> SnapshotRequest:
    return SnapshotRequest(OrderNumber(master, 1, 1), None, "n", plan_hash=HASH)


@pytest.mark.parametrize(
    "hear",
    [
        lambda life: life.observe_master(3),
        lambda life: life.check_request(view(3)),
        lambda life: life.check_request(snapshot(3)),
        lambda life: life.check_request(of_master(3)[0]),
        lambda life: life.apply(Seen(Facts(MODEL, 5, master=3))),
    ],
)
def test_a_deposed_master_orders_nothing(lived: Lived, hear: Callable[[PserverLife], object]):
    lived.serve()
    hear(lived.life)
    for request in of_master(2):
        with pytest.raises(FencedError, match="master 2 is deposed: 3 leads"):
            lived.life.check_request(request)
    for request in (*of_master(3), *of_master(4)):
        lived.life.check_request(request)
    # These have their own numbers, and change nothing if they are old.
    lived.life.check_request(view(2))
    lived.life.check_request(snapshot(2))


def test_applied_batches_are_reported_with_their_checkpoint(lived: Lived):
    lived.serve()
    applied = AppliedBatches(range(1))
    applied.mark([0], Batch(0, 0, 0), 1)
    reply = lived.life.applied(lambda: AppliedSummary.of(applied))
    assert AppliedSummary.decode(reply.summary).done == {0: b"\x01"}
    assert (reply.checkpoint, reply.rejected, reply.lacks_election) == (None, [], None)


def test_a_pserver_that_has_not_read_the_model_reports_that() -> None:
    with pytest.raises(NotReadyError, match="has not read the model's declaration yet"):
        Lived().life.require_blocks(HASH)
