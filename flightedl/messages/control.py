"""Requests from the master to a pserver: views, snapshots, and queries.

Each request names the shard plan and the master's generation. A deposed master's requests are refused or have no
effect. Views and snapshots are numbered: a view has an effect only if its number exceeds those of all earlier views,
and likewise for snapshots. Therefore every request may be repeated.
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
    """The complete membership. Ignored unless (master_generation, serial) is higher than in the current view."""

    master_generation: Natural
    serial: Natural
    members: list[ViewMember]
    #: The consistency mode, as a tagged object; None if the mode does not change.
    mode: dict[str, Any] | None = None
    #: Version at which all blocks change to this mode; unused if the mode does not change.
    switch_round: Natural = 0


class ViewReply(Reply, frozen=True, kw_only=True):
    """A pserver's reply to a view. The pserver refuses members whose first round has closed, and admits the others."""

    serial: int
    refused: list[int] = []
    highest_open_round: int = 0
    #: True if the view in the request is older than the pserver's current view.
    outdated: bool = False
    #: True if the mode was not changed because the round for the change has already closed.
    refuses_mode: bool = False


class PresenceRequest(Request, frozen=True, kw_only=True):
    """Opens a stream by which the master notices the end of a process; see ``domain.master.presence``."""

    #: Key in etcd that the process holds.
    key: Text
    generation: Natural
    #: Number of streams that the process keeps open.
    streams: Annotated[int, msgspec.Meta(ge=2, le=16)]


class OrderNumber(msgspec.Struct, frozen=True):
    """Position of a snapshot request in the order of the job's requests. A pserver carries out only the newest one."""

    master_generation: Natural
    #: Number of the checkpoint.
    number: Natural
    #: Number of the proposed round. Numbering restarts with each checkpoint.
    serial: Natural

    @property
    def cut(self) -> tuple[int, int]:
        """Number by which readers refer to the cut."""
        return self.master_generation, self.number

    def is_newer_than(self, other: OrderNumber | None) -> bool:
        if other is None:
            return True
        mine = (self.master_generation, self.number, self.serial)
        return mine > (other.master_generation, other.number, other.serial)


class CutRequest(OfPlan, frozen=True):
    """Requests a cut of all blocks. A request whose number is not the highest so far only asks for the progress."""

    order: OrderNumber
    #: Each block is cut when this round opens; None to cut immediately.
    round: Natural | None


class SnapshotRequest(CutRequest, frozen=True):
    """Requests a cut that is written to a file."""

    #: File to write, relative to the job's storage.
    name: Name
    #: This process's file in the newest complete checkpoint; empty if there is none.
    after: Text = ""
    #: False to copy only table rows that have changed since ``after``, if the pserver knows which rows have.
    is_base: bool = True


class WrittenFile(Reply, frozen=True, kw_only=True):
    """A file that a pserver has written."""

    name: str
    size_bytes: int
    #: xxh3-128, hexadecimal.
    hash: str
    blocks: int
    lowest_version: int
    highest_version: int
    #: Size of the tables' rows in the file, in bytes.
    row_bytes: int = 0
    #: File that this increment builds on; empty if the file contains all rows.
    after: str = ""


class SnapshotReply(Reply, frozen=True):
    """A pserver's progress with its newest snapshot request. Replies may be repeated and arrive in any order."""

    order: OrderNumber
    #: "refused" if a block is past the round; "waiting" until the round opens; "taken" while the copied blocks are
    #: being written; "written" or "failed" at the end. Any other value counts as "waiting".
    state: str
    highest_open_round: int = 0
    #: The file, if the state is "written".
    file: WrittenFile | None = None
    #: Cause of the failure.
    reason: str = ""
    #: Upper bound on the seconds for which copying delayed training, and seconds that writing took.
    copied_s: float = 0.0
    written_s: float = 0.0


class OfMaster(OfPlan, frozen=True, kw_only=True):
    """A request that a pserver refuses with *fenced* if it knows a newer master."""

    master_generation: Natural


class ReloadRequest(OfMaster, frozen=True, kw_only=True):
    """Orders a pserver to exit, so that its successor restores the newest checkpoint."""


class AppliedRequest(OfPlan, frozen=True, kw_only=True):
    """Requests the batches that a pserver has applied."""


class AppliedReply(Reply, frozen=True, kw_only=True):
    """Tasks that all blocks of a pserver have completely applied, and the checkpoint that the pserver loaded."""

    #: Encoded ``AppliedSummary``.
    summary: bytes
    checkpoint: int | None = None
    #: Checkpoints that could not be loaded, with the reasons.
    skipped: list[str] = []
    #: Their numbers.
    rejected: list[Natural] = []
    #: Election whose initial values are missing; None if no values are missing. See
    #: ``domain.recovery.reinitialization``.
    lacks_election: Natural | None = None


class SealRequest(OfMaster, frozen=True, kw_only=True):
    """Tells a pserver which epochs have ended, as [epoch, number of tasks]."""

    epochs: Annotated[list[tuple[Natural, Natural]], msgspec.Meta(max_length=1024)]
    #: No tasks of earlier epochs remain: each is done or was set aside.
    open_epoch: Natural = 0
