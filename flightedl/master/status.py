"""Compute the job's status from the master's state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from msgspec.structs import replace

from flightedl.coordination.directory import Directory
from flightedl.coordination.records import ServerRecord, TrainerRecord
from flightedl.domain.consistency.membership import Membership
from flightedl.domain.groups.incarnation import Group
from flightedl.domain.groups.lanes import EpochOrder
from flightedl.domain.groups.plan import Order, Piece
from flightedl.domain.master.core import MasterCore
from flightedl.domain.master.members import waiting_for_mode
from flightedl.domain.queue.tasks import TaskQueue
from flightedl.domain.topics import is_topic
from flightedl.formats.following import MARKER
from flightedl.formats.mixed_layout import group_data
from flightedl.formats.record_places import ranges_of
from flightedl.master.failures import failed_piece, located
from flightedl.master.indexing import IndexedDataset
from flightedl.master.progress import JobProgress, TrainerProgress
from flightedl.master.state import JobState
from flightedl.messages.base import decode
from flightedl.messages.feed import Acknowledgement
from flightedl.messages.groups import Suspect
from flightedl.messages.status import (
    ConsumerStatus,
    FailedPiece,
    GroupStatus,
    PserverFigures,
    PserverStatusReply,
    RunningPiece,
    ServerStatus,
    StatusReply,
    TableCounts,
    TaskCounts,
    TrainerStatus,
)
from flightedl.process import machine

#: Maximum number of running pieces that the status lists.
_RUNNING_COUNT = 5


def consumer_status(
    name: str, record: ServerRecord, acknowledged: Sequence[bytes | None], wall_time: float
) -> ConsumerStatus:
    """Return the status of a consumer, from the values of its keys for all pservers; None if there is no value."""
    known = [decode(value, Acknowledgement) for value in acknowledged if value is not None]
    behind, age_s = None, None
    if known and len(known) == len(acknowledged) and all(each.as_of_s for each in known):
        behind = max(each.behind for each in known)
        age_s = max(wall_time - min(each.as_of_s for each in known), 0.0)
    return ConsumerStatus(name=name, host=record.name, pid=record.pid, behind=behind, age_s=age_s)


def describe(
    job: str,
    state: JobState,
    directory: Directory,
    pservers: Sequence[PserverStatusReply | None],
    indexing: str,
    refused_calls: Mapping[str, int],
    consumers: list[ConsumerStatus],
) -> StatusReply:
    """Return the reply to ``status``. The caller holds the state's lock.

    Args:
        job: Name of the job.
        state: State of the job.
        directory: The records of the job's processes in etcd.
        pservers: The latest status of each pserver.
        indexing: The progress of indexing; empty if nothing is being indexed.
        refused_calls: Number of the master's refused calls, by error code.
        consumers: The consumers of the model.
    """
    core, indexed, progress, now = state.core, state.dataset, state.progress, state.clock.now()
    queue = None if core.work is None else core.work.queue
    membership = None if core.members is None else core.members.membership
    records, standbys, trainers = directory.pservers(), directory.standbys(), directory.trainers()
    master = directory.master()
    waiting_for = _waiting_for(core, queue, records, indexing)
    is_done = core.is_over and core.ending.may_end
    dataset, model = core.declaration.dataset, core.declaration.model
    reply = StatusReply(
        job=job,
        state="done" if is_done else "waiting" if waiting_for else "training",
        waiting_for="" if is_done else waiting_for,
        epochs=None if dataset is None else dataset.declaration.epochs,
        raised=progress.raised(now),
        evaluations=core.evaluations.status(),
        batches=progress.batches,
        idle_batches=progress.idle_batches,
        own_models=progress.own_models,
        skipped_records=progress.skipped_records,
        skipped_parts=0 if indexed is None else len(indexed.layout.index.skipped),
        profile=dict(progress.profile),
        records_per_s=progress.records_per_s(now),
        metrics=progress.metrics(now),
        master=None
        if master is None
        else ServerStatus(
            index=0,
            address=master.address,
            generation=master.generation,
            state="serving",
            pid=master.pid,
            refused_calls=dict(refused_calls),
            facts=machine.host_facts(),
        ),
        pservers=[
            _server(index, records[index], standbys.get(index), pservers[index], membership)
            for index in sorted(records)
            if index < core.pservers.count
        ],
        pservers_desired=core.pservers.count,
        trainers=[
            _trainer(trainers.get(name, TrainerRecord(id=name)), generation, membership, queue, progress, now, pservers)
            for name, generation in sorted(core.trainers.items())
        ],
        mode="" if model is None else str(model.present_mode.get("kind", "")),
        local_steps=1 if dataset is None else dataset.declaration.local_steps,
        mode_settings={} if model is None else model.present_mode,
        mode_change="" if membership is None else _mode_change(membership),
        plan_hash="" if model is None else model.plan_hash,
        placement=0 if model is None or model.placement is None else model.placement.version,
        scaling=None if (change := core.moves.reply()).is_done else change,
        tables=_tables(pservers),
        consumers=consumers,
        checkpoint=f"c-{core.checkpointing.latest}" if core.checkpointing.latest else "",
        checkpoint_age_s=core.checkpointing.age_s(now),
        missing_tasks=core.pservers.missing_count,
        is_stopped=core.training.is_stopped,
        unfinished=core.ending.unfinished,
        stopped_by="" if core.training.stop is None else core.training.stop.who,
        stop_reason="" if core.training.stop is None else core.training.stop.reason,
        dataset_alarm=state.dataset_alarm,
        names_left_out=list(state.names_left_out or (() if indexed is None else indexed.layout.index.left_out)),
        left_out=core.declaration.left_out,
        checkpoint_alarm=core.checkpointing.checkpoints.trouble,
        reports={} if core.work is None else dict(core.work.reports),
        events=dict(state.journal.counts),
    )
    return reply if queue is None else _with_queue(reply, core, queue, indexed, now)


def _with_queue(
    reply: StatusReply, core: MasterCore, queue: TaskQueue, indexed: IndexedDataset | None, now: float
) -> StatusReply:
    reply = replace(
        reply,
        epoch=queue.epoch,
        tasks=msgspec.convert(queue.counts(), TaskCounts, from_attributes=True),
        in_doubt=queue.blame.in_doubt,
        given_up=queue.blame.ended,
        is_growing=queue.is_growing,
        task_s=queue.average_s or 0.0,
    )
    if indexed is None:
        return reply
    reply = replace(
        reply,
        failed=[failed_piece(each, indexed, queue.seed_of(each.epoch)) for each in queue.failed.details],
        records=records_trained(queue, indexed),
        running=_running(queue, indexed, now),
    )
    return _with_group(reply, core.group, queue, indexed) if core.group.has_started else reply


def _with_group(reply: StatusReply, group: Group, queue: TaskQueue, indexed: IndexedDataset) -> StatusReply:
    """Return the status with the group's progress instead of the queue's, because the queue assigns no tasks."""
    record, total = group.record, indexed.layout.record_count
    places = [each.at for each in group.places.values()]
    epochs = reply.epochs or 1
    at = epochs * total if group.is_done and not reply.is_stopped else min(places) if len(places) == record.size else 0
    epoch = min(at // max(total, 1), epochs)
    done = reply.tasks.total if epoch == epochs else (at - epoch * total) * reply.tasks.total // max(total, 1)
    failed = [piece for each in record.convicted for piece in _convicted(each, queue, indexed)]
    return replace(
        reply,
        epoch=epoch,
        records=at,
        tasks=TaskCounts(total=reply.tasks.total, done=done, todo=reply.tasks.total - done),
        failed=failed,
        group=GroupStatus(phase=record.phase, ranks=record.size, starts=record.starts, incarnation=record.incarnation),
    )


def _convicted(convicted: Suspect, queue: TaskQueue, indexed: IndexedDataset) -> list[FailedPiece]:
    more = {"attempts": convicted.deaths, "trainer": "", "error": convicted.error, "first_batch": 0, "end_batch": 0}
    index, found = indexed.layout.index, []
    for epoch, lanes, window, *piece in convicted.pieces:
        data = group_data(index, indexed.reply.declaration, queue.seed_of(epoch))
        ranges = ranges_of(index, EpochOrder(data, epoch, Order(lanes, window)), [Piece(*piece)])
        found.append(located(ranges, epoch=epoch, task=piece[0], **more))
    return found


def _mode_change(membership: Membership) -> str:
    """Return a description of a pending change of the mode; empty for the job's first mode."""
    return waiting_for_mode(membership) if membership.switch_round else ""


def _waiting_for(core: MasterCore, queue: TaskQueue | None, records: Mapping[int, ServerRecord], indexing: str) -> str:
    desired = core.pservers.count
    if missing := [index for index in range(desired) if index not in records]:
        return f"{len(missing)} of {desired} pservers"
    if reason := indexing or core.pservers.waiting_for or core.pservers.refusal:
        return reason
    if not core.trainers:
        return "trainers"
    if queue is not None and (data := queue.blame.waits_for()):
        return data
    if queue is not None and queue.is_growing:
        counts = queue.counts()
        if not counts.todo and not counts.pending:
            declared = core.declaration.dataset
            if declared is not None and is_topic(*declared.declaration.urls):
                return "new messages, or a trainer that calls data.end()"
            return f"new files, or a file {MARKER} in the same directory, which marks the dataset as complete"
    return "" if core.declaration.dataset is not None else "a trainer to declare the dataset"


def records_trained(queue: TaskQueue, dataset: IndexedDataset) -> int:
    """Return the number of records that have been trained on, excluding quarantined and dropped batches.

    Within an epoch, the result grows in proportion to the tasks completed. A failed batch counts as a full one.
    """
    counts, records = queue.counts(), dataset.layout.record_count
    in_epoch = 0 if queue.is_done or not counts.total else records * (counts.done + counts.failed) // counts.total
    failed = (counts.failed_batches + counts.dropped_batches) * dataset.layout.batch_size
    failed //= dataset.layout.steps_per_batch
    return max(queue.epoch * records + in_epoch - failed, 0)


def _server(
    index: int,
    record: ServerRecord,
    standby: ServerRecord | None,
    said: PserverStatusReply | None,
    membership: Membership | None,
) -> ServerStatus:
    found = ServerStatus(
        index=index,
        address=record.address,
        generation=record.generation,
        state="not reached",
        pid=record.pid,
        process=record.process,
        standby="" if standby is None else standby.address,
    )
    if said is None:
        return found
    return replace(
        found,
        state=said.state if not said.waiting_for else f"waiting for {said.waiting_for}",
        waits_for=[]
        if membership is None
        else sorted(each.trainer for each in membership.members if each.member_id in said.waits_for),
        table_rows=sum(table.rows for table in said.tables),
        table_bytes=sum(table.size_bytes for table in said.tables),
        **{name: getattr(said, name) for name in PserverFigures.__struct_fields__},
    )


def _trainer(
    record: TrainerRecord,
    generation: int,
    membership: Membership | None,
    queue: TaskQueue | None,
    progress: JobProgress,
    now: float,
    pservers: Sequence[PserverStatusReply | None],
) -> TrainerStatus:
    member = 0 if membership is None else membership.member_id_of(record.id) or 0
    staleness = [said.staleness[member] for said in pservers if said is not None and member in said.staleness]
    shares = [said.shares_memory[member] for said in pservers if said is not None and member in said.shares_memory]
    said = progress.trainers.get(record.id, TrainerProgress(heard_at=now))
    return TrainerStatus(
        trainer=record.id,
        generation=generation,
        name=record.name,
        host=record.host or said.host,
        pid=record.pid or said.pid,
        member=member,
        holding=0 if queue is None else queue.held_count(record.id),
        records=said.records,
        waiting_for=said.waiting_for,
        silent_s=now - said.heard_at,
        batch_s=said.batch_s,
        profile=dict(said.profile),
        doing=said.doing,
        starting_s=said.starting_s and said.starting_s + now - said.heard_at,
        staleness=max(staleness, default=None),
        pservers=len(shares),
        shared_pservers=sum(shares),
        facts=said.facts,
    )


def _running(queue: TaskQueue, indexed: IndexedDataset, now: float) -> list[RunningPiece]:
    return [
        RunningPiece(
            trainer=trainer,
            epoch=piece.epoch,
            task=task,
            first_batch=piece.first_batch,
            end_batch=piece.end_batch,
            failures=piece.failures,
            running_s=running_s,
            url=next((chunk.url for chunk in indexed.layout.chunks_of(task)), ""),
        )
        for trainer, piece, task, running_s in queue.longest_running(_RUNNING_COUNT, now)
    ]


def _tables(pservers: Sequence[PserverStatusReply | None]) -> list[TableCounts]:
    found: dict[str, TableCounts] = {}
    for counts in (counts for said in pservers if said is not None for counts in said.tables):
        found[counts.name] = found[counts.name].plus(counts) if counts.name in found else counts
    return list(found.values())
