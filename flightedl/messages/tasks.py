"""Requests from a working trainer to the master: tasks and their results, membership, mode, progress.

Each report carries the ``attempt`` of its task. If the attempt is no longer current, the master rejects the report and
lists the attempt in its reply.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from flightedl.messages.base import Name, Natural, OfJob, Reply, Request, Sender, SenderOfJob, Text, Traceparent
from flightedl.messages.hosts import HostFacts

#: Maximum number of metrics per message.
METRICS_LIMIT = 200
#: Maximum length of a trainer's stack traces, in characters.
STACKS_LIMIT = 200_000
#: Maximum number of ranges of completed batches per piece of work in a message.
STRETCHES_LIMIT = 16
#: Default interval between two progress reports of a trainer, in seconds.
REPORT_EVERY_S = 0.5
#: Maximum ``wait_s`` of a request during which a trainer without tasks may remain a member.
MOMENT_S = 0.03
#: name -> [weighted sum, weight].
Metrics = Annotated[dict[Name, tuple[float, float]], msgspec.Meta(max_length=METRICS_LIMIT)]


class OfPiece(Request, frozen=True, kw_only=True):
    """Identity of an assigned piece of work."""

    epoch: Natural
    position: Natural
    attempt: Natural


class FinishedTask(OfPiece, frozen=True, kw_only=True):
    """A finished piece of work: pservers of these generations have acknowledged all of its batches."""

    #: Index of a pserver -> oldest generation that acknowledged a batch of this piece; 0 if it has no blocks.
    pservers: list[Natural] = []
    #: Oldest placement of blocks that was used to push a batch of this piece; 0 if none is stored.
    placement: Natural = 0
    #: Name of a metric -> [weighted sum, weight] over the piece (evaluations only).
    metrics: Metrics = {}


class FailedTask(OfPiece, frozen=True, kw_only=True):
    """A piece of work that failed."""

    error: Text
    #: Batch at which the piece failed; None if unknown.
    batch: Natural | None = None
    #: Location in the user's code that raised the exception, whatever the batch; empty if there was no exception.
    place: Text = ""
    #: Cause: "store", "decoder" (the data is corrupt), "code" (of the user) or "machine"; empty if unknown.
    fault: Text = ""


class ReturnedTask(OfPiece, frozen=True, kw_only=True):
    """A piece of work that the trainer returns unfinished, for example because it is leaving."""


class DoneBatches(Request, frozen=True, kw_only=True):
    """The completed batches of a piece of work that the trainer holds or returns (only for data without a model)."""

    attempt: Natural
    #: Half-open ranges of batches within the task.
    stretches: Annotated[list[tuple[Natural, Natural]], msgspec.Meta(max_length=STRETCHES_LIMIT)]


class TasksTicket(Sender, frozen=True, kw_only=True):
    """Reports on pieces of work and a request for more of them, in a single call."""

    verb: str = "tasks"
    #: Name of the trainer that outlives its process: the launcher's, or its rank, or its host; empty if unknown. The
    #: master blames a piece of work for failures only if trainers with different names, or one that has processed other
    #: work since, have failed at it.
    witness: Text = ""
    #: Name of the evaluation; empty for training data.
    evaluation: Text = ""
    #: Life of the evaluated model; see ``EvaluationDeclaration`` (evaluations only).
    life: Natural = 0
    finished: list[FinishedTask] = []
    failed: list[FailedTask] = []
    returned: list[ReturnedTask] = []
    #: All batches that are done so far, if no model is declared. The master does not assign them again.
    done: list[DoneBatches] = []
    #: Attempts that the trainer still holds. If an attempt is missing from this list, the master assigns it again, and
    #: the trainer reads the piece from its first batch. Pieces that the trainer gives up are listed in ``returned``.
    holding: list[Natural] = []
    #: Number of requested pieces of work; 0 if the trainer only reports.
    want: Annotated[int, msgspec.Meta(ge=0, le=64)] = 1
    #: Maximum seconds that the master waits if it has nothing to assign.
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=20)] = 2.0
    #: Synchronous round whose values the trainer has; 0 if unknown. If the trainer joins, the next round waits for it.
    round: Natural = 0
    #: True if the trainer reads ``Assignment.parts``.
    reads_parts: bool = False
    traceparent: Traceparent = ""


#: A chunk as a list: url, version, format, number, first record, number of records, offset, number of bytes.
ChunkRow = tuple[str, str, str, Natural, Natural, Natural, Natural, Natural]


class Assignment(Reply, frozen=True, kw_only=True):
    """A piece of work: batches ``first_batch`` (inclusive) to ``end_batch`` (exclusive) of a task."""

    epoch: int
    position: int
    task: int
    attempt: int
    first_batch: int
    end_batch: int
    #: Number of batches in the task.
    batch_count: int
    #: Seed, below 2**64, for the order of the task's records in this epoch; None for the stored order.
    seed: Natural | None
    #: Chunks of the task, in replies on a request stream. A response to DoGet carries the chunks in a record batch.
    chunks: list[ChunkRow] = []
    #: For each chunk that is a part of a larger one: number of the larger one's records before it, and in all; [0, 0]
    #: for other chunks. Empty if no chunk is a part.
    parts: list[tuple[Natural, Natural]] = []


class TasksReply(Reply, frozen=True, kw_only=True):
    """Reply to a ``TasksTicket``. A response to DoGet carries it in the metadata of the stream's schema."""

    assignments: list[Assignment]
    #: "given", "none_now" or "epochs_done".
    outcome: str
    #: Tasks of the next epoch that will probably be assigned to the sender. The sender may read these tasks early, but
    #: must not train on them. Their attempt numbers are 0, and they include chunks only on a request stream.
    ahead: list[Assignment] = []
    retry_after_s: float = 0.0
    #: With "none_now": why the sender gets no work although there is some, for users; empty if there is no reason.
    waiting_for: str = ""
    #: Membership id of the sender; 0 if the sender is not a member.
    member: int = 0
    #: With "epochs_done": index of each pserver -> generation of the process that has the final values. Repeat the
    #: request before using another process's values, which may come from an older checkpoint.
    pservers: list[int] = []
    #: With "none_now": true if every task is done and the results are still being stored durably.
    is_ending: bool = False
    #: Attempts whose reports were rejected because they are no longer current. The trainer drops these attempts.
    lost: list[ReturnedTask] = []
    epoch: int = 0
    #: With "epochs_done": weighted means over all records (evaluations only).
    metrics: dict[str, float] = {}
    #: With "epochs_done": number of failed tasks (evaluations), or of quarantined batches (training data).
    failed: int = 0
    #: With "epochs_done": number of records in the quarantined batches, and their files, records and errors, for users.
    lost_records: int = 0
    lost_places: list[str] = []


class JoinRequest(Sender, frozen=True, kw_only=True):
    """Request to become a member, from a trainer that holds work, so that rounds wait for it."""

    #: Attempt on which the trainer is about to work; None for any attempt that it holds.
    attempt: Natural | None = None
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=20)] = 2.0


class JoinReply(Reply, frozen=True, kw_only=True):
    """Answer to a ``JoinRequest``."""

    #: Membership id. If it is 0 although the attempt is current, the pservers have not agreed yet: repeat the request.
    member: int
    #: False if the attempt is no longer current. The sender's other work is not affected.
    holds_work: bool = True
    waiting_for: str = ""
    #: Mode at the start of the membership, as a tagged object; None if the mode has not changed.
    mode: dict[str, Any] | None = None


class ModeRequest(OfJob, frozen=True, kw_only=True):
    """Requests a change of the consistency mode, or the progress of a change. May be repeated."""

    #: The mode as a tagged object (see ``to_json`` in the domain); None to request only the progress.
    mode: dict[str, Any] | None = None
    #: True if ``push_every`` may be far more than the batches of a task.
    short_pushes: bool = False
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=20)] = 2.0


class ModeReply(Reply, frozen=True, kw_only=True):
    """The newest mode."""

    mode: dict[str, Any]
    #: True if every pserver has changed to the mode. Otherwise, repeat the request.
    is_agreed: bool
    #: Round at which all blocks changed to the mode; 0 for the job's first mode.
    round: int = 0
    waiting_for: str = ""
    #: Mean number of batches in a push, as a sentence; empty if each batch is pushed alone.
    pushes: str = ""


class EndGrowthRequest(SenderOfJob, frozen=True, kw_only=True):
    """Announces that no more files will be added to the dataset."""


class StopRequest(SenderOfJob, frozen=True, kw_only=True):
    """Ends the job before all of its data has been trained on."""

    reason: Name
    #: Name that the launcher gave to the trainer; empty if there is none.
    name: Text = ""


class StopRecord(Reply, frozen=True, kw_only=True):
    """Value of the key ``stopped``: the trainer that stopped the job, and its reason."""

    who: str = "a trainer"
    reason: str = "its script called job.stop()"


class LogRequest(Sender, frozen=True, kw_only=True):
    """Progress of a trainer since its previous report. The fields are sums over records."""

    records: Natural = 0
    batches: Natural = 0
    #: Number of the finished batches for which the script pushed no gradient to the declared model.
    idle_batches: Natural = 0
    #: Number of records skipped in corrupt chunks, if the dataset's policy is to skip such chunks.
    skipped_records: Natural = 0
    #: name -> [weighted sum, weight].
    metrics: Metrics = {}
    host: Text = ""
    pid: Natural = 0
    #: Reason why the trainer is waiting; empty if it is not.
    waiting_for: Text = ""
    #: Seconds since the trainer finished its last batch.
    batch_s: float = 0.0
    #: Seconds that the trainer spent in each activity: "data", "script", "push", "wait" (for other trainers or a
    #: version), and "pull".
    profile: Annotated[dict[Name, float], msgspec.Meta(max_length=8)] = {}
    #: Current activity: "data", "script", or "push" for any communication with parameter servers; empty if unknown.
    doing: Text = ""
    #: Seconds since the script connected if it has not asked for a batch; 0 if it has.
    starting_s: float = 0.0
    facts: HostFacts | None = None
    #: "common" if the script seems to share its model: it declares a model, or uses ``explicit_done``, a process group
    #: or ``job.once``. "own" if the script has trained on batches without any of these; empty if unknown.
    model: Text = ""
    #: Stack traces of the trainer's threads, if the master requested them.
    stacks: Annotated[str, msgspec.Meta(max_length=STACKS_LIMIT)] = ""


class LogReply(Reply, frozen=True, kw_only=True):
    """Answer to a ``LogRequest``."""

    #: True to request the stack traces of the trainer's threads.
    wants_stacks: bool = False
    #: Seconds until the next report. The interval grows with the number of trainers.
    every_s: Annotated[float, msgspec.Meta(ge=0.1, le=60)] = REPORT_EVERY_S


class FailedTasksRequest(OfJob, frozen=True, kw_only=True):
    """Selects quarantined batches for ``retry_failed`` or ``drop_failed``. A field that is None matches every value."""

    epoch: Natural | None = None
    task: Natural | None = None
    batch: Natural | None = None


class DroppedTasksRequest(FailedTasksRequest, frozen=True, kw_only=True):
    """Selects quarantined batches to drop."""


class FailedTasksReply(Reply, frozen=True, kw_only=True):
    """Number of selected batches."""

    batches: int
