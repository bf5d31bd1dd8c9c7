"""Where an epoch ends: whether a trainer without work stays a member, and which one joins again with its first work.

Nobody waits for a trainer that has no work: it leaves the view. That, and to join again, takes as long as several
rounds of a small model. So while the last reports of an epoch should be on their way, a trainer whose own was the first
of them stays, for as long as its request may wait, if that is no longer than a moment: where no other has a round to do
that this trainer has not done, or all have had their tasks for as long as tasks take. One that has left joins again
with the first work that it gets, without asking, if it was told to read just that ahead: its loop waits for nothing
else, so rounds may wait for it.

Nothing of this is stored: a successor knows less, so that trainers leave and ask to join, as ever.
"""

from __future__ import annotations

from collections.abc import Sequence

from flightedl.domain.queue.tasks import TaskQueue
from flightedl.messages.tasks import Assignment, TasksTicket


class EpochEnds:
    """What trainers said and were told that matters where an epoch ends. O(trainers)."""

    def __init__(self) -> None:
        #: Trainer -> the synchronous round that it was at as it asked the last time; 0: not known.
        self._rounds: dict[str, int] = {}
        #: Trainer -> its generation, and the (epoch, position) of what it was told to read ahead.
        self._told_ahead: dict[str, tuple[int, set[tuple[int, int]]]] = {}

    def asked(self, ticket: TasksTicket) -> None:
        """A trainer asks for work, and says which round it is at."""
        self._rounds[ticket.trainer] = ticket.round

    def told_ahead(self, ticket: TasksTicket, ahead: Sequence[Assignment]) -> None:
        """A trainer is told which work to read ahead; none: what it was told before still holds."""
        if ahead:
            self._told_ahead[ticket.trainer] = ticket.generation, {(each.epoch, each.position) for each in ahead}

    def gone(self, trainer: str) -> None:
        self._rounds.pop(trainer, None)
        self._told_ahead.pop(trainer, None)

    def should_stay(self, queue: TaskQueue, ticket: TasksTicket, now: float) -> bool:
        """Whether the last reports of the epoch should be on their way, and this trainer's was one of them."""
        if queue.should_end_now(now):
            return True
        return not queue.has_more and all(
            0 < self._rounds.get(name, 0) <= ticket.round - sum(each.end_batch - each.first_batch for each in held)
            for name, held in queue.holders().items()
        )

    def joins_with(self, ticket: TasksTicket, first: Assignment) -> bool:
        """Whether a trainer gets what it was told to read ahead; asked once for each first work that is given."""
        generation, places = self._told_ahead.pop(ticket.trainer, (0, set()))
        return generation == ticket.generation and (first.epoch, first.position) in places
