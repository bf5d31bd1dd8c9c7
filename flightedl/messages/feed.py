"""Messages of the feed, through which clients follow changes to the live model."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from flightedl.messages.base import Natural, OfPlan, Reply, Request

#: Pattern of the names of consumers; the empty name stands for no name.
CONSUMER_NAME = "^[A-Za-z0-9._-]{0,64}$"


class Position(Request, frozen=True, kw_only=True):
    """A position in the feed of one pserver."""

    #: Election that gave the model its initial values. Each life of the model has a different election.
    life: Natural
    #: Generation of the pserver's process. A new process numbers its changes differently, and may start from an older
    #: state.
    generation: Natural
    #: Version of the placement of the blocks.
    placement: Natural
    #: Number of the last change.
    number: Natural


class Acknowledgement(Reply, frozen=True, kw_only=True):
    """A position whose changes a named consumer has applied; stored in etcd under the consumer's lease."""

    position: Position
    #: Number of later changes when the consumer acknowledged the position.
    behind: Natural = 0
    #: Time at which the position had the pserver's newest state, in seconds since 1970; 0 if unknown.
    as_of_s: float = 0.0


class ChangesTicket(OfPlan, frozen=True, kw_only=True):
    """Ticket of DoGet: requests a pserver's changes since a position, or a base, which contains everything."""

    verb: str = "changes"
    #: Position that the client has reached; None to request a base.
    since: Position | None = None
    #: True to stop at checkpoints: an answer then ends with exactly the state that a checkpoint contains.
    marks: bool = False
    #: Seconds that the server may wait for a change, or until a checkpoint has been cut.
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=20)] = 2.0
    #: Type to which float32 values of parameters and rows are rounded for sending; empty to send them unchanged.
    wire: Literal["", "bfloat16", "float16"] = ""
    #: Name of the consumer that acknowledges ``since``, and create_revision of its key; empty if it has no name.
    consumer: Annotated[str, msgspec.Meta(pattern=CONSUMER_NAME)] = ""
    consumer_generation: Natural = 0


class ChangesHeader(Reply, frozen=True, kw_only=True):
    """Description of a base or an increment, in the metadata of the stream's schema."""

    #: Position after this message.
    position: Position
    #: Number of the previous position; None for a base.
    since: int | None
    #: Ranges of the blocks whose values the pserver stores, as (first, end).
    blocks: list[tuple[int, int]] = []
    #: Ranges of the buckets whose rows the pserver stores, as (first, end).
    buckets: list[tuple[int, int]] = []
    #: As in the ticket.
    wire: str = ""
    #: Number of the checkpoint with whose state this message ends; None if it ends with the present state.
    checkpoint: int | None = None
    #: Number of the proposal of that checkpoint: the master may have proposed several rounds for it.
    proposal: Natural = 0
    #: Ranges of blocks that are frozen because they move to another pserver, which may have changed them since. Buckets
    #: are numbered after the last block.
    leaving: list[tuple[int, int]] = []
