"""What a master has to do, as values, and where the parts of the core put them.

Each effect names a *revision*: it is carried out when the core's state of that revision, or a later one, is stored. 0:
at once.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from flightedl.domain.checkpoint.values import MovePointer, Sweep, WriteManifest
from flightedl.domain.queue.values import Effect as QueueEffect
from flightedl.domain.recovery.reinitialization import Reinitialize
from flightedl.errors import FlightedlError
from flightedl.messages.control import AppliedRequest, ReloadRequest, SealRequest, SnapshotRequest, ViewRequest

ControlRequest = AppliedRequest | ReloadRequest | SealRequest | SnapshotRequest | ViewRequest


class Done(msgspec.Struct, frozen=True):
    """The reply to a request that has nothing to tell but that it was carried out."""


class Undeclared(msgspec.Struct, frozen=True):
    """The reply to a declaration of what the job does not have yet: find out what follows from it, and ask again."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a request; an error is raised to whoever asked."""

    call: int
    reply: msgspec.Struct | FlightedlError
    revision: int


@dataclass(frozen=True, slots=True)
class ControlCall:
    """Say this to a process of a pserver, tell what it answers, and ask again. Comes for ``ControlAsked`` only.

    Its answer is told as the event of its kind. ``NotReadyError`` from the pserver: ask again after ``pause_s``.
    """

    index: int
    generation: int
    request: ControlRequest
    #: Of an ``AppliedRequest``: the audit that the answer is for; None: none.
    audit: int | None = None
    #: After the answer: how long there is nothing more to say, unless woken.
    pause_s: float = 0.0
    revision: int = 0


@dataclass(frozen=True, slots=True)
class NothingToSay:
    """There is nothing to say to this pserver: ask again after so long, or when woken."""

    index: int
    generation: int
    pause_s: float


@dataclass(frozen=True, slots=True)
class WakePserver:
    """There may be something to say to this pserver."""

    index: int


@dataclass(frozen=True, slots=True)
class DeleteElection:
    """Let the trainers elect again who gives the model its first values: a transaction that names these processes."""

    step: Reinitialize
    revision: int


@dataclass(frozen=True, slots=True)
class StoreWork:
    """Something to do in the checkpoints' storage; after all of these that came before it."""

    work: WriteManifest | MovePointer | Sweep
    revision: int


@dataclass(frozen=True, slots=True)
class QueueNews:
    """The queue of the training data ("") or of an evaluation has decided something that people should see."""

    evaluation: str
    effect: QueueEffect


class Kind(enum.StrEnum):
    """What may happen to a job that people want to know of, also later."""

    MASTER_LEADS = "master_leads"
    DECLARED = "declared"
    CHANGED_BY_HAND = "changed_by_hand"
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
    """Something that happened, for the log and for whoever asks later: a text with %-places, and its values."""

    text: str
    values: tuple[object, ...]
    kind: Kind
    #: Whom it is about: a trainer, or "pserver 3"; empty: the job.
    who: str = ""
    is_warning: bool = False


Effect = Answer | ControlCall | NothingToSay | WakePserver | DeleteElection | StoreWork | QueueNews | Note


def pserver_named(index: int) -> str:
    """What people call a pserver."""
    return f"pserver-{index}"


@dataclass(slots=True)
class Outbox:
    """Where the parts of a core put what comes of an event."""

    effects: list[Effect] = field(default_factory=list)
    #: Counts changes of the state that is stored.
    revision: int = 0
    #: Whether something has changed that a waiting request may wait for.
    is_stirred: bool = False

    def touch(self) -> None:
        self.revision += 1
        self.is_stirred = True

    def note(self, kind: Kind, who: str, text: str, *values: object, is_warning: bool = False) -> None:
        """Something has happened that people may want to know of; ``who``: see ``Note``."""
        self.effects.append(Note(text, values, kind, who, is_warning))

    def news(self, evaluation: str, effects: Iterable[QueueEffect]) -> None:
        self.effects.extend(QueueNews(evaluation, effect) for effect in effects)

    def wake(self, index: int) -> None:
        self.effects.append(WakePserver(index))

    def take(self) -> list[Effect]:
        effects, self.effects = self.effects, []
        return effects
