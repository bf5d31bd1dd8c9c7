"""Requests from a trainer to a pserver: pushes, pulls, lookups, initial values. Package ``wire`` encodes values."""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated

import msgspec

from flightedl.messages.base import Name, Natural, OfPlan, Reply, Request, Sender, Text, Traceparent, Weight


class Outcome(IntEnum):
    """Outcome of a pushed row."""

    #: Nothing was pushed for this row; it only carries values.
    NONE = 0
    ACCEPTED = 1
    ALREADY_APPLIED = 2
    #: The base version is older than the open round. Pull, recompute the gradient, and push it with the same identity.
    STALE = 3
    #: The sender is not a member of the view. It must join, pull, and recompute the gradient.
    NOT_MEMBER = 4
    #: The block rejected the sum, because it has already applied some of the sum's batches. ``values`` contains one bit
    #: per batch, in the order of the push and beginning with the lowest bit: 1 if the block has applied the batch. Push
    #: the remaining batches again. In synchronous mode, push them to the next round, because the sender counts as
    #: having contributed to this one.
    PARTLY_APPLIED = 5


class BatchIdentity(Request, frozen=True, kw_only=True):
    """Identity of a batch, by which a pserver recognizes a repeated push."""

    epoch: Natural
    task: Natural
    batch: Natural
    #: Number of batches in the task.
    batch_count: Annotated[int, msgspec.Meta(ge=1)]


class PushHeader(Sender, frozen=True, kw_only=True):
    """Request to push (DoPut), or to begin a step (first message of a DoExchange): identity and weight of the rows."""

    verb: str = "step"
    plan_hash: Name
    member: Natural
    identity: BatchIdentity
    #: The other batches of the sum, if each row is a sum of the gradients of several batches (async mode). A block
    #: applies a sum only if it has applied none of the sum's batches.
    further: Annotated[list[BatchIdentity], msgspec.Meta(max_length=1023)] = []
    #: Weight of the batch in its round, usually the number of its records.
    weight: Weight
    #: Number of batches that the sender has begun since it was admitted, including this one.
    step: Natural = 0
    #: Number of rows in the push or step.
    rows: Natural
    #: Used only in steps. Seconds that the server may wait for rounds to close.
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=20)] = 2.0
    #: Used only in steps. True to request new values.
    pull: bool = True
    traceparent: Traceparent = ""
    #: Used only in steps. True if the step's values have checksums, and the replies must have checksums too.
    checksums: bool = True


class LookupHeader(OfPlan, frozen=True, kw_only=True):
    """Request to look up rows, sent in its only message on a stream for steps. ``wire.table_rows`` defines the ids."""

    verb: str = "lookup"
    #: Membership id of the reader; 0 for clients that only read.
    member: Natural = 0
    #: Maximum seconds that the server waits until the requested version has been reached.
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=20)] = 2.0
    #: True if the rows must have checksums.
    checksums: bool = True


class ShareRequest(Request, frozen=True, kw_only=True):
    """Requests shared memory: a sealed message of metadata without a batch, sent on a stream before a step."""

    verb: str = "share"
    #: Opaque mark that identifies the client's host, network and user.
    host: Text


class ShareReply(Reply, frozen=True, kw_only=True):
    """Reply to a ``ShareRequest``: a sealed message of metadata without a batch."""

    #: Name of the Unix socket on which the server waits for a descriptor, and the memory's nonce in hexadecimal.
    socket: str = ""
    nonce: str = ""
    #: Reason why values travel over TCP; empty if the memory can be shared.
    refused: str = ""


class Opening(Reply, frozen=True, kw_only=True):
    """The field that all requests on a stream have in common."""

    verb: str = ""


class PushReply(Reply, frozen=True, kw_only=True):
    """Acknowledgement of a push: number of rows for each outcome."""

    accepted: int = 0
    already_applied: int = 0
    stale: int = 0
    not_member: int = 0
    #: Number of sums that were rejected because a block had already applied some of the sum's batches.
    partly_applied: int = 0
    #: Batches of rejected sums to push again, because a block has not applied them: 0 stands for ``identity``, 1 for
    #: the first batch in ``further``.
    lacking: list[int] = []


class PullTicket(Request, frozen=True, kw_only=True):
    """Requests blocks at or above given versions. If ``blocks`` is None, requests all blocks of the pserver."""

    verb: str = "pull"
    plan_hash: Name
    #: Membership id of the puller; 0 for clients that only read.
    member: Natural = 0
    blocks: list[Natural] | None = None
    #: One version per block, or a single version for all blocks.
    min_versions: list[Natural] = msgspec.field(default_factory=lambda: [0])
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=20)] = 2.0


class TableTicket(Request, frozen=True, kw_only=True):
    """Requests all rows of a table, as in ``formats.table_files``, from a pserver of a job without checkpoints."""

    verb: str = "table"
    plan_hash: Name
    #: Number of the table in the shard plan.
    table: Natural
    #: True to include the optimizer slots.
    slots: bool = False


class InitHeader(Sender, frozen=True, kw_only=True):
    """Request to upload initial values (DoPut). The trainer that won the election sends it."""

    verb: str = "init"
    plan_hash: Name
    #: create_revision of the election's key. Values from a newer election replace those from older elections.
    election: Natural
    rows: Natural


class InitReply(Reply, frozen=True, kw_only=True):
    """Number of the pserver's blocks that have initial values from that election, and total number of its blocks."""

    initialized: int
    blocks: int
