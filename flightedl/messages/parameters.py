"""What a trainer says to a pserver: pushes, pulls and first values. The rows themselves are ``wire.rows``."""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated

import msgspec

from flightedl.messages.base import Name, Natural, OfPlan, Reply, Request, Sender, Text, Traceparent, Weight


class Outcome(IntEnum):
    """Outcome of a pushed row."""

    #: The row only carries values; nothing was pushed.
    NONE = 0
    ACCEPTED = 1
    ALREADY_APPLIED = 2
    #: The base version is older than the open round: pull, recompute, push again under the same identity.
    STALE = 3
    #: The sender is not a member of the view: join, pull, recompute.
    NOT_MEMBER = 4
    #: A sum of batches of which the block has some: nothing of it was taken. ``values`` tell which it has, a bit for
    #: each batch, lowest first, in the order in which the push named them. Push the others again; in synchronous mode
    #: to the next round, since the sender has arrived in this one.
    PARTLY_APPLIED = 5


class BatchIdentity(Request, frozen=True, kw_only=True):
    """Which batch of which epoch; what makes a push happen once."""

    epoch: Natural
    task: Natural
    batch: Natural
    #: Batches of the whole task.
    batch_count: Annotated[int, msgspec.Meta(ge=1)]


class PushHeader(Sender, frozen=True, kw_only=True):
    """Opens a push (DoPut), or comes with the first message of a step (DoExchange): what the rows belong to."""

    verb: str = "step"
    plan_hash: Name
    member: Natural
    identity: BatchIdentity
    #: Async mode: the other batches whose gradients are in the rows, which are sums then. A block takes a sum only if
    #: it has none of its batches, and has all of them from then on.
    further: Annotated[list[BatchIdentity], msgspec.Meta(max_length=1023)] = []
    #: The batch's weight in its round, usually its records.
    weight: Weight
    #: How many batches the sender has begun since it was admitted, this one included.
    step: Natural = 0
    #: Rows of the push or the step.
    rows: Natural
    #: Step only: how long the server may hold the stream for rounds to close.
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=20)] = 2.0
    #: Step only: whether fresh values are wanted.
    pull: bool = True
    traceparent: Traceparent = ""
    #: Step only: whether the values of the answers carry checksums, as those of the step do.
    checksums: bool = True


class LookupHeader(OfPlan, frozen=True, kw_only=True):
    """Comes with the one message of a lookup (DoExchange ``step``): the rows of which ids, ``wire.table_rows`` says."""

    verb: str = "lookup"
    #: The membership of the reader; 0: anybody who only reads.
    member: Natural = 0
    #: How long the server may hold the stream for the version that is wanted.
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=20)] = 2.0
    #: Whether the rows that come carry checksums.
    checksums: bool = True


class ShareRequest(Request, frozen=True, kw_only=True):
    """On a stream of steps, sealed, as metadata alone, before one of them: may values lie in memory of both sides?"""

    verb: str = "share"
    #: What the asker knows of its host, network and user; opaque.
    host: Text


class ShareReply(Reply, frozen=True, kw_only=True):
    """The answer, sealed, as metadata alone."""

    #: Name of a Unix socket on which the server waits for a descriptor, and what the memory begins with, in hex.
    socket: str = ""
    nonce: str = ""
    #: Why values travel by TCP; empty: they need not.
    refused: str = ""


class Opening(Reply, frozen=True, kw_only=True):
    """The fields that all headers share: the verb."""

    verb: str = ""


class PushReply(Reply, frozen=True, kw_only=True):
    """The one acknowledgement of a push: how many rows met which outcome."""

    accepted: int = 0
    already_applied: int = 0
    stale: int = 0
    not_member: int = 0
    #: Sums that were not taken, because the block has some of their batches.
    partly_applied: int = 0
    #: Of these sums: the batches that some block lacks, to be pushed again; 0: ``identity``, 1: the first further.
    lacking: list[int] = []


class PullTicket(Request, frozen=True, kw_only=True):
    """Asks for blocks, each at or above a version. Without ``blocks``: all of this pserver."""

    verb: str = "pull"
    plan_hash: Name
    #: The membership of the puller; 0: anybody who only reads.
    member: Natural = 0
    blocks: list[Natural] | None = None
    #: One for each block, or a single one for all.
    min_versions: list[Natural] = msgspec.field(default_factory=lambda: [0])
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=20)] = 2.0


class TableTicket(Request, frozen=True, kw_only=True):
    """Asks a pserver of a job without checkpoints for all its rows of a table, as ``formats.table_files`` has them."""

    verb: str = "table"
    plan_hash: Name
    #: Number of the table in the plan.
    table: Natural
    #: With what the optimizer keeps beside the values.
    slots: bool = False


class InitHeader(Sender, frozen=True, kw_only=True):
    """Opens the upload of the first values (DoPut) by the trainer that won the election."""

    verb: str = "init"
    plan_hash: Name
    #: create_revision of the election's key: the newest winner's values count.
    election: Natural
    rows: Natural


class InitReply(Reply, frozen=True, kw_only=True):
    """How many blocks of this pserver have first values of that election, and how many there are."""

    initialized: int
    blocks: int
