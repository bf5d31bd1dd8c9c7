"""The distinct ids of a request, divided by pserver, and the positions of the ids in the request."""

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
_NO_IDS: Ids = np.empty(0, np.uint64)


@cache
def kernels() -> Any:
    """Return the compiled loops of ``kernels.distinct``. Imported lazily: without tables, numba is not needed."""
    from flightedl.kernels.compiled_rows import distinct_kernels

    return distinct_kernels()


def first_not_finite(rows: Floats) -> int:
    """Return the index of the first row that contains NaN or infinity, or -1 if none does."""
    flat = np.ascontiguousarray(rows).reshape(-1).view(np.uint32)
    return int(kernels().first_not_finite(flat, rows.shape[1]))


class DistinctIds:
    """The distinct ids in a pull or push.

    Args:
        ids: (n,) ids as given by the user.
        numbered: ``ids`` and ``places`` if they are known already. They are not copied.
        optional: Further ids to look up, such as that of a padding. They read as zeros if they have no row.
    """

    __slots__ = ("_is_distinct", "given", "ids", "optional", "places")

    def __init__(self, ids: Ids, numbered: tuple[Ids, Places] | None = None, optional: Ids = _NO_IDS) -> None:
        if numbered is None:
            counts = np.array([len(ids)])
            ids, distinct, places = _numbered([ids], counts)
            numbered = distinct[: int(counts[0])], places
        #: Copy of the ids for comparison with later requests, because the caller may overwrite its array.
        self.given = ids
        #: (m,) distinct ids in the order of their first occurrence, and (n,) the index of each requested id among them.
        self.ids, self.places = numbered
        self._is_distinct = len(self.ids) == len(ids) and not optional.size
        #: The optional ids. They are the first in ``ids``, even if they were requested as well.
        self.optional = optional
        if optional.size:
            self.ids, self.places = np.concatenate([optional, self.ids]), self.places + len(optional)

    @classmethod
    def of_each(cls, many: Sequence[Ids]) -> list[DistinctIds]:
        """Return the distinct ids of several pulls, computed in one pass."""
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

    def is_of(self, ids: Ids, optional: Ids = _NO_IDS) -> bool:
        """True if the request consists of exactly these ids, in the same order."""
        is_same = len(ids) == len(self.given) and bool(kernels().are_equal(ids, self.given))
        return is_same and (optional is self.optional or np.array_equal(optional, self.optional))

    def spread(self, rows: Floats) -> Floats:
        """Copy the (m, dim) rows of the distinct ids to (n, dim) rows, one for each requested id."""
        if self._is_distinct:
            return rows.copy()
        dim = rows.shape[1]
        found = np.empty((len(self.given), dim), np.float32)
        kernels().spread(np.ascontiguousarray(rows).reshape(-1), self.places, dim, found.reshape(-1))
        return found

    def summed(self, gradients: Floats) -> tuple[Floats, int]:
        """Sum the contiguous (n, dim) gradients of the requested ids by id, except the optional ids.

        Returns:
            (m, dim) sums, allocated by ``new_gradients``; and the index of the first row with NaN or infinity, or -1.
        """
        sums = new_gradients(self.ids[(first := len(self.optional)) :], gradients.shape[1])
        places = self.places - first if first else self.places
        return sums, int(kernels().add_up(gradients, gradients.view(np.uint32), places, sums))


def _numbered(many: Sequence[Ids], counts: Places) -> tuple[Ids, Ids, Places]:
    """Return all ids, all distinct ids, and the positions. Changes the counts of ids to counts of distinct ids."""
    given = many[0].copy() if len(many) == 1 else np.concatenate(many) if many else np.empty(0, np.uint64)
    distinct, places = np.empty(len(given), np.uint64), np.empty(len(given), np.int64)
    index = np.empty(index_size(int(counts.max(initial=0))), np.int32)
    kernels().number_ids(given, counts, index, distinct, places)
    return given, distinct, places


class Divided:
    """Distinct ids of several tables, divided by the pservers that own them.

    Args:
        tables: Specs of the tables.
        ids: (m,) distinct ids of each table.
        bucket_pservers: Owner of each bucket.
        pserver_count: Number of pservers of the job.
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
        #: Positions in ``ids`` of the ids that each pserver owns, by table.
        self.places = [[part[pserver] for part in parts] for pserver in range(pserver_count)]
        #: (pservers, tables) number of ids.
        self.counts: Places = np.array(of_tables, np.int64).reshape(len(ids), pserver_count).T

    def ids_of(self, pserver: int) -> list[Ids]:
        """Return the ids that a pserver owns, in the order of the tables."""
        return [ids[places] for ids, places in zip(self._ids, self.places[pserver], strict=True)]


def places_within(ids: Ids, table: TableSpec, buckets: range) -> Places:
    """Return the positions of the ids in these buckets."""
    found = buckets_of(ids, table.salt)
    return np.flatnonzero((found >= buckets.start) & (found < buckets.stop))
