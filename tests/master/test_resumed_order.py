"""A job that goes on from a checkpoint may shuffle otherwise what nobody has begun, by the first who declares its data.

The trainers here read the records that they are given, as the product's do.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from flightedl.client.data.reading import batches_of
from flightedl.domain.queue.batching import record_order
from flightedl.domain.queue.drawing import SIZE_BYTES, drawn
from flightedl.domain.queue.permutation import KeyedPermutation, key_of
from flightedl.domain.trainer.feed import AssignedTask
from flightedl.errors import DeclarationError, UsageError
from flightedl.formats.chunks import chunks_to_rows
from flightedl.formats.dataset_spec import spec_of
from flightedl.formats.registry import named_format
from flightedl.master import resuming
from flightedl.master.flight import MasterFlight
from flightedl.master.recovery import read_state
from flightedl.messages.base import decode, encode
from flightedl.messages.declarations import DatasetDeclaration, EvaluationDeclaration, JobDeclaration
from flightedl.messages.tasks import Assignment, FailedTask, TasksReply, TasksTicket
from flightedl.ports import Put
from flightedl.rpc.identity import Caller
from tests.calls import call_of
from tests.support.contracts.coordinator import eventually

from .job_of_twins import KEYS, MODEL, Job, Master, PserverTwin, until_ready
from .test_resuming import resumed as resumed_from_checkpoint
from .test_resuming import saved

MakeJob = Callable[..., Job]
TASKS, RECORDS = 8, 6
FIRST = DatasetDeclaration(urls=["a.parquet"], batch_size=4, epochs=3, shuffle=True, seed=1, shuffle_bytes=SIZE_BYTES)
#: Tasks of all epochs, which the first seed has drawn.
DRAWN = drawn(np.full(TASKS, RECORDS), np.full(TASKS, 1), 4, key_of(1, 0))
#: (epoch, record) in the order in which they were read.
Records = list[tuple[int, int]]


def declared(**changes: object) -> DatasetDeclaration:
    return msgspec.structs.replace(FIRST, **changes)


def with_data(job: Job) -> Job:
    batches = pa.table({"k": range(TASKS * RECORDS)}).to_batches(max_chunksize=RECORDS)
    job.files.contents["a.parquet"] = b"".join(named_format("parquet").write(batches, batches[0].schema))
    return job


@pytest.fixture
def job(make_job: MakeJob) -> Job:
    return with_data(make_job(is_kept=False))


def begun(job: Job, dataset: DatasetDeclaration = FIRST) -> Master:
    master = job.start_master()
    master.declare(dataset)
    return master


def resumed(job: Job, dataset: DatasetDeclaration | None = None) -> Master:
    """The job as ``resuming.begin`` writes it to etcd, and the master that continues it."""
    job.end_master()
    entry = job.coordinator.get(KEYS.job)
    assert entry is not None
    declaration = resuming.former(decode(entry.value, JobDeclaration))
    job.coordinator.transact([], [Put(KEYS.job, encode(declaration))])
    master = job.start_master()
    if dataset is not None:
        master.declare(dataset)
    return master


def exchange(master: Master, generation: int, **more: object) -> tuple[TasksReply, list[AssignedTask]]:
    ticket = TasksTicket(trainer="a", generation=generation, wait_s=0.0, **more)  # type: ignore[arg-type]
    reply, chunks, _ = until_ready(lambda: master.service.tasks.exchange(ticket, threading.Event()))
    given = zip(reply.assignments, chunks, strict=True)
    return reply, [AssignedTask(msgspec.structs.replace(a, chunks=chunks_to_rows(each))) for a, each in given]


def read(job: Job, piece: AssignedTask) -> Records:
    """Return the records of a piece, as the client reads them."""
    records: Records = []
    for batch in batches_of(job.files, piece, spec_of(FIRST), schema=pa.schema({"k": pa.int64()})):
        records += [(piece.assignment.epoch, k) for k in batch.column("k").to_pylist()]
    return records


def train(job: Job, master: Master, generation: int, tasks: int = 10**9, pserver: PserverTwin | None = None) -> Records:
    """Do up to ``count`` tasks, which the pserver then has."""
    records: Records = []
    while tasks and (pieces := exchange(master, generation)[1]):
        for piece in pieces:
            records += read(job, piece)
            if pserver is not None:
                pserver.take(piece.assignment)
            master.report("a", generation, piece.assignment, by=[pserver.generation] if pserver else [])
        tasks -= 1
    return records


def order_by(seed: int | None, epoch: int, first: int = 0, end: int = TASKS) -> Records:
    """Return the records of the tasks at these positions, in order."""
    records: Records = []
    for position in range(first, end):
        task = position if seed is None else KeyedPermutation(TASKS, key_of(seed, epoch)).at(position)
        known = records_of(task)
        order = range(len(known)) if seed is None else record_order(len(known), seed, epoch, task).tolist()
        records += [(epoch, known[number]) for number in order]
    return records


def records_of(task: int) -> list[int]:
    pieces = range(DRAWN.firsts[task], [*DRAWN.firsts, len(DRAWN.chunks)][task + 1])
    firsts = [DRAWN.chunks[piece] * RECORDS + DRAWN.skipped[piece] for piece in pieces]
    return [int(first + n) for first, piece in zip(firsts, pieces, strict=True) for n in range(DRAWN.records[piece])]


def test_tasks_and_records_have_the_new_seed_from_the_next_epoch_on(job: Job) -> None:
    a = job.start_trainer("a")
    assert train(job, begun(job), a, 3) == order_by(1, 0, 0, 3)
    master = resumed(job, declared(seed=2))
    assert train(job, master, a, TASKS) == order_by(1, 0, 3) + order_by(2, 1, 0, 3)
    successor = job.start_master()
    assert train(job, successor, a) == order_by(2, 1, 3) + order_by(2, 2)


def test_a_trainer_that_ignores_parts_of_chunks_gets_none(job: Job) -> None:
    """It would train on the other parts, too."""
    a, flight = job.start_trainer("a"), MasterFlight(begun(job).service)
    call = call_of("tasks", Caller("a", "t"))
    ticket = TasksTicket(trainer="a", generation=a, wait_s=0.0)
    with pytest.raises(UsageError, match="parts of chunks, which this trainer cannot read"):
        until_ready(lambda: flight._get_tasks(encode(ticket), call))
    ticket = msgspec.structs.replace(ticket, reads_parts=True, returned=[], holding=[])
    reply = decode(until_ready(lambda: flight._ask_for_tasks(encode(ticket), call)), TasksReply)
    assert [len(each.parts) == len(each.chunks) > 1 for each in reply.assignments] == [True]


def test_shuffling_ends_with_the_epoch_and_epochs_may_change_with_it(job: Job) -> None:
    a = job.start_trainer("a")
    train(job, begun(job), a, 1)
    master = resumed(job, declared(shuffle=False, seed=5, epochs=2))
    assert train(job, master, a) == order_by(1, 0, 1) + order_by(None, 1)


def test_the_order_may_change_again_when_the_job_is_resumed_again(job: Job) -> None:
    a = job.start_trainer("a")
    records = train(job, begun(job), a, 2)
    records += train(job, resumed(job, declared(seed=2)), a, TASKS)
    records += train(job, resumed(job, declared(seed=3)), a)
    assert records == order_by(1, 0) + order_by(2, 1) + order_by(3, 2)


def test_an_assigned_task_is_read_with_the_seed_of_its_assignment(job: Job) -> None:
    a = job.start_trainer("a")
    _, (piece,) = exchange(begun(job), a)
    master = resumed(job, declared(seed=2))
    _, (again,) = exchange(master, a)
    assert again.assignment == piece.assignment, "assigned again"
    assert read(job, again) == order_by(1, 0, 0, 1)


def test_a_repeated_epoch_keeps_its_seed(job: Job) -> None:
    """A restored pserver lacks two epochs: the one before the change, and the one after it."""
    a = job.start_trainer("a")
    train(job, begun(job), a, 1)
    master = resumed(job, declared(seed=2))
    train(job, master, a)
    pserver = job.start_pserver(0)
    eventually(lambda: master.is_settled(pserver))
    assert train(job, master, a, pserver=pserver) == order_by(1, 0) + order_by(2, 1) + order_by(2, 2)


def test_the_order_may_change_after_restoring_only_a_checkpoint(make_job: MakeJob) -> None:
    job = with_data(make_job())
    pserver = job.start_pserver(0)
    master = begun(job)
    eventually(lambda: master.is_settled(pserver))
    a = job.start_trainer("a")
    assert train(job, master, a, 3, pserver) == order_by(1, 0, 0, 3)
    saved(job, master)
    assert train(job, master, a, 3, pserver) == order_by(1, 0, 3, 6), "lost with etcd and all processes"
    job.end_master()
    other = with_data(resumed_from_checkpoint(job, make_job))
    successor = other.start_master()
    until_ready(lambda: successor.service.declaring.dataset(declared(seed=2)))
    successor.service.declaring.model(MODEL)
    pserver = other.start_pserver(0, {0: {given // RECORDS for _, given in order_by(1, 0, 0, 3)}})
    eventually(lambda: successor.is_settled(pserver))
    b = other.start_trainer("a")
    assert train(other, successor, b, pserver=pserver) == order_by(1, 0, 3) + order_by(2, 1) + order_by(2, 2)


def test_the_same_seed_changes_nothing(job: Job) -> None:
    a = job.start_trainer("a")
    train(job, begun(job), a, 2)
    before = job.coordinator.get(KEYS.task_queues)
    master = resumed(job, FIRST)
    after = job.coordinator.get(KEYS.task_queues)
    assert before is not None
    assert after is not None
    assert before.value == after.value
    assert train(job, master, a) == order_by(1, 0, 2) + order_by(1, 1) + order_by(1, 2)


def test_a_new_order_is_stored_before_it_is_answered(job: Job) -> None:
    a = job.start_trainer("a")
    train(job, begun(job), a, 2)
    resumed(job, declared(seed=2))
    stored = read_state(job.coordinator, KEYS).stored
    assert stored.declaration.dataset is not None
    assert stored.declaration.dataset.declaration.seed == 2
    assert stored.queue is not None
    assert json.loads(stored.queue)["seeds"] == [[0, 1], [1, 2]]


def test_a_later_declaration_of_the_former_seed_is_refused(job: Job) -> None:
    begun(job)
    master = resumed(job, declared(seed=2))
    for each in (master, job.start_master()):
        with pytest.raises(DeclarationError, match=r"seed is 2, not 1\. Declare the same"):
            each.service.declaring.dataset(FIRST)
        assert each.service.declaring.dataset(declared(seed=2)).declaration.seed == 2


@pytest.mark.parametrize(
    ("changes", "text"),
    [({"seed": 2}, r"seed is 1, not 2\. Declare the same"), ({"shuffle": False}, "shuffle is True, not False")],
)
def test_a_job_that_was_not_resumed_keeps_its_order(job: Job, changes: dict[str, object], text: str) -> None:
    master = begun(job)
    with pytest.raises(DeclarationError, match=text):
        master.service.declaring.dataset(declared(**changes))


def test_the_order_is_unchanged_if_the_epochs_are_refused(job: Job) -> None:
    a = job.start_trainer("a")
    train(job, begun(job), a, TASKS + 1)
    master = resumed(job)
    with pytest.raises(UsageError, match="is in epoch 2"):
        master.service.declaring.dataset(declared(seed=2, epochs=1))
    assert master.service.declaring.dataset(FIRST).declaration == FIRST
    assert train(job, master, a) == order_by(1, 1, 1) + order_by(1, 2)


def test_evaluations_are_read_in_stored_order(job: Job) -> None:
    a = job.start_trainer("a")
    begun(job)
    master = resumed(job, declared(seed=2))
    dataset = DatasetDeclaration(urls=["a.parquet"], batch_size=4)
    until_ready(lambda: master.service.tasks.declare_evaluation(EvaluationDeclaration(name="e", dataset=dataset)))
    given: list[Assignment] = []
    records: Records = []
    while pieces := exchange(master, a, evaluation="e", holding=[each.attempt for each in given])[1]:
        records += read(job, pieces[0])
        given += [each.assignment for each in pieces]
        master.report("a", a, given[-1], by=[], evaluation="e")
    assert records == [(0, k) for k in range(TASKS * RECORDS)]


def test_failed_work_is_located_by_the_seed_of_its_epoch(job: Job) -> None:
    a = job.start_trainer("a")
    master = begun(job)
    while not (failed := master.service.status().failed):
        given = exchange(master, a)[1][0].assignment
        report = FailedTask(
            epoch=0, position=given.position, attempt=given.attempt, error="broken", batch=given.first_batch
        )
        master.work("a", a, failed=[report], want=0)
    read_then = [k for _, k in order_by(1, 0) if k in records_of(failed[0].task)][:4]
    places = [each.first_record + number for each in failed[0].ranges for number in range(each.records)]
    assert places == sorted(read_then)
    again = resumed(job, declared(seed=2)).service.status().failed
    assert [each.ranges for each in again] == [each.ranges for each in failed]
