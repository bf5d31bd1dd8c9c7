"""Batches whose gradients a trainer adds up and pushes as one sum: when to push, and the outcome of each batch.

Rules:

* A *sum* is pushed under the identities of all its batches. A block accepts it only if it has none of the batches, and
  then has all of them, atomically (``AppliedBatches.mark_together``). A block that has all batches answers "already
  applied". So no batch of a sum counts twice.
* A block that has only some batches, because another trainer pushed these in a different sum, rejects the sum and says
  which batches it has. The batches that it lacks are *repeated*; other blocks answer "already applied" for them. So no
  batch of a sum is lost.
* Repeated batches are again pushed as sums, because an optimizer makes one update per push: batches that the same
  blocks lack form one sum. Each block has either all or none of such a sum's batches. The sum can be rejected only if
  another trainer has since pushed a part of it, and then only a part is repeated. So repetition ends.
* If the membership is lost, or the push fails in transit, it is unknown which blocks applied the sum, and the whole sum
  is repeated as one.
* A repeated part of a mean is divided by the weight of the original sum (``SumAgain.divisors``). So a batch has the
  same weight in every block, even if some blocks apply it in a smaller sum, and even if the job's mode has changed
  since. In synchronous mode, the part is divided by its own weight, because the round weights it by its records.
* A batch is done when every block has answered for it, whichever sum contained it.

Gradients are not kept. When a batch is repeated, the user's code computes its gradient again, at current values.

It is not guaranteed that all blocks are updated equally often. Each block applies each batch once, with its weight. If
blocks applied it in different sums, optimizers that use more than the gradient (step counts, squares) differ.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

Member = TypeVar("Member")


@dataclass(frozen=True, slots=True)
class Settled(Generic[Member]):
    """Outcome of the batches of a sum."""

    done: tuple[Member, ...]
    #: Batches to repeat, grouped into sums.
    again: tuple[tuple[Member, ...], ...]


@dataclass(frozen=True, slots=True)
class SumAgain:
    """The sum in which a repeated batch has to be pushed: exactly these batches."""

    #: The sum's lowest batch number, which identifies the sum within the task because such sums are disjoint.
    first: int
    batch_count: int
    #: Parameter -> divisor of the sum of its gradients.
    divisors: Mapping[str, int]


class BatchGroup(Generic[Member]):
    """The batches of the current sum, in order.

    Args:
        limit: Number of batches that are pushed at once.
    """

    __slots__ = ("_count", "_limit", "_members")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        #: Size that the current sum will have.
        self._count = limit
        self._members: list[Member] = []

    def __len__(self) -> int:
        return len(self._members)

    @property
    def members(self) -> tuple[Member, ...]:
        return tuple(self._members)

    @property
    def is_full(self) -> bool:
        return len(self._members) >= self._count

    def add(self, member: Member, count: int | None = None) -> None:
        """Record that the sum contains all of a batch's gradients.

        Args:
            member: The batch.
            count: Number of batches in the sum if it is repeated; None otherwise.
        """
        if not self._members:
            self._count = self._limit if count is None else count
        assert not self.is_full, "the previous sum was not pushed"
        self._members.append(member)

    def clear(self) -> tuple[Member, ...]:
        members, self._members = self.members, []
        return members

    def settle(self, refusals: Iterable[Collection[int]], *, is_lost: bool) -> Settled[Member]:
        """End the sum after its push: every block has applied it, already had it, or rejected it.

        Args:
            refusals: Positions in ``members`` of the batches that a rejecting block lacks, for each such block.
            is_lost: True if the membership ended.

        Returns:
            The batches that are done, and those to repeat. The next sum begins.
        """
        members = self.clear()
        if is_lost:
            return Settled((), (members,))
        refused = [frozenset(places) for places in refusals]
        #: Set of refusals -> the batches that are missing according to exactly these refusals.
        lacked: dict[frozenset[int], list[Member]] = {}
        for place, member in enumerate(members):
            key = frozenset(number for number, places in enumerate(refused) if place in places)
            lacked.setdefault(key, []).append(member)
        done = lacked.pop(frozenset(), [])
        return Settled(tuple(done), tuple(map(tuple, lacked.values())))


def missing_places(bits: bytes, count: int) -> tuple[int, ...]:
    """Return the positions, below ``count``, of the batches that a block lacks, given the bits of its answer."""
    having = int.from_bytes(bits, "little")
    return tuple(place for place in range(count) if not having >> place & 1)


def applied_bits(having: Iterable[bool]) -> bytes:
    """Return the bits of a block's answer, one per batch: 1 if the block has it."""
    flags = list(having)
    return sum(1 << place for place, has in enumerate(flags) if has).to_bytes((len(flags) + 7) >> 3, "little")
