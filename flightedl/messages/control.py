"""Requests of the master to a pserver: views, snapshots, and questions.

Each request names the shard plan and the master's generation. Requests of a deposed master are refused or have no
effect. Views and snapshots are numbered, and only one that is newer than all earlier ones of its kind has an effect.
Therefore every request may be repeated.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from flightedl.messages.base import Name, Natural, OfPlan, Reply, Request, Text


class ViewMember(Request, frozen=True, kw_only=True):
    """One member of a view."""

    trainer: Name
    generation: Natural
    member: Natural
    first_round: Natural


class ViewRequest(OfPlan, frozen=True, kw_only=True):
    """The complete membership. Ignored unless (master_generation, serial) is newer than that of the known view."""

    master_generation: Natural
    serial: Natural
    members: list[ViewMember]
    #: The consistency mode, a tagged object; None if it is unchanged.
    mode: dict[str, Any] | None = None
    #: Version at which all blocks change to the mode, if this view changes it.
    switch_round: Natural = 0


class ViewReply(Reply, frozen=True, kw_only=True):
    """A pserver's answer to a view. All members are admitted except the refused ones, whose first round is closed."""

    serial: int
    refused: list[int] = []
    highest_open_round: int = 0
    #: True if the view is older than the known one.
    outdated: bool = False
    #: True if the mode could not be changed because the round of the change is closed.
    refuses_mode: bool = False


class OrderNumber(msgspec.Struct, frozen=True):
    """Position of a snapshot request among all of a job's. A pserver carries out only the newest one it received."""

    master_generation: Natural
    #: Number of the checkpoint.
    number: Natural
    #: Number of the proposal within the checkpoint.
    serial: Natural

    def is_newer_than(self, other: OrderNumber | None) -> bool:
        if other is None:
            return True
        mine = (self.master_generation, self.number, self.serial)
        return mine > (other.master_generation, other.number, other.serial)


class SnapshotRequest(OfPlan, frozen=True):
    """Requests a copy of all blocks. If the number is not newer than all earlier ones, only asks for the progress."""

    order: OrderNumber
    #: Copy each block when this round opens; None to copy now.
    round: Natural | None
    #: File to write, relative to the job's storage.
    name: Name
    #: File of this process in the newest complete checkpoint; empty if there is none.
    after: Text = ""
    #: False to copy only the rows of tables that have changed since ``after``, if the pserver knows which.
    is_base: bool = True


class WrittenFile(Reply, frozen=True, kw_only=True):
    """A file that a pserver wrote."""

    name: str
    size_bytes: int
    #: xxh3-128, hexadecimal.
    hash: str
    blocks: int
    lowest_version: int
    highest_version: int
    #: Number of bytes that are rows of tables.
    row_bytes: int = 0
    #: File to which this one is an increment; empty if it contains all rows.
    after: str = ""


class SnapshotReply(Reply, frozen=True):
    """A pserver's progress with its newest snapshot request. Complete, so it may arrive several times, in any order."""

    order: OrderNumber
    #: "refused" if a block is past the round, "waiting" for the round, "taken" if the blocks are copied and being
    #: written, "written" or "failed". Any other value counts as waiting.
    state: str
    highest_open_round: int = 0
    #: The file if the state is "written".
    file: WrittenFile | None = None
    #: Cause of the failure.
    reason: str = ""
    #: Upper bound on the seconds for which copying stopped training, and seconds that writing took.
    copied_s: float = 0.0
    written_s: float = 0.0


class OfMaster(OfPlan, frozen=True, kw_only=True):
    """A request that a pserver refuses with *fenced* if it knows a newer master."""

    master_generation: Natural


class ReloadRequest(OfMaster, frozen=True, kw_only=True):
    """Orders a pserver to exit and restart from the newest checkpoint."""


class AppliedRequest(OfPlan, frozen=True, kw_only=True):
    """Asks a pserver which batches it has applied."""


class AppliedReply(Reply, frozen=True, kw_only=True):
    """Tasks that all blocks of a pserver have applied completely, and the checkpoint from which it started."""

    #: Encoded ``AppliedSummary``.
    summary: bytes
    checkpoint: int | None = None
    #: Checkpoints that could not be loaded, with the reasons.
    skipped: list[str] = []
    #: Their numbers.
    rejected: list[Natural] = []
    #: Election whose initial values are missing here; None if none. See ``domain.recovery.reinitialization``.
    lacks_election: Natural | None = None


class SealRequest(OfMaster, frozen=True, kw_only=True):
    """Reports completed epochs to a pserver, each as [epoch, number of tasks]."""

    epochs: Annotated[list[tuple[Natural, Natural]], msgspec.Meta(max_length=1024)]
