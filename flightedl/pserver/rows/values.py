"""Inputs and outputs of a store of rows."""

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
    """Return the slots of rows before their first update, (count, elements of all slots)."""
    slots = spec.optimizer.slots
    whole = np.repeat(np.array([slot.initial for slot in slots], np.float32), [slot.width(spec.dim) for slot in slots])
    return np.tile(whole, (count, 1))


class TableGradients(NamedTuple):
    """The part of a push or read that belongs to one table; a read has no gradients."""

    #: Number of the table: its place in the declaration.
    table: int
    #: (n,), distinct.
    ids: Ids
    #: (n, dim), contiguous; may be read-only and unaligned.
    gradients: Floats


@dataclass(frozen=True, slots=True)
class TableRows:
    """Ids of n distinct tables, with their gradients or with the positions to which their values are read."""

    #: (n,) each: number of the table, elements of a row, number of ids.
    tables: Numbers
    dims: Numbers
    counts: Numbers
    #: (n,): start of each table's ids in ``ids``, and of its values in ``gradients`` or in the output of a read.
    starts: Numbers
    value_starts: Numbers
    #: Ids of all tables, possibly among others. Contiguous; may be read-only and unaligned, as may ``gradients``.
    ids: Ids
    #: Gradients of all tables, flat.
    gradients: Floats

    @classmethod
    def of(cls, push: Sequence[TableGradients]) -> TableRows:
        """Join the parts of several tables. A single part is not copied."""
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
        return replace(self, ids=self.ids.copy(), gradients=self.gradients.copy())

    def within(self, buckets: range, specs: Sequence[TableSpec]) -> TableRows:
        """Return the part that belongs to some buckets. The output of a read is contiguous."""
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
    """Return the start of each of several adjacent parts with these lengths."""
    ends: Numbers = np.cumsum(counts)
    return ends - counts


def _all_of(starts: Numbers, counts: Numbers) -> Numbers:
    """Return the positions of all elements in parts with these starts and lengths."""
    found: Numbers = np.repeat(starts - begins(counts), counts) + np.arange(int(counts.sum()))
    return found


#: Rows of no table.
NO_ROWS = TableRows.of(())


@dataclass(frozen=True, slots=True)
class RowCounts:
    """Figures of one table. Counts from ``reads`` on begin with the store, and may be lost."""

    #: Number of rows that exist after the last update, and their memory, including slots and index.
    rows: int = 0
    size_bytes: int = 0
    #: Number of ids waiting for admission.
    waiting: int = 0
    #: Number of ids read, and number of those that had a row.
    reads: int = 0
    hits: int = 0
    #: Number of rows created.
    created: int = 0
    #: Number of gradients dropped because their id was not yet admitted, or because there was no memory.
    not_admitted: int = 0
    refused: int = 0
    #: Number of rows that were found to have expired or were removed by a cut.
    evicted: int = 0


class RowChunk(NamedTuple):
    """Rows of one table as of a cut."""

    table: int
    #: True for ids waiting for admission, which have no slots and values; ``updates`` counts their pushes.
    is_waiting: bool
    #: (n,).
    ids: Ids
    #: (n,) each: number of the row's updates, and the version and epoch after the last one; zeros if not needed.
    updates: npt.NDArray[np.uint32]
    versions: npt.NDArray[np.uint32]
    epochs: npt.NDArray[np.uint32]
    #: (n, elements of all slots of a row), in the order of the slots.
    slots: Floats
    #: (n, dim) float32, or uint16 for the bits of 16-bit floats.
    values: npt.NDArray[Any]

    def chosen(self, which: npt.NDArray[np.bool_]) -> RowChunk:
        if which.all():
            return self
        return RowChunk(self.table, self.is_waiting, *(np.ascontiguousarray(column[which]) for column in self[2:]))


class MovedBuckets(NamedTuple):
    """The complete state of n buckets that move from one store to another."""

    buckets: tuple[int, ...]
    #: (n,): versions of the buckets, which determine when their rows expire.
    versions: Numbers
    #: Highest epoch of all batches applied to the rows.
    epoch: int
    #: (tables, n): versions below which rows were evicted because there were too many.
    given_up: Numbers
    #: (n, counters of a bucket) for each table.
    sketches: tuple[npt.NDArray[np.uint8], ...]
    #: Rows and waiting ids of all tables.
    chunks: tuple[RowChunk, ...]


@dataclass(frozen=True, slots=True)
class CutTable:
    """State of a table as of a cut, without its rows."""

    #: Rows whose last update led to a lower version of the store have expired.
    oldest: int
    #: Rows whose last update was in a lower epoch have expired.
    oldest_epoch: int
    #: (n,): in an increment, rows removed by cuts (see ``Evict``) since the previous file; they may exist again.
    removed: Ids
    #: Counters of the sketch of waiting ids; empty without a sketch.
    sketch: npt.NDArray[np.uint8]
    #: (buckets,): difference between each bucket's version and the store's; empty if all are zero.
    shifts: Numbers
    #: (buckets,): versions below which a bucket's rows were evicted because there were too many.
    given_up: Numbers


def bit_words(table: row_records.Table) -> int:
    """Return the number of words needed for one bit per record that was ever used."""
    return -(-int(table.state[row_records.HIGH]) // 64)


def either_bits(one: npt.NDArray[np.uint64], other: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return the bits set in either array. The shorter array is treated as padded with zeros."""
    found = np.zeros(max(one.size, other.size), np.uint64)
    found[: one.size] = one
    found[: other.size] |= other
    return found
