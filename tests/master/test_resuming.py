"""A job resumed from its checkpoints if etcd has no state for it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from flightedl.adapters.clock import SystemClock
from flightedl.config import Resume
from flightedl.coordination.keeper import HeldKey
from flightedl.domain.checkpoint.manifest import candidates, manifest_name
from flightedl.domain.checkpoint.pointer import decode_pointer
from flightedl.errors import UsageError
from flightedl.master import resuming
from flightedl.messages.base import decode
from flightedl.messages.checkpoints import CheckpointRequest
from flightedl.messages.declarations import JobDeclaration
from flightedl.ports import Put
from tests.support.contracts.coordinator import eventually

from .job_of_twins import KEYS, TASKS, Job, Master, PserverTwin

MakeJob = Callable[..., Job]


def saved(job: Job, master: Master) -> int:
    """Complete a checkpoint of the current state; return its number."""
    first = master.service.ask(CheckpointRequest(reason="a test", wait_s=0.0))

    def is_complete() -> bool:
        master.service.tick()
        request = CheckpointRequest(ticket=first.ticket, reason="a test", wait_s=0.0)
        return master.service.ask(request).complete

    eventually(is_complete)
    assert job.storage is not None
    return candidates(job.storage.files)[0]


def resumed(job: Job, make_job: MakeJob, resume: Resume = Resume.ALWAYS) -> Job:
    """The same storage with another etcd, which contains the newest checkpoint's state."""
    other = make_job(job.pserver_count)
    other.storage = job.storage
    held = HeldKey.claim(other.coordinator, SystemClock(), KEYS.master_lock, b"", 20.0)
    assert held is not None
    try:
        resuming.begin(job.storage, other.coordinator, held, KEYS, job.pserver_count, resume=resume)
    finally:
        held.release()
    return other


def rejected(job: Job) -> list[int]:
    """Return the stored numbers of unusable checkpoints."""
    entry = job.coordinator.get(KEYS.checkpoint_latest)
    return [] if entry is None else list(decode_pointer(entry.value).rejected)


def begun(job: Job) -> tuple[Master, PserverTwin]:
    pserver = job.start_pserver(0)
    master = job.start_master()
    master.declare()
    eventually(lambda: master.is_settled(pserver))
    return master, pserver


def test_a_job_that_resumes_if_possible_starts_without_a_checkpoint(make_job: MakeJob) -> None:
    job = make_job()
    for resume in (Resume.NEVER, Resume.AUTO):
        assert resumed(job, make_job, resume).coordinator.get(KEYS.job) is None
    with pytest.raises(UsageError, match=r"no checkpoint from which job .* can resume"):
        resumed(job, make_job, Resume.ALWAYS)
    master, _ = begun(job)
    saved(job, master)
    for resume in (Resume.ALWAYS, Resume.AUTO):
        assert resumed(job, make_job, resume).coordinator.get(KEYS.job) is not None
    with pytest.raises(UsageError, match="Add --resume to continue from them"):
        resumed(job, make_job, Resume.NEVER)


def test_a_job_without_checkpoints_resumes_only_from_its_state_in_etcd(make_job: MakeJob) -> None:
    job = make_job()
    job.storage = None
    for resume in (Resume.NEVER, Resume.AUTO):
        assert resumed(job, make_job, resume).coordinator.get(KEYS.job) is None
    with pytest.raises(UsageError, match=r"etcd has no state of job .*: pass its --checkpoint, or run w"):
        resumed(job, make_job, Resume.ALWAYS)


def test_trainers_that_held_tasks_when_the_job_was_stopped_are_not_blamed(make_job: MakeJob) -> None:
    job = make_job()
    master, pserver = begun(job)
    a = job.start_trainer("a")
    given = master.work("a", a, want=2).assignments
    assert len(given) == 2
    saved(job, master)
    job.end_master()
    other = resumed(job, make_job)
    successor = other.start_master()
    assert successor.state.core.work.queue.holders() == {}
    assert successor.state.core.work.queue.waiting.runs == [(0, 0, 2, 0)], "they never failed"
    back = other.start_pserver(0, pserver.done)
    b = other.start_trainer("b")
    assert len(successor.do_all("b", b, [back])) == TASKS


def test_unreadable_checkpoints_are_not_counted_by_retention(make_job: MakeJob) -> None:
    job = make_job()
    master, _ = begun(job)
    for _ in range(3):
        newest = saved(job, master)
    job.end_master()
    assert job.storage is not None
    job.storage.files[manifest_name(newest)] = b"torn"
    other = resumed(job, make_job)
    assert rejected(other) == [newest]
    successor = other.start_master()
    successor.declare()
    back = other.start_pserver(0)
    eventually(lambda: successor.is_settled(back))
    kept = {saved(other, successor) for _ in range(2)}
    eventually(lambda: newest - 2 not in candidates(job.storage.files))  # type: ignore[union-attr]
    assert {newest - 1, *kept} < set(candidates(job.storage.files)), "three that can be read"


def test_checkpoints_that_a_pserver_could_not_load_are_stored(make_job: MakeJob) -> None:
    job = make_job()
    master, pserver = begun(job)
    newest = saved(job, master)
    job.end_pserver(0)
    back = job.start_pserver(0, pserver.done, is_ready=False)
    back.rejected = [newest]
    back.is_ready = True
    eventually(lambda: rejected(job) == [newest])
    successor = job.start_master()
    saved(job, successor)
    assert rejected(job) == [newest]


def test_a_placement_is_newer_each_time_that_a_job_is_resumed(make_job: MakeJob) -> None:
    job = make_job(2)
    versions = []
    for _ in range(3):
        pservers = [job.start_pserver(index) for index in range(2)]
        master = job.start_master()
        master.declare()
        for pserver in pservers:
            eventually(partial(master.is_settled, pserver))
        saved(job, master)
        job.end_master()
        job = resumed(job, make_job)
        entry = job.coordinator.get(KEYS.job)
        assert entry is not None
        model = decode(entry.value, JobDeclaration).model
        assert model is not None
        assert model.placement is not None
        versions.append(model.placement.version)
    assert versions == sorted(set(versions))


def test_arrivals_of_a_master_that_died_while_it_resumed_are_deleted(make_job: MakeJob) -> None:
    job = make_job()
    master, _ = begun(job)
    saved(job, master)
    job.end_master()
    other = make_job(job.pserver_count)
    other.coordinator.transact([], [Put(KEYS.arrival(number), b"{}") for number in range(3)])
    held = HeldKey.claim(other.coordinator, SystemClock(), KEYS.master_lock, b"", 20.0)
    assert held is not None
    resuming.begin(job.storage, other.coordinator, held, KEYS, job.pserver_count, resume=Resume.ALWAYS)
    held.release()
    assert not other.coordinator.list(KEYS.arrivals).entries
