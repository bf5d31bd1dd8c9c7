"""A former job of the same name in etcd: finished or stopped, with checkpoints here or elsewhere."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from flightedl.coordination.keys import JobKeys
from flightedl.domain.checkpoint.manifest import manifest_name
from flightedl.domain.checkpoint.pointer import FORMAT, PointerRecord
from flightedl.domain.master.stored import state_in
from flightedl.domain.queue.storage import VERSION, DispatchDocument
from flightedl.domain.queue.tasks import TaskQueue
from flightedl.domain.queue.values import QueueSettings, TaskGiven
from flightedl.errors import NotFoundError, UsageError
from flightedl.launch.former import FormerJob, forget, former_job, mark_resumed, require_startable
from flightedl.messages.base import decode, encode
from flightedl.messages.declarations import (
    DatasetDeclaration,
    DeclaredDataset,
    DeclaredModel,
    JobDeclaration,
    ModelDeclaration,
)
from flightedl.ports import Delete, Put, TransactionResult
from tests.support.clock import FakeClock
from tests.support.memory import MemoryCoordinator, MemoryStorage

KEYS = JobKeys("demo")
FINISHED = FormerJob(name="demo", finished_epochs=3, checkpoint=7)
STOPPED = FormerJob(name="demo", checkpoint=7)


def queue(epoch: int, *, runs: list[tuple[int, int, int, int]]) -> bytes:
    return msgspec.json.encode(
        DispatchDocument(
            version=VERSION,
            seeds=[(0, None)],
            revision=1,
            epoch=epoch,
            cursor=0,
            next_attempt=9,
            sizes=[(0, 0, 4)],
            growth_ended=True,
            runs=runs,
        )
    )


def stored(dispatch: bytes) -> MemoryCoordinator:
    coordinator = MemoryCoordinator(FakeClock())
    declared = DatasetDeclaration(urls=["a"], batch_size=1, epochs=3)
    dataset = DeclaredDataset(index_hash="", task_count=4, record_count=4, schema="", declaration=declared)
    pointer = PointerRecord(format=FORMAT, next_number=8, latest=(7, "00"), rejected=[])
    coordinator.transact(
        [],
        [
            Put(KEYS.job, encode(JobDeclaration(dataset=dataset))),
            Put(KEYS.task_queues, dispatch),
            Put(KEYS.checkpoint_latest, msgspec.json.encode(pointer)),
            Put(JobKeys("other").job, b"{}"),
        ],
    )
    return coordinator


def with_checkpoint(number: int) -> MemoryStorage:
    storage = MemoryStorage()
    storage.publish(manifest_name(number), [b"{}"])
    return storage


def test_a_name_that_etcd_does_not_know_is_free() -> None:
    assert former_job(MemoryCoordinator(FakeClock()), KEYS) is None
    require_startable(None, "e:1", None, resume=False)


def test_a_job_whose_epochs_are_all_done_has_finished() -> None:
    assert former_job(stored(queue(3, runs=[])), KEYS) == FINISHED


@pytest.mark.parametrize("dispatch", [queue(2, runs=[]), queue(3, runs=[(1, 0, 2, 0)])], ids=["epochs", "reopened"])
def test_a_job_with_open_tasks_was_stopped(dispatch: bytes) -> None:
    assert former_job(stored(dispatch), KEYS) == STOPPED


def test_a_job_that_is_being_started_does_not_exist_yet() -> None:
    coordinator = MemoryCoordinator(FakeClock())
    coordinator.transact([], [Put(KEYS.launcher, b"{}", coordinator.grant(5.0).id)])
    assert former_job(coordinator, KEYS) is None


@pytest.mark.parametrize("key", [KEYS.master_lock, KEYS.pserver(0), KEYS.trainer("t")])
def test_a_job_with_processes_is_not_forgotten(key: str) -> None:
    coordinator = stored(queue(3, runs=[]))
    coordinator.transact([], [Put(key, b"{}", coordinator.grant(5.0).id)])
    with pytest.raises(UsageError, match="job demo has just been started"):
        forget(coordinator, KEYS)
    assert former_job(coordinator, KEYS) == FINISHED


@pytest.mark.parametrize("storage", [None, MemoryStorage(), with_checkpoint(7)], ids=["none", "elsewhere", "here"])
def test_a_finished_job_is_reported_with_the_ways_to_continue(storage: MemoryStorage | None) -> None:
    with pytest.raises(UsageError) as caught:
        require_startable(FINISHED, "e:1", storage, resume=False)
    assert "job demo has finished, with 3 epochs: --resume continues" in str(caught.value)
    assert "`flightedl forget demo --etcd e:1`" in str(caught.value)
    assert "--job" in str(caught.value)


@pytest.mark.parametrize("resume", [False, True])
def test_a_job_that_finished_without_checkpoints_cannot_be_resumed(resume: bool) -> None:
    finished = FormerJob(name="demo", finished_epochs=1)
    with pytest.raises(UsageError, match="has finished, with 1 epoch: it has no checkpoint; `flightedl forget"):
        require_startable(finished, "e:1", with_checkpoint(7), resume=resume)


def test_a_resumed_job_requires_its_checkpoints() -> None:
    require_startable(FINISHED, "e:1", with_checkpoint(7), resume=True)
    require_startable(STOPPED, "e:1", with_checkpoint(7), resume=False)
    with pytest.raises(UsageError, match="its newest checkpoint is c-7, but memory://storage does not have it"):
        require_startable(STOPPED, "e:1", with_checkpoint(6), resume=False)
    with pytest.raises(UsageError, match="c-7, but no --checkpoint is given: pass the --checkpoint"):
        require_startable(STOPPED, "e:1", None, resume=False)


def test_a_job_stopped_without_checkpoints_continues() -> None:
    require_startable(FormerJob(name="demo"), "e:1", None, resume=False)


def set_aside(*, has_model: bool) -> MemoryCoordinator:
    """Return etcd with the state of a job that is done, but for one batch."""
    tasks = TaskQueue(QueueSettings(1, lambda _: 1, attempts_limit=1, confirmations=0))
    given = tasks.request("a", 0.0)
    assert isinstance(given, TaskGiven)
    tasks.fail("a", 0, 0, given.assignment.attempt, 0.0, error="gone", fault="store")
    dispatch, failures = tasks.encode_parts()
    coordinator = stored(dispatch)
    declaration = decode(coordinator.get(KEYS.job).value, JobDeclaration)  # type: ignore[union-attr]
    dataset = msgspec.structs.replace(
        declaration.dataset, declaration=DatasetDeclaration(urls=["a"], batch_size=1, epochs=1)
    )
    model = DeclaredModel(declaration=ModelDeclaration(parameters=[], optimizer={}, mode={}), pservers=1, plan_hash="")
    declared = JobDeclaration(dataset=dataset, model=model if has_model else None)
    puts = [Put(KEYS.job, encode(declared)), Delete(KEYS.checkpoint_latest), Put(KEYS.task_failures, failures)]
    coordinator.transact([], puts)
    return coordinator


@pytest.mark.parametrize("has_model", [False, True])
def test_a_job_without_a_model_that_is_done_can_retry_what_was_set_aside(has_model: bool) -> None:
    former = former_job(set_aside(has_model=has_model), KEYS)
    assert former is not None
    assert (former.is_over, former.can_retry) == (True, not has_model)
    with pytest.raises(UsageError, match="no checkpoint" if has_model else "--resume retries the batches that were"):
        require_startable(former, "e:1", None, resume=False)
    if former.can_retry:
        require_startable(former, "e:1", None, resume=True)


def test_the_first_master_of_a_resumed_job_returns_what_was_set_aside() -> None:
    coordinator = set_aside(has_model=False)

    def is_resumed() -> bool:
        found = {name: coordinator.get(key) for name, key in KEYS.of_state.items()}
        return state_in({name: (each.value, each.mod_revision) for name, each in found.items() if each}).is_resumed

    assert not is_resumed()
    before = coordinator.get(KEYS.task_queues)
    mark_resumed(coordinator, KEYS)
    assert is_resumed()
    entry = coordinator.get(KEYS.task_queues)
    assert before is not None
    assert entry is not None
    assert entry.value == before.value
    coordinator.transact([], [Put(KEYS.task_queues, entry.value), Put(KEYS.master_lock, b"")])
    mark_resumed(coordinator, KEYS)
    assert not is_resumed(), "a master is running"


def test_a_job_ended_by_its_script_is_over_but_can_be_resumed() -> None:
    coordinator = stored(queue(1, runs=[]))
    coordinator.transact([], [Put(KEYS.stopped, b"{}")])
    former = former_job(coordinator, KEYS)
    assert former is not None
    assert former.is_over
    with pytest.raises(UsageError, match="job demo was stopped by its script: --resume continues"):
        require_startable(former, "e:1", with_checkpoint(7), resume=False)
    require_startable(former, "e:1", with_checkpoint(7), resume=True)


def test_forgetting_a_job_deletes_only_its_own_keys() -> None:
    coordinator = stored(queue(3, runs=[]))
    coordinator.transact([], [Put(KEYS.once + "save", b"t", coordinator.grant(5.0).id)])
    coordinator.transact([], [Put(KEYS.launcher, b"{}", coordinator.grant(5.0).id)])
    assert forget(coordinator, KEYS) == 4
    assert coordinator.get(KEYS.launcher) is not None, "a launcher may forget the former job and start a new one"
    assert former_job(coordinator, KEYS) is None
    assert coordinator.get(JobKeys("other").job) is not None
    with pytest.raises(NotFoundError, match="etcd has no job named demo: it has other"):
        forget(coordinator, KEYS)


def test_a_restored_etcd_may_name_a_deleted_checkpoint() -> None:
    """With --resume the master detects this; checkpoints in another storage are still reported."""
    storage = with_checkpoint(9)
    require_startable(STOPPED, "e:1", storage, resume=True)
    for wrong, resume in ((storage, False), (with_checkpoint(6), True), (MemoryStorage(), True)):
        with pytest.raises(UsageError, match="newest checkpoint is c-7"):
            require_startable(STOPPED, "e:1", wrong, resume=resume)


@pytest.mark.parametrize("change", ["a master starts", "a key is written again"])
def test_a_job_that_starts_while_it_is_forgotten_keeps_its_state(change: str) -> None:
    coordinator = stored(queue(3, runs=[]))
    transact = coordinator.transact

    def start_first(*arguments: Any) -> TransactionResult:
        coordinator.transact = transact  # type: ignore[method-assign]
        if change == "a master starts":
            transact([], [Put(KEYS.master_lock, b"{}", coordinator.grant(60.0).id)])
        else:
            transact([], [Delete(KEYS.task_queues)])
            transact([], [Put(KEYS.task_queues, b"of a new job")])
        return transact(*arguments)

    coordinator.transact = start_first  # type: ignore[method-assign]
    with pytest.raises(UsageError, match="has just been started"):
        forget(coordinator, KEYS)
    assert coordinator.get(KEYS.job) is not None
