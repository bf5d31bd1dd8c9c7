"""The job is reported as done only when no finished work can be lost any more."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from flightedl.domain.checkpoint.manifest import candidates
from flightedl.domain.checkpoint.values import CheckpointSettings
from flightedl.messages.tasks import FailedTask
from tests.support.contracts.coordinator import eventually

from .job_of_twins import Job, Master, PserverTwin

MakeJob = Callable[..., Job]


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = CheckpointSettings(retry_floor_s=0.01, retry_ceiling_s=0.01)
    monkeypatch.setattr("flightedl.master.state.settings_of", lambda _: settings)


def trained(job: Job) -> tuple[Master, list[PserverTwin], int]:
    """Return a job whose tasks are all done but not saved, with the generation of its only trainer."""
    pservers = [job.start_pserver(index) for index in range(job.pserver_count)]
    master = job.start_master()
    master.declare()
    a = job.start_trainer("a")

    def is_begun() -> bool:
        master.service.tick()
        with master.state.lock:
            return job.storage is None or master.state.core.checkpointing.latest == 1

    eventually(is_begun)
    assert len(master.do_all("a", a, pservers)) == 4
    return master, pservers, a


def newest(job: Job) -> int:
    """Return the newest checkpoint in the store."""
    assert job.storage is not None
    return candidates(job.storage.files)[0]


def is_gone(master: Master, index: int) -> bool:
    with master.state.lock:
        return index not in master.state.core.pservers.present


def test_the_job_is_reported_as_done_when_the_last_checkpoint_is_complete(make_job: MakeJob) -> None:
    job = make_job()
    master, _, a = trained(job)
    assert newest(job) == 1
    assert not master.says_done("a", a)
    eventually(lambda: master.says_done("a", a))
    assert newest(job) > 1


def test_the_report_of_the_end_names_the_complete_processes(make_job: MakeJob) -> None:
    job = make_job(2)
    master, pservers, a = trained(job)
    before = master.ask("a", a)
    assert (before.outcome, before.is_ending, before.pservers) == ("none_now", True, [])
    eventually(lambda: master.says_done("a", a))
    assert master.ask("a", a).pservers == [each.generation for each in pservers]
    job.end_pserver(1)
    eventually(lambda: is_gone(master, 1))
    back = job.start_pserver(1, {0: range(4)})
    eventually(lambda: master.says_done("a", a))
    after = master.ask("a", a)
    assert (after.is_ending, after.pservers) == (False, [pservers[0].generation, back.generation])


def test_a_trainer_gets_tasks_while_lost_ones_are_repeated(make_job: MakeJob) -> None:
    job = make_job(2)
    master, _, a = trained(job)
    eventually(lambda: master.says_done("a", a))
    job.end_pserver(1)
    eventually(lambda: is_gone(master, 1))
    back = job.start_pserver(1, {0: range(3)})
    eventually(lambda: master.is_settled(back))
    reply = master.ask("a", a, want=0)
    assert (reply.outcome, reply.is_ending, reply.pservers) == ("none_now", False, [])


def test_the_store_may_fail_briefly_at_the_end(make_job: MakeJob) -> None:
    job = make_job()
    master, (pserver,), a = trained(job)
    pserver.store_trouble = "no space"
    eventually(lambda: master.says_done("a", a) or master.state.core.checkpointing.checkpoints.trouble)
    pserver.store_trouble = ""
    eventually(lambda: master.says_done("a", a))
    assert newest(job) > 1


def test_a_store_that_fails_repeatedly_is_not_awaited(make_job: MakeJob) -> None:
    job = make_job()
    master, (pserver,), a = trained(job)
    pserver.store_trouble = "no space"
    eventually(lambda: master.says_done("a", a))
    assert newest(job) == 1
    assert "no space" in master.state.core.checkpointing.checkpoints.trouble


def test_a_pserver_that_dies_during_the_last_checkpoint_is_awaited(make_job: MakeJob) -> None:
    """It loses its updates since the last checkpoint, but the store has not failed."""
    job = make_job()
    master, (pserver,), a = trained(job)
    pserver.silent.add("snapshot")
    eventually(lambda: master.says_done("a", a) or pserver.calls["snapshot"] > 2)
    job.end_pserver(0)
    eventually(lambda: is_gone(master, 0))
    for _ in range(5):
        assert not master.says_done("a", a)
    job.start_pserver(0, {0: range(4)})
    eventually(lambda: master.says_done("a", a))
    assert newest(job) > 1


@pytest.mark.parametrize("is_kept", [True, False])
def test_the_job_is_not_done_while_a_pserver_is_down_or_has_not_answered(make_job: MakeJob, is_kept: bool) -> None:
    job = make_job(2, is_kept=is_kept)
    master, pservers, a = trained(job)
    eventually(lambda: master.says_done("a", a))
    job.end_pserver(1)
    eventually(lambda: is_gone(master, 1))
    assert not master.says_done("a", a)
    back = job.start_pserver(1, {0: range(3)}, "applied")
    eventually(lambda: back.calls["applied"] > 1)
    assert not master.says_done("a", a)
    back.silent.clear()
    eventually(lambda: master.is_settled(back))
    assert not master.says_done("a", a), "a task that it lacks must be repeated"
    (again,) = master.do_all("a", a, [pservers[0], back])
    assert again.task == 3
    eventually(lambda: master.says_done("a", a))


def test_a_job_without_missing_tasks_repeats_nothing(make_job: MakeJob) -> None:
    master, _, a = trained(make_job(2))
    eventually(lambda: master.says_done("a", a))
    assert master.service.status().missing_tasks == 0


def test_reported_but_missing_tasks_are_repeated_before_the_end(make_job: MakeJob) -> None:
    job = make_job(2)
    first, second = (job.start_pserver(index) for index in range(2))
    master = job.start_master()
    master.declare()
    a = job.start_trainer("a")
    eventually(lambda: master.is_settled(first) and master.is_settled(second))
    (lost,) = eventually(lambda: master.work("a", a, want=1).assignments)
    first.take(lost)
    master.report("a", a, lost, by=[first.generation, second.generation])
    done: list[int] = []

    def is_over() -> bool:
        done.extend(each.task for each in master.do_all("a", a, [first, second]))
        return master.says_done("a", a)

    eventually(is_over)
    assert sorted(done) == [0, 1, 2, 3], "the task that the second pserver lacks was repeated, and no other"
    assert master.service.status().missing_tasks == 1


@pytest.mark.parametrize("is_kept", [True, False])
def test_the_job_is_not_done_while_a_round_may_be_open(make_job: MakeJob, is_kept: bool) -> None:
    """The last batches wait in it until each pserver knows that no member follows."""
    job = make_job(is_kept=is_kept)
    (pserver,) = [job.start_pserver(0)]
    master = job.start_master()
    master.declare()
    a = job.start_trainer("a")
    given = master.work("a", a, want=4).assignments
    master.join_at_last("a", a)
    given += master.work("a", a, want=4, holding=[each.attempt for each in given]).assignments
    assert pserver.views[-1].members
    pserver.silent.add("view")
    heard = pserver.calls["view"]
    while given:
        for each in given:
            pserver.take(each)
        master.report("a", a, *given, by=[pserver.generation])
        given = master.work("a", a, want=4).assignments
    eventually(lambda: pserver.calls["view"] > heard + 1)
    assert master.state.core.work.queue.is_done
    for _ in range(5):
        assert not master.says_done("a", a)
    pserver.silent.clear()
    eventually(lambda: master.says_done("a", a))
    assert not pserver.views[-1].members


def test_a_master_that_shuts_down_waits_for_a_last_checkpoint_unless_a_pserver_has_ended(make_job: MakeJob) -> None:
    job = make_job()
    master, (pserver,), _ = trained(job)
    master.service.drain(5.0)
    assert newest(job) == 2
    pserver.store_trouble = "no space"
    master.service.drain(60.0)
    assert newest(job) == 2
    assert msgspec.json.decode(job.storage.read("c-2/manifest.json"))["body"]["number"] == 2  # type: ignore[union-attr]


def test_a_task_with_a_quarantined_batch_is_not_missing(make_job: MakeJob) -> None:
    """A pserver reports only complete tasks; the rest of this one would be repeated until the job had failed."""
    job = make_job(is_kept=False)
    pserver = job.start_pserver(0)
    master = job.start_master(attempts_limit=1)
    master.declare()
    a = job.start_trainer("a")
    while given := master.work("a", a, want=1).assignments:
        (each,) = given
        if each.task == 0 and each.first_batch == 0:
            report = FailedTask(epoch=0, position=each.position, attempt=each.attempt, error="bad", batch=0)
            master.work("a", a, want=0, failed=[report])
            continue
        if each.task:
            pserver.take(each)
        master.report("a", a, each, by=[pserver.generation])
    assert pserver.done == {0: {1, 2, 3}}
    eventually(lambda: master.says_done("a", a))
    status = master.service.status()
    assert (status.missing_tasks, len(status.failed)) == (0, 1)
