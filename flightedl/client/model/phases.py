"""Where the time of one conversation with a pserver goes: sending, waiting for others, receiving.

A gradient is *pushed* until the pserver has answered for all of it. Then it is *waited* until values come, which in
synchronous mode is when the rest of the round has pushed. From the first of them on they are *pulled*. Values that come
with the answers to a push cost no time of their own: in asynchronous mode, and where a round of little values closes
within two milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable

from flightedl.client.profile import PULL, PUSH, WAIT
from flightedl.process import tracing


class Phases:
    """Of one pserver; one thread tells it what goes on.

    Args:
        now: The process's clock.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._phase = PUSH
        self._since = 0.0
        #: Messages of the push that have no answer yet, and whether others are to be sent.
        self._unanswered = 0
        self._is_sending = False
        #: Seconds of each phase, of the newest conversation.
        self.seconds: dict[str, float] = {}

    def begin(self, phase: str) -> None:
        """A conversation begins."""
        self.seconds = {}
        self._phase, self._since = phase, self._now()

    def turn(self, phase: str) -> None:
        """Something else goes on from now on."""
        now, before = self._now(), self._phase
        self.seconds[before] = self.seconds.get(before, 0.0) + now - self._since
        if tracing.is_on():
            tracing.past(before, self._since, now)
        self._phase, self._since = phase, now

    def end(self) -> None:
        """It is over."""
        self.turn("")

    # a push

    def sends(self) -> None:
        """The messages of a push are about to be sent."""
        self.turn(PUSH)
        self._unanswered, self._is_sending = 0, True

    def sent(self) -> None:
        """One more was handed over."""
        self._unanswered += 1

    def sent_all(self) -> None:
        """There are no others."""
        self._is_sending = False

    def answered(self) -> None:
        """An answer was read."""
        if self._phase == PUSH:
            self._unanswered -= 1
            if not self._unanswered and not self._is_sending:
                self.turn(WAIT)

    # values

    def values_came(self) -> None:
        """Some of the values that were wanted are there."""
        if self._phase == WAIT:
            self.turn(PULL)
