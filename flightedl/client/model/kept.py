"""Gradients that a trainer keeps between pushes: sums over several batches, and rounding errors.

*Sums* accumulate the gradients of several batches until they are pushed together. Each parameter with a gradient has
one array, in the gradient's dtype, or in float32 for 16-bit gradients. ``domain.trainer.sums`` decides which batches
belong to a sum, their weights, the divisor, and the outcome of each batch. The arrays belong to a single sum, and are
dropped when it is pushed or replaced.

*Error feedback* (Seide et al. 2014) adds the error of rounding one gradient to 16 bits to the next gradient. These
rules hold:

* A push is encoded only once, before anything is sent, so repeated messages have the same bytes. This is necessary
  because a block that has applied the first message answers "already applied" to the second.
* A block's *residual* (the exact gradient minus the pushed one) changes once per push, when the block has answered. A
  gradient that arrived too late is computed again, and leaves the residual unchanged.
* Residuals exist only in this trainer. If it dies, the last rounding errors are never corrected.
* A block may already have applied the batch, because another trainer pushed it or because it is being repeated for
  other blocks. The block's answer is then the same as for a repeated message, so the residual is updated in this case
  as well. The resulting error is no larger than that of a single rounding, and does not accumulate.

Residuals take as much memory as the model in float32, and twice as much during a push. Gradients are rounded in pieces
that fit into the processor's cache.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Mapping
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from flightedl.domain.model.sharding import Block
from flightedl.errors import GradientError
from flightedl.kernels.half_precision import ITEM_BYTES, largest

if TYPE_CHECKING:
    from flightedl.kernels.compiled import HalfKernels

#: Number of elements to round at a time, so that inputs and outputs fit into the processor's cache.
_PIECE = 1 << 15

Array = npt.NDArray[np.generic]
Floats = npt.NDArray[np.float32]


class GradientSums:
    """The gradient sum that one trainer is accumulating.

    Args:
        assigned: Parameters whose newest value replaces the earlier ones instead of being added to them.
    """

    def __init__(self, assigned: Collection[str] = ()) -> None:
        self._assigned = assigned
        self._identity: object = None
        self._sums: dict[str, npt.NDArray[Any]] = {}
        #: Dtypes of the gradients.
        self._dtypes: dict[str, np.dtype[Any]] = {}

    def add(self, identity: object, gradients: Mapping[str, Array], weight: int) -> None:
        """Add finite gradients, multiplied by ``weight``. A gradient must have its parameter's shape and dtype."""
        if identity != self._identity:
            self._identity, self._sums = identity, {}
        if not weight:
            return
        for name, gradient in gradients.items():
            total = self._sums.get(name)
            if name in self._assigned:
                self._sums[name], self._dtypes[name] = gradient.copy(), gradient.dtype
                continue
            if total is None:
                is_short = gradient.dtype.itemsize == ITEM_BYTES
                total = self._sums[name] = np.zeros(gradient.shape, np.float32 if is_short else gradient.dtype)
                self._dtypes[name] = gradient.dtype
            total += gradient if weight == 1 else np.multiply(gradient, weight, dtype=total.dtype)

    def take(self, identity: object, divisors: Mapping[str, int]) -> dict[str, Array]:
        """Return and drop the sum: each parameter's gradient, divided by the parameter's divisor if that is set."""
        sums, self._sums = self._sums, {}
        if identity != self._identity:
            return {}
        gradients: dict[str, Array] = {}
        for name, total in sums.items():
            if name in divisors and name not in self._assigned:
                total /= divisors[name]  # noqa: PLW2901 - in place, because the sum is dropped
            with np.errstate(over="ignore"):
                gradients[name] = total.astype(self._dtypes[name], copy=False)
        return gradients


class ErrorFeedback:
    """Residuals of one trainer, as one flat array per parameter.

    Args:
        halves: Converts to the 16-bit type of the wire.
        blocks_of: Returns the blocks of a parameter.
    """

    def __init__(self, halves: HalfKernels, blocks_of: Callable[[str], Iterable[Block]]) -> None:
        self._kind = halves.kind
        self._half = halves
        self._blocks_of = blocks_of
        #: By parameter.
        self._residuals: dict[str, Floats] = {}
        #: Rounding errors of the push in flight, which become residuals when the blocks answer.
        self._pending: dict[str, Floats] = {}

    def encode(self, gradients: Mapping[str, Array]) -> dict[str, Array]:
        """Return the arrays to send. Residuals are added to float32 gradients, and the sums are rounded to 16 bits.

        Args:
            gradients: Parameter -> its (n,) gradient.

        Raises:
            GradientError: a gradient plus its residual is out of range for 16 bits. Nothing has changed.
        """
        encoded = dict(gradients)
        pending: dict[str, Floats] = {}
        for name, gradient in gradients.items():
            if gradient.dtype == np.float32:
                encoded[name], pending[name] = self._rounded(name, cast("Floats", gradient))
        self._pending = pending
        return encoded

    def _rounded(self, parameter: str, gradient: Floats) -> tuple[Array, Floats]:
        """Add the residual to the gradient and round the sum. Return the sum's bits and the rounding error."""
        residual = self._residuals.get(parameter)
        bits, rest = np.empty(gradient.size, np.uint16), np.empty(gradient.size, np.float32)
        sent = np.empty(min(_PIECE, gradient.size), np.float32)
        for start in range(0, gradient.size, _PIECE):
            part = slice(start, start + _PIECE)
            wanted = gradient[part]
            if residual is not None:
                wanted = np.add(wanted, residual[part], out=rest[part])
            rounded = sent[: wanted.size]
            self._half.to_half(wanted, bits[part])
            self._half.to_float32(bits[part], rounded)
            # If rounding overflows, the rounding error is infinite.
            if not np.isfinite(np.subtract(wanted, rounded, out=rest[part])).all():
                raise GradientError(
                    f"a gradient is beyond {largest(self._kind):g}, the largest value of {self._kind}; "
                    "nothing of it was pushed: scale the loss down"
                )
        return bits, rest

    def settle(self, answered: Container[int], *, is_over: bool = True) -> None:
        """Update the residuals of the blocks that have answered. ``is_over`` is true if no more blocks will answer."""
        for name, rest in self._pending.items():
            residual = self._residuals.setdefault(name, np.zeros(rest.size, np.float32))
            for block in self._blocks_of(name):
                if block.number in answered:
                    residual[block.start : block.stop] = rest[block.start : block.stop]
        if is_over:
            self._pending = {}
