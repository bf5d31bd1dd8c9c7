"""What goes in and out of a store of rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from flightedl.domain.tables.placement import buckets_of
from flightedl.domain.tables.spec import TableSpec
from flightedl.kernels import row_records

Ids = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float32]
Numbers = npt.NDArray[np.int64]

_NO_IDS: Ids = np.empty(0, np.uint64)
_NO_FLOATS: Floats = np.empty(0, np.float32)
_FIRST: Numbers = np.zeros(1, np.int64)
NO_SHIFTS: Numbers = np.empty(0, np.int64)


def slots_of_new_rows(spec: TableSpec, count: int) -> Floats:
    """(count, numbers of all slots): of rows before their first update."""
    slots = spec.optimizer.slots
    whole = np.repeat(np.array([slot.initial for slot in slots], np.float32), [slot.width(spec.dim) for slot in slots])
    return np.tile(whole, (count, 1))


class TableGradients(NamedTuple):
    """What a push has for one table; of a read without gradients."""

    #: Its number: the place in the declaration.
    table: int
    #: (n,), without repetitions.
    ids: Ids
    #: (n, dim), contiguous; may be read-only and at any address.
    gradients: Floats


@dataclass(frozen=True, slots=True)
class TableRows:
    """Ids of n tables, each table once, and their gradients, or where their values are to be put."""

    #: (n,) each: numbers of the tables, elements of a row, ids.
    tables: Numbers
    dims: Numbers
    counts: Numbers
    #: (n,): where in ``ids`` those of each table begin, and in what goes with them.
    starts: Numbers
    value_starts: Numbers
    #: Of all tables, maybe among others; contiguous, may be read-only and at any address, as the gradients.
    ids: Ids
    #: Of all tables, flat.
    gradients: Floats

    @classmethod
    def of(cls, push: Sequence[TableGradients]) -> TableRows:
        """By table, put together; a single one as it is."""
        if len(push) == 1:
            (table, ids, gradients) = push[0]
            dim, count = (np.array([number]) for number in (gradients.shape[1], ids.size))
            return cls(np.array([table]), dim, count, _FIRST, _FIRST, ids, gradients.reshape(-1))
        tables, dims, counts = (
            np.array(each, np.int64)
            for each in (
                [each.table for each in push],
                [each.gradients.shape[1] for each in push],
                [each.ids.size for each in push],
            )
        )
        ids = np.concatenate([_NO_IDS, *(each.ids for each in push)])
        values = np.concatenate([_NO_FLOATS, *(each.gradients.reshape(-1) for each in push)])
        return cls(tables, dims, counts, begins(counts), begins(counts * dims), ids, values)

    def __len__(self) -> int:
        return len(self.tables)

    def __iter__(self) -> Iterator[TableGradients]:
        lists = (each.tolist() for each in (self.tables, self.dims, self.counts, self.starts, self.value_starts))
        for table, dim, count, start, value_start in zip(*lists, strict=True):
            values = self.gradients[value_start : value_start + count * dim].reshape(-1, dim)
            yield TableGradients(table, self.ids[start : start + count], values)

    def copy(self) -> TableRows:
        """The same in memory of its own."""
        return replace(self, ids=self.ids.copy(), gradients=self.gradients.copy())

    def within(self, buckets: range, specs: Sequence[TableSpec]) -> TableRows:
        """The same of some buckets only; values that are to be put somewhere lie one after the other."""
        salts = np.repeat(np.array([specs[table].salt for table in self.tables.tolist()], np.uint64), self.counts)
        order = _all_of(self.starts, self.counts)
        found = buckets_of(self.ids[order], salts)
        is_mine = (found >= buckets.start) & (found < buckets.stop)
        before = np.append(0, np.cumsum(is_mine))
        counts = before[np.cumsum(self.counts)] - before[begins(self.counts)]
        gradients = _NO_FLOATS
        if self.gradients.size:
            gradients = self.gradients[_all_of(self.value_starts, self.counts * self.dims)]
            gradients = gradients[np.repeat(is_mine, np.repeat(self.dims, self.counts))]
        return TableRows(
            self.tables,
            self.dims,
            counts,
            begins(counts),
            begins(counts * self.dims),
            self.ids[order][is_mine],
            gradients,
        )


def begins(counts: Numbers) -> Numbers:
    """Where each begins that has so many, one after the other."""
    ends: Numbers = np.cumsum(counts)
    return ends - counts


def _all_of(starts: Numbers, counts: Numbers) -> Numbers:
    """The places of all, so many from each start on."""
    found: Numbers = np.repeat(starts - begins(counts), counts) + np.arange(int(counts.sum()))
    return found


#: Of no table.
NO_ROWS = TableRows.of(())


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

    def chosen(self, which: npt.NDArray[np.bool_]) -> RowChunk:
        """Return some of the rows."""
        if which.all():
            return self
        return RowChunk(self.table, self.is_waiting, *(np.ascontiguousarray(column[which]) for column in self[2:]))


class MovedBuckets(NamedTuple):
    """Everything that a store has of n buckets, on its way to another one."""

    buckets: tuple[int, ...]
    #: (n,): versions of the buckets, by which their rows expire.
    versions: Numbers
    #: The highest of all batches in the rows.
    epoch: int
    #: (tables, n): versions below which rows have gone, because there were too many.
    given_up: Numbers
    #: Of each table, (n, counters of a bucket).
    sketches: tuple[npt.NDArray[np.uint8], ...]
    #: Of each table the rows, and the ids that wait.
    chunks: tuple[RowChunk, ...]


@dataclass(frozen=True, slots=True)
class CutTable:
    """What a cut says of a table as a whole."""

    #: Rows that a lower version of the store updated last have expired.
    oldest: int
    #: As ``oldest``, by the epoch.
    oldest_epoch: int
    #: (n,): of an increment, rows that cuts removed (see ``Evict``) of what came before; they may be there again.
    removed: Ids
    #: Counters of a sketch of ids that wait; empty: there is none.
    sketch: npt.NDArray[np.uint8]
    #: (buckets,): by how much the versions of each bucket are ahead of the store's; empty if none is.
    shifts: Numbers
    #: (buckets,): rows of lower versions of the bucket have gone, because there were too many.
    given_up: Numbers


def bit_words(table: row_records.Table) -> int:
    """Return the number of words that have a bit for each record that was ever used."""
    return -(-int(table.state[row_records.HIGH]) // 64)


def either_bits(one: npt.NDArray[np.uint64], other: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return the bits that are set in either; the shorter one ends in zeros."""
    found = np.zeros(max(one.size, other.size), np.uint64)
    found[: one.size] = one
    found[: other.size] |= other
    return found
