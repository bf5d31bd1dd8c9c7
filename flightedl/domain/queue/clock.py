"""A clock for the running time of pieces: the process's clock without the periods in which no piece can run.

The clock stops while trainers wait for a pserver that is down, since their pieces cannot progress. Otherwise, every
piece would time out several times during a long recovery, and valid batches would be quarantined.
"""

from __future__ import annotations


class WorkClock:
    """A clock that can be stopped. Initially it is running."""

    __slots__ = ("_stopped_at", "_stopped_s")

    def __init__(self) -> None:
        #: None while the clock runs.
        self._stopped_at: float | None = None
        #: Total duration of all completed stops, in seconds.
        self._stopped_s = 0.0

    def at(self, now: float) -> float:
        """Return the time that this clock shows when the process's clock shows ``now``."""
        return (now if self._stopped_at is None else self._stopped_at) - self._stopped_s

    def go(self, now: float, *, is_stopped: bool) -> None:
        """Stop the clock at ``now``, or let it continue. Does nothing if it is already in that state."""
        if is_stopped and self._stopped_at is None:
            self._stopped_at = now
        elif not is_stopped and self._stopped_at is not None:
            self._stopped_s += now - self._stopped_at
            self._stopped_at = None
