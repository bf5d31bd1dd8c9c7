"""Answers of a block to pushes and pulls, and the result of closing a round; see ``rounds``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum

import msgspec

from flightedl.domain.exactly_once.batches import Batch


class Accumulate(msgspec.Struct, frozen=True):
    """Add the gradient to the accumulator, or overwrite the accumulator if ``is_first``. Mark the batch."""

    is_first: bool
    is_late: bool = False


class Apply(msgspec.Struct, frozen=True):
    """Run the optimizer now, and mark the batch. The version has already been incremented.

    ``staleness`` is the number of pushes accepted since the gradient's base version.
    """

    staleness: int


class Arrived(msgspec.Struct, frozen=True):
    """The member has arrived, or its clock has advanced, but it contributed no gradient.

    Mark the batch unless it is marked. Outside of sync mode, a new batch has incremented the version.
    """


class Repeated(msgspec.Struct, frozen=True):
    """The block has already applied the batch, so the message changes nothing: answer "already applied"."""


class Stale(msgspec.Struct, frozen=True):
    """Rejected because the base version is outdated: pull this version or a later one, recompute, and push again."""

    version: int


class NotMember(msgspec.Struct, frozen=True):
    """Rejected because the sender is not in the view: join, pull and recompute."""


Arrival = Accumulate | Apply | Arrived | Repeated | Stale | NotMember


class Pull(Enum):
    """Answer to a pull."""

    READY = "ready"
    WAIT = "wait"
    NOT_MEMBER = "not_member"


class Closing(msgspec.Struct, frozen=True):
    """A closed round. If ``has_update`` is true, run the optimizer before using the block's new version."""

    #: Number of the closed round, which is below the block's new version.
    round: int
    total_weight: float
    #: Member -> weight of its contributions, including those of members that have left.
    contributors: Mapping[int, float]
    #: Members that have arrived, with or without a contribution.
    arrived: frozenset[int]
    #: Batches that contributed, each with the number of batches in its task.
    held: Sequence[tuple[Batch, int]]

    @property
    def has_update(self) -> bool:
        return bool(self.contributors)
