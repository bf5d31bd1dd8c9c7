"""When the job makes checkpoints, and when it may be said to be done.

Trainers are told that all is done only when nothing that is done can get lost any more: every pserver is there and what
it has was compared with what is done, every round is closed, and a last checkpoint has everything. A pserver that is
away is waited for. A store that fails again and again is not; a job that keeps no checkpoints has none to wait for.
"""

from __future__ import annotations

from flightedl.domain.checkpoint.values import OpenRounds
from flightedl.domain.consistency.modes import Sync
from flightedl.domain.master.checkpointing import Checkpointing
from flightedl.domain.master.members import Members
from flightedl.domain.master.pservers import Pservers
from flightedl.domain.master.work import Work


class Ending:
    """The end of epochs, and of the job.

    Args:
        pservers: Have to have everything.
        checkpointing: Saves it.
    """

    def __init__(self, pservers: Pservers, checkpointing: Checkpointing) -> None:
        self._pservers = pservers
        self._checkpointing = checkpointing
        #: The ticket of the checkpoint that has everything; None: not everything is done.
        self.final_ticket: int | None = None
        #: Whether trainers may be told that all is done.
        self.may_end = False
        self._epoch_seen = 0

    def start(self, work: Work | None) -> None:
        """A predecessor has seen to the epochs before this one."""
        self._epoch_seen = 0 if work is None else work.queue.epoch

    def lost(self) -> None:
        """Something that counted as done may be missing: the last checkpoint does not have everything."""
        self.final_ticket = None

    def look(self, work: Work | None, members: Members | None) -> None:
        """Something has happened: an epoch may have ended, or the job."""
        if work is not None and members is not None:
            queue = work.queue
            if queue.epoch > self._epoch_seen:
                self._epoch_seen = queue.epoch
                if not queue.is_done:
                    self._checkpointing.epoch_finished(self._epoch_seen - 1)
            self._pservers.begin_audit(queue)
        self.may_end = self._may_end(work, members)

    def _may_end(self, work: Work | None, members: Members | None) -> bool:
        if work is None or not work.is_over or members is None:
            self.final_ticket = None
            return work is not None and work.is_over
        if not self._pservers.is_everybody_settled:
            return False
        # A stopped job has no last epoch that could be looked at as a whole.
        if work.queue.is_done and not self._pservers.is_audited(work.queue):
            return False
        checkpoints = self._checkpointing.checkpoints
        if self.final_ticket is None:
            # What waits in an open round is neither in the values nor in a checkpoint: all rounds are closed first.
            if members.membership.members or not members.membership.is_quiet:
                return False
            if not self._checkpointing.is_kept:
                return True
            self.final_ticket = checkpoints.request_last("the end of the job")
        return checkpoints.is_over(self.final_ticket)

    def open_rounds(self, members: Members) -> OpenRounds | None:
        """What is known of the rounds; None: the mode has none."""
        if not isinstance(members.membership.mode, Sync):
            return None
        return OpenRounds(self._pservers.highest_version, has_members=bool(members.membership.members))
