"""Where the time of one conversation with a pserver goes: sending, waiting for others, receiving.

A gradient is *pushed* until the pserver has answered for all of it. The trainer then *waits* until values come, which
in synchronous mode is when the other members of the round have pushed. From the first values on it *pulls*. Values that
come with the answers to a push cost no time of their own: in asynchronous mode, and where a round of small values
closes within two milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable

from flightedl.process import tracing


class StepProbe:
    """The phases of conversations with one pserver, one conversation at a time. For one thread.

    Args:
        now: The process's clock, in seconds.
    """

    __slots__ = ("_now", "_since", "phase", "seconds")

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._since = 0.0
        #: PUSH, WAIT or PULL; empty before the first conversation.
        self.phase = ""
        #: Seconds of each phase of the newest conversation.
        self.seconds: dict[str, float] = {}

    def begin(self, phase: str) -> None:
        """Begin a conversation in ``phase``."""
        self.seconds = {}
        self.phase, self._since = phase, self._now()

    def turn(self, phase: str) -> None:
        """Account the time since the last turn to the present phase, and begin another."""
        now, before = self._now(), self.phase
        self.seconds[before] = self.seconds.get(before, 0.0) + now - self._since
        if tracing.tracer is not None:
            tracing.past(before, self._since, now)
        self.phase, self._since = phase, now
