"""Rules about data, tasks and checkpoints."""

from __future__ import annotations

from collections.abc import Iterator

from flightedl.domain.diagnosis.findings import Cause, Finding, Severity
from flightedl.domain.diagnosis.observations import Observations, is_full
from flightedl.messages.status import StatusReply

BROKEN, HARMFUL, NOTE = Severity

#: A task counts as slow if it takes at least this many seconds and this many times as long as the average task.
_SLOW_FACTOR = 4.0
_SLOW_S = 20.0
#: A storage counts as slow below this rate. Files written in less than this many seconds are ignored.
_STORE_BYTES_PER_S = 20e6
_STORE_S = 5.0


def work(seen: Observations) -> Iterator[Finding]:
    """Check data, tasks and tables."""
    status = seen.status
    if status is None:
        return
    yield from _failures(status)
    yield from _slow_files(status)
    yield from _timed_out(seen)
    yield from _data(status)
    yield from _tables(status)
    if status.missing_tasks:
        yield Finding(
            Cause.WORK_WAS_MISSING,
            HARMFUL,
            "job",
            f"{status.missing_tasks} tasks counted as done, but a pserver lacked them; they are repeated",
            "The result is correct. But flightedl, a client in another language or a machine is at fault: please "
            "report it with the master's log.",
        )


def _failures(status: StatusReply) -> Iterator[Finding]:
    for piece in status.failed[:5]:
        place = f"{piece.url}, records {piece.first_record} to {piece.first_record + piece.records - 1}"
        yield Finding(
            Cause.POISON_RECORD,
            HARMFUL,
            "job",
            f"{place} failed {piece.attempts} times and were quarantined: {piece.error}",
            "Inspect these records and how the script handles them. Then run `flightedl tasks retry`, or `flightedl "
            "tasks drop` to continue without them.",
        )
    for raised in status.raised[:5]:
        if raised.repeated:
            batches = "some batches" if raised.batches > 1 else "one batch"
            yield Finding(
                Cause.SCRIPT_RAISES,
                HARMFUL,
                "job",
                f"the script fails repeatedly on {batches}, at {raised.place}: {raised.error}",
                "Wait until the master has found the batch at fault. If every batch fails, correct the script.",
            )


def _slow_files(status: StatusReply) -> Iterator[Finding]:
    for piece in status.running:
        if status.task_s and piece.running_s > max(_SLOW_S, _SLOW_FACTOR * status.task_s):
            yield Finding(
                Cause.SLOW_FILE,
                HARMFUL,
                piece.trainer,
                f"task {piece.task} of {piece.url or 'the data'} has taken {piece.running_s:.0f} s; tasks take "
                f"{status.task_s:.1f} s on average",
                "If it is always the same file, the file is large, distant or damaged. `flightedl dataset inspect` "
                "shows its chunks; `flightedl dataset split` makes smaller files.",
            )
            return


def _timed_out(seen: Observations) -> Iterator[Finding]:
    expired = [event for event in seen.events if event.kind == "work_expired"]
    if expired and seen.status is not None and seen.status.state != "done":
        who, reason = expired[-1].who, expired[-1].text.rpartition(": because ")[2]
        count = f" ({len(expired)} tasks so far)" if len(expired) > 1 else ""
        yield Finding(
            Cause.TASK_TIMED_OUT,
            HARMFUL,
            who,
            f"the master revoked a task of {who} because {reason}{count}",
            "Its finished batches count, and another trainer gets the others. If tasks may take this long, raise the "
            "named setting, or make smaller tasks with `flightedl dataset split`.",
        )


def _data(status: StatusReply) -> Iterator[Finding]:
    tasks = status.tasks
    if status.state == "done":
        ended = f"{status.stopped_by} stopped it: {status.stop_reason}" if status.is_stopped else "all epochs are done"
        yield Finding(Cause.JOB_DONE, NOTE, "job", ended)
        return
    if status.dataset_alarm:
        yield Finding(
            Cause.DATA_MISSING,
            HARMFUL,
            "job",
            f"files of the dataset are unusable: {status.dataset_alarm}",
            "Restore the files. Batches that were already read from them count.",
        )
    if status.is_growing and tasks.total and not tasks.todo and not tasks.pending:
        yield Finding(
            Cause.DATA_RUN_OUT,
            NOTE,
            "job",
            "all data has been trained, and the trainers are waiting for new files of the growing dataset",
            "Add files, or end the growth with a file named _END in the same directory or with data.end().",
        )
    elif 0 < tasks.todo + tasks.pending < len(status.trainers):
        idle = sum(not trainer.holding for trainer in status.trainers)
        if idle:
            yield Finding(
                Cause.TOO_FEW_TASKS,
                NOTE,
                "job",
                f"{idle} of {len(status.trainers)} trainers are idle: {tasks.todo + tasks.pending} of the epoch's "
                f"{tasks.total} tasks are left",
                "This is normal at the end of an epoch. If epochs have few tasks, split the data into more chunks "
                "(`flightedl dataset split`).",
            )


def _tables(status: StatusReply) -> Iterator[Finding]:
    for table in status.tables:
        if table.refused:
            yield Finding(
                Cause.TABLE_FULL,
                HARMFUL,
                "job",
                f"table {table.name!r} has no memory for more than its {table.rows:,} rows: {table.refused:,} "
                "gradients of new rows were dropped",
                "Use more pservers, give them more memory (--table-memory-mb), or evict unused rows (evict=). Existing "
                "rows are still trained.",
            )


def checkpoints(seen: Observations) -> Iterator[Finding]:
    """Check the checkpoint storage."""
    status = seen.status
    alarm = "" if status is None else status.checkpoint_alarm
    if alarm and is_full(alarm):
        yield Finding(
            Cause.STORE_FULL,
            HARMFUL,
            "job",
            f"the checkpoint storage is full: {alarm}",
            "Free some space, or keep fewer checkpoints (--checkpoint-keep). A pserver that dies now loses more work.",
        )
    elif alarm:
        yield Finding(
            Cause.STORE_FAILS,
            HARMFUL,
            "job",
            f"cannot complete checkpoints: {alarm}",
            "Give all servers the same --checkpoint URL and access to it. The master retries.",
        )
    for index, reply in sorted(seen.replies.items()):
        if reply.written_s > _STORE_S and reply.written_bytes < _STORE_BYTES_PER_S * reply.written_s:
            rate = reply.written_bytes / reply.written_s / 1e6
            yield Finding(
                Cause.STORE_SLOW,
                HARMFUL,
                seen.pserver(index),
                f"{seen.pserver(index)} took {reply.written_s:.0f} s to write {reply.written_bytes / 1e6:,.0f} MB of a "
                f"checkpoint ({rate:.1f} MB/s)",
                "Its disk or object store is slow or shared. Training does not wait for it, but recovery does.",
            )
