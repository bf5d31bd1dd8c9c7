"""What servers say of themselves, for people and for ``flightedl status --json``, which prints it as it is."""

from __future__ import annotations

from typing import Any

from flightedl.messages.base import Natural, Reply, Request
from flightedl.messages.hosts import HostFacts

#: Error codes of calls whose refusal is part of every start and every change of who is who.
USUAL_REFUSALS = frozenset({"not_ready", "busy", "fenced", "replaced", "unregistered", "deadline", "unavailable"})


class PserverFigures(Reply, frozen=True, kw_only=True):
    """Figures that a pserver reports, and its master passes on."""

    blocks: int = 0
    #: Lowest and highest version among its blocks.
    lowest_version: int = 0
    highest_version: int = 0
    size_bytes: int = 0
    #: Error code -> calls that ended so since the process began.
    refused_calls: dict[str, int] = {}
    #: Version at which others wait for trainers that have not pushed or are too far behind, and for how long.
    waits_at: int = 0
    waits_s: float = 0.0
    #: Hash of the plan by which it has cut the model; empty if it has no blocks.
    plan_hash: str = ""
    #: Seconds of writing the newest snapshot, and bytes of its file.
    written_s: float = 0.0
    written_bytes: int = 0
    facts: HostFacts | None = None
    #: Bytes of values since the process began.
    received_bytes: int = 0
    sent_bytes: int = 0
    #: Open streams of trainers, and those whose values lie in memory that both sides map.
    streams: int = 0
    shared_streams: int = 0


class ServerStatus(PserverFigures, frozen=True, kw_only=True):
    """One server as the master sees it."""

    index: int
    address: str
    generation: int
    state: str
    pid: int = 0
    #: Trainers that its rounds wait for.
    waits_for: list[str] = []


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
    #: Since it was heard of last, and since it was through with a batch when it was.
    silent_s: float = 0.0
    batch_s: float = 0.0
    #: Seconds of its loop since this master heard of it first: waiting for "data", in the "script", to "push", to
    #: "wait" for others of a round or for a version, to "pull".
    profile: dict[str, float] = {}
    #: What it did when it was heard of last, see ``LogRequest.doing``.
    doing: str = ""
    #: Updates that its newest gradients did not see, a mean in which newer ones count more; None: it has pushed none
    #: that is of no round.
    staleness: float | None = None
    #: Pservers that it has a stream to, and those of them with which its values lie in memory that both sides map.
    pservers: int = 0
    shared_pservers: int = 0
    facts: HostFacts | None = None


class RunningPiece(Reply, frozen=True, kw_only=True):
    """A piece of work that a trainer is at."""

    trainer: str
    epoch: int
    task: int
    first_batch: int
    end_batch: int
    #: How often it failed so far, and for how long it has been worked on now.
    failures: int
    running_s: float
    #: The file that it begins in.
    url: str = ""


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


class TableCounts(Reply, frozen=True, kw_only=True):
    """Figures of an embedding table, on one pserver or on all. What is counted begins with the pservers' processes."""

    name: str
    #: That exist, and their memory with slots and index.
    rows: int = 0
    size_bytes: int = 0
    #: Ids that wait for admission.
    waiting: int = 0
    #: Ids read, and those of them that had a row.
    reads: int = 0
    hits: int = 0
    created: int = 0
    #: Gradients dropped because their id was not admitted yet, or because there is no memory for more rows.
    not_admitted: int = 0
    refused: int = 0
    evicted: int = 0

    def plus(self, other: TableCounts) -> TableCounts:
        """Those of both."""
        names = [name for name in self.__struct_fields__ if name != "name"]
        return TableCounts(name=self.name, **{name: getattr(self, name) + getattr(other, name) for name in names})


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
    #: Trainers that worked at the same time, each on a model of its own; 0 if any trainer shared what it trained.
    own_models: int = 0
    #: Corrupt records that trainers passed over since this master began, in each epoch again; and parts of files that
    #: the index leaves out, because not even their records can be counted.
    skipped_records: int = 0
    skipped_parts: int = 0
    records_per_s: float = 0.0
    #: Seconds of all trainers' loops since this master began: see ``TrainerStatus.profile``.
    profile: dict[str, float] = {}
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
    #: Over all pservers, as they said last.
    tables: list[TableCounts] = []
    checkpoint: str = ""
    checkpoint_age_s: float | None = None
    #: What keeps checkpoints from being made; empty: nothing.
    checkpoint_alarm: str = ""
    #: Tasks that counted as done and were missing in a pserver, since this master began: they are done again. Any
    #: number but 0 is a fault of flightedl, of a client in another language, or of a machine.
    missing_tasks: int = 0
    #: True if a trainer ended the job with ``job.stop()``: unfinished work stays unfinished.
    is_stopped: bool = False
    #: The trainer that ended the job, and its reason; empty if none did.
    stopped_by: str = ""
    stop_reason: str = ""
    #: Why a stopped job is not whole, and no trainer makes it so; empty: it is, or may still become so.
    unfinished: str = ""
    #: Whether files may still join the dataset.
    is_growing: bool = False
    #: What is wrong with the files of a dataset that is followed; empty: nothing.
    dataset_alarm: str = ""
    #: Why files are no part of a dataset that was followed and is complete; each sentence names its file.
    left_out: list[str] = []
    #: What trainers reported of their work, since this master began: finished, failed, returned, outdated and so on.
    reports: dict[str, int] = {}
    #: The pieces of work that have been worked on for longest, and how long a whole task takes on average.
    running: list[RunningPiece] = []
    task_s: float = 0.0
    #: How often things happened since then, by the kind of event.
    events: dict[str, int] = {}
    error: str = ""


class JobEvent(Reply, frozen=True, kw_only=True):
    """Something that happened to the job."""

    #: Counts the events of one master, from 1.
    number: int
    #: Seconds since 1970, by the master's clock.
    at: float
    kind: str
    #: A trainer's id, "pserver-3" or "master"; empty: the job.
    who: str = ""
    #: What, and why.
    text: str = ""
    is_warning: bool = False


class EventsRequest(Request, frozen=True, kw_only=True):
    """Asks a master what has happened."""

    #: Events with a higher number, of the master of this generation; of another master, all that it keeps.
    after: Natural = 0
    generation: Natural = 0
    #: How long to wait where there are none.
    wait_s: float = 0.0


class EventsReply(Reply, frozen=True, kw_only=True):
    """What has happened, oldest first."""

    #: Of the master, which knows nothing of what happened before it led.
    generation: int
    events: list[JobEvent]
    #: How many that were asked for are not kept any more.
    forgotten: int = 0


class StacksRequest(Request, frozen=True, kw_only=True):
    """Asks where the threads of a process stand; of a trainer, by way of the master."""

    #: Empty: of the process that is asked.
    trainer: str = ""
    #: How long to wait for a trainer to say so.
    wait_s: float = 0.0


class StacksReply(Reply, frozen=True, kw_only=True):
    """Names of threads, functions and files, without values; empty: the trainer has not said so."""

    text: str


class PserverStatusReply(PserverFigures, frozen=True, kw_only=True):
    """A pserver's answer about itself."""

    index: int
    state: str
    #: Messages of pushes and steps since the process began.
    pushes: int
    #: Outcomes of the blocks that were pushed since then: ``Outcome`` in lower case -> how many.
    rows: dict[str, int]
    members: list[int]
    waiting_for: str = ""
    #: Member that has a stream -> True if its values lie in memory that both sides map.
    shares_memory: dict[int, bool] = {}
    #: Members for whom others wait.
    waits_for: list[int] = []
    #: Seconds of copying the newest snapshot.
    copied_s: float = 0.0
    #: True if it was told to end, and waits for a checkpoint.
    is_draining: bool = False
    tables: list[TableCounts] = []
    #: Member -> updates that its newest gradients did not see, if they are of no round.
    staleness: dict[int, float] = {}
