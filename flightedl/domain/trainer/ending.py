"""A trainer's knowledge of the job's end. After the end, it lets the trainer read only the final model.

When all epochs are done, the master tells trainers which processes of the pservers are *final*, that is, have applied
everything. A process that replaces one of them may have loaded an older checkpoint. Its values are final only after the
master has checked them and has named the new process.

If batches turn out to be missing, other trainers repeat them. A trainer whose loop has ended cannot help unless it is
restarted.

During training, values are read without this check.
"""

from __future__ import annotations

from flightedl.errors import BegunAnewError, NotReadyError
from flightedl.marks import sometimes
from flightedl.messages.tasks import TasksReply


class JobEnd:
    """The master's statements about the job's end. One thread at a time calls ``replied``; any thread may read."""

    def __init__(self) -> None:
        #: Pserver -> generation of its final process; None until all epochs are known to be done.
        self._final: tuple[int, ...] | None = None

    @property
    def is_known(self) -> bool:
        """True if the master has said that all epochs are done."""
        return self._final is not None

    def replied(self, reply: TasksReply) -> None:
        """Record the master's answer to a request for training data."""
        if reply.outcome == "epochs_done":
            self._final = tuple(reply.pservers)

    def may_read(self, index: int, generation: int) -> bool:
        """True if this process may be read. If False, ask the master for the job's state, and call ``require``."""
        final = self._final
        return final is None or index >= len(final) or final[index] == generation

    def require(self, reply: TasksReply, index: int, generation: int) -> None:
        """Raise an error unless the master's newest answer, already passed to ``replied``, names this process as final.

        Raises:
            NotReadyError: not known yet; look up the pserver again.
            BegunAnewError: the process lacks batches, which are being repeated.
        """
        if self.may_read(index, generation):
            return
        if reply.outcome != "epochs_done" and not reply.is_ending:
            sometimes("the result was lost after the end of the job")
            raise BegunAnewError(
                f"pserver {index} was replaced after the job's end and lacks some batches, which are being repeated: "
                "restart this trainer"
            )
        raise NotReadyError(f"pserver {index} was replaced after the job's end: the master is checking its values")
