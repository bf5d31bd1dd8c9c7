"""The gradients of several batches, added up in the trainer's memory until they are pushed as one.

One array for each parameter that got a gradient, however many batches there are. Sums of float32 and float64 are made
in their own type, those of 16-bit floats as float32.

Which batches these are, what their gradients are multiplied by, what the sum is divided by, and what becomes of each
batch is decided by ``domain.trainer.sums``; here are the arrays. They belong to the sum of one identity, and are
forgotten when another one begins or is taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from flightedl.kernels.half_precision import ITEM_BYTES

Array = npt.NDArray[np.generic]


class GradientSums:
    """The present sum of one trainer."""

    def __init__(self) -> None:
        self._identity: object = None
        self._sums: dict[str, npt.NDArray[Any]] = {}
        #: Of the gradients.
        self._dtypes: dict[str, np.dtype[Any]] = {}

    def add(self, identity: object, gradients: Mapping[str, Array], weight: int) -> None:
        """Add (n,) gradients, each of the parameter's size and dtype, finite, multiplied by ``weight``."""
        if identity is not self._identity:
            self._identity, self._sums = identity, {}
        if not weight:
            return
        for name, gradient in gradients.items():
            total = self._sums.get(name)
            if total is None:
                is_short = gradient.dtype.itemsize == ITEM_BYTES
                total = self._sums[name] = np.zeros(gradient.shape, np.float32 if is_short else gradient.dtype)
                self._dtypes[name] = gradient.dtype
            total += gradient if weight == 1 else np.multiply(gradient, weight, dtype=total.dtype)

    def take(self, identity: object, divisors: Mapping[str, int]) -> dict[str, Array]:
        """What is to be pushed: the gradient of each parameter that has any, divided by what is given for it."""
        sums, self._sums = self._sums, {}
        if identity is not self._identity:
            return {}
        gradients: dict[str, Array] = {}
        for name, total in sums.items():
            if name in divisors:
                total /= divisors[name]  # noqa: PLW2901 - in place: it is pushed and forgotten
            with np.errstate(over="ignore"):
                gradients[name] = total.astype(self._dtypes[name], copy=False)
        return gradients
