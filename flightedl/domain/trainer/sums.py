"""Which batches are in the sum that a trainer pushes next, and what becomes of each (``exactly_once.accumulation``).

A batch is in the sum from ``begin`` on, and *complete* when the user's code is through with it; only then it waits.
What is done again is pushed in sums of the same batches, or of some of them; whoever hands batches out does so sum by
sum (``Batch.again``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from flightedl.domain.exactly_once.accumulation import BatchGroup, SumAgain
from flightedl.domain.trainer.batches import CurrentBatch, Pushed
from flightedl.errors import UsageError


class BatchSums:
    """The present sum of one trainer, without its gradients.

    Args:
        push_every: So many batches are pushed at once.
        is_mean: What is pushed is the mean, weighted by records, over the batches that had a gradient for the
            parameter; else the plain sum.
        keeps_shares: A batch that is done again in smaller company has the share that it had in the mean, since blocks
            may have it with that; also after a change to another mode that keeps shares. False: what is pushed is the
            mean of its batches, since the round that it comes to weighs it by their records.
        identity: A number above those of all sums before.
    """

    def __init__(self, push_every: int, *, is_mean: bool = True, keeps_shares: bool = True, identity: int = 0) -> None:
        self._group: BatchGroup[CurrentBatch] = BatchGroup(push_every)
        self._is_mean = is_mean
        self._keeps_shares = keeps_shares
        #: Number of the present sum; gradients of sums before it are forgotten.
        self.identity = identity
        #: The present sum is one that is done again.
        self._again: SumAgain | None = None
        #: Parameter -> records of the batches in the sum that have a gradient for it.
        self._weights: dict[str, int] = {}
        #: Records of the batches in the sum that have any gradient: its weight in a synchronous round.
        self._weight = 0
        #: What the sum that was taken was divided by.
        self._divisors: Mapping[str, int] = {}
        #: The batch at hand, which is not complete, and the parameters that it has gradients for.
        self._current: CurrentBatch | None = None
        self._names: set[str] = set()
        #: The last batch that was pushed.
        self._pushed: CurrentBatch | None = None

    @property
    def members(self) -> tuple[CurrentBatch, ...]:
        """The batches that wait in it."""
        return self._group.members

    @property
    def has_batches(self) -> bool:
        """Whether there is anything to be pushed."""
        return len(self._group) > 0

    @property
    def is_full(self) -> bool:
        """Whether it is time to push."""
        return self._group.is_full

    @property
    def again(self) -> SumAgain | None:
        """What the present sum was before, where it is done again."""
        return self._again

    def is_of_others(self, current: CurrentBatch) -> bool:
        """True if what waits to be pushed can have no part of this batch, because one of the two is done again."""
        return self.has_batches and self._again != current.batch.again

    def is_at(self, current: CurrentBatch) -> bool:
        """Whether gradients of the batch are in the sum, and it is not complete."""
        return self._current is current

    def is_pushed(self, current: CurrentBatch) -> bool:
        """Whether the batch was in the sum that was pushed last."""
        return self._pushed is current

    def repeated(self, current: CurrentBatch, names: Iterable[str]) -> str:
        """Return the first of these parameters that the batch has had a gradient for; empty: there is none."""
        is_complete = current.waits or self.is_pushed(current)
        known = self._names if self.is_at(current) else ()
        return next((name for name in names if is_complete or name in known), "")

    def add(self, current: CurrentBatch, names: Collection[str]) -> int:
        """Add gradients of this batch for these parameters; return the factor of each: 0 if they have no part.

        Raises:
            UsageError: the batch has had a gradient for one of them; nothing was added.
        """
        if name := self.repeated(current, names):
            raise UsageError(f"the gradient of {name!r} was already pushed for this batch ({current})")
        known = self._names if self.is_at(current) else set()
        self.begin(current)
        self._names = known | set(names)
        # Where no record of the batch met the filter, it has no part in a mean, as in a synchronous round.
        weight = current.record_count if self._is_mean else 1
        if weight:
            self._weights.update({name: self._weights.get(name, 0) + weight for name in names})
        return weight

    def begin(self, current: CurrentBatch) -> None:
        """This batch is at hand."""
        if self._current is None and not self.has_batches:
            self._again = current.batch.again
            self._weights = {}
            self._weight = 0
            self.identity += 1
        assert self._again == current.batch.again, "batches of two sums are done again at one time"
        self._current = current

    def complete(self, current: CurrentBatch) -> None:
        """The batch has no more gradients."""
        if self.is_at(current) and self._names:
            self._weight += current.record_count
        self.begin(current)
        self._current = None
        self._pushed = None
        current.waits = True
        self._group.add(current, None if self._again is None else self._again.batch_count)

    def take(self) -> tuple[CurrentBatch, Mapping[str, int]]:
        """What is to be pushed: all batches as one, and parameter -> what the sum of its gradients is divided by."""
        members = self._group.members
        first, last = members[0], members[-1]
        self._divisors = {}
        if self._is_mean:
            # Parameters that had no gradient before are divided by what has one now.
            known = self._again.divisors if self._again is not None and self._keeps_shares else {}
            self._divisors = {**self._weights, **known}
        self._pushed = last
        identity, *further = (member.pushed.identity for member in members)
        pushed = Pushed(identity, self._weight, last.pushed.step, tuple(further))
        return CurrentBatch(first.batch, pushed, last.member), self._divisors

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

    def split(self, error: Exception) -> None:
        """The sum that was taken cannot be pushed: each of its batches has to be done again for itself."""
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
        """Forget what was added up and not pushed: its batches have to be done again, here or by somebody else."""
        self._current = None
        for member in self._group.clear():
            member.repeat(member.batch.again)

    def check(self) -> None:
        """Assert the invariants."""
        members = self._group.members
        assert all(member.waits and not member.must_repeat for member in members), "what is in a sum waits for it"
        assert len({member.number for member in members}) == len(members), "a batch is in a sum twice"
        assert len({member.batch.reading for member in members}) <= 1, "a sum is of one task"
        assert self._current not in members
