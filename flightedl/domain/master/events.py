"""Events of the master's core, which are plain values.

An event with a ``call`` is a request. The core eventually emits exactly one
:class:`~flightedl.domain.master.effects.Answer` with the same ``call``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from flightedl.domain.master.effects import ControlRequest, Done
from flightedl.domain.moving.values import StoredIntent
from flightedl.domain.queue.values import QueueSettings
from flightedl.messages.checkpoints import CheckpointRequest
from flightedl.messages.control import AppliedReply, SnapshotReply, ViewReply
from flightedl.messages.declarations import (
    DatasetDeclaration,
    DeclaredDataset,
    EvaluationDeclaration,
    ModelDeclaration,
    Placement,
)
from flightedl.messages.groups import GroupLeaveRequest, GroupPlaceRequest, GroupStartRequest
from flightedl.messages.moving import MovedRequest
from flightedl.messages.scaling import ScaleRequest
from flightedl.messages.status import PserverStatusReply
from flightedl.messages.tasks import (
    DroppedTasksRequest,
    FailedTasksRequest,
    JoinRequest,
    ModeRequest,
    StopRequest,
    TasksTicket,
)


@dataclass(frozen=True, slots=True)
class TimePassed:
    """Time has passed, so the core must check its deadlines. The driver sends this a few times per second."""

    #: The trainers that have finished a batch since the previous ``TimePassed``.
    progressed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LeasesSeen:
    """The live leases at a revision of etcd or later: trainer -> generation, and pserver index -> generation."""

    trainers: Mapping[str, int]
    pservers: Mapping[int, int]
    revision: int


# --- requests ---

#: Requests from trainers and users. The first declaration of each kind is adopted.
Request = (
    TasksTicket
    | JoinRequest
    | ModeRequest
    | CheckpointRequest
    | FailedTasksRequest
    | DroppedTasksRequest
    | StopRequest
    | GroupStartRequest
    | GroupPlaceRequest
    | GroupLeaveRequest
    | DatasetDeclaration
    | ModelDeclaration
    | EvaluationDeclaration
    | ScaleRequest
    | MovedRequest
)


@dataclass(frozen=True, slots=True)
class Asked:
    """A request for a checkpoint. If ``is_last``, the wait ends once the store has failed several times."""

    call: int
    request: Request
    is_last: bool = False


@dataclass(frozen=True, slots=True)
class WaitEnded:
    """The timeout of a waiting request has expired, so the request must be answered now."""

    call: int


# --- consequences of declarations ---


@dataclass(frozen=True, slots=True)
class DatasetIndexed:
    """The tasks of a declared dataset. If the job has no dataset yet, the core adopts this dataset."""

    reply: DeclaredDataset
    tasks: QueueSettings


@dataclass(frozen=True, slots=True)
class FilesJoined:
    """The dataset has grown to ``task_count`` tasks. The numbers of existing tasks have not changed.

    ``batch_counts`` is as in ``QueueSettings``.
    """

    task_count: int
    batch_counts: Callable[[int], int]


@dataclass(frozen=True, slots=True)
class GrowthEnded:
    """The dataset is complete.

    Args:
        left_out: For each file that was excluded, the reason.
    """

    left_out: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelPlanned:
    """The block plan of a declared model. If the job has no model yet, the core adopts this model."""

    declared: ModelDeclaration
    plan_hash: str
    block_count: int
    placement: Placement | None = None


@dataclass(frozen=True, slots=True)
class EvaluationIndexed:
    """The tasks of an evaluation are known. The evaluation begins, or continues where a previous master stopped."""

    name: str
    reply: DeclaredDataset
    tasks: QueueSettings


# --- pservers ---


@dataclass(frozen=True, slots=True)
class ControlAsked:
    """A pserver's process is ready for the next call. The core responds with one ``ControlCall`` or ``NoCallDue``."""

    index: int
    generation: int


@dataclass(frozen=True, slots=True)
class Answered:
    """A pserver's answer to a ``ControlCall``. All fields except ``reply`` are copied from the call."""

    index: int
    generation: int
    request: ControlRequest
    #: None if the call may not have arrived. This is reported only for calls that send a view.
    reply: ViewReply | AppliedReply | SnapshotReply | Done | None
    audit: int | None = None


@dataclass(frozen=True, slots=True)
class StatusReceived:
    """The latest status of each pserver, by index; None if the pserver is unreachable."""

    replies: Sequence[PserverStatusReply | None]


@dataclass(frozen=True, slots=True)
class MovesRead:
    """Stored placement and intent, read at one revision.

    Args:
        placement: None if no placement is stored beside the declaration.
        stored: None if there is no intent.
        revision: Revision of etcd.
        is_outcome: True if this is the outcome of the transaction in progress.
    """

    placement: Placement | None
    stored: StoredIntent | None
    revision: int
    is_outcome: bool = False


# --- the checkpoints' storage ---


@dataclass(frozen=True, slots=True)
class ManifestWritten:
    """A checkpoint's manifest has been written to the store."""

    number: int
    checksum: str


@dataclass(frozen=True, slots=True)
class ManifestFailed:
    """A checkpoint's manifest could not be written. ``lacks_file`` is true if the store lacks a pserver's file."""

    number: int
    reason: str
    lacks_file: bool = False


@dataclass(frozen=True, slots=True)
class PointerStored:
    """The master's state, including the pointer to this checkpoint, has been stored."""

    number: int


Event = (
    TimePassed
    | LeasesSeen
    | Asked
    | WaitEnded
    | DatasetIndexed
    | FilesJoined
    | GrowthEnded
    | ModelPlanned
    | EvaluationIndexed
    | ControlAsked
    | Answered
    | StatusReceived
    | MovesRead
    | ManifestWritten
    | ManifestFailed
    | PointerStored
)
