"""One trainer's tasks: which tasks it holds, when it requests more tasks, and what it reports.

If the master dies, the feed should have enough tasks to last until a new master is available. It estimates their number
from its pace so far (``domain.queue.fair_share``). It holds at least two tasks, the one being trained on and the next;
near the end of an epoch it holds no more than two, unless tasks are short.

Tasks begin in the order of assignment. A task begins only if at most one earlier task is unreported, because the master
assumes that a trainer that died had not begun its other tasks.

Reports are sent immediately, because other trainers may be waiting for this one to leave. Requests are sent when there
is room for more tasks. A report stays in the feed until the master has answered it, so no report is lost if the master
dies. Repeated reports do no harm.

The master holds the request of a trainer without tasks, so that the trainer learns of new work immediately: first for
``MOMENT_S``, during which it may stay a member (``domain.master.training``), then for longer.

Tasks that this trainer gives up are *handed back* in its next report and not just forgotten, because the master repeats
any assignment that a request does not list.

If the master nevertheless repeats an assignment, because an answer was lost, the task arrives as another
:class:`AssignedTask`. This is another *reading*, for which nothing has been read yet. Everything in this module
therefore refers to an ``AssignedTask`` and not to its attempt.

Tasks that the master announces for the next epoch can be opened and read early (``begin_ahead``). The feed does not
hold them: only an assignment begins a task, even if the task was read early.

The feed does not know which batches were pushed. The caller of ``finished`` is responsible for that.
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
from flightedl.marks import sometimes
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

#: Number of tasks that may be in progress simultaneously: one is trained on while the next is read.
BEGUN_COUNT = 2
#: Number of newest tasks from which the pace is computed.
_PACE_COUNT = 4
_RETRY_S = 0.2
#: Maximum number of seconds for which the master holds the request of a trainer that has neither tasks nor reports.
_IDLE_WAIT_S = 2.0
#: Seconds that a loop has to report its task after an exception has ended the loop.
_KEPT_S = 1.0
#: Seconds for which the connection to the master stays open after a call.
_OPEN_S = 1.0
#: Maximum length of an error message, in characters.
ERROR_LENGTH = 1000
#: Minimum number of seconds between reports of batches in unfinished tasks. If the master is slow, the interval is
#: ``_DONE_PAUSES`` times its response time, but at most ``_DONE_CEILING_S``.
_DONE_S = 0.2
_DONE_PAUSES = 4
_DONE_CEILING_S = 2.0


@dataclass(frozen=True, slots=True)
class Reports:
    """Reports that the master has not answered yet."""

    finished: tuple[FinishedTask, ...] = ()
    failed: tuple[FailedTask, ...] = ()
    returned: tuple[ReturnedTask, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.finished or self.failed or self.returned)

    def without(self, sent: Reports) -> Reports:
        return Reports(
            tuple(report for report in self.finished if report not in sent.finished),
            tuple(report for report in self.failed if report not in sent.failed),
            tuple(report for report in self.returned if report not in sent.returned),
        )

    @property
    def attempts(self) -> frozenset[int]:
        reports: list[FinishedTask | FailedTask | ReturnedTask] = [*self.finished, *self.failed, *self.returned]
        return frozenset(report.attempt for report in reports)


class AssignedTask:
    """One assignment of a task, identified by ``number``. The task is read once per assignment.

    Args:
        assignment: As received from the master.
        number: Number of assignments that the feed had received, including this one.
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
    """Send reports to the master, and request work."""

    reports: Reports
    #: Attempts that this trainer holds and has not reported.
    holding: tuple[int, ...]
    want: int
    #: Maximum number of seconds for which the master may hold the request.
    wait_s: float
    #: Number of registrations so far. Assignments in an answer to an earlier registration do not count.
    registration: int
    #: (attempt, ranges of finished batches) for each unfinished task with finished batches.
    done: tuple[tuple[int, tuple[tuple[int, int], ...]], ...] = ()

    def ticket(
        self, trainer: str, generation: int, evaluation: str = "", round_: int = 0, life: int = 0, witness: str = ""
    ) -> TasksTicket:
        """Return the message for the current registration. ``TasksTicket`` describes the other arguments."""
        return TasksTicket(
            trainer=trainer,
            generation=generation,
            witness=witness,
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
            reads_parts=True,
        )


@dataclass(frozen=True, slots=True)
class Rest:
    """Close the connection to the master, because the feed will have nothing to send for a while."""


@dataclass(frozen=True, slots=True)
class WaitForEvent:
    """Wait for an event, but no longer than until ``at``; infinity means no limit."""

    at: float


@dataclass(frozen=True, slots=True)
class Over:
    """Nothing more will be sent."""


NextStep = Ask | Rest | WaitForEvent | Over


class Feed:
    """State machine of one trainer's tasks. Not thread-safe. ``now`` never decreases.

    Args:
        cover_s: How long the held tasks should last while no master answers.
    """

    def __init__(self, cover_s: float = 0.0) -> None:
        self._cover_s = cover_s
        self._reports = Reports()
        #: Attempt -> held task (assigned and not reported), oldest first.
        self._held: dict[int, AssignedTask] = {}
        self._registration = 0
        self._assignment_count = 0
        #: Attempt -> finished batches, for tasks that are held, and for given-up tasks until the master has answered.
        self._done: dict[int, IntervalSet] = {}
        #: True if ``_done`` contains batches that have not been reported.
        self._is_done_news = False
        #: When these may be reported.
        self._report_done_at = -math.inf
        #: Time at which the newest answered message with finished batches was sent.
        self.reported_at = -math.inf
        #: Held tasks that have not begun.
        self._ready: deque[AssignedTask] = deque()
        #: Announced tasks that are not being read yet, and the newest announcement.
        self._ahead: deque[Assignment] = deque()
        self._announced: list[Assignment] = []
        #: Time at which the task that is now the oldest held task became the oldest.
        self._since_s = 0.0
        #: Estimated seconds per task; None if unknown.
        self._pace_s: float | None = None
        self._paced_count = 0
        self._is_done = False
        self._is_closing = False
        self._not_before = 0.0
        self._asked_at = 0.0
        #: Time at which to close the connection to the master; infinite if it is closed.
        self._rest_at = math.inf
        #: Time at which to hand back the last task of an abandoned loop.
        self._keep_until = 0.0
        self._error: Exception | None = None
        self._trouble = ""
        #: Why the master assigns no tasks although there are some; empty if it does, or if the reason is unknown.
        self.waits_for = ""

    # for the reader

    def begin(self) -> AssignedTask | None:
        """Begin and return the next task. None if there is no task, or if two tasks that have begun are unreported."""
        return self._ready.popleft() if self._may_begin() else None

    def _may_begin(self) -> bool:
        return bool(self._ready) and len(self._held) - len(self._ready) < BEGUN_COUNT

    def begin_ahead(self) -> Assignment | None:
        """Return an announced task that may be read before it is assigned, but not trained on, or None."""
        return self._ahead.popleft() if self._ahead and not self._may_begin() else None

    @property
    def has_news(self) -> bool:
        """True if a waiting reader can begin a task, read ahead, or end."""
        is_over = self._is_closing or (not self._ready and (self._is_done or self._error is not None))
        return is_over or bool(self._ahead) or self._may_begin()

    @property
    def error(self) -> Exception | None:
        """The error that ended the feed; None while any held task has not begun."""
        return None if self._ready else self._error

    @property
    def is_done(self) -> bool:
        """True if all trainers are done with all epochs."""
        return self._is_done and not self._ready

    @property
    def trouble(self) -> str:
        """Reason why the master cannot be reached; empty if the master answers."""
        return self._trouble

    @property
    def held(self) -> tuple[AssignedTask, ...]:
        return tuple(self._held.values())

    @property
    def reports(self) -> Reports:
        return self._reports

    def is_held(self, task: AssignedTask) -> bool:
        """False if the task was revoked or handed back. The caller then drops its remaining batches unreported."""
        held = self._held.get(task.assignment.attempt)
        return held is not None and held.number == task.number

    # reports of the trainer

    def finished(
        self,
        task: AssignedTask,
        pservers: Sequence[int],
        now: float,
        metrics: Mapping[str, tuple[float, float]] | None = None,
        placement: int = 0,
    ) -> None:
        """Report a task whose batches have all been acknowledged by all pservers.

        ``pservers`` are the pservers' generations; ``metrics`` (of evaluations) maps names to (weighted sum, weight);
        ``placement`` is the oldest placement with which a batch was pushed.
        """
        if not self.is_held(task):
            return
        a = task.assignment
        report = FinishedTask(
            epoch=a.epoch,
            position=a.position,
            attempt=a.attempt,
            pservers=list(pservers),
            placement=placement,
            metrics=dict(metrics or {}),
        )
        self._note_pace(now)
        self._drop(task, now)
        self._done.pop(a.attempt, None)
        self._reports = replace(self._reports, finished=(*self._reports.finished, report))

    def batch_done(self, task: AssignedTask, number: int, *, is_urgent: bool = False) -> bool:
        """Record a batch of a job without a model as done. It is reported soon, or immediately if urgent.

        Returns True if this may change the next step.
        """
        had_news = self._is_done_news
        if self.is_held(task):
            if (done := self._done.get(task.assignment.attempt)) is None:
                done = self._done[task.assignment.attempt] = IntervalSet()
            self._is_done_news = done.add(number, number + 1) > 0 or had_news
        if is_urgent:
            self._report_done_at = -math.inf
        return self._is_done_news and (is_urgent or not had_news)

    def failed(
        self, task: AssignedTask, error: str, batch: int | None, now: float, place: str = "", fault: str = ""
    ) -> None:
        """Report that this trainer cannot do this task. ``FailedTask`` describes ``place`` and ``fault``."""
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
            fault=fault,
        )
        self._drop(task, now)
        self._reports = replace(self._reports, failed=(*self._reports.failed, report))

    def hand_back(self, task: AssignedTask, now: float) -> None:
        """Return this task to the master. This is not reported as a failure."""
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
        """Update the pace when the oldest task has been finished."""
        self._paced_count = min(self._paced_count + 1, _PACE_COUNT)
        last_s = self._pace_s or 0.0
        self._pace_s = last_s + (now - self._since_s - last_s) / self._paced_count

    def registered_again(self) -> None:
        """Hand back all tasks, including those in flight, because they were assigned to an earlier registration."""
        sometimes("a trainer registered again and returned its tasks")
        self._registration += 1
        self._hand_back_all()
        self._done.clear()

    def retire(self, kept: AssignedTask | None, now: float) -> None:
        """Stop requesting work. Hand back all tasks except ``kept``, which gets a moment to be reported."""
        self._is_closing = True
        self._hand_back_all(kept)
        self._keep_until = now + _KEPT_S

    def close(self) -> None:
        """Hand back all tasks. The last reports remain to be sent."""
        self._is_closing = True
        self._hand_back_all()

    def _hand_back_all(self, kept: AssignedTask | None = None) -> None:
        self._ahead.clear()
        self._return([held.assignment for held in self._held.values() if held != kept])
        self._held = {attempt: held for attempt, held in self._held.items() if held == kept}
        self._ready.clear()

    # calls to the master

    def next_step(self, now: float) -> NextStep:
        """Return the next step. Must not be called while an ``Ask`` is in flight."""
        if self._error is not None:
            return Over()
        if self._is_closing and not self._reports:
            if self._held and now < self._keep_until:
                return WaitForEvent(self._keep_until)
            self._hand_back_all()
            if not self._reports:
                return Over()
        room = self._room()
        may_ask = now >= self._not_before
        # A trainer that holds work must be able to report it immediately, so the master must not hold the request.
        is_due = bool(self._reports) or (self._is_done_news and now >= self._report_done_at)
        if is_due and (may_ask or not self._trouble):
            return self._ask(room, MOMENT_S if room and not self._held else 0.0, now)
        if room and may_ask:
            return self._ask(room, 0.0 if self._held else _IDLE_WAIT_S, now)
        if now >= self._rest_at:
            self._rest_at = math.inf
            return Rest()
        ask_at = self._not_before if room or self._reports else math.inf
        report_at = math.inf
        if self._is_done_news:
            report_at = max(self._report_done_at, self._not_before if self._trouble else now)
        return WaitForEvent(min(ask_at, report_at, self._rest_at))

    def _ask(self, want: int, wait_s: float, now: float) -> Ask:
        self._asked_at, self._report_done_at, self._is_done_news = now, now + _DONE_S, False
        done = tuple((attempt, tuple(done)[:STRETCHES_LIMIT]) for attempt, done in self._done.items())
        return Ask(self._reports, tuple(self._held), want, wait_s, self._registration, done)

    def _room(self) -> int:
        if self._is_closing or self._is_done:
            return 0
        return count_to_ask_for(wanted_count(self._pace_s, self._cover_s), len(self._held))

    def answered(self, ask: Ask, reply: TasksReply, now: float) -> None:
        self._trouble, self.waits_for = "", reply.waiting_for
        self._rest_at = now + _OPEN_S
        self._not_before = now + self._pause_s(ask, reply, now)
        self._reports = self._reports.without(ask.reports)
        self._lose({lost.attempt for lost in reply.lost}, now)
        kept = self._held.keys() | self._reports.attempts
        self._done = {attempt: done for attempt, done in self._done.items() if attempt in kept}
        if ask.done:
            self.reported_at = self._asked_at
            pause_s = min(_DONE_PAUSES * (now - self._asked_at), _DONE_CEILING_S)
            self._report_done_at = max(self._report_done_at, now + pause_s)
        self._is_done = reply.outcome == "epochs_done"
        if self._is_done:
            self._held.clear()
            self._ready.clear()
        if self._is_closing or ask.registration != self._registration:
            self._return(reply.assignments)
            return
        if reply.ahead and reply.ahead != self._announced:
            self._announced = reply.ahead
            self._ahead = deque(reply.ahead)
        if not self._held:
            self._since_s = now
        for assignment in reply.assignments:
            # Skip tasks that were reported after the request was sent. If the master rejects the report, it assigns the
            # attempt again. Attempt numbers may repeat if etcd was restored from an older state.
            if assignment.attempt not in self._reports.attempts:
                self._assignment_count += 1
                self._hold(AssignedTask(assignment, self._assignment_count))

    def _pause_s(self, ask: Ask, reply: TasksReply, now: float) -> float:
        """Return the seconds until the next request. Anything to report is sent earlier."""
        if len(reply.assignments) >= ask.want:
            return 0.0
        # If the master held the call for the full time, its ``retry_after_s`` adds no information.
        has_waited = not reply.assignments and 0 < ask.wait_s <= now - self._asked_at
        return 0.0 if has_waited else reply.retry_after_s

    def _lose(self, attempts: set[int], now: float) -> None:
        if not attempts:
            return
        sometimes("a trainer was told to drop a task")
        oldest = next(iter(self._held), None)
        self._held = {attempt: held for attempt, held in self._held.items() if attempt not in attempts}
        self._ready = deque(task for task in self._ready if task.assignment.attempt in self._held)
        if oldest in attempts:
            self._since_s = now

    def _hold(self, task: AssignedTask) -> None:
        attempt = task.assignment.attempt
        if attempt in self._held:
            sometimes("an attempt was assigned twice to one trainer")
            # The task was assigned twice. Batches read for the first assignment do not count.
            self._ready = deque(each for each in self._ready if each.assignment.attempt != attempt)
        self._held[attempt] = task
        self._ready.append(task)

    def ask_failed(self, error: Exception, now: float) -> None:
        """Handle a call that failed or was rejected. The feed retries it later unless the error is permanent."""
        self._rest_at = now + _OPEN_S
        self._is_done_news = bool(self._done)
        if self._is_closing or not isinstance(error, FlightedlError) or not is_transient(error):
            self._error = error
            return
        self._trouble = str(error)
        self._not_before = now + _RETRY_S

    def check(self) -> None:
        for attempt, task in self._held.items():
            assert task.assignment.attempt == attempt
        assert all(self.is_held(task) for task in self._ready), "a ready task is not held"
        assert len(set(self._ready)) == len(self._ready), "a task is ready twice"
        assert not self._held.keys() & self._reports.attempts, "a reported task is held"
        assert self._done.keys() <= self._held.keys() | self._reports.attempts
        assert not (self._is_closing and self._ready), "a closing feed has a ready task"
