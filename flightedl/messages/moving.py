"""Messages about a unit of blocks that moves from one pserver to another; see ``domain.moving``."""

from __future__ import annotations

from typing import Literal

from flightedl.messages.base import Natural, Reply, Request, Text


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


class MovedRequest(Request, frozen=True, kw_only=True):
    """Tells the master that a pserver has staged a frozen unit completely."""

    attempt: Natural
    block: Natural
    #: Generation of the pserver.
    generation: Natural
