"""Data of a task queue, with its queries and invariants.

Tests verify these invariants with ``check`` after every event:

* Each batch of each epoch that has begun is in exactly one state: *todo* (its position is at or above the cursor, or it
  waits), *pending*, *failed* (or *dropped*), or *done* if it is in none of the others.
* No table contains tasks of later epochs, or tasks of the current epoch that are at or above the cursor.
* The current epoch is incomplete, because the event that completes an epoch also ends the epoch.
"""

from __future__ import annotations

import itertools

from flightedl.domain.exactly_once.intervals import IntervalSet
from flightedl.domain.queue.ahead import Promises
from flightedl.domain.queue.backlog import Pending
from flightedl.domain.queue.bisection import Losses
from flightedl.domain.queue.blame import Blame
from flightedl.domain.queue.clock import WorkClock
from flightedl.domain.queue.failed import FailedPieces
from flightedl.domain.queue.order import EpochOrder, EpochSizes, order_of
from flightedl.domain.queue.pending import PendingPieces
from flightedl.domain.queue.seeds import EpochSeeds
from flightedl.domain.queue.values import BatchRange, Counts, QueueSettings, TaskBatches
from flightedl.domain.queue.waiting import WaitingPieces
from flightedl.errors import UsageError
from flightedl.messages.tasks import Assignment


class QueueState:
    """Tables and counters of the queue. ``TaskQueue`` contains the rules for changing them."""

    __slots__ = (
        "average_count",
        "average_s",
        "blame",
        "clock",
        "copies",
        "cursor",
        "due",
        "epoch",
        "failed",
        "finished_parts",
        "growth_ended",
        "is_stopped",
        "last_s",
        "losses",
        "next_attempt",
        "pending",
        "promises",
        "revision",
        "seeds",
        "settings",
        "sizes",
        "waiting",
    )

    def __init__(self, settings: QueueSettings) -> None:
        self.settings = settings
        #: Incremented by every change.
        self.revision = 0
        #: The epoch whose tasks are being assigned; ``settings.epochs`` after the last epoch has ended.
        self.epoch = 0
        #: First position of the epoch that has not been assigned yet.
        self.cursor = 0
        self.next_attempt = 1
        self.sizes = EpochSizes([(0, settings.task_count, settings.task_count)])
        self.seeds = EpochSeeds([(0, settings.shuffled_by)])
        self.growth_ended = not settings.follow
        #: Not stored.
        self.clock = WorkClock()
        self.pending = PendingPieces()
        #: Promises for the current or the next epoch; not stored.
        self.promises = Promises()
        self.waiting = WaitingPieces(settings.attempts_limit, self.batch_count)
        self.failed = FailedPieces(settings.failed_limit)
        self.losses = Losses()
        self.blame = Blame(settings.attempts_limit, settings.stand_still_s)
        #: (epoch, position) -> attempts in which pieces of a task were finished, while its other pieces are open.
        self.finished_parts: dict[tuple[int, int], list[int]] = {}
        #: True if the job was stopped. Only tasks that are due are then assigned.
        self.is_stopped = False
        #: Epoch -> positions of open tasks that must be done even though the job is stopped; no set is empty.
        self.due: dict[int, IntervalSet] = {}
        #: Moving average of the duration of complete tasks; None until a complete task is done.
        self.average_s: float | None = None
        #: Number of averaged tasks.
        self.average_count = 0
        #: Duration of the last complete task that was finished; not stored.
        self.last_s: float | None = None
        self.copies = 0

    # order and sizes

    def order(self, epoch: int) -> EpochOrder:
        """Return the order of an epoch's tasks. Raises NotFoundError if the epoch has been forgotten."""
        return order_of(*self.sizes.find(epoch), self.seeds.find(epoch), epoch)

    @property
    def task_count(self) -> int:
        return self.sizes.task_count

    def epoch_size(self, epoch: int) -> int:
        """Return the number of tasks in a past or current epoch. Raises NotFoundError for a forgotten epoch."""
        return self.sizes.find(epoch)[1]

    def seed_of(self, epoch: int) -> int | None:
        """Return the seed that shuffles an epoch's tasks and records; None if they are not shuffled."""
        return self.seeds.find(epoch)

    def assignment(self, pending: Pending, attempt: int) -> Assignment:
        """Convert a piece to the message that is sent to its holder. The attempt number identifies the holder."""
        return self._assignment(pending.piece, pending.task, attempt)

    def _assignment(self, piece: BatchRange, task: int, attempt: int) -> Assignment:
        return Assignment(
            epoch=piece.epoch,
            position=piece.position,
            task=task,
            attempt=attempt,
            first_batch=piece.first_batch,
            end_batch=piece.end_batch,
            batch_count=piece.batch_count,
            seed=self.seed_of(piece.epoch),
        )

    def begun(self, epoch: int) -> int:
        """Return the end of an epoch's assigned positions."""
        return self.cursor if epoch == self.epoch else self.epoch_size(epoch)

    @property
    def begun_epochs(self) -> int:
        return self.epoch if self.is_past_last else self.epoch + 1

    @property
    def first_unbegun_epoch(self) -> int:
        return self.epoch + (self.cursor > 0)

    def todo(self, epoch: int) -> int:
        """Return the number of an epoch's unassigned complete tasks that are not suspect. O(1)."""
        return self.epoch_size(epoch) - self.begun(epoch) + self.waiting.count_complete(epoch)

    def next_order(self) -> EpochOrder | None:
        """Return the order of the next epoch; None if there is no next epoch, or its order may still change."""
        if self.is_last or not self.growth_ended:
            return None
        count = self.sizes.task_count
        return order_of(count, count, self.seeds.find(self.epoch + 1), self.epoch + 1)

    def batch_count(self, epoch: int, position: int) -> int:
        """Return the number of batches of the task at a position.

        Raises:
            UsageError: the task has no batches.
        """
        return self.batches_of(self.order(epoch).at(position))

    def batches_of(self, task: int) -> int:
        """Return the number of batches of a task.

        Raises:
            UsageError: the task has no batches.
        """
        count = self.settings.batch_counts(task)
        if count < 1:
            raise UsageError(f"task {task} has {count} batches, but every task needs at least one")
        return count

    # progress

    @property
    def is_last(self) -> bool:
        return self.settings.epochs is not None and self.epoch >= self.settings.epochs - 1

    @property
    def is_past_last(self) -> bool:
        """True if all epochs have ended. Reopened tasks may still be open."""
        ended = self.settings.epochs is not None and self.epoch >= self.settings.epochs
        return ended or (self.sizes.task_count == 0 and self.growth_ended)

    def is_open(self, epoch: int) -> bool:
        return self.pending.is_open(epoch) or self.waiting.is_open(epoch)

    @property
    def lowest_open_epoch(self) -> int | None:
        lowest = [epoch for epoch in (self.pending.lowest_epoch, self.waiting.lowest_epoch) if epoch is not None]
        return min(lowest, default=None)

    @property
    def next_epoch(self) -> int | None:
        """The epoch from which the next task is assigned; None if no task remains."""
        if self.is_stopped:
            return min({*self.due, *self.pending.epochs}, default=None)
        lowest = self.lowest_open_epoch
        if lowest is None:
            return None if self.is_past_last else self.epoch
        return min(lowest, self.epoch)

    @property
    def is_done(self) -> bool:
        return self.is_past_last and self.lowest_open_epoch is None

    @property
    def is_over(self) -> bool:
        """True if no task remains: all tasks are done, or the job was stopped and no task is due."""
        return self.next_epoch is None

    @property
    def is_growing(self) -> bool:
        return not self.growth_ended

    @property
    def has_more(self) -> bool:
        """True if this or an earlier epoch has unassigned tasks. Also true if all epochs have ended."""
        if self.is_past_last or self.cursor < self.epoch_size(self.epoch):
            return True
        return self.waiting.lowest_epoch is not None

    @property
    def has_todo(self) -> bool:
        """True if the epoch from which tasks are assigned next, maybe an earlier one, has unassigned pieces."""
        if (epoch := self.next_epoch) is None:
            return False
        has_new = epoch == self.epoch and not self.is_past_last and self.cursor < self.epoch_size(epoch)
        return has_new or self.waiting.is_open(epoch)

    def should_end_now(self, now: float) -> bool:
        """True if the epoch has only running pieces, all of which have run for about as long as the last task took.

        Each piece is compared with the last task's duration, scaled to the piece's size minus half a batch.
        O(trainers).
        """
        now = self.clock.at(now)
        last_s = self.last_s
        if last_s is None or self.has_more:
            return False
        if any(len(backlog.pieces) > 1 for backlog in self.pending.backlogs().values()):
            return False
        for holder, pending in self.pending.running():
            piece = pending.piece
            expected_s = last_s * (piece.size - 0.5) / piece.batch_count
            if holder.since_s is None or now - holder.since_s < expected_s:
                return False
        return True

    def settled(self, epoch: int, position: int) -> None:
        if epoch in self.due:
            self.due[epoch].remove(position, position + 1)
            if not self.due[epoch]:
                del self.due[epoch]

    @property
    def is_complete(self) -> bool:
        """True if the current epoch may end: this and earlier epochs have no open tasks, and no task can be added."""
        if self.is_past_last or self.cursor < self.epoch_size(self.epoch) or self.lowest_open_epoch is not None:
            return False
        return self.growth_ended or (self.epoch_size(self.epoch) > 0 and not self.is_last)

    # holders

    def holders(self) -> dict[str, tuple[Assignment, ...]]:
        return {
            trainer: tuple(self.assignment(held, attempt) for attempt, held in backlog.pieces.items())
            for trainer, backlog in self.pending.backlogs().items()
        }

    def longest_running(self, count: int, now: float) -> list[tuple[str, BatchRange, int, float]]:
        """Return (trainer, piece, task, seconds) for the ``count`` pieces that have been running longest."""
        now = self.clock.at(now)
        return [
            (holder.trainer, pending.piece, pending.task, now - (holder.since_s or 0.0))
            for holder, pending in itertools.islice(self.pending.running(), count)
        ]

    def held_count(self, trainer: str) -> int:
        return len(self.pending.held_by(trainer))

    def holds(self, trainer: str) -> bool:
        return bool(self.pending.held_by(trainer))

    def is_current(self, trainer: str, attempt: int, generation: int = 0) -> bool:
        """True if this registration of a trainer holds a piece with this attempt number. O(1)."""
        return self.pending.is_holder(trainer, generation, attempt)

    def registrations(self) -> dict[str, int]:
        return {trainer: backlog.generation for trainer, backlog in self.pending.backlogs().items()}

    def suspects(self) -> list[BatchRange]:
        """Return the pieces, waiting or assigned, whose witnesses are stored."""
        pieces = [*self.waiting.pieces, *(pending.piece for pending in self.pending)]
        return [piece for piece in pieces if piece.failures >= self.settings.attempts_limit]

    # queries for people

    def unfinished(self, limit: int) -> list[tuple[int, int]]:
        """Return (epoch, task) for up to ``limit`` tasks that prevent a stopped job from ending."""
        due = ((epoch, at) for epoch, positions in self.due.items() for run in positions for at in range(*run))
        places = {*itertools.islice(due, limit), *self.pending.places()}
        return [(epoch, self.order(epoch).at(position)) for epoch, position in sorted(places)[:limit]]

    def counts(self) -> Counts:
        """Return the number of tasks in each state, in the current or the last epoch. O(open and failed pieces)."""
        epoch = self.epoch
        if self.settings.epochs is not None:
            epoch = min(epoch, self.settings.epochs - 1)
        size, begun = self.epoch_size(epoch), self.begun(epoch)
        pending = {position for place, position in self.pending.places() if place == epoch}
        parts = {(piece.epoch, piece.position) for piece in self.waiting.pieces}
        waiting = {position for place, position in parts if place == epoch} - pending
        runs = self.waiting.runs
        retries = self.waiting.count_complete(epoch) + len(waiting)
        failed = {position for place, position in self.failed.failed.places() if place == epoch} - pending - waiting
        reopened = {place for place in (*self.pending.places(), *parts) if place[0] < epoch}
        return Counts(
            epoch=epoch,
            todo=size - begun + retries,
            pending=len(pending),
            done=begun - retries - len(pending) - len(failed),
            failed=len(failed),
            total=size,
            retries=retries,
            reopened=len(reopened) + sum(end - start for place, start, end, _ in runs if place < epoch),
            copies=self.copies,
            failed_batches=self.failed.failed.batch_count,
            forgotten=self.failed.forgotten,
            dropped_batches=self.failed.dropped.batch_count,
            attempts=self.next_attempt - 1,
        )

    def batches(self, epoch: int, task: int) -> TaskBatches:
        """Return the batches of a task by state, for an epoch that has begun.

        Raises:
            UsageError: the epoch has not begun, or there is no such task.
            NotFoundError: the epoch was forgotten.
        """
        self.require_begun(epoch)
        size = self.epoch_size(epoch)
        if not 0 <= task < size:
            raise UsageError(f"there is no task {task} in epoch {epoch + 1}: it has {size} tasks")
        position = self.order(epoch).position_of(task)
        count = self.batch_count(epoch, position)
        if position >= self.begun(epoch):
            return TaskBatches(((0, count),), (), (), (), ())
        waiting, pending = self.open_batches(epoch, position)
        failed, dropped = self.failed.at((epoch, position))
        done = IntervalSet([(0, count)])
        for batches in (waiting, pending, failed, dropped):
            done.difference_update(batches)
        return TaskBatches(tuple(waiting), tuple(pending), tuple(done), tuple(failed), tuple(dropped))

    def require_begun(self, epoch: int) -> None:
        if not 0 <= epoch < self.begun_epochs:
            raise UsageError(f"epoch {epoch + 1} has not begun")

    def incomplete_positions(self, epoch: int) -> set[int]:
        """Return the positions of an epoch's tasks that are pending or split, or have failed or dropped batches."""
        places = [*self.pending.places(), *self.failed.failed.places(), *self.failed.dropped.places()]
        places += [(piece.epoch, piece.position) for piece in self.waiting.pieces]
        return {position for place, position in places if place == epoch}

    def incomplete(self, epoch: int) -> IntervalSet:
        """Return the tasks at an epoch's ``incomplete_positions``. Raises NotFoundError for a forgotten epoch."""
        order = self.order(epoch)
        return IntervalSet.of(order.at(position) for position in self.incomplete_positions(epoch))

    def open_batches(self, epoch: int, position: int) -> tuple[IntervalSet, IntervalSet]:
        """Return (waiting batches, pending batches) of the task at a position that has been assigned."""
        waiting = IntervalSet((piece.first_batch, piece.end_batch) for piece in self.waiting.at(epoch, position))
        pending = self.pending.at(epoch, position)
        out = IntervalSet((each.piece.first_batch, each.piece.end_batch) for each in pending)
        for each in pending:
            out.difference_update(each.done)
        return waiting, out

    # invariants

    def check(self) -> None:
        assert self.settings.epochs is None or self.epoch <= self.settings.epochs
        assert 0 <= self.cursor <= self.epoch_size(self.epoch)
        assert not self.is_complete, "a complete epoch has not ended"
        assert self.growth_ended or self.settings.follow
        self.pending.check()
        assert all(holder.attempt < self.next_attempt for pending in self.pending for holder in pending.holders)
        for place, attempts in self.finished_parts.items():
            assert attempts
            assert self.pending.at(*place) or self.waiting.at(*place), "finished parts belong to an open task"
        for epoch, positions in self.due.items():
            assert positions, "an epoch without due tasks is kept"
            closed = positions.copy()
            closed.difference_update((start, end) for place, start, end, _ in self.waiting.runs if place == epoch)
            places = [*self.pending.places(), *((piece.epoch, piece.position) for piece in self.waiting.pieces)]
            closed.difference_update((position, position + 1) for place, position in places if place == epoch)
            assert not closed, "a done task is due"
        self._check_batches()

    def _check_batches(self) -> None:
        seen: dict[tuple[int, int], IntervalSet] = {}

        def note(epoch: int, position: int, first: int, end: int) -> None:
            assert epoch <= self.epoch
            assert 0 <= position < self.begun(epoch)
            assert 0 <= first < end <= self.batch_count(epoch, position)
            batches = seen.setdefault((epoch, position), IntervalSet())
            assert batches.add(first, end) == end - first, "a batch is in two states"

        out = [pending.piece for pending in self.pending]
        for piece in (*out, *self.waiting.pieces):
            note(piece.epoch, piece.position, piece.first_batch, piece.end_batch)
            assert piece.batch_count == self.batch_count(piece.epoch, piece.position)
        for table in (self.failed.failed, self.failed.dropped):
            for place, batches in table:
                for first, end in batches:
                    note(*place, first, end)
        places = {epoch: IntervalSet.of(p for e, p in seen if e == epoch) for epoch, _ in seen}
        last = (-1, 0, 0)
        for epoch, start, end, failures in self.waiting.runs:
            assert epoch <= self.epoch
            assert 0 <= start < end <= self.begun(epoch)
            assert last[0] < epoch or last[1] < start or (last[1] == start and last[2] != failures)
            assert failures < self.settings.attempts_limit
            assert epoch not in places or not places[epoch].overlaps(start, end), "a task is in two states"
            last = (epoch, end, failures)
