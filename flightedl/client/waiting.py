"""Tell the user what the program is waiting for, and end a wait that takes too long.

A waiting thread is often blocked in a call to a frozen or disconnected server. So another thread checks all waits
(``Waits.look``) and reports which server has not answered. It cannot abort the call, which has its own deadline of at
most half a minute; the wait ends only after that deadline.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence

from flightedl.errors import FlightedlError, JobFailedError, UnavailableError
from flightedl.ports import Clock
from flightedl.process import tracing

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.5


class Waiting:
    """A wait of the user's thread. After a silence, it prints each new reason, and finally raises an error.

    Args:
        clock: The process's clock.
        say_after_s: Seconds before the first message.
        give_up_s: Seconds after which ``because`` raises UnavailableError with the most recent reason.
        report: Receives each reason, which is also printed to stderr, and an empty string when the wait is over.
        ended: Called with this wait when the wait is over.
        job_over: Returns the reason why the awaited event can never happen; empty while it can.
    """

    __slots__ = (
        "_called",
        "_clock",
        "_ended",
        "_give_up_s",
        "_job_over",
        "_lock",
        "_pause_s",
        "_printed",
        "_report",
        "_say_after_s",
        "_start",
        "_trouble_since",
        "reported",
        "thread",
    )

    def __init__(
        self,
        clock: Clock,
        say_after_s: float,
        give_up_s: float,
        report: Callable[[str], None],
        ended: Callable[[Waiting], None] = lambda _: None,
        job_over: Callable[[], str] = lambda: "",
    ) -> None:
        self._clock = clock
        self._say_after_s = say_after_s
        self._give_up_s = give_up_s
        self._report = report
        #: The thread that waits.
        self.thread = threading.get_ident()
        self._pause_s = _FIRST_PAUSE_S
        self._start = clock.now()
        self._trouble_since: float | None = self._start
        #: The reason that is currently being reported (empty if there is none), and the reason that was printed last.
        self.reported = self._printed = ""
        self._ended = ended
        self._job_over = job_over
        #: Server that the current attempt is calling, and the time when the call began; None between attempts.
        self._called: tuple[str, float] | None = None
        #: Held while a reason is reported, because the waiting thread and the checking thread both report.
        self._lock = threading.Lock()

    def since(self, began: float) -> Waiting:
        """Set the start of this wait to an earlier time, at which the first attempt was made. Return the wait."""
        self._start = self._trouble_since = began
        return self

    def calls(self, whom: str, since: float | None = None) -> None:
        """Record that the attempt is waiting for an answer from ``whom``."""
        self._called = whom, self._clock.now() if since is None else since

    def look(self) -> None:
        """Report the server if its answer has been missing for too long. Called by the checking thread."""
        now = self._clock.now()
        with self._lock:
            called = self._called
            if called is not None and now - called[1] >= self._say_after_s:
                self._tell_user(f"{called[0]} to answer", now - self._start)

    def pause(self) -> None:
        """Sleep a third longer than the last time, so that the total wait is at most about a third too long."""
        self._clock.sleep(self._pause_s)
        self._pause_s = min(self._pause_s * 4 / 3, _LONGEST_PAUSE_S)

    def because(self, reason: str | FlightedlError) -> None:
        """Record why the last attempt failed.

        Raises:
            JobFailedError: the job is over, so the awaited event can never happen.
            UnavailableError: the wait took longer than ``give_up_s``.
        """
        now = self._clock.now()
        self._called = None
        if why := self._job_over():
            self.over()
            raise JobFailedError(why)
        if self._trouble_since is None:
            self._trouble_since = now
        if now - self._trouble_since >= self._give_up_s:
            self.over()
            raise UnavailableError(f"gave up after {now - self._trouble_since:.0f} s (give_up_s): {reason}")
        with self._lock:
            self._tell_user(str(reason), now - self._start)

    def _tell_user(self, text: str, waited: float) -> None:
        if waited < self._say_after_s:
            return
        if text != self.reported:
            self.reported = text
            self._report(text)
        if text != self._printed:
            self._printed = text
            sys.stderr.write(f"flightedl: waiting ({waited:.0f} s): {text}\n")
            sys.stderr.flush()

    def patiently(self, reason: str) -> None:
        """Like ``because``, but without a limit. For normal waits, such as waiting for other trainers to finish."""
        self._called = None
        with self._lock:
            self._tell_user(reason, self._clock.now() - self._start)
        self._trouble_since = None

    def over(self) -> None:
        self.withdraw()
        self._printed = ""
        self._ended(self)

    def withdraw(self) -> None:
        """Clear the reported reason, so that the next reason is reported even if it is the same."""
        with self._lock:
            self._called = None
            if self.reported:
                self.reported = ""
                self._report("")


class Conversation:
    """Phases of conversations with one pserver. At most one conversation is open, and only one thread may write.

    Args:
        index: Index of the pserver.
        now: The process's clock, in seconds.
    """

    __slots__ = ("_now", "_since", "asked_at", "phase", "seconds", "thread", "waiting", "whom")

    def __init__(self, index: int, now: Callable[[], float]) -> None:
        self._now = now
        self._since = 0.0
        #: The pserver's name, for people.
        self.whom = f"pserver {index}"
        #: Current phase of the conversation (see ``probe``); empty between conversations.
        self.phase = ""
        #: Seconds of each phase of the most recent conversation.
        self.seconds: dict[str, float] = {}
        #: Time at which the conversation's first request began; None after that request has ended.
        self.asked_at: float | None = None
        #: The thread of the conversation.
        self.thread = 0
        #: The wait that reports the first request to the user if that request takes long.
        self.waiting: Waiting | None = None

    def begin(self, phase: str) -> None:
        self.seconds = {}
        self.thread = threading.get_ident()
        self.phase = phase
        self._since = self.asked_at = self._now()

    def turn(self, phase: str) -> None:
        """Add the time since the last switch to the current phase, and begin another one."""
        now, before = self._now(), self.phase
        self.seconds[before] = self.seconds.get(before, 0.0) + now - self._since
        if tracing.tracer is not None:
            tracing.past(before, self._since, now)
        self.phase, self._since = phase, now


class Waits:
    """Waits of all threads of a trainer, at most one per thread. Thread-safe.

    When a thread begins another wait, the previous one is no longer checked, even if it has not ended. An outer wait is
    reported again when it gives another reason. If several threads wait, the reason of the first wait is reported.

    Args: as for :class:`Waiting`.
    """

    def __init__(
        self,
        clock: Clock,
        say_after_s: float,
        give_up_s: float,
        report: Callable[[str], None],
        job_over: Callable[[], str] = lambda: "",
    ) -> None:
        self._clock = clock
        self._job_over = job_over
        self._say_after_s = say_after_s
        self._give_up_s = give_up_s
        self._report = report
        #: Thread -> its newest wait.
        self._open: dict[int, Waiting] = {}
        #: The first request of a conversation gets a ``Waiting`` only when ``look`` finds that it takes long.
        self._conversations: Sequence[Conversation] = ()

    def watch(self, conversations: Sequence[Conversation]) -> None:
        self._conversations = conversations

    def begin(self) -> Waiting:
        if (left := self._open.get(threading.get_ident())) is not None:
            left.withdraw()
        waiting = self._made()
        self._open[waiting.thread] = waiting
        return waiting

    def _made(self) -> Waiting:
        waiting = Waiting(
            self._clock,
            self._say_after_s,
            self._give_up_s,
            lambda text: self._report_of(waiting, text),
            self._end,
            self._job_over,
        )
        return waiting

    def _report_of(self, waiting: Waiting, text: str) -> None:
        if text:
            self._open[waiting.thread] = waiting
        self._report(next((each.reported for each in list(self._open.values()) if each.reported), ""))

    def _end(self, waiting: Waiting) -> None:
        if self._open.get(waiting.thread) is waiting:
            self._open.pop(waiting.thread, None)

    def calls(self, whom: str) -> None:
        """Record that the calling thread is waiting for a server."""
        if (waiting := self._open.get(threading.get_ident())) is not None:
            waiting.calls(whom)

    def look(self) -> None:
        """Make each wait report a server whose answer is missing."""
        for waiting in list(self._open.values()):
            waiting.look()
        for each in self._conversations:
            asked_at = each.asked_at
            if asked_at is None or each.waiting is not None or self._clock.now() - asked_at < self._say_after_s:
                continue
            waiting = self._made().since(asked_at)
            waiting.thread = each.thread
            waiting.calls(each.whom, asked_at)
            self._open[waiting.thread] = each.waiting = waiting
            waiting.look()
            if each.asked_at != asked_at:
                # The answer arrived during the report, so the waiting thread may not have seen the report.
                waiting.over()
