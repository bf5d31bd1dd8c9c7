"""Changes of the pservers, decided by the core of a master. All answers and outcomes arrive at once."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from msgspec.structs import replace

from flightedl.domain.checkpoint.values import CheckpointSettings, MovePointer, WriteManifest
from flightedl.domain.consistency.modes import Async
from flightedl.domain.master import effects as out
from flightedl.domain.master import events
from flightedl.domain.master.core import MasterCore
from flightedl.domain.master.state import CoreSettings, StoredState
from flightedl.domain.model.declared import plan_of
from flightedl.domain.model.optimizers import SGD
from flightedl.domain.model.parameters import ParameterSpec
from flightedl.domain.model.sharding import placed, placement_of, plan_for
from flightedl.domain.moving.values import StoredIntent, Transaction
from flightedl.domain.queue.values import QueueSettings
from flightedl.domain.recovery.replay import AppliedSummary
from flightedl.domain.tables.spec import TableSpec
from flightedl.errors import FlightedlError, NotReadyError, UsageError
from flightedl.messages.base import decode
from flightedl.messages.control import (
    AppliedReply,
    AppliedRequest,
    SnapshotReply,
    SnapshotRequest,
    ViewReply,
    ViewRequest,
    WrittenFile,
)
from flightedl.messages.declarations import (
    DeclaredModel,
    JobDeclaration,
    ModelDeclaration,
    ParameterDeclaration,
    Placement,
)
from flightedl.messages.moving import MovedRequest
from flightedl.messages.scaling import ScaleRecord, ScaleReply, ScaleRequest
from flightedl.messages.status import PserverStatusReply
from flightedl.messages.tasks import FinishedTask, JoinRequest, TasksTicket

SPECS = [ParameterSpec("w", (3_000_000,))]
TABLES = [TableSpec("t", 2, SGD(lr=1.0))]


def declared(pservers: int, shape: int = 3_000_000, *, has_table: bool = True) -> JobDeclaration:
    specs = [ParameterSpec("w", (shape,))]
    tables = TABLES if has_table else []
    plan = plan_for(specs, pservers, tables=tables)
    declaration = ModelDeclaration(
        parameters=[ParameterDeclaration(name="w", shape=[shape], dtype="float32")],
        optimizer=SGD(lr=0.1).to_json(),
        mode=Async().to_json(),
        tables=[table.to_json() for table in tables],
    )
    placement = placement_of(plan)
    return JobDeclaration(
        model=DeclaredModel(
            declaration=declaration, pservers=pservers, plan_hash=placed(plan, placement).hash, placement=placement
        )
    )


def written(name: str) -> WrittenFile:
    return WrittenFile(name=name, size_bytes=1, hash="0" * 32, blocks=1, lowest_version=0, highest_version=0)


class Cluster:
    """A master's core, with pservers that answer at once, and the stored placement and intent."""

    def __init__(
        self,
        pservers: int = 2,
        checkpoints: CheckpointSettings | None = None,
        *,
        rebalance_s: float = 0.0,
        **more: Any,
    ) -> None:
        self.pservers = {index: 10 + index for index in range(pservers)}
        self.placement: Placement | None = None
        self.stored: StoredIntent | None = None
        self.revision, self.now, self.calls, self.generation = 100, 0.0, 0, 1
        self.settings = CoreSettings(
            generation=1,
            pserver_count=pservers,
            keeps_checkpoints=checkpoints is not None,
            checkpoints=checkpoints or CheckpointSettings(),
            rebalance_s=rebalance_s,
        )
        #: "c" for each checkpoint, and "m" for each intent.
        self.turns = ""
        self.core = MasterCore(self.settings, 0.0, StoredState(declaration=declared(pservers, **more)), TASKS)
        self.transactions: list[Transaction] = []
        self.notes: list[out.Note] = []
        #: Block -> bytes per second that trainers push; None if the pservers report no counters.
        self.loads: dict[int, float] | None = None
        self.pushed: dict[int, Counter[tuple[int, int]]] = {index: Counter() for index in range(9)}
        self.answers: dict[int, Any] = {}
        self.acknowledges = True
        #: True if outcomes of transactions and answers to views do not arrive.
        self.is_silent = False
        self.see()
        self.tick(3)

    def replace_master(self) -> None:
        values = self.core.encode()
        stored = StoredState(
            declaration=decode(values["declaration"], JobDeclaration),
            queue=values["queue"],
            failures=values["failures"],
            membership=values["membership"],
            recovery=values["recovery"],
            scaling=values.get("scaling"),
            placement=self.placement,
            intent=self.stored,
        )
        self.generation += 1
        settings = CoreSettings(generation=self.generation, pserver_count=9, keeps_checkpoints=False)
        self.core = MasterCore(settings, self.now, stored, TASKS)
        self.transactions.clear()
        self.see()

    def see(self) -> None:
        self.apply(events.LeasesSeen({"a": 5}, dict(self.pservers), self.revision))

    def apply(self, event: events.Event) -> list[out.Effect]:
        effects = self.core.apply(event, self.now)
        self.core.check()
        self.answers |= {each.call: each.reply for each in effects if isinstance(each, out.Answer)}
        self.notes += [each for each in effects if isinstance(each, out.Note)]
        self.transactions += [each.transaction for each in effects if isinstance(each, out.StoreMoves)]
        for each in effects:
            if isinstance(each, out.StoreMoves) and each.transaction.attempt == 0 and each.transaction.intent:
                self.turns += "m"
            elif isinstance(each, out.StoreWork) and isinstance(each.work, WriteManifest):
                self.apply(events.ManifestWritten(each.work.number, "0" * 32))
            elif isinstance(each, out.StoreWork) and isinstance(each.work, MovePointer):
                self.turns += "c"
                self.apply(events.PointerStored(each.work.pointer.number))
        return effects

    def ask(self, request: events.Request) -> Any:
        self.calls += 1
        self.apply(events.Asked(self.calls, request))
        reply = self.answers[self.calls]
        if isinstance(reply, FlightedlError):
            raise reply
        return reply

    def execute(self) -> None:
        while self.transactions and not self.is_silent:
            transaction = self.transactions.pop(0)
            self.revision += 1
            attempt = 0 if self.stored is None else self.stored.attempt
            known = [self.pservers.get(index) == generation for index, generation in transaction.generations]
            if transaction.attempt == attempt and all(known):
                self.placement = transaction.placement or self.placement
                intent = transaction.intent
                self.stored = None if intent is None else StoredIntent(attempt or self.revision, intent)
            self.apply(events.MovesRead(self.placement, self.stored, self.revision, is_outcome=True))

    def control(self, index: int, generation: int) -> None:
        for _ in range(9):
            (call,) = [
                each
                for each in self.apply(events.ControlAsked(index, generation))
                if isinstance(each, out.ControlCall | out.NoCallDue)
            ]
            if isinstance(call, out.NoCallDue):
                return
            reply: Any = out.Done()
            if isinstance(call.request, ViewRequest):
                if self.is_silent:
                    return
                reply = ViewReply(serial=call.request.serial, refused=[], highest_open_round=0)
            elif isinstance(call.request, AppliedRequest):
                reply = AppliedReply(summary=AppliedSummary().encode())
            elif isinstance(call.request, SnapshotRequest):
                reply = SnapshotReply(call.request.order, "written", file=written(call.request.name))
            self.apply(events.Answered(index, generation, call.request, reply, call.audit))

    def tick(self, count: int = 1) -> None:
        for _ in range(count):
            self.now += 0.6
            if self.loads is not None:
                self.apply(events.StatusReceived(self.statuses(self.loads)))
            self.apply(events.TimePassed())
            self.execute()
            for index, generation in self.pservers.items():
                self.control(index, generation)
            self.execute()
            if self.acknowledges and self.stored is not None:
                for move in self.stored.intent.moves:
                    self.acknowledge(move.block)
                self.execute()

    def statuses(self, loads: dict[int, float]) -> list[PserverStatusReply | None]:
        assert self.core.declaration.model is not None
        owners = plan_of(self.core.declaration.model).block_pservers.tolist()
        for block, load in loads.items():
            self.pushed[owners[block]][block, 1] += int(600 * load)
        return [
            PserverStatusReply(
                index=index,
                state="serving",
                pushes=1,
                rows={},
                members=[],
                pushed=[(*blocks, 0, size) for blocks, size in self.pushed[index].items()],
            )
            if index in self.pservers
            else None
            for index in range(9)
        ]

    def acknowledge(self, block: int) -> None:
        stored = self.stored
        if stored is not None and (move := stored.intent.move_of(block)) is not None:
            generation = self.pservers[move.destination]
            self.ask(MovedRequest(attempt=stored.attempt, block=block, generation=generation))

    def start(self, *indexes: int) -> None:
        self.pservers |= {index: self.revision + 1 + index for index in indexes}
        self.revision += 10
        self.see()

    def scale(self, **request: Any) -> ScaleReply:
        reply = self.ask(ScaleRequest(**request))
        assert isinstance(reply, ScaleReply)
        return reply

    @property
    def shares(self) -> Counter[int]:
        assert self.placement is not None
        return Counter(self.placement.owners)

    @property
    def desired(self) -> bytes:
        return self.core.encode()["desired"]


TASKS = QueueSettings(4, lambda _: 1, epochs=1)


def test_pservers_are_added_and_removed_while_the_job_trains() -> None:
    cluster = Cluster(2)
    first = cluster.scale(pservers=4)
    assert (first.wanted, first.pservers, first.moved, first.is_done) == (4, 2, 0, False)
    cluster.tick(2)
    assert cluster.desired == b"4", "the launcher starts the processes"
    assert cluster.scale().waiting_for == "there is no pserver 2"
    cluster.start(2, 3)
    cluster.tick(12)
    reply = cluster.scale()
    assert (reply.pservers, reply.is_done, reply.moved) == (4, True, reply.total)
    assert set(cluster.shares) == {0, 1, 2, 3}
    assert max(cluster.shares.values()) - min(cluster.shares.values()) < 10

    cluster.scale(pservers=1)
    cluster.tick(20)
    assert set(cluster.shares) == {0}
    assert (cluster.placement.pservers if cluster.placement else 0, cluster.desired) == (1, b"1")
    assert cluster.scale().is_done
    assert cluster.core.pservers.is_everybody_settled

    cluster.scale(pservers=3)
    cluster.tick(3)
    assert cluster.scale().waiting_for == "there is no pserver 1", "processes that are about to end do not return"
    cluster.start(1, 2)
    cluster.tick(20)
    assert set(cluster.shares) == {0, 1, 2}
    model = cluster.core.declaration.model
    assert model is not None
    assert (model.pservers, model.cut_for, model.placement) == (3, 2, cluster.placement)
    assert cluster.placement is not None
    assert model.plan_hash.endswith(f".{cluster.placement.version}")


def test_a_drained_pserver_has_no_blocks_and_remains() -> None:
    cluster = Cluster(3)
    cluster.scale(drain=[1])
    cluster.tick(20)
    assert set(cluster.shares) == {0, 2}
    assert cluster.scale().drained == [1]
    assert cluster.core.pservers.count == 3
    cluster.scale(pservers=3)
    cluster.tick(20)
    assert set(cluster.shares) == {0, 1, 2}


@pytest.mark.parametrize(
    ("request_", "sentence"),
    [
        ({"pservers": 9}, "the model has only 1 block, so at most 1 pserver can share it: choose a lower number"),
        ({"drain": [2]}, "there is no pserver 2: the job has pservers 0 to 0"),
        ({"drain": [0]}, "at least one pserver must keep the blocks"),
    ],
)
def test_impossible_changes_are_refused(request_: dict[str, Any], sentence: str) -> None:
    cluster = Cluster(1, shape=10, has_table=False)
    with pytest.raises(UsageError, match=sentence):
        cluster.scale(**request_)
    assert cluster.scale().is_done


def test_two_changes_at_once_are_refused() -> None:
    cluster = Cluster(1)
    cluster.scale(pservers=2)
    assert not cluster.scale(pservers=2).is_done, "the same change is not an error"
    with pytest.raises(UsageError, match="a change to 2 pservers is in progress: wait until it is done, or cancel it"):
        cluster.scale(pservers=3)


def test_pservers_cannot_change_before_the_model_is_declared() -> None:
    core = MasterCore(CoreSettings(generation=1, pserver_count=1), 0.0)
    (answer,) = core.apply(events.Asked(1, ScaleRequest(pservers=2)), 0.0)
    assert isinstance(answer, out.Answer)
    assert isinstance(answer.reply, NotReadyError)


def test_the_pservers_of_a_job_of_an_older_version_do_not_change() -> None:
    known = declared(1)
    assert known.model is not None
    old = replace(known, model=replace(known.model, placement=None))
    core = MasterCore(CoreSettings(generation=1, pserver_count=1), 0.0, StoredState(declaration=old))
    (answer,) = core.apply(events.Asked(1, ScaleRequest(pservers=2)), 0.0)
    assert isinstance(answer, out.Answer)
    assert "restart it with --resume" in str(answer.reply)


def test_a_cancelled_change_leaves_a_consistent_job() -> None:
    cluster = Cluster(2)
    cluster.acknowledges = False
    cluster.scale(pservers=3)
    cluster.start(2)
    cluster.tick(4)
    assert cluster.stored is not None
    cluster.acknowledge(cluster.stored.intent.moves[0].block)
    cluster.execute()
    assert cluster.scale(is_cancelled=True).is_given_up
    cluster.execute()
    assert cluster.stored is None
    assert cluster.shares[2], "blocks that have moved stay"
    cluster.tick(3)
    assert cluster.core.pservers.count == 3


def test_a_request_to_cancel_a_change_does_not_end_another_one() -> None:
    cluster = Cluster(2)
    cluster.acknowledges = False
    first = cluster.scale(pservers=3).change
    cluster.start(2)
    assert cluster.scale(is_cancelled=True, change=first).is_given_up
    second = cluster.scale(pservers=3).change
    assert second == first + 1
    assert not cluster.scale(is_cancelled=True, change=first).is_done, "the first request, repeated"
    assert cluster.scale(leaving=[(1, 2)]).change == second, "a process that leaves belongs to the change"
    assert cluster.scale(is_cancelled=True, change=second).is_given_up


def test_a_cancelled_change_removes_pservers_that_were_added() -> None:
    cluster = Cluster(2)
    cluster.acknowledges = False
    cluster.scale(pservers=3)
    cluster.start(2)
    cluster.tick(4)
    cluster.scale(is_cancelled=True)
    cluster.tick(4)
    assert (cluster.core.pservers.count, cluster.desired) == (2, b"2")


def test_a_new_master_cancels_the_intent_and_continues_the_change() -> None:
    cluster = Cluster(2)
    cluster.acknowledges = False
    cluster.scale(pservers=3)
    cluster.start(2)
    cluster.tick(4)
    before = cluster.stored
    cluster.replace_master()
    assert cluster.core.pservers.count == 3, "the placement decides, not the desired number"
    cluster.acknowledges = True
    cluster.tick(20)
    assert before is not None
    assert cluster.scale().is_done
    assert max(cluster.shares.values()) - min(cluster.shares.values()) < 10
    assert decode(cluster.core.encode()["scaling"], ScaleRecord).is_done


def test_a_destination_that_dies_ends_the_intent_and_reports_of_older_placements() -> None:
    cluster = Cluster(2)
    cluster.scale(pservers=3)
    cluster.start(2)
    cluster.tick(3)
    assert cluster.shares[2]
    cluster.acknowledges = False
    (ticket,) = [TasksTicket(trainer="a", generation=5, want=1)]
    (given,) = cluster.ask(ticket).assignments
    cluster.start(2)
    cluster.tick()
    done = FinishedTask(
        epoch=given.epoch, position=given.position, attempt=given.attempt, pservers=[10, 11], placement=1
    )
    lost = cluster.ask(replace(ticket, want=0, finished=[done])).lost
    assert [each.attempt for each in lost] == [given.attempt], "its blocks may have moved to the lost process"


def test_a_failed_attempt_is_repeated() -> None:
    cluster = Cluster(2)
    cluster.acknowledges = False
    cluster.scale(drain=[1])
    cluster.tick(3)
    assert cluster.stored is not None
    # The source has waited too long, and has deleted the intent.
    cluster.stored, cluster.revision = None, cluster.revision + 1
    cluster.apply(events.MovesRead(cluster.placement, None, cluster.revision))
    assert "failed, and is repeated" in cluster.scale().waiting_for
    cluster.acknowledges = True
    cluster.tick(20)
    assert set(cluster.shares) == {0}


def test_a_change_ends_after_many_failed_attempts() -> None:
    """For example, if the new pserver has too little memory, or runs another version."""
    cluster = Cluster(2)
    cluster.acknowledges = False
    cluster.scale(drain=[1])
    for failures in range(20):
        assert not cluster.scale().is_done, failures
        cluster.tick(25)
        assert cluster.stored is not None, failures
        cluster.stored, cluster.revision = None, cluster.revision + 1
        cluster.apply(events.MovesRead(cluster.placement, None, cluster.revision))
    assert cluster.scale().text == (
        "the job has 2 pservers; the last change ended early: 20 attempts to move blocks have failed in a row; "
        "see the pservers' logs"
    )
    assert cluster.placement is None, "no block has moved"


def test_a_move_is_committed_when_all_pservers_have_answered_the_newest_view() -> None:
    cluster = Cluster(2)
    cluster.acknowledges = False
    cluster.scale(drain=[1])
    cluster.tick(2)
    assert cluster.stored is not None
    cluster.is_silent = True
    (given,) = cluster.ask(TasksTicket(trainer="a", generation=5, want=1)).assignments
    cluster.ask(JoinRequest(trainer="a", generation=5, attempt=given.attempt, wait_s=0.0))
    cluster.acknowledge(cluster.stored.intent.moves[0].block)
    assert not cluster.transactions, "the destination's answer to the view does not include the blocks"
    cluster.is_silent = False
    for index, generation in cluster.pservers.items():
        cluster.control(index, generation)
    assert [each.placement is not None for each in cluster.transactions] == [True]


def test_no_call_to_a_pserver_begins_while_a_transaction_is_in_progress() -> None:
    cluster = Cluster(2)
    cluster.is_silent = True
    cluster.scale(drain=[1])
    cluster.tick()
    assert cluster.transactions
    for index, generation in cluster.pservers.items():
        (call,) = cluster.apply(events.ControlAsked(index, generation))
        assert isinstance(call, out.NoCallDue)


def test_checkpoints_and_moves_take_turns() -> None:
    cluster = Cluster(2, checkpoints=CheckpointSettings(interval_s=0.1))
    cluster.scale(pservers=3)
    cluster.start(2)
    cluster.tick(40)
    assert cluster.scale().is_done, cluster.scale()
    assert "".join(sorted(set(cluster.turns))) == "cm", cluster.turns
    assert "cc" in cluster.turns[-9:], "checkpoints continue after the change"
    first = cluster.turns.index("m")
    assert "c" in cluster.turns[first : cluster.turns.rindex("m")], "checkpoints take place between two moves"


def test_no_checkpoint_is_ordered_while_blocks_move() -> None:
    cluster = Cluster(2, checkpoints=CheckpointSettings(interval_s=0.1))
    cluster.acknowledges = False
    cluster.scale(drain=[1])
    cluster.tick(9)
    assert cluster.stored is not None
    count = cluster.turns.count("c")
    cluster.tick(9)
    assert cluster.turns.count("c") == count


def test_a_deposed_master_ignores_the_placement_of_its_successor() -> None:
    cluster = Cluster()
    placement = cluster.core.declaration.model.placement  # type: ignore[union-attr]
    assert placement is not None
    cluster.apply(events.MovesRead(placement.resized(4), None, cluster.revision + 1))
    assert cluster.core.declaration.model.placement == placement  # type: ignore[union-attr]
    assert cluster.core.pservers.count == 2


def busy(pservers: int = 2, blocks: int = 2) -> Cluster:
    """Return a cluster whose pserver 0 is busy with some blocks of equal load."""
    cluster = Cluster(pservers, rebalance_s=6.0, has_table=False, shape=6_000_000)
    model = cluster.core.declaration.model
    assert model is not None
    assert model.placement is not None
    own = [block for block, owner in enumerate(model.placement.owners) if owner == 0]
    cluster.loads = dict.fromkeys(own[:blocks], 1e6)
    return cluster


def rebalanced(cluster: Cluster) -> list[out.Note]:
    return [note for note in cluster.notes if note.kind is out.Kind.REBALANCED]


def test_blocks_move_away_from_a_busy_pserver() -> None:
    cluster = busy()
    cluster.tick(9)
    assert not rebalanced(cluster), "the pserver has not been busy for long enough"
    cluster.tick(9)
    assert cluster.placement is not None
    assert sorted(cluster.placement.owners[block] for block in cluster.loads or ()) == [0, 1]
    (note,) = rebalanced(cluster)
    sentence = "pserver 0 has 100% of the load of all pservers: blocks move to pserver 1 blocks=1"
    assert note.text % note.values == sentence
    count = len(cluster.turns)
    cluster.tick(100)
    assert len(cluster.turns) == count, "the loads are equal"
    assert cluster.scale() == ScaleReply(wanted=2, pservers=2)


def test_blocks_of_a_busy_pserver_stay_if_rebalancing_is_disabled() -> None:
    cluster = busy()
    disabled = Cluster(2, has_table=False, shape=6_000_000)
    disabled.loads = cluster.loads
    disabled.tick(40)
    assert disabled.placement is None


def test_no_blocks_of_a_busy_pserver_move_during_a_change_by_a_user() -> None:
    cluster = busy()
    cluster.acknowledges = False
    cluster.scale(drain=[1])
    cluster.tick(40)
    assert not rebalanced(cluster)
    cluster.acknowledges = True
    cluster.tick(40)
    assert set(cluster.shares) == {0}
    assert not rebalanced(cluster), "a drained pserver gets no blocks"
    cluster.scale(pservers=2)
    cluster.tick(10)
    assert len(cluster.shares) == 2


def test_a_change_by_a_user_follows_the_moves_in_progress() -> None:
    cluster = busy()
    cluster.acknowledges = False
    cluster.tick(18)
    assert rebalanced(cluster)
    assert cluster.stored is not None
    cluster.scale(drain=[1])
    cluster.acknowledges = True
    cluster.tick(20)
    assert set(cluster.shares) == {0}
    assert cluster.scale().is_done


def test_moves_of_a_busy_pserver_that_fail_are_repeated_a_few_times() -> None:
    cluster = busy()
    cluster.acknowledges = False
    for _ in range(90):
        cluster.tick()
        if cluster.stored is not None:
            # The source has waited too long, and has deleted the intent.
            cluster.stored, cluster.revision = None, cluster.revision + 1
            cluster.apply(events.MovesRead(cluster.placement, None, cluster.revision))
    assert cluster.turns == "mmmmmm"
    assert "blocks stay on pserver 0" in rebalanced(cluster)[-1].text % rebalanced(cluster)[-1].values
    cluster.tick(60)
    assert cluster.turns == "mmmmmm", "the moves did not help"
    cluster.acknowledges = True
    cluster.scale(pservers=2)
    cluster.tick(60)
    assert cluster.placement is not None
    assert sorted(cluster.placement.owners[block] for block in cluster.loads or ()) == [0, 1]


def test_a_new_master_cancels_moves_of_a_busy_pserver_and_measures_again() -> None:
    cluster = busy()
    cluster.acknowledges = False
    cluster.tick(18)
    assert cluster.stored is not None
    cluster.replace_master()
    cluster.tick(2)
    assert cluster.stored is None


def test_only_some_of_the_moves_of_a_busy_pserver_may_be_committed() -> None:
    cluster = busy(3, blocks=3)
    cluster.acknowledges = False
    cluster.tick(18)
    assert cluster.stored is not None
    assert len(cluster.stored.intent.moves) == 2
    cluster.acknowledge(cluster.stored.intent.moves[0].block)
    cluster.execute()
    assert cluster.stored is not None
    cluster.stored, cluster.revision = None, cluster.revision + 1
    cluster.apply(events.MovesRead(cluster.placement, None, cluster.revision))
    assert len(cluster.turns) == 1
    cluster.tick(5)
    assert len(cluster.turns) == 1, "the loads are measured first"


def test_the_successor_of_a_pserver_that_has_left_gets_blocks_again() -> None:
    cluster = Cluster(3)
    cluster.scale(leaving=[(1, cluster.pservers[1])])
    cluster.tick(20)
    assert set(cluster.shares) == {0, 2}
    assert cluster.scale().drained == [1]
    cluster.tick(5)
    assert set(cluster.shares) == {0, 2}, "blocks do not return to the process itself"
    cluster.replace_master()
    cluster.start(1)
    cluster.tick(20)
    assert set(cluster.shares) == {0, 1, 2}
    reply = cluster.scale()
    assert (reply.drained, reply.is_done, reply.pservers) == ([], True, 3)


def test_pservers_that_leave_together_give_no_blocks_to_each_other() -> None:
    cluster = Cluster(3)
    leaving = [(index, cluster.pservers[index]) for index in (0, 1)]
    cluster.scale(leaving=leaving[1:])
    cluster.tick(2)
    cluster.scale(leaving=leaving[:1])
    total = cluster.scale().total
    cluster.scale(leaving=leaving[1:])
    assert cluster.scale().total == total, "a repeated request changes nothing"
    with pytest.raises(UsageError, match="at least one pserver must keep the blocks, and the others are about to end"):
        cluster.scale(leaving=[(2, cluster.pservers[2])])
    with pytest.raises(UsageError, match="in progress"):
        cluster.scale(pservers=1)
    cluster.tick(20)
    assert set(cluster.shares) == {2}
    with pytest.raises(UsageError, match="the others are about to end"):
        cluster.scale(pservers=2)
    cluster.scale(leaving=leaving[:1], is_cancelled=True)
    cluster.tick(20)
    assert set(cluster.shares) == {0, 2}, "a process that could not leave in time keeps its share"


def test_a_pserver_leaves_during_another_change() -> None:
    cluster = Cluster(2)
    cluster.scale(pservers=3)
    cluster.scale(leaving=[(0, cluster.pservers[0])])
    cluster.start(2)
    cluster.tick(20)
    assert set(cluster.shares) == {1, 2}
    reply = cluster.scale()
    assert (reply.pservers, reply.is_done, reply.moved) == (3, True, reply.total)


def test_an_intent_that_is_deleted_before_its_outcome_is_known_has_failed() -> None:
    cluster = Cluster()
    cluster.is_silent = True
    cluster.scale(pservers=1)
    cluster.tick()
    (transaction,) = cluster.transactions
    assert transaction.intent is not None
    stored = StoredIntent(cluster.revision + 1, transaction.intent)
    cluster.apply(events.MovesRead(None, None, cluster.revision + 2))
    cluster.apply(events.MovesRead(None, stored, cluster.revision + 1, is_outcome=True))
    assert not cluster.core.moves.is_moving
