"""What has to be finished before the job ends, and when trainers are told that all is done.

Trainers are told so only when nothing that is done can get lost any more: the queue is over, every pserver is there and
what it has was compared with what is done, every round is closed, and a last checkpoint has everything. A pserver that
is away is waited for. A store that fails again and again is not; a job that keeps no checkpoints has none to wait for.

A job that a trainer has stopped is over when nothing is out and nothing is due: done work that was lost is done again
first, and so is work of which some blocks have batches that others lack. The pservers are compared when all members
have left: whoever is no member can push nothing any more. If nobody asks for work for ``ALONE_S`` while something is
due, the job has failed, and ``unfinished`` names the tasks. Where no model is declared there is nothing to compare.
"""

from __future__ import annotations

from flightedl.domain.checkpoint.values import OpenRounds
from flightedl.domain.consistency.modes import Sync
from flightedl.domain.master.checkpointing import Checkpointing
from flightedl.domain.master.members import Members
from flightedl.domain.master.pservers import Pservers
from flightedl.domain.master.work import Work
from flightedl.domain.queue.tasks import TaskQueue

#: How long a stopped job that has something left to do waits for a trainer.
ALONE_S = 30.0
_NAMED = 10


class Ending:
    """The end of epochs, and of the job."""

    def __init__(self, pservers: Pservers, checkpointing: Checkpointing) -> None:
        self._pservers = pservers
        self._checkpointing = checkpointing
        #: The ticket of the checkpoint that has everything; None: not everything is done.
        self.final_ticket: int | None = None
        #: Whether trainers may be told that all is done.
        self.may_end = False
        #: Why a stopped job is not whole and will not be, for people; empty: it is, or may still be.
        self.unfinished = ""
        #: When a trainer asked for work last; None: not since this master began.
        self._asked_at: float | None = None
        self._epoch_seen = 0

    def start(self, work: Work | None) -> None:
        """A predecessor has seen to the epochs before this one."""
        self._epoch_seen = 0 if work is None else work.queue.epoch

    def lost(self) -> None:
        """Something that counted as done may be missing: the last checkpoint does not have everything."""
        self.final_ticket = None

    def work_asked(self, now: float) -> None:
        self._asked_at = now

    def look(self, work: Work | None, members: Members | None, now: float) -> None:
        """Something has happened: an epoch may have ended, or the job."""
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
            # What waits in an open round is neither in the values nor in a checkpoint: all rounds are closed first.
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
                f"the job was stopped, but for {ALONE_S:.0f} s not all pservers have been there with all that they "
                "had: the model may lack some of what was trained; go on from the last checkpoint with --resume"
            )
        tasks = queue.unfinished(_NAMED)
        if not tasks:
            return ""
        named = ", ".join(
            f"{', '.join(str(task) for at, task in tasks if at == epoch)} of epoch {epoch + 1}"
            for epoch in sorted({epoch for epoch, _ in tasks})
        )
        return (
            f"the job was stopped, but no trainer trains again what was lost with a pserver, at least tasks {named}: "
            "call job.stop() and stay in the loop until it ends, or go on with --resume"
        )

    def open_rounds(self, members: Members) -> OpenRounds | None:
        """What is known of the rounds; None: the mode has none."""
        if not isinstance(members.membership.mode, Sync):
            return None
        return OpenRounds(self._pservers.highest_version, has_members=bool(members.membership.members))


def _is_still(members: Members) -> bool:
    """True if nobody is a member, and all pservers know it."""
    return not members.membership.members and members.membership.is_quiet
