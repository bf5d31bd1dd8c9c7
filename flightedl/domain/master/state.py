"""Settings of a master, and its initial state."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from msgspec.structs import replace

from flightedl.domain.checkpoint.checkpoints import Checkpoints
from flightedl.domain.checkpoint.manifest import ShardFile
from flightedl.domain.checkpoint.values import CheckpointSettings
from flightedl.domain.master.declaring import placed_model
from flightedl.domain.moving.values import StoredIntent
from flightedl.messages.declarations import JobDeclaration, Placement
from flightedl.messages.tasks import StopRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreSettings:
    """Settings that do not change while the master runs.

    Args:
        generation: Generation of the master.
        pserver_count: Number of the job's pservers.
        trainer_count: Number of trainers of a deterministic run; 0 if unknown.
        recovery: How the job recovers when a pserver restarts with older values.
        checkpoints: When checkpoints are made.
        keeps_checkpoints: True if a store for checkpoints is configured.
        attempts_limit: Number of a group's starts that the same records may end.
        rebalance_s: Seconds that a pserver must be busier than the others before some of its blocks move; 0: never.
    """

    generation: int
    pserver_count: int
    trainer_count: int = 0
    recovery: Literal["replay", "rollback"] = "replay"
    checkpoints: CheckpointSettings = field(default_factory=CheckpointSettings)
    keeps_checkpoints: bool = True
    attempts_limit: int = 5
    rebalance_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredState:
    """State that a predecessor stored, as the bytes returned by ``MasterCore.encode``; None for parts without state."""

    declaration: JobDeclaration = field(default_factory=JobDeclaration)
    queue: bytes | None = None
    failures: bytes | None = None
    evaluations: bytes | None = None
    membership: bytes | None = None
    recovery: bytes | None = None
    checkpoints: bytes | None = None
    group: bytes | None = None
    scaling: bytes | None = None
    #: Newest placement of blocks; None if it is the declaration's.
    placement: Placement | None = None
    #: Intent of a predecessor to move blocks.
    intent: StoredIntent | None = None
    #: Files of the newest checkpoint, including those on which they are based; empty if unknown.
    files: tuple[ShardFile, ...] = ()
    #: Record that the job was stopped; None if it was not.
    stop: StopRecord | None = None
    #: True if the queue comes from a checkpoint. The trainers that held the queue's tasks may then still be alive.
    is_resumed: bool = False


def checkpoints_of(stored: StoredState, settings: CoreSettings, count: int, now: float) -> Checkpoints:
    """Return the initial state of a job's checkpoints."""
    generation = settings.generation
    if stored.checkpoints is None:
        return Checkpoints(settings.checkpoints, generation, count, now)
    return Checkpoints.restore(stored.checkpoints, settings.checkpoints, generation, count, now, stored.files)


def placed_declaration(stored: StoredState) -> JobDeclaration:
    """Return the stored declaration, with the newest placement of the model's blocks."""
    declaration, newest = stored.declaration, stored.placement
    model = declaration.model
    if model is None or model.placement is None or newest is None or newest.version <= model.placement.version:
        return declaration
    return replace(declaration, model=placed_model(model, newest))
