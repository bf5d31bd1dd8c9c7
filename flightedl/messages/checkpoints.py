"""What anybody asks of the master about checkpoints and written models.

A request is repeated until its answer says that it is done: it is the same request that asks how far it is.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from flightedl.messages.base import Natural, OfJob, Reply, Request, Text


class CheckpointRequest(OfJob, frozen=True, kw_only=True):
    """Asks the master for a checkpoint of what there is now; ``ticket`` of an earlier answer: whether it is there."""

    ticket: Natural | None = None
    reason: Text = "a request"
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=20)] = 2.0


class CheckpointReply(Reply, frozen=True, kw_only=True):
    """Ask again with the ticket until ``complete``."""

    ticket: int
    complete: bool
    #: The newest complete checkpoint; 0: there is none.
    latest: int = 0
    trouble: str = ""


class SaveModelRequest(Request, frozen=True, kw_only=True):
    """Asks the master to write the model, taken from a new checkpoint, to a file; again: how far it is."""

    url: Text
    #: "safetensors", "npz" or "arrow"; empty: by the name. Of a table: it is Parquet.
    format: Text = ""
    #: Write the rows of this table, not the parameters.
    table: Text = ""
    #: With what the table's optimizer keeps beside the values.
    slots: bool = False
    #: Life of the model, as in ``EvaluationDeclaration``.
    life: Natural = 0


class SaveRecord(Reply, frozen=True, kw_only=True):
    """The value of ``saves/<url>``: the newest request to write the model there, and whether it is done."""

    trainer: str
    epoch: int
    number: int
    done: bool = False
    #: Life of the model, as in ``EvaluationDeclaration``.
    life: int = 0


class SaveModelReply(Reply, frozen=True, kw_only=True):
    """``state``: writing, written, failed, or live: the trainer has to read the table from the pservers itself."""

    state: str
    where: str = ""
    checkpoint: int = 0
    error: str = ""
