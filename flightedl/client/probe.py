"""The time that a trainer's loop spends waiting for data, in the script, and with the parameter servers.

Time with the parameter servers has three phases. The trainer *pushes* until each pserver has answered for the whole
gradient. It then *waits* until values arrive; in synchronous mode, they arrive when the other members of the round have
pushed. From the first values on, it *pulls*. Values that arrive with the answers to a push are not measured separately;
this happens in asynchronous mode, and if a round of small values closes within two milliseconds.

Each time is recorded once, for all readers. The user's thread switches between activities (:class:`StepProbe`); the
thread that talks to a pserver records the phases (``waiting.Conversation``). The progress report and metrics page read
the sums, a tracer gets the phases, and ``waiting.Waits`` detects a pserver that has not answered for a long time. An
activity is counted when it is over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from flightedl.client.waiting import Conversation

#: Activities of the loop. "data": waiting for the next batch or for membership. "script": running the user's code.
DATA, SCRIPT = "data", "script"
#: Activities with the parameter servers, and phases of a conversation with one parameter server.
PUSH, WAIT, PULL = "push", "wait", "pull"


class StepProbe:
    """Seconds of each activity of one trainer's loop. The user's thread writes; one other thread calls ``take``.

    Args:
        now: The process's clock, in seconds.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._since = now()
        #: The current activity; empty if its time is not counted.
        self.doing = ""
        #: Seconds since the loop began. Only one thread writes them, so no lock is needed.
        self._seconds: dict[str, float] = {}
        #: The conversations with the pservers, by index.
        self.conversations: list[Conversation] = []
        #: Seconds that ``take`` has returned.
        self._taken: dict[str, float] = {}

    def turn(self, what: str) -> str:
        """Add the time since the last turn to the current activity and begin another; return the previous one."""
        before = self.doing
        if before != what:
            now = self._now()
            if before:
                self._seconds[before] = self._seconds.get(before, 0.0) + now - self._since
            self.doing, self._since = what, now
        return before

    def transferred(self, then: str) -> None:
        """End a PUSH activity, and begin ``then``.

        Its waits and pulls are those of the longest conversation, because the loop continues when all are over.
        """
        all_of_them = self.conversations
        longest = all_of_them[0] if len(all_of_them) == 1 else max(all_of_them, key=_total_s)
        now, seconds = self._now(), self._seconds
        pushing_s = now - self._since
        for phase, spent_s in longest.seconds.items():
            if phase != PUSH:
                seconds[phase] = seconds.get(phase, 0.0) + spent_s
                pushing_s -= spent_s
        seconds[PUSH] = seconds.get(PUSH, 0.0) + pushing_s
        self.doing, self._since = then, now

    def take(self) -> dict[str, float]:
        """Return the seconds of each activity since the last call."""
        total, taken = self._seconds.copy(), self._taken
        self._taken = total
        return {what: more for what, seconds in total.items() if (more := seconds - taken.get(what, 0.0))}

    def give_back(self, seconds: Mapping[str, float]) -> None:
        """Add seconds that could not be reported to the result of the next ``take``."""
        self._taken = {what: taken - seconds.get(what, 0.0) for what, taken in self._taken.items()}


def _total_s(conversation: Conversation) -> float:
    return sum(conversation.seconds.values())
