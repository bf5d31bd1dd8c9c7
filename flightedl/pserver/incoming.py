"""What was sent, before anything is done with it: does it fit the blocks, and is it finite?"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from flightedl.domain.model.sharding import ShardPlan
from flightedl.errors import GradientError, MessageError
from flightedl.pserver.spans import ArraySpan
from flightedl.wire.rows import Row

Array = npt.NDArray[np.generic]


class IncomingValues:
    """Checks the values that come for blocks.

    Args:
        plan: Of the blocks.
    """

    def __init__(self, plan: ShardPlan) -> None:
        self._plan = plan

    def name_of(self, number: int) -> str:
        """The parameter of a block."""
        return self._plan.parameters[self._plan.block(number).parameter].name

    def gradient(self, span: ArraySpan, numbers: range, data: memoryview, *, is_finite: bool) -> Array:
        """The elements of neighbouring blocks of a span.

        Args:
            span: That has the blocks.
            numbers: Of the blocks.
            data: As many bytes as they have.
            is_finite: That is known of floats of the values' own size.

        Raises:
            GradientError: NaN or infinity.
        """
        gradient = span.incoming(data)
        # Behind 16-bit floats of the same message, its elements may not be made of the words that were looked at.
        is_known = is_finite and not span.wire and gradient.flags.aligned
        return gradient if is_known else self._finite(span, numbers, gradient)

    def first_values(self, span: ArraySpan, row: Row) -> Array:
        """The elements of one block, which never travel narrower than they were declared.

        Raises:
            MessageError: another number of bytes.
            GradientError: NaN or infinity.
        """
        place = self._plan.block(row.block)
        spec = self._plan.parameters[place.parameter]
        size_bytes = place.size * spec.seen_item_bytes
        if len(row.values) != size_bytes:
            raise MessageError(f"block {row.block} of {spec.name!r} has {size_bytes} bytes, not {len(row.values)}")
        sent = span.incoming(row.values) if spec.short_kind else row.array(span.values.dtype)
        return self._finite(span, range(row.block, row.block + 1), sent)

    def _finite(self, span: ArraySpan, numbers: range, array: Array) -> Array:
        if not span.kernels.all_finite(array):
            first = span.numbers.start
            wrong = int(np.flatnonzero(~np.isfinite(array))[0])
            number = next(n for n in numbers if wrong < span.bounds[n + 1 - first] - span.bounds[numbers.start - first])
            raise GradientError(
                f"{self.name_of(number)!r} has NaN or infinity in block {number}: nothing of it was applied"
            )
        return array
