"""Requests to the master for checkpoints and written models.

A client repeats its request until it is done; a repeated request returns the progress.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from flightedl.messages.base import Natural, OfJob, Reply, Request, Text


class CheckpointRequest(OfJob, frozen=True, kw_only=True):
    """Asks the master for a checkpoint, or with the ``ticket`` of an earlier answer for its progress."""

    ticket: Natural | None = None
    reason: Text = "a request"
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=20)] = 2.0


class CheckpointReply(Reply, frozen=True, kw_only=True):
    """Answer to a ``CheckpointRequest``. Repeat the request with the ticket until ``complete``."""

    ticket: int
    complete: bool
    #: Number of the newest complete checkpoint; 0 if there is none.
    latest: int = 0
    trouble: str = ""


class SaveModelRequest(Request, frozen=True, kw_only=True):
    """Asks the master to write the model of a new checkpoint to a file. Repeat it to learn the progress."""

    url: Text
    #: "safetensors", "npz" or "arrow"; empty: by the file's name. Tables are always Parquet.
    format: Text = ""
    #: Write the rows of this table, not the parameters.
    table: Text = ""
    #: Write the table's optimizer slots, too.
    slots: bool = False
    #: Life of the model, as in ``EvaluationDeclaration``.
    life: Natural = 0


class SaveRecord(Reply, frozen=True, kw_only=True):
    """The value of ``saves/<url>``: the newest request to write the model there, and its state."""

    trainer: str
    epoch: int
    number: int
    done: bool = False
    #: Life of the model, as in ``EvaluationDeclaration``.
    life: int = 0


class SaveModelReply(Reply, frozen=True, kw_only=True):
    """Answer to a ``SaveModelRequest``. State "live": the trainer has to read the table from the pservers itself."""

    state: str
    where: str = ""
    checkpoint: int = 0
    error: str = ""
