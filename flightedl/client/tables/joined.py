"""The answers of one pserver for all its buckets as one answer, which is what the core of a trainer knows of.

A pserver answers for ranges of buckets: mostly for all at once, and for several where they have different histories.
To the core they are one block, whose number is that of the first bucket.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from flightedl.errors import MessageError
from flightedl.messages.parameters import Outcome
from flightedl.wire.parts import ReceivedBlocks

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
        deliver: Takes the rows of a range: (its positions, version, payload).
    """

    def __init__(self, buckets: range, transfer: Answered, deliver: Callable[[range, int, memoryview], None]) -> None:
        self._buckets = buckets
        self._transfer = transfer
        self._deliver = deliver
        #: Of how many buckets the outcome has come, and which ones.
        self._with_outcome = 0
        self._outcomes: set[int] = set()
        #: What buckets have of a sum that they did not take.
        self._having: set[bytes] = set()
        #: Of how many buckets the version has come, and which ones.
        self._with_version = 0
        self._versions: list[int] = []

    def take(self, part: ReceivedBlocks) -> None:
        """A part of a message that is about buckets."""
        blocks, version, outcome, data = part
        if blocks.start < self._buckets.start or blocks.stop > self._buckets.stop:
            raise MessageError(f"a pserver sent rows of {blocks}, which are not its own")
        if outcome == Outcome.PARTLY_APPLIED:
            self._having.add(bytes(data))
        elif data:
            self._deliver(blocks, version, data)
            self._with_version += len(blocks)
            self._versions.append(version)
        if outcome != Outcome.NONE:
            self._with_outcome += len(blocks)
            self._outcomes.add(outcome)
        self._tell(is_outcome=outcome != Outcome.NONE)

    def _tell(self, *, is_outcome: bool) -> None:
        key = range(self._buckets.start, self._buckets.start + 1)
        count = len(self._buckets)
        late = [outcome for outcome in _TOO_LATE if outcome in self._outcomes]
        version = min(self._versions) if self._with_version == count else None
        if late:
            self._transfer.answered(key, late[0])
        elif self._having:
            if self._with_outcome == count:
                for having in sorted(self._having):
                    self._transfer.answered(key, Outcome.PARTLY_APPLIED, having=having)
        elif is_outcome:
            if self._with_outcome == count:
                has_new = Outcome.ACCEPTED in self._outcomes
                self._transfer.answered(key, Outcome.ACCEPTED if has_new else Outcome.ALREADY_APPLIED, version)
        elif version is not None and self._with_outcome in {0, count}:
            self._transfer.answered(key, Outcome.NONE, version)
