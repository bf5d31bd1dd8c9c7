"""The gradients of several batches, added up in the trainer's memory until they are pushed as one.

One array for each parameter that got a gradient, however many batches there are. Sums of float32 and float64 are made
in their own type, those of 16-bit floats as float32. What is pushed is the sum itself, or the mean weighted by records,
over the batches that had a gradient for the parameter, as in a synchronous round.

A batch is in the sum from ``add`` on, and *complete* when the user's code is through with it; only then it waits.

What is done again is pushed in sums of the same batches, or of some of them, see ``domain.accumulation``; whoever hands
batches out does so sum by sum (``CurrentBatch.turn``). Where the sum is beyond what its elements can say, each batch is
done again for itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from flightedl.client.batches import CurrentBatch
from flightedl.domain.accumulation import BatchGroup, SumAgain
from flightedl.domain.modes import Async
from flightedl.errors import UsageError
from flightedl.wire.halves import ITEM_BYTES

Array = npt.NDArray[np.generic]


class GradientSums:
    """The present sum of one trainer."""

    def __init__(self, mode: Async) -> None:
        self._is_mean = mode.reduce == "mean"
        self._group: BatchGroup[CurrentBatch] = BatchGroup(mode.push_every)
        self._sums: dict[str, npt.NDArray[Any]] = {}
        #: Of the gradients.
        self._dtypes: dict[str, np.dtype[Any]] = {}
        #: Records of the batches that had a gradient for the parameter.
        self._weights: dict[str, int] = {}
        #: What the sums were divided by that were taken.
        self._divisors: Mapping[str, int] = {}
        #: The present sum is one that is done again.
        self._again: SumAgain | None = None
        #: The batch at hand, and which parameters it has a gradient for.
        self._current: CurrentBatch | None = None
        self._names: set[str] = set()
        #: The last batch that was pushed.
        self._pushed: CurrentBatch | None = None

    @property
    def has_batches(self) -> bool:
        """Whether there is anything to be pushed."""
        return len(self._group) > 0

    @property
    def is_full(self) -> bool:
        """Whether it is time to push."""
        return self._group.is_full

    def is_at(self, current: CurrentBatch) -> bool:
        """Whether gradients of the batch are in the sum, and it is not complete."""
        return self._current is current

    def is_pushed(self, current: CurrentBatch) -> bool:
        """Whether the batch was in the sum that was pushed last."""
        return self._pushed is current

    def add(self, current: CurrentBatch, gradients: Mapping[str, Array]) -> None:
        """Add (n,) gradients of a batch, each of the parameter's size and dtype, finite.

        Of a batch without records a mean has nothing.

        Raises:
            UsageError: the batch has had a gradient for one of them; nothing was added.
        """
        names = self._names if current is self._current else set()
        for name in gradients:
            if name in names or current.waits or self._pushed is current:
                raise UsageError(f"the gradient of {name!r} was already pushed for this batch ({current})")
        self._begin(current)
        self._current, self._names = current, names | gradients.keys()
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

    def _begin(self, current: CurrentBatch) -> None:
        if not self._sums and not len(self._group):
            self._again = current.again
        assert self._again is current.again, "batches of two sums are done again at one time"

    def complete(self, current: CurrentBatch) -> None:
        """The batch has no more gradients."""
        self._begin(current)
        self._current, self._names = None, set()
        self._pushed = None
        current.waits = True
        self._group.add(current, None if self._again is None else self._again.batch_count)

    def take(self) -> tuple[CurrentBatch, dict[str, Array]]:
        """What is to be pushed: all batches as one, and the gradient of each parameter that has any."""
        members = self._group.members
        first, last = members[0], members[-1]
        together = CurrentBatch(
            first.assignment,
            first.number,
            sum(member.record_count for member in members),
            member=last.member,
            step=last.step,
            further=tuple(member.identity for member in members[1:]),
        )
        gradients: dict[str, Array] = {}
        if self._is_mean:
            # Parameters that had no gradient before are divided by what has one now.
            self._divisors = self._weights if self._again is None else {**self._weights, **self._again.divisors}
        for name, total in self._sums.items():
            if self._is_mean:
                total /= self._divisors[name]  # noqa: PLW2901 - in place: it is pushed and forgotten
            with np.errstate(over="ignore"):
                gradients[name] = total.astype(self._dtypes[name], copy=False)
        self._sums, self._weights = {}, {}
        self._pushed = last
        return together, gradients

    def settle(self, together: CurrentBatch, refusals: Iterable[Sequence[int]]) -> None:
        """The push is through: its batches wait no more. Each refusal is what a block lacks that did not take it."""
        settled = self._group.settle(refusals, is_lost=together.must_repeat)
        for member in settled.done:
            member.note_sum(together)
        for members in settled.again:
            self._repeat(members)

    def push_failed(self, error: BaseException) -> None:
        """Which blocks have the sum that was taken is not known."""
        self._repeat(members := self._group.clear())
        for member in members:
            member.push_failed(error)

    def split(self) -> None:
        """The sum that was taken cannot be pushed: each of its batches has to be done again for itself."""
        for member in self._group.clear():
            self._repeat([member])

    def _repeat(self, members: Sequence[CurrentBatch]) -> None:
        again = SumAgain(min(member.number for member in members), len(members), self._divisors)
        for member in members:
            member.repeat(again)
            if member is self._pushed:
                self._pushed = None

    def give_up(self) -> None:
        """Forget what was added up and not pushed: its batches have to be done again, here or by somebody else."""
        self._sums, self._weights, self._current, self._names = {}, {}, None, set()
        for member in self._group.clear():
            member.repeat(member.again)
