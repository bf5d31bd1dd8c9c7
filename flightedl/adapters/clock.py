"""The process's clock.

``now`` is CLOCK_BOOTTIME if the system has it: it goes on while the process is stopped, and while the whole machine is
suspended, such as a laptop or a virtual machine that is moved. So a process that stood still past its lease notices it
when it wakes, before it does anything. On other systems it is the monotonic clock, which may stop while a machine is
suspended.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable


def seconds_that_go_on() -> Callable[[], float]:
    """Return a clock that never goes back, and stands still as rarely as this system allows."""
    try:
        read = functools.partial(time.clock_gettime, time.CLOCK_BOOTTIME)
        read()
    except (AttributeError, OSError):
        return time.monotonic
    return read


class SystemClock:
    """The machine's clock; see ``ports.Clock``."""

    #: Read a dozen times in each step, so no Python method wraps it.
    now = staticmethod(seconds_that_go_on())

    def wall_time(self) -> float:
        return time.time()

    def sleep(self, seconds: float) -> None:
        time.sleep(max(0.0, seconds))
