"""Settings of a master, and the state that it goes on from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from flightedl.domain.checkpoint.checkpoints import Checkpoints
from flightedl.domain.checkpoint.manifest import ShardFile
from flightedl.domain.checkpoint.values import CheckpointSettings
from flightedl.messages.declarations import JobDeclaration
from flightedl.messages.tasks import StopRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreSettings:
    """What stays the same for the life of a master.

    Args:
        generation: The master's.
        pserver_count: Of the job.
        trainer_count: For deterministic runs; 0: it is not known.
        recovery: What is done when a pserver comes back with less than it had.
        checkpoints: When they are made.
        keeps_checkpoints: Whether there is anywhere to keep them.
        attempts_limit: Number of a group's starts that the same records may end.
    """

    generation: int
    pserver_count: int
    trainer_count: int = 0
    recovery: Literal["replay", "rollback"] = "replay"
    checkpoints: CheckpointSettings = field(default_factory=CheckpointSettings)
    keeps_checkpoints: bool = True
    attempts_limit: int = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredState:
    """What a predecessor left. The bytes are as ``MasterCore.encode`` gave them; None: there is nothing of it."""

    declaration: JobDeclaration = field(default_factory=JobDeclaration)
    queue: bytes | None = None
    failures: bytes | None = None
    evaluations: bytes | None = None
    membership: bytes | None = None
    recovery: bytes | None = None
    checkpoints: bytes | None = None
    group: bytes | None = None
    #: Of the newest checkpoint, with what they are built on; empty: that is not known.
    files: tuple[ShardFile, ...] = ()
    #: Who stopped the job; None if nobody did.
    stop: StopRecord | None = None
    #: Whether the queue is that of a checkpoint: of the trainers that held work then nobody knows that they died.
    is_resumed: bool = False


def checkpoints_of(stored: StoredState, settings: CoreSettings, now: float) -> Checkpoints:
    """Return the checkpoints of a job as a master begins with them."""
    generation, count = settings.generation, settings.pserver_count
    if stored.checkpoints is None:
        return Checkpoints(settings.checkpoints, generation, count, now)
    return Checkpoints.restore(stored.checkpoints, settings.checkpoints, generation, count, now, stored.files)
