"""Numbering of a pserver's changes; see the package for the rules.

The caller notes a block's state before it reads the block's content. If the block changes in between, the content is
newer than the block's number. The next call then notes the change, and the block is sent again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from flightedl.messages.feed import Position


class State(NamedTuple):
    """State of a block. Equal states imply equal content."""

    #: Number of times that the block has moved to this pserver. The other number may have decreased on another pserver.
    arrivals: int
    #: Number of updates to an array's block, or version of a table's bucket, whose rows may expire without an update.
    changes: int


class Removed(NamedTuple):
    """Rows of a table that were removed before they expired."""

    number: int
    table: int
    #: Ids as little-endian 64-bit integers.
    ids: bytes


_ID_BYTES = 8


class ServerFeed:
    """Feed of one pserver.

    Args:
        life: Election of the model's initial values.
        generation: Generation of the process.
        most_removed: Maximum number of removed ids that are kept. Clients that need older ones get a base.
    """

    def __init__(self, life: int, generation: int, most_removed: int = 1 << 20) -> None:
        self.life = life
        self.generation = generation
        self.number = 0
        self._most_removed = most_removed
        #: Lowest number that an increment can follow.
        self._floor = 0
        #: Block -> its state when it was last noted.
        self._states: dict[int, State] = {}
        #: Block -> number of its last change.
        self._changed: dict[int, int] = {}
        #: Removed rows, in the order of their numbers.
        self._removed: list[Removed] = []
        self._removed_count = 0

    def is_behind(self, states: Mapping[int, State]) -> bool:
        """True if a block has changed, arrived or left since the last number."""
        return states != self._states

    def note(self, states: Mapping[int, State]) -> int:
        """Assign the next number to all changes since the last number, and return it. ``states`` has all states."""
        self.number += 1
        known = self._states
        self._changed = {
            block: self._changed[block] if known.get(block) == state else self.number for block, state in states.items()
        }
        self._states = dict(states)
        return self.number

    def mark(self, states: Mapping[int, State]) -> int:
        """Assign a number to a cut that begins later, and return it. All changes after the cut have higher numbers."""
        self.note(states)
        self.number += 1
        return self.number

    def unchanged_after(self, number: int | None) -> set[int]:
        """Return the blocks that have not changed after a number; empty if the number is None."""
        return set() if number is None else self._changed.keys() - self.changed_after(number)

    def remove(self, table: int, ids: bytes) -> None:
        """Record rows that were removed since the number before the last one."""
        self._removed.append(Removed(self.number, table, ids))
        self._removed_count += len(ids) // _ID_BYTES
        while self._removed and (self._removed_count > self._most_removed or self._removed[0].number <= self._floor):
            dropped = self._removed.pop(0)
            self._removed_count -= len(dropped.ids) // _ID_BYTES
            self._floor = dropped.number

    def start_of(self, since: Position | None) -> int | None:
        """Return the number after which changes must be sent to a client; None if the client needs a base."""
        return since.number if since is not None and self.has(since) and self._floor <= since.number else None

    def has(self, since: Position | None) -> bool:
        """True if a position is in this feed, even if an increment can no longer follow it."""
        if since is None or (since.life, since.generation) != (self.life, self.generation):
            return False
        return since.number <= self.number

    def changed_after(self, number: int | None) -> list[int]:
        """Return the blocks that changed after a number, in ascending order; all blocks if the number is None."""
        return sorted(block for block, changed in self._changed.items() if number is None or changed > number)

    def removed_after(self, number: int | None) -> list[Removed]:
        """Return the rows removed after a number; empty if the number is None, because a base lists no removed rows."""
        return [] if number is None else [removed for removed in self._removed if removed.number > number]

    def position(self, placement: int) -> Position:
        """Return the current position."""
        return Position(life=self.life, generation=self.generation, placement=placement, number=self.number)

    def check(self) -> None:
        """Assert every invariant."""
        assert self._changed.keys() == self._states.keys()
        assert all(0 < changed <= self.number for changed in self._changed.values())
        assert self._floor <= self.number
        assert all(removed.number > self._floor for removed in self._removed)
        assert sum(len(each.ids) for each in self._removed) // _ID_BYTES == self._removed_count <= self._most_removed
