"""Settings and effects of checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

from flightedl.errors import UsageError
from flightedl.messages.control import SnapshotRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSettings:
    """Settings of checkpoints: intervals, retention and timeouts.

    Args:
        interval_s: Maximum number of seconds between two orders; None disables this trigger.
        interval_tasks: Number of finished tasks between two checkpoints; None disables this trigger.
        at_epoch_end: True to checkpoint at the end of each epoch.
        keep: Number of newest checkpoints to keep.
        keep_every: Keep checkpoints whose number is a multiple of this permanently; None for none.
        increments: Maximum number of consecutive checkpoints with only the changed rows of tables; 0 disables them.
        patience_s: Seconds after which an agreed round that was not reached is replaced by copies made at once.
        give_up_s: Seconds after which a checkpoint without all files is aborted.
        retry_floor_s: Seconds to wait after a failure, doubled with each consecutive one.
        retry_ceiling_s: Maximum number of seconds to wait after a failure.
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
    """The open rounds of a job in sync mode."""

    #: Highest open round that any pserver has reported.
    highest: int
    #: False if the job has no members; rounds then do not close.
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
    """Store ``encode()`` under the master's fence before carrying out any effect that follows."""


@dataclass(frozen=True, slots=True)
class OrderSnapshot:
    """Send this order to a pserver, then call ``progressed`` or ``send_failed``."""

    index: int
    generation: int
    #: The order to send. The sender adds the plan.
    snapshot: SnapshotRequest


@dataclass(frozen=True, slots=True)
class WriteManifest:
    """Write the result of ``manifest(...)``, then call ``manifest_written`` or ``manifest_failed``."""

    number: int


@dataclass(frozen=True, slots=True)
class MovePointer:
    """Call ``pointer_moved`` once an ``encode()`` that names the new checkpoint is stored. Follows a ``Persist``."""

    pointer: Pointer


@dataclass(frozen=True, slots=True)
class Sweep:
    """Delete the files that ``deletable`` returns for the storage, in the returned order. Stop at the first failure.

    If deletion continued after a failure, a manifest could be left without its files. The next sweep deletes the rest.
    """


@dataclass(frozen=True, slots=True)
class Alarm:
    """Warn users about a failure. Emitted once per reason."""

    text: str


Effect = Persist | OrderSnapshot | WriteManifest | MovePointer | Sweep | Alarm
Effects = tuple[Effect, ...]
