"""Ids of one table, each once, and by pserver: what is asked for, and where each answer belongs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from flightedl.domain.tables.placement import buckets_of
from flightedl.domain.tables.spec import TableSpec
from flightedl.kernels.plain import index_size
from flightedl.wire.table_rows import new_gradients

Array = npt.NDArray[np.generic]
Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.uint64]
Places = npt.NDArray[np.int64]


@cache
def kernels() -> Any:
    """Return the compiled loops of ``kernels.distinct``. Trainers without tables do without numba."""
    from flightedl.kernels.compiled_rows import distinct_kernels

    return distinct_kernels()


def first_not_finite(rows: Floats) -> int:
    """The number of the first row that has NaN or infinity; -1: none has."""
    flat = np.ascontiguousarray(rows).reshape(-1).view(np.uint32)
    return int(kernels().first_not_finite(flat, rows.shape[1]))


class DistinctIds:
    """The ids of a pull or push, each once.

    Args:
        ids: (n,) as the user gave them.
        numbered: ``ids`` and ``places`` of them, which need no copy; None: find them out.
    """

    __slots__ = ("_is_distinct", "given", "ids", "places")

    def __init__(self, ids: Ids, numbered: tuple[Ids, Places] | None = None) -> None:
        if numbered is None:
            counts = np.array([len(ids)])
            ids, distinct, places = _numbered([ids], counts)
            numbered = distinct[: int(counts[0])], places
        #: A copy: it is compared with later ones, and the caller may use its memory again.
        self.given = ids
        #: (m,) in the order in which they come first; and (n,): of each id, its place there.
        self.ids, self.places = numbered
        self._is_distinct = len(self.ids) == len(ids)

    @classmethod
    def of_each(cls, many: Sequence[Ids]) -> list[DistinctIds]:
        """Return those of several pulls, in the time of one."""
        lengths = [len(ids) for ids in many]
        counts = np.array(lengths, np.int64)
        given, distinct, places = _numbered(many, counts)
        found = []
        at = first = 0
        for length, count in zip(lengths, counts.tolist(), strict=True):
            end, last = at + length, first + count
            found.append(cls(given[at:end], (distinct[first:last], places[at:end])))
            at, first = end, last
        return found

    def is_of(self, ids: Ids) -> bool:
        """True if these ids were given, in this order."""
        return len(ids) == len(self.given) and bool(kernels().are_equal(ids, self.given))

    def spread(self, rows: Floats) -> Floats:
        """Return (m, dim) rows of ``ids`` as (n, dim) rows of the ids as they were given: an array of its own."""
        if self._is_distinct:
            return rows.copy()
        dim = rows.shape[1]
        found = np.empty((len(self.given), dim), np.float32)
        kernels().spread(np.ascontiguousarray(rows).reshape(-1), self.places, dim, found.reshape(-1))
        return found

    def summed(self, gradients: Floats) -> tuple[Floats, int]:
        """Add up (n, dim) contiguous gradients of the ids as they were given, by id.

        Returns:
            (m, dim) sums, as ``new_gradients`` makes them; and the first row that has NaN or infinity, -1 if none has.
        """
        sums = new_gradients(self.ids, gradients.shape[1])
        return sums, int(kernels().add_up(gradients, gradients.view(np.uint32), self.places, sums))


def _numbered(many: Sequence[Ids], counts: Places) -> tuple[Ids, Ids, Places]:
    """All ids, all distinct ones, and the places; ``counts``: of ids of each, changed to those of distinct ones."""
    given = many[0].copy() if len(many) == 1 else np.concatenate(many) if many else np.empty(0, np.uint64)
    distinct, places = np.empty(len(given), np.uint64), np.empty(len(given), np.int64)
    index = np.empty(index_size(int(counts.max(initial=0))), np.int32)
    kernels().number_ids(given, counts, index, distinct, places)
    return given, distinct, places


class Divided:
    """Distinct ids of some tables by the pserver that has them, of several.

    Args:
        tables: Specs of the tables.
        ids: Of each table, (m,), each once.
        bucket_pservers: Owner of each bucket.
        pserver_count: Of the job.
    """

    def __init__(
        self, tables: Sequence[TableSpec], ids: Sequence[Ids], bucket_pservers: Places, pserver_count: int
    ) -> None:
        self._tables = tables
        self._ids = ids
        owners = [bucket_pservers[buckets_of(each, table.salt)] for table, each in zip(tables, ids, strict=True)]
        of_tables = [np.bincount(each, minlength=pserver_count) for each in owners]
        orders = [np.argsort(each, kind="stable") for each in owners]
        parts = [np.split(order, np.cumsum(n)[:-1]) for order, n in zip(orders, of_tables, strict=True)]
        #: By pserver and table: places in ``ids``.
        self.places = [[part[pserver] for part in parts] for pserver in range(pserver_count)]
        #: (pservers, tables): how many ids each has.
        self.counts: Places = np.array(of_tables, np.int64).reshape(len(ids), pserver_count).T

    def ids_of(self, pserver: int) -> list[Ids]:
        """Return the ids of a pserver, of each table in order."""
        return [ids[places] for ids, places in zip(self._ids, self.places[pserver], strict=True)]


def places_within(ids: Ids, table: TableSpec, buckets: range) -> Places:
    """Return the places of the ids that lie in some buckets."""
    found = buckets_of(ids, table.salt)
    return np.flatnonzero((found >= buckets.start) & (found < buckets.stop))
