"""Membership at the end of an epoch: the idle trainers that remain members, and those that rejoin with their next task.

An idle trainer leaves the view, so that rounds do not wait for it. If the model is small, leaving and rejoining takes
as long as several rounds. Two rules avoid this delay at the end of an epoch:

* A trainer remains a member if the epoch's last reports are probably in flight, because its request then waits only
  briefly. This is likely if all rounds that the other trainers still have to do are rounds that this trainer has
  completed, or if all trainers have held their tasks for as long as a task usually takes.
* A trainer that has left rejoins without asking if its next task was promised to it. It has already read this task and
  can train on it immediately, so rounds can wait for this trainer.

Rounds and promises are not stored. After a takeover, trainers leave and join in the usual way.
"""

from __future__ import annotations

from collections.abc import Sequence

from flightedl.domain.queue.tasks import TaskQueue
from flightedl.messages.tasks import Assignment, TasksTicket


class EpochEnds:
    """Tracks each trainer's round and promised tasks."""

    def __init__(self) -> None:
        #: Trainer -> the round (sync mode) that it had reached at its last request; 0 if unknown.
        self._rounds: dict[str, int] = {}
        #: Trainer -> its generation, and the (epoch, position) of each task promised to it.
        self._promised: dict[str, tuple[int, set[tuple[int, int]]]] = {}

    def asked(self, ticket: TasksTicket) -> None:
        self._rounds[ticket.trainer] = ticket.round

    def promised(self, ticket: TasksTicket, ahead: Sequence[Assignment]) -> None:
        """Record the tasks promised to a trainer. Earlier promises remain valid if ``ahead`` is empty."""
        if ahead:
            self._promised[ticket.trainer] = ticket.generation, {(each.epoch, each.position) for each in ahead}

    def gone(self, trainer: str) -> None:
        self._rounds.pop(trainer, None)
        self._promised.pop(trainer, None)

    def should_stay(self, queue: TaskQueue, ticket: TasksTicket, now: float) -> bool:
        """True if the epoch's last reports, including this trainer's, are probably in flight."""
        if queue.should_end_now(now):
            return True
        return not queue.has_more and all(
            0 < self._rounds.get(name, 0) <= ticket.round - sum(each.end_batch - each.first_batch for each in held)
            for name, held in queue.holders().items()
        )

    def joins_with(self, ticket: TasksTicket, first: Assignment) -> bool:
        """True if the first task had been promised to the trainer. The promise is then forgotten."""
        generation, places = self._promised.pop(ticket.trainer, (0, set()))
        return generation == ticket.generation and (first.epoch, first.position) in places
