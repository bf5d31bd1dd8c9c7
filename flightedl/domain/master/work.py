"""The task queue of one dataset, as trainers see it: applies their reports and assigns tasks to them.

The training data has one queue, and each evaluation has its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from flightedl.domain.master.effects import Outbox
from flightedl.domain.queue.fair_share import HOLDING_CEILING
from flightedl.domain.queue.tasks import TaskQueue
from flightedl.domain.queue.values import AlreadyDone, Effects, EpochsDone, FailedSelector, Finished, TaskGiven
from flightedl.errors import FencedError
from flightedl.messages.tasks import (
    Assignment,
    DroppedTasksRequest,
    FailedTask,
    FailedTasksRequest,
    FinishedTask,
    ReturnedTask,
    TasksTicket,
)

#: Number of pieces that a trainer of a stopped job may have begun: one to train on, and one to read ahead.
_BEGUN_COUNT = 2
_STOPPED_RETRY_S = 0.1

_REPORTS: Mapping[type, str] = {FinishedTask: "finished", FailedTask: "failed", ReturnedTask: "returned"}

#: Metric name -> (weighted sum, weight), for one piece.
Sums = Mapping[str, tuple[float, float]]


class Work:
    """The task queue of one dataset, with an outbox for its effects.

    Args:
        queue: The dataset's queue.
        outbox: Receives the queue's effects.
        evaluation: Name of the evaluation; empty for the training data.
    """

    def __init__(self, queue: TaskQueue, outbox: Outbox, evaluation: str = "") -> None:
        self.queue = queue
        self._outbox = outbox
        self._evaluation = evaluation
        #: Metrics of each piece finished since the last call of ``take_finished``.
        self._finished: list[Sums] = []
        #: Reports since this master started, by outcome: finished, repeated, failed, returned or outdated.
        self.reports: Counter[str] = Counter()
        #: Number of pieces that were repeated after the end of their epoch, since this master started.
        self.repeated_count = 0

    def take_finished(self) -> list[Sums]:
        """Return the metrics of each piece that was finished since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def _news(self, effects: Effects) -> None:
        self._outbox.news(self._evaluation, effects)

    def apply_reports(self, ticket: TasksTicket, now: float) -> list[ReturnedTask]:
        """Apply a ticket's reports. Return the tasks that the trainer must drop, because it no longer holds them."""
        queue = self.queue
        lost: list[ReturnedTask] = []

        def take(
            report: FinishedTask | FailedTask | ReturnedTask, event: Callable[..., object], **more: object
        ) -> object:
            place = report.epoch, report.position, report.attempt
            try:
                answer = event(ticket.trainer, *place, now, generation=ticket.generation, **more)
            except FencedError:
                self.reports["outdated"] += 1
                lost.append(ReturnedTask(epoch=report.epoch, position=report.position, attempt=report.attempt))
                return ()
            self.reports["repeated" if isinstance(answer, AlreadyDone) else _REPORTS[type(report)]] += 1
            return answer

        if ticket.failed:
            queue.blame.meet(ticket.trainer, ticket.witness, now)
        for done in ticket.done:
            queue.note_done(ticket.trainer, done.attempt, done.stretches, now, generation=ticket.generation)
        for finished in ticket.finished:
            is_repeated = finished.epoch < queue.epoch
            answer = take(finished, queue.finish)
            if isinstance(answer, Finished):
                self._finished.append(finished.metrics)
                self.repeated_count += is_repeated
                self._news(answer.effects)
        for failed in ticket.failed:
            more = {name: getattr(failed, name) for name in ("error", "fault", "batch", "place")}
            effects = take(failed, queue.fail, **more)
            self._news(effects)  # type: ignore[arg-type]
        for returned in ticket.returned:
            self._news(take(returned, queue.give_back))  # type: ignore[arg-type]
        lost += [
            ReturnedTask(epoch=0, position=0, attempt=attempt)
            for attempt in ticket.holding
            if not queue.is_current(ticket.trainer, attempt, ticket.generation)
        ]
        return lost

    def take_back_unstarted(self, ticket: TasksTicket, now: float) -> list[ReturnedTask]:
        """Take back and return the tasks that a trainer has not begun, if the job is stopped."""
        if not self.queue.is_stopped:
            return []
        name, generation = ticket.trainer, ticket.generation
        held = [a for a in self.queue.holders().get(name, ()) if self.queue.is_current(name, a.attempt, generation)]
        acknowledged = [each for each in held if each.attempt in ticket.holding]
        # If a ticket lacks an assignment, the reply with that assignment was lost. Tickets with want=0 list no
        # assignments.
        unheard = [each for each in held if each.attempt not in ticket.holding] if ticket.want else []
        lost = [
            ReturnedTask(epoch=each.epoch, position=each.position, attempt=each.attempt)
            for each in (*acknowledged[_BEGUN_COUNT:], *unheard)
            if not self.queue.is_due(each.epoch, each.position)
        ]
        for each in lost:
            place = each.epoch, each.position, each.attempt
            self._news(self.queue.give_back(name, *place, now, generation=generation))
        return lost

    def hand_out(self, ticket: TasksTicket, now: float, trainer_count: int) -> tuple[list[Assignment], str, float]:
        """Assign tasks. Return (the assignments, the outcome, the seconds after which the trainer should ask again).

        ``trainer_count`` trainers share the tasks.
        """
        given: list[Assignment] = []
        if not ticket.want:
            return [], "epochs_done" if self.queue.is_over else "none_now", 0.0
        known = set(ticket.holding)
        outcome, retry_after_s = "none_now", 0.0
        for _ in range(ticket.want):
            answer = self.queue.request(
                ticket.trainer, now, HOLDING_CEILING, known, trainer_count, ticket.generation, ticket.witness
            )
            if not isinstance(answer, TaskGiven):
                if isinstance(answer, EpochsDone):
                    outcome = "epochs_done"
                else:
                    retry_after_s = _STOPPED_RETRY_S if self.queue.is_stopped else answer.retry_after_s
                break
            known.add(answer.assignment.attempt)
            given.append(answer.assignment)
        return given, "given" if given else outcome, retry_after_s

    def promise(self, trainer: str) -> list[Assignment]:
        """Return tasks of the next epoch for a trainer to read ahead, because no task of this epoch is left for it."""
        return [] if self.queue.is_stopped else list(self.queue.promise(trainer))

    def change_failed(self, request: FailedTasksRequest) -> int:
        """Retry or drop the failed batches. Return their number."""
        change = self.queue.drop_failed if isinstance(request, DroppedTasksRequest) else self.queue.retry_failed
        return change(FailedSelector(request.epoch, request.task, request.batch))

    def trainer_departed(self, trainer: str, now: float, *, is_graceful: bool = False) -> None:
        """Take back the pieces of a trainer that is gone. ``is_graceful`` is True if the trainer did not die."""
        self._news(self.queue.trainer_departed(trainer, now, is_graceful))

    def forget_the_dead(self, alive: Mapping[str, int], now: float, *, is_graceful: bool = False) -> bool:
        """Take back the pieces of registrations not in ``alive`` (trainer -> generation). True if there were any.

        ``is_graceful`` is True if the trainers have not necessarily died.
        """
        dead = [name for name, generation in self.queue.registrations().items() if alive.get(name) != generation]
        for trainer in dead:
            self.trainer_departed(trainer, now, is_graceful=is_graceful or trainer in alive)
        return bool(dead)

    def tick(self, now: float, *, is_held_up: bool = False, progressed: Iterable[str] = ()) -> bool:
        """Take back pieces that have expired. True if there were any. The arguments are those of ``TaskQueue.tick``."""
        effects = self.queue.tick(now, is_held_up=is_held_up, progressed=progressed)
        self._news(effects)
        return bool(effects)
