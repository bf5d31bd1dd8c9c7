"""Gets work from the master and reports it, in the background, so that the next task is there when this one ends.

The feed holds as many pieces of work as last until there is a master again, should it die now: by the time that the
pieces before took (``domain.tasks_sharing``). At least two, the one being trained and the next; near the end of an
epoch no more. They are given out in the order in which they came, and none before all but one of those before it are
reported: the master takes whatever else a dead trainer held for untouched.

One thread talks to the master: a report goes out at once (others may wait for this trainer's leave), a request when
there is room. Reports stay in the feed until the master answered them, so a master's death loses none; the attempt
number makes repeating them safe. While tasks are short, the thread asks again and again over one open stream; it lets
go of it when it has said nothing for a second.

What this trainer gives up is *handed back* with the next report, never just forgotten: the master tells an attempt
again that a request does not list, and would tell the same one. Should that happen all the same (an answer was lost),
it comes as another :class:`Piece`, and is another *reading*: whoever read a part of the first one has read nothing of
the second. So everything here is about a ``Piece``, not about its attempt.

The feed does not know whether a batch was pushed; ``finished`` is the caller's word that all of a piece was.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from flightedl.client.servers import is_transient
from flightedl.domain.tasks_sharing import count_to_ask_for, wanted_count
from flightedl.errors import FlightedlError
from flightedl.formats.chunks import Chunk
from flightedl.messages.tasks import Assignment, FailedTask, FinishedTask, ReturnedTask, TasksReply
from flightedl.ports import Clock

#: Pieces of work that may be begun at once: one is trained, one is read ahead.
_BEGUN_COUNT = 2
#: How many of the newest pieces make the pace.
_PACE_COUNT = 4
_RETRY_S = 0.2
#: A loop that was left by an exception reports its piece within this time.
_KEPT_S = 1.0
#: The way to the master is kept open so long after something was said.
_OPEN_S = 1.0


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


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """A piece of work with the chunks its records are in: one telling of it, and so one reading."""

    assignment: Assignment
    chunks: tuple[Chunk, ...]


#: (reports, attempts held, how many pieces are wanted, how long the master may hold the call) -> its answer.
Fetch = Callable[[Reports, Sequence[int], int, float], tuple[TasksReply, Sequence[Piece]]]


class TaskFeed:
    """The pieces of work of one trainer. Thread-safe.

    Args:
        fetch: Talks to the master.
        rest: Tells that there will be nothing to fetch for a while.
        clock: Tells how long pieces take.
        cover_s: How long the pieces held should last while no master answers.
    """

    def __init__(self, fetch: Fetch, rest: Callable[[], None], clock: Clock, cover_s: float = 0.0) -> None:
        self._fetch = fetch
        self._rest = rest
        self._clock = clock
        self._cover_s = cover_s
        self._changed = threading.Condition()
        self._reports = Reports()
        #: By attempt, what this trainer holds: given and not yet reported, oldest first.
        self._held: dict[int, Piece] = {}
        #: Counts the registrations under which work was taken: an answer to an earlier one gives nothing.
        self._registration = 0
        #: Those of them that nobody has begun.
        self._ready: deque[Piece] = deque()
        #: Since when the oldest one held is the oldest.
        self._since_s = 0.0
        #: From one finished piece to the next, about; None: not known.
        self._pace_s: float | None = None
        self._paced_count = 0
        self._is_done = False
        self._is_closing = False
        self._not_before = 0.0
        #: When the way to the master is let go of; infinite: it is not open.
        self._rest_at = math.inf
        #: When the last piece of a loop that was left goes back.
        self._keep_until = 0.0
        self._error: Exception | None = None
        self._reason = ""
        self._thread = threading.Thread(target=self._run, name="flightedl-tasks", daemon=True)
        self._thread.start()

    # what the reader asks

    def next(self, timeout_s: float) -> Piece | None:
        """The next piece of work, or None after ``timeout_s``, or at once when there is none any more.

        While two that were given are not reported, there is no next one.

        Raises:
            Exception: what ended the feed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._may_begin() or self._is_over(), timeout_s)
            if self._may_begin():
                return self._ready.popleft()
            if self._error is not None and not self._ready:
                raise self._error
            return None

    def _may_begin(self) -> bool:
        return bool(self._ready) and len(self._held) - len(self._ready) < _BEGUN_COUNT

    def _is_over(self) -> bool:
        return self._is_closing or (not self._ready and (self._is_done or self._error is not None))

    @property
    def is_done(self) -> bool:
        """True when all epochs are done everywhere."""
        with self._changed:
            return self._is_done and not self._ready

    @property
    def trouble(self) -> str:
        """Why the master cannot be asked; empty when it answers."""
        with self._changed:
            return self._reason

    def is_held(self, piece: Piece) -> bool:
        """False when this piece was taken away or handed back: drop what is left of it, also of its end."""
        with self._changed:
            return self._held.get(piece.assignment.attempt) is piece

    # what the trainer reports

    def finished(
        self,
        piece: Piece,
        pservers: Sequence[int],
        metrics: Mapping[str, tuple[float, float]] | None = None,
    ) -> None:
        """Every batch of this piece is acknowledged by all pservers, whose generations are given.

        ``metrics``: of an evaluation, name -> (weighted sum, weight).
        """
        assignment = piece.assignment
        report = FinishedTask(
            epoch=assignment.epoch,
            position=assignment.position,
            attempt=assignment.attempt,
            pservers=list(pservers),
            metrics=dict(metrics or {}),
        )
        with self._changed:
            if self.is_held(piece):
                self._note_pace()
            self._report(piece, lambda r: replace(r, finished=(*r.finished, report)))

    def failed(self, piece: Piece, error: str, batch: int | None, place: str = "") -> None:
        """This piece cannot be done by this trainer; ``place``: where the user's code raised, if it did."""
        assignment = piece.assignment
        report = FailedTask(
            epoch=assignment.epoch,
            position=assignment.position,
            attempt=assignment.attempt,
            error=error[:1000],
            batch=batch,
            place=place,
        )
        self._report(piece, lambda r: replace(r, failed=(*r.failed, report)))

    def hand_back(self, piece: Piece) -> None:
        """This trainer does not go on with this piece, and did no harm to it."""
        self._report(piece, lambda r: replace(r, returned=(*r.returned, _returned(piece.assignment))))

    def _report(self, piece: Piece, add: Callable[[Reports], Reports]) -> None:
        with self._changed:
            if self.is_held(piece):
                del self._held[piece.assignment.attempt]
                self._since_s = self._clock.now()
                self._reports = add(self._reports)
                self._changed.notify_all()

    def _lose(self, attempts: set[int]) -> None:
        """The master took these away."""
        oldest = next(iter(self._held), None)
        self._held = {attempt: held for attempt, held in self._held.items() if attempt not in attempts}
        self._ready = deque(piece for piece in self._ready if piece.assignment.attempt in self._held)
        if oldest in attempts:
            self._since_s = self._clock.now()

    def _note_pace(self) -> None:
        """The oldest piece is finished."""
        took_s = self._clock.now() - self._since_s
        self._paced_count = min(self._paced_count + 1, _PACE_COUNT)
        last_s = self._pace_s or 0.0
        self._pace_s = last_s + (took_s - last_s) / self._paced_count

    def _room(self) -> int:
        """How many pieces to ask for."""
        if self._is_closing or self._is_done:
            return 0
        return count_to_ask_for(wanted_count(self._pace_s, self._cover_s), len(self._held))

    def registered_again(self) -> None:
        """All that is held was given to a registration that is gone; so is what it is told from now on."""
        with self._changed:
            self._registration += 1
            self._hand_back_all()

    def retire(self, kept: Piece | None) -> None:
        """Take no more work and hand back all but ``kept``, which goes back a moment later unless it is reported."""
        with self._changed:
            self._is_closing = True
            self._hand_back_all(kept)
            self._keep_until = self._clock.now() + _KEPT_S

    def close(self, timeout_s: float) -> None:
        """Hand back what is held, send the last reports, stop the thread."""
        with self._changed:
            self._is_closing = True
            self._hand_back_all()
        self._thread.join(timeout_s)

    def _hand_back_all(self, kept: Piece | None = None) -> None:
        returned = [_returned(held.assignment) for held in self._held.values() if held is not kept]
        self._held = {attempt: held for attempt, held in self._held.items() if held is kept}
        self._ready.clear()
        self._reports = replace(self._reports, returned=(*self._reports.returned, *returned))
        self._changed.notify_all()

    # the thread

    def _run(self) -> None:
        while (work := self._wait_for_work()) is not None:
            if not self._has_said(*work):
                break
            self._rest_at = self._clock.now() + _OPEN_S
        self._rest()

    def _has_said(self, reports: Reports, held: tuple[int, ...], want: int, wait_s: float) -> bool:
        """Report and fetch once; False: that was the last time."""
        registration = self._registration
        try:
            reply, pieces = self._fetch(reports, held, want, wait_s)
        except Exception as error:  # noqa: BLE001 - whatever ends this thread is for whoever waits for its work
            return self._took_error(error)
        self._take(reports, reply, pieces, registration)
        return True

    def _wait_for_work(self) -> tuple[Reports, tuple[int, ...], int, float] | None:
        with self._changed:
            while True:
                pause = self._not_before - self._clock.now()
                if self._is_closing and not self._reports:
                    if not self._held:
                        return None
                    kept_s = self._keep_until - self._clock.now()
                    if kept_s > 0:
                        self._changed.wait(kept_s)
                    else:
                        self._hand_back_all()
                    continue
                room = self._room()
                if self._reports and (pause <= 0 or not self._reason):
                    return self._reports, tuple(self._held), room, 0.0
                if room > 0 and pause <= 0:
                    # A trainer that holds work must be able to report it at once: it does not let itself be held.
                    return self._reports, tuple(self._held), room, 0.0 if self._held else 2.0
                self._wait(pause if (room > 0 or self._reports) and pause > 0 else math.inf)

    def _wait(self, pause_s: float) -> None:
        """Locked: until something happens, at most so long."""
        open_s = self._rest_at - self._clock.now()
        if open_s <= 0:
            self._rest_at = math.inf
            self._changed.release()
            try:
                self._rest()
            finally:
                self._changed.acquire()
            return
        limit_s = min(pause_s, open_s)
        self._changed.wait(None if math.isinf(limit_s) else limit_s)

    def _took_error(self, error: Exception) -> bool:
        """Whether to go on after an error."""
        with self._changed:
            if not isinstance(error, FlightedlError) or not is_transient(error) or self._is_closing:
                self._error = error
                self._changed.notify_all()
                return False
            self._reason = str(error)
            self._not_before = self._clock.now() + _RETRY_S
            return True

    def _take(self, sent: Reports, reply: TasksReply, pieces: Sequence[Piece], registration: int) -> None:
        with self._changed:
            self._reason = ""
            self._reports = self._reports.without(sent)
            if reply.lost:
                self._lose({lost.attempt for lost in reply.lost})
            self._is_done = reply.outcome == "epochs_done"
            if self._is_done:
                self._held.clear()
                self._ready.clear()
            if self._is_closing or registration != self._registration:
                unwanted = [_returned(piece.assignment) for piece in pieces]
                self._reports = replace(self._reports, returned=(*self._reports.returned, *unwanted))
            else:
                if not self._held:
                    self._since_s = self._clock.now()
                for piece in pieces:
                    self._hold(piece)
            self._not_before = self._clock.now() + (reply.retry_after_s if not pieces else 0.0)
            self._changed.notify_all()

    def _hold(self, piece: Piece) -> None:
        attempt = piece.assignment.attempt
        if attempt in self._held:
            # Told twice: whatever was read of the first telling counts for nothing.
            self._ready = deque(each for each in self._ready if each.assignment.attempt != attempt)
        self._held[attempt] = piece
        self._ready.append(piece)


def _returned(assignment: Assignment) -> ReturnedTask:
    return ReturnedTask(epoch=assignment.epoch, position=assignment.position, attempt=assignment.attempt)
