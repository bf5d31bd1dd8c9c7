"""What servers say of themselves, for people and for ``flightedl status --json``, which prints it as it is."""

from __future__ import annotations

from typing import Any

from flightedl.messages.base import Reply


class ServerStatus(Reply, frozen=True, kw_only=True):
    """One server as the master sees it."""

    index: int
    address: str
    generation: int
    state: str
    blocks: int = 0
    #: Lowest and highest version among its blocks.
    lowest_version: int = 0
    highest_version: int = 0
    size_bytes: int = 0
    pid: int = 0
    #: Error code -> calls that the server refused since it began, as far as it was asked.
    refused_calls: dict[str, int] = {}


class TrainerStatus(Reply, frozen=True, kw_only=True):
    """One trainer as the master sees it."""

    trainer: str
    generation: int
    #: What its launcher calls it; empty: nobody does.
    name: str = ""
    host: str = ""
    pid: int = 0
    member: int = 0
    holding: int = 0
    records: int = 0
    waiting_for: str = ""


class TaskCounts(Reply, frozen=True, kw_only=True):
    """Tasks of the current epoch by state."""

    todo: int = 0
    pending: int = 0
    done: int = 0
    failed: int = 0
    total: int = 0
    copies: int = 0
    #: Handed out since the job began, whole tasks and parts.
    attempts: int = 0
    #: Quarantined batches of all epochs that are still listed; quarantined pieces that are not listed any more;
    #: batches that somebody let go.
    failed_batches: int = 0
    forgotten: int = 0
    dropped_batches: int = 0


class RecordRange(Reply, frozen=True, kw_only=True):
    """Consecutive records of a file, numbered from 0."""

    url: str
    chunk: int
    first_record: int
    records: int


class FailedPiece(Reply, frozen=True, kw_only=True):
    """A quarantined piece of work."""

    epoch: int
    task: int
    first_batch: int
    end_batch: int
    attempts: int
    trainer: str
    error: str
    #: The file, the first chunk, and the narrowest stretch of that file that the records are in.
    url: str = ""
    chunk: int = 0
    first_record: int = 0
    records: int = 0
    #: The very records, as far as they are few stretches.
    ranges: list[RecordRange] = []


class RaisedError(Reply, frozen=True, kw_only=True):
    """An error that the script raised in the last minutes, at one place of its code."""

    place: str
    #: The newest one's.
    error: str
    #: Different batches at which it was raised; and those of them at which it was raised more than once.
    batches: int
    repeated: int


class EvaluationStatus(Reply, frozen=True, kw_only=True):
    """One evaluation, running or done."""

    name: str
    is_done: bool
    #: Weighted means over what is done.
    metrics: dict[str, float]
    tasks: TaskCounts


class StatusReply(Reply, frozen=True, kw_only=True):
    """The job at a glance: ``flightedl status --json`` prints it as it is."""

    job: str
    #: waiting, training, done or failed.
    state: str
    waiting_for: str = ""
    epoch: int = 0
    epochs: int | None = None
    tasks: TaskCounts = TaskCounts()
    failed: list[FailedPiece] = []
    raised: list[RaisedError] = []
    evaluations: list[EvaluationStatus] = []
    records: int = 0
    #: Batches that trainers worked through since this master began, those worked through again included.
    batches: int = 0
    #: Those of them for which the script gave the declared model no gradient.
    idle_batches: int = 0
    #: Corrupt records that trainers passed over since this master began, in each epoch again; and parts of files that
    #: the index leaves out, because not even their records can be counted.
    skipped_records: int = 0
    skipped_parts: int = 0
    records_per_s: float = 0.0
    #: Mean over the last seconds.
    metrics: dict[str, float] = {}
    master: ServerStatus | None = None
    pservers: list[ServerStatus] = []
    pservers_desired: int = 0
    trainers: list[TrainerStatus] = []
    mode: str = ""
    #: All of the mode, as a tagged object.
    mode_settings: dict[str, Any] = {}
    #: What a change of the mode waits for; empty: none is under way.
    mode_change: str = ""
    plan_hash: str = ""
    checkpoint: str = ""
    checkpoint_age_s: float | None = None
    #: What keeps checkpoints from being made; empty: nothing.
    checkpoint_alarm: str = ""
    #: Tasks that counted as done and were missing in a pserver, since this master began: they are done again. Any
    #: number but 0 is a fault of flightedl, of a client in another language, or of a machine.
    missing_tasks: int = 0
    #: Whether a trainer ended the job with ``job.stop()``: what is not done stays so.
    is_stopped: bool = False
    #: Whether files may still join the dataset.
    is_growing: bool = False
    #: What is wrong with the files of a dataset that is followed; empty: nothing.
    dataset_alarm: str = ""
    error: str = ""


class PserverStatusReply(Reply, frozen=True, kw_only=True):
    """What a pserver says of itself."""

    index: int
    state: str
    blocks: int
    lowest_version: int
    highest_version: int
    size_bytes: int
    pushes: int
    rows_accepted: int
    rows_repeated: int
    rows_refused: int
    members: list[int]
    waiting_for: str = ""
    #: It was told to end, and waits for a checkpoint.
    is_draining: bool = False
    #: Error code -> calls that ended so since the process began.
    refused_calls: dict[str, int] = {}
