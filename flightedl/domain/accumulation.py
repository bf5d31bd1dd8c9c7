"""Batches whose gradients a trainer adds up, to push them as one: when they go, and what becomes of each.

Rules:

* A *sum* is pushed under the identities of all its batches. A block takes it only if it has none of them, and has all
  of them from then on, in one step (``AppliedBatches.mark_together``); one that has all of them answers "already
  applied". So nothing of a sum can count twice.
* A block that has some of them, as when another trainer pushed them in other company, takes nothing, and says which it
  has. The batches that such a block lacks are worked through *again*, and pushed each for itself; blocks that have them
  answer "already applied". So nothing of a sum can get lost.
* When the membership is lost on the way it is not known which blocks took the sum: all its batches are done again.
* A batch counts as done when every block has answered for it, in whatever company.

Nothing is kept of what a batch was: doing one again means that the user's code computes it again, at fresh values.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

Member = TypeVar("Member")


@dataclass(frozen=True, slots=True)
class Settled(Generic[Member]):
    """What became of the batches of a sum."""

    done: tuple[Member, ...]
    again: tuple[Member, ...]


class BatchGroup(Generic[Member]):
    """The batches of the present sum, in the order in which they came.

    Args:
        limit: So many are pushed at once.
    """

    __slots__ = ("_limit", "_members")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._members: list[Member] = []

    def __len__(self) -> int:
        return len(self._members)

    @property
    def members(self) -> tuple[Member, ...]:
        """The batches so far."""
        return tuple(self._members)

    @property
    def is_full(self) -> bool:
        """Whether the sum is to be pushed now."""
        return len(self._members) >= self._limit

    def add(self, member: Member) -> None:
        """A batch's gradients are in the sum, all that it has."""
        assert not self.is_full, "the sum before was not pushed"
        self._members.append(member)

    def clear(self) -> tuple[Member, ...]:
        """Give the sum up; the batches that were in it."""
        members, self._members = self.members, []
        return members

    def settle(self, lacking: Iterable[int], *, is_lost: bool) -> Settled[Member]:
        """The push is through: every block has taken the sum, had it, or refused it.

        Args:
            lacking: Places, in the order of ``members``, of the batches that some block that refused lacks.
            is_lost: The membership ended meanwhile.

        Returns:
            What is done and what has to be done again; the next sum begins.
        """
        members = self.clear()
        places = set(range(len(members))) if is_lost else set(lacking)
        return Settled(
            tuple(member for place, member in enumerate(members) if place not in places),
            tuple(member for place, member in enumerate(members) if place in places),
        )


def lacking_of(bits: bytes, count: int) -> list[int]:
    """Places of the batches, of ``count``, that a block lacks which answered with these bits."""
    having = int.from_bytes(bits, "little")
    return [place for place in range(count) if not having >> place & 1]


def having_bits(having: Iterable[bool]) -> bytes:
    """The bits that a block answers with: whether it has each batch."""
    flags = list(having)
    return sum(1 << place for place, has in enumerate(flags) if has).to_bytes((len(flags) + 7) >> 3, "little")
