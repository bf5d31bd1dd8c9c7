"""What a trainer that works says to the master: tasks and what became of them, membership, mode, progress.

A report carries its task's ``attempt``: one that is no longer current is refused, and named in the reply.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from flightedl.messages.base import Name, Natural, OfJob, Reply, Request, Sender, SenderOfJob, Text, Traceparent
from flightedl.messages.hosts import HostFacts

#: Different names of metrics in one message.
METRICS_LIMIT = 200
#: Characters of a trainer's stacks.
STACKS_LIMIT = 200_000
#: Stretches of done batches of one piece of work in one message.
STRETCHES_LIMIT = 16
#: A trainer says so often how far it is, unless the master wants it more seldom.
REPORT_EVERY_S = 0.5
#: Who has reported its last task and asks for no longer than this may stay a member meanwhile.
MOMENT_S = 0.03
#: name -> [weighted sum, weight].
Metrics = Annotated[dict[Name, tuple[float, float]], msgspec.Meta(max_length=METRICS_LIMIT)]


class OfPiece(Request, frozen=True, kw_only=True):
    """Names a piece of work that was handed out."""

    epoch: Natural
    position: Natural
    attempt: Natural


class FinishedTask(OfPiece, frozen=True, kw_only=True):
    """A piece of work whose every batch is acknowledged by every pserver of the generations given."""

    #: By index, the oldest generation of each pserver that acknowledged a batch of this piece; 0: it holds no blocks.
    pservers: list[Natural] = []
    #: Evaluations only: name -> [weighted sum, weight] over the piece.
    metrics: Metrics = {}


class FailedTask(OfPiece, frozen=True, kw_only=True):
    """A piece of work that the trainer could not do."""

    error: Text
    #: The batch at which it failed, where known.
    batch: Natural | None = None
    #: Where the user's code raised: the same for the same error at another batch. Empty: it did not raise.
    place: Text = ""


class ReturnedTask(OfPiece, frozen=True, kw_only=True):
    """A piece of work handed back unharmed, as a trainer does that leaves."""


class DoneBatches(Request, frozen=True, kw_only=True):
    """Batches that are done of a piece of work that its trainer holds or hands back; of data without a model."""

    attempt: Natural
    #: Half-open stretches of the task's batches.
    stretches: Annotated[list[tuple[Natural, Natural]], msgspec.Meta(max_length=STRETCHES_LIMIT)]


class TasksTicket(Sender, frozen=True, kw_only=True):
    """Reports and asks in one call."""

    verb: str = "tasks"
    #: Name of the evaluation whose tasks are meant; empty: the training data's.
    evaluation: Text = ""
    #: Of an evaluation: the life of the model that the trainer measures; see ``EvaluationDeclaration``.
    life: Natural = 0
    finished: list[FinishedTask] = []
    failed: list[FailedTask] = []
    returned: list[ReturnedTask] = []
    #: All that is done so far, where no model is declared. The master hands none of it out again.
    done: list[DoneBatches] = []
    #: Attempts that the trainer holds beside those reported: one that is missing here is told again, and has to be
    #: read again from its first batch. What is given up is listed in ``returned``.
    holding: list[Natural] = []
    #: How many pieces of work are wanted now; 0 only reports.
    want: Annotated[int, msgspec.Meta(ge=0, le=64)] = 1
    #: How long the master may hold the call while there is nothing to hand out.
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=20)] = 2.0
    #: The synchronous round whose values the trainer has; 0: not known. Members that join are waited for a round later.
    round: Natural = 0
    traceparent: Traceparent = ""


#: url, version, format, number, first record, records, offset, bytes of a chunk.
ChunkRow = tuple[str, str, str, Natural, Natural, Natural, Natural, Natural]


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
    #: What the records of the task are shuffled by in this epoch, below 2**64; None: they are read in stored order.
    seed: Natural | None
    #: Its chunks, on a request stream; who gets it has them as a record batch.
    chunks: list[ChunkRow] = []


class TasksReply(Reply, frozen=True, kw_only=True):
    """Where the ticket was that of a get, in the schema's metadata, beside a record batch for each assignment."""

    assignments: list[Assignment]
    #: "given", "none_now" or "epochs_done".
    outcome: str
    #: Tasks of the next epoch that the sender may open and read, not train: it will probably be given them. Attempts
    #: are 0, and chunks are there on a request stream only.
    ahead: list[Assignment] = []
    retry_after_s: float = 0.0
    #: The sender's membership, 0: it is not a member.
    member: int = 0
    #: With "epochs_done": the generation of each pserver, by index, whose values are final. Another process may have
    #: been restored from an older checkpoint: ask again before its values are taken for the result.
    pservers: list[int] = []
    #: With "none_now": every task is done, and it is being made sure that nothing of it can get lost.
    is_ending: bool = False
    #: Reports that were refused, because their attempt is no longer current: drop that work.
    lost: list[ReturnedTask] = []
    epoch: int = 0
    #: Evaluations only, once "epochs_done": weighted means over all records, and tasks that failed for good.
    metrics: dict[str, float] = {}
    failed: int = 0


class JoinRequest(Sender, frozen=True, kw_only=True):
    """A trainer that holds work asks to be waited for."""

    #: What it is about to work on; None: anything that it holds.
    attempt: Natural | None = None
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=20)] = 2.0


class JoinReply(Reply, frozen=True, kw_only=True):
    """``member`` 0: not agreed yet, ask again; unless the sender does not hold that work, for which nobody waits."""

    member: int
    #: False: the attempt is no longer current. It says nothing about other work of the sender.
    holds_work: bool = True
    waiting_for: str = ""
    #: Under which the membership begins; None: as before.
    mode: dict[str, Any] | None = None


class ModeRequest(OfJob, frozen=True, kw_only=True):
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


class EndGrowthRequest(SenderOfJob, frozen=True, kw_only=True):
    """Announces that no more files will join the dataset."""


class StopRequest(SenderOfJob, frozen=True, kw_only=True):
    """Ends the job before all of its data has been trained."""

    reason: Name
    #: The launcher's name for the trainer; empty if it has none.
    name: Text = ""


class StopRecord(Reply, frozen=True, kw_only=True):
    """The value of ``stopped`` in etcd: who stopped the job, and why."""

    who: str = "a trainer"
    reason: str = "its script called job.stop()"


class LogRequest(Sender, frozen=True, kw_only=True):
    """Progress of one trainer since its last message: sums over records."""

    records: Natural = 0
    batches: Natural = 0
    #: Those of them for which the user's code gave the declared model no gradient.
    idle_batches: Natural = 0
    #: Records that were passed over, because their chunk is corrupt and the dataset says to skip such.
    skipped_records: Natural = 0
    #: name -> [weighted sum, weight].
    metrics: Metrics = {}
    host: Text = ""
    pid: Natural = 0
    #: What the trainer waits for, empty when it works.
    waiting_for: Text = ""
    #: Since it was through with a batch, in seconds.
    batch_s: float = 0.0
    #: Seconds of its loop: "data", "script", "push", "wait" (for others of a round or for a version) and "pull".
    profile: Annotated[dict[Name, float], msgspec.Meta(max_length=8)] = {}
    #: What it does now: "data", "script" or, as long as it is with the parameter servers, "push"; empty: not known.
    doing: Text = ""
    facts: HostFacts | None = None
    #: "common" if the script shares what it trains: a declared model, ``explicit_done``, a process group, ``job.once``.
    #: "own" if it trained on batches and shares nothing so far; empty: not known.
    model: Text = ""
    #: Where its threads stand, if the master wanted to know; empty: it did not.
    stacks: Annotated[str, msgspec.Meta(max_length=STACKS_LIMIT)] = ""


class LogReply(Reply, frozen=True, kw_only=True):
    """Answers it."""

    #: Whether somebody wants to know where the trainer's threads stand.
    wants_stacks: bool = False
    #: When the next one is welcome: the more trainers there are, the less often each says something.
    every_s: Annotated[float, msgspec.Meta(ge=0.1, le=60)] = REPORT_EVERY_S


class FailedTasksRequest(OfJob, frozen=True, kw_only=True):
    """Which quarantined batches are meant (``retry_failed``, ``drop_failed``); None: any."""

    epoch: Natural | None = None
    task: Natural | None = None
    batch: Natural | None = None


class DroppedTasksRequest(FailedTasksRequest, frozen=True, kw_only=True):
    """Which quarantined batches are let go."""


class FailedTasksReply(Reply, frozen=True, kw_only=True):
    """How many batches it was about."""

    batches: int
