"""What the master says to a pserver: views, snapshots, what it wants to know.

Each order names the shard plan that the master means, and the master's generation: what a deposed master orders is
refused, or changes nothing. Views and snapshots have numbers besides: only one that is newer than all before of its
kind does anything. So any order may be repeated.
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
    """The whole membership; refused unless (master_generation, serial) is newer than the one known."""

    master_generation: Natural
    serial: Natural
    members: list[ViewMember]
    #: The consistency mode, a tagged object; None: as before.
    mode: dict[str, Any] | None = None
    #: The version that all blocks begin at if this view changes the mode.
    switch_round: Natural = 0


class ViewReply(Reply, frozen=True, kw_only=True):
    """What a pserver made of a view: everybody is admitted but those refused, whose first round has gone by."""

    serial: int
    refused: list[int] = []
    highest_open_round: int = 0
    #: True when the view was older than the one known.
    outdated: bool = False
    #: True when the mode could not be changed at the round of the view, which has gone by.
    refuses_mode: bool = False


class OrderNumber(msgspec.Struct, frozen=True):
    """Place of an order among all orders of a job. A pserver carries out only the newest that it has heard of."""

    master_generation: Natural
    #: The checkpoint's.
    number: Natural
    #: The proposal's, within the checkpoint.
    serial: Natural

    def is_newer_than(self, other: OrderNumber | None) -> bool:
        if other is None:
            return True
        mine = (self.master_generation, self.number, self.serial)
        return mine > (other.master_generation, other.number, other.serial)


class SnapshotRequest(OfPlan, frozen=True):
    """Orders a copy of all blocks, or asks how far it is: only an order newer than all before does anything."""

    order: OrderNumber
    #: Copy each block when this round opens; None: now.
    round: Natural | None
    #: File to write, relative to the job's storage.
    name: Name
    #: The file of this process in the newest complete checkpoint; empty: there is none.
    after: Text = ""
    #: False: of rows of tables, only those are wanted that have changed since ``after``, where that is known.
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
    #: Of all that, rows of tables.
    row_bytes: int = 0
    #: The file that it is an increment on; empty: all rows are in it.
    after: str = ""


class SnapshotReply(Reply, frozen=True):
    """Progress of a pserver with the newest order that it has heard of. Full state: may come again, in any order."""

    order: OrderNumber
    #: "refused": a block is past the round. "waiting": for the round. "taken": copied, being written. "written".
    #: "failed". Any other counts as waiting.
    state: str
    highest_open_round: int = 0
    #: The file, once it is written.
    file: WrittenFile | None = None
    #: Why it failed.
    reason: str = ""
    #: Seconds that training stood still for the copies, at most, and that writing took.
    copied_s: float = 0.0
    written_s: float = 0.0


class OfMaster(OfPlan, frozen=True, kw_only=True):
    """Refused as fenced where a newer master is known."""

    master_generation: Natural


class ReloadRequest(OfMaster, frozen=True, kw_only=True):
    """Tells a pserver to end and come back from the newest checkpoint."""


class AppliedRequest(OfPlan, frozen=True, kw_only=True):
    """Asks a pserver what it has."""


class AppliedReply(Reply, frozen=True, kw_only=True):
    """Which tasks all blocks of a pserver have wholly, and the checkpoint that it started from."""

    #: ``AppliedSummary.encode``.
    summary: bytes
    checkpoint: int | None = None
    #: Checkpoints that could not be loaded, each with the reason.
    skipped: list[str] = []
    #: Their numbers.
    rejected: list[Natural] = []
    #: The election whose first values it should have, and has not; see ``domain.recovery.reinitialization``.
    lacks_election: Natural | None = None


class SealRequest(OfMaster, frozen=True, kw_only=True):
    """Tells a pserver how many tasks epochs have that are over: [epoch, tasks]."""

    epochs: Annotated[list[tuple[Natural, Natural]], msgspec.Meta(max_length=1024)]
