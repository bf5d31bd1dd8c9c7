"""Tells the user what the program waits for, and ends the wait when it takes too long."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

from flightedl.errors import FlightedlError, UnavailableError
from flightedl.ports import Clock


class Waiting:
    """One wait of the user's thread: silent at first, then one line when its reason changes, then an error.

    Args:
        clock: The process's clock.
        say_after_s: Silence until then.
        give_up_s: After that, ``step`` raises UnavailableError with the last reason.
        tell: Where the reason goes beside stderr ("" when the wait is over); the session reports it to the master.
    """

    def __init__(self, clock: Clock, say_after_s: float, give_up_s: float, tell: Callable[[str], None]) -> None:
        self._clock = clock
        self._say_after_s = say_after_s
        self._give_up_s = give_up_s
        self._tell = tell
        self._start = clock.now()
        self._trouble_since: float | None = self._start
        self._said = ""

    def steps(self, first_s: float = 0.02, longest_s: float = 0.5) -> Iterator[None]:
        """Endless attempts, with a pause that doubles between them."""
        pause = first_s
        while True:
            yield
            self._clock.sleep(pause)
            pause = min(pause * 2, longest_s)

    def because(self, reason: str | FlightedlError) -> None:
        """The attempt just made did not succeed for this reason.

        Raises:
            UnavailableError: the wait took longer than ``give_up_s``.
        """
        now = self._clock.now()
        if self._trouble_since is None:
            self._trouble_since = now
        if now - self._trouble_since >= self._give_up_s:
            self.over()
            raise UnavailableError(f"gave up after {now - self._trouble_since:.0f} s (give_up_s): {reason}")
        self._say(str(reason), now - self._start)

    def _say(self, text: str, waited: float) -> None:
        if waited >= self._say_after_s and text != self._said:
            self._said = text
            self._tell(text)
            sys.stderr.write(f"flightedl: waiting ({waited:.0f} s): {text}\n")
            sys.stderr.flush()

    def patiently(self, reason: str) -> None:
        """Like ``because`` for a wait that is in order, such as for the others to finish: it never gives up."""
        self._say(reason, self._clock.now() - self._start)
        self._trouble_since = None

    def over(self) -> None:
        """The wait is over; take back what was told."""
        if self._said:
            self._said = ""
            self._tell("")
