"""The gradients of several batches, added up in the trainer's memory until they are pushed as one.

One array for each parameter that got a gradient, however many batches there are. Sums of float32 and float64 are made
in their own type, those of 16-bit floats as float32. What is pushed is the sum itself, or the mean weighted by records,
over the batches that had a gradient for the parameter, as in a synchronous round.

Which batches these are, and what becomes of them, is decided by ``domain.trainer.sums``. Where the sum is beyond what
its elements can say, each batch is done again for itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from flightedl.domain.consistency.modes import Async
from flightedl.domain.trainer.batches import CurrentBatch
from flightedl.domain.trainer.sums import BatchSums
from flightedl.errors import UsageError
from flightedl.kernels.half_precision import ITEM_BYTES

Array = npt.NDArray[np.generic]


class GradientSums(BatchSums):
    """The present sum of one trainer."""

    def __init__(self, mode: Async) -> None:
        super().__init__(mode.push_every)
        self._is_mean = mode.reduce == "mean"
        self._sums: dict[str, npt.NDArray[Any]] = {}
        #: Of the gradients.
        self._dtypes: dict[str, np.dtype[Any]] = {}
        #: Records of the batches that had a gradient for the parameter.
        self._weights: dict[str, int] = {}
        #: Which parameters the batch at hand has a gradient for.
        self._names: set[str] = set()

    def add(self, current: CurrentBatch, gradients: Mapping[str, Array]) -> None:
        """Add (n,) gradients of a batch, each of the parameter's size and dtype, finite.

        Of a batch without records a mean has nothing.

        Raises:
            UsageError: the batch has had a gradient for one of them; nothing was added.
        """
        names = self._names if self.is_at(current) else set()
        for name in gradients:
            if name in names or current.waits or self.is_pushed(current):
                raise UsageError(f"the gradient of {name!r} was already pushed for this batch ({current})")
        self.begin(current)
        self._names = names | gradients.keys()
        weight = current.record_count if self._is_mean else 1
        if not weight:
            # No record of the batch met the filter: it has no part in a mean, as in a synchronous round.
            return
        for name, gradient in gradients.items():
            total = self._sums.get(name)
            if total is None:
                is_short = gradient.dtype.itemsize == ITEM_BYTES
                total = self._sums[name] = np.zeros(gradient.shape, np.float32 if is_short else gradient.dtype)
                self._dtypes[name] = gradient.dtype
            total += gradient if weight == 1 else np.multiply(gradient, weight, dtype=total.dtype)
            self._weights[name] = self._weights.get(name, 0) + weight

    def take_all(self) -> tuple[CurrentBatch, dict[str, Array]]:
        """What is to be pushed: all batches as one, and the gradient of each parameter that has any."""
        divisors: Mapping[str, int] = {}
        if self._is_mean:
            # Parameters that had no gradient before are divided by what has one now.
            divisors = self._weights if self.again is None else {**self._weights, **self.again.divisors}
        gradients: dict[str, Array] = {}
        for name, total in self._sums.items():
            if self._is_mean:
                total /= divisors[name]  # noqa: PLW2901 - in place: it is pushed and forgotten
            with np.errstate(over="ignore"):
                gradients[name] = total.astype(self._dtypes[name], copy=False)
        self._sums, self._weights = {}, {}
        return self.take(divisors), gradients

    def give_up(self) -> None:
        """Forget what was added up and not pushed: its batches have to be done again, here or by somebody else."""
        self._sums, self._weights, self._names = {}, {}, set()
        super().give_up()
