"""Error feedback: what rounding to 16 bits takes from a gradient is added to the next one (Seide et al. 2014).

Rules:

* A push is encoded once, before anything of it is sent. Whatever is sent again is the same bytes: a block that took the
  first copy answers "already applied" to the second.
* A block's *residual* (what was to be pushed, less what was) changes when the block has answered, once for each push. A
  gradient that came too late is computed anew; its residual stays what it was before.
* Residuals are this trainer's own. They are lost with it, and then those gradients were rounded, nothing worse.
* A batch that a block had already, because another trainer pushed it or because it is done again for the sake of other
  blocks, cannot be told from a repeated copy. Its residual is taken over all the same: an error of one rounding, which
  does not grow.

Costs float32 memory of the model's size for residuals, and once more while a push is on its way. A gradient is rounded
piece by piece, each of them while it is in the processor's cache.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from typing import TYPE_CHECKING, cast

import numpy as np
import numpy.typing as npt

from flightedl.domain.model.sharding import Block
from flightedl.errors import GradientError
from flightedl.kernels.half_precision import largest

if TYPE_CHECKING:
    from flightedl.kernels.compiled import HalfKernels

#: Elements that are rounded together: what is read and written of them fits into the cache.
_PIECE = 1 << 15

Array = npt.NDArray[np.generic]
Floats = npt.NDArray[np.float32]


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

    def settle(self, answered: Container[int]) -> None:
        """The push is through: these blocks have it, or had it."""
        for name, rest in self._pending.items():
            residual = self._residuals.setdefault(name, np.zeros(rest.size, np.float32))
            for block in self._blocks_of(name):
                if block.number in answered:
                    residual[block.start : block.stop] = rest[block.start : block.stop]
        self._pending = {}
