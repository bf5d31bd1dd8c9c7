"""Effects of leases and of time on the master's core."""

from __future__ import annotations

import pytest

from flightedl.domain.consistency.modes import Sync
from flightedl.domain.master import effects as out
from flightedl.domain.master import events
from flightedl.domain.master.core import MasterCore
from flightedl.domain.master.state import CoreSettings, StoredState
from flightedl.domain.queue.values import Expired, QueueSettings
from flightedl.errors import NotFoundError, NotReadyError
from flightedl.messages.tasks import DroppedTasksRequest, FailedTask, FailedTasksRequest, TasksTicket

from .test_core import MASTER, PSERVER, A, B, Bench, declaration_in


def test_time_only_affects_expired_pieces() -> None:
    bench = Bench(tasks=1)
    bench.serve()
    bench.take()
    before = bench.core.revision
    bench.now = 1.0
    bench.apply(events.TimePassed())
    assert bench.core.revision == before
    bench.now = 10_000.0
    bench.apply(events.TimePassed())
    assert bench.core.revision > before
    assert bench.take("b", B).task == 0
    empty = MasterCore(CoreSettings(generation=MASTER, pserver_count=1, keeps_checkpoints=False), 0.0)
    empty.apply(events.TimePassed(), 1.0)
    assert empty.revision == 0


@pytest.mark.parametrize("is_settled", [False, True], ids=["loading", "serving"])
def test_clocks_of_tasks_are_stopped_while_a_pserver_is_down_or_loading(is_settled: bool) -> None:
    bench = Bench(tasks=1)
    bench.serve()
    held = bench.take()
    bench.see({"a": A, "b": B}, {})
    bench.apply(events.TimePassed())
    bench.see({"a": A, "b": B}, {0: PSERVER + 1})
    bench.now = 1.0
    if is_settled:
        bench.serve(PSERVER + 1)
        bench.apply(events.TimePassed())
    bench.now = 10_000.0
    news = [each.effect for each in bench.apply(events.TimePassed()) if isinstance(each, out.QueueNews)]
    assert [isinstance(each, Expired) for each in news] == ([True] if is_settled else [])
    assert bench.core.work is not None
    assert bench.core.work.queue.is_current("a", held.attempt, A) is not is_settled


def test_a_job_without_a_model_does_not_wait_for_pservers() -> None:
    settings = CoreSettings(generation=MASTER, pserver_count=1, keeps_checkpoints=False)
    core = MasterCore(settings, 0.0, StoredState(), QueueSettings(1, lambda _: 1))
    core.apply(events.LeasesSeen({"a": A}, {}, 100), 0.0)
    core.apply(events.Asked(1, TasksTicket(trainer="a", generation=A)), 0.0)
    core.apply(events.TimePassed(), 1.0)
    assert any(isinstance(each, out.QueueNews) for each in core.apply(events.TimePassed(), 10_000.0))


def test_progress_within_a_first_task_prevents_its_expiry() -> None:
    bench = Bench(tasks=1)
    bench.serve()
    bench.take()
    for bench.now in (600.0, 1200.0, 1800.0):
        assert bench.apply(events.TimePassed(("a",))) == []
    bench.now = 2701.0
    assert any(isinstance(each, out.QueueNews) for each in bench.apply(events.TimePassed()))


def test_the_first_leases_change_nothing_if_no_trainer_has_died() -> None:
    core = MasterCore(
        CoreSettings(generation=MASTER, pserver_count=1, keeps_checkpoints=False),
        0.0,
        StoredState(),
        QueueSettings(2, lambda _: 1),
    )
    core.apply(events.LeasesSeen({"a": A}, {}, 100), 0.0)
    assert core.revision == 0


def test_the_same_leases_again_change_nothing() -> None:
    bench = Bench()
    before = bench.core.revision
    assert bench.see({"a": A, "b": B}, {0: PSERVER}) == []
    assert bench.core.revision == before


def test_members_that_died_without_a_master_are_removed() -> None:
    bench = Bench()
    bench.serve()
    for trainer, generation in (("a", A), ("b", B)):
        bench.take(trainer, generation)
        bench.join(trainer, generation)
    stored = bench.core.encode()
    successor = MasterCore(
        CoreSettings(generation=MASTER + 1, pserver_count=1, keeps_checkpoints=False),
        0.0,
        StoredState(
            declaration=declaration_in(Sync()),
            queue=stored["queue"],
            failures=stored["failures"],
            membership=stored["membership"],
            recovery=stored["recovery"],
        ),
        QueueSettings(2, lambda _: 1),
    )
    successor.apply(events.LeasesSeen({"b": B}, {0: PSERVER}, 100), 0.0)
    assert successor.members is not None
    assert [member.trainer for member in successor.members.membership.members] == ["b"]


def test_a_departed_or_excess_pserver_gets_no_view() -> None:
    bench = Bench()
    bench.serve()
    members = bench.core.members
    assert members is not None
    assert members.membership.is_quiet
    bench.see({"a": A, "b": B}, {0: PSERVER, 1: PSERVER + 1})
    assert members.membership.is_quiet
    assert isinstance(bench.control(), out.NoCallDue)
    bench.see({"a": A, "b": B}, {})
    assert not members.membership.is_quiet


def test_all_trainers_begin_a_deterministic_epoch_at_one_round() -> None:
    bench = Bench(Sync(deterministic=True), tasks=4, trainer_count=2)
    bench.serve()
    first = bench.reply(bench.ask("a", A, want=5))
    assert (first.assignments, first.outcome, first.retry_after_s) == ([], "none_now", 0.5)
    bench.ask("b", B, want=0)
    assert not bench.reply(bench.ask("a", A)).assignments, "b has only reported"
    assert [each.task for each in bench.reply(bench.ask("b", B, want=5)).assignments] == [0]
    assert [each.task for each in bench.reply(bench.ask("a", A, want=5)).assignments] == [1]
    joining = bench.join("a", A)
    bench.serve()
    assert joining not in bench.answers, "b has a task, too"
    both = [joining, bench.join("b", B)]
    bench.serve()
    assert all(bench.reply(call).member for call in both)
    members = bench.core.members
    assert members is not None
    assert len({member.first_round for member in members.membership.members}) == 1


@pytest.mark.parametrize("is_dropped", [True, False])
def test_quarantined_batches_are_dropped_or_repeated(is_dropped: bool) -> None:
    bench = Bench(tasks=1)
    request = DroppedTasksRequest(task=0) if is_dropped else FailedTasksRequest(task=0)
    assert isinstance(bench.reply(bench.call(request)), NotFoundError)
    for _ in range(5):
        held = bench.take()
        failed = FailedTask(epoch=0, position=held.position, attempt=held.attempt, error="broken")
        bench.ask(failed=[failed], want=0)
    before = bench.core.revision
    assert bench.reply(bench.call(request)).batches == 1
    assert bench.core.revision > before
    assert bench.core.work is not None
    counts = bench.core.work.queue.counts()
    assert (counts.failed_batches, counts.dropped_batches) == (0, int(is_dropped))
    empty = MasterCore(CoreSettings(generation=MASTER, pserver_count=1), 0.0)
    (answer,) = empty.apply(events.Asked(1, request), 0.0)
    assert isinstance(answer, out.Answer)
    assert isinstance(answer.reply, NotReadyError)
