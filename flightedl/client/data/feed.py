"""Gets work from the master and reports it, in the background, so that the next task is there when this one ends.

What is held, asked for and reported is decided by ``domain.trainer.feed``. Here is the thread that talks to the master:
while tasks are short it asks again and again over one open stream, and lets go of it when it has had nothing to say for
a second.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence

from flightedl.domain.trainer.feed import Ask, AssignedTask, Feed, LookAgain, Over, Rest
from flightedl.messages.tasks import Assignment, TasksReply
from flightedl.ports import Clock

#: Far below the least time after which a master calls a trainer stuck (``config.STUCK_FLOOR_S``).
_CONFIRM_AFTER_S = 2.0
_CONFIRM_S = 5.0

#: Asks the master.
Fetch = Callable[[Ask], TasksReply]


class TaskFeed:
    """The tasks of one trainer. Thread-safe.

    Args:
        fetch: Talks to the master.
        rest: Tells that there will be nothing to fetch for a while.
        clock: Tells how long tasks take.
        cover_s: How long the tasks held should last while no master answers.
        feed: What decides; None: one with this ``cover_s``.
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
        #: False when this task was taken away or handed back: drop what is left of it, also of its end. It needs no
        #: lock, being one look into a dict.
        self.is_held = self._feed.is_held
        self._thread = threading.Thread(target=self._run, name="flightedl-tasks", daemon=True)
        self._thread.start()

    # what the reader asks

    def next(self, timeout_s: float) -> AssignedTask | None:
        """The next task, or None after ``timeout_s``, or at once when there is none any more, or something to read.

        While two that were given are not reported, there is no next one.

        Raises:
            Exception: what ended the feed.
        """
        feed = self._feed
        with self._changed:
            self._changed.wait_for(lambda: feed.has_news, timeout_s)
            task = feed.begin()
            if task is None and feed.error is not None:
                raise feed.error
            return task

    def next_ahead(self) -> Assignment | None:
        """What to read while there is no next one, to have it when it comes."""
        with self._changed:
            return self._feed.begin_ahead()

    @property
    def is_done(self) -> bool:
        """True when all epochs are done everywhere."""
        with self._changed:
            return self._feed.is_done

    @property
    def trouble(self) -> str:
        """Why the master cannot be asked; empty when it answers."""
        with self._changed:
            return self._feed.trouble

    @property
    def held(self) -> frozenset[int]:
        """Numbers of the tasks that are held."""
        with self._changed:
            return frozenset(task.number for task in self._feed.held)

    # what the trainer reports

    def finished(
        self,
        task: AssignedTask,
        pservers: Sequence[int],
        metrics: Mapping[str, tuple[float, float]] | None = None,
    ) -> None:
        """Every batch of this task is acknowledged by all pservers, whose generations are given.

        ``metrics``: of an evaluation, name -> (weighted sum, weight).
        """
        with self._changed:
            self._feed.finished(task, pservers, self._clock.now(), metrics)
            self._changed.notify_all()

    def batch_done(self, task: AssignedTask, number: int) -> None:
        """A batch of this task is done, and no pserver is there to know it.

        The master answers first if it was told of nothing for a while. It takes a task by time only from a trainer that
        has told nothing for long, so afterwards ``is_held`` is true only if the batch counts. Returns without an answer
        if the master cannot be asked now.
        """
        feed, now = self._feed, self._clock.now()
        with self._changed:
            is_urgent = now - feed.told_at > _CONFIRM_AFTER_S
            if feed.batch_done(task, number, is_urgent=is_urgent):
                self._changed.notify_all()
            if is_urgent:
                is_over = lambda: feed.told_at >= now or not feed.is_held(task) or feed.trouble or feed.error  # noqa: E731
                self._changed.wait_for(is_over, _CONFIRM_S)

    def failed(self, task: AssignedTask, error: str, batch: int | None, place: str = "") -> None:
        """This task cannot be done by this trainer; ``place``: where the user's code raised, if it did."""
        with self._changed:
            self._feed.failed(task, error, batch, self._clock.now(), place)
            self._changed.notify_all()

    def hand_back(self, task: AssignedTask) -> None:
        """This trainer does not go on with this task, and did no harm to it."""
        with self._changed:
            self._feed.hand_back(task, self._clock.now())
            self._changed.notify_all()

    def registered_again(self) -> None:
        """All that is held was given to a registration that is over; so is what it is told from now on."""
        with self._changed:
            self._feed.registered_again()
            self._changed.notify_all()

    def retire(self, kept: AssignedTask | None) -> None:
        """Take no more work and hand back all but ``kept``, which goes back a moment later unless it is reported."""
        with self._changed:
            self._feed.retire(kept, self._clock.now())
            self._changed.notify_all()

    def close(self, timeout_s: float) -> None:
        """Hand back what is held, send the last reports, stop the thread."""
        with self._changed:
            self._feed.close()
            self._changed.notify_all()
        self._thread.join(timeout_s)

    # the thread

    def _run(self) -> None:
        while (ask := self._next_ask()) is not None:
            try:
                reply = self._fetch(ask)
            except Exception as error:  # noqa: BLE001 - whatever ends this thread is for whoever waits for its work
                with self._changed:
                    self._feed.ask_failed(error, self._clock.now())
                    self._changed.notify_all()
            else:
                with self._changed:
                    self._feed.answered(ask, reply, self._clock.now())
                    self._changed.notify_all()
        self._rest()

    def _next_ask(self) -> Ask | None:
        """Wait until there is something to say; None: never again."""
        while True:
            with self._changed:
                now = self._clock.now()
                step = self._feed.next_step(now)
                if isinstance(step, LookAgain):
                    self._changed.wait(None if math.isinf(step.at) else step.at - now)
            if isinstance(step, Ask):
                return step
            if isinstance(step, Over):
                return None
            if isinstance(step, Rest):
                self._rest()
