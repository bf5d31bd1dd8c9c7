"""Every JSON message of the protocol, as a validated struct.

Rules:

* A request is a JSON object; an unknown field, a missing one or one of the wrong type is a :class:`MessageError`, and
  nothing was done. Replies tolerate unknown fields, so that a server may be newer than its client.
* Whatever can be retried carries its identity: a pushed batch its ``BatchIdentity``, a report its ``attempt``, a
  trainer its ``generation``, a member its ``member``. Generations of the *servers* travel in headers of the transport.
* Whatever goes to a pserver about its blocks names the shard plan that the sender means (``plan_hash``).
* Numbers that identify (epoch, task, batch, attempt, generation, member) are non-negative.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec

from flightedl.errors import MessageError

Natural = Annotated[int, msgspec.Meta(ge=0)]
Text = Annotated[str, msgspec.Meta(max_length=4096)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Weight = Annotated[float, msgspec.Meta(ge=0, le=1e12)]


class Request(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of what is asked of a server."""


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """Base of what a server answers, and of what lies in etcd."""


# --- who asks ---


class Sender(Request, frozen=True, kw_only=True):
    """A trainer: its id, and the generation of its key in etcd."""

    trainer: Name
    generation: Natural


class OfPlan(Request, frozen=True, kw_only=True):
    """About the blocks of a pserver: refused as fenced where the shard plan is another one."""

    plan_hash: Name


# --- declarations: trainer -> master ---


class DatasetDeclaration(Request, frozen=True, kw_only=True):
    """What ``job.dataset(...)`` says. The first one wins; a different one is refused with the difference."""

    urls: list[Text]
    batch_size: Annotated[int, msgspec.Meta(ge=1)]
    #: None: endless.
    epochs: Annotated[int, msgspec.Meta(ge=1)] | None = 1
    shuffle: bool = False
    seed: int = 0
    format: Text = ""
    columns: list[Text] | None = None
    #: [column, operator, value] conditions, all of which must hold.
    filter: list[tuple[str, str, Any]] | None = None
    records_per_task: Natural = 0
    on_corrupt: Text = "fail"
    #: The files that match are added to for as long as there is no ``_END`` beside them; see ``formats.following``.
    follow: bool = False


class DatasetReply(Reply, frozen=True, kw_only=True):
    """The declared dataset, as the master indexed it; one that is followed, as it was then."""

    index_hash: str
    task_count: int
    record_count: int
    #: Arrow IPC schema message, base64: what the batches look like.
    schema: str
    declaration: DatasetDeclaration


class ArrivalRecord(Reply, frozen=True, kw_only=True):
    """Files that joined a followed dataset together, in this order; its tasks are never of two arrivals."""

    #: [url, size in bytes, version]
    files: list[tuple[str, int, str]]


class EvaluationDeclaration(Request, frozen=True, kw_only=True):
    """What ``job.evaluate(...)`` says. The same name is the same evaluation."""

    name: Name
    dataset: DatasetDeclaration


class EvaluationRecord(Reply, frozen=True, kw_only=True):
    """One evaluation as it lies in etcd."""

    name: str
    declared: DatasetReply
    #: name -> [weighted sum, weight].
    sums: dict[str, tuple[float, float]]
    #: The queue's own encoding; empty when it is done.
    queue: str
    is_done: bool
    failed: int = 0


class EvaluationsRecord(Reply, frozen=True, kw_only=True):
    """The value of ``evaluations``."""

    evaluations: list[EvaluationRecord]


class ParameterDeclaration(Request, frozen=True, kw_only=True):
    """One named array."""

    name: Name
    shape: list[Natural]
    dtype: Name


class ModelDeclaration(Request, frozen=True, kw_only=True):
    """What ``job.parameters(...)`` says. Optimizer and mode are tagged objects, see the domain's to_json."""

    parameters: list[ParameterDeclaration]
    optimizer: dict[str, Any]
    mode: dict[str, Any]
    #: "bfloat16" or "float16": how float32 gradients and values travel, as 16 bits an element. First values never do.
    wire: Text = ""


class ModelReply(Reply, frozen=True, kw_only=True):
    """The declared model and how it lies on the pservers."""

    declaration: ModelDeclaration
    pservers: int
    plan_hash: str
    #: For how many pservers the parameters were cut into blocks, where it was another number; 0: for ``pservers``.
    cut_for: int = 0
    #: The mode that was changed to while the job ran; None: the declared one.
    mode: dict[str, Any] | None = None

    @property
    def present_mode(self) -> dict[str, Any]:
        """The mode of now, as a tagged object."""
        return self.declaration.mode if self.mode is None else self.mode


class JobDeclaration(Reply, frozen=True, kw_only=True):
    """The value of the ``job`` key: all that the trainers declared, each part once."""

    dataset: DatasetReply | None = None
    model: ModelReply | None = None
    #: In a checkpoint: all that had joined by then. In etcd, arrivals have keys of their own.
    arrivals: list[ArrivalRecord] = []


# --- tasks: DoGet on the master ---


class FinishedTask(Request, frozen=True, kw_only=True):
    """A piece of work whose every batch is acknowledged by every pserver of the generations given."""

    epoch: Natural
    position: Natural
    attempt: Natural
    #: By index, the oldest generation of each pserver that acknowledged a batch of this piece; 0: it holds no blocks.
    pservers: list[Natural] = []
    #: Evaluations only: name -> [weighted sum, weight] over the piece.
    metrics: dict[Name, tuple[float, float]] = {}


class FailedTask(Request, frozen=True, kw_only=True):
    """A piece of work that the trainer could not do."""

    epoch: Natural
    position: Natural
    attempt: Natural
    error: Text
    #: The batch at which it failed, where known.
    batch: Natural | None = None


class ReturnedTask(Request, frozen=True, kw_only=True):
    """A piece of work handed back unharmed, as a trainer does that leaves."""

    epoch: Natural
    position: Natural
    attempt: Natural


class TasksTicket(Sender, frozen=True, kw_only=True):
    """Reports and asks in one call."""

    verb: str = "tasks"
    #: Name of the evaluation whose tasks are meant; empty: the training data's.
    evaluation: Text = ""
    finished: list[FinishedTask] = []
    failed: list[FailedTask] = []
    returned: list[ReturnedTask] = []
    #: Attempts that the trainer holds beside those reported: one that is missing here is told again.
    holding: list[Natural] = []
    #: How many pieces of work are wanted now; 0 only reports.
    want: Annotated[int, msgspec.Meta(ge=0, le=64)] = 1
    #: How long the master may hold the call while there is nothing to hand out.
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=20)] = 2.0


class Assignment(Reply, frozen=True, kw_only=True):
    """A piece of work: batches ``first_batch`` to ``end_batch`` (exclusive) of a task."""

    epoch: int
    position: int
    task: int
    attempt: int
    first_batch: int
    end_batch: int
    #: Batches of the whole task.
    batch_count: int


class TasksReply(Reply, frozen=True, kw_only=True):
    """Metadata of the first message of the reply; then one record batch of chunks for each assignment."""

    assignments: list[Assignment]
    #: "given", "none_now" or "epochs_done".
    outcome: str
    retry_after_s: float = 0.0
    #: The sender's membership, 0: it is not a member.
    member: int = 0
    #: Reports that were refused, because their attempt is no longer current: drop that work.
    lost: list[ReturnedTask] = []
    epoch: int = 0
    #: Evaluations only, once "epochs_done": weighted means over all records, and tasks that failed for good.
    metrics: dict[str, float] = {}
    failed: int = 0


class JoinRequest(Sender, frozen=True, kw_only=True):
    """A trainer that holds work asks to be waited for."""

    wait_s: Annotated[float, msgspec.Meta(ge=0, le=20)] = 2.0


class JoinReply(Reply, frozen=True, kw_only=True):
    """``member`` 0: not agreed yet, ask again; unless the sender holds no work, which nobody waits for."""

    member: int
    holds_work: bool = True
    waiting_for: str = ""
    #: Under which the membership begins; None: as before.
    mode: dict[str, Any] | None = None


class ModeRequest(Request, frozen=True, kw_only=True):
    """Asks the master to change the consistency mode, and how far that is. Asking again changes nothing."""

    #: A tagged object, see the domain's to_json; None: only ask.
    mode: dict[str, Any] | None = None
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=20)] = 2.0


class ModeReply(Reply, frozen=True, kw_only=True):
    """The mode; ask again until every pserver has it."""

    mode: dict[str, Any]
    is_agreed: bool
    #: Where it began, on all blocks; 0: with the job.
    round: int = 0
    waiting_for: str = ""


class LogRequest(Sender, frozen=True, kw_only=True):
    """Progress of one trainer since its last message: sums over records."""

    records: Natural = 0
    batches: Natural = 0
    #: name -> [weighted sum, weight].
    metrics: dict[Name, tuple[float, float]] = {}
    host: Text = ""
    pid: Natural = 0
    #: What the trainer waits for, empty when it works.
    waiting_for: Text = ""


# --- views: master -> pserver ---


class ViewMemberMessage(Request, frozen=True, kw_only=True):
    """One member of a view."""

    trainer: Name
    generation: Natural
    member: Natural
    first_round: Natural


class ViewRequest(OfPlan, frozen=True, kw_only=True):
    """The whole membership; refused unless (master_generation, serial) is newer than the one known."""

    master_generation: Natural
    serial: Natural
    members: list[ViewMemberMessage]
    #: The consistency mode, a tagged object; None: as before.
    mode: dict[str, Any] | None = None
    #: The version that all blocks begin at if this view changes the mode.
    switch_round: Natural = 0


class ViewReply(Reply, frozen=True, kw_only=True):
    """What a pserver made of a view: everybody is admitted but those refused, whose first round has gone by."""

    serial: int
    refused: list[int] = []
    highest_open_round: int = 0
    #: True when the view was older than the one known.
    outdated: bool = False
    #: True when the mode could not be changed at the round of the view, which has gone by.
    refuses_mode: bool = False


# --- parameters: trainer -> pserver ---


class BatchIdentity(Request, frozen=True, kw_only=True):
    """Which batch of which epoch; what makes a push happen once."""

    epoch: Natural
    task: Natural
    batch: Natural
    #: Batches of the whole task.
    batch_count: Annotated[int, msgspec.Meta(ge=1)]


class PushHeader(Sender, frozen=True, kw_only=True):
    """Opens a push (DoPut) or a step (DoExchange): what the rows that follow belong to."""

    verb: str = "step"
    plan_hash: Name
    member: Natural
    identity: BatchIdentity
    #: Async mode: the other batches whose gradients are in the rows, which are sums then. A block takes a sum only if
    #: it has none of its batches, and has all of them from then on.
    further: Annotated[list[BatchIdentity], msgspec.Meta(max_length=1023)] = []
    #: The batch's weight in its round, usually its records.
    weight: Weight
    #: How many batches the sender has begun since it was admitted, this one included.
    step: Natural = 0
    #: Rows that will follow.
    rows: Natural
    #: Step only: how long the server may hold the stream for rounds to close.
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=20)] = 2.0
    #: Step only: whether fresh values are wanted.
    pull: bool = True


class PushReply(Reply, frozen=True, kw_only=True):
    """The one acknowledgement of a push: how many rows met which outcome."""

    accepted: int = 0
    already_applied: int = 0
    stale: int = 0
    not_member: int = 0
    #: Sums that were not taken, because the block has some of their batches.
    partly_applied: int = 0
    #: Of these sums: the batches that some block lacks, to be pushed one by one; 0: ``identity``, 1: the first further.
    lacking: list[int] = []


class PullTicket(Request, frozen=True, kw_only=True):
    """Asks for blocks, each at or above a version. Without ``blocks``: all of this pserver."""

    verb: str = "pull"
    plan_hash: Name
    #: The membership of the puller; 0: anybody who only reads.
    member: Natural = 0
    blocks: list[Natural] | None = None
    #: One for each block, or a single one for all.
    min_versions: list[Natural] = msgspec.field(default_factory=lambda: [0])
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=20)] = 2.0


class InitHeader(Sender, frozen=True, kw_only=True):
    """Opens the upload of the first values (DoPut) by the trainer that won the election."""

    verb: str = "init"
    plan_hash: Name
    #: create_revision of the election's key: the newest winner's values count.
    election: Natural
    rows: Natural


class InitReply(Reply, frozen=True, kw_only=True):
    """How many blocks of this pserver have first values of that election, and how many there are."""

    initialized: int
    blocks: int


class ElectionRecord(Reply, frozen=True, kw_only=True):
    """The value of ``init_params``."""

    trainer: str
    done: bool = False


# --- checkpoints: master -> pserver; anybody -> master ---


class SnapshotRequest(OfPlan, frozen=True, kw_only=True):
    """Orders a copy of all blocks, or asks how far it is: only an order newer than all before does anything."""

    #: (master generation, checkpoint, proposal) order all orders of a job.
    master_generation: Natural
    number: Natural
    serial: Natural
    #: Copy each block when this round opens; None: now.
    round: Natural | None = None
    #: File to write, relative to the job's storage.
    name: Name


class ShardFileMessage(Reply, frozen=True, kw_only=True):
    """A file that a pserver wrote."""

    name: str
    size_bytes: int
    #: xxh3-128, hexadecimal.
    hash: str
    blocks: int
    lowest_version: int
    highest_version: int


class SnapshotReply(Reply, frozen=True, kw_only=True):
    """How far a pserver is with the newest order that it has heard of."""

    master_generation: int
    number: int
    serial: int
    #: refused, waiting, taken, written or failed.
    state: str
    highest_open_round: int = 0
    file: ShardFileMessage | None = None
    reason: str = ""
    #: Seconds that training stood still for the copies, at most, and that writing took.
    copied_s: float = 0.0
    written_s: float = 0.0


class ReloadRequest(OfPlan, frozen=True, kw_only=True):
    """Tells a pserver to end and come back from the newest checkpoint."""


class AppliedRequest(OfPlan, frozen=True, kw_only=True):
    """Asks a pserver what it has."""


class AppliedReply(Reply, frozen=True, kw_only=True):
    """Which tasks all blocks of a pserver have wholly, and the checkpoint that it started from."""

    #: ``AppliedSummary.encode``.
    summary: bytes
    checkpoint: int | None = None
    #: Checkpoints that could not be loaded, each with the reason.
    skipped: list[str] = []
    #: The election whose first values it should have, and has not; see ``domain.beginnings``.
    lacks_election: Natural | None = None


class SealRequest(OfPlan, frozen=True, kw_only=True):
    """Tells a pserver how many tasks epochs have that are over: [epoch, tasks]."""

    epochs: Annotated[list[tuple[Natural, Natural]], msgspec.Meta(max_length=1024)]


class CheckpointRequest(Request, frozen=True, kw_only=True):
    """Asks the master for a checkpoint of what there is now; ``ticket`` of an earlier answer: whether it is there."""

    ticket: Natural | None = None
    reason: Text = "a request"
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=20)] = 2.0


class CheckpointReply(Reply, frozen=True, kw_only=True):
    """Ask again with the ticket until ``complete``."""

    ticket: int
    complete: bool
    #: The newest complete checkpoint; 0: there is none.
    latest: int = 0
    trouble: str = ""


class SaveModelRequest(Request, frozen=True, kw_only=True):
    """Asks the master to write the model, taken from a new checkpoint, to a file; again: how far it is."""

    url: Text
    #: "safetensors", "npz" or "arrow"; empty: by the name.
    format: Text = ""


class SaveRecord(Reply, frozen=True, kw_only=True):
    """The value of ``saves/<url>``: the newest request to write the model there, and whether it is done."""

    trainer: str
    epoch: int
    number: int
    done: bool = False


class SaveModelReply(Reply, frozen=True, kw_only=True):
    """``state``: writing, written or failed."""

    state: str
    where: str = ""
    checkpoint: int = 0
    error: str = ""


# --- status ---


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


class FailedTasksRequest(Request, frozen=True, kw_only=True):
    """Which quarantined batches are meant (``retry_failed``, ``drop_failed``); None: any."""

    epoch: Natural | None = None
    task: Natural | None = None
    batch: Natural | None = None


class FailedTasksReply(Reply, frozen=True, kw_only=True):
    """How many batches it was about."""

    batches: int


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
    evaluations: list[EvaluationStatus] = []
    records: int = 0
    #: Batches that trainers worked through since this master began, those worked through again included.
    batches: int = 0
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


Message = TypeVar("Message", bound=msgspec.Struct)


def encode(message: msgspec.Struct) -> bytes:
    """JSON bytes of a message."""
    return msgspec.json.encode(message)


def decode(data: bytes, kind: type[Message]) -> Message:
    """The message in ``data``.

    Raises:
        MessageError: not JSON, or not of this kind; says which field.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise MessageError(f"not a valid {kind.__name__}: {str(error)[:200]}") from None
