"""Status of servers, for users and for ``flightedl status --json``, which prints the master's reply unchanged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flightedl.messages.base import Natural, Reply, Request
from flightedl.messages.hosts import HostFacts
from flightedl.messages.scaling import ScaleReply

#: Error codes of refusals that are normal when a process starts or is replaced, or a block moves.
USUAL_REFUSALS = frozenset(
    {"not_ready", "busy", "fenced", "replaced", "stale_placement", "unregistered", "deadline", "unavailable"}
)

#: Seconds that a script may run without asking for a batch before a user learns of it.
STARTING_S = 5.0


class PserverFigures(Reply, frozen=True, kw_only=True):
    """Statistics that a pserver reports to the master, and that the master passes on."""

    #: Numbers of parameter blocks and of table buckets on the pserver.
    blocks: int = 0
    buckets: int = 0
    #: Lowest and highest version of the pserver's blocks.
    lowest_version: int = 0
    highest_version: int = 0
    size_bytes: int = 0
    #: Error code -> number of calls that have failed with this error since the process started.
    refused_calls: dict[str, int] = {}
    #: Version at which trainers are waiting for others that have not pushed or lag too far behind, and how long they
    #: have been waiting, in seconds.
    waits_at: int = 0
    waits_s: float = 0.0
    #: Seconds by which the pserver's standby lags behind, at most; None if no standby has a copy.
    standby_lag_s: float | None = None
    #: Hash of the plan that determines the pserver's blocks; empty if it has no blocks.
    plan_hash: str = ""
    #: Seconds that writing the newest snapshot took, and size of its file in bytes.
    written_s: float = 0.0
    written_bytes: int = 0
    facts: HostFacts | None = None
    #: Number of messages of pushes and steps, and bytes of values transferred, since the process started.
    pushes: int = 0
    received_bytes: int = 0
    sent_bytes: int = 0
    #: Number of open streams from trainers, and how many of them use shared memory.
    streams: int = 0
    shared_streams: int = 0


class ServerStatus(PserverFigures, frozen=True, kw_only=True):
    """A server, as the master sees it."""

    index: int
    address: str
    generation: int
    state: str
    pid: int = 0
    #: Name that the launcher gave to the process; empty if there is none. Its number is not the pserver's index.
    process: str = ""
    #: Trainers that this server's rounds are waiting for.
    waits_for: list[str] = []
    #: Address of the pserver's standby; empty if it has none.
    standby: str = ""
    #: Number of rows of all tables, and their memory including slots and index, in bytes.
    table_rows: int = 0
    table_bytes: int = 0

    @property
    def name(self) -> str:
        """The pserver's name and, if another one, its process's name: ``pserver-0 (process pserver-3)``."""
        name = f"pserver-{self.index}"
        return name if self.process in {"", name} else f"{name} (process {self.process})"


class TrainerStatus(Reply, frozen=True, kw_only=True):
    """A trainer, as the master sees it."""

    trainer: str
    generation: int
    #: Name that the launcher gave to the trainer; empty if there is none.
    name: str = ""
    host: str = ""
    pid: int = 0
    member: int = 0
    holding: int = 0
    records: int = 0
    waiting_for: str = ""
    #: Seconds since the trainer's last report, and seconds between its last finished batch and that report.
    silent_s: float = 0.0
    batch_s: float = 0.0
    #: Seconds that the trainer spent in each activity since its first report to this master; see
    #: ``LogRequest.profile``.
    profile: dict[str, float] = {}
    #: Activity at the time of the trainer's last report; see ``LogRequest.doing``.
    doing: str = ""
    #: Seconds since the script connected if it has not asked for a batch; 0 if it has, or if this is unknown.
    starting_s: float = 0.0
    #: Mean number of updates that the trainer's gradients missed, with more weight on newer gradients. None if all of
    #: its pushes belong to rounds.
    staleness: float | None = None
    #: Number of pservers to which the trainer has a stream, and how many of these share memory with it.
    pservers: int = 0
    shared_pservers: int = 0
    facts: HostFacts | None = None


class RunningPiece(Reply, frozen=True, kw_only=True):
    """A piece of work that is assigned to a trainer."""

    trainer: str
    epoch: int
    task: int
    first_batch: int
    end_batch: int
    #: Number of times that the piece has failed, and seconds since it was assigned.
    failures: int
    running_s: float
    #: File that contains the first record of the piece.
    url: str = ""


class TaskCounts(Reply, frozen=True, kw_only=True):
    """Number of the current epoch's tasks in each state."""

    todo: int = 0
    pending: int = 0
    done: int = 0
    failed: int = 0
    total: int = 0
    copies: int = 0
    #: Number of assignments since the job began, including assignments of parts of tasks.
    attempts: int = 0
    #: Over all epochs: number of quarantined batches that are still listed, number of quarantined pieces that are no
    #: longer listed, and number of batches dropped by a user.
    failed_batches: int = 0
    forgotten: int = 0
    dropped_batches: int = 0


class RecordRange(Reply, frozen=True, kw_only=True):
    """A range of consecutive records of a file, numbered from 0."""

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
    #: The file, the first chunk, and the narrowest range of the file that contains the records.
    url: str = ""
    chunk: int = 0
    first_record: int = 0
    records: int = 0
    #: The exact records if they form only a few ranges; otherwise empty.
    ranges: list[RecordRange] = []


class RaisedError(Reply, frozen=True, kw_only=True):
    """An error that the script has raised recently, at one location in its code."""

    place: str
    #: Text of the newest one.
    error: str
    #: Number of batches that raised the error, and how many of them raised it more than once.
    batches: int
    repeated: int
    #: Number of trainers that raised the error, not counting those that replaced others.
    trainers: int = 0


class TableCounts(Reply, frozen=True, kw_only=True):
    """Statistics of an embedding table, on one pserver or in total.

    Counts begin at zero when a pserver starts. They move to other pservers with the table's buckets.
    """

    name: str
    #: Number of rows, and their memory including slots and index, in bytes.
    rows: int = 0
    size_bytes: int = 0
    #: Ids that wait for admission.
    waiting: int = 0
    #: Number of ids that were read, and how many of them had a row.
    reads: int = 0
    hits: int = 0
    created: int = 0
    #: Number of gradients dropped because their id had not been admitted yet, or because memory was full.
    not_admitted: int = 0
    refused: int = 0
    #: Number of rows that were found expired, or that cuts removed.
    evicted: int = 0

    def plus(self, other: TableCounts) -> TableCounts:
        names = [name for name in self.__struct_fields__ if name != "name"]
        return TableCounts(name=self.name, **{name: getattr(self, name) + getattr(other, name) for name in names})


#: Fields of ``TableCounts`` that count what has happened. They move with the buckets of a table.
COUNTERS = ("reads", "hits", "created", "not_admitted", "refused", "evicted")


class EvaluationStatus(Reply, frozen=True, kw_only=True):
    """One evaluation, running or done."""

    name: str
    is_done: bool
    #: Means of the metrics over the finished tasks, weighted by records.
    metrics: dict[str, float]
    tasks: TaskCounts


class GroupStatus(Reply, frozen=True, kw_only=True):
    """The group of ranks that consumes the data."""

    #: "gathering", "running", "over" or "done".
    phase: str
    ranks: int
    #: Number of starts of the group so far.
    starts: int
    incarnation: int


class ConsumerStatus(Reply, frozen=True, kw_only=True):
    """A live consumer with a name, which follows the model."""

    name: str
    host: str = ""
    pid: int = 0
    #: Maximum over all pservers: number of changes that the consumer had not applied when it last acknowledged a
    #: position, and seconds since its copy was up to date. None until it has acknowledged a position to each pserver.
    behind: int | None = None
    age_s: float | None = None


class StatusReply(Reply, frozen=True, kw_only=True):
    """The job's status. ``flightedl status --json`` prints it unchanged."""

    job: str
    #: waiting, training, done or failed.
    state: str
    waiting_for: str = ""
    epoch: int = 0
    epochs: int | None = None
    tasks: TaskCounts = TaskCounts()
    failed: list[FailedPiece] = []
    raised: list[RaisedError] = []
    #: Name -> newest error, for trainers that have failed since they last processed a batch; and names of those that
    #: must end because of that. A name is the trainer's ``witness`` (see ``TasksTicket``).
    in_doubt: dict[str, str] = {}
    given_up: list[str] = []
    evaluations: list[EvaluationStatus] = []
    records: int = 0
    #: Number of batches that trainers have finished since this master started, including repeated ones.
    batches: int = 0
    #: Number of finished batches for which the script pushed no gradient to the declared model.
    idle_batches: int = 0
    #: Number of trainers that were training separate models at the same time; 0 if any trainer shared its model.
    own_models: int = 0
    #: Number of corrupt records that trainers have skipped since this master started (each epoch counts them again),
    #: and number of parts of files that were not indexed because their records could not be counted.
    skipped_records: int = 0
    skipped_parts: int = 0
    records_per_s: float = 0.0
    #: Seconds that all trainers together have spent in each activity since this master started; see
    #: ``TrainerStatus.profile``.
    profile: dict[str, float] = {}
    #: Mean over the last seconds.
    metrics: dict[str, float] = {}
    master: ServerStatus | None = None
    pservers: list[ServerStatus] = []
    pservers_desired: int = 0
    trainers: list[TrainerStatus] = []
    mode: str = ""
    #: Steps that a trainer makes on its own values before it pushes the difference.
    local_steps: int = 1
    #: The complete mode, as a tagged object.
    mode_settings: dict[str, Any] = {}
    #: Processes or rounds that a pending change of the mode waits for; empty if no change is pending.
    mode_change: str = ""
    plan_hash: str = ""
    #: 1 plus the number of times that blocks have been redistributed; 0 without a model.
    placement: int = 0
    #: Progress of a change to the pservers; None if no change is in progress.
    scaling: ScaleReply | None = None
    #: Sums over all pservers' most recent reports.
    tables: list[TableCounts] = []
    #: Live consumers with names.
    consumers: list[ConsumerStatus] = []
    checkpoint: str = ""
    checkpoint_age_s: float | None = None
    #: Problem that prevents checkpoints; empty if there is none.
    checkpoint_alarm: str = ""
    #: Number of tasks since this master started that were reported as done although a pserver had not applied them.
    #: These tasks are repeated. Any number but 0 indicates a bug in flightedl or in a client in another language, or a
    #: hardware error.
    missing_tasks: int = 0
    #: True if a trainer ended the job with ``job.stop()``. Unfinished work then stays unfinished.
    is_stopped: bool = False
    #: Trainer that ended the job, and its reason; empty if no trainer did.
    stopped_by: str = ""
    stop_reason: str = ""
    #: Work that is missing from a stopped job and will not be done; empty if the job is complete or may still become
    #: so.
    unfinished: str = ""
    #: True if more files may be added to the dataset.
    is_growing: bool = False
    #: Problem with the files of a followed dataset; empty if there is none.
    dataset_alarm: str = ""
    #: For each reason why names that match the dataset's patterns are not read, a sentence with their number.
    names_left_out: list[str] = []
    #: For each file that was excluded from a complete followed dataset, a sentence with its name and the reason.
    left_out: list[str] = []
    #: Number of reports from trainers since this master started, by kind: finished, failed, returned, outdated and
    #: others.
    reports: dict[str, int] = {}
    #: The longest-running pieces of work, and average seconds per complete task.
    running: list[RunningPiece] = []
    task_s: float = 0.0
    #: Number of events of each kind since this master started.
    events: dict[str, int] = {}
    #: The group that consumes the data; None if no group does. ``records`` and ``tasks`` then count its current start.
    group: GroupStatus | None = None
    error: str = ""

    def starting(self, more: Mapping[str, float] = {}) -> list[str]:
        """Describe trainers without a batch. ``more``: name -> seconds for which their processes have run."""
        reported = [each for each in self.trainers if each.facts is not None]
        asks_not = {each.name or each.trainer: 0.0 if each.waiting_for else each.starting_s for each in reported}
        known = {name: seconds and max(seconds, more.get(name, 0.0)) for name, seconds in asks_not.items()}
        return [
            f"{name}: the script has run for {seconds:.0f} s and has not asked for a batch"
            for name, seconds in sorted({**more, **known}.items())
            if seconds >= STARTING_S
        ]

    def pserver(self, index: int) -> str:
        """Return the name of a pserver, with the name of its process if it is known."""
        return next((each.name for each in self.pservers if each.index == index), f"pserver-{index}")


class JobEvent(Reply, frozen=True, kw_only=True):
    """An event of the job."""

    #: Number of the event, counted from 1 for each master.
    number: int
    #: Time of the event by the master's clock, in seconds since 1970.
    at: float
    kind: str
    #: A trainer's id, "pserver-3", or "master"; empty for events of the job.
    who: str = ""
    #: The event and its reason, as text for users.
    text: str = ""
    is_warning: bool = False


class EventsRequest(Request, frozen=True, kw_only=True):
    """Requests events from a master."""

    #: Number of the last event that the client has received, and generation of the master that numbered it. A different
    #: master returns all of its events.
    after: Natural = 0
    generation: Natural = 0
    #: Maximum seconds to wait if there are no new events.
    wait_s: float = 0.0


class EventsReply(Reply, frozen=True, kw_only=True):
    """Events of a job, oldest first."""

    #: Generation of the master. A master has no events from before its election.
    generation: int
    events: list[JobEvent]
    #: Number of requested events that the master no longer has.
    forgotten: int = 0


class StacksRequest(Request, frozen=True, kw_only=True):
    """Requests the stack traces of a server's threads. The master can also return those of a trainer."""

    #: Id of the trainer; empty for the server itself.
    trainer: str = ""
    #: Maximum seconds to wait for the trainer's report.
    wait_s: float = 0.0


class StacksReply(Reply, frozen=True, kw_only=True):
    """Names of threads, functions and files, without values. Empty if the trainer has not reported its stacks."""

    text: str


class PserverStatusReply(PserverFigures, frozen=True, kw_only=True):
    """A pserver's answer about itself."""

    index: int
    state: str
    #: Outcome (``Outcome`` in lower case) -> number of blocks pushed with this outcome since the process started.
    rows: dict[str, int]
    members: list[int]
    waiting_for: str = ""
    #: Member with open streams -> True if these streams use shared memory.
    shares_memory: dict[int, bool] = {}
    #: Members for whom others wait.
    waits_for: list[int] = []
    #: Seconds that copying took for the newest snapshot.
    copied_s: float = 0.0
    #: True if the pserver has been asked to exit and is waiting for a checkpoint.
    is_draining: bool = False
    tables: list[TableCounts] = []
    #: Member -> number of updates that its most recent gradients missed, apart from gradients that belong to rounds.
    staleness: dict[int, float] = {}
    #: (first block, number of blocks, parts of messages, bytes of their values) for the busiest ranges of blocks that
    #: trainers push. The counts begin at zero when blocks move.
    pushed: list[tuple[int, int, int, int]] = []
