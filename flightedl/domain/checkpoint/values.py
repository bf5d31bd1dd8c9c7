"""Settings, orders, progress and effects of checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from msgspec import convert, structs

from flightedl.domain.checkpoint.manifest import ShardFile
from flightedl.errors import UsageError
from flightedl.messages.control import SnapshotReply, SnapshotRequest, WrittenFile


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
class OrderNumber:
    """Orders of all masters of a job, in their order; a pserver carries out only the newest that it has heard of."""

    master_generation: int
    #: Of the checkpoint.
    number: int
    #: Of the proposal within the checkpoint.
    serial: int

    def is_newer_than(self, other: OrderNumber | None) -> bool:
        if other is None:
            return True
        mine = (self.master_generation, self.number, self.serial)
        return mine > (other.master_generation, other.number, other.serial)


@dataclass(frozen=True, slots=True)
class SnapshotCommand:
    """What a pserver is asked for: copy every block when its round ``round`` opens (None: now), and write ``name``."""

    order: OrderNumber
    round: int | None
    name: str
    #: The file of this process in the newest complete checkpoint; empty: there is none.
    after: str = ""
    #: Rows are wanted whole, not what has changed since ``after``.
    is_base: bool = True

    @classmethod
    def of(cls, request: SnapshotRequest) -> SnapshotCommand:
        number = OrderNumber(request.master_generation, request.number, request.serial)
        return cls(number, request.round, request.name, request.after, request.is_base)


State = Literal["refused", "waiting", "taken", "written", "failed"]


@dataclass(frozen=True, slots=True)
class SnapshotProgress:
    """How far a pserver is with the newest order that it knows. Full state: told again and again, in any order."""

    order: OrderNumber
    #: refused: a block is past the round. waiting: for the round. taken: copied, being written. written. failed.
    state: State
    highest_open_round: int = 0
    #: When written.
    file: ShardFile | None = None
    #: Why it failed.
    reason: str = ""

    @classmethod
    def of(cls, index: int, generation: int, reply: SnapshotReply) -> SnapshotProgress:
        """What a process of a pserver has answered; a state that is not known counts as waiting."""
        file = reply.file
        return cls(
            OrderNumber(reply.master_generation, reply.number, reply.serial),
            reply.state if reply.state in get_args(State) else "waiting",  # type: ignore[arg-type]
            reply.highest_open_round,
            None if file is None else ShardFile(index=index, generation=generation, **structs.asdict(file)),
            reply.reason,
        )

    def reply(self, copied_s: float = 0.0, written_s: float = 0.0) -> SnapshotReply:
        """What the master is told, with how long the copies took, and the writing."""
        return SnapshotReply(
            master_generation=self.order.master_generation,
            number=self.order.number,
            serial=self.order.serial,
            state=self.state,
            highest_open_round=self.highest_open_round,
            file=self.file and convert(self.file, WrittenFile, from_attributes=True),
            reason=self.reason,
            copied_s=copied_s,
            written_s=written_s,
        )


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
    snapshot: SnapshotCommand


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
