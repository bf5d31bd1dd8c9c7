"""An embedding table as a script has it: rows by id, pulled and pushed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from flightedl.client.arguments import url_of
from flightedl.client.model.step_plan import converted
from flightedl.client.tables.bags import Bags
from flightedl.client.tables.ids import FoundIds, Ids, found_ids, plain_ids
from flightedl.client.tables.requests import DistinctIds, first_not_finite
from flightedl.client.tables.traffic import Lookup, require_known
from flightedl.domain.tables.spec import TableSpec
from flightedl.domain.trainer.batches import CurrentBatch
from flightedl.errors import GradientError, UsageError
from flightedl.messages.status import TableCounts

Floats = npt.NDArray[np.float32]
Nulls = Literal["error", "padding"]
#: Where the ids of a batch are: the name of a column, or what makes them of the batch.
Column = str | Callable[[pa.RecordBatch], Any]


class Traffic(Protocol):
    """What brings rows, see ``model.parameters``."""

    def look_up(self, ids: Mapping[int, DistinctIds]) -> Lookup:
        """Rows of tables, by table number."""
        ...

    @property
    def current_batch(self) -> CurrentBatch | None:
        """What the user's code is at."""
        ...

    def push_rows(self, table: int, ids: Ids, gradients: Floats) -> None:
        """Gradients of the rows of distinct ids, which leave with the current batch's step."""
        ...

    def rejected(self, error: GradientError) -> None:
        """Note that a gradient of the current batch was rejected."""
        ...

    def where(self) -> str:
        """The current batch, for people."""
        ...


class Owner(Protocol):
    """The model that a table is of, see ``model.job_model``."""

    def save_table(self, name: str, target: str, *, has_slots: bool) -> bool:
        """Have its rows written by one of all trainers."""
        ...

    def begin_with(self, name: str, url: str) -> None:
        """Let it begin with the rows of a file."""
        ...


class Asked(NamedTuple):
    """What a pull or push is about."""

    found: FoundIds
    #: Of the ids that count.
    distinct: DistinctIds
    #: (n,) which ids count; None: all.
    kept: npt.NDArray[np.bool_] | None
    bags: Bags | None

    @property
    def is_plain(self) -> bool:
        """Whether all ids count, and rows come as (n, dim) of them."""
        return self.kept is None and self.bags is None and len(self.found.shape) == 1


class Table:
    """Rows of numbers by id. Made by ``job.table``; belongs to the thread of the session.

    Ids are whole numbers of up to 64 bits, texts, or an Arrow column of either (also dictionary-encoded); a column of
    lists is bags. Texts are hashed to 64 bits: of n texts two share a row with a probability of n**2 / 2**65.

    Args:
        spec: As declared.
        declared: The number of the table, and what brings its rows; declares the model if nobody has.
        counts: Of the table, over all pservers.
        owner: The model that it is of.
    """

    def __init__(
        self,
        spec: TableSpec,
        declared: Callable[[str], tuple[int, Traffic]],
        counts: Callable[[str], TableCounts],
        owner: Owner | None = None,
    ) -> None:
        self.spec = spec
        self._owner = owner
        self._declared = declared
        self._counts = counts
        #: Of the newest pull or push: mostly what was pulled is pushed to.
        self._distinct: DistinctIds | None = None
        #: The same, if it was about an array of whole numbers and nothing else.
        self._plain: Asked | None = None
        #: The maximum that was pulled last: who pushes its gradient has to know where it came from.
        self._last: tuple[DistinctIds, Bags] | None = None

    @property
    def name(self) -> str:
        """Of the table."""
        return self.spec.name

    @property
    def dim(self) -> int:
        """Elements of a row."""
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
        """The rows of ids, or of bags of them, as the current batch has to see them.

        To read several tables at once, see ``Job.lookup``: it takes one round trip.

        Args:
            ids: (n,), or of any shape.
            offsets: (bags,): ids lie in bags, of which each begins here; what comes back is one row for each bag. A
                column of lists has its own.
            weights: (n,): what each id counts in its bag.
            combiner: "sum", "mean", "sqrtn" or "max" of a bag.
            padding_idx: An id that stands for nothing: its row is zeros, gets no gradient, and is no part of a bag.
            nulls: "error", or "padding": nulls in a column stand for nothing.
            max_norm: Rows whose Euclidean norm is greater are scaled to it, as they are read.

        Returns:
            (n, dim) float32, of ids of another shape (*shape, dim), of bags (bags, dim). The caller's own array.

        Raises:
            UsageError: anything of this makes no sense, or an id has no row where that is an error. Nothing was sent.
            UnavailableError: a pserver stayed away for longer than ``give_up_s``.
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
        """Gradients of rows, or of bags, for the current batch. They leave with its step; until then they add up.

        Args:
            ids: As for ``pull``, like all that follows.
            gradients: As ``pull`` returned rows for these ids: (n, dim) or (bags, dim) finite floats. Other types than
                float32 are converted to it.
            offsets: As for ``pull``.
            weights: Likewise.
            combiner: Likewise.
            padding_idx: Likewise.
            nulls: Likewise.

        Raises:
            GradientError: they have another shape, are no floats, or have NaN or infinity. Nothing was sent.
            UsageError: no batch is current, or its step has been made.
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
        traffic.push_rows(number, asked.distinct.ids, sums)

    def push_distinct(self, ids: Ids, gradients: Floats) -> None:
        """``push`` of distinct ids: (m,) and (m, dim). Errors likewise."""
        number, traffic = self._declared(self.name)
        if (bad := first_not_finite(gradients)) >= 0:
            raise self._rejected(traffic, f"gradient of id {ids[bad]}", "has NaN or infinity")
        traffic.push_rows(number, ids, gradients)

    @property
    def declared(self) -> tuple[int, Traffic]:
        """The number of the table, and what brings its rows; declares the model if nobody has."""
        return self._declared(self.name)

    def load(self, url: str | Path) -> None:
        """Begin with the rows of a file, before the model is declared: the same call in every trainer.

        Pservers read it, each for itself, before the first step; a job that goes on from a checkpoint does without.

        Args:
            url: Path or URL, the same for all pservers, of a Parquet file as ``export`` writes it, or with other whole
                numbers or texts as ``id``, and lists of floats as ``values``. Slots and counts come along where it has
                those of this table's optimizer.

        Raises:
            UsageError: the model is declared already, or begins with another file.
            DataError: the file cannot be read, or has no rows for this table.
        """
        if self._owner is None:
            raise UsageError(f"table {self.name!r} is of no job")
        self._owner.begin_with(self.name, url_of("url", url))

    def export(self, url: str | Path, *, slots: bool = False) -> bool:
        """Write all rows as one Parquet file; call it in all trainers, and one of them does it.

        The rows come from a checkpoint that is made for it, or from the pservers if the job keeps no checkpoints. In
        that case they are of one moment in Sync mode (no round closes while this trainer waits, unless the mode has
        backups) and after the loop; otherwise each pserver's rows are as that pserver is read. As with
        ``Job.save_model``, the n-th call for a URL within an epoch is the same request in all trainers.

        Args:
            url: Path or URL of the file: the columns ``id`` and ``values``.
            slots: Also what the optimizer keeps beside the values, and each row's number of updates.

        Returns:
            True in the trainer that asked the master for it, False in the others.

        Raises:
            UsageError: the URL cannot be used.
            UnavailableError: the file could not be written.
        """
        if self._owner is None:
            raise UsageError(f"table {self.name!r} is of no job")
        return self._owner.save_table(self.name, url_of("url", url), has_slots=bool(slots))

    def stats(self) -> TableCounts:
        """Figures of the table over all pservers: rows, their bytes, reads and so on."""
        return self._counts(self.name)

    def __len__(self) -> int:
        return self.stats().rows

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"<table {self.name!r}, dim {self.dim}>"

    # what the session calls too

    def asked(
        self,
        ids: Any,
        offsets: npt.ArrayLike | None = None,
        weights: npt.ArrayLike | None = None,
        combiner: str = "sum",
        padding_idx: int | None = None,
        nulls: Nulls = "error",
    ) -> Asked:
        """Which rows are meant. Arguments and errors as of ``pull``."""
        if padding_idx is offsets is weights is None and nulls == "error" and (plain := plain_ids(ids)) is not None:
            return self.known(plain) or self.asks_for(DistinctIds(plain))
        found = found_ids(self.name, ids)
        if nulls not in {"error", "padding"}:
            raise UsageError(f"nulls is {nulls!r:.40}, but must be 'error' or 'padding'")
        left_out = found.nulls
        if left_out is not None and nulls == "error":
            raise UsageError(f"ids of table {self.name!r} have {int(left_out.sum())} nulls: see nulls='padding'")
        if padding_idx is not None:
            is_padding = found.ids == np.uint64(int(padding_idx) & (1 << 64) - 1)
            left_out = is_padding if left_out is None else left_out | is_padding
        if left_out is not None and not left_out.any():
            left_out = None
        starts = found.offsets if offsets is None else offsets
        bags = None
        if starts is not None:
            bags = Bags(self.name, len(found.ids), starts, weights, combiner, left_out)
        elif weights is not None:
            raise UsageError(f"table {self.name!r}: weights are of bags: give offsets, too")
        kept = None if left_out is None else ~left_out
        ids = found.ids if kept is None else found.ids[kept]
        if self._distinct is None or not self._distinct.is_of(ids):
            self._distinct = DistinctIds(ids)
        return Asked(found, self._distinct, kept, bags)

    def known(self, ids: Ids) -> Asked | None:
        """What was asked last, if it was about these ids, and an array of them."""
        plain = self._plain
        return plain if plain is not None and plain.distinct.is_of(ids) else None

    def asks_for(self, distinct: DistinctIds) -> Asked:
        """An array of ids, as they are mostly given: it is remembered for the push that follows."""
        self._distinct = distinct
        self._plain = Asked(FoundIds(distinct.given, shape=distinct.given.shape), distinct, None, None)
        return self._plain

    def rows_of(self, asked: Asked, lookup: Lookup, number: int, max_norm: float | None = None) -> Floats:
        """What was asked for, of what came."""
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
            whole = np.zeros((len(asked.found.ids), self.dim), np.float32)
            whole[asked.kept] = found
            found = whole
        return found if len(asked.found.shape) == 1 else found.reshape(*asked.found.shape, self.dim)

    def _bags_pulled(self, asked: Asked) -> Bags:
        """The bags as they were pulled, if these are the same."""
        assert asked.bags is not None, "there are bags"
        if self._last is not None and self._last[0].is_of(asked.distinct.given):
            known = self._last[1]
            if known.is_like(asked.bags):
                return known
        return asked.bags

    def _checked(self, gradients: npt.ArrayLike, shape: tuple[int, ...], traffic: Traffic) -> Floats:
        if type(gradients) is np.ndarray and gradients.shape == shape and gradients.dtype == np.float32:
            return np.ascontiguousarray(gradients).reshape(-1, self.dim)
        try:
            array = np.asarray(gradients)
        except (TypeError, ValueError, RuntimeError) as error:
            raise self._rejected(traffic, "gradients", f"are no array: {error!s:.160}") from None
        if array.shape != shape:
            raise self._rejected(traffic, "gradients", f"have shape {array.shape}, not {shape}")
        if array.dtype != np.float32:
            try:
                array = converted(array, np.dtype(np.float32), f"table {self.name!r}", traffic.where())
            except GradientError as error:
                traffic.rejected(error)
                raise
        return np.ascontiguousarray(array).reshape(-1, self.dim)

    def _rejected(self, traffic: Traffic, what: str, problem: str) -> GradientError:
        """Return the error to raise for the current batch, which is handed out again."""
        error = GradientError(
            f"the {what} of table {self.name!r} {problem} in {traffic.where()}; nothing of it was pushed"
        )
        traffic.rejected(error)
        return error


def asked_of(wanted: Mapping[Table, Any], nulls: Nulls = "error") -> dict[Table, Asked]:
    """Which rows of several tables are meant; arguments as of ``Table.pull``. Arrays of ids go through together."""
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
