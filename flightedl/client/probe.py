"""Time that a trainer's loop spends in the script, waiting for data, and communicating with pservers.

Communication has three phases. The trainer *pushes* until every pserver has acknowledged the whole gradient. Then it
*waits* until the first values arrive, which in synchronous mode happens when the other members of the round have
pushed. Then it *pulls* until all values have arrived. Values that arrive together with acknowledgments are counted as
part of the push; this happens in asynchronous mode, and in rounds of small values that close within two milliseconds.

Each time is recorded once and used by several readers. The user's thread switches between activities
(:class:`StepProbe`), and the threads that communicate with pservers record the phases (``waiting.Conversation``). The
progress report and the metrics page show the sums, a tracer receives the phases, and ``waiting.Waits`` detects a
pserver that does not answer. The time of an activity is added when the activity ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from flightedl.client.waiting import Conversation

#: Activities of the loop: "data", which is waiting for the next batch or for membership, and "script", which is running
#: the user's code.
DATA, SCRIPT = "data", "script"
#: Activities that communicate with the parameter servers, which are also the phases of a conversation with one of them.
PUSH, WAIT, PULL = "push", "wait", "pull"


class StepProbe:
    """Seconds that a trainer's loop spent in each activity. One thread writes; another one calls ``take``.

    Args:
        now: The process's clock, in seconds.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._since = now()
        #: The current activity; empty while no time is counted.
        self.doing = ""
        #: True until the first activity begins.
        self.is_unused = True
        #: Seconds per activity since the loop began. Only one thread writes them, so no lock is needed.
        self._seconds: dict[str, float] = {}
        #: Conversations with the pservers, by the pserver's index.
        self.conversations: list[Conversation] = []
        #: Seconds that ``take`` has returned.
        self._taken: dict[str, float] = {}

    def turn(self, what: str) -> str:
        """Add the time since the last switch to the current activity and begin another. Return the previous one."""
        before = self.doing
        if before != what:
            now = self._now()
            if before:
                self._seconds[before] = self._seconds.get(before, 0.0) + now - self._since
            self.doing, self._since, self.is_unused = what, now, False
        return before

    def transferred(self, then: str) -> None:
        """End the PUSH activity and begin the activity ``then``.

        The phases have the times of the longest conversation, because the loop continues when all conversations have
        ended.
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
        """Add seconds that could not be reported. The next ``take`` includes them."""
        self._taken = {what: taken - seconds.get(what, 0.0) for what, taken in self._taken.items()}


def _total_s(conversation: Conversation) -> float:
    return sum(conversation.seconds.values())
