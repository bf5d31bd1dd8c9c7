"""The master's core: given these events, expect exactly these effects."""

from __future__ import annotations

from typing import Any

import pytest

from flightedl.domain.checkpoint.values import CheckpointSettings, MovePointer, WriteManifest
from flightedl.domain.consistency.modes import Async, Mode, Sync
from flightedl.domain.master import effects as out
from flightedl.domain.master import events
from flightedl.domain.master.core import MasterCore
from flightedl.domain.master.state import CoreSettings, StoredState
from flightedl.domain.queue.values import QueueSettings
from flightedl.domain.recovery.replay import AppliedSummary
from flightedl.errors import FlightedlError, JobFailedError, NotReadyError, UnregisteredError, UsageError
from flightedl.messages.base import decode
from flightedl.messages.checkpoints import CheckpointRequest
from flightedl.messages.control import (
    AppliedReply,
    AppliedRequest,
    ReloadRequest,
    SealRequest,
    SnapshotReply,
    SnapshotRequest,
    ViewReply,
    ViewRequest,
    WrittenFile,
)
from flightedl.messages.declarations import DeclaredModel, JobDeclaration, ModelDeclaration
from flightedl.messages.status import PserverStatusReply
from flightedl.messages.tasks import (
    MOMENT_S,
    Assignment,
    FinishedTask,
    JoinRequest,
    ModeRequest,
    ReturnedTask,
    StopRequest,
    TasksReply,
    TasksTicket,
)

MASTER, PSERVER, A, B = 5, 10, 20, 21


class Bench:
    """A master with a manual clock, one pserver and two trainers."""

    def __init__(self, mode: Mode | None = None, *, tasks: int = 2, epochs: int = 1, **settings: Any) -> None:
        self.core = MasterCore(
            CoreSettings(generation=MASTER, pserver_count=1, **({"keeps_checkpoints": False} | settings)),
            0.0,
            StoredState(declaration=declaration_in(Sync() if mode is None else mode)),
            QueueSettings(tasks, lambda _: 1, epochs=epochs),
        )
        self.now = 0.0
        self.calls = 0
        self.answers: dict[int, out.Answer] = {}
        self.see({"a": A, "b": B}, {0: PSERVER})

    def apply(self, event: events.Event) -> list[out.Effect]:
        effects = self.core.apply(event, self.now)
        self.core.check()
        self.answers |= {each.call: each for each in effects if isinstance(each, out.Answer)}
        return effects

    def see(self, trainers: dict[str, int], pservers: dict[int, int], revision: int = 100) -> list[out.Effect]:
        return self.apply(events.LeasesSeen(trainers, pservers, revision))

    def call(self, request: events.Request) -> int:
        self.calls += 1
        self.apply(events.Asked(self.calls, request))
        return self.calls

    def reply(self, call: int) -> Any:
        return self.answers[call].reply

    # trainers

    def ask(self, trainer: str = "a", generation: int = A, wait_s: float = 0.0, **more: Any) -> int:
        ticket = TasksTicket(trainer=trainer, generation=generation, wait_s=wait_s, **more)
        return self.call(ticket)

    def take(self, trainer: str = "a", generation: int = A) -> Assignment:
        (given,) = self.reply(self.ask(trainer, generation)).assignments
        return given

    def join(self, trainer: str = "a", generation: int = A, wait_s: float = 2.0, attempt: int | None = None) -> int:
        request = JoinRequest(trainer=trainer, generation=generation, wait_s=wait_s, attempt=attempt)
        return self.call(request)

    def finish(self, *done: Assignment, by: int = PSERVER, **more: Any) -> TasksReply:
        reports = [
            FinishedTask(epoch=each.epoch, position=each.position, attempt=each.attempt, pservers=[by]) for each in done
        ]
        return self.reply(self.ask(finished=reports, **({"want": 0} | more)))

    # the pserver

    def control(self, generation: int = PSERVER) -> out.ControlCall | out.NoCallDue:
        (call,) = [
            each
            for each in self.apply(events.ControlAsked(0, generation))
            if isinstance(each, out.ControlCall | out.NoCallDue)
        ]
        return call

    def applied(self, call: out.ControlCall, generation: int = PSERVER, **done: Any) -> list[out.Effect]:
        reply = AppliedReply(summary=AppliedSummary(**done).encode())
        return self.apply(events.Answered(0, generation, call.request, reply, call.audit))

    def serve(self, generation: int = PSERVER, **done: Any) -> list[Any]:
        """Answer all calls to the pserver that are due; return the requests."""
        said = []
        while isinstance(call := self.control(generation), out.ControlCall):
            said.append(call.request)
            match call.request:
                case AppliedRequest():
                    self.applied(call, generation, **done)
                case ViewRequest(serial=serial):
                    self.apply(events.Answered(0, generation, call.request, ViewReply(serial=serial)))
                case SealRequest():
                    self.apply(events.Answered(0, generation, call.request, out.Done()))
                case SnapshotRequest():
                    self.apply(events.Answered(0, generation, call.request, written(call.request)))
                case _:
                    break
        return said


def declaration_in(mode: Mode) -> JobDeclaration:
    declared = ModelDeclaration(parameters=[], optimizer={}, mode=mode.to_json())
    return JobDeclaration(model=DeclaredModel(declaration=declared, pservers=1, plan_hash="p", is_former=False))


def written(order: SnapshotRequest) -> SnapshotReply:
    file = WrittenFile(name=order.name, size_bytes=1, hash="0" * 32, blocks=1, lowest_version=0, highest_version=0)
    return SnapshotReply(order.order, "written", file=file)


# --- work ---


def test_an_assignment_is_announced_only_after_it_is_stored() -> None:
    bench = Bench()
    answer = bench.answers[bench.ask()]
    assert isinstance(answer.reply, TasksReply)
    assert [each.task for each in answer.reply.assignments] == [0]
    assert answer.revision == bench.core.revision > 0


def test_a_request_waits_for_a_returned_task() -> None:
    bench = Bench(tasks=1)
    bench.take()
    waiting = bench.ask("b", B, wait_s=2.0)
    assert waiting not in bench.answers
    bench.see({"b": B}, {0: PSERVER})
    (given,) = bench.reply(waiting).assignments
    assert given.task == 0


def test_an_expired_request_is_answered_with_no_task() -> None:
    bench = Bench(tasks=1)
    bench.take()
    waiting = bench.ask("b", B, wait_s=2.0)
    bench.apply(events.WaitEnded(waiting))
    assert (bench.reply(waiting).assignments, bench.reply(waiting).outcome) == ([], "none_now")
    assert not [each for each in bench.apply(events.WaitEnded(waiting)) if isinstance(each, out.Answer)]


@pytest.mark.parametrize("wait_s", [0.0, 2.0])
def test_a_ticket_that_only_reports_is_answered_at_once(wait_s: float) -> None:
    bench = Bench()
    assert bench.reply(bench.ask(want=0, wait_s=wait_s)).outcome == "none_now"


def test_a_waiting_request_of_a_departed_trainer_is_refused() -> None:
    bench = Bench(tasks=1)
    bench.take()
    waiting = bench.ask("b", B, wait_s=2.0)
    bench.see({"a": A}, {0: PSERVER})
    assert isinstance(bench.reply(waiting), UnregisteredError)
    assert isinstance(bench.reply(bench.ask("c", 101)), NotReadyError)
    assert bench.answers[waiting].revision == 0


def test_a_trainer_that_registers_again_gets_its_task_again() -> None:
    bench = Bench(tasks=1)
    first = bench.take()
    bench.see({"a": A + 50, "b": B}, {0: PSERVER})
    again = bench.take("a", A + 50)
    assert again.task == first.task
    assert again.attempt != first.attempt


def test_a_report_counts_only_if_it_names_the_current_pserver() -> None:
    bench = Bench()
    done = bench.take()
    bench.see({"a": A, "b": B}, {0: PSERVER + 1})
    reply = bench.finish(done, by=PSERVER)
    assert [each.attempt for each in reply.lost] == [done.attempt]
    again = bench.take()
    assert not bench.finish(again, by=PSERVER + 1).lost
    assert bench.core.work is not None
    assert bench.core.work.queue.counts().done == 1


def test_without_a_dataset_there_are_no_tasks() -> None:
    core = MasterCore(CoreSettings(generation=MASTER, pserver_count=1), 0.0)
    core.apply(events.LeasesSeen({"a": A}, {}, 100), 0.0)
    (answer,) = core.apply(events.Asked(1, TasksTicket(trainer="a", generation=A)), 0.0)
    assert isinstance(answer, out.Answer)
    assert isinstance(answer.reply, NotReadyError)


def test_a_stopped_job_ends_with_the_tasks_already_begun() -> None:
    bench = Bench(tasks=4)
    bench.serve()
    done = bench.take()
    stopping = bench.call(StopRequest(trainer="a", generation=A, reason="a test"))
    assert isinstance(bench.reply(stopping), out.Done)
    assert bench.answers[stopping].revision == bench.core.revision
    assert bench.reply(bench.ask("b", B)).outcome == "none_now"
    assert bench.finish(done, want=1).is_ending, "the pserver is asked for its applied batches"
    bench.now += 1.0
    bench.serve(done={0: bytes([1 << done.task])})
    assert bench.reply(bench.ask()).outcome == "epochs_done"
    assert bench.core.encode()["stopped"]


# --- members ---


def test_a_trainer_without_tasks_is_not_a_member() -> None:
    bench = Bench()
    assert not bench.reply(bench.join()).holds_work


def test_a_join_names_one_attempt() -> None:
    bench = Bench()
    held = bench.take()
    assert not bench.reply(bench.join(attempt=held.attempt + 100)).holds_work
    assert bench.join(attempt=held.attempt) not in bench.answers


def two_at_the_end(tasks: int = 4, **more: Any) -> tuple[Bench, Assignment, Assignment]:
    """Two members hold the last piece each; pieces take as long as earlier ones; "a" has held its piece for 1 s."""
    bench = Bench(tasks=tasks, **more)
    for _ in range(tasks // 2):
        mine, other = bench.take(), bench.take("b", B)
        for trainer, generation in (("a", A), ("b", B)):
            bench.join(trainer, generation)
            bench.serve()
        bench.now += 1.0
        if bench.core.work is not None and bench.core.work.queue.counts().todo:
            for trainer, generation, done in (("a", A, mine), ("b", B, other)):
                bench.finish(done, trainer=trainer, generation=generation, want=0)
    return bench, mine, other


def member_names(bench: Bench) -> list[str]:
    assert bench.core.members is not None
    return sorted(each.trainer for each in bench.core.members.membership.members)


def reported(done: Assignment) -> list[FinishedTask]:
    return [FinishedTask(epoch=done.epoch, position=done.position, attempt=done.attempt, pservers=[PSERVER])]


def test_the_first_reporter_remains_a_member_until_the_epoch_ends() -> None:
    bench, mine, other = two_at_the_end(epochs=2)
    waiting = bench.ask(finished=reported(mine), wait_s=MOMENT_S)
    assert waiting not in bench.answers
    assert member_names(bench) == ["a", "b"]
    bench.ask("b", B, finished=reported(other), wait_s=MOMENT_S)
    assert [each.epoch for each in bench.reply(waiting).assignments] == [1]
    assert member_names(bench) == ["a", "b"]


def rounds_apart(told: int, mine: int) -> list[str]:
    """Return the members when "a" is idle at its round ``mine``, and "b" has just begun its last task at ``told``."""
    bench, done, other = two_at_the_end(epochs=2)
    bench.ask("b", B, returned=[ReturnedTask(epoch=0, position=other.position, attempt=other.attempt)], want=0)
    other = bench.take("b", B)
    bench.join("b", B)
    bench.serve()
    bench.ask("b", B, holding=[other.attempt], want=0, round=told)
    waiting = bench.ask(finished=reported(done), wait_s=MOMENT_S, round=mine + other.end_batch - other.first_batch)
    assert waiting not in bench.answers
    return member_names(bench)


def test_a_trainer_that_has_done_all_rounds_of_the_others_remains_a_member() -> None:
    assert rounds_apart(told=6, mine=6) == ["a", "b"]
    assert rounds_apart(told=6, mine=7) == ["a", "b"]


def test_a_trainer_leaves_if_another_has_more_rounds_or_does_not_report_its_round() -> None:
    assert rounds_apart(told=7, mine=6) == ["b"]
    assert rounds_apart(told=0, mine=6) == ["b"]


def test_a_trainer_rejoins_with_the_task_that_it_has_read_ahead() -> None:
    bench, mine, other = two_at_the_end(epochs=2)
    waiting = bench.ask(finished=reported(mine), wait_s=1.0)
    bench.apply(events.WaitEnded(waiting))
    assert bench.reply(waiting).ahead
    assert member_names(bench) == ["b"]
    waiting = bench.ask(wait_s=1.0)
    bench.ask("b", B, finished=reported(other), wait_s=MOMENT_S)
    given = bench.reply(waiting)
    assert [each.epoch for each in given.assignments] == [1]
    assert member_names(bench) == ["a", "b"]
    assert given.member == 0, "it is not a member before all pservers have agreed"


def test_a_trainer_without_a_promised_task_must_ask_to_join() -> None:
    bench = Bench(tasks=4)
    bench.take()
    bench.take("b", B)
    assert member_names(bench) == []


def test_an_idle_trainer_leaves_after_a_moment() -> None:
    bench, mine, _ = two_at_the_end(epochs=2)
    waiting = bench.ask(finished=reported(mine), wait_s=MOMENT_S)
    bench.apply(events.WaitEnded(waiting))
    assert bench.reply(waiting).member == 0
    assert member_names(bench) == ["b"]


def test_an_idle_trainer_leaves_at_once_if_its_request_is_long_or_the_others_have_just_begun() -> None:
    bench, mine, _ = two_at_the_end(epochs=2)
    bench.ask(finished=reported(mine), wait_s=2 * MOMENT_S)
    assert member_names(bench) == ["b"]
    bench, mine, other = two_at_the_end(epochs=2)
    bench.ask("b", B, returned=[ReturnedTask(epoch=0, position=other.position, attempt=other.attempt)], want=0)
    assert bench.take("b", B).task == other.task
    waiting = bench.ask(finished=reported(mine), wait_s=MOMENT_S)
    assert waiting not in bench.answers
    assert "a" not in member_names(bench)


def test_a_trainer_that_gets_too_few_tasks_is_promised_some() -> None:
    bench, mine, _ = two_at_the_end(epochs=2)
    reply = bench.reply(bench.ask(want=1, holding=[mine.attempt]))
    assert [(each.epoch, each.attempt) for each in reply.ahead] == [(1, 0), (1, 0)]
    assert bench.reply(bench.ask(want=0, holding=[mine.attempt])).ahead == []
    assert bench.reply(bench.ask("b", B, want=0)).ahead == []


def test_a_trainer_is_a_member_when_every_pserver_has_the_view() -> None:
    bench = Bench()
    bench.serve()
    bench.take()
    joining = bench.join()
    assert joining not in bench.answers
    call = bench.control()
    assert isinstance(call, out.ControlCall)
    assert isinstance(call.request, ViewRequest)
    assert [each.trainer for each in call.request.members] == ["a"]
    assert call.revision == bench.core.revision, "a successor must know every member that a pserver may have admitted"
    bench.apply(events.Answered(0, PSERVER, call.request, ViewReply(serial=call.request.serial)))
    assert bench.reply(joining).member == call.request.members[0].member
    assert bench.answers[joining].revision == bench.core.revision


def test_an_expired_join_names_the_missing_pservers() -> None:
    bench = Bench()
    bench.take()
    joining = bench.join()
    bench.apply(events.WaitEnded(joining))
    assert bench.reply(joining).member == 0
    assert "pserver 0" in bench.reply(joining).waiting_for


def test_rounds_do_not_wait_for_a_trainer_without_tasks() -> None:
    bench = Bench(tasks=1)
    bench.serve()
    done = bench.take()
    bench.join()
    bench.serve()
    assert bench.core.members is not None
    assert len(bench.core.members.membership.members) == 1
    bench.finish(done)
    assert not bench.core.members.membership.members


def test_a_lost_view_is_sent_again() -> None:
    bench = Bench()
    bench.serve()
    bench.take()
    bench.join()
    first = bench.control()
    assert isinstance(first, out.ControlCall)
    assert isinstance(bench.control(), out.NoCallDue), "at most one answer is pending"
    bench.apply(events.Answered(0, PSERVER, first.request, None))  # type: ignore[union-attr]
    again = bench.control()
    assert isinstance(again, out.ControlCall)
    assert isinstance(again.request, ViewRequest)


def test_a_change_of_the_mode_is_answered_when_all_pservers_have_adopted_it() -> None:
    bench = Bench()
    bench.serve()
    asking = bench.call(ModeRequest(mode=Async().to_json(), wait_s=2.0))
    assert asking not in bench.answers
    bench.serve()
    assert bench.reply(asking).is_agreed
    model = bench.core.declaration.model
    assert model is not None
    assert Mode.from_json(model.present_mode) == Async()


# --- pservers ---


def test_a_new_process_is_first_asked_for_its_applied_batches() -> None:
    bench = Bench()
    kinds = [type(each) for each in bench.serve()]
    assert kinds[0] is AppliedRequest
    assert bench.core.pservers.is_settled(0, PSERVER)


def test_a_process_that_cannot_answer_yet_is_asked_again_soon() -> None:
    bench = Bench()
    assert isinstance(bench.control(), out.ControlCall)
    other = [bench.control(), bench.control()]
    assert not any(isinstance(each, out.ControlCall) and isinstance(each.request, AppliedRequest) for each in other)
    assert isinstance(other[-1], out.NoCallDue)
    assert 0 < other[-1].pause_s <= 0.05
    bench.now += 0.05
    again = bench.control()
    assert isinstance(again, out.ControlCall)
    assert isinstance(again.request, AppliedRequest)


def test_tasks_that_a_pserver_has_lost_are_repeated() -> None:
    bench = Bench(tasks=2)
    bench.serve()
    done = bench.take()
    bench.finish(done)
    bench.see({"a": A, "b": B}, {0: PSERVER + 1})
    bench.now += 1.0
    bench.serve(PSERVER + 1)
    assert bench.core.work is not None
    assert bench.core.work.queue.counts().done == 0


#: Answer of a pserver that loaded checkpoint 3 and has applied nothing.
LOADED = AppliedReply(summary=AppliedSummary().encode(), checkpoint=3)


def core_that_sends_pserver_1_back(mode: Mode) -> MasterCore:
    core = MasterCore(
        CoreSettings(generation=MASTER, pserver_count=2, recovery="rollback"),
        0.0,
        StoredState(declaration=declaration_in(mode)),
        QueueSettings(2, lambda _: 1),
    )
    core.apply(events.LeasesSeen({}, {0: 1, 1: 2}, 100), 0.0)
    for index, generation in ((0, 1), (1, 2)):
        core.apply(events.Answered(index, generation, AppliedRequest(plan_hash=""), LOADED), 0.0)
    core.apply(events.LeasesSeen({}, {0: 9, 1: 2}, 100), 0.0)
    core.apply(events.Answered(0, 9, AppliedRequest(plan_hash=""), LOADED), 0.0)
    return core


def test_a_process_that_must_end_gets_no_other_call() -> None:
    call = core_that_sends_pserver_1_back(Sync()).apply(events.ControlAsked(1, 2), 0.0)[-1]
    assert isinstance(call, out.ControlCall)
    assert isinstance(call.request, ReloadRequest)
    assert call.request.master_generation == MASTER


def test_a_process_that_must_reload_takes_no_part_in_a_checkpoint() -> None:
    core = core_that_sends_pserver_1_back(Async())
    core.apply(events.TimePassed(), 1.0)
    assert core.checkpointing.checkpoints.under_way is None, "it would save a state that is about to be replaced"
    core.apply(events.LeasesSeen({}, {0: 9, 1: 10}, 100), 2.0)
    core.apply(events.Answered(1, 10, AppliedRequest(plan_hash=""), LOADED), 2.0)
    core.apply(events.TimePassed(), 3.0)
    assert core.checkpointing.checkpoints.under_way is not None


def test_pservers_get_the_size_of_each_finished_epoch_once() -> None:
    bench = Bench(tasks=1, epochs=3)
    bench.serve()
    for epoch in range(2):
        bench.finish(bench.take())
        bench.now += 1.0
        sealed = [
            each for each in bench.serve(done=dict.fromkeys(range(epoch + 1), b"\x01")) if isinstance(each, SealRequest)
        ]
        assert [(each.epochs, each.open_epoch) for each in sealed] == [([(epoch, 1)], epoch + 1)]


def test_a_pserver_learns_when_the_lost_tasks_of_earlier_epochs_are_done_again() -> None:
    bench = Bench(tasks=1, epochs=3)
    bench.serve()
    bench.finish(bench.take())
    bench.now += 1.0
    bench.core.training.work.queue.reopen(0, [(0, 1)])

    def sealed(done: dict[int, bytes]) -> list[tuple[list[tuple[int, int]], int]]:
        found = [each for each in bench.serve(done=done) if isinstance(each, SealRequest)]
        return [(each.epochs, each.open_epoch) for each in found]

    assert sealed({}) == [([(0, 1)], 0)]
    assert sealed({}) == []
    bench.finish(bench.take())
    assert sealed({0: b"\x01"}) == [([(0, 1)], 1)]
    assert sealed({0: b"\x01"}) == []


def test_the_model_is_initialized_again_when_all_pservers_lack_its_values() -> None:
    bench = Bench()
    call = bench.control()
    assert isinstance(call, out.ControlCall)
    lacks = AppliedReply(summary=AppliedSummary().encode(), lacks_election=3)
    effects = bench.apply(events.Answered(0, PSERVER, AppliedRequest(plan_hash=""), lacks))
    (deletion,) = [each for each in effects if isinstance(each, out.DeleteElection)]
    assert (deletion.step.election, dict(deletion.step.generations)) == (3, {0: PSERVER})
    assert deletion.revision == bench.core.revision, "the empty set of settled pservers is stored first"
    assert bench.core.pservers.waiting_for


# --- the end ---


def done(bench: Bench) -> str:
    return str(bench.reply(bench.ask(want=1)).outcome)


def test_the_job_ends_after_a_clean_audit() -> None:
    bench = Bench(tasks=1)
    bench.serve()
    bench.finish(bench.take())
    assert done(bench) == "none_now"
    bench.now += 1.0
    bench.serve(done={0: b"\x01"})
    reply = bench.reply(bench.ask())
    assert (reply.outcome, reply.pservers) == ("epochs_done", [PSERVER])


def test_tasks_found_missing_by_an_audit_are_repeated() -> None:
    bench = Bench(tasks=1)
    bench.serve()
    bench.finish(bench.take())
    bench.now += 1.0
    bench.serve()
    assert bench.core.pservers.missing_count == 1
    assert bench.take().task == 0


def test_an_answer_older_than_repeated_work_finds_nothing_missing() -> None:
    bench = Bench(tasks=1, epochs=2)
    bench.serve()
    bench.finish(bench.take())
    bench.see({"a": A, "b": B}, {0: PSERVER + 1})
    bench.now += 1.0
    settling = bench.control(PSERVER + 1)
    assert isinstance(settling, out.ControlCall)
    bench.applied(settling, PSERVER + 1)
    bench.now += 1.0
    auditing = bench.control(PSERVER + 1)
    assert isinstance(auditing, out.ControlCall)
    assert auditing.audit is not None
    again = bench.take()
    assert again.epoch == 0
    bench.finish(again, by=PSERVER + 1)
    bench.applied(auditing, PSERVER + 1)
    assert bench.core.pservers.missing_count == 0
    bench.now += 1.0
    asked_again = bench.control(PSERVER + 1)
    assert isinstance(asked_again, out.ControlCall)
    assert asked_again.audit == auditing.audit


def test_work_that_remains_missing_ends_the_job() -> None:
    bench = Bench(tasks=1)
    bench.serve()
    for _ in range(20):
        bench.now += 1.0
        reply = bench.reply(bench.ask())
        if isinstance(reply, FlightedlError):
            break
        if reply.assignments:
            bench.finish(*reply.assignments)
        bench.serve()
    assert isinstance(reply, JobFailedError)
    assert "work that trainers have repeated several times" in str(reply)


def test_the_job_ends_after_a_last_checkpoint() -> None:
    bench = Bench(tasks=1, keeps_checkpoints=True, checkpoints=CheckpointSettings(interval_s=None, at_epoch_end=False))
    bench.serve()
    bench.apply(events.TimePassed())
    save(bench)
    bench.finish(bench.take())
    bench.now += 1.0
    bench.serve(done={0: b"\x01"})
    assert done(bench) == "none_now"
    bench.apply(events.TimePassed())
    save(bench, done={0: b"\x01"})
    assert bench.core.checkpointing.latest == 2
    assert done(bench) == "epochs_done"


def status(*, highest_version: int = 0, is_draining: bool = False) -> PserverStatusReply:
    numbers = dict.fromkeys(("lowest_version", "size_bytes", "pushes"), 0)
    return PserverStatusReply(
        index=0,
        state="serving",
        blocks=1,
        rows={},
        members=[],
        waiting_for="",
        is_draining=is_draining,
        highest_version=highest_version,
        **numbers,
    )


def save(bench: Bench, **done: Any) -> None:
    """Complete a checkpoint that has been ordered."""
    bench.serve(**done)
    number = bench.core.checkpointing.checkpoints.under_way
    assert number is not None
    effects = bench.apply(events.ManifestWritten(number, "c"))
    (move,) = [each for each in effects if isinstance(each, out.StoreWork)]
    assert isinstance(move.work, MovePointer)
    assert move.revision == bench.core.revision, "the pointer is part of the stored state"
    bench.apply(events.PointerStored(number))


# --- checkpoints ---


def test_a_checkpoint_is_made_after_the_configured_number_of_tasks() -> None:
    settings = CheckpointSettings(interval_s=None, interval_tasks=2, at_epoch_end=False)
    bench = Bench(tasks=9, keeps_checkpoints=True, checkpoints=settings)
    bench.serve()
    bench.apply(events.TimePassed())
    save(bench)
    for number in range(2):
        bench.apply(events.TimePassed())
        assert bench.core.checkpointing.checkpoints.under_way is None, f"after {number} tasks"
        bench.finish(bench.take())
    bench.apply(events.TimePassed())
    assert bench.core.checkpointing.checkpoints.under_way == 2


def test_the_manifest_is_written_when_all_pservers_have_written_their_files() -> None:
    bench = Bench(keeps_checkpoints=True)
    bench.serve()
    asking = bench.call(CheckpointRequest(wait_s=2.0))
    order = bench.control()
    assert isinstance(order, out.ControlCall)
    assert isinstance(order.request, SnapshotRequest)
    assert order.pause_s > 0, "the same request polls the progress"
    effects = bench.apply(events.Answered(0, PSERVER, order.request, written(order.request)))
    assert [each.work for each in effects if isinstance(each, out.StoreWork)] == [WriteManifest(1)]
    assert asking not in bench.answers
    bench.apply(events.ManifestWritten(1, "c"))
    bench.apply(events.PointerStored(1))
    assert bench.reply(asking).complete


def test_a_failure_to_write_the_manifest_is_reported() -> None:
    bench = Bench(keeps_checkpoints=True)
    bench.serve()
    asking = bench.call(CheckpointRequest(wait_s=2.0))
    bench.serve()
    bench.apply(events.ManifestFailed(1, "no space"))
    bench.apply(events.WaitEnded(asking))
    assert "no space" in bench.reply(asking).trouble
    assert not bench.reply(asking).complete


def test_a_job_without_a_store_keeps_no_checkpoints() -> None:
    bench = Bench()
    bench.serve()
    assert isinstance(bench.reply(bench.call(CheckpointRequest())), UsageError)
    assert "checkpoints" not in bench.core.encode()


def test_a_pserver_that_shuts_down_requests_a_checkpoint() -> None:
    settings = CheckpointSettings(interval_s=None, at_epoch_end=False)
    bench = Bench(keeps_checkpoints=True, checkpoints=settings)
    bench.serve()
    bench.apply(events.TimePassed())
    save(bench)
    for _ in range(2):
        bench.apply(events.StatusReceived([status(is_draining=True)]))
        bench.apply(events.TimePassed())
    assert bench.core.checkpointing.checkpoints.under_way == 2


# --- initial state of a successor ---


def successor_of(bench: Bench, tasks: QueueSettings) -> MasterCore:
    stored = bench.core.encode()
    state = StoredState(
        declaration=decode(stored["declaration"], JobDeclaration),
        queue=stored["queue"],
        failures=stored["failures"],
        membership=stored["membership"],
        recovery=stored["recovery"],
    )
    return MasterCore(CoreSettings(generation=MASTER + 1, pserver_count=1), 0.0, state, tasks)


def test_a_successor_continues_from_the_stored_state() -> None:
    bench = Bench(tasks=3)
    bench.serve()
    held = bench.take()
    successor = successor_of(bench, QueueSettings(3, lambda _: 1))
    successor.apply(events.LeasesSeen({"a": A}, {0: PSERVER}, 100), 0.0)
    ticket = TasksTicket(trainer="a", generation=A, want=1, wait_s=0.0)
    (answer,) = [each for each in successor.apply(events.Asked(1, ticket), 0.0) if isinstance(each, out.Answer)]
    assert [each.attempt for each in answer.reply.assignments] == [held.attempt], (
        "assigned again, since the trainer did not list it"
    )
    successor.check()


def test_trainers_that_died_without_a_master_lose_their_tasks() -> None:
    bench = Bench(tasks=1)
    bench.take()
    successor = successor_of(bench, QueueSettings(1, lambda _: 1))
    successor.apply(events.LeasesSeen({"b": B}, {}, 100), 0.0)
    ticket = TasksTicket(trainer="b", generation=B, want=1, wait_s=0.0)
    (answer,) = [each for each in successor.apply(events.Asked(1, ticket), 0.0) if isinstance(each, out.Answer)]
    assert len(answer.reply.assignments) == 1
