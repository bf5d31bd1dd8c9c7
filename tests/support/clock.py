"""Clock that only tests advance."""

from __future__ import annotations

import threading


class FakeClock:
    """See ``ports.Clock``. Thread-safe.

    Args:
        start_s: Initial value of ``now``.
        jumps: If true, ``sleep`` advances the clock and returns at once, which suits tests with one thread. If false,
            ``sleep`` blocks until other threads have advanced the clock far enough.
    """

    def __init__(self, start_s: float = 1000.0, *, jumps: bool = False) -> None:
        self._now = start_s
        self._jumps = jumps
        self._condition = threading.Condition()
        self._sleepers = 0

    def now(self) -> float:
        with self._condition:
            return self._now

    def wall_time(self) -> float:
        return 1.6e9 + self.now()

    def sleep(self, seconds: float) -> None:
        if self._jumps:
            self.advance(max(0.0, seconds))
            return
        with self._condition:
            until = self._now + seconds
            self._sleepers += 1
            try:
                while self._now < until:
                    self._condition.wait()
            finally:
                self._sleepers -= 1

    def advance(self, seconds: float) -> None:
        """Advance the clock, and wake all threads whose sleep is over."""
        if seconds < 0:
            raise ValueError("the clock does not go back: pass seconds >= 0")
        with self._condition:
            self._now += seconds
            self._condition.notify_all()

    @property
    def sleepers(self) -> int:
        """Number of threads that are currently in ``sleep``."""
        with self._condition:
            return self._sleepers
