"""Status of servers, for people and for ``flightedl status --json``, which prints the master's reply unchanged."""

from __future__ import annotations

from typing import Any

from flightedl.messages.base import Natural, Reply, Request
from flightedl.messages.hosts import HostFacts

#: Error codes of refusals that every start and every replacement of a process causes.
USUAL_REFUSALS = frozenset({"not_ready", "busy", "fenced", "replaced", "unregistered", "deadline", "unavailable"})


class PserverFigures(Reply, frozen=True, kw_only=True):
    """Figures that a pserver reports and the master passes on."""

    blocks: int = 0
    #: Lowest and highest version among its blocks.
    lowest_version: int = 0
    highest_version: int = 0
    size_bytes: int = 0
    #: Error code -> number of calls that ended with it since the process began.
    refused_calls: dict[str, int] = {}
    #: Version at which trainers wait for others that have not pushed or lag too far behind, and duration of the wait.
    waits_at: int = 0
    waits_s: float = 0.0
    #: Hash of the plan by which it has cut the model; empty if it has no blocks.
    plan_hash: str = ""
    #: Seconds taken to write the newest snapshot, and size of its file in bytes.
    written_s: float = 0.0
    written_bytes: int = 0
    facts: HostFacts | None = None
    #: Bytes of values since the process began.
    received_bytes: int = 0
    sent_bytes: int = 0
    #: Number of open streams from trainers, and of those that use shared memory.
    streams: int = 0
    shared_streams: int = 0


class ServerStatus(PserverFigures, frozen=True, kw_only=True):
    """One server as the master sees it."""

    index: int
    address: str
    generation: int
    state: str
    pid: int = 0
    #: Trainers for which its rounds wait.
    waits_for: list[str] = []


class TrainerStatus(Reply, frozen=True, kw_only=True):
    """One trainer as the master sees it."""

    trainer: str
    generation: int
    #: Its launcher's name for it; empty if it has none.
    name: str = ""
    host: str = ""
    pid: int = 0
    member: int = 0
    holding: int = 0
    records: int = 0
    waiting_for: str = ""
    #: Seconds since its last report, and from its last finished batch to that report.
    silent_s: float = 0.0
    batch_s: float = 0.0
    #: Seconds of its loop by activity, since its first report to this master: see ``LogRequest.profile``.
    profile: dict[str, float] = {}
    #: Activity at its last report, see ``LogRequest.doing``.
    doing: str = ""
    #: Number of updates that its gradients missed, as a mean in which newer gradients count more. None if all of its
    #: pushes belong to rounds.
    staleness: float | None = None
    #: Number of pservers to which it has a stream, and of those with which it shares memory.
    pservers: int = 0
    shared_pservers: int = 0
    facts: HostFacts | None = None


class RunningPiece(Reply, frozen=True, kw_only=True):
    """A piece of work that a trainer is working on."""

    trainer: str
    epoch: int
    task: int
    first_batch: int
    end_batch: int
    #: Number of its failures so far, and seconds since it was handed out.
    failures: int
    running_s: float
    #: The file in which it begins.
    url: str = ""


class TaskCounts(Reply, frozen=True, kw_only=True):
    """Tasks of the current epoch by state."""

    todo: int = 0
    pending: int = 0
    done: int = 0
    failed: int = 0
    total: int = 0
    copies: int = 0
    #: Assignments since the job began, whole tasks and parts.
    attempts: int = 0
    #: Quarantined batches of all epochs that are still listed; quarantined pieces that are not listed any more;
    #: batches that were dropped by hand.
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
    #: The file, the first chunk, and the narrowest range of that file that has the records.
    url: str = ""
    chunk: int = 0
    first_record: int = 0
    records: int = 0
    #: The exact records, if they are few ranges.
    ranges: list[RecordRange] = []


class RaisedError(Reply, frozen=True, kw_only=True):
    """An error that the script raised in the last minutes, at one place of its code."""

    place: str
    #: Text of the newest one.
    error: str
    #: Number of batches at which it was raised, and number of batches at which it was raised more than once.
    batches: int
    repeated: int


class TableCounts(Reply, frozen=True, kw_only=True):
    """Figures of an embedding table, on one pserver or on all. Counts start at zero when a pserver's process starts."""

    name: str
    #: Number of rows, and their memory with slots and index.
    rows: int = 0
    size_bytes: int = 0
    #: Ids that wait for admission.
    waiting: int = 0
    #: Number of ids read, and number of those that had a row.
    reads: int = 0
    hits: int = 0
    created: int = 0
    #: Number of gradients dropped because their id was not yet admitted, or because there was no memory for more rows.
    not_admitted: int = 0
    refused: int = 0
    evicted: int = 0

    def plus(self, other: TableCounts) -> TableCounts:
        """Return the sum of both."""
        names = [name for name in self.__struct_fields__ if name != "name"]
        return TableCounts(name=self.name, **{name: getattr(self, name) + getattr(other, name) for name in names})


class EvaluationStatus(Reply, frozen=True, kw_only=True):
    """One evaluation, running or done."""

    name: str
    is_done: bool
    #: Weighted means over the finished tasks.
    metrics: dict[str, float]
    tasks: TaskCounts


class GroupStatus(Reply, frozen=True, kw_only=True):
    """The group of ranks to which the data goes."""

    #: "gathering", "running", "over" or "done".
    phase: str
    ranks: int
    #: Number of its starts so far.
    starts: int
    incarnation: int


class StatusReply(Reply, frozen=True, kw_only=True):
    """The job at a glance. ``flightedl status --json`` prints it unchanged."""

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
    #: Batches that trainers finished since this master began, repeated ones included.
    batches: int = 0
    #: Number of these batches for which the script pushed no gradient to the declared model.
    idle_batches: int = 0
    #: Number of trainers that worked at the same time on separate models; 0 if any trainer shared what it trained.
    own_models: int = 0
    #: Corrupt records that trainers skipped since this master began, counted in each epoch; and parts of files that
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
    #: Processes or rounds for which a change of the mode waits; empty without a change.
    mode_change: str = ""
    plan_hash: str = ""
    #: Sums over the last reports of all pservers.
    tables: list[TableCounts] = []
    checkpoint: str = ""
    checkpoint_age_s: float | None = None
    #: Trouble that keeps checkpoints from being made, or empty.
    checkpoint_alarm: str = ""
    #: Tasks that counted as done but were missing in a pserver, since this master began. They are done again. Any
    #: number but 0 is a fault of flightedl, of a client in another language, or of a machine.
    missing_tasks: int = 0
    #: True if a trainer ended the job with ``job.stop()``: unfinished work stays unfinished.
    is_stopped: bool = False
    #: The trainer that ended the job, and its reason; empty if none did.
    stopped_by: str = ""
    stop_reason: str = ""
    #: Work that is missing in a stopped job and that no trainer will do. Empty if the job is or may become complete.
    unfinished: str = ""
    #: True if files may still join the dataset.
    is_growing: bool = False
    #: Trouble with the files of a followed dataset, or empty.
    dataset_alarm: str = ""
    #: Reasons why files were left out of a completed followed dataset. Each sentence names its file.
    left_out: list[str] = []
    #: Reports of trainers since this master began, by kind: finished, failed, returned, outdated and so on.
    reports: dict[str, int] = {}
    #: The pieces of work that have been running for longest, and seconds of a whole task on average.
    running: list[RunningPiece] = []
    task_s: float = 0.0
    #: Number of events since this master began, by kind.
    events: dict[str, int] = {}
    #: None if the data does not go to a group. Otherwise ``records`` and ``tasks`` are those of its current start.
    group: GroupStatus | None = None
    error: str = ""


class JobEvent(Reply, frozen=True, kw_only=True):
    """An event of the job."""

    #: Counts the events of one master, from 1.
    number: int
    #: Seconds since 1970, by the master's clock.
    at: float
    kind: str
    #: A trainer's id, "pserver-3" or "master"; empty for the job.
    who: str = ""
    #: Description of the event and its reason.
    text: str = ""
    is_warning: bool = False


class EventsRequest(Request, frozen=True, kw_only=True):
    """Asks a master for its events."""

    #: Number of the last known event, and the generation of its master. Another master returns all its events.
    after: Natural = 0
    generation: Natural = 0
    #: Most seconds to wait if there are no events.
    wait_s: float = 0.0


class EventsReply(Reply, frozen=True, kw_only=True):
    """Events of a job, oldest first."""

    #: Generation of the master, which has no events from before it led.
    generation: int
    events: list[JobEvent]
    #: Number of requested events that are not kept any more.
    forgotten: int = 0


class StacksRequest(Request, frozen=True, kw_only=True):
    """Asks a server for the stacks of its threads, or a master for those of a trainer."""

    #: The trainer; empty for the server itself.
    trainer: str = ""
    #: Most seconds to wait for the trainer's report.
    wait_s: float = 0.0


class StacksReply(Reply, frozen=True, kw_only=True):
    """Names of threads, functions and files, without values. Empty if the trainer has not reported them."""

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
    #: Member that has a stream -> True if the stream uses shared memory.
    shares_memory: dict[int, bool] = {}
    #: Members for whom others wait.
    waits_for: list[int] = []
    #: Seconds taken to copy the newest snapshot.
    copied_s: float = 0.0
    #: True if the pserver was asked to end and is waiting for a checkpoint.
    is_draining: bool = False
    tables: list[TableCounts] = []
    #: Member -> number of updates that its newest gradients missed, if they belong to no round.
    staleness: dict[int, float] = {}
