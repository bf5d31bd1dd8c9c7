"""Limits the number of pservers that start at the same time on a machine to one per processor.

If all pservers started at the same time, each start would take as long as all starts together, and leases could not be
renewed in time. A turn is a name in Linux's abstract socket namespace, which a process holds until it ends. A process
that has waited ``patience_s`` seconds continues without a turn, because the holder may be frozen. On systems without
abstract names, processes do not wait.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

from flightedl.process import machine

_LOOK_S = 0.1


class Turns:
    """Machine-wide semaphore shared by one user's processes.

    Args:
        stop: Set to end the wait for a turn.
        at_once: Number of simultaneous turns; None to use the number of processors.
        patience_s: Maximum wait for a turn, in seconds.
        purpose: Name of the semaphore. Turns with different purposes are independent.
    """

    def __init__(
        self,
        stop: threading.Event,
        *,
        at_once: int | None = None,
        patience_s: float = 15.0,
        purpose: str = "pserver-starts",
    ) -> None:
        self._stop = stop
        self._patience_s = patience_s
        count = at_once or os.cpu_count() or 1
        user = os.getuid() if hasattr(os, "getuid") else 0
        self._names = [f"\0flightedl-{user}-{purpose}-{number}" for number in range(count)]

    @contextlib.contextmanager
    def turn(self) -> Iterator[bool]:
        held = self._acquire()
        with held or contextlib.nullcontext():
            yield held is not None

    def _acquire(self) -> contextlib.AbstractContextManager[object] | None:
        for _ in range(int(self._patience_s / _LOOK_S)):
            try:
                for name in self._names:
                    if (held := machine.hold_name(name)) is not None:
                        return held
            except OSError:
                return None
            if self._stop.wait(_LOOK_S):
                return None
        return None
