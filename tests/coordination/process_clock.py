"""Clock for tests with short leases."""

from __future__ import annotations

import threading
import time

from flightedl.adapters.clock import SystemClock

_LOOK_EVERY_S = 0.005
_STEP_LIMIT_S = 0.02


class ProcessClock(SystemClock):
    """Clock that advances with the machine's clock while this process runs, and stops while it does not.

    A lease of a fraction of a second therefore expires only because of the test's actions, and not because the machine
    ran other processes. A thread reads the machine's clock at short intervals. A longer gap between two readings counts
    as a few intervals at most.
    """

    def __init__(self) -> None:
        self._passed_s = 0.0
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._look, name="process-clock", daemon=True)
        self._thread.start()

    def now(self) -> float:
        return self._passed_s

    def pass_time(self, seconds: float) -> None:
        """Wait until this clock has advanced by this time."""
        until = self._passed_s + seconds
        while self._passed_s < until:
            time.sleep(_LOOK_EVERY_S)

    def close(self) -> None:
        self._is_closed.set()
        self._thread.join()

    def _look(self) -> None:
        last = time.monotonic()
        while not self._is_closed.wait(_LOOK_EVERY_S):
            now = time.monotonic()
            self._passed_s += min(now - last, _STEP_LIMIT_S)
            last = now
