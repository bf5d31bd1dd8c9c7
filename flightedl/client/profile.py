"""Where the time of a trainer's loop goes: waiting for data, in the script, or with the parameter servers.

With these it is told apart what is spent on sending gradients, on waiting for others, and on receiving values: as the
pserver saw it that took longest, since the loop goes on when the last one is done.

The user's thread says what it does from now on; the time until it says the next thing is added to that. It costs two
looks at a clock each time. What goes on at the moment is not counted before it is over.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping

#: What the loop may do. "data": it waits for the next batch, or to be a member. "script": the user's code works.
DATA, SCRIPT = "data", "script"
#: With the parameter servers: gradients are on their way; it waits for the others of a round, or for a version; values
#: are on their way.
PUSH, WAIT, PULL = "push", "wait", "pull"


class LoopProfile:
    """Of one trainer. The user's thread calls all but ``take``.

    Args:
        now: The process's clock.
    """

    def __init__(self, now: Callable[[], float] = lambda: 0.0) -> None:
        self._now = now
        self._doing = ""
        self._since = now()
        self._lock = threading.Lock()
        self._seconds: dict[str, float] = {}

    def does(self, what: str) -> str:
        """From now on; returns what it did before. Empty: nothing that is counted."""
        now, before = self._now(), self._doing
        if before:
            with self._lock:
                self._seconds[before] = self._seconds.get(before, 0.0) + now - self._since
        self._doing, self._since = what, now
        return before

    @property
    def doing(self) -> str:
        """What it does now; for any thread."""
        return self._doing

    @contextlib.contextmanager
    def at(self, what: str) -> Iterator[None]:
        """Inside; afterwards what it did before."""
        before = self.does(what)
        try:
            yield
        finally:
            self.does(before)

    def pushed(self, next_: str, parts: Mapping[str, float]) -> None:
        """End a push and begin ``next_``. ``parts``: seconds of the push that were waits or pulls."""
        now = self._now()
        with self._lock:
            seconds = self._seconds
            seconds[PUSH] = seconds.get(PUSH, 0.0) + now - self._since
            for what, spent_s in parts.items():
                if what != PUSH:
                    seconds[what] = seconds.get(what, 0.0) + spent_s
                    seconds[PUSH] -= spent_s
        self._doing, self._since = next_, now

    def take(self) -> dict[str, float]:
        """Seconds of each since the last time; for any thread."""
        with self._lock:
            seconds, self._seconds = self._seconds, {}
        return seconds

    def give_back(self, seconds: dict[str, float]) -> None:
        """What was taken could not be told: it is told next time."""
        with self._lock:
            for what, more in seconds.items():
                self._seconds[what] = self._seconds.get(what, 0.0) + more
