"""The process's clock.

``now`` is CLOCK_MONOTONIC: it goes on while the process is stopped, so a process that was frozen past its lease sees so
when it wakes. Not guaranteed: it stands still while the whole machine is suspended.
"""

from __future__ import annotations

import time


class SystemClock:
    """The machine's clock; see ``ports.Clock``."""

    def now(self) -> float:
        return time.monotonic()

    def wall_time(self) -> float:
        return time.time()

    def sleep(self, seconds: float) -> None:
        time.sleep(max(0.0, seconds))
