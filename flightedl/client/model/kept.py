"""Gradients that a trainer keeps from one push to the next: sums of several batches, and rests of rounded gradients.

*Sums*, one array for each parameter that got a gradient, wait until they are pushed as one. Sums of float32 and float64
are made in their own type, those of 16-bit floats as float32. ``domain.trainer.sums`` decides which batches a sum has,
what their gradients are multiplied by, what the sum is divided by, and what becomes of each batch. The arrays belong to
the sum of one identity, and are forgotten when another sum begins or is taken.

*Error feedback* (Seide et al. 2014) adds what rounding to 16 bits takes from a gradient to the next one. Rules:

* A push is encoded once, before anything of it is sent. Messages that are sent again have the same bytes: a block that
  took the first copy answers "already applied" to the second.
* A block's *residual* (the gradient that should have been pushed, less the one that was) changes when the block has
  answered, once for each push. A gradient that came too late is computed again; its residual stays as it was.
* Residuals are this trainer's own. If it dies they are lost: those gradients were rounded, nothing worse.
* A batch that a block had already, because another trainer pushed it or because it is done again for other blocks,
  cannot be told from a repeated copy. Its residual is taken over all the same: an error of one rounding, which does not
  grow.

Residuals cost float32 memory of the model's size, and once more during a push. A gradient is rounded in pieces, each
while it is in the processor's cache.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from flightedl.domain.model.sharding import Block
from flightedl.errors import GradientError
from flightedl.kernels.half_precision import ITEM_BYTES, largest

if TYPE_CHECKING:
    from flightedl.kernels.compiled import HalfKernels

#: Elements that are rounded together: what is read and written of them fits into the cache.
_PIECE = 1 << 15

Array = npt.NDArray[np.generic]
Floats = npt.NDArray[np.float32]


class GradientSums:
    """The present sum of one trainer."""

    def __init__(self) -> None:
        self._identity: object = None
        self._sums: dict[str, npt.NDArray[Any]] = {}
        #: Of the gradients.
        self._dtypes: dict[str, np.dtype[Any]] = {}

    def add(self, identity: object, gradients: Mapping[str, Array], weight: int) -> None:
        """Add finite gradients, each of the parameter's shape and dtype, multiplied by ``weight``."""
        if identity != self._identity:
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
        if identity != self._identity:
            return {}
        gradients: dict[str, Array] = {}
        for name, total in sums.items():
            if name in divisors:
                total /= divisors[name]  # noqa: PLW2901 - in place: it is pushed and forgotten
            with np.errstate(over="ignore"):
                gradients[name] = total.astype(self._dtypes[name], copy=False)
        return gradients


class ErrorFeedback:
    """The residuals of one trainer, each parameter's in one line.

    Args:
        halves: Converts to what the gradients travel as.
        blocks_of: Where the blocks of a parameter lie.
    """

    def __init__(self, halves: HalfKernels, blocks_of: Callable[[str], Iterable[Block]]) -> None:
        self._kind = halves.kind
        self._half = halves
        self._blocks_of = blocks_of
        #: By parameter.
        self._residuals: dict[str, Floats] = {}
        #: Of the push on its way.
        self._pending: dict[str, Floats] = {}

    def encode(self, gradients: Mapping[str, Array]) -> dict[str, Array]:
        """What to send: bits of float32 gradients with their residuals; others as they are.

        Args:
            gradients: Parameter -> its (n,) gradient.

        Raises:
            GradientError: a gradient with its residual is beyond what 16 bits can say. Nothing has changed.
        """
        encoded = dict(gradients)
        pending: dict[str, Floats] = {}
        for name, gradient in gradients.items():
            if gradient.dtype == np.float32:
                encoded[name], pending[name] = self._rounded(name, cast("Floats", gradient))
        self._pending = pending
        return encoded

    def _rounded(self, parameter: str, gradient: Floats) -> tuple[Array, Floats]:
        """The bits of a gradient with its residual, and what they do not say."""
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
            # What became infinite by rounding leaves an infinite rest.
            if not np.isfinite(np.subtract(wanted, rounded, out=rest[part])).all():
                raise GradientError(
                    f"a gradient is beyond {largest(self._kind):g}, the largest that {self._kind} can say; "
                    "nothing of it was pushed: scale the loss down"
                )
        return bits, rest

    def settle(self, answered: Container[int], *, is_over: bool = True) -> None:
        """Take over the rests of the blocks that have answered; ``is_over``: no other block is sent this push."""
        for name, rest in self._pending.items():
            residual = self._residuals.setdefault(name, np.zeros(rest.size, np.float32))
            for block in self._blocks_of(name):
                if block.number in answered:
                    residual[block.start : block.stop] = rest[block.start : block.stop]
        if is_over:
            self._pending = {}
