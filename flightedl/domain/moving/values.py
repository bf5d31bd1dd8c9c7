"""Values of moving blocks: what is stored, what the transactions compare, and what two pservers send each other."""

from __future__ import annotations

import msgspec

#: Attempt of a block that has never moved, and of an intent that must not exist.
NONE = 0


class Move(msgspec.Struct, frozen=True, array_like=True):
    """One block that is to move."""

    block: int
    source: int
    destination: int


class Intent(msgspec.Struct, frozen=True, array_like=True):
    """Moves that are under way, as stored. A block leaves the intent when its move is committed."""

    #: Generation of the master that stored it.
    master: int
    moves: tuple[Move, ...]
    #: (index, generation) of each pserver that gives or receives a block, rising.
    generations: tuple[tuple[int, int], ...]

    def generation_of(self, index: int) -> int | None:
        """Return the generation that the intent names for a pserver; None if it names none."""
        return dict(self.generations).get(index)

    def move_of(self, block: int) -> Move | None:
        """Return the move of a block, or None."""
        return next((move for move in self.moves if move.block == block), None)


class Standing(msgspec.Struct, frozen=True, array_like=True):
    """An intent and its attempt: the create_revision of its key, so that a later intent has a higher one."""

    attempt: int
    intent: Intent


class Owners(msgspec.Struct, frozen=True, array_like=True):
    """Owners of all blocks, as stored."""

    version: int
    #: Block -> index of its pserver.
    pservers: tuple[int, ...]
    #: Block -> attempt that brought it there.
    attempts: tuple[int, ...]

    def moved(self, move: Move, attempt: int) -> Owners:
        """Return the next version, after one move."""
        pservers, attempts = list(self.pservers), list(self.attempts)
        pservers[move.block], attempts[move.block] = move.destination, attempt
        return Owners(self.version + 1, tuple(pservers), tuple(attempts))

    def blocks_of(self, index: int) -> list[int]:
        """Return the blocks of a pserver, rising."""
        return [block for block, owner in enumerate(self.pservers) if owner == index]


class Transaction(msgspec.Struct, frozen=True):
    """A change of the stored state: all of it happens, if all that it compares is as expected, or nothing."""

    #: Attempt of the stored intent; ``NONE``: there is none.
    attempt: int
    #: The intent that is stored instead; None: it is deleted.
    intent: Intent | None
    #: Owners that are stored; None: they stay.
    owners: Owners | None = None
    # The following are not compared by a pserver that gives up.
    #: Generation of the master that holds the lock.
    master: int | None = None
    #: (index, generation) of pservers whose keys have to be there.
    generations: tuple[tuple[int, int], ...] = ()
    #: Version of the stored owners.
    version: int | None = None
    #: True if no order of a checkpoint may be stored.
    excludes_checkpoint: bool = False


class Copy(msgspec.Struct, frozen=True):
    """A block's content is sent to a pserver; all that is applied before it is in it."""

    attempt: int
    block: int
    #: Of the pserver that receives it.
    generation: int


class Update(msgspec.Struct, frozen=True):
    """An update that was applied after the copy. They are numbered from 1."""

    attempt: int
    block: int
    generation: int
    number: int


class Last(msgspec.Struct, frozen=True):
    """The block is frozen after ``count`` updates, and has this digest."""

    attempt: int
    block: int
    generation: int
    count: int
    digest: bytes


class Acknowledged(msgspec.Struct, frozen=True):
    """To the master: the destination has staged all of a frozen block."""

    attempt: int
    block: int


class Adopt(msgspec.Struct, frozen=True):
    """The staged content is the block's, from now on served here."""

    block: int


class Release(msgspec.Struct, frozen=True):
    """The block is another pserver's: its content goes, and pushes are sent on."""

    block: int


class Thaw(msgspec.Struct, frozen=True):
    """The attempt is over, and the block stays: pushes that wait go on."""

    block: int


class Stage(msgspec.Struct, frozen=True):
    """Keep the copy that came, invisible, in place of an earlier attempt's."""

    block: int


class Append(msgspec.Struct, frozen=True):
    """Apply the update that came to the staged content."""

    block: int


class Discard(msgspec.Struct, frozen=True):
    """The staged content is of an attempt that is over."""

    block: int


class End(msgspec.Struct, frozen=True):
    """The process ends: another one holds its index, or it owns a block that it does not have."""


Message = Copy | Update | Last
Effect = Copy | Update | Last | Acknowledged | Adopt | Release | Thaw | Stage | Append | Discard | End
