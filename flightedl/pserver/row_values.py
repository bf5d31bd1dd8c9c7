"""What goes in and out of a store of rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from flightedl.domain.tables.rules import first_slots
from flightedl.domain.tables.spec import TableSpec

Ids = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float32]


def slots_of_new_rows(spec: TableSpec, count: int) -> Floats:
    """(count, numbers of all slots): of rows before their first update."""
    whole = np.array([number for slot in first_slots(spec.optimizer, spec.dim) for number in slot], np.float32)
    return np.tile(whole, (count, 1))


class TableGradients(NamedTuple):
    """What a push has for one table."""

    #: Its number: the place in the declaration.
    table: int
    #: (n,), without repetitions.
    ids: Ids
    #: (n, dim), contiguous; may be read-only and at any address.
    gradients: Floats


@dataclass(frozen=True, slots=True)
class RowCounts:
    """Figures of one table. What is counted from the store's beginning is not part of its state: it may be lost."""

    #: That exist as of the last update, and their memory with slots and the index.
    rows: int = 0
    size_bytes: int = 0
    #: Ids that wait for admission.
    waiting: int = 0
    #: Ids read, and those that had a row.
    reads: int = 0
    hits: int = 0
    #: Rows made.
    created: int = 0
    #: Gradients dropped because their id was not admitted yet, or no memory was left.
    not_admitted: int = 0
    refused: int = 0
    #: Rows found to have expired, or removed by a cut.
    evicted: int = 0


class RowChunk(NamedTuple):
    """Rows of one table as they were at a cut; n is any number."""

    table: int
    #: These are ids that wait for admission: without slots and values, ``updates`` are their pushes.
    is_waiting: bool
    #: (n,).
    ids: Ids
    #: (n,): of the row, that the last one made, and the highest epoch then; zeros where nothing depends on it.
    updates: npt.NDArray[np.uint32]
    versions: npt.NDArray[np.uint32]
    epochs: npt.NDArray[np.uint32]
    #: (n, numbers of all slots of a row), in their order.
    slots: Floats
    #: (n, dim) float32, or uint16: the bits of 16-bit floats.
    values: npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class CutTable:
    """What a cut says of a table as a whole."""

    #: Rows that a lower version updated last do not exist.
    oldest: int
    #: As ``oldest``, by the epoch.
    oldest_epoch: int
    #: (n,): of an increment, rows that cuts removed (see ``Evict``) of what came before; they may be there again.
    removed: Ids
    #: Counters of a sketch of ids that wait; empty: there is none.
    sketch: npt.NDArray[np.uint8]
