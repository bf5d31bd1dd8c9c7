"""Timing of the units that leave a pserver: when to copy, freeze and give up each of them, one after the other.

At most one unit is frozen at a time. A driver carries out each step and reports its outcome:

* First it uploads the copy, while pushes to the unit continue, and then the updates since then, until few are left.
* It freezes the unit between two rounds, uploads the rest, and asks the destination for an acknowledgement.
* It waits until a read of etcd shows that the attempt is over. If that takes too long, or an upload fails, it deletes
  the intent, and reads etcd again. Without etcd, the unit remains frozen.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

import msgspec

from flightedl.domain.moving.values import Copy, StoredIntent

#: Seconds that a unit may be frozen before the driver deletes the intent: initially, and at most. The time doubles with
#: each attempt that fails on a busy machine, and decreases again when a unit has moved.
_GIVE_UP_S, _LONGEST_GIVE_UP_S = 0.2, 5.0
#: Maximum number of changed rows left when a unit is frozen, and maximum number of passes over these rows.
_FEW_ROWS = 6_000
_MOST_UPDATES = 8
#: Seconds between two attempts to freeze a unit, and between two requests for an acknowledgement.
EDGE_S = 0.02
#: After a unit was frozen, pushes continue for this multiple of the frozen time (within limits) before the next unit is
#: frozen. Otherwise one step of a trainer might wait for several units.
_PACE, _LEAST_PAUSE_S, _LONGEST_PAUSE_S = 2.0, 0.05, 0.5


class Do(enum.Enum):
    """The next step of the driver."""

    COPY = "upload the copy"
    UPDATE = "upload the changes since the last upload"
    FREEZE = "freeze the unit if it is between two rounds; otherwise wait for a change, at most ``EDGE_S``"
    REST = "upload everything that has not been uploaded yet"
    LAST = "ask the destination to acknowledge the content"
    WAIT = "wait until the given time, or until etcd has been read"
    GIVE_UP = "delete the intent, and read etcd"
    END = "begin with the next unit"


class Step(msgspec.Struct, frozen=True, array_like=True):
    """A step, and the time until which ``Do.WAIT`` waits."""

    do: Do
    until: float = 0.0


class LeavingUnit(NamedTuple):
    """A unit to send: its copy, and the index of the pserver to which it moves."""

    copy: Copy
    destination: int

    @classmethod
    def of(cls, copy: Copy, stored: StoredIntent | None) -> LeavingUnit:
        """Return the unit for a copy that the stored intent has begun."""
        move = None if stored is None else stored.intent.move_of(copy.block)
        assert move is not None, "a copy needs a move"
        return cls(copy, move.destination)

    @property
    def numbers(self) -> range:
        return range(self.copy.block, self.copy.block + self.copy.count)


class UnitSender:
    """State machine of the units that leave one pserver. Not thread-safe."""

    def __init__(self) -> None:
        self._next = Do.END
        self._updates = 0
        self._wait_until = 0.0
        self._began_at = self._frozen_at = 0.0
        self._give_up_s = _GIVE_UP_S
        #: Time before which no other unit is frozen.
        self._not_before = 0.0

    @property
    def may_update(self) -> bool:
        """True if the next step depends on the number of rows that have changed since they were uploaded."""
        return self._next is Do.UPDATE

    def begin(self, now: float) -> None:
        """Begin to send a unit."""
        self._next, self._updates, self._wait_until = Do.COPY, 0, 0.0
        self._began_at = self._frozen_at = now

    def next_step(self, now: float, *, is_leaving: bool, changed_rows: int = 0) -> Step:
        """Return the next step.

        Args:
            now: The time.
            is_leaving: False if a read of etcd has shown that the attempt to move the unit is over.
            changed_rows: Number of rows that have changed since they were uploaded, for ``may_update``.
        """
        if not is_leaving:
            return self._end(now)
        if now < self._wait_until:
            return Step(Do.WAIT, self._wait_until)
        if self._next is Do.UPDATE and (self._updates == _MOST_UPDATES or changed_rows <= _FEW_ROWS):
            self._next = Do.FREEZE
        if self._next is Do.WAIT:
            self._give_up_s = min(2 * self._give_up_s, _LONGEST_GIVE_UP_S)
            self._next = Do.GIVE_UP
        return Step(self._next)

    def _end(self, now: float) -> Step:
        if self._next is Do.WAIT:
            self._give_up_s = _GIVE_UP_S
        pause_s = min(max(_PACE * self.frozen_s(now), _LEAST_PAUSE_S), _LONGEST_PAUSE_S)
        self._next, self._not_before = Do.END, now + pause_s
        return Step(Do.END)

    @property
    def copied_s(self) -> float:
        """Seconds from the beginning until the unit was frozen."""
        return self._frozen_at - self._began_at

    def frozen_s(self, now: float) -> float:
        """Return the seconds since the unit was frozen."""
        return now - self._frozen_at

    def done(self, now: float) -> None:
        """Record that the last step, other than ``Do.WAIT``, has been carried out."""
        match self._next:
            case Do.COPY:
                self._next, self._wait_until = Do.UPDATE, self._not_before
            case Do.UPDATE:
                self._updates += 1
            case Do.FREEZE:
                self._next, self._frozen_at = Do.REST, now
            case Do.REST:
                self._next = Do.LAST
            case Do.LAST:
                self._next, self._wait_until = Do.WAIT, self._frozen_at + self._give_up_s
            case _:
                self._wait_until = now + _GIVE_UP_S

    def failed(self, now: float, *, may_repeat: bool) -> bool:
        """Record that an upload has failed. Return True if the attempt is given up.

        Args:
            now: The time.
            may_repeat: True if the destination has refused the upload, but may accept the same upload later.
        """
        if self._next is Do.LAST and may_repeat and self.frozen_s(now) <= self._give_up_s:
            self._wait_until = now + EDGE_S
            return False
        self._next = Do.GIVE_UP
        return True
