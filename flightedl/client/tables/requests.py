"""Ids of one table, each once, and by pserver: what is asked for, and where each answer belongs."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from flightedl.domain.tables.placement import buckets_of, pservers_of
from flightedl.domain.tables.spec import TableSpec

Array = npt.NDArray[np.generic]
Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.uint64]
Places = npt.NDArray[np.int64]


if TYPE_CHECKING:
    from flightedl.kernels.compiled_distinct import DistinctKernels


@cache
def kernels() -> DistinctKernels:
    """What tables compute with. Trainers without tables do without numba."""
    from flightedl.kernels.compiled_distinct import distinct_kernels

    return distinct_kernels()


def first_not_finite(rows: Floats) -> int:
    """The number of the first row that has NaN or infinity; -1: none has."""
    finite = np.isfinite(rows)
    return -1 if finite.all() else int(np.argmin(finite.all(axis=1)))


class DistinctIds:
    """The ids of a pull or push, each once.

    Args:
        ids: (n,) as the user gave them.
    """

    def __init__(self, ids: Ids) -> None:
        count = len(ids)
        #: A copy: it is compared with later ones, and the caller may use its memory again.
        self.given = ids.copy()
        #: (n,): of each id, its place in ``ids``.
        self.places: Places = np.empty(count, np.int64)
        distinct = np.empty(count, np.uint64)
        # At most half full.
        index = np.empty(1 << (2 * count).bit_length(), np.int32)
        index.fill(-1)
        #: (m,) in the order in which they come first.
        self.ids: Ids = distinct[: kernels().number_ids(self.given, index, distinct, self.places)]
        self._is_distinct = len(self.ids) == count

    def is_of(self, ids: Ids) -> bool:
        """Whether these are what was given."""
        if len(ids) != len(self.given):
            return False
        # As bytes: many times as fast as NumPy for a few ids.
        return not len(ids) or ids.data.cast("B") == self.given.data.cast("B")

    def spread(self, rows: Floats) -> Floats:
        """(m, dim) rows of ``ids`` as (n, dim) rows of what was given: an array of its own."""
        if self._is_distinct:
            return rows.copy()
        dim = rows.shape[1]
        found = np.empty((len(self.given), dim), np.float32)
        kernels().spread(np.ascontiguousarray(rows).reshape(-1), self.places, dim, found.reshape(-1))
        return found

    def summed(self, gradients: Floats) -> tuple[Floats, int]:
        """(n, dim) gradients of what was given, contiguous, added up by id.

        Returns:
            (m, dim) sums, maybe the same array; and the first row that has NaN or infinity, -1: none has.
        """
        if self._is_distinct:
            return gradients, first_not_finite(gradients)
        sums = np.empty((len(self.ids), gradients.shape[1]), np.float32)
        return sums, int(kernels().add_up(gradients, gradients.view(np.uint32), self.places, sums))


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
