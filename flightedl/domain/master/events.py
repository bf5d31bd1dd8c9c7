"""What happens to a master, as values.

An event with a ``call`` is a request that somebody waits for; sooner or later there is one
:class:`~flightedl.domain.master.effects.Answer` with that number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from flightedl.domain.queue.values import QueueSettings
from flightedl.messages.checkpoints import CheckpointRequest
from flightedl.messages.control import AppliedReply, SnapshotReply, ViewReply
from flightedl.messages.declarations import DatasetDeclaration, DeclaredDataset, ModelDeclaration
from flightedl.messages.status import PserverStatusReply
from flightedl.messages.tasks import FailedTasksRequest, JoinRequest, ModeRequest, StopRequest, TasksTicket


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


# --- declarations ---


@dataclass(frozen=True, slots=True)
class DatasetDeclared:
    """A trainer declares the training data."""

    call: int
    declared: DatasetDeclaration


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
class ModelDeclared:
    """A trainer declares the model."""

    call: int
    declared: ModelDeclaration


@dataclass(frozen=True, slots=True)
class ModelPlanned:
    """How a declared model, which is valid, lies on the pservers. It becomes the job's, unless there is one."""

    declared: ModelDeclaration
    plan_hash: str
    block_count: int


@dataclass(frozen=True, slots=True)
class EvaluationDeclared:
    """A trainer wants to take part in an evaluation."""

    call: int
    name: str
    declared: DatasetDeclaration
    life: int = 0


@dataclass(frozen=True, slots=True)
class EvaluationIndexed:
    """The tasks of an evaluation are known: it begins, or goes on where a predecessor left it."""

    name: str
    reply: DeclaredDataset
    tasks: QueueSettings


# --- requests ---


@dataclass(frozen=True, slots=True)
class WorkAsked:
    """A trainer reports, and asks for work."""

    call: int
    ticket: TasksTicket


@dataclass(frozen=True, slots=True)
class JoinAsked:
    """A trainer that holds work asks to be waited for."""

    call: int
    request: JoinRequest


@dataclass(frozen=True, slots=True)
class ModeAsked:
    """Somebody asks for another consistency mode, or how far a change of it is."""

    call: int
    request: ModeRequest


@dataclass(frozen=True, slots=True)
class CheckpointAsked:
    """Somebody asks for a checkpoint, or how far one is. ``is_last``: the store's failures end the wait for it."""

    call: int
    request: CheckpointRequest
    is_last: bool = False


@dataclass(frozen=True, slots=True)
class FailedWorkAsked:
    """Somebody wants quarantined batches to be done again, or let go."""

    call: int
    request: FailedTasksRequest
    is_dropped: bool


@dataclass(frozen=True, slots=True)
class StopAsked:
    """A trainer ends the job before all of its data was trained."""

    call: int
    request: StopRequest


@dataclass(frozen=True, slots=True)
class WaitEnded:
    """The time of a request is up: it is answered now, with what there is."""

    call: int


# --- pservers ---


@dataclass(frozen=True, slots=True)
class ControlAsked:
    """This process of a pserver can be called; there is one ``ControlCall`` or ``NothingToSay`` for it."""

    index: int
    generation: int


@dataclass(frozen=True, slots=True)
class ViewAnswered:
    """A pserver's answer to a view."""

    index: int
    generation: int
    reply: ViewReply


@dataclass(frozen=True, slots=True)
class ViewLost:
    """A view may not have arrived."""

    index: int
    generation: int
    serial: int


@dataclass(frozen=True, slots=True)
class AppliedAnswered:
    """What a pserver has. ``audit``: as in the ``ControlCall`` that asked."""

    index: int
    generation: int
    audit: int | None
    reply: AppliedReply


@dataclass(frozen=True, slots=True)
class SealAnswered:
    """A pserver knows how many tasks the epochs below ``end_epoch`` have, or refuses to."""

    index: int
    generation: int
    end_epoch: int


@dataclass(frozen=True, slots=True)
class ReloadAnswered:
    """A pserver has heard that it has to end and come back."""

    index: int
    generation: int


@dataclass(frozen=True, slots=True)
class SnapshotAnswered:
    """How far a pserver is with its part of a checkpoint."""

    index: int
    generation: int
    reply: SnapshotReply


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
    | DatasetDeclared
    | DatasetIndexed
    | FilesJoined
    | GrowthEnded
    | ModelDeclared
    | ModelPlanned
    | EvaluationDeclared
    | EvaluationIndexed
    | WorkAsked
    | JoinAsked
    | ModeAsked
    | CheckpointAsked
    | FailedWorkAsked
    | StopAsked
    | WaitEnded
    | ControlAsked
    | ViewAnswered
    | ViewLost
    | AppliedAnswered
    | SealAnswered
    | ReloadAnswered
    | SnapshotAnswered
    | StatusTold
    | ManifestWritten
    | ManifestFailed
    | PointerStored
)
