"""The master's knowledge of the pservers, and the messages that it must send to them.

A restarted pserver is *settled* once the queue contains all tasks that the pserver lacks (``recovery.replay``). If
pservers have lost values that no checkpoint contains, the model is reinitialized (``recovery.reinitialization``). At
the end of an epoch, the master asks all pservers for their applied batches (``recovery.audit``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal

from msgspec.structs import replace

from flightedl.domain.exactly_once.intervals import IntervalSet
from flightedl.domain.master.effects import Kind, Outbox, pserver_named
from flightedl.domain.queue.tasks import TaskQueue
from flightedl.domain.recovery.audit import Audit
from flightedl.domain.recovery.reinitialization import LostValues, Reinitialize, RestartServers, next_step
from flightedl.domain.recovery.replay import AppliedSummary, PserverRecovery, tasks_to_reopen
from flightedl.errors import NotFoundError
from flightedl.marks import sometimes
from flightedl.messages.control import AppliedReply
from flightedl.messages.tasks import FinishedTask, ReturnedTask, TasksTicket

#: Generation that stands for a pserver without blocks, which acknowledges no batches.
_NOTHING_TO_LOSE = 1 << 62
#: Maximum number of epochs in one ``SealRequest``.
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
        #: Index -> generation of the process, for pservers with a live lease.
        self.present: dict[int, int] = {}
        #: Index -> reason why the process's missing batches cannot be repeated.
        self._refused: dict[int, str] = {}
        #: Index -> description of the values that the process has lost.
        self._lacking: dict[int, LostValues] = {}
        #: Index -> the generation whose process must end, so that its successor starts without values.
        self._to_restart: Mapping[int, int] = {}
        #: Index -> earliest time at which to ask the pserver for its applied batches again.
        self._ask_at: dict[int, float] = {}
        #: Index -> (generation, first epoch whose size the process does not know yet, earliest epoch that was open).
        self._sealed: dict[int, tuple[int, int, int]] = {}
        #: Index -> version of the newest placement that may be stored; see ``placed``.
        self._placements: Mapping[int, int] = {}
        #: Indexes of the pservers that have or may get blocks: all of them before the first placement.
        self._holders: Collection[int] = range(pserver_count)
        #: True while blocks may move. No audit begins during this time.
        self.is_moving = False
        #: Highest version that any pserver has reported.
        self.highest_version = 0

    def encode(self) -> bytes:
        """Return the state for a successor. Store it in the same transaction as the queue."""
        return self._recovery.encode()

    def leases_seen(self, present: Mapping[int, int]) -> tuple[dict[int, int], dict[int, int]]:
        """Record the live leases. Return the processes that are gone and those that are new, by index."""
        known, self.present = self.present, dict(present)
        gone = {index: generation for index, generation in known.items() if present.get(index) != generation}
        new = {index: each for index, each in present.items() if known.get(index) != each and index < self.count}
        return gone, new

    def seen(self, index: int, generation: int) -> None:
        text = "pserver registered index=%d generation=%d"
        self._outbox.note(Kind.PSERVER_CAME, pserver_named(index), text, index, generation)
        if generation != self._recovery.generation_of(index):
            self._refused.pop(index, None)
        self._recovery.seen(index, generation, self._placements.get(index, 0))
        self._outbox.wake(index)

    def placed(self, placements: Mapping[int, int], holders: Collection[int], certain: int | None) -> None:
        """Record the owners of blocks (see ``domain.recovery.replacements``).

        Args:
            placements: Index -> newest placement that may be stored, or 0; see ``Director.placement_for``.
            holders: Indexes of the pservers that have blocks in a placement that may be stored.
            certain: Version of the stored placement; None while a transaction is in progress.
        """
        self._placements, self._holders = dict(placements), holders
        if certain is not None:
            self._recovery.placement_read(certain)

    def resize(self, count: int) -> None:
        """Change the number of pservers. Register the added pservers that are already present."""
        before, self.count = self.count, count
        self._recovery.resize(count)
        self._audit.resize(count)
        for index in range(before, count):
            if index in self.present:
                self.seen(index, self.present[index])

    def wake_all(self) -> None:
        for index in range(self.count):
            self._outbox.wake(index)

    # settled pservers

    @property
    def refusal(self) -> str:
        """Why the job cannot continue: a pserver lacks work that cannot be repeated. Empty if the job can continue."""
        if self._audit.has_failed:
            return (
                "a pserver still lacks work that trainers have repeated several times, so the model lacks some of the "
                "data. Keep the master's log, and restart the job with --resume"
            )
        return next(iter(self._refused.values()), "")

    def is_settled(self, index: int, generation: int) -> bool:
        """True if the queue contains all tasks that this process lacks."""
        return self._recovery.generation_of(index) == generation and self._recovery.is_settled(index)

    @property
    def is_everybody_settled(self) -> bool:
        return self._recovery.is_all_settled and all(
            index in self.present and self.is_settled(index, self.present[index]) for index in range(self.count)
        )

    def settled(self) -> dict[int, int]:
        return self._recovery.settled()

    def counts(self, report: FinishedTask) -> bool:
        """True if every pserver that applied this finished piece still has it. Ignores pservers without blocks."""
        named = dict(enumerate(report.pservers))
        indexes = range(max(self.count, len(named)))
        return self._recovery.accepts([named.get(i) or _NOTHING_TO_LOSE for i in indexes], report.placement)

    def without_lost_work(self, ticket: TasksTicket) -> tuple[TasksTicket, list[ReturnedTask]]:
        """Replace reports of finished work with reports of returned work if pservers have since lost the work.

        Return the changed ticket, and the work that was lost.
        """
        kept = [report for report in ticket.finished if self.counts(report)]
        lost = [
            ReturnedTask(epoch=report.epoch, position=report.position, attempt=report.attempt)
            for report in ticket.finished
            if not self.counts(report)
        ]
        if not lost:
            return ticket, []
        sometimes("finished work was lost with a pserver")
        text = "finished work was lost with a pserver trainer=%s pieces=%d"
        self._outbox.note(Kind.WORK_LOST, ticket.trainer, text, ticket.trainer, len(lost))
        return replace(ticket, finished=kept, returned=[*ticket.returned, *lost]), lost

    def must_end(self, index: int, generation: int) -> bool:
        """True if this process must be replaced by a process that loads a checkpoint or starts without values."""
        reload = self._recovery.to_reload().get(index)
        wanted = self._to_restart.get(index) if reload is None else reload.generation
        return wanted == generation

    def must_reload(self, index: int) -> bool:
        return index in self._recovery.to_reload()

    def must_be_audited(self, index: int, generation: int) -> tuple[bool, int | None]:
        """Return (True if this process must be asked for its applied batches, the audit that needs them or None)."""
        if not self.is_settled(index, generation):
            return True, None
        audit = self._audit.wanted(index, generation)
        return audit is not None, audit

    def ask_again(self, index: int, at: float) -> None:
        """Ask this pserver for its applied batches again, at ``at`` or later."""
        self._ask_at[index] = at

    def seconds_until_asked(self, index: int, now: float) -> float:
        """Return the number of seconds until this pserver may be asked for its applied batches again."""
        return max(0.0, self._ask_at.get(index, now) - now)

    def answered(
        self, index: int, generation: int, audit: int | None, reply: AppliedReply, queue: TaskQueue | None
    ) -> bool:
        """Handle the applied batches of a process. True if the process is now settled."""
        self._lacking.pop(index, None)
        if not self._lacking:
            # Either a checkpoint contained the lost values after all, or all pservers have new values.
            self._to_restart = {}
        if audit is None:
            return self._announced(index, generation, reply, queue)
        if queue is not None:
            self._audited(index, generation, audit, reply, queue)
        return False

    def _announced(self, index: int, generation: int, reply: AppliedReply, queue: TaskQueue | None) -> bool:
        """Reopen the tasks that this process lacks.

        If the queue has already forgotten the epoch of a missing task, the process is never settled; see ``refusal``.
        """
        try:
            lacking = self._recovery.announced(
                index,
                generation,
                AppliedSummary.decode(reply.summary),
                0 if queue is None else queue.begun_epochs,
                (lambda _epoch: 0) if queue is None else queue.epoch_size,
                reply.checkpoint,
                self._placements.get(index, 0),
            )
        except NotFoundError as error:
            self._refuse(index, reply.checkpoint, error)
            return False
        if lacking is None:
            return False
        reopened = 0 if queue is None else self._reopen(lacking, queue)
        if reopened:
            sometimes("the batches that a checkpoint lacked were repeated")
        self._outbox.note(
            Kind.PSERVER_SETTLED,
            pserver_named(index),
            "pserver is settled index=%d generation=%d checkpoint=%s tasks_to_repeat=%d",
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
        """Reopen all tasks since the first epoch, because the model is being reinitialized."""
        self._reopen(tasks_to_reopen(AppliedSummary(), queue.begun_epochs, lambda epoch: size_of(queue, epoch)), queue)

    def _reopen(self, lacking: Mapping[int, IntervalSet], queue: TaskQueue) -> int:
        return sum(queue.reopen(epoch, tasks) for epoch, tasks in lacking.items())

    def _refuse(self, index: int, checkpoint: int | None, error: NotFoundError) -> None:
        origin = "without a checkpoint" if checkpoint is None else f"from checkpoint {checkpoint}"
        reason = (
            f"pserver {index} restarted {origin}, and the work that it lacks cannot be repeated ({error}). "
            "Stop the job and restart it with --resume"
        )
        if self._refused.get(index) != reason:
            self._outbox.note(Kind.JOB_REFUSED, pserver_named(index), "%s", reason, is_warning=True)
        self._refused[index] = reason

    # the audit

    @property
    def is_audit_open(self) -> bool:
        return self._audit.is_open

    def begin_audit(self, queue: TaskQueue, *, is_last: bool) -> None:
        """Ask all pservers for their applied batches, if an audit is due.

        ``is_last`` is True if no task remains.
        """
        if self.is_moving:
            return
        if self._audit.epochs_ended(queue.begun_epochs if is_last else queue.epoch, queue.revision, is_last=is_last):
            self.wake_all()

    def is_audited(self, queue: TaskQueue) -> bool:
        return self._audit.is_clean(queue.revision, self._recovery.settled())

    @property
    def missing_count(self) -> int:
        """Number of finished tasks that pservers turned out to lack since this master started."""
        return self._audit.missing_count

    def _audited(self, index: int, generation: int, audit: int, reply: AppliedReply, queue: TaskQueue) -> None:
        reopened = 0
        summary = AppliedSummary.decode(reply.summary)
        lacking = self._audit.answered(index, generation, audit, summary, lambda epoch: size_of(queue, epoch))
        for epoch, tasks in lacking.items():
            # Ignore tasks that are incomplete for another reason: no pserver can have applied all their batches.
            tasks.difference_update(queue.incomplete(epoch))
            count = self._reopen({epoch: tasks}, queue)
            reopened += count
            if count:
                sometimes("the audit found missing work")
                self._outbox.note(
                    Kind.WORK_LOST,
                    pserver_named(index),
                    "repeating work that was reported as done but is missing in a pserver index=%d generation=%d "
                    "epoch=%d tasks=%d first_task=%d",
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
        """Reopen each task that has a batch that only some blocks have applied. Return the number of reopened tasks."""
        torn = self._audit.torn(lambda epoch: size_of(queue, epoch))
        count = sum(queue.claim(epoch, tasks) for epoch, tasks in torn.items())
        if count:
            sometimes("a stopped job finished work that only some blocks had")
            text = "finishing work that only some blocks have applied before the job ends tasks=%d"
            self._outbox.note(Kind.WORK_LOST, "", text, count)
        return count

    # lost values

    @property
    def waiting_for(self) -> str:
        """Description, for users, of the pservers that have lost their values; empty if no pserver has."""
        if not self._lacking:
            return ""
        missing = ", ".join(str(index) for index in sorted(self._lacking))
        return f"the model to be initialized again: pserver {missing} died before the first checkpoint"

    def lacks(self, index: int, generation: int, election: int, *, may_be_saved: bool) -> Reinitialize | None:
        """Record that a pserver lost the values of an election. If all pservers lost them, return the next step.

        Once this has returned a step, no pserver is settled.
        """
        if index not in self._lacking:
            text = "pserver %d has lost its values before the first checkpoint"
            self._outbox.note(Kind.VALUES_LOST, pserver_named(index), text, index, is_warning=True)
        self._lacking[index] = LostValues(generation, election)
        present = {i: g for i, g in self.present.items() if i < self.count}
        self._lacking = {i: each for i, each in self._lacking.items() if present.get(i) == each.generation}
        step = self.next_step(present, may_be_saved=may_be_saved)
        self._to_restart = step.generations if isinstance(step, RestartServers) else {}
        if isinstance(step, Reinitialize):
            sometimes("the model was initialized again")
            self._recovery.reinitialize()
            self._outbox.touch()
            return step
        for other in self._to_restart:
            self._outbox.wake(other)
        return None

    def next_step(self, present: Mapping[int, int], *, may_be_saved: bool) -> RestartServers | Reinitialize | None:
        """Return the next step in replacing lost values (see ``domain.recovery.reinitialization``)."""
        return next_step(self._holders, present, self._lacking, self._recovery.settled(), may_be_saved=may_be_saved)

    # finished epochs

    def epochs_to_seal(self, index: int, generation: int, queue: TaskQueue) -> tuple[list[tuple[int, int]], int]:
        """Return what this process does not know about epochs that have ended.

        Returns:
            (epoch, number of tasks) of each ended epoch whose size it does not know, and the earliest epoch with open
            tasks. The last one is repeated if earlier epochs were open when it was last sent.
        """
        lowest = queue.lowest_open_epoch
        open_epoch = queue.epoch if lowest is None else min(lowest, queue.epoch)
        if not self.is_settled(index, generation):
            return [], open_epoch
        known, first, was_open = self._sealed.get(index, (0, 0, 0))
        if known != generation:
            first = was_open = 0
        elif was_open < min(first, open_epoch):
            first -= 1
        first = max(first, queue.epoch - _SEALED_AT_ONCE)
        return [(epoch, size) for epoch in range(first, queue.epoch) if (size := size_of(queue, epoch))], open_epoch

    def sealed(self, index: int, generation: int, end_epoch: int, open_epoch: int) -> None:
        """Record that this process knows the sizes of all epochs below ``end_epoch``, and the earliest open epoch."""
        self._sealed[index] = (generation, end_epoch, open_epoch)

    def check(self) -> None:
        self._recovery.check()


def size_of(queue: TaskQueue, epoch: int) -> int:
    """Return the number of tasks in a finished epoch, or 0 if the queue has forgotten the epoch."""
    try:
        return queue.epoch_size(epoch)
    except NotFoundError:
        return 0
