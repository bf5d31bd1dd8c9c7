"""A new master and an etcd that has gone back: it refuses, or resumes in a life with newer generations."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from flightedl.adapters.clock import SystemClock
from flightedl.coordination.keeper import HeldKey
from flightedl.coordination.keys import JobKeys
from flightedl.coordination.lives import JobCoordinator
from flightedl.coordination.records import HistoryRecord
from flightedl.domain.checkpoint.manifest import Manifest, manifest_name
from flightedl.domain.checkpoint.pointer import FORMAT, PointerRecord
from flightedl.domain.recovery.store_history import LIFE_REVISIONS, Sighting
from flightedl.errors import RolledBackError, UnavailableError
from flightedl.master import continuity
from flightedl.ports import Delete, Put
from tests.support.memory import MemoryCoordinator, MemoryStorage

KEYS = JobKeys("demo")


class Job:
    """The state and the checkpoints of a job, and masters that begin on them."""

    def __init__(self) -> None:
        self.store = MemoryCoordinator(SystemClock())
        self.storage = MemoryStorage()
        self.held: list[HeldKey] = []

    def begin(self, *, resume: bool = False, storage: bool = True) -> bool:
        """Begin like a master, with its own connection."""
        coordinator = JobCoordinator(self.store.another(), KEYS)
        held = HeldKey.claim(coordinator, SystemClock(), KEYS.master_lock, b"", 60.0)
        assert held is not None
        self.held.append(held)
        try:
            chosen = self.storage if storage else None
            return continuity.settle(chosen, coordinator, held, KEYS, resume=resume)
        finally:
            held.release()

    def reach(self, number: int) -> None:
        """Make this checkpoint, and change the job's state afterwards."""
        coordinator = JobCoordinator(self.store.another(), KEYS)
        self._point(coordinator, number - 1, number + 1)
        self.write_manifest(coordinator, number)
        self._point(coordinator, number, number + 1)
        coordinator.transact([], [Put(KEYS.task_queues, b"queue")])

    def write_manifest(self, coordinator: JobCoordinator, number: int) -> None:
        """Write a manifest like a master that has observed this revision of etcd."""
        manifest = Manifest(
            job="demo",
            number=number,
            plan_hash="p",
            pserver_count=0,
            cut_for=1,
            round=None,
            created_s=0.0,
            shards=(),
            etcd=coordinator.sighting(),
        )
        self.storage.publish(manifest_name(number), [manifest.encode()])

    def _point(self, coordinator: JobCoordinator, latest: int, next_number: int) -> None:
        pointer = PointerRecord(FORMAT, next_number, (latest, "x") if latest else None, [])
        coordinator.transact(
            [],
            [
                Put(KEYS.job, b"{}"),
                Put(KEYS.checkpoint_latest, msgspec.json.encode(pointer)),
                Put(KEYS.ps_desired, b"2"),
            ],
        )

    def record(self) -> HistoryRecord | None:
        entry = self.store.another().get(KEYS.history)
        return None if entry is None else msgspec.json.decode(entry.value, type=HistoryRecord)

    def stored(self) -> set[str]:
        return {entry.key for entry in self.store.another().list("").entries}


@pytest.fixture
def job() -> Job:
    return Job()


def test_a_job_records_its_etcd_and_continues_on_it(job: Job) -> None:
    assert job.begin()
    seen = job.store.another()
    seen.get("")
    sighting = seen.sighting()
    assert sighting is not None
    assert job.record() == HistoryRecord(life=0, cluster=sighting.cluster)
    job.reach(1)
    assert job.begin()
    job.reach(2)
    assert job.begin(resume=True)
    assert KEYS.task_queues in job.stored()


def test_a_late_manifest_of_a_deposed_master_does_not_prove_a_lost_state(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert job.begin()
    job.reach(1)
    job.reach(2)
    deposed = JobCoordinator(job.store.another(), KEYS)
    list_files = job.storage.list

    def finished_meanwhile(prefix: str) -> object:
        deposed.transact([], [Put(KEYS.ps_desired, b"3")])
        job.write_manifest(deposed, 2)
        return list_files(prefix)

    monkeypatch.setattr(job.storage, "list", finished_meanwhile)
    assert job.begin()
    assert KEYS.task_queues in job.stored()


def older(job: Job) -> None:
    """The backup is from before the newest checkpoint began."""
    backup = job.store.backup()
    job.reach(3)
    job.store.restore(backup)


def slightly_older(job: Job) -> None:
    """The backup is from between the beginning and the end of the newest checkpoint."""
    job.reach(3)
    backup = job.store.backup()
    job.storage.files.pop(manifest_name(3))
    job.reach(3)
    manifest = Manifest.decode(job.storage.files[manifest_name(3)])
    assert manifest.etcd is not None
    later = msgspec.structs.replace(manifest, etcd=Sighting(manifest.etcd.cluster, manifest.etcd.revision + 1000))
    job.storage.files[manifest_name(3)] = later.encode()
    job.store.restore(backup)


def another_cluster(job: Job) -> None:
    """A snapshot was restored, under another cluster id."""
    job.store.restore(job.store.backup(), cluster="2" * 16)


@pytest.mark.parametrize("happens", [older, slightly_older, another_cluster])
def test_a_rolled_back_state_is_refused_until_the_job_is_resumed(job: Job, happens: Callable[[Job], None]) -> None:
    assert job.begin()
    job.reach(1)
    job.reach(2)
    happens(job)
    with pytest.raises(RolledBackError, match=r"continue from checkpoint [23] with --resume"):
        job.begin()
    refused = job.held[-1].generation
    assert not job.begin(resume=True)
    # The life has begun; only the number of pservers is left of the old state.
    assert job.stored() == {KEYS.history, KEYS.ps_desired}
    assert job.begin(resume=True)
    assert job.held[-1].generation > LIFE_REVISIONS > refused
    job.reach(7)
    assert job.begin()


def test_an_etcd_that_was_lost_is_resumed_in_a_new_life(job: Job) -> None:
    assert job.begin()
    job.reach(1)
    for _ in range(2):
        newest = max(held.generation for held in job.held)
        job.store.restore()
        assert not job.begin(resume=True)
        assert job.begin(resume=True)
        assert job.held[-1].generation > newest
        number = 1 + max(int(name.split("/")[0][2:]) for name in job.storage.files)
        job.reach(number)


def test_resuming_on_the_same_etcd_needs_no_new_life(job: Job) -> None:
    assert job.begin()
    job.reach(1)
    coordinator = job.store.another()
    for entry in coordinator.list("").entries:
        coordinator.transact([], [Delete(entry.key)])
    assert job.begin(resume=True)


def test_without_checkpoints_only_another_cluster_is_detected(job: Job) -> None:
    assert job.begin(storage=False)
    coordinator = JobCoordinator(job.store.another(), KEYS)
    coordinator.transact([], [Put(KEYS.job, b"{}")])
    backup = job.store.backup()
    assert job.begin(storage=False)
    job.store.restore(backup, cluster="2" * 16)
    for resume in (False, True):
        with pytest.raises(RolledBackError, match="flightedl forget"):
            job.begin(storage=False, resume=resume)


def test_unreadable_checkpoints_do_not_stop_a_master(job: Job) -> None:
    assert job.begin()
    job.reach(1)
    job.storage.plan.fail_at("list", 1, UnavailableError("down"))
    assert job.begin()


def test_the_successor_of_a_master_that_dies_while_beginning_a_life_detects_it_again(job: Job) -> None:
    assert job.begin()
    job.reach(1)
    older(job)
    # Everything but the last transaction was done.
    coordinator = job.store.another()
    coordinator.transact([], [Delete(KEYS.task_queues)])
    with pytest.raises(RolledBackError):
        job.begin()
    assert not job.begin(resume=True)
    assert job.begin(resume=True)


def test_nothing_of_a_former_life_is_left_except_what_processes_hold(job: Job) -> None:
    assert job.begin()
    job.reach(1)
    coordinator = JobCoordinator(job.store.another(), KEYS)
    lease = coordinator.grant(60.0)
    names = [KEYS.job, KEYS.init_params, KEYS.placement, KEYS.moving, KEYS.arrival(0), KEYS.once + "report"]
    coordinator.transact([], [Put(name, b"{}") for name in names])
    coordinator.transact([], [Put(KEYS.trainer("t"), b"{}", lease.id), Put(KEYS.ps_desired, b"2")])
    older(job)
    coordinator = JobCoordinator(job.store.another(), KEYS)
    coordinator.transact([], [Put(name, b"{}") for name in names])
    live = coordinator.grant(60.0)
    coordinator.transact([], [Put(KEYS.trainer("u"), b"{}", live.id)])
    assert not job.begin(resume=True)
    left = {entry.key for entry in job.store.list("").entries}
    assert not left & {*names, KEYS.checkpoint_latest, KEYS.task_queues}
    assert KEYS.trainer("u") in left
