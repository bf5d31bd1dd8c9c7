"""Wakes threads that wait for a version: once for each message that causes changes, not for each block."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Changes:
    """Counter of announced changes, with a condition variable for its waiters. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        #: Number of threads in ``wait``.
        self._waiting = 0
        #: Number of announcements so far, to be passed to ``wait``.
        self.count = 0
        #: Set if the current message has changed blocks. The change is announced at the end of the message.
        self.has_news = False
        #: If not None, called at each announcement, in addition to waking the waiting threads.
        self.wake: Callable[[], None] | None = None

    def announce(self) -> None:
        """Announce all changes since the previous announcement to the waiting threads."""
        if not self.has_news:
            return
        # Reset the flag before waking the threads, so that later changes are announced again.
        self.has_news = False
        with self._changed:
            self.count += 1
            if self._waiting:
                self._changed.notify_all()
        if self.wake is not None:
            self.wake()

    def wait(self, seen: int, timeout_s: float) -> int:
        """Wait until the count differs from ``seen``, for at most ``timeout_s`` seconds. Return the count."""
        with self._changed:
            if self.count == seen and timeout_s > 0:
                self._waiting += 1
                self._changed.wait(timeout_s)
                self._waiting -= 1
            return self.count
