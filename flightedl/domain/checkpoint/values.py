"""Settings, orders, progress and effects of checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

from flightedl.errors import UsageError
from flightedl.messages.control import SnapshotRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSettings:
    """When checkpoints are made, and how many are kept.

    Args:
        interval_s: At most this long after the last one was ordered; None: not by time.
        interval_tasks: After this many finished tasks; None: not by tasks.
        at_epoch_end: At the end of each epoch.
        keep: So many of the newest stay.
        keep_every: Those whose number is a multiple of it stay for ever; None: none.
        increments: Of rows of tables, so many checkpoints in a row have only what has changed; 0: none.
        patience_s: An agreed round that is not reached within this time is given up: the copies are taken at once.
        give_up_s: Copies that are not written within this time are given up.
        retry_floor_s: Wait after a failure; doubles with each further one ...
        retry_ceiling_s: ... up to this.
    """

    interval_s: float | None = 600.0
    interval_tasks: int | None = None
    at_epoch_end: bool = True
    keep: int = 3
    keep_every: int | None = None
    increments: int = 8
    patience_s: float = 30.0
    give_up_s: float = 1800.0
    retry_floor_s: float = 1.0
    retry_ceiling_s: float = 60.0

    def __post_init__(self) -> None:
        if self.keep < 1 or (self.keep_every is not None and self.keep_every < 1):
            raise UsageError("checkpoints: keep and keep_every must be at least 1")
        if self.increments < 0:
            raise UsageError("checkpoints: increments must not be below 0")
        if (self.interval_s is not None and self.interval_s <= 0) or (
            self.interval_tasks is not None and self.interval_tasks < 1
        ):
            raise UsageError("checkpoints: an interval must be above 0 seconds, or at least 1 task")
        if not 0 < self.retry_floor_s <= self.retry_ceiling_s or self.patience_s <= 0 or self.give_up_s <= 0:
            raise UsageError("checkpoints: times must be above 0, and retry_floor_s at most retry_ceiling_s")


@dataclass(frozen=True, slots=True)
class OpenRounds:
    """What the master knows of the rounds, in sync mode."""

    #: The highest open round that any pserver told of.
    highest: int
    #: False: nobody trains, so rounds stand still.
    has_members: bool = True


@dataclass(frozen=True, slots=True)
class Pointer:
    """The newest complete checkpoint."""

    number: int
    #: ``manifest.checksum`` of the manifest's bytes.
    manifest_checksum: str


# --- effects ---


@dataclass(frozen=True, slots=True)
class Persist:
    """Store ``encode()`` under the master's fence, and do nothing of what comes after it before that is done."""


@dataclass(frozen=True, slots=True)
class OrderSnapshot:
    """Send this order to a pserver; then tell ``progressed`` its answer, or ``send_failed``."""

    index: int
    generation: int
    #: Its plan is filled in when it is sent.
    snapshot: SnapshotRequest


@dataclass(frozen=True, slots=True)
class WriteManifest:
    """Publish ``manifest(...)``; then tell ``manifest_written`` or ``manifest_failed``."""

    number: int


@dataclass(frozen=True, slots=True)
class MovePointer:
    """``encode()`` names the new checkpoint now; when it is stored, tell ``pointer_moved``. Follows a ``Persist``."""

    pointer: Pointer


@dataclass(frozen=True, slots=True)
class Sweep:
    """List the storage, and delete what ``deletable`` says, in its order, up to the first failure.

    A failure is no trouble: it comes again. Going on after one could leave a manifest without its files.
    """


@dataclass(frozen=True, slots=True)
class Alarm:
    """People should know; said once for each trouble."""

    text: str


Effect = Persist | OrderSnapshot | WriteManifest | MovePointer | Sweep | Alarm
Effects = tuple[Effect, ...]
