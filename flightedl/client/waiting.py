"""Tells the user what the program waits for, and ends the wait when it takes too long.

A thread that waits is often inside a call, to a server that is frozen or cut off. So another thread looks at all waits
(``Waits.look``) and says whose answer is missing. It cannot end the call: that has a deadline of its own, of half a
minute at most, and only then a wait is given up.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence

from flightedl.client.probe import Conversation
from flightedl.errors import FlightedlError, JobFailedError, UnavailableError
from flightedl.ports import Clock

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.5


class Waiting:
    """One wait of the user's thread: silent at first, then one line when its reason changes, then an error.

    Args:
        clock: The process's clock.
        say_after_s: Silence until then.
        give_up_s: After that, ``because`` raises UnavailableError with the last reason.
        tell: Where the reason goes beside stderr ("" when the wait is over); the session reports it to the master.
        ended: Called with this one when the wait is over.
        job_over: Why what is waited for can never come; empty: it may.
    """

    __slots__ = (
        "_asked",
        "_clock",
        "_ended",
        "_give_up_s",
        "_job_over",
        "_lock",
        "_pause_s",
        "_printed",
        "_say_after_s",
        "_start",
        "_tell",
        "_trouble_since",
        "said",
        "thread",
    )

    def __init__(
        self,
        clock: Clock,
        say_after_s: float,
        give_up_s: float,
        tell: Callable[[str], None],
        ended: Callable[[Waiting], None] = lambda _: None,
        job_over: Callable[[], str] = lambda: "",
    ) -> None:
        self._clock = clock
        self._say_after_s = say_after_s
        self._give_up_s = give_up_s
        self._tell = tell
        #: The thread that waits.
        self.thread = threading.get_ident()
        self._pause_s = _FIRST_PAUSE_S
        self._start = clock.now()
        self._trouble_since: float | None = self._start
        #: What is told now; empty if nothing is. And what was printed last.
        self.said = self._printed = ""
        self._ended = ended
        self._job_over = job_over
        #: Whose answer the present attempt needs, and since when; None between attempts.
        self._asked: tuple[str, float] | None = None
        #: Over what is said: the thread that waits and the one that looks at it both say something.
        self._lock = threading.Lock()

    def since(self, began: float) -> Waiting:
        """Set when the wait began, and return it: its first attempt was made before there was a reason to wait."""
        self._start = self._trouble_since = began
        return self

    def asks(self, whom: str, since: float | None = None) -> None:
        """The attempt that begins needs an answer of ``whom``."""
        self._asked = whom, self._clock.now() if since is None else since

    def look(self) -> None:
        """Say whose answer is missing, if it has been for too long. Called by another thread."""
        now = self._clock.now()
        with self._lock:
            asked = self._asked
            if asked is not None and now - asked[1] >= self._say_after_s:
                self._say(f"{asked[0]} to answer", now - self._start)

    def pause(self) -> None:
        """Sleep between two attempts, each time a third longer: the wait lasts about a third too long at most."""
        self._clock.sleep(self._pause_s)
        self._pause_s = min(self._pause_s * 4 / 3, _LONGEST_PAUSE_S)

    def because(self, reason: str | FlightedlError) -> None:
        """The attempt just made did not succeed for this reason.

        Raises:
            JobFailedError: the job is over: what is waited for can never come.
            UnavailableError: the wait took longer than ``give_up_s``.
        """
        now = self._clock.now()
        self._asked = None
        if why := self._job_over():
            self.over()
            raise JobFailedError(why)
        if self._trouble_since is None:
            self._trouble_since = now
        if now - self._trouble_since >= self._give_up_s:
            self.over()
            raise UnavailableError(f"gave up after {now - self._trouble_since:.0f} s (give_up_s): {reason}")
        with self._lock:
            self._say(str(reason), now - self._start)

    def _say(self, text: str, waited: float) -> None:
        if waited < self._say_after_s:
            return
        if text != self.said:
            self.said = text
            self._tell(text)
        if text != self._printed:
            self._printed = text
            sys.stderr.write(f"flightedl: waiting ({waited:.0f} s): {text}\n")
            sys.stderr.flush()

    def patiently(self, reason: str) -> None:
        """Like ``because`` for a wait that is in order, such as for the others to finish: it never gives up."""
        self._asked = None
        with self._lock:
            self._say(reason, self._clock.now() - self._start)
        self._trouble_since = None

    def over(self) -> None:
        """End the wait. It may begin again."""
        self.take_back()
        self._printed = ""
        self._ended(self)

    def take_back(self) -> None:
        """Take back what was told; the next reason tells it again."""
        with self._lock:
            self._asked = None
            if self.said:
                self.said = ""
                self._tell("")


class Waits:
    """The waits of all threads of a trainer, one of each at a time. Thread-safe.

    A thread that begins another wait does not wait for what it waited for before, even if that wait was never ended. An
    outer wait is told again with its next reason. Of several threads, what the first one waits for is told.

    Args: as of :class:`Waiting`.
    """

    def __init__(
        self,
        clock: Clock,
        say_after_s: float,
        give_up_s: float,
        tell: Callable[[str], None],
        job_over: Callable[[], str] = lambda: "",
    ) -> None:
        self._clock = clock
        self._job_over = job_over
        self._say_after_s = say_after_s
        self._give_up_s = give_up_s
        self._tell = tell
        #: Thread -> its newest wait.
        self._open: dict[int, Waiting] = {}
        #: A conversation's first request is waited for without a ``Waiting``, unless ``look`` finds that it takes long.
        self._conversations: Sequence[Conversation] = ()

    def watch(self, conversations: Sequence[Conversation]) -> None:
        """Look at these conversations with the pservers, too."""
        self._conversations = conversations

    def begin(self) -> Waiting:
        """This thread begins to wait."""
        if (left := self._open.get(threading.get_ident())) is not None:
            left.take_back()
        waiting = self._made()
        self._open[waiting.thread] = waiting
        return waiting

    def _made(self) -> Waiting:
        waiting = Waiting(
            self._clock,
            self._say_after_s,
            self._give_up_s,
            lambda text: self._tell_of(waiting, text),
            self._end,
            self._job_over,
        )
        return waiting

    def _tell_of(self, waiting: Waiting, text: str) -> None:
        if text:
            self._open[waiting.thread] = waiting
        self._tell(next((each.said for each in list(self._open.values()) if each.said), ""))

    def _end(self, waiting: Waiting) -> None:
        if self._open.get(waiting.thread) is waiting:
            self._open.pop(waiting.thread, None)

    def asks(self, whom: str) -> None:
        """This thread asks somebody for something."""
        if (waiting := self._open.get(threading.get_ident())) is not None:
            waiting.asks(whom)

    def look(self) -> None:
        """Let all waits say whose answer is missing."""
        for waiting in list(self._open.values()):
            waiting.look()
        for each in self._conversations:
            asked_at = each.asked_at
            if asked_at is None or each.waiting is not None or self._clock.now() - asked_at < self._say_after_s:
                continue
            waiting = self._made().since(asked_at)
            waiting.thread = each.thread
            waiting.asks(each.whom, asked_at)
            self._open[waiting.thread] = each.waiting = waiting
            waiting.look()
            if each.asked_at != asked_at:
                # The answer came while the wait was told, and its thread may have seen no wait.
                waiting.over()
