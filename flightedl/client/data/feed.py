"""Background thread that fetches tasks from the master and reports them, so that the next task arrives in time.

``domain.trainer.feed`` decides which tasks to hold, request and report. The thread in this module communicates with the
master. While tasks are short, the thread sends its requests on one stream, and closes the stream after a second without
requests.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence

from flightedl.domain.trainer.feed import Ask, AssignedTask, Feed, Over, Rest, WaitForEvent
from flightedl.messages.tasks import Assignment, TasksReply
from flightedl.ports import Clock

#: Must be far below the minimum time after which the master considers a trainer stuck (``config.STUCK_FLOOR_S``).
_CONFIRM_AFTER_S = 2.0
_CONFIRM_S = 5.0

#: Sends a request to the master and returns its reply.
Fetch = Callable[[Ask], TasksReply]


class TaskFeed:
    """Tasks that one trainer holds. Thread-safe.

    Args:
        fetch: Sends a request to the master.
        rest: Called when no requests are expected for a while.
        clock: Measures how long tasks take.
        cover_s: Seconds of work to hold in advance, in case no master answers.
        feed: The state machine; None to create one with this ``cover_s``.
    """

    def __init__(
        self,
        fetch: Fetch,
        rest: Callable[[], None],
        clock: Clock,
        cover_s: float = 0.0,
        feed: Feed | None = None,
    ) -> None:
        self._fetch = fetch
        self._rest = rest
        self._clock = clock
        self._changed = threading.Condition()
        #: Under the lock.
        self._feed = Feed(cover_s) if feed is None else feed
        #: False if the task has been revoked or returned. The caller then drops its remaining batches and does not
        #: report it as finished. Takes no lock: a single dict lookup is atomic.
        self.is_held = self._feed.is_held
        self._thread = threading.Thread(target=self._run, name="flightedl-tasks", daemon=True)
        self._thread.start()

    # for the reader

    def next(self, timeout_s: float) -> AssignedTask | None:
        """Return the next task, or None after ``timeout_s``, at the end, or if a promised task can be read instead.

        While two finished tasks are unreported, no further task is returned.

        Raises:
            Exception: the error that ended the feed.
        """
        feed = self._feed
        with self._changed:
            self._changed.wait_for(lambda: feed.has_news, timeout_s)
            task = feed.begin()
            if task is None and feed.error is not None:
                raise feed.error
            return task

    def next_ahead(self) -> Assignment | None:
        """Return a promised task to read early, or None if an assigned task is available or no task is promised."""
        with self._changed:
            return self._feed.begin_ahead()

    @property
    def is_done(self) -> bool:
        with self._changed:
            return self._feed.is_done

    @property
    def trouble(self) -> str:
        """Reason why the master does not reply; empty if it does."""
        with self._changed:
            return self._feed.trouble

    @property
    def waits_for(self) -> str:
        """Reason why the master assigns no tasks although there are some; empty if it has none."""
        with self._changed:
            return self._feed.waits_for

    @property
    def held(self) -> frozenset[int]:
        with self._changed:
            return frozenset(task.number for task in self._feed.held)

    # reports

    def finished(
        self,
        task: AssignedTask,
        pservers: Sequence[int],
        metrics: Mapping[str, tuple[float, float]] | None = None,
        placement: int = 0,
    ) -> None:
        """Report a task as finished: all pservers have acknowledged its batches.

        Args:
            task: The finished task.
            pservers: Generations of the pservers.
            metrics: Result of an evaluation, name -> (weighted sum, weight).
            placement: Oldest placement of blocks according to which a batch was pushed; 0 if none is stored.
        """
        with self._changed:
            self._feed.finished(task, pservers, self._clock.now(), metrics, placement)
            self._changed.notify_all()

    def batch_done(self, task: AssignedTask, number: int) -> None:
        """Report one batch as done, in a job without pservers.

        If the previous report is more than ``_CONFIRM_AFTER_S`` old, wait for the master's reply. The master revokes
        tasks only from trainers that have not reported for a long time, so after a reply, ``is_held`` is true exactly
        if the batch counts. If the master is unreachable, this method returns without a reply.
        """
        feed, now = self._feed, self._clock.now()
        with self._changed:
            is_urgent = now - feed.reported_at > _CONFIRM_AFTER_S
            if feed.batch_done(task, number, is_urgent=is_urgent):
                self._changed.notify_all()
            if is_urgent:
                is_over = lambda: feed.reported_at >= now or not feed.is_held(task) or feed.trouble or feed.error  # noqa: E731
                self._changed.wait_for(is_over, _CONFIRM_S)

    def failed(self, task: AssignedTask, error: str, batch: int | None, place: str = "", fault: str = "") -> None:
        """Report that this trainer cannot process the task. ``FailedTask`` describes ``place`` and ``fault``."""
        with self._changed:
            self._feed.failed(task, error, batch, self._clock.now(), place, fault)
            self._changed.notify_all()

    def hand_back(self, task: AssignedTask) -> None:
        """Return a task to the master unfinished, without reporting an error."""
        with self._changed:
            self._feed.hand_back(task, self._clock.now())
            self._changed.notify_all()

    def registered_again(self) -> None:
        """Drop all tasks without reporting them, because the registration that held them has ended."""
        with self._changed:
            self._feed.registered_again()
            self._changed.notify_all()

    def retire(self, kept: AssignedTask | None) -> None:
        """Accept no more tasks. Wait briefly for the report on ``kept``, then return the held tasks to the master."""
        with self._changed:
            self._feed.retire(kept, self._clock.now())
            self._changed.notify_all()

    def close(self, timeout_s: float) -> None:
        """Return the held tasks to the master, send the last reports, and stop the thread."""
        with self._changed:
            self._feed.close()
            self._changed.notify_all()
        self._thread.join(timeout_s)

    # the thread

    def _run(self) -> None:
        while (ask := self._next_ask()) is not None:
            try:
                reply = self._fetch(ask)
            except Exception as error:  # noqa: BLE001 - raised in the thread that waits for a task
                with self._changed:
                    self._feed.ask_failed(error, self._clock.now())
                    self._changed.notify_all()
            else:
                with self._changed:
                    self._feed.answered(ask, reply, self._clock.now())
                    self._changed.notify_all()
        self._rest()

    def _next_ask(self) -> Ask | None:
        while True:
            with self._changed:
                now = self._clock.now()
                step = self._feed.next_step(now)
                if isinstance(step, WaitForEvent):
                    self._changed.wait(None if math.isinf(step.at) else step.at - now)
            if isinstance(step, Ask):
                return step
            if isinstance(step, Over):
                return None
            if isinstance(step, Rest):
                self._rest()
