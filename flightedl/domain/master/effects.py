"""Effects of the master's core, which are plain values, and the outbox that collects them.

Each effect names a *revision*. The driver carries out the effect once the core's state at that revision, or at a later
one, has been stored. An effect with revision 0 is carried out immediately.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from flightedl.domain.checkpoint.values import MovePointer, Sweep, WriteManifest
from flightedl.domain.moving.values import Transaction
from flightedl.domain.queue.values import Effect as QueueEffect
from flightedl.domain.recovery.reinitialization import Reinitialize
from flightedl.errors import FlightedlError
from flightedl.messages.control import AppliedRequest, ReloadRequest, SealRequest, SnapshotRequest, ViewRequest

ControlRequest = AppliedRequest | ReloadRequest | SealRequest | SnapshotRequest | ViewRequest


class Done(msgspec.Struct, frozen=True):
    """The answer to a completed request that has no result."""


class Undeclared(msgspec.Struct, frozen=True):
    """The reply to a first declaration. The driver indexes the data or plans the model, then declares again."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a request. If it is an error, the driver raises it in the caller."""

    call: int
    reply: msgspec.Struct | FlightedlError
    revision: int


@dataclass(frozen=True, slots=True)
class ControlCall:
    """Call a pserver's process, report the answer as ``Answered``, then request the next call.

    Emitted only in response to ``ControlAsked``. If the pserver raises ``NotReadyError``, request the next call after
    ``pause_s``.
    """

    index: int
    generation: int
    request: ControlRequest
    #: Number of the audit to which the ``AppliedRequest`` belongs, or None.
    audit: int | None = None
    #: Seconds to pause after the answer, unless the pserver is woken earlier.
    pause_s: float = 0.0
    revision: int = 0


@dataclass(frozen=True, slots=True)
class NoCallDue:
    """No call to this pserver is due. Request the next call after ``pause_s`` seconds, or when woken."""

    index: int
    generation: int
    pause_s: float


@dataclass(frozen=True, slots=True)
class WakePserver:
    """Request the next call to this pserver now."""

    index: int


@dataclass(frozen=True, slots=True)
class DeleteElection:
    """Delete the key with which a trainer was elected to initialize the model, so that trainers hold a new election.

    The transaction is conditional on the pservers named in ``step``.
    """

    step: Reinitialize
    revision: int


@dataclass(frozen=True, slots=True)
class StoreMoves:
    """Execute a transaction of ``domain.moving``, repeatedly until its outcome is known. Report it as ``MovesRead``."""

    transaction: Transaction
    revision: int


@dataclass(frozen=True, slots=True)
class StoreWork:
    """An operation on the checkpoint storage. The driver carries out these operations one after another."""

    work: WriteManifest | MovePointer | Sweep
    revision: int


@dataclass(frozen=True, slots=True)
class QueueNews:
    """A queue's decision, to be logged. The queue is that of the training data ("") or of the named evaluation."""

    evaluation: str
    effect: QueueEffect


class Kind(enum.StrEnum):
    """Kind of an event in a job's history."""

    MASTER_LEADS = "master_leads"
    DECLARED = "declared"
    CHANGED_BY_HAND = "changed_by_hand"
    REBALANCED = "rebalanced"
    TRAINER_CAME = "trainer_came"
    TRAINER_GONE = "trainer_gone"
    MEMBER_JOINED = "member_joined"
    MEMBER_LEFT = "member_left"
    PSERVER_CAME = "pserver_came"
    PSERVER_GONE = "pserver_gone"
    PSERVER_SETTLED = "pserver_settled"
    VALUES_LOST = "values_lost"
    ROUND_WAITS = "round_waits"
    ROUND_GOES_ON = "round_goes_on"
    CALLS_REFUSED = "calls_refused"
    WORK_FAILED = "work_failed"
    WORK_LOST = "work_lost"
    WORK_EXPIRED = "work_expired"
    WORK_QUARANTINED = "work_quarantined"
    EPOCH_DONE = "epoch_done"
    CHECKPOINT_DONE = "checkpoint_done"
    CHECKPOINT_TROUBLE = "checkpoint_trouble"
    JOB_REFUSED = "job_refused"
    JOB_STOPPED = "job_stopped"
    GROUP_RUNS = "group_runs"
    GROUP_OVER = "group_over"
    JOB_DONE = "job_done"


@dataclass(frozen=True, slots=True)
class Note:
    """An event for the log and the job's history: a message template with %-placeholders, and the values for them."""

    text: str
    values: tuple[object, ...]
    kind: Kind
    #: Name of the trainer or pserver ("pserver-3") that the event is about; empty if it is about the job.
    who: str = ""
    is_warning: bool = False


Effect = Answer | ControlCall | NoCallDue | WakePserver | DeleteElection | StoreMoves | StoreWork | QueueNews | Note


def pserver_named(index: int) -> str:
    """Return the name of a pserver."""
    return f"pserver-{index}"


@dataclass(slots=True)
class Outbox:
    """Collects the effects of the current event from all of the core's modules."""

    effects: list[Effect] = field(default_factory=list)
    #: Number of times that the stored state has changed.
    revision: int = 0
    #: True if a request may have been waiting for one of the changes.
    wakes_requests: bool = False

    def touch(self) -> None:
        self.revision += 1
        self.wakes_requests = True

    def note(self, kind: Kind, who: str, text: str, *values: object, is_warning: bool = False) -> None:
        self.effects.append(Note(text, values, kind, who, is_warning))

    def news(self, evaluation: str, effects: Iterable[QueueEffect]) -> None:
        self.effects.extend(QueueNews(evaluation, effect) for effect in effects)

    def wake(self, index: int) -> None:
        self.effects.append(WakePserver(index))

    def take(self) -> list[Effect]:
        effects, self.effects = self.effects, []
        return effects
