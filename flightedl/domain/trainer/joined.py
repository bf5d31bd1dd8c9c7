"""The answers of one pserver for all its buckets as one answer: rows of tables are one block to the core of a trainer.

A pserver answers for ranges of buckets: mostly for all at once, and for several where they have different histories.
The block that stands for all of them has the number of the first. What it answers is

* "too late", or "no member", as soon as one range does;
* which batches of a sum are there, of each range that refused the sum;
* else that the batch is there, and the lowest of the versions, when all ranges have said so.
"""

from __future__ import annotations

from typing import Protocol

from flightedl.messages.parameters import Outcome

_TOO_LATE = (Outcome.NOT_MEMBER, Outcome.STALE)


class Answered(Protocol):
    """Who hears of answers, see ``ShardTransfer``."""

    def answered(self, blocks: range, outcome: int, version: int | None = None, having: bytes = b"") -> None:
        """Neighbouring blocks have answered."""
        ...


class JoinedAnswers:
    """What one call is answered about buckets.

    Args:
        buckets: All of the pserver, as positions of the plan.
        transfer: Hears of the answer.
    """

    __slots__ = ("_buckets", "_having", "_outcomes", "_transfer", "_versions", "_with_outcome", "_with_version")

    def __init__(self, buckets: range, transfer: Answered) -> None:
        self._buckets = buckets
        self._transfer = transfer
        #: Of how many buckets the outcome has come, and which ones.
        self._with_outcome = 0
        self._outcomes: set[int] = set()
        #: What buckets have of a sum that they did not take.
        self._having: set[bytes] = set()
        #: Of how many buckets the version has come, and which ones.
        self._with_version = 0
        self._versions: list[int] = []

    def answered(self, buckets: range, outcome: int, version: int | None = None, having: bytes = b"") -> None:
        """Some neighbouring buckets have answered; arguments as of ``ShardTransfer.answered``."""
        if outcome == Outcome.PARTLY_APPLIED:
            self._having.add(having)
        elif version is not None:
            self._with_version += len(buckets)
            self._versions.append(version)
        if outcome != Outcome.NONE:
            self._with_outcome += len(buckets)
            self._outcomes.add(outcome)
        self._tell(is_outcome=outcome != Outcome.NONE)

    def _tell(self, *, is_outcome: bool) -> None:
        block, count = range(self._buckets.start, self._buckets.start + 1), len(self._buckets)
        version = min(self._versions) if self._with_version == count else None
        if late := [outcome for outcome in _TOO_LATE if outcome in self._outcomes]:
            self._transfer.answered(block, late[0])
        elif self._having:
            if self._with_outcome == count:
                for having in sorted(self._having):
                    self._transfer.answered(block, Outcome.PARTLY_APPLIED, having=having)
        elif is_outcome:
            if self._with_outcome == count:
                has_new = Outcome.ACCEPTED in self._outcomes
                self._transfer.answered(block, Outcome.ACCEPTED if has_new else Outcome.ALREADY_APPLIED, version)
        elif version is not None and self._with_outcome in {0, count}:
            self._transfer.answered(block, Outcome.NONE, version)
