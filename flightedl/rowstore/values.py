"""Input and output types of a store of rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from flightedl.domain.tables.placement import buckets_of
from flightedl.domain.tables.spec import TableSpec
from flightedl.kernels import row_records

Ids = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float32]
Numbers = npt.NDArray[np.int64]
#: Values of rows: float32, or uint16 with the bits of 16-bit floats.
Values = npt.NDArray[np.float32] | npt.NDArray[np.uint16]

_NO_IDS: Ids = np.empty(0, np.uint64)
_NO_FLOATS: Floats = np.empty(0, np.float32)
_FIRST: Numbers = np.zeros(1, np.int64)
NO_SHIFTS: Numbers = np.empty(0, np.int64)


class TableGradients(NamedTuple):
    """Part of a push or read that belongs to one table. Reads have no gradients."""

    #: Number of the table, which is its position in the declaration.
    table: int
    #: (n,), distinct.
    ids: Ids
    #: (n, dim) Contiguous gradients, which may be read-only and unaligned.
    gradients: Floats


@dataclass(frozen=True, slots=True)
class TableRows:
    """Ids of n distinct tables, with their gradients, or with positions in a read's output."""

    #: Three (n,) arrays: number of the table, elements per row, number of ids.
    tables: Numbers
    dims: Numbers
    counts: Numbers
    #: (n,) Start of each table's ids in ``ids``, and of its values in ``gradients`` or in a read's output.
    starts: Numbers
    value_starts: Numbers
    #: Contains the ids of all tables, and possibly other ids. Contiguous. Like ``gradients``, the array may be
    #: read-only and unaligned.
    ids: Ids
    #: Gradients of all tables, flat.
    gradients: Floats
    #: (n,) Number of optional ids, which precede the table's others; see ``wire.table_rows``. Empty if all are zero.
    optional: Numbers = field(default_factory=lambda: NO_SHIFTS)

    @classmethod
    def of(cls, push: Sequence[TableGradients]) -> TableRows:
        """Join the parts of several tables. If there is only one part, it is not copied."""
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
        """Return the part for these buckets. The output of a read is contiguous."""
        salts = np.repeat(np.array([specs[table].salt for table in self.tables.tolist()], np.uint64), self.counts)
        order = _all_of(self.starts, self.counts)
        found = buckets_of(self.ids[order], salts)
        is_mine = (found >= buckets.start) & (found < buckets.stop)
        before = np.append(0, np.cumsum(is_mine))
        first = before[begins(self.counts)]
        counts = before[np.cumsum(self.counts)] - first
        optional = before[begins(self.counts) + self.optional] - first if self.optional.size else self.optional
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
            optional,
        )


def begins(counts: Numbers) -> Numbers:
    """Return the start of each of several adjacent parts with these lengths."""
    ends: Numbers = np.cumsum(counts)
    return ends - counts


def _all_of(starts: Numbers, counts: Numbers) -> Numbers:
    """Return the positions of all elements in the parts that have these starts and lengths."""
    found: Numbers = np.repeat(starts - begins(counts), counts) + np.arange(int(counts.sum()))
    return found


#: Rows of no table.
NO_ROWS = TableRows.of(())


class RowChunk(NamedTuple):
    """Rows of one table as of a cut."""

    table: int
    #: True for ids that wait for admission. Their records have no slots and values, and ``updates`` counts pushes.
    is_waiting: bool
    #: (n,).
    ids: Ids
    #: (n,) each: the row's number of updates, and the version and epoch after its last update; zeros if not needed.
    updates: npt.NDArray[np.uint32]
    versions: npt.NDArray[np.uint32]
    epochs: npt.NDArray[np.uint32]
    #: (n, elements of all slots of a row): the slots, one after the other.
    slots: Floats
    #: (n, dim)
    values: Values

    def chosen(self, which: npt.NDArray[np.bool_]) -> RowChunk:
        if which.all():
            return self
        columns = (np.ascontiguousarray(column[which]) for column in self[2:])
        return RowChunk(self.table, self.is_waiting, *columns)  # type: ignore[arg-type]


class MovedBuckets(NamedTuple):
    """Complete state of n buckets that move from one store to another."""

    buckets: tuple[int, ...]
    #: (n,) Versions of the buckets. They determine when the buckets' rows expire.
    versions: Numbers
    #: Highest epoch among the batches applied to the rows.
    epoch: int
    #: (tables, n) Rows of lower versions were evicted because their bucket had too many rows.
    given_up: Numbers
    #: For each table, an array of counters, (n, counters of a bucket).
    sketches: tuple[npt.NDArray[np.uint8], ...]
    #: Rows and waiting ids of all tables.
    chunks: tuple[RowChunk, ...]
    #: (tables, ``COUNTERS``) Share of the buckets in the counters of their span.
    counters: Numbers


@dataclass(frozen=True, slots=True)
class CutTable:
    """State of one table as of a cut, without its rows."""

    #: Rows whose last update produced a lower version of the store have expired.
    oldest: int
    #: Rows whose last update was in a lower epoch have expired.
    oldest_epoch: int
    #: (n,) In increments: ids of rows that cuts have removed (see ``Evict``) since the previous file. These ids may
    #: have new rows by now.
    removed: Ids
    #: Sketch counters of waiting ids; empty if the table has no sketch.
    sketch: npt.NDArray[np.uint8]
    #: (buckets,) Difference between each bucket's version and the store's; empty if all differences are zero.
    shifts: Numbers
    #: (buckets,) Rows of lower versions were evicted because their bucket had too many rows.
    given_up: Numbers


def bit_words(table: row_records.Table) -> int:
    """Return the number of 64-bit words needed to store one bit for each record that was ever used."""
    return -(-int(table.state[row_records.HIGH]) // 64)


def either_bits(one: npt.NDArray[np.uint64], other: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return the bitwise OR of two bit arrays. The shorter array is padded with zeros."""
    found = np.zeros(max(one.size, other.size), np.uint64)
    found[: one.size] = one
    found[: other.size] |= other
    return found
