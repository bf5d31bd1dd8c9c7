"""Conditions under which an epoch ends and the job is done.

The master reports the job as done only when finished work can no longer be lost: the queue is finished, all pservers
are present and have been compared with the queue, all rounds are closed, and the final checkpoint is complete.

The master waits for missing pservers, but not for a store that keeps failing. A job without checkpoints needs no final
one, and a job without a model has nothing to compare.

A job that a trainer has stopped is done when no task is pending and no task has to be repeated. A task has to be
repeated if a pserver has lost it, or if only some blocks have applied one of its batches. The master compares the
pservers after all members have left, because only members can push.

If tasks have to be repeated and no trainer requests one for ``ALONE_S`` seconds, the job has failed, and ``unfinished``
names the tasks.
"""

from __future__ import annotations

from flightedl.domain.checkpoint.values import OpenRounds
from flightedl.domain.consistency.modes import Sync
from flightedl.domain.master.checkpointing import Checkpointing
from flightedl.domain.master.members import Members
from flightedl.domain.master.pservers import Pservers
from flightedl.domain.master.work import Work
from flightedl.domain.queue.tasks import TaskQueue

#: Seconds for which a stopped job waits for a trainer to repeat tasks.
ALONE_S = 30.0
_NAMED = 10


class Ending:
    """State of the job's end."""

    def __init__(self, pservers: Pservers, checkpointing: Checkpointing) -> None:
        self._pservers = pservers
        self._checkpointing = checkpointing
        #: Ticket of the final checkpoint; None while any work remains.
        self.final_ticket: int | None = None
        #: True if the job may be reported as done.
        self.may_end = False
        #: Reason, for users, why a stopped job cannot be completed; empty if it can.
        self.unfinished = ""
        #: Time of the last request for tasks; None if this master has not received any.
        self._asked_at: float | None = None
        self._epoch_seen = 0

    def start(self, work: Work | None) -> None:
        """Start with a predecessor's queue. The predecessor has already handled the ends of earlier epochs."""
        self._epoch_seen = 0 if work is None else work.queue.epoch

    def lost(self) -> None:
        """Record that finished work may be missing, even from the final checkpoint."""
        self.final_ticket = None

    def work_asked(self, now: float) -> None:
        self._asked_at = now

    def look(self, work: Work | None, members: Members | None, now: float) -> None:
        if work is not None and members is not None:
            queue = work.queue
            if queue.epoch > self._epoch_seen:
                self._epoch_seen = queue.epoch
                if not queue.is_done:
                    self._checkpointing.epoch_finished(self._epoch_seen - 1)
            is_last = queue.is_done or (queue.is_over and _is_still(members))
            self._pservers.begin_audit(queue, is_last=is_last)
        self.may_end = self._may_end(work, members)
        self.unfinished = "" if work is None or self.may_end else self._left_undone(work.queue, now)

    def _may_end(self, work: Work | None, members: Members | None) -> bool:
        if work is None or not work.queue.is_over or members is None:
            self.final_ticket = None
            return work is not None and work.queue.is_over
        if not self._pservers.is_everybody_settled or not self._pservers.is_audited(work.queue):
            return False
        checkpoints = self._checkpointing.checkpoints
        if self.final_ticket is None:
            # Checkpoints exclude the gradients of open rounds, so all rounds must be closed first.
            if not _is_still(members):
                return False
            if not self._checkpointing.is_kept:
                return True
            self.final_ticket = checkpoints.request_last("the end of the job")
        return checkpoints.is_over(self.final_ticket)

    def _left_undone(self, queue: TaskQueue, now: float) -> str:
        if self._asked_at is None or not queue.is_stopped or queue.holders():
            self._asked_at = now
        if now - self._asked_at < ALONE_S:
            return ""
        if not self._pservers.is_everybody_settled:
            return (
                f"the job was stopped, but some pservers have been missing or incomplete for {ALONE_S:.0f} s, so the "
                "model may lack some of the training. Continue from the last checkpoint with --resume"
            )
        tasks = queue.unfinished(_NAMED)
        if not tasks:
            return ""
        named = ", ".join(
            f"{', '.join(str(task) for at, task in tasks if at == epoch)} of epoch {epoch + 1}"
            for epoch in sorted({epoch for epoch, _ in tasks})
        )
        return (
            f"the job was stopped, but no trainer repeats tasks that were lost with a pserver, at least tasks {named}. "
            "After job.stop(), stay in the loop until it ends, or continue with --resume"
        )

    def open_rounds(self, members: Members) -> OpenRounds | None:
        """Return the state of the rounds, or None if the mode has no rounds."""
        if not isinstance(members.membership.mode, Sync):
            return None
        return OpenRounds(self._pservers.highest_version, has_members=bool(members.membership.members))


def _is_still(members: Members) -> bool:
    """True if there are no members, and every pserver knows that there are none."""
    return not members.membership.members and members.membership.is_quiet
