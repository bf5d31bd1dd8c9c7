"""Waiting for versions: all who wait are woken once for each message that changed something, not for each block."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Changes:
    """Counts changes that others may wait for. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        #: Number of threads in ``wait``.
        self._waiting = 0
        #: Number of changes, for ``wait``.
        self.count = 0
        #: Set when something has changed, to be announced when the message is through.
        self.has_news = False
        #: Also called for each announcement, unless it is None.
        self.wake: Callable[[], None] | None = None

    def announce(self) -> None:
        """Wake everybody who waits if there is news for them."""
        if not self.has_news:
            return
        # Before they are woken, so that whatever changes from here on is announced again.
        self.has_news = False
        with self._changed:
            self.count += 1
            if self._waiting:
                self._changed.notify_all()
        if self.wake is not None:
            self.wake()

    def wait(self, seen: int, timeout_s: float) -> int:
        """Return the count, at once when it is not ``seen``, else after a change or the time."""
        with self._changed:
            if self.count == seen and timeout_s > 0:
                self._waiting += 1
                self._changed.wait(timeout_s)
                self._waiting -= 1
            return self.count
