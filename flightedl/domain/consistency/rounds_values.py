"""What a block answers to a push or a pull, and what a closed round was; ``rounds`` decides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum

import msgspec

from flightedl.domain.exactly_once.batches import Batch


class Accumulate(msgspec.Struct, frozen=True):
    """Add the gradient to the round: overwrite the accumulator when ``is_first``. Mark the batch."""

    is_first: bool
    is_late: bool = False


class Apply(msgspec.Struct, frozen=True):
    """Run the optimizer now; the version has been counted. Mark the batch.

    ``staleness`` is the number of updates that the gradient did not see.
    """

    staleness: int


class Arrived(msgspec.Struct, frozen=True):
    """The member has arrived (or its clock has moved) without a contribution. Mark the batch, if it is not."""


class Repeated(msgspec.Struct, frozen=True):
    """The block has the batch and the message changes nothing: answer "already applied"."""


class Stale(msgspec.Struct, frozen=True):
    """Nothing was done: pull this version or a later one, recompute, push again."""

    version: int


class NotMember(msgspec.Struct, frozen=True):
    """Nothing was done: the sender is not in the view; join, pull, recompute."""


Arrival = Accumulate | Apply | Arrived | Repeated | Stale | NotMember


class Pull(Enum):
    """What a pull has to do."""

    READY = "ready"
    WAIT = "wait"
    NOT_MEMBER = "not_member"


class Closing(msgspec.Struct, frozen=True):
    """A closed round. Run the optimizer when ``has_update``; then its version is the block's."""

    #: The round closed; the block's version is higher now.
    round: int
    total_weight: float
    #: Members with a contribution and its weight, also those that have left since.
    contributors: Mapping[int, float]
    #: Members that arrived, with or without a contribution.
    arrived: frozenset[int]
    #: The batches that were contributed, each with the number of batches of its task.
    held: Sequence[tuple[Batch, int]]

    @property
    def has_update(self) -> bool:
        """False when the accumulator holds nothing of this round."""
        return bool(self.contributors)
