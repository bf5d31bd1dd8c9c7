"""The batches of the sum that a trainer pushes next, and their outcomes (``exactly_once.accumulation``).

A batch is part of the sum once ``begin`` has been called. When the user's code has finished it, it is *complete* and
``waits``. Repeated batches are pushed in the same sum or in a part of it, so they are handed out again sum by sum
(``Batch.again``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from flightedl.domain.exactly_once.accumulation import BatchGroup, SumAgain
from flightedl.domain.trainer.batches import CurrentBatch, Pushed
from flightedl.errors import UsageError


class BatchSums:
    """One trainer's current sum, without the gradients.

    Args:
        push_every: Number of batches that are pushed at once.
        is_mean: Push the mean over the batches that had a gradient for the parameter, weighted by records; otherwise
            push the plain sum.
        keeps_shares: A batch that is repeated in a smaller sum keeps the share that it had in the mean, because blocks
            may have it with that share; also after a change to another mode that keeps shares. False: push the mean of
            the repeated batches, because the round weighs it by their records.
        identity: A number higher than those of all earlier sums.
    """

    def __init__(self, push_every: int, *, is_mean: bool = True, keeps_shares: bool = True, identity: int = 0) -> None:
        self._group: BatchGroup[CurrentBatch] = BatchGroup(push_every)
        self._is_mean = is_mean
        self._keeps_shares = keeps_shares
        #: Number of the current sum. The gradients of earlier sums are dropped.
        self.identity = identity
        #: The sum that is being repeated; None if the current sum is new.
        self._again: SumAgain | None = None
        #: Parameter -> number of records in the sum's batches that have a gradient for the parameter.
        self._weights: dict[str, int] = {}
        #: Number of records in the sum's batches that have any gradient. This is the sum's weight in a round.
        self._weight = 0
        #: Divisors of the sum that ``take`` has returned.
        self._divisors: Mapping[str, int] = {}
        #: The incomplete batch in the sum, and the parameters for which it has gradients.
        self._current: CurrentBatch | None = None
        self._names: set[str] = set()
        #: The last batch of the most recently pushed sum.
        self._pushed: CurrentBatch | None = None

    @property
    def members(self) -> tuple[CurrentBatch, ...]:
        """Complete batches of the sum."""
        return self._group.members

    @property
    def has_batches(self) -> bool:
        return len(self._group) > 0

    @property
    def is_full(self) -> bool:
        return self._group.is_full

    @property
    def again(self) -> SumAgain | None:
        """Identity of the current sum if it is repeated."""
        return self._again

    def belongs_to_another_sum(self, current: CurrentBatch) -> bool:
        """True if the batch and the waiting batches belong to different sums, because a sum is being repeated."""
        return self.has_batches and self._again != current.batch.again

    def is_at(self, current: CurrentBatch) -> bool:
        """True if the batch is in the sum and not complete."""
        return self._current is current

    def is_pushed(self, current: CurrentBatch) -> bool:
        """True if the batch was the last batch in the most recently pushed sum."""
        return self._pushed is current

    def repeated(self, current: CurrentBatch, names: Iterable[str]) -> str:
        """Return the first of these parameters for which the batch already has a gradient, or an empty string."""
        is_complete = current.waits or self.is_pushed(current)
        known = self._names if self.is_at(current) else ()
        return next((name for name in names if is_complete or name in known), "")

    def add(self, current: CurrentBatch, names: Collection[str]) -> int:
        """Add this batch's gradients for these parameters. Return their weight, which is 0 if they do not count.

        Raises:
            UsageError: the batch already has a gradient for one of them; nothing was added.
        """
        if name := self.repeated(current, names):
            raise UsageError(f"the gradient of {name!r} was already pushed for this batch ({current})")
        known = self._names if self.is_at(current) else set()
        self.begin(current)
        self._names = known | set(names)
        # A batch without records has no part in a mean, just as in sync mode.
        weight = current.record_count if self._is_mean else 1
        if weight:
            self._weights.update({name: self._weights.get(name, 0) + weight for name in names})
        return weight

    def begin(self, current: CurrentBatch) -> None:
        if self._current is None and not self.has_batches:
            self._again = current.batch.again
            self._weights = {}
            self._weight = 0
            self.identity += 1
        assert self._again == current.batch.again, "batches of two repeated sums are mixed"
        self._current = current

    def complete(self, current: CurrentBatch) -> None:
        """Record that no more gradients will be added for the batch."""
        if self.is_at(current) and self._names:
            self._weight += current.record_count
        self.begin(current)
        self._current = None
        self._pushed = None
        current.waits = True
        self._group.add(current, None if self._again is None else self._again.batch_count)

    def take(self) -> tuple[CurrentBatch, Mapping[str, int]]:
        """Return the sum as one batch, and the divisors (parameter -> divisor of its summed gradients)."""
        members = self._group.members
        first, last = members[0], members[-1]
        self._divisors = {}
        if self._is_mean:
            # A parameter without a gradient in the original sum is divided by its current weight.
            known = self._again.divisors if self._again is not None and self._keeps_shares else {}
            self._divisors = {**self._weights, **known}
        self._pushed = last
        identity, *others = (member.pushed.identity for member in members)
        pushed = Pushed(identity, self._weight, last.pushed.step, tuple(others))
        return CurrentBatch(first.batch, pushed, last.member), self._divisors

    def settle(self, together: CurrentBatch, refusals: Iterable[Sequence[int]]) -> None:
        """Settle the batches after the push. Each refusal lists the batches that the rejecting block lacks."""
        settled = self._group.settle(refusals, is_lost=together.must_repeat)
        for member in settled.done:
            member.note_sum(together)
        for members in settled.again:
            self._repeat(members)

    def push_failed(self, error: BaseException) -> None:
        """Repeat the sum, because it is unknown which blocks have it."""
        self._repeat(members := self._group.clear())
        for member in members:
            member.push_failed(error)

    def split(self, error: Exception) -> None:
        """Repeat each batch alone, because the sum cannot be pushed."""
        members = self._group.clear()
        for member in members:
            if len(members) == 1:
                member.reject(error)
            self._repeat([member])

    def _repeat(self, members: Sequence[CurrentBatch]) -> None:
        shares = self._divisors if self._keeps_shares else {}
        again = SumAgain(min(member.number for member in members), len(members), shares)
        for member in members:
            member.repeat(again)
            if member is self._pushed:
                self._pushed = None

    def give_up(self) -> None:
        """Drop the unpushed sum. This trainer or another one repeats its batches."""
        self._current = None
        for member in self._group.clear():
            member.repeat(member.batch.again)

    def check(self) -> None:
        members = self._group.members
        assert all(member.waits and not member.must_repeat for member in members), "a batch of the sum does not wait"
        assert len({member.number for member in members}) == len(members), "a batch is in a sum twice"
        assert len({member.batch.reading for member in members}) <= 1, "a sum has batches of two tasks"
        assert self._current not in members
