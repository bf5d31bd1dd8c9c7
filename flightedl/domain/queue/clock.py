"""Clock that measures how long pieces run: the process's clock, excluding the time in which no piece can run.

The clock stops while trainers wait for a pserver that is down, because their pieces cannot make progress. Otherwise
every piece would expire several times during a long recovery, and valid batches would be quarantined.
"""

from __future__ import annotations


class WorkClock:
    """A clock that can be stopped; it runs initially."""

    __slots__ = ("_stopped_at", "_stopped_s")

    def __init__(self) -> None:
        #: None while the clock runs.
        self._stopped_at: float | None = None
        #: Total duration of all completed stops of the clock.
        self._stopped_s = 0.0

    def at(self, now: float) -> float:
        """Return this clock's time at the instant ``now`` of the process's clock."""
        return (now if self._stopped_at is None else self._stopped_at) - self._stopped_s

    def go(self, now: float, *, is_stopped: bool) -> None:
        """Stop the clock at ``now``, or let it continue. Does nothing if the clock is already in that state."""
        if is_stopped and self._stopped_at is None:
            self._stopped_at = now
        elif not is_stopped and self._stopped_at is not None:
            self._stopped_s += now - self._stopped_at
            self._stopped_at = None
