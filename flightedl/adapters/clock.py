"""The process's clock.

``now`` is CLOCK_BOOTTIME where the system has it: it goes on while the process is stopped, and while the whole machine
is suspended, as a laptop is, or a virtual machine that is moved. So whoever stood still past its lease sees so when it
wakes, before it does anything. Elsewhere it is the monotonic clock, and not all of these go on while a machine is
suspended.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable


def seconds_that_go_on() -> Callable[[], float]:
    """The clock to decide by: it never goes back, and stands still as rarely as this system can tell."""
    try:
        read = functools.partial(time.clock_gettime, time.CLOCK_BOOTTIME)
        read()
    except (AttributeError, OSError):
        return time.monotonic
    return read


class SystemClock:
    """The machine's clock; see ``ports.Clock``."""

    #: Looked at a dozen times in each step: no method of Python stands between.
    now = staticmethod(seconds_that_go_on())

    def wall_time(self) -> float:
        return time.time()

    def sleep(self, seconds: float) -> None:
        time.sleep(max(0.0, seconds))
