"""Requests by which any Flight client reads parameters and tables of the live model as Arrow columns."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from flightedl.messages.base import Name, Natural, OfPlan, Request

Cut = Literal["latest", "checkpoint", "new", "kept"]
#: Generation of the master that requested a cut, and the cut's number.
CutNumber = tuple[Natural, Natural]
Columns = Annotated[list[Name], msgspec.Meta(min_length=1, max_length=64)]


def cut_name(cut: CutNumber) -> str:
    """Return the text that names a cut in the metadata of schemas."""
    return f"cut {cut[0]}-{cut[1]}"


class ReadCommand(Request, frozen=True, kw_only=True):
    """Command of GetFlightInfo, which asks the master where a parameter or table can be read."""

    verb: str = "read"
    name: Name
    #: Required only if a parameter and a table have the same name; otherwise empty.
    kind: Literal["", "parameter", "table"] = ""
    #: "latest": the present values, which pservers read at different times. "checkpoint": the values in the newest
    #: complete checkpoint. "new": a cut of all pservers that is made now and kept for a minute. "kept": the newest of
    #: these cuts.
    cut: Cut = "latest"
    #: First row, and the row after the last one. For a table, these count buckets, of which there are 1024.
    start: Natural = 0
    stop: Natural | None = None
    #: Names of the columns, in this order; None for the default columns.
    columns: Columns | None = None


class ReadTicket(OfPlan, frozen=True, kw_only=True):
    """Ticket of DoGet, which asks a pserver or the master for some rows of a parameter or table."""

    verb: str = "read"
    name: Name
    kind: Literal["parameter", "table"]
    #: Number of the checkpoint to read from; None to read the present values.
    checkpoint: Natural | None = None
    #: The cut to read from; None to read the present values or a checkpoint.
    cut: CutNumber | None = None
    #: As in ``ReadCommand``.
    start: Natural = 0
    stop: Natural
    columns: Columns | None = None
    #: True if ``start`` and ``stop`` count elements of a parameter, regardless of its shape.
    is_flat: bool = False
