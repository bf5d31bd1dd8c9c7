"""The tasks of one trainer: what it holds, what it asks for and when, and what it has to report.

The feed holds as many tasks as last until there is a master again, should it die now: by the time that the tasks
before took (``domain.queue.fair_share``). At least two, the one being trained and the next; near the end of an epoch no
more, unless they are short. They are begun in the order in which they came, and none before all but one of those before
it are reported: the master takes whatever else a dead trainer held for untouched.

A report goes out at once (others may wait for this trainer to leave), a request when there is room. Reports stay in
the feed until the master has answered them, so a master's death loses none; the attempt number makes repeating them
safe. Who holds nothing lets the master hold the call, so that it hears of work as soon as there is any: first for
``MOMENT_S``, for which it may stay a member (``domain.master.training``), then for longer.

What this trainer gives up is *handed back* with the next report, never just forgotten: the master tells an attempt
again that a request does not list, and would tell the same one. Should that happen all the same (an answer was lost),
it comes as another :class:`AssignedTask`, and is another *reading*: whoever read a part of the first one has read
nothing of the second. So everything here is about an ``AssignedTask``, not about its attempt.

What the master says of the next epoch may be opened and read meanwhile (``begin_ahead``). It is nothing that the feed
holds: what is begun is only what was given, when it was given, whether it was read before or not.

The feed does not know whether a batch was pushed; ``finished`` is the caller's word that all of a task was.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from flightedl.domain.exactly_once.intervals import IntervalSet
from flightedl.domain.queue.fair_share import count_to_ask_for, wanted_count
from flightedl.domain.retries import is_transient
from flightedl.errors import FlightedlError
from flightedl.messages.tasks import (
    MOMENT_S,
    STRETCHES_LIMIT,
    Assignment,
    DoneBatches,
    FailedTask,
    FinishedTask,
    ReturnedTask,
    TasksReply,
    TasksTicket,
)

#: Tasks that may be begun at once: one is trained, one is read ahead.
BEGUN_COUNT = 2
#: How many of the newest tasks make the pace.
_PACE_COUNT = 4
_RETRY_S = 0.2
#: How long the master may hold the request of a trainer that has nothing to do or report.
_IDLE_WAIT_S = 2.0
#: A loop that was left by an exception reports its task within this time.
_KEPT_S = 1.0
#: The way to the master is kept open so long after something was said.
_OPEN_S = 1.0
#: Longer texts of errors are cut.
ERROR_LENGTH = 1000
#: The master hears at most this often which batches of tasks that are not finished are done. If it is slow, a pause is
#: this many times as long as it took to answer, at most ``_TELL_CEILING_S``.
_TELL_S = 0.2
_TELL_PAUSES = 4
_TELL_CEILING_S = 2.0


@dataclass(frozen=True, slots=True)
class Reports:
    """What has to be told to the master."""

    finished: tuple[FinishedTask, ...] = ()
    failed: tuple[FailedTask, ...] = ()
    returned: tuple[ReturnedTask, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.finished or self.failed or self.returned)

    def without(self, sent: Reports) -> Reports:
        """What is still to be told after ``sent`` was."""
        return Reports(
            tuple(report for report in self.finished if report not in sent.finished),
            tuple(report for report in self.failed if report not in sent.failed),
            tuple(report for report in self.returned if report not in sent.returned),
        )

    @property
    def attempts(self) -> frozenset[int]:
        """The attempts that they are about."""
        told: list[FinishedTask | FailedTask | ReturnedTask] = [*self.finished, *self.failed, *self.returned]
        return frozenset(report.attempt for report in told)


class AssignedTask:
    """A piece of work as it was told once, and so one reading of it; known by ``number``.

    Args:
        assignment: As the master has told it.
        number: Count of what the feed was told.
    """

    __slots__ = ("assignment", "number")

    def __init__(self, assignment: Assignment, number: int = 0) -> None:
        self.assignment = assignment
        self.number = number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AssignedTask) and other.number == self.number

    def __hash__(self) -> int:
        return self.number


@dataclass(frozen=True, slots=True)
class Ask:
    """Report to the master, and ask it for work."""

    reports: Reports
    #: Attempts that are held beside those reported.
    holding: tuple[int, ...]
    want: int
    #: How long the master may hold the call.
    wait_s: float
    #: Counts the registrations: an answer to an earlier one gives nothing.
    registration: int
    #: (attempt, stretches of batches that are done): of tasks that are not finished.
    done: tuple[tuple[int, tuple[tuple[int, int], ...]], ...] = ()

    def ticket(
        self, trainer: str, generation: int, evaluation: str = "", round_: int = 0, life: int = 0
    ) -> TasksTicket:
        """The message, under the registration that the trainer has by now; ``round_`` and ``life``: see there."""
        return TasksTicket(
            trainer=trainer,
            generation=generation,
            evaluation=evaluation,
            life=life,
            finished=list(self.reports.finished),
            failed=list(self.reports.failed),
            returned=list(self.reports.returned),
            done=[DoneBatches(attempt=attempt, stretches=list(stretches)) for attempt, stretches in self.done],
            holding=list(self.holding),
            want=self.want,
            wait_s=self.wait_s,
            round=round_,
        )


@dataclass(frozen=True, slots=True)
class Rest:
    """There will be nothing to say for a while: let go of the way to the master."""


@dataclass(frozen=True, slots=True)
class LookAgain:
    """Nothing to do until something happens, at most until ``at`` (infinite: however long that takes)."""

    at: float


@dataclass(frozen=True, slots=True)
class Over:
    """There is nothing more to say, ever."""


NextStep = Ask | Rest | LookAgain | Over


class Feed:
    """Not thread-safe. ``now`` never goes back.

    Args:
        cover_s: How long the tasks held should last while no master answers.
    """

    def __init__(self, cover_s: float = 0.0) -> None:
        self._cover_s = cover_s
        self._reports = Reports()
        #: By attempt, what this trainer holds: given and not yet reported, oldest first.
        self._held: dict[int, AssignedTask] = {}
        self._registration = 0
        self._told_count = 0
        #: By attempt, the done batches of tasks that are held, or given up without an answer yet.
        self._done: dict[int, IntervalSet] = {}
        #: Something of that was not told.
        self._is_done_news = False
        #: When it may be told.
        self._tell_at = -math.inf
        #: When the newest message that told of done batches was sent, of those that the master has answered.
        self.told_at = -math.inf
        #: Those of them that nobody has begun.
        self._ready: deque[AssignedTask] = deque()
        #: What may be read before it is given, and nobody reads yet; and all of that since something else was told.
        self._ahead: deque[Assignment] = deque()
        self._told_ahead: list[Assignment] = []
        #: Since when the oldest one held is the oldest.
        self._since_s = 0.0
        #: From one finished task to the next, about; None: not known.
        self._pace_s: float | None = None
        self._paced_count = 0
        self._is_done = False
        self._is_closing = False
        self._not_before = 0.0
        self._asked_at = 0.0
        #: When the way to the master is let go of; infinite: it is not open.
        self._rest_at = math.inf
        #: When the last task of a loop that was left goes back.
        self._keep_until = 0.0
        self._error: Exception | None = None
        self._trouble = ""

    # what the reader asks

    def begin(self) -> AssignedTask | None:
        """The next task, which the caller begins now; None: there is none, or two are begun and not reported."""
        return self._ready.popleft() if self._may_begin() else None

    def _may_begin(self) -> bool:
        return bool(self._ready) and len(self._held) - len(self._ready) < BEGUN_COUNT

    def begin_ahead(self) -> Assignment | None:
        """What the caller may read now, to have it when it is given: never to be trained before. None: nothing."""
        return self._ahead.popleft() if self._ahead and not self._may_begin() else None

    @property
    def has_news(self) -> bool:
        """Whether a reader that waits has something to do: to begin a task, to read ahead, or to end."""
        is_over = self._is_closing or (not self._ready and (self._is_done or self._error is not None))
        return is_over or bool(self._ahead) or self._may_begin()

    @property
    def error(self) -> Exception | None:
        """What ended the feed, when everything that was given before is begun."""
        return None if self._ready else self._error

    @property
    def is_done(self) -> bool:
        """True when all epochs are done everywhere."""
        return self._is_done and not self._ready

    @property
    def trouble(self) -> str:
        """Why the master cannot be asked; empty when it answers."""
        return self._trouble

    @property
    def held(self) -> tuple[AssignedTask, ...]:
        """All that is held, oldest first."""
        return tuple(self._held.values())

    @property
    def reports(self) -> Reports:
        """What the master has not answered."""
        return self._reports

    def is_held(self, task: AssignedTask) -> bool:
        """False when this task was taken away or handed back: drop what is left of it, also of its end."""
        held = self._held.get(task.assignment.attempt)
        return held is not None and held.number == task.number

    # what the trainer reports

    def finished(
        self,
        task: AssignedTask,
        pservers: Sequence[int],
        now: float,
        metrics: Mapping[str, tuple[float, float]] | None = None,
    ) -> None:
        """Every batch of this task is acknowledged by all pservers, whose generations are given.

        ``metrics``: of an evaluation, name -> (weighted sum, weight).
        """
        if not self.is_held(task):
            return
        a = task.assignment
        report = FinishedTask(
            epoch=a.epoch,
            position=a.position,
            attempt=a.attempt,
            pservers=list(pservers),
            metrics=dict(metrics or {}),
        )
        self._note_pace(now)
        self._drop(task, now)
        self._done.pop(a.attempt, None)
        self._reports = replace(self._reports, finished=(*self._reports.finished, report))

    def batch_done(self, task: AssignedTask, number: int, *, is_urgent: bool = False) -> bool:
        """A batch of this task is done, and no pserver is there to know it: tell the master soon, or now if urgent.

        Returns True if the next step may be another one because of that.
        """
        had_news = self._is_done_news
        if self.is_held(task):
            if (done := self._done.get(task.assignment.attempt)) is None:
                done = self._done[task.assignment.attempt] = IntervalSet()
            self._is_done_news = done.add(number, number + 1) > 0 or had_news
        if is_urgent:
            self._tell_at = -math.inf
        return self._is_done_news and (is_urgent or not had_news)

    def failed(self, task: AssignedTask, error: str, batch: int | None, now: float, place: str = "") -> None:
        """This task cannot be done by this trainer; ``place``: where the user's code raised, if it did."""
        if not self.is_held(task):
            return
        a = task.assignment
        report = FailedTask(
            epoch=a.epoch,
            position=a.position,
            attempt=a.attempt,
            error=error[:ERROR_LENGTH],
            batch=batch,
            place=place,
        )
        self._drop(task, now)
        self._reports = replace(self._reports, failed=(*self._reports.failed, report))

    def hand_back(self, task: AssignedTask, now: float) -> None:
        """This trainer does not go on with this task, and did no harm to it."""
        if self.is_held(task):
            self._drop(task, now)
            self._return([task.assignment])

    def _drop(self, task: AssignedTask, now: float) -> None:
        del self._held[task.assignment.attempt]
        if task in self._ready:
            self._ready.remove(task)
        self._since_s = now

    def _return(self, assignments: Iterable[Assignment]) -> None:
        returned = [ReturnedTask(epoch=a.epoch, position=a.position, attempt=a.attempt) for a in assignments]
        self._reports = replace(self._reports, returned=(*self._reports.returned, *returned))

    def _note_pace(self, now: float) -> None:
        """The oldest task is finished."""
        self._paced_count = min(self._paced_count + 1, _PACE_COUNT)
        last_s = self._pace_s or 0.0
        self._pace_s = last_s + (now - self._since_s - last_s) / self._paced_count

    def registered_again(self) -> None:
        """All that is held was given to a registration that is over; so is the answer that is under way."""
        self._registration += 1
        self._hand_back_all()
        self._done.clear()

    def retire(self, kept: AssignedTask | None, now: float) -> None:
        """Take no more work and hand back all but ``kept``, which goes back a moment later unless it is reported."""
        self._is_closing = True
        self._hand_back_all(kept)
        self._keep_until = now + _KEPT_S

    def close(self) -> None:
        """Hand back all that is held; the last reports are still to be sent."""
        self._is_closing = True
        self._hand_back_all()

    def _hand_back_all(self, kept: AssignedTask | None = None) -> None:
        self._ahead.clear()
        self._return([held.assignment for held in self._held.values() if held != kept])
        self._held = {attempt: held for attempt, held in self._held.items() if held == kept}
        self._ready.clear()

    # what is said to the master

    def next_step(self, now: float) -> NextStep:
        """What to do now; not to be asked while an ``Ask`` is under way."""
        if self._error is not None:
            return Over()
        if self._is_closing and not self._reports:
            if self._held and now < self._keep_until:
                return LookAgain(self._keep_until)
            self._hand_back_all()
            if not self._reports:
                return Over()
        room = self._room()
        may_ask = now >= self._not_before
        # A trainer that holds work must be able to report it at once: it does not let itself be held.
        is_due = bool(self._reports) or (self._is_done_news and now >= self._tell_at)
        if is_due and (may_ask or not self._trouble):
            return self._ask(room, MOMENT_S if room and not self._held else 0.0, now)
        if room and may_ask:
            return self._ask(room, 0.0 if self._held else _IDLE_WAIT_S, now)
        if now >= self._rest_at:
            self._rest_at = math.inf
            return Rest()
        ask_at = self._not_before if room or self._reports else math.inf
        tell_at = max(self._tell_at, self._not_before if self._trouble else now) if self._is_done_news else math.inf
        return LookAgain(min(ask_at, tell_at, self._rest_at))

    def _ask(self, want: int, wait_s: float, now: float) -> Ask:
        self._asked_at, self._tell_at, self._is_done_news = now, now + _TELL_S, False
        done = tuple((attempt, tuple(done)[:STRETCHES_LIMIT]) for attempt, done in self._done.items())
        return Ask(self._reports, tuple(self._held), want, wait_s, self._registration, done)

    def _room(self) -> int:
        """How many tasks to ask for."""
        if self._is_closing or self._is_done:
            return 0
        return count_to_ask_for(wanted_count(self._pace_s, self._cover_s), len(self._held))

    def answered(self, ask: Ask, reply: TasksReply, now: float) -> None:
        """The master has answered."""
        self._trouble = ""
        self._rest_at = now + _OPEN_S
        self._not_before = now + self._pause_s(ask, reply, now)
        self._reports = self._reports.without(ask.reports)
        self._lose({lost.attempt for lost in reply.lost}, now)
        kept = self._held.keys() | self._reports.attempts
        self._done = {attempt: done for attempt, done in self._done.items() if attempt in kept}
        if ask.done:
            self.told_at = self._asked_at
            self._tell_at = max(self._tell_at, now + min(_TELL_PAUSES * (now - self._asked_at), _TELL_CEILING_S))
        self._is_done = reply.outcome == "epochs_done"
        if self._is_done:
            self._held.clear()
            self._ready.clear()
        if self._is_closing or ask.registration != self._registration:
            self._return(reply.assignments)
            return
        if reply.ahead and reply.ahead != self._told_ahead:
            self._told_ahead = reply.ahead
            self._ahead = deque(reply.ahead)
        if not self._held:
            self._since_s = now
        for assignment in reply.assignments:
            # What is reported since the question was sent goes that way; a master that does not take the report tells
            # the attempt again. Attempts are given a second time where etcd went back.
            if assignment.attempt not in self._reports.attempts:
                self._told_count += 1
                self._hold(AssignedTask(assignment, self._told_count))

    def _pause_s(self, ask: Ask, reply: TasksReply, now: float) -> float:
        """After how long to ask again, unless there is something to report before."""
        if len(reply.assignments) >= ask.want:
            return 0.0
        # A master that has held the call as long as it might knows no better time.
        has_waited = not reply.assignments and 0 < ask.wait_s <= now - self._asked_at
        return 0.0 if has_waited else reply.retry_after_s

    def _lose(self, attempts: set[int], now: float) -> None:
        """The master took these away."""
        if not attempts:
            return
        oldest = next(iter(self._held), None)
        self._held = {attempt: held for attempt, held in self._held.items() if attempt not in attempts}
        self._ready = deque(task for task in self._ready if task.assignment.attempt in self._held)
        if oldest in attempts:
            self._since_s = now

    def _hold(self, task: AssignedTask) -> None:
        attempt = task.assignment.attempt
        if attempt in self._held:
            # Told twice: whatever was read of the first telling counts for nothing.
            self._ready = deque(each for each in self._ready if each.assignment.attempt != attempt)
        self._held[attempt] = task
        self._ready.append(task)

    def ask_failed(self, error: Exception, now: float) -> None:
        """The master could not be asked, or refused: ask again a little later, unless that cannot help."""
        self._rest_at = now + _OPEN_S
        self._is_done_news = bool(self._done)
        if self._is_closing or not isinstance(error, FlightedlError) or not is_transient(error):
            self._error = error
            return
        self._trouble = str(error)
        self._not_before = now + _RETRY_S

    def check(self) -> None:
        """Assert the invariants."""
        for attempt, task in self._held.items():
            assert task.assignment.attempt == attempt
        assert all(self.is_held(task) for task in self._ready), "what is ready is held"
        assert len(set(self._ready)) == len(self._ready), "nothing is begun twice"
        assert not self._held.keys() & self._reports.attempts, "what is reported is not held any more"
        assert self._done.keys() <= self._held.keys() | self._reports.attempts
        assert not (self._is_closing and self._ready), "a feed that closes begins nothing"
