"""Requests of a trainer to a pserver: pushes, pulls, lookups, initial values. ``flightedl.wire`` encodes the values."""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated

import msgspec

from flightedl.messages.base import Name, Natural, OfPlan, Reply, Request, Sender, Text, Traceparent, Weight


class Outcome(IntEnum):
    """Outcome of a pushed row."""

    #: Nothing was pushed; the row only carries values.
    NONE = 0
    ACCEPTED = 1
    ALREADY_APPLIED = 2
    #: The base version is older than the open round. Pull, recompute, and push again under the same identity.
    STALE = 3
    #: The sender is not a member of the view. Join, pull, and recompute.
    NOT_MEMBER = 4
    #: The block has already applied some batches of the sum, and rejected it. ``values`` has a bit for each batch, in
    #: the order of the push, lowest bit first: 1 if the block has applied it. Push the others again,
    #: in synchronous mode to the next round, because the sender counts as arrived in this one.
    PARTLY_APPLIED = 5


class BatchIdentity(Request, frozen=True, kw_only=True):
    """Identity of a batch, by which a repeated push is recognized."""

    epoch: Natural
    task: Natural
    batch: Natural
    #: Number of batches in the whole task.
    batch_count: Annotated[int, msgspec.Meta(ge=1)]


class PushHeader(Sender, frozen=True, kw_only=True):
    """Request of a push (DoPut) or of a step (DoExchange, with its first message): identity and weight of the rows."""

    verb: str = "step"
    plan_hash: Name
    member: Natural
    identity: BatchIdentity
    #: Other batches, if the rows are sums of several batches' gradients (async mode). A block applies a sum only if it
    #: has applied none of its batches.
    further: Annotated[list[BatchIdentity], msgspec.Meta(max_length=1023)] = []
    #: Weight of the batch in its round, usually its number of records.
    weight: Weight
    #: Number of batches that the sender has begun since it was admitted, including this one.
    step: Natural = 0
    #: Number of rows in the push or step.
    rows: Natural
    #: Seconds that the server may wait for rounds to close (steps only).
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=20)] = 2.0
    #: True to request new values (steps only).
    pull: bool = True
    traceparent: Traceparent = ""
    #: True if the values of the step carry checksums; then the answers have them, too (steps only).
    checksums: bool = True


class LookupHeader(OfPlan, frozen=True, kw_only=True):
    """Request of a lookup, with its only message on a stream of steps. ``wire.table_rows`` has the ids."""

    verb: str = "lookup"
    #: Membership id of the reader; 0 for read-only clients.
    member: Natural = 0
    #: Seconds that the server may wait until the requested version is reached.
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=20)] = 2.0
    #: True if the rows are to carry checksums.
    checksums: bool = True


class ShareRequest(Request, frozen=True, kw_only=True):
    """Asks to share memory. A sealed message of metadata alone on a stream of steps, before a step."""

    verb: str = "share"
    #: Mark of the client's host, network and user; opaque.
    host: Text


class ShareReply(Reply, frozen=True, kw_only=True):
    """Answer to a ``ShareRequest``, a sealed message of metadata alone."""

    #: Name of a Unix socket on which the server waits for a descriptor, and the nonce of the memory in hexadecimal.
    socket: str = ""
    nonce: str = ""
    #: Reason why values travel by TCP; empty if the memory can be shared.
    refused: str = ""


class Opening(Reply, frozen=True, kw_only=True):
    """The field that all requests on a stream have."""

    verb: str = ""


class PushReply(Reply, frozen=True, kw_only=True):
    """Acknowledgement of a push: number of rows by outcome."""

    accepted: int = 0
    already_applied: int = 0
    stale: int = 0
    not_member: int = 0
    #: Number of rejected sums, because the block has applied some of their batches.
    partly_applied: int = 0
    #: Batches of these sums that some block lacks, to be pushed again: 0 is ``identity``, 1 the first of ``further``.
    lacking: list[int] = []


class PullTicket(Request, frozen=True, kw_only=True):
    """Asks for blocks at or above given versions; for all blocks of the pserver if ``blocks`` is None."""

    verb: str = "pull"
    plan_hash: Name
    #: Membership id of the puller; 0 for read-only clients.
    member: Natural = 0
    blocks: list[Natural] | None = None
    #: A version for each block, or one for all.
    min_versions: list[Natural] = msgspec.field(default_factory=lambda: [0])
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=20)] = 2.0


class TableTicket(Request, frozen=True, kw_only=True):
    """Asks a pserver of a job without checkpoints for all its rows of a table, as in ``formats.table_files``."""

    verb: str = "table"
    plan_hash: Name
    #: Number of the table in the plan.
    table: Natural
    #: True to include the optimizer's slots.
    slots: bool = False


class InitHeader(Sender, frozen=True, kw_only=True):
    """Request of the upload of initial values (DoPut) by the trainer that won the election."""

    verb: str = "init"
    plan_hash: Name
    #: create_revision of the election's key. The values of the newest election count.
    election: Natural
    rows: Natural


class InitReply(Reply, frozen=True, kw_only=True):
    """Number of blocks of this pserver with initial values of that election, and number of all its blocks."""

    initialized: int
    blocks: int
