"""What a trainer knows of the job's end, so that the model it reads then is the one that was trained.

That all epochs are done is told together with the *final* processes of the pservers, which have all of it. One that
takes the place of such a process may come from an older checkpoint: what it has is final only when the master says so
again, after it has looked. Where something is missing it is done again, but not by a trainer whose loop is over: its
program has to start again.

While a job trains, values are read as they are.
"""

from __future__ import annotations

from flightedl.errors import BegunAnewError, NotReadyError
from flightedl.messages.tasks import TasksReply


class JobEnd:
    """What the master said of the end. One thread at a time hears, any may ask."""

    def __init__(self) -> None:
        #: The generation of each pserver that has everything; None: it is not known that all is done.
        self._final: tuple[int, ...] | None = None

    @property
    def is_known(self) -> bool:
        """True once the master has said that all is done."""
        return self._final is not None

    def heard(self, reply: TasksReply) -> None:
        """An answer of the master about the training data."""
        if reply.outcome == "epochs_done":
            self._final = tuple(reply.pservers)

    def may_read(self, index: int, generation: int) -> bool:
        """Whether this process of a pserver may be read; if not, ask the master how far the job is, and ``require``."""
        final = self._final
        return final is None or index >= len(final) or final[index] == generation

    def require(self, reply: TasksReply, index: int, generation: int) -> None:
        """The master's answer, which was also given to ``heard``, has to say that this process has everything.

        Raises:
            NotReadyError: it is not known yet whether it has; look for the pserver again.
            BegunAnewError: what it lacks is done again.
        """
        if self.may_read(index, generation):
            return
        if reply.outcome != "epochs_done" and not reply.is_ending:
            raise BegunAnewError(
                f"pserver {index} was replaced after the job's end, and lacks some of what was done, "
                "which is done again: start this trainer again"
            )
        raise NotReadyError(f"pserver {index} was replaced after the job's end: the master looks what it has")
