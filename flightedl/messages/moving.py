"""Messages about blocks that move from one pserver to another, or are copied to a standby; see ``domain.moving``."""

from __future__ import annotations

from typing import Literal

import msgspec

from flightedl.messages.base import Natural, OfPlan, Reply, Request, Text


class MoveHeader(Request, frozen=True, kw_only=True):
    """Request to upload (DoPut) part of a unit's content to the pserver to which the unit moves."""

    verb: str = "move"
    kind: Literal["copy", "update", "last"]
    attempt: Natural
    #: First block of the unit, and number of its blocks.
    block: Natural
    count: Natural
    #: Generation of the receiving pserver.
    generation: Natural
    #: Number of this update; in the last message, the number of all updates.
    number: Natural = 0
    #: Digest of all messages before the last one.
    digest: Text = ""
    #: Estimated size of the rows that a copy sends.
    size_bytes: Natural = 0


class MoveReply(Reply, frozen=True, kw_only=True):
    """Reply to an upload. ``problem`` is empty if the content was accepted."""

    problem: str = ""


class CopyId(msgspec.Struct, frozen=True, array_like=True):
    """Identity of a copy."""

    #: Generation of the source.
    source: int
    #: Election that gave the model its first values.
    election: int
    #: Number of the copy. Each process counts its copies from 1.
    number: int
    #: Number of the copy whose changes this copy contains; 0 if it contains everything.
    after: int = 0


class CopyTicket(OfPlan, frozen=True, kw_only=True):
    """Ticket of DoGet: requests a copy of all blocks for a standby, or the changes since a copy."""

    verb: str = "copy"
    #: Generation of the standby.
    standby: Natural
    #: Copy that the standby has; None if it has none.
    has: CopyId | None = None


class MovedRequest(Request, frozen=True, kw_only=True):
    """Tells the master that a pserver has staged a frozen unit completely."""

    attempt: Natural
    block: Natural
    #: Generation of the pserver.
    generation: Natural
