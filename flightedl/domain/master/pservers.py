"""What the master knows of the pservers, and what each has to be told or asked.

A pserver that came back is *settled* when what it lacks is in the queue again (``recovery.replay``). Pservers that
have lost values which no checkpoint has make the model begin again (``recovery.reinitialization``). When an epoch has
ended, all are asked again what they have (``recovery.audit``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from msgspec.structs import replace

from flightedl.domain.exactly_once.intervals import IntervalSet
from flightedl.domain.master.effects import Kind, Outbox, pserver_named
from flightedl.domain.queue.tasks import TaskQueue
from flightedl.domain.recovery.audit import Audit
from flightedl.domain.recovery.reinitialization import LostValues, Reinitialize, RestartServers, next_step
from flightedl.domain.recovery.replay import AppliedSummary, PserverRecovery, tasks_to_reopen
from flightedl.errors import NotFoundError
from flightedl.messages.control import AppliedReply
from flightedl.messages.tasks import FinishedTask, ReturnedTask, TasksTicket

#: Stands for the generation of a pserver that acknowledged nothing, because it has no blocks.
_NOTHING_TO_LOSE = 1 << 62
_SEALED_AT_ONCE = 64


class Pservers:
    """The pservers of one job."""

    def __init__(
        self, pserver_count: int, recovery: Literal["replay", "rollback"], stored: bytes | None, outbox: Outbox
    ) -> None:
        self.count = pserver_count
        self._outbox = outbox
        self._recovery = (
            PserverRecovery(pserver_count, recovery)
            if stored is None
            else PserverRecovery.restore(stored, pserver_count, recovery)
        )
        self._audit = Audit(pserver_count)
        #: index -> generation of the processes whose lease is alive.
        self.present: dict[int, int] = {}
        #: index -> why what its process lacks cannot be done again.
        self._refused: dict[int, str] = {}
        self._lacking: dict[int, LostValues] = {}
        #: index -> the generation that is to end, so that its successor begins without values.
        self._sent_back: Mapping[int, int] = {}
        #: index -> when it is asked again what it has.
        self._ask_at: dict[int, float] = {}
        #: index -> (generation, epochs below this that it was told the size of).
        self._sealed: dict[int, tuple[int, int]] = {}
        #: The highest version that any of them told of.
        self.highest_version = 0

    def encode(self) -> bytes:
        """What a later master goes on from; belongs into the same transaction as the queue's state."""
        return self._recovery.encode()

    def leases_seen(self, present: Mapping[int, int]) -> tuple[dict[int, int], dict[int, int]]:
        """Take note of the live leases. Return the processes that are gone, and those that are new, by index."""
        known, self.present = self.present, dict(present)
        gone = {index: generation for index, generation in known.items() if present.get(index) != generation}
        new = {index: each for index, each in present.items() if known.get(index) != each and index < self.count}
        return gone, new

    def seen(self, index: int, generation: int) -> None:
        text = "pserver is there index=%d generation=%d"
        self._outbox.note(Kind.PSERVER_CAME, pserver_named(index), text, index, generation)
        if generation != self._recovery.generation_of(index):
            self._refused.pop(index, None)
        self._recovery.seen(index, generation)
        self._outbox.wake(index)

    def wake_all(self) -> None:
        for index in range(self.count):
            self._outbox.wake(index)

    # what is settled

    @property
    def refusal(self) -> str:
        """Why the job cannot go on: a pserver lacks what cannot be done again. Empty: it can."""
        if self._audit.has_failed:
            return (
                "a pserver lacks work that trainers report as done, however often it is done again, so the model lacks "
                "some of the data: keep the master's log, and begin the job again with --resume"
            )
        return next(iter(self._refused.values()), "")

    def is_settled(self, index: int, generation: int) -> bool:
        """Whether what this process has is taken into account."""
        return self._recovery.generation_of(index) == generation and self._recovery.is_settled(index)

    @property
    def is_everybody_settled(self) -> bool:
        """Whether every pserver is there, and what it has is taken into the queue's account."""
        return self._recovery.is_all_settled and all(
            index in self.present and self.is_settled(index, self.present[index]) for index in range(self.count)
        )

    def settled(self) -> dict[int, int]:
        """The processes whose word was taken, by index: their generations."""
        return self._recovery.settled()

    def counts(self, report: FinishedTask) -> bool:
        """Whether finished work is in the pservers that count; one without blocks was never asked."""
        named = dict(enumerate(report.pservers))
        return self._recovery.accepts([named.get(i) or _NOTHING_TO_LOSE for i in range(self.count)])

    def without_lost_work(self, ticket: TasksTicket) -> tuple[TasksTicket, list[ReturnedTask]]:
        """Give finished work back that went with a pserver. Return what is left of the ticket, and that work."""
        kept = [report for report in ticket.finished if self.counts(report)]
        lost = [
            ReturnedTask(epoch=report.epoch, position=report.position, attempt=report.attempt)
            for report in ticket.finished
            if not self.counts(report)
        ]
        if not lost:
            return ticket, []
        text = "finished work was lost with a pserver trainer=%s pieces=%d"
        self._outbox.note(Kind.WORK_LOST, ticket.trainer, text, ticket.trainer, len(lost))
        return replace(ticket, finished=kept, returned=[*ticket.returned, *lost]), lost

    def must_end(self, index: int, generation: int) -> bool:
        """Whether this process has to end and come back: to a checkpoint, or without values."""
        reload = self._recovery.to_reload().get(index)
        wanted = self._sent_back.get(index) if reload is None else reload.generation
        return wanted == generation

    def goes_back(self, index: int) -> bool:
        """Whether the process of this pserver is about to go back to a checkpoint."""
        return index in self._recovery.to_reload()

    def must_be_asked(self, index: int, generation: int) -> tuple[bool, int | None]:
        """Whether to ask this process what it has, and the audit that the answer is for; None: for none."""
        if not self.is_settled(index, generation):
            return True, None
        audit = self._audit.wanted(index, generation)
        return audit is not None, audit

    def ask_again(self, index: int, at: float) -> None:
        """This pserver is not asked before then what it has."""
        self._ask_at[index] = at

    def asked_again_in(self, index: int, now: float) -> float:
        """After how many seconds this pserver may be asked what it has."""
        return max(0.0, self._ask_at.get(index, now) - now)

    def answered(
        self, index: int, generation: int, audit: int | None, reply: AppliedReply, queue: TaskQueue | None
    ) -> bool:
        """A process says what it has. True: it is settled with that, which has to be stored."""
        self._lacking.pop(index, None)
        if not self._lacking:
            # Its values were in a checkpoint after all, or all have new ones.
            self._sent_back = {}
        if audit is None:
            return self._announced(index, generation, reply, queue)
        if queue is not None:
            self._audited(index, generation, audit, reply, queue)
        return False

    def _announced(self, index: int, generation: int, reply: AppliedReply, queue: TaskQueue | None) -> bool:
        """Reopen what this process lacks.

        A process that lacks an epoch of which nothing is known any more is never settled; see ``refusal``.
        """
        try:
            lacking = self._recovery.announced(
                index,
                generation,
                AppliedSummary.decode(reply.summary),
                0 if queue is None else queue.begun_epochs,
                (lambda _epoch: 0) if queue is None else queue.epoch_size,
                reply.checkpoint,
            )
        except NotFoundError as error:
            self._refuse(index, reply.checkpoint, error)
            return False
        if lacking is None:
            return False
        reopened = 0 if queue is None else self._reopen(lacking, queue)
        self._outbox.note(
            Kind.PSERVER_SETTLED,
            pserver_named(index),
            "pserver is settled index=%d generation=%d checkpoint=%s tasks_to_do_again=%d",
            index,
            generation,
            reply.checkpoint,
            reopened,
        )
        for text in reply.skipped:
            who = pserver_named(index)
            self._outbox.note(Kind.CHECKPOINT_TROUBLE, who, "pserver %d skipped %s", index, text, is_warning=True)
        self._outbox.touch()
        return True

    def reopen_all(self, queue: TaskQueue) -> None:
        """Have all done again: the model begins anew, and begins with the first epoch."""
        self._reopen(tasks_to_reopen(AppliedSummary(), queue.begun_epochs, lambda epoch: size_of(queue, epoch)), queue)

    def _reopen(self, lacking: Mapping[int, IntervalSet], queue: TaskQueue) -> int:
        return sum(queue.reopen(epoch, tasks) for epoch, tasks in lacking.items())

    def _refuse(self, index: int, checkpoint: int | None, error: NotFoundError) -> None:
        origin = "no checkpoint" if checkpoint is None else f"checkpoint {checkpoint}"
        reason = (
            f"pserver {index} came back from {origin}, and what it lacks cannot be done again ({error}): "
            "stop the job and begin it again with --resume"
        )
        if self._refused.get(index) != reason:
            self._outbox.note(Kind.JOB_REFUSED, pserver_named(index), "%s", reason, is_warning=True)
        self._refused[index] = reason

    # the audit

    def begin_audit(self, queue: TaskQueue, *, is_last: bool) -> None:
        """Have all asked what they have, if that is due; ``is_last``: nothing is to be done any more."""
        if self._audit.epochs_ended(queue.begun_epochs if is_last else queue.epoch, queue.revision, is_last=is_last):
            self.wake_all()

    def is_audited(self, queue: TaskQueue) -> bool:
        """Whether every process that counts has all that counts as done."""
        return self._audit.is_clean(queue.revision, self._recovery.settled())

    @property
    def missing_count(self) -> int:
        """Tasks that counted as done and were missing in a pserver, since this master began."""
        return self._audit.missing_count

    def _audited(self, index: int, generation: int, audit: int, reply: AppliedReply, queue: TaskQueue) -> None:
        """Reopen what counts as done and is missing in this process."""
        reopened = 0
        summary = AppliedSummary.decode(reply.summary)
        lacking = self._audit.answered(index, generation, audit, summary, lambda epoch: size_of(queue, epoch))
        for epoch, tasks in lacking.items():
            # A task of which something is missing for other reasons is none that a pserver can have wholly.
            tasks.difference_update(queue.incomplete(epoch))
            count = self._reopen({epoch: tasks}, queue)
            reopened += count
            if count:
                self._outbox.note(
                    Kind.WORK_LOST,
                    pserver_named(index),
                    "pserver lacks work that was reported as done, it is done again index=%d generation=%d epoch=%d "
                    "tasks=%d first_task=%d",
                    index,
                    generation,
                    epoch + 1,
                    count,
                    next(iter(tasks))[0],
                    is_warning=True,
                )
        self._audit.found(reopened)
        if reopened + (queue.is_stopped and self._claim_torn(queue)):
            self._outbox.touch()

    def _claim_torn(self, queue: TaskQueue) -> int:
        """Have tasks finished that only some blocks have a batch of; how many."""
        torn = self._audit.torn(lambda epoch: size_of(queue, epoch))
        count = sum(queue.claim(epoch, tasks) for epoch, tasks in torn.items())
        if count:
            text = "work is in some blocks only, it is finished before the job ends tasks=%d"
            self._outbox.note(Kind.WORK_LOST, "", text, count)
        return count

    # values that are gone

    @property
    def waiting_for(self) -> str:
        """For people; empty: no values are lacking."""
        if not self._lacking:
            return ""
        missing = ", ".join(str(index) for index in sorted(self._lacking))
        return f"the model to begin anew: pserver {missing} died before there was a checkpoint"

    def lacks(self, index: int, generation: int, election: int, *, may_be_saved: bool) -> Reinitialize | None:
        """A pserver lacks the values of an election; the step to take when all of them do.

        Nobody is settled any more when there is one.
        """
        if index not in self._lacking:
            text = "pserver %d has lost its values, and there is no checkpoint yet"
            self._outbox.note(Kind.VALUES_LOST, pserver_named(index), text, index, is_warning=True)
        self._lacking[index] = LostValues(generation, election)
        present = {i: g for i, g in self.present.items() if i < self.count}
        self._lacking = {i: each for i, each in self._lacking.items() if present.get(i) == each.generation}
        step = self.next_step(present, may_be_saved=may_be_saved)
        self._sent_back = step.generations if isinstance(step, RestartServers) else {}
        if isinstance(step, Reinitialize):
            self._recovery.begin_anew()
            self._outbox.touch()
            return step
        for other in self._sent_back:
            self._outbox.wake(other)
        return None

    def next_step(self, present: Mapping[int, int], *, may_be_saved: bool) -> RestartServers | Reinitialize | None:
        """What is to be done about values that are lacking; see ``domain.recovery.reinitialization``."""
        return next_step(self.count, present, self._lacking, self._recovery.settled(), may_be_saved=may_be_saved)

    # epochs that are over

    def epochs_to_seal(self, index: int, generation: int, queue: TaskQueue) -> list[tuple[int, int]]:
        """(epoch, tasks) of the epochs that are over since this process was told the last time."""
        if not self.is_settled(index, generation):
            return []
        known, first = self._sealed.get(index, (0, 0))
        first = max(first if known == generation else 0, queue.epoch - _SEALED_AT_ONCE)
        return [(epoch, size) for epoch in range(first, queue.epoch) if (size := size_of(queue, epoch))]

    def sealed(self, index: int, generation: int, end_epoch: int) -> None:
        """This process was told of the epochs below ``end_epoch``."""
        self._sealed[index] = (generation, end_epoch)

    def check(self) -> None:
        self._recovery.check()


def size_of(queue: TaskQueue, epoch: int) -> int:
    """Tasks of an epoch that has ended; 0: it is so long ago that it is forgotten."""
    try:
        return queue.epoch_size(epoch)
    except NotFoundError:
        return 0
