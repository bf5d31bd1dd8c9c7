"""Requests of a working trainer to the master: tasks and their results, membership, mode, progress.

A report carries the ``attempt`` of its task. The master refuses a report whose attempt is no longer current, and names
it in the reply.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from flightedl.messages.base import Name, Natural, OfJob, Reply, Request, Sender, SenderOfJob, Text, Traceparent
from flightedl.messages.hosts import HostFacts

#: Maximum number of metrics in a message.
METRICS_LIMIT = 200
#: Maximum length of a trainer's stacks, in characters.
STACKS_LIMIT = 200_000
#: Maximum number of ranges of done batches of one piece of work in a message.
STRETCHES_LIMIT = 16
#: Default interval between two progress reports of a trainer.
REPORT_EVERY_S = 0.5
#: A trainer that has reported its last task remains a member during a request with no longer ``wait_s`` than this.
MOMENT_S = 0.03
#: name -> [weighted sum, weight].
Metrics = Annotated[dict[Name, tuple[float, float]], msgspec.Meta(max_length=METRICS_LIMIT)]


class OfPiece(Request, frozen=True, kw_only=True):
    """Identity of an assigned piece of work."""

    epoch: Natural
    position: Natural
    attempt: Natural


class FinishedTask(OfPiece, frozen=True, kw_only=True):
    """A piece of work whose batches are all acknowledged by all pservers, in the given generations."""

    #: Oldest generation of each pserver that acknowledged a batch of this piece, by index; 0 if it holds no blocks.
    pservers: list[Natural] = []
    #: name -> [weighted sum, weight] over the piece (evaluations only).
    metrics: Metrics = {}


class FailedTask(OfPiece, frozen=True, kw_only=True):
    """A piece of work that failed."""

    error: Text
    #: Batch at which it failed; None if unknown.
    batch: Natural | None = None
    #: Place in the user's code that raised, the same for the same error at another batch; empty if none raised.
    place: Text = ""


class ReturnedTask(OfPiece, frozen=True, kw_only=True):
    """A piece of work that the trainer returns unfinished, for example because it leaves."""


class DoneBatches(Request, frozen=True, kw_only=True):
    """Done batches of a piece of work that the trainer holds or returns, for data without a model."""

    attempt: Natural
    #: Half-open ranges of the task's batches.
    stretches: Annotated[list[tuple[Natural, Natural]], msgspec.Meta(max_length=STRETCHES_LIMIT)]


class TasksTicket(Sender, frozen=True, kw_only=True):
    """Reports on pieces of work, and a request for more, in one call."""

    verb: str = "tasks"
    #: Name of the evaluation; empty for the training data.
    evaluation: Text = ""
    #: Life of the evaluated model, see ``EvaluationDeclaration`` (evaluations only).
    life: Natural = 0
    finished: list[FinishedTask] = []
    failed: list[FailedTask] = []
    returned: list[ReturnedTask] = []
    #: All batches done so far, if no model is declared. The master does not assign them again.
    done: list[DoneBatches] = []
    #: Other attempts that the trainer holds. The master repeats an assignment that is missing here. The trainer then
    #: reads it from its first batch. Pieces that the trainer gives up are in ``returned``.
    holding: list[Natural] = []
    #: Number of requested pieces of work; 0 only reports.
    want: Annotated[int, msgspec.Meta(ge=0, le=64)] = 1
    #: Seconds that the master may wait while it has nothing to assign.
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=20)] = 2.0
    #: Synchronous round whose values the trainer has; 0 if unknown. Rounds wait for new members from the next one on.
    round: Natural = 0
    traceparent: Traceparent = ""


#: A chunk: url, version, format, number, first record, records, offset, bytes.
ChunkRow = tuple[str, str, str, Natural, Natural, Natural, Natural, Natural]


class Assignment(Reply, frozen=True, kw_only=True):
    """A piece of work: batches ``first_batch`` to ``end_batch`` (exclusive) of a task."""

    epoch: int
    position: int
    task: int
    attempt: int
    first_batch: int
    end_batch: int
    #: Number of batches in the whole task.
    batch_count: int
    #: Seed by which the records of the task are shuffled in this epoch, below 2**64; None to read in stored order.
    seed: Natural | None
    #: The chunks, on a request stream. The answer to a get has them in a record batch instead.
    chunks: list[ChunkRow] = []


class TasksReply(Reply, frozen=True, kw_only=True):
    """Answer to a ``TasksTicket``. The answer to a get contains it in the schema's metadata."""

    assignments: list[Assignment]
    #: "given", "none_now" or "epochs_done".
    outcome: str
    #: Tasks of the next epoch that will probably be assigned to the sender, which may read them but not train on them.
    #: Their attempts are 0. They have chunks only on a request stream.
    ahead: list[Assignment] = []
    retry_after_s: float = 0.0
    #: Membership id of the sender; 0 if it is not a member.
    member: int = 0
    #: Generation of each pserver whose values are final, by index, with "epochs_done". Another process may have been
    #: restored from an older checkpoint: ask again before its values are used as the result.
    pservers: list[int] = []
    #: True with "none_now" if every task is done and the results are being made durable.
    is_ending: bool = False
    #: Refused reports, whose attempts are no longer current. The trainer drops that work.
    lost: list[ReturnedTask] = []
    epoch: int = 0
    #: Weighted means over all records, and number of failed tasks, with "epochs_done" (evaluations only).
    metrics: dict[str, float] = {}
    failed: int = 0


class JoinRequest(Sender, frozen=True, kw_only=True):
    """Request of a trainer that holds work to become a member, so that rounds wait for it."""

    #: Attempt that it is about to work on; None for any that it holds.
    attempt: Natural | None = None
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=20)] = 2.0


class JoinReply(Reply, frozen=True, kw_only=True):
    """Answer to a ``JoinRequest``."""

    #: Membership id. If it is 0 and the sender holds the work, the membership is not agreed yet: ask again.
    member: int
    #: False if the attempt is no longer current. Other work of the sender is not affected.
    holds_work: bool = True
    waiting_for: str = ""
    #: Mode at the start of the membership, a tagged object; None if it is unchanged.
    mode: dict[str, Any] | None = None


class ModeRequest(OfJob, frozen=True, kw_only=True):
    """Asks the master to change the consistency mode, and for the progress of the change. May be repeated."""

    #: The mode, a tagged object, see the domain's to_json; None to ask only for the progress.
    mode: dict[str, Any] | None = None
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=20)] = 2.0


class ModeReply(Reply, frozen=True, kw_only=True):
    """The newest mode."""

    mode: dict[str, Any]
    #: True if every pserver has the mode. Otherwise ask again.
    is_agreed: bool
    #: Round at which all blocks changed to it; 0 if it is the job's first mode.
    round: int = 0
    waiting_for: str = ""


class EndGrowthRequest(SenderOfJob, frozen=True, kw_only=True):
    """Announces that no more files will join the dataset."""


class StopRequest(SenderOfJob, frozen=True, kw_only=True):
    """Ends the job before all of its data has been trained."""

    reason: Name
    #: The launcher's name for the trainer; empty if it has none.
    name: Text = ""


class StopRecord(Reply, frozen=True, kw_only=True):
    """The value of ``stopped`` in etcd: the trainer that stopped the job, and its reason."""

    who: str = "a trainer"
    reason: str = "its script called job.stop()"


class LogRequest(Sender, frozen=True, kw_only=True):
    """Progress of one trainer since its last message: sums over records."""

    records: Natural = 0
    batches: Natural = 0
    #: Number of these batches without a gradient for the declared model.
    idle_batches: Natural = 0
    #: Number of skipped records in corrupt chunks, if the dataset has the policy to skip such chunks.
    skipped_records: Natural = 0
    #: name -> [weighted sum, weight].
    metrics: Metrics = {}
    host: Text = ""
    pid: Natural = 0
    #: Reason why the trainer waits; empty if it is working.
    waiting_for: Text = ""
    #: Seconds since it finished a batch.
    batch_s: float = 0.0
    #: Seconds of its loop by activity: "data", "script", "push", "wait" (for other trainers or a version) and "pull".
    profile: Annotated[dict[Name, float], msgspec.Meta(max_length=8)] = {}
    #: Present activity: "data", "script", or "push" during any work with parameter servers; empty if unknown.
    doing: Text = ""
    facts: HostFacts | None = None
    #: "common" if the script shares its model: a declared model, ``explicit_done``, a process group or ``job.once``.
    #: "own" if it trained on batches and has shared nothing so far; empty if unknown.
    model: Text = ""
    #: Stacks of its threads, if the master asked for them.
    stacks: Annotated[str, msgspec.Meta(max_length=STACKS_LIMIT)] = ""


class LogReply(Reply, frozen=True, kw_only=True):
    """Answer to a ``LogRequest``."""

    #: True to ask for the stacks of the trainer's threads.
    wants_stacks: bool = False
    #: Seconds until the next report. The interval grows with the number of trainers.
    every_s: Annotated[float, msgspec.Meta(ge=0.1, le=60)] = REPORT_EVERY_S


class FailedTasksRequest(OfJob, frozen=True, kw_only=True):
    """Selects quarantined batches for ``retry_failed`` or ``drop_failed``. A field that is None matches any value."""

    epoch: Natural | None = None
    task: Natural | None = None
    batch: Natural | None = None


class DroppedTasksRequest(FailedTasksRequest, frozen=True, kw_only=True):
    """Selects quarantined batches to drop."""


class FailedTasksReply(Reply, frozen=True, kw_only=True):
    """Number of batches that were selected."""

    batches: int
