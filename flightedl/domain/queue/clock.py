"""Clock by which a queue measures how long pieces run: the process's clock, without the time in which no piece can run.

While a pserver that trainers need is away, their pieces make no progress, which is no fault of theirs. The clock stops
then. Otherwise a long recovery would expire every piece several times over, and set sound batches aside.
"""

from __future__ import annotations


class WorkClock:
    """A clock that can stop. It runs at first."""

    __slots__ = ("_stopped_at", "_stopped_s")

    def __init__(self) -> None:
        #: None while the clock runs.
        self._stopped_at: float | None = None
        #: Total duration of all stops that are over.
        self._stopped_s = 0.0

    def at(self, now: float) -> float:
        """Return this clock's time at the instant ``now`` of the process's clock."""
        return (now if self._stopped_at is None else self._stopped_at) - self._stopped_s

    def go(self, now: float, *, is_stopped: bool) -> None:
        """Stop the clock at ``now``, or let it run on from where it stopped. The same again changes nothing."""
        if is_stopped and self._stopped_at is None:
            self._stopped_at = now
        elif not is_stopped and self._stopped_at is not None:
            self._stopped_s += now - self._stopped_at
            self._stopped_at = None
