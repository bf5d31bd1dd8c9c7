"""Assignment of the tasks of the training data.

``work`` assigns tasks when trainers request them; ``deterministic_schedule`` delays assignments in deterministic runs.
``epoch_ends`` decides which idle trainers remain members at the end of an epoch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import msgspec
from msgspec.structs import replace

from flightedl.domain.consistency.modes import Mode
from flightedl.domain.master.deterministic_schedule import DeterministicSchedule
from flightedl.domain.master.effects import Kind, Outbox
from flightedl.domain.master.epoch_ends import EpochEnds
from flightedl.domain.master.work import Work
from flightedl.domain.queue.tasks import TaskQueue
from flightedl.domain.queue.values import QueueSettings
from flightedl.messages.declarations import DatasetDeclaration
from flightedl.messages.tasks import MOMENT_S, Assignment, StopRecord, TasksReply, TasksTicket

#: Seconds after which a trainer asks again if it only waits for the end of the job.
_END_RETRY_S = 0.1
_SCHEDULE_RETRY_S = 0.5


class HandedOut(msgspec.Struct, frozen=True):
    """The tasks assigned to a trainer in reply to one ticket."""

    given: list[Assignment]
    outcome: str
    retry_after_s: float
    #: True if these tasks begin an epoch of a deterministic run, so that all trainers must join again.
    begins_epoch: bool = False


class Training:
    """The training data of a job, as tasks for its trainers.

    Args:
        trainer_count: As in ``DeterministicSchedule``.
        stop: Record of the job's stop; None if the job was not stopped.
        outbox: Receives the queue's effects.
    """

    def __init__(self, trainer_count: int, stop: StopRecord | None, outbox: Outbox) -> None:
        #: None if no dataset has been declared.
        self.work: Work | None = None
        self.stop = stop
        self._outbox = outbox
        self._schedule = DeterministicSchedule(trainer_count)
        self._epoch_ends = EpochEnds()

    @property
    def is_stopped(self) -> bool:
        return self.stop is not None

    @property
    def is_over(self) -> bool:
        return self.work is not None and self.work.queue.is_over

    @property
    def known(self) -> Work:
        assert self.work is not None, "a declared dataset has a queue"
        return self.work

    @property
    def repeated_count(self) -> int:
        return 0 if self.work is None else self.work.repeated_count

    def is_deterministic(self, mode: Mode) -> bool:
        return self._schedule.is_on(mode)

    # the queue

    def begin(
        self, tasks: QueueSettings, stored: bytes | None, failures: bytes | None, *, may_reseed: bool = False
    ) -> None:
        """Start with the dataset's tasks, or continue with the ``stored`` queue and ``failures`` of a previous master.

        Raises:
            UsageError: the stored queue has other settings; nothing was changed. With ``may_reseed``, the seed may
                differ.
        """
        queue = TaskQueue.decode(stored, tasks, failures, may_reseed=may_reseed) if stored else TaskQueue(tasks)
        self.work = Work(queue, self._outbox)
        if self.is_stopped:
            queue.stop()

    def redeclare(self, before: DatasetDeclaration, now: DatasetDeclaration) -> None:
        """Continue with a different number of epochs, and a different order in epochs that have not begun.

        Raises:
            UsageError: the queue has already passed the new last epoch; nothing was changed.
        """
        if before == now:
            return
        queue = self.known.queue
        tasks = dataclasses.replace(queue.settings, epochs=now.epochs, seed=now.seed, shuffle=now.shuffle)
        self.begin(tasks, *queue.encode_parts(), may_reseed=True)
        if before.epochs != now.epochs:
            self._outbox.note(Kind.DECLARED, "", "epochs changed before=%s now=%s", before.epochs, now.epochs)
        if (before.shuffle, before.seed) != (now.shuffle, now.seed):
            first_epoch = self.known.queue.first_unbegun_epoch + 1
            text = "order changed shuffle=%s seed=%d first_epoch=%d"
            self._outbox.note(Kind.DECLARED, "", text, now.shuffle, now.seed, first_epoch)

    def deduplicate(self) -> None:
        if self.work is not None:
            self.work.queue.deduplicate()

    def stop_job(self, stop: StopRecord) -> None:
        self.stop = stop
        if self.work is not None:
            self.work.queue.stop()

    def trainer_departed(self, trainer: str, now: float, *, is_graceful: bool) -> None:
        if self.work is not None:
            self.work.trainer_departed(trainer, now, is_graceful=is_graceful)
        self._epoch_ends.gone(trainer)

    def holds_work(self, trainer: str, generation: int, attempt: int | None) -> bool:
        """True if the trainer holds this attempt of a task, or holds any task if ``attempt`` is None."""
        if self.work is None:
            return False
        if attempt is None:
            return self.work.queue.holds(trainer)
        return self.work.queue.is_current(trainer, attempt, generation)

    # tickets

    def asked(self, ticket: TasksTicket) -> None:
        self._epoch_ends.asked(ticket)

    def hand_out(
        self, ticket: TasksTicket, trainers: Mapping[str, int], now: float, *, is_deterministic: bool
    ) -> HandedOut:
        """Assign tasks like ``Work.hand_out``, but in a deterministic run only as many as the schedule allows."""
        work, count = self.known, len(trainers)
        if not is_deterministic or not ticket.want or work.queue.is_stopped:
            return HandedOut(*work.hand_out(ticket, now, count))
        begins_epoch = self._schedule.begins(work.queue, ticket.trainer, trainers.keys(), now)
        want = self._schedule.pieces_for(work.queue, ticket.trainer, ticket.want)
        if not want:
            return HandedOut([], "none_now", _SCHEDULE_RETRY_S, begins_epoch)
        return HandedOut(*work.hand_out(replace(ticket, want=want), now, count), begins_epoch)

    def should_leave(self, ticket: TasksTicket, now: float, *, waits: bool) -> bool:
        """True if rounds should no longer wait for this trainer, because it has no tasks."""
        queue = self.known.queue
        is_moment = waits and ticket.wait_s <= MOMENT_S
        return not (is_moment and self._epoch_ends.should_stay(queue, ticket, now)) and not queue.holds(ticket.trainer)

    def joins_with(self, ticket: TasksTicket, first: Assignment) -> bool:
        """True if a trainer may rejoin when it gets its first task. Call this once for each first task."""
        return self._epoch_ends.joins_with(ticket, first)

    def joins_together(self, trainer: str, generation: int, trainers: Mapping[str, int], now: float) -> dict[str, int]:
        """Return the trainers to admit now to a deterministic run, including this trainer; empty if it must wait."""
        return self._schedule.joins(self.known.queue, trainer, generation, trainers, now)

    def reply(self, ticket: TasksTicket, handed: HandedOut, *, is_deterministic: bool, may_end: bool) -> TasksReply:
        """Return the reply to a ticket, including tasks that the trainer may read ahead."""
        outcome, retry_after_s = handed.outcome, handed.retry_after_s
        if is_ending := outcome == "epochs_done" and not may_end:
            outcome, retry_after_s = "none_now", _END_RETRY_S
        has_none_left = len(handed.given) < ticket.want and not is_deterministic
        ahead = self.known.promise(ticket.trainer) if has_none_left else []
        self._epoch_ends.promised(ticket, ahead)
        return TasksReply(
            assignments=handed.given,
            outcome=outcome,
            ahead=ahead,
            retry_after_s=retry_after_s,
            is_ending=is_ending,
            waiting_for="" if handed.given else self.known.queue.blame.waits_for(ticket.trainer),
            epoch=self.known.queue.epoch,
        )
