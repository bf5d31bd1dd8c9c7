"""Bags of ids: the rows of a bag are combined into one row, and the gradient of that row is distributed to them.

The rows of a bag are x_i and their weights w_i (1 by default). ``sum`` is sum(w_i x_i), ``mean`` is sum(w_i x_i) /
sum(w_i), ``sqrtn`` is sum(w_i x_i) / sqrt(sum(w_i**2)), and ``max`` is the elementwise maximum. An empty bag yields
zeros.
"""

from __future__ import annotations

from typing import Any, Literal, cast, get_args

import numpy as np
import numpy.typing as npt

from flightedl.errors import UsageError

Combiner = Literal["sum", "mean", "sqrtn", "max"]
Floats = npt.NDArray[np.float32]
Places = npt.NDArray[np.int64]


class Bags:
    """Assignment of ids to bags, with their weights.

    Args:
        table: Name of the table, for error messages.
        id_count: Number of ids in all bags.
        offsets: (bags,) position of each bag's first id. They do not decrease, and the first one is 0.
        weights: (id_count,) weights of the ids; None if all weights are 1.
        combiner: Function that combines the rows of a bag.
        left_out: (id_count,) True for ids to ignore; None to ignore none.

    Raises:
        UsageError: An argument is invalid.
    """

    def __init__(
        self,
        table: str,
        id_count: int,
        offsets: Any,
        weights: Any,
        combiner: str,
        left_out: npt.NDArray[np.bool_] | None,
    ) -> None:
        self._table = table
        self._combiner = _known_combiner(table, combiner)
        starts = _checked_offsets(table, offsets, id_count)
        counts = np.diff(np.append(starts, id_count))
        kept = np.ones(id_count, np.bool_) if left_out is None else ~left_out
        #: (id_count,) True for ids to look up; False for nulls and padding.
        self.kept = kept
        #: (n,) index of each looked-up id's bag, in ascending order.
        self._bag_of: Places = np.repeat(np.arange(len(starts)), counts)[kept]
        self.count = len(starts)
        self._counts = np.bincount(self._bag_of, minlength=self.count)
        self._starts = np.cumsum(self._counts) - self._counts
        self._is_filled = self._counts > 0
        self._factors = self._factors_of(_checked_weights(table, weights, id_count, self._combiner), kept)
        #: For ``max``: (n, dim), True where a row holds its bag's maximum.
        self._is_greatest: npt.NDArray[np.bool_] | None = None

    def _factors_of(self, weights: Floats | None, kept: npt.NDArray[np.bool_]) -> Floats | None:
        chosen = np.ones(len(self._bag_of), np.float32) if weights is None else weights[kept]
        if self._combiner == "mean":
            total = self._summed(chosen)
        elif self._combiner == "sqrtn":
            total = np.sqrt(self._summed(np.square(chosen)))
        else:
            return None if weights is None else chosen
        with np.errstate(divide="ignore", invalid="ignore"):
            factors = chosen / total[self._bag_of]
        return np.where(np.isfinite(factors), factors, np.float32(0)).astype(np.float32)

    def combined(self, rows: Floats) -> Floats:
        if self._combiner != "max":
            return self._summed(rows if self._factors is None else rows * self._factors[:, None])
        found = np.zeros((self.count, rows.shape[1]), np.float32)
        if len(rows):
            found[self._is_filled] = np.maximum.reduceat(rows, self._starts[self._is_filled], axis=0)
        is_greatest = rows == found[self._bag_of]
        # If several elements are equal to the maximum, the first one gets the gradient.
        seen = np.cumsum(is_greatest, axis=0)
        before = (seen - is_greatest)[self._starts[self._bag_of]] if len(rows) else seen
        self._is_greatest = is_greatest & (seen - before == 1)
        return found

    def is_like(self, other: Bags) -> bool:
        """True if both objects combine the same ids in the same bags with ``max``."""
        return (
            self._combiner == other._combiner
            and np.array_equal(self.kept, other.kept)
            and np.array_equal(self._bag_of, other._bag_of)
            and self._combiner == "max"
        )

    def spread(self, gradients: Floats) -> Floats:
        """Convert (bags, dim) gradients of bags to (n, dim) gradients of their rows.

        Raises:
            UsageError: The combiner is ``max``, and the bags have not been pulled before.
        """
        found = gradients[self._bag_of]
        if self._combiner == "max":
            if self._is_greatest is None:
                raise UsageError(f"table {self._table!r}: pull the bags before you push the gradient of their maximum")
            return found * self._is_greatest
        return found if self._factors is None else found * self._factors[:, None]

    def _summed(self, values: Floats) -> Floats:
        found = np.zeros((self.count, *values.shape[1:]), np.float32)
        if len(values):
            found[self._is_filled] = np.add.reduceat(values, self._starts[self._is_filled], axis=0)
        return found


def _known_combiner(table: str, combiner: str) -> Combiner:
    if combiner not in get_args(Combiner):
        raise UsageError(
            f"table {table!r}: there is no combiner {combiner!r:.40}, only {', '.join(get_args(Combiner))}"
        )
    return cast("Combiner", combiner)


def _checked_offsets(table: str, offsets: Any, id_count: int) -> Places:
    found = np.asarray(offsets)
    if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
        raise UsageError(f"table {table!r}: offsets must be whole numbers in one dimension, not {found.dtype}")
    starts = found.astype(np.int64)
    if not len(starts):
        if id_count:
            raise UsageError(f"table {table!r}: there are {id_count} ids, but no bag")
        return starts
    if starts[0] != 0 or (np.diff(starts) < 0).any() or starts[-1] > id_count:
        raise UsageError(
            f"table {table!r}: offsets must start at 0, must not decrease, and must not exceed the number of ids, "
            f"{id_count}"
        )
    return starts


def _checked_weights(table: str, weights: Any, id_count: int, combiner: str) -> Floats | None:
    if weights is None:
        return None
    if combiner == "max":
        raise UsageError(f"table {table!r}: combiner 'max' accepts no weights")
    found = np.asarray(weights, np.float32)
    if found.shape != (id_count,) or not np.isfinite(found).all():
        raise UsageError(f"table {table!r}: weights must be {id_count} finite numbers, one for each id")
    return found
