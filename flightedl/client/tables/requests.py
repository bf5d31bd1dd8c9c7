"""Ids of one table, each once, and by pserver: what is asked for, and where each answer belongs."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from flightedl.domain.tables.placement import buckets_of, pservers_of
from flightedl.domain.tables.spec import TableSpec

Array = npt.NDArray[np.generic]
Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.uint64]
Places = npt.NDArray[np.int64]


class DistinctIds:
    """The ids of a pull or push, each once.

    Args:
        ids: (n,) as the user gave them.
    """

    def __init__(self, ids: Ids) -> None:
        #: A copy: it is compared with later ones, and the caller may use its memory again.
        self.given = ids.copy()
        encoded = pa.array(ids).dictionary_encode()
        #: (m,) in the order in which they come first.
        self.ids = np.asarray(encoded.dictionary).astype(np.uint64, copy=False)
        self._is_distinct = len(self.ids) == len(ids)
        #: (n,): of each id, its place in ``ids``.
        self.places: Places = np.asarray(encoded.indices).astype(np.int64)

    def spread(self, rows: Floats) -> Floats:
        """(m, dim) rows of ``ids`` as (n, dim) rows of what was given: an array of its own."""
        return rows.copy() if self._is_distinct else rows[self.places]

    def summed(self, gradients: Floats) -> Floats:
        """(n, dim) gradients of what was given as (m, dim) sums; maybe the same array."""
        if self._is_distinct:
            return gradients
        # Ids are numbered as they come, so that one is new where its number is higher than all before it.
        is_first = np.append(True, self.places[1:] > np.maximum.accumulate(self.places)[:-1])
        found: Floats = gradients[is_first]
        again = np.flatnonzero(~is_first)
        again = again[np.argsort(self.places[again], kind="stable")]
        repeated = self.places[again]
        starts = np.flatnonzero(np.append(True, repeated[1:] != repeated[:-1]))
        found[repeated[starts]] += np.add.reduceat(gradients[again], starts, axis=0)
        return found


class Divided:
    """Distinct ids by the pserver that has them.

    Args:
        table: Whose.
        ids: (m,), each once.
        pserver_count: Of the job.
    """

    def __init__(self, table: TableSpec, ids: Ids, pserver_count: int) -> None:
        self._table = table
        self._ids = ids
        #: (m,): places in ``ids``, those of each pserver together; None: all are of the only one.
        self._order: Places | None = None
        self._ends = [0, len(ids)]
        if pserver_count > 1:
            owners = pservers_of(ids, table.salt, pserver_count)
            self._order = np.argsort(owners, kind="stable")
            self._ends = [0, *np.cumsum(np.bincount(owners, minlength=pserver_count)).tolist()]

    def count(self, pserver: int) -> int:
        """How many ids a pserver has."""
        return self._ends[pserver + 1] - self._ends[pserver]

    def places(self, pserver: int) -> Places | slice:
        """Which of the ids a pserver has."""
        at = slice(self._ends[pserver], self._ends[pserver + 1])
        return at if self._order is None else self._order[at]

    def places_within(self, pserver: int, buckets: range) -> Places | slice:
        """The same, of some of its buckets."""
        at = self.places(pserver)
        found = buckets_of(self._ids[at], self._table.salt)
        chosen = np.flatnonzero((found >= buckets.start) & (found < buckets.stop))
        return chosen if isinstance(at, slice) else at[chosen]

    def ids_of(self, pserver: int) -> Ids:
        """The ids of a pserver, in order."""
        return self._ids[self.places(pserver)]
