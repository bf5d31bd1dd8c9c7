"""The process's clock.

``now`` uses CLOCK_BOOTTIME where available. This clock also advances while the process is stopped, and while the
machine is suspended, for example a laptop, or a virtual machine during migration. So a process that was frozen until
its lease had expired detects this when it wakes up, before it does anything else. Other systems use the monotonic
clock, which may stop while the machine is suspended.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable


def suspend_aware_clock() -> Callable[[], float]:
    """Return a clock that never goes backward, and that stops as rarely as the system permits."""
    try:
        read = functools.partial(time.clock_gettime, time.CLOCK_BOOTTIME)
        read()
    except (AttributeError, OSError):
        return time.monotonic
    return read


class SystemClock:
    """System clock, which implements ``ports.Clock``."""

    #: The clock is read a dozen times per step, so no Python method wraps it.
    now = staticmethod(suspend_aware_clock())

    def wall_time(self) -> float:
        return time.time()

    def sleep(self, seconds: float) -> None:
        time.sleep(max(0.0, seconds))
