"""An embedding table as scripts see it: its rows are pulled and pushed by id."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from flightedl.client.arguments import unmasked, url_of
from flightedl.client.model.saving import Saved
from flightedl.client.model.step_plan import converted
from flightedl.client.tables.bags import Bags
from flightedl.client.tables.ids import FoundIds, Ids, found_ids, plain_ids
from flightedl.client.tables.requests import DistinctIds, first_not_finite
from flightedl.client.tables.traffic import Lookup, require_known
from flightedl.domain.tables.spec import TableSpec
from flightedl.errors import GradientError, UsageError
from flightedl.messages.status import TableCounts

if TYPE_CHECKING:
    from flightedl.client.model.job_model import JobModel
    from flightedl.client.model.parameters import Parameters

Floats = npt.NDArray[np.float32]
Nulls = Literal["error", "padding"]
_NO_IDS: Ids = np.empty(0, np.uint64)
#: Source of a batch's ids: a column's name, or a function of the batch.
Column = str | Callable[[pa.RecordBatch], Any]


class Asked(NamedTuple):
    """Ids of one pull or push."""

    found: FoundIds
    #: The ids to look up, without duplicates.
    distinct: DistinctIds
    #: (n,) True for ids to look up; None if all ids are looked up.
    kept: npt.NDArray[np.bool_] | None
    bags: Bags | None

    @property
    def is_plain(self) -> bool:
        """True if all ids are looked up, and the result is (n, dim)."""
        return self.kept is None and self.bags is None and len(self.found.shape) == 1


class Table:
    """Rows of floats, each found by its id. Created by ``job.table``; only the session's thread may use it.

    An id is an integer of up to 64 bits or a string. A request is an array, list or Arrow column of ids (which may be
    dictionary-encoded), or a column of lists, in which each list is a bag. Strings are hashed to 64 bits; the
    probability that any two of n strings share a row is n**2 / 2**65.

    Args:
        spec: The declared table.
        declared: Returns the table's number and the access to its rows. Declares the model if necessary.
        counts: Returns statistics of the table, summed over all pservers.
        owner: The model to which the table belongs.
    """

    def __init__(
        self,
        spec: TableSpec,
        declared: Callable[[str], tuple[int, Parameters]],
        counts: Callable[[str], TableCounts],
        owner: JobModel | None = None,
    ) -> None:
        self.spec = spec
        self._owner = owner
        self._declared = declared
        self._counts = counts
        #: Ids of the previous pull or push. They are cached, because a push usually has the same ids as the pull before
        #: it.
        self._distinct: DistinctIds | None = None
        #: Request with the same ids, for reuse; None unless the ids were a plain array of integers.
        self._plain: Asked | None = None
        #: Bags of the previous pull, needed because with ``max`` the gradient belongs to the row that held the maximum.
        self._last: tuple[DistinctIds, Bags] | None = None

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def dim(self) -> int:
        """Number of elements in a row."""
        return self.spec.dim

    def pull(
        self,
        ids: Any,
        *,
        offsets: npt.ArrayLike | None = None,
        weights: npt.ArrayLike | None = None,
        combiner: str = "sum",
        padding_idx: int | None = None,
        nulls: Nulls = "error",
        max_norm: float | None = None,
    ) -> Floats:
        """Return the rows of ids or of bags of ids, at the version that the current batch requires.

        To read several tables in one round trip, call ``Job.lookup``.

        Args:
            ids: Ids of shape (n,), or of any other shape.
            offsets: (bags,) position of each bag's first id. The result then has one row per bag. A column of lists has
                its own offsets.
            weights: (n,) weight of each id in its bag.
            combiner: Combination of a bag's rows: "sum", "mean", "sqrtn" or "max".
            padding_idx: Id of the padding, which gets no gradient and does not count in a bag. It reads as its row if
                the table has one, otherwise as zeros.
            nulls: "error" to reject nulls in a column, or "padding" to treat them as padding.
            max_norm: Maximum Euclidean norm: rows with a greater norm are scaled down to it when they are read.

        Returns:
            A new float32 array of shape (n, dim), (*shape, dim) for ids of another shape, or (bags, dim).

        Raises:
            UsageError: An argument is invalid (nothing was sent), or an id has no row and the table forbids this.
            UnavailableError: A pserver was unreachable for longer than ``give_up_s``.
        """
        asked = self.asked(ids, offsets, weights, combiner, padding_idx, nulls)
        number, traffic = self._declared(self.name)
        return self.rows_of(asked, traffic.look_up({number: asked.distinct}), number, max_norm)

    def push(
        self,
        ids: Any,
        gradients: npt.ArrayLike,
        *,
        offsets: npt.ArrayLike | None = None,
        weights: npt.ArrayLike | None = None,
        combiner: str = "sum",
        padding_idx: int | None = None,
        nulls: Nulls = "error",
    ) -> None:
        """Add gradients of rows or bags to the current batch. They are summed by id; the batch's step sends them.

        Args:
            ids: As in ``pull``.
            gradients: Finite floats in the shape that ``pull`` returns for these ids. Types other than float32 are
                converted.
            offsets: As in ``pull``.
            weights: As in ``pull``.
            combiner: As in ``pull``.
            padding_idx: As in ``pull``.
            nulls: As in ``pull``.

        Raises:
            GradientError: The gradients have a wrong shape or type, or contain NaN or infinity. Nothing was sent.
            UsageError: No batch is current, or its step has already been made.
        """
        asked = self.asked(ids, offsets, weights, combiner, padding_idx, nulls)
        number, traffic = self._declared(self.name)
        shape = asked.found.shape if asked.bags is None else (asked.bags.count,)
        values = self._checked(gradients, (*shape, self.dim), traffic)
        if asked.bags is not None:
            values = self._bags_pulled(asked).spread(values)
        elif asked.kept is not None:
            values = values[asked.kept]
        sums, bad = asked.distinct.summed(values)
        if bad >= 0:
            raise self._rejected(traffic, f"gradient of id {asked.distinct.given[bad]}", "has NaN or infinity")
        traffic.push_rows(number, asked.distinct.ids[len(asked.distinct.optional) :], sums)

    def push_distinct(self, ids: Ids, gradients: Floats) -> None:
        """Push (m, dim) gradients of (m,) distinct ids. Raises the same errors as ``push``."""
        number, traffic = self._declared(self.name)
        if (bad := first_not_finite(gradients)) >= 0:
            raise self._rejected(traffic, f"gradient of id {ids[bad]}", "has NaN or infinity")
        traffic.push_rows(number, ids, gradients)

    @property
    def declared(self) -> tuple[int, Parameters]:
        """Number of the table, and access to its rows. Declares the model if it has not been declared."""
        return self._declared(self.name)

    def load(self, url: str | Path) -> None:
        """Use the rows in a file as initial rows. Call this in every trainer before the model is declared.

        Each pserver reads the file before the first step. A job that resumes from a checkpoint ignores the file.

        Args:
            url: Path or URL, the same for all pservers, of a Parquet file in which ``id`` contains integers, strings or
                bytes, and ``values`` lists of floats, such as a file from ``export``. Slots and counts are used if they
                belong to this table's optimizer.

        Raises:
            UsageError: The model has already been declared, or the table has another file.
            DataError: The file cannot be read, or contains no rows for this table.
        """
        if self._owner is None:
            raise UsageError(f"table {self.name!r} does not belong to a job: create it with job.table")
        self._owner.begin_with(self.name, url_of("url", url))

    def export(self, url: str | Path, *, slots: bool = False) -> Saved:
        """Write all rows to one Parquet file. All trainers must call this method; one of them starts the export.

        The rows are read from a new checkpoint or, in a job without checkpoints, from the pservers. In the latter case,
        all rows have the same version after the loop has ended, and, in Sync mode without backups, also during the
        loop, because no round closes while this trainer waits. Otherwise, each row has its value at the time when it is
        read.

        As with ``Job.save_model``, the n-th call for a URL within an epoch is the same request in all trainers.

        Args:
            url: Path or URL of the file. Its columns are ``id`` and ``values``.
            slots: True to add the optimizer's slots and each row's number of updates.

        Returns:
            As ``Job.save_model``.

        Raises:
            UsageError: The URL cannot be used.
            UnavailableError: The file could not be written.
        """
        if self._owner is None:
            raise UsageError(f"table {self.name!r} does not belong to a job: create it with job.table")
        return self._owner.save_table(self.name, url_of("url", url), has_slots=bool(slots))

    def stats(self) -> TableCounts:
        """Return statistics of the table, summed over all pservers, such as its number of rows and its size."""
        return self._counts(self.name)

    def __len__(self) -> int:
        return self.stats().rows

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"<table {self.name!r}, dim {self.dim}>"

    # --- methods that the session also calls ---

    def asked(
        self,
        ids: Any,
        offsets: npt.ArrayLike | None = None,
        weights: npt.ArrayLike | None = None,
        combiner: str = "sum",
        padding_idx: int | None = None,
        nulls: Nulls = "error",
        *,
        reads_padding: bool = True,
    ) -> Asked:
        """Return the ids of a request. For arguments and errors see ``pull``. Bags do not read the padding."""
        if padding_idx is offsets is weights is None and nulls == "error" and (plain := plain_ids(ids)) is not None:
            return self.known(plain) or self.asks_for(DistinctIds(plain))
        found = found_ids(self.name, ids)
        if nulls not in {"error", "padding"}:
            raise UsageError(f"nulls is {nulls!r:.40}, but must be 'error' or 'padding'")
        left_out = found.nulls
        if left_out is not None and nulls == "error":
            raise UsageError(f"ids of table {self.name!r} have {int(left_out.sum())} nulls: see nulls='padding'")
        padding = None if padding_idx is None else found_ids(self.name, [padding_idx]).ids
        if padding is not None:
            is_padding = found.ids == padding
            left_out = is_padding if left_out is None else left_out | is_padding
        if left_out is not None and not left_out.any():
            left_out = None
        starts = found.offsets if offsets is None else offsets
        bags = None
        if starts is not None:
            bags = Bags(self.name, len(found.ids), starts, weights, combiner, left_out)
        elif weights is not None:
            raise UsageError(f"table {self.name!r}: weights require bags: pass offsets, too")
        kept = None if left_out is None else ~left_out
        ids = found.ids if kept is None else found.ids[kept]
        is_read = padding is not None and kept is not None and bags is None and reads_padding
        optional = padding if padding is not None and is_read else _NO_IDS
        if self._distinct is None or not self._distinct.is_of(ids, optional):
            self._distinct = DistinctIds(ids, optional=optional)
        return Asked(found, self._distinct, kept, bags)

    def known(self, ids: Ids) -> Asked | None:
        """Return the previous request if it was for an array of exactly these ids."""
        plain = self._plain
        return plain if plain is not None and plain.distinct.is_of(ids) else None

    def asks_for(self, distinct: DistinctIds) -> Asked:
        """Return a request for an array of ids, and cache it for the next push."""
        self._distinct = distinct
        self._plain = Asked(FoundIds(distinct.given, shape=distinct.given.shape), distinct, None, None)
        return self._plain

    def rows_of(self, asked: Asked, lookup: Lookup, number: int, max_norm: float | None = None) -> Floats:
        """Return the requested rows from the result of a lookup."""
        require_known(self.name, lookup.unknown.get(number, ()))
        rows = lookup.rows(number)
        if max_norm is not None:
            norms = np.linalg.norm(rows, axis=1, keepdims=True)
            rows = rows * np.minimum(1.0, max_norm / np.maximum(norms, np.float32(1e-30))).astype(np.float32)
        found = asked.distinct.spread(rows)
        if asked.bags is not None:
            combined = asked.bags.combined(found)
            self._last = (asked.distinct, asked.bags)
            return combined
        if asked.kept is not None:
            padded = np.zeros((len(asked.found.ids), self.dim), np.float32)
            if asked.distinct.optional.size:
                padded[:] = rows[0]
            padded[asked.kept] = found
            found = padded
        return found if len(asked.found.shape) == 1 else found.reshape(*asked.found.shape, self.dim)

    def _bags_pulled(self, asked: Asked) -> Bags:
        """Return the previous pull's bags, which record the rows with the maxima, if they equal these bags."""
        assert asked.bags is not None, "there are bags"
        if self._last is not None and self._last[0].is_of(asked.distinct.given):
            known = self._last[1]
            if known.is_like(asked.bags):
                return known
        return asked.bags

    def _checked(self, gradients: npt.ArrayLike, shape: tuple[int, ...], traffic: Parameters) -> Floats:
        if type(gradients) is np.ndarray and gradients.shape == shape and gradients.dtype == np.float32:
            return np.ascontiguousarray(gradients).reshape(-1, self.dim)
        try:
            array = np.asarray(unmasked(gradients))
        except (TypeError, ValueError, RuntimeError) as error:
            raise self._rejected(traffic, "gradients", f"are not an array: {error!s:.160}") from None
        if array.shape != shape:
            raise self._rejected(traffic, "gradients", f"have shape {array.shape}, not {shape}")
        if array.dtype != np.float32:
            try:
                array = converted(array, np.dtype(np.float32), f"table {self.name!r}", traffic.where())
            except GradientError as error:
                traffic.rejected(error)
                raise
        return np.ascontiguousarray(array).reshape(-1, self.dim)

    def _rejected(self, traffic: Parameters, what: str, problem: str) -> GradientError:
        """Return the error to raise for the current batch. The loop will repeat the batch."""
        error = GradientError(
            f"the {what} of table {self.name!r} {problem} in {traffic.where()}; nothing of it was pushed"
        )
        traffic.rejected(error)
        return error


def asked_of(wanted: Mapping[Table, Any], nulls: Nulls = "error") -> dict[Table, Asked]:
    """Return requests for several tables; see ``Table.pull``. Plain arrays of ids are processed in one pass."""
    found: dict[Table, Asked] = {}
    plain: dict[Table, Ids] = {}
    for table, given in wanted.items():
        if (ids := plain_ids(given)) is None:
            found[table] = table.asked(given, nulls=nulls)
        elif (known := table.known(ids)) is not None:
            found[table] = known
        else:
            plain[table] = ids
    for table, distinct in zip(plain, DistinctIds.of_each(list(plain.values())), strict=True):
        found[table] = table.asks_for(distinct)
    return found
