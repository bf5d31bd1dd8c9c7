"""Batches whose gradients a trainer adds up, to push them as one: when they go, and what becomes of each.

Rules:

* A *sum* is pushed under the identities of all its batches. A block takes it only if it has none of them, and has all
  of them from then on, in one step (``AppliedBatches.mark_together``); one that has all of them answers "already
  applied". So nothing of a sum can count twice.
* A block that has some of them, as when another trainer pushed them in other company, takes nothing, and says which it
  has. The batches that such a block lacks are worked through *again*; blocks that have them answer "already applied".
  So nothing of a sum can get lost.
* What is done again is pushed as sums once more, because an optimizer makes one update of each push: batches that the
  same blocks lack are one sum. Every block has all of such a sum or nothing of it, so it is refused only when somebody
  else pushed a part of it meanwhile, and what is done again then is a part of it, too: this ends.
* When the membership is lost, or the push fails on the way, it is not known which blocks took the sum: the whole sum is
  done again, as one.
* A mean that is done again in part is divided by the weight of the whole sum that it was first pushed in
  (``SumAgain.divisors``). So a batch has the weight that it had there, also where a block takes it in smaller company,
  and also where the job's mode has changed since.
  In synchronous mode it is divided by its own: the round that it comes to weighs it by the records that it has now.
* A batch counts as done when every block has answered for it, in whatever company.

Nothing is kept of what a batch was: doing one again means that the user's code computes it again, at fresh values.

Not guaranteed: that a block is updated as often as the others. Each block has each batch once, with its weight; where
blocks took it in other company, an optimizer that looks at more than the gradient (steps, squares) saw other ones.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

Member = TypeVar("Member")


@dataclass(frozen=True, slots=True)
class Settled(Generic[Member]):
    """What became of the batches of a sum."""

    done: tuple[Member, ...]
    #: To be done again: the batches of one sum after the other.
    again: tuple[tuple[Member, ...], ...]


@dataclass(frozen=True, slots=True)
class SumAgain:
    """The sum that a batch which is done again has to be pushed in: of just these batches."""

    #: The lowest number among them, which tells it from the others of its task: no two of these share a batch.
    first: int
    batch_count: int
    #: Parameter -> what the sum of its gradients is divided by.
    divisors: Mapping[str, int]


class BatchGroup(Generic[Member]):
    """The batches of the present sum, in the order in which they came.

    Args:
        limit: So many are pushed at once.
    """

    __slots__ = ("_count", "_limit", "_members")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        #: As many as the present sum is going to have.
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
        """A batch's gradients are in the sum, all that it has.

        Args:
            member: The batch.
            count: How many batches the sum has that is done again; None: it is none of those.
        """
        if not self._members:
            self._count = self._limit if count is None else count
        assert not self.is_full, "the sum before was not pushed"
        self._members.append(member)

    def clear(self) -> tuple[Member, ...]:
        """Give the sum up; the batches that were in it."""
        members, self._members = self.members, []
        return members

    def settle(self, refusals: Iterable[Collection[int]], *, is_lost: bool) -> Settled[Member]:
        """The push is through: every block has taken the sum, had it, or refused it.

        Args:
            refusals: Of each block that refused: the places of the batches that it lacks, in the order of ``members``.
            is_lost: The membership ended meanwhile.

        Returns:
            What is done and what has to be done again; the next sum begins.
        """
        members = self.clear()
        if is_lost:
            return Settled((), (members,))
        refused = [frozenset(places) for places in refusals]
        #: Which refusals lack a batch -> the batches of which that is so.
        lacked: dict[frozenset[int], list[Member]] = {}
        for place, member in enumerate(members):
            key = frozenset(number for number, places in enumerate(refused) if place in places)
            lacked.setdefault(key, []).append(member)
        done = lacked.pop(frozenset(), [])
        return Settled(tuple(done), tuple(map(tuple, lacked.values())))


def lacking_of(bits: bytes, count: int) -> tuple[int, ...]:
    """Places of the batches, of ``count``, that a block lacks which answered with these bits."""
    having = int.from_bytes(bits, "little")
    return tuple(place for place in range(count) if not having >> place & 1)


def having_bits(having: Iterable[bool]) -> bytes:
    """The bits that a block answers with: whether it has each batch."""
    flags = list(having)
    return sum(1 << place for place, has in enumerate(flags) if has).to_bytes((len(flags) + 7) >> 3, "little")
