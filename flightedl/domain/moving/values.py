"""Stored values of moves, transactions that change them, messages between two pservers, and effects."""

from __future__ import annotations

import msgspec

from flightedl.messages.base import decode
from flightedl.messages.declarations import DeclaredModel, Placement

#: Used instead of an attempt to require that no intent exists.
NONE = 0


class Move(msgspec.Struct, frozen=True, array_like=True):
    """Move of a *unit*: adjacent blocks that are copied, frozen and committed together.

    If buckets moved one by one, they would have different histories afterward, and each push would need a separate
    decision for each bucket.
    """

    block: int
    source: int
    destination: int
    #: Number of blocks.
    count: int = 1

    @property
    def blocks(self) -> range:
        return range(self.block, self.block + self.count)


class Intent(msgspec.Struct, frozen=True, array_like=True):
    """The moves in progress, as stored. Committing a move removes it from the intent."""

    #: Generation of the master that stored the intent.
    master: int
    moves: tuple[Move, ...]
    #: (index, generation) of each source and destination, in ascending order.
    generations: tuple[tuple[int, int], ...]

    def generation_of(self, index: int) -> int | None:
        """Return the generation that the intent names for a pserver, or None if it names none."""
        return dict(self.generations).get(index)

    def move_of(self, block: int) -> Move | None:
        """Return the move of the unit that begins with this block, or None."""
        return next((move for move in self.moves if move.block == block), None)


class StoredIntent(msgspec.Struct, frozen=True, array_like=True):
    """An intent and its attempt: the create_revision of its key. Later intents have higher attempts."""

    attempt: int
    intent: Intent


class Transaction(msgspec.Struct, frozen=True):
    """An atomic change to the stored state, made only if all compared values are as expected."""

    #: Expected attempt of the stored intent; ``NONE`` to require that no intent is stored.
    attempt: int
    #: New intent; None to delete the stored one.
    intent: Intent | None
    #: New placement; None to keep the stored one.
    placement: Placement | None = None
    # Generation of the master that must hold the lock. If a pserver gives up, neither it nor the fields below are
    # compared.
    master: int | None = None
    #: (index, generation) of pservers whose keys must exist.
    generations: tuple[tuple[int, int], ...] = ()
    #: Expected version of the stored placement.
    version: int | None = None
    #: True if the transaction requires that no checkpoint has been ordered.
    excludes_checkpoint: bool = False


class Copy(msgspec.Struct, frozen=True):
    """Copy of a unit's content for another pserver, with all updates applied so far."""

    attempt: int
    block: int
    #: Generation of the receiving pserver.
    generation: int
    count: int = 1


class Update(msgspec.Struct, frozen=True):
    """Changes to the content since the copy or the previous update. Updates are numbered from 1."""

    attempt: int
    block: int
    generation: int
    number: int


class Last(msgspec.Struct, frozen=True):
    """End of the updates: the unit is frozen after ``count`` updates, and this is the digest of its content."""

    attempt: int
    block: int
    generation: int
    count: int
    digest: bytes


class Acknowledged(msgspec.Struct, frozen=True):
    """Message to the master: the destination has staged all content of a frozen unit."""

    attempt: int
    block: int


class Adopt(msgspec.Struct, frozen=True):
    """Start serving the unit's blocks, with the staged content as their content."""

    block: int


class Release(msgspec.Struct, frozen=True):
    """Delete the content of adjacent blocks that another pserver owns, and redirect pushes to them."""

    block: int
    count: int = 1


class Thaw(msgspec.Struct, frozen=True):
    """Accept pushes to a unit again. The unit did not move, because the attempt to move it is over."""

    block: int


class Stage(msgspec.Struct, frozen=True):
    """Store the received copy, replacing an earlier attempt's copy. Readers cannot see the copy."""

    block: int


class Append(msgspec.Struct, frozen=True):
    """Apply the received update to the staged content."""

    block: int


class Discard(msgspec.Struct, frozen=True):
    """Delete the staged content of an attempt that is over."""

    block: int


class End(msgspec.Struct, frozen=True):
    """Exit, because another process holds the index, or because the process lacks a block that it owns."""


Message = Copy | Update | Last
Effect = Copy | Update | Last | Acknowledged | Adopt | Release | Thaw | Stage | Append | Discard | End


def placement_in(model: DeclaredModel | None, stored: bytes | None) -> Placement | None:
    """Return the newest placement: the declared or the stored one. None if a job has no placement.

    Args:
        model: The declared model; None if there is none.
        stored: Value of the placement's key in etcd; None if there is none.
    """
    declared = None if model is None else model.placement
    if stored is None or declared is None:
        return declared
    newest = decode(stored, Placement)
    return newest if newest.version > declared.version else declared
