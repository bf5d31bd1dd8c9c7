"""Batches whose gradients a trainer sums and pushes together: when to push the sum, and the outcome of each batch.

Rules:

* A *sum* is pushed with the identities of all its batches. A block accepts the sum only if it has applied none of the
  batches, and then marks all of them atomically (``AppliedBatches.mark_together``). A block that has applied all of
  them answers "already applied". So no batch counts twice.
* If another trainer pushed some of the batches in a different sum, a block that has applied these batches rejects the
  sum and lists the batches that it has applied. The batches that the block lacks are *repeated*; blocks that have
  applied them answer "already applied". So no batch is lost.
* Repeated batches are pushed as sums again, because an optimizer makes one update per push: batches that are missing
  from the same blocks form one sum, so each block has applied all of its batches or none. This sum can be rejected only
  if another trainer has since pushed part of it, and then only the rest is repeated. So the repetition ends.
* If the membership is lost or the push fails in transit, the trainer cannot know which blocks applied the sum, and
  repeats the entire sum.
* A repeated part of a mean is divided by the weight of the original sum (``SumAgain.divisors``), so a batch has the
  same weight in every block even if some blocks apply it in a smaller sum, or the mode changes. In sync mode the part
  is divided by its own weight, because the round weights it by its records.
* A batch is done when every block has applied it, no matter in which sum.

Gradients are not kept. When a batch is repeated, the user's code computes its gradient again from current values.

Each block applies each batch once, with the same weight, but blocks may make different numbers of updates. If blocks
apply a batch in different sums, optimizer state that depends on more than the sum of gradients (step counts, squares)
differs between the blocks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from flightedl.marks import sometimes

Member = TypeVar("Member")


@dataclass(frozen=True, slots=True)
class Settled(Generic[Member]):
    """Outcomes of the batches in a pushed sum."""

    done: tuple[Member, ...]
    #: Batches to repeat, grouped into the sums in which to push them.
    again: tuple[tuple[Member, ...], ...]


@dataclass(frozen=True, slots=True)
class SumAgain:
    """The sum in which a repeated batch must be pushed. It contains exactly the batches of its group."""

    #: Lowest batch number in the sum. It identifies the sum within its task, because a task's repeated sums are
    #: disjoint.
    first: int
    batch_count: int
    #: Parameter -> number by which the sum of its gradients is divided.
    divisors: Mapping[str, int]


class BatchGroup(Generic[Member]):
    """Batches of the current sum, in order.

    Args:
        limit: Number of batches that are pushed at once.
    """

    __slots__ = ("_count", "_limit", "_members")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        #: Number of batches that the current sum is going to contain.
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
        """Record that the gradients of a batch have been added to the sum.

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
        """End a pushed sum once each block has applied the sum, answered "already applied", or rejected the sum.

        Args:
            refusals: Positions in ``members`` of the batches that a rejecting block lacks, for each such block.
            is_lost: True if the membership ended.

        Returns:
            The batches that are done, and those to repeat. The next sum begins.
        """
        members = self.clear()
        if is_lost:
            sometimes("a whole sum was repeated")
            return Settled((), (members,))
        refused = [frozenset(places) for places in refusals]
        #: Set of rejecting blocks -> batches that these blocks, and no others, lack.
        lacked: dict[frozenset[int], list[Member]] = {}
        for place, member in enumerate(members):
            key = frozenset(number for number, places in enumerate(refused) if place in places)
            lacked.setdefault(key, []).append(member)
        done = lacked.pop(frozenset(), [])
        return Settled(tuple(done), tuple(map(tuple, lacked.values())))


def mean_batches(tasks: Iterable[tuple[int, int]], push_every: int) -> float:
    """Return the mean number of batches in a sum, which has at most ``push_every`` batches, all of one task.

    Args:
        tasks: (number of batches, number of tasks that have so many batches).
        push_every: Number of batches that are pushed at once.
    """
    batches = pushes = 0
    for batch_count, task_count in tasks:
        batches += batch_count * task_count
        pushes += -(-batch_count // push_every) * task_count
    return batches / pushes if pushes else push_every


def described_pushes(tasks: Sequence[tuple[int, int]], push_every: int) -> tuple[str, bool]:
    """Describe the mean number of batches in a sum (see ``mean_batches``), and say if it is less than half.

    The text is empty if batches are not summed, or if the tasks are unknown.
    """
    if push_every == 1 or not tasks:
        return "", False
    mean = mean_batches(tasks, push_every)
    return f"with push_every={push_every}, a push has {mean:.1f} batches on average", 2 * mean < push_every


def missing_places(bits: bytes, count: int) -> tuple[int, ...]:
    """Return the positions of those of ``count`` batches that a block lacks, given the bits of the block's answer."""
    having = int.from_bytes(bits, "little")
    return tuple(place for place in range(count) if not having >> place & 1)


def applied_bits(having: Iterable[bool]) -> bytes:
    """Return the bits of a block's answer, one per batch: 1 if the block has applied it."""
    flags = list(having)
    return sum(1 << place for place, has in enumerate(flags) if has).to_bytes((len(flags) + 7) >> 3, "little")
