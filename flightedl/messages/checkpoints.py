"""Requests to the master for checkpoints, and for files that contain the model.

A client repeats its request until the work is complete. Each reply contains the progress.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from flightedl.messages.base import Natural, OfJob, Reply, Request, Text


class CheckpointRequest(OfJob, frozen=True, kw_only=True):
    """Requests a checkpoint from the master, or the progress of the checkpoint with this ``ticket``."""

    ticket: Natural | None = None
    reason: Text = "a request"
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=20)] = 2.0


class CheckpointReply(Reply, frozen=True, kw_only=True):
    """Reply to a ``CheckpointRequest``. Repeat the request with the ticket until ``complete`` is true."""

    ticket: int
    complete: bool
    #: Number of the newest complete checkpoint; 0 if none is complete.
    latest: int = 0
    trouble: str = ""


class SaveModelRequest(Request, frozen=True, kw_only=True):
    """Requests that the master write the model of a new checkpoint to a file. Repetitions return the progress."""

    url: Text
    #: "safetensors", "npz" or "arrow"; empty to derive it from the file's name. Tables are always Parquet.
    format: Text = ""
    #: Name of the table to write; empty to write the parameters.
    table: Text = ""
    #: True to also write the table's optimizer slots.
    slots: bool = False
    #: Life of the model, as in ``EvaluationDeclaration``.
    life: Natural = 0


class SaveRecord(Reply, frozen=True, kw_only=True):
    """Value of the key ``saves/<url>``: the newest request to write the model to that URL, and its state."""

    trainer: str
    epoch: int
    number: int
    done: bool = False
    #: Life of the model, as in ``EvaluationDeclaration``.
    life: int = 0


class SaveModelReply(Reply, frozen=True, kw_only=True):
    """Reply to a ``SaveModelRequest``. If the state is "live", the trainer must read the rows from the pservers."""

    state: str
    where: str = ""
    checkpoint: int = 0
    error: str = ""
