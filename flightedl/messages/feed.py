"""Messages of the feed: the changes of the live model, for clients that follow it."""

from __future__ import annotations

from typing import Annotated

import msgspec

from flightedl.messages.base import Natural, OfPlan, Reply, Request


class Position(Request, frozen=True, kw_only=True):
    """A position in the feed of one pserver."""

    #: Election of the model's initial values; another life of the model has another election.
    life: Natural
    #: Generation of the pserver's process. A new process begins with other numbers and possibly an older state.
    generation: Natural
    #: Version of the placement of the blocks.
    placement: Natural
    #: Number of the last change.
    number: Natural


class ChangesTicket(OfPlan, frozen=True, kw_only=True):
    """Ticket of DoGet: asks a pserver for all changes after a position, or for everything."""

    verb: str = "changes"
    #: Position that the client has reached; None to get a base.
    since: Position | None = None
    #: Seconds that the server may wait for a change.
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=20)] = 2.0


class ChangesHeader(Reply, frozen=True, kw_only=True):
    """Description of a base or an increment, in the metadata of the stream's schema."""

    #: Position after this message.
    position: Position
    #: Number of the position before it; None for a base.
    since: int | None
    #: Buckets of tables that the pserver has, as (first, end).
    buckets: list[tuple[int, int]] = []
