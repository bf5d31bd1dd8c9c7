"""What happens to a master, as values.

An event with a ``call`` is a request that somebody waits for; sooner or later there is one
:class:`~flightedl.domain.master.effects.Answer` with that number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from flightedl.domain.master.effects import ControlRequest, Done
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
    """Nothing else has happened for a moment: looks at deadlines. Comes a few times a second."""

    #: Trainers that have finished a batch since the last such event.
    progressed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LeasesSeen:
    """Whose lease is alive: trainer -> generation, pserver index -> generation, as of a revision of etcd or later."""

    trainers: Mapping[str, int]
    pservers: Mapping[int, int]
    revision: int


# --- requests ---

#: Trainers and people ask this. The first declaration of each kind wins.
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
)


@dataclass(frozen=True, slots=True)
class Asked:
    """Somebody asks. ``is_last``: a checkpoint is waited for until the store has failed again and again."""

    call: int
    request: Request
    is_last: bool = False


@dataclass(frozen=True, slots=True)
class WaitEnded:
    """The time of a request is up: it is answered now, with what there is."""

    call: int


# --- consequences of declarations ---


@dataclass(frozen=True, slots=True)
class DatasetIndexed:
    """The tasks of a declared dataset are known. It becomes the job's, unless there is one."""

    reply: DeclaredDataset
    tasks: QueueSettings


@dataclass(frozen=True, slots=True)
class FilesJoined:
    """The dataset has grown to so many tasks; the first ones are those it had. ``batch_counts``: as of the queue."""

    task_count: int
    batch_counts: Callable[[int], int]


@dataclass(frozen=True, slots=True)
class GrowthEnded:
    """No more tasks are to come.

    Args:
        left_out: Why each file that is there and did not join was refused.
    """

    left_out: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelPlanned:
    """How a declared model, which is valid, lies on the pservers. It becomes the job's, unless there is one."""

    declared: ModelDeclaration
    plan_hash: str
    block_count: int
    placement: Placement | None = None


@dataclass(frozen=True, slots=True)
class EvaluationIndexed:
    """The tasks of an evaluation are known: it begins, or goes on where a predecessor left it."""

    name: str
    reply: DeclaredDataset
    tasks: QueueSettings


# --- pservers ---


@dataclass(frozen=True, slots=True)
class ControlAsked:
    """This process of a pserver can be called; there is one ``ControlCall`` or ``NothingToSay`` for it."""

    index: int
    generation: int


@dataclass(frozen=True, slots=True)
class Answered:
    """A pserver has answered a ``ControlCall``. All fields but ``reply`` are copied from that call."""

    index: int
    generation: int
    request: ControlRequest
    #: None: the call may not have arrived; only views are reported as lost.
    reply: ViewReply | AppliedReply | SnapshotReply | Done | None
    audit: int | None = None


@dataclass(frozen=True, slots=True)
class StatusTold:
    """What each pserver last said of itself, by index; None: it cannot be reached."""

    replies: Sequence[PserverStatusReply | None]


# --- the checkpoints' storage ---


@dataclass(frozen=True, slots=True)
class ManifestWritten:
    """The manifest of a checkpoint is in the store."""

    number: int
    checksum: str


@dataclass(frozen=True, slots=True)
class ManifestFailed:
    """It could not be written."""

    number: int
    reason: str


@dataclass(frozen=True, slots=True)
class PointerStored:
    """The state that names this checkpoint is stored."""

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
    | StatusTold
    | ManifestWritten
    | ManifestFailed
    | PointerStored
)
