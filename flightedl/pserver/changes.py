"""Notification of threads that wait for a version: once per message with changes, not once per block."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Changes:
    """Counter of changes, with a condition variable to wait for them. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        #: Number of threads in ``wait``.
        self._waiting = 0
        #: Number of announced changes, for ``wait``.
        self.count = 0
        #: Set if the current message has changed blocks; the change is announced after the message.
        self.has_news = False
        #: Also called for each announcement, unless it is None.
        self.wake: Callable[[], None] | None = None

    def announce(self) -> None:
        """Wake all waiting threads if there are new changes."""
        if not self.has_news:
            return
        # Reset the flag before the threads wake, so that later changes are announced again.
        self.has_news = False
        with self._changed:
            self.count += 1
            if self._waiting:
                self._changed.notify_all()
        if self.wake is not None:
            self.wake()

    def wait(self, seen: int, timeout_s: float) -> int:
        """Wait for at most ``timeout_s`` seconds while the count equals ``seen``. Return the count."""
        with self._changed:
            if self.count == seen and timeout_s > 0:
                self._waiting += 1
                self._changed.wait(timeout_s)
                self._waiting -= 1
            return self.count
