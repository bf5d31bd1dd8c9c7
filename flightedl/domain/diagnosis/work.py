"""Rules about data, tasks and checkpoints."""

from __future__ import annotations

from collections.abc import Iterator

from flightedl.domain.diagnosis.findings import Cause, Finding, Severity
from flightedl.domain.diagnosis.observations import Observations, is_full
from flightedl.messages.status import StatusReply

BROKEN, HARMFUL, NOTE = Severity

#: A piece that takes so many times longer than tasks do on average, and so long at least.
_SLOW_FACTOR = 4.0
_SLOW_S = 20.0
#: What a storage should at least take, in bytes a second, and how long a file has to take to tell.
_STORE_BYTES_PER_S = 20e6
_STORE_S = 5.0


def work(seen: Observations) -> Iterator[Finding]:
    """Data and tasks."""
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
            f"{status.missing_tasks} tasks counted as done and were missing in a pserver; they are done again",
            "The result is right. But this is a fault of flightedl, of a client in another language, or of a machine: "
            "please report it, with the master's log.",
        )


def _failures(status: StatusReply) -> Iterator[Finding]:
    for piece in status.failed[:5]:
        place = f"{piece.url}, records {piece.first_record} to {piece.first_record + piece.records - 1}"
        yield Finding(
            Cause.POISON_RECORD,
            HARMFUL,
            "job",
            f"{place} failed {piece.attempts} times and was set aside: {piece.error}",
            "Look at these records, or at what the script does with them; then `flightedl tasks retry`, or "
            "`flightedl tasks drop` to go on without them.",
        )
    for raised in status.raised[:5]:
        if raised.repeated:
            continue_ = "at some batches again and again" if raised.batches > 1 else "at one batch, again and again"
            yield Finding(
                Cause.SCRIPT_RAISES,
                HARMFUL,
                "job",
                f"the script raises {continue_}, at {raised.place}: {raised.error}",
                "Work that fails is narrowed down to the batch that is at fault; if every batch fails, the script is.",
            )


def _slow_files(status: StatusReply) -> Iterator[Finding]:
    for piece in status.running:
        if status.task_s and piece.running_s > max(_SLOW_S, _SLOW_FACTOR * status.task_s):
            yield Finding(
                Cause.SLOW_FILE,
                HARMFUL,
                piece.trainer,
                f"task {piece.task} of {piece.url or 'the data'} is worked on for {piece.running_s:.0f} s, tasks take "
                f"{status.task_s:.1f} s on average",
                "If it is always the same file, it is larger, further away or damaged: `flightedl dataset inspect` "
                "shows its chunks; `flightedl dataset split` makes smaller ones.",
            )
            return


def _timed_out(seen: Observations) -> Iterator[Finding]:
    expired = [event for event in seen.events if event.kind == "work_expired"]
    if expired and seen.status is not None and seen.status.state != "done":
        who, reason = expired[-1].who, expired[-1].text.rpartition(": because ")[2]
        count = f" (it has taken back {len(expired)})" if len(expired) > 1 else ""
        yield Finding(
            Cause.TASK_TIMED_OUT,
            HARMFUL,
            who,
            f"the master took a task back from {who}, because {reason}{count}",
            "Batches of it that were done count; another trainer does the others. If tasks may take so long, raise the "
            "setting that is named, or make smaller tasks with `flightedl dataset split`.",
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
            f"files of the dataset cannot be used: {status.dataset_alarm}",
            "Put them back as they were; what was read from them counts.",
        )
    if status.is_growing and tasks.total and not tasks.todo and not tasks.pending:
        yield Finding(
            Cause.DATA_RUN_OUT,
            NOTE,
            "job",
            "all data that there is has been trained, and the dataset may grow: everybody waits for files",
            "Add files, or end it with a file named _END beside them, or with data.end_growth().",
        )
    elif 0 < tasks.todo + tasks.pending < len(status.trainers):
        idle = sum(not trainer.holding for trainer in status.trainers)
        if idle:
            yield Finding(
                Cause.TOO_FEW_TASKS,
                NOTE,
                "job",
                f"{idle} of {len(status.trainers)} trainers have nothing to do: {tasks.todo + tasks.pending} of the "
                f"epoch's {tasks.total} tasks are left",
                "At the end of an epoch that is so. If an epoch has few tasks, cut the data into more and smaller "
                "chunks (`flightedl dataset split`).",
            )


def _tables(status: StatusReply) -> Iterator[Finding]:
    for table in status.tables:
        if table.refused:
            yield Finding(
                Cause.TABLE_FULL,
                HARMFUL,
                "job",
                f"there is no memory for more rows of table {table.name!r}, which has {table.rows:,}: "
                f"{table.refused:,} gradients of new ones were dropped",
                "Have more pservers, give them more memory (--table-memory-mb), or let rows go that are not used "
                "(evict=). Rows that are there are trained on.",
            )


def checkpoints(seen: Observations) -> Iterator[Finding]:
    """The checkpoints' storage."""
    status = seen.status
    alarm = "" if status is None else status.checkpoint_alarm
    if alarm and is_full(alarm):
        yield Finding(
            Cause.STORE_FULL,
            HARMFUL,
            "job",
            f"the checkpoints' storage is full: {alarm}",
            "Make room, or keep fewer (--checkpoint-keep). Training goes on; a pserver that dies goes back further.",
        )
    elif alarm:
        yield Finding(
            Cause.STORE_FAILS,
            HARMFUL,
            "job",
            f"checkpoints cannot be completed: {alarm}",
            "All servers need the same --checkpoint URL, and access to it. It is tried again by itself.",
        )
    for index, reply in sorted(seen.replies.items()):
        if reply.written_s > _STORE_S and reply.written_bytes < _STORE_BYTES_PER_S * reply.written_s:
            rate = reply.written_bytes / reply.written_s / 1e6
            yield Finding(
                Cause.STORE_SLOW,
                HARMFUL,
                f"pserver-{index}",
                f"pserver-{index} took {reply.written_s:.0f} s to write {reply.written_bytes / 1e6:,.0f} MB of a "
                f"checkpoint ({rate:.1f} MB/s)",
                "Its disk or object store is slow or shared with others; training does not wait for it, recovery does.",
            )
