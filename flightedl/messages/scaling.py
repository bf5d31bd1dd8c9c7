"""Messages and stored values for changing the number of pservers of a running job."""

from __future__ import annotations

from typing import Annotated

import msgspec

from flightedl.messages.base import Natural, OfJob, Reply


class ScaleRequest(OfJob, frozen=True, kw_only=True):
    """A request to change which pservers have blocks. If it requests no change, it returns only the progress."""

    #: Number of pservers; 0 to leave it unchanged.
    pservers: Natural = 0
    #: Indexes of pservers whose blocks move to other pservers.
    drain: list[Natural] = []
    #: (index, generation) of processes that will end: their blocks move to other pservers, also during another change.
    leaving: list[tuple[Natural, int]] = []
    #: True to cancel the current change, or only the leave of the processes in ``leaving``. Blocks that have already
    #: moved remain on their new pservers.
    is_cancelled: bool = False
    #: Number of the change to cancel; another change is left alone. 0 cancels the current change, whatever its number.
    change: Natural = 0
    #: Maximum seconds that the master waits for progress.
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=20)] = 0.0


class ScaleReply(Reply, frozen=True, kw_only=True):
    """Progress of the most recent change to the pservers."""

    #: Number of pservers after the change, and number of pservers that belong to the job now.
    wanted: int
    pservers: int
    #: Pservers that have, or will have, no blocks.
    drained: list[int] = []
    #: Number of blocks and buckets to move, and how many of them have moved.
    total: int = 0
    moved: int = 0
    is_done: bool = True
    #: Reason why no block is moving at the moment, or why the change was given up; empty otherwise.
    waiting_for: str = ""
    is_given_up: bool = False
    #: Number of the change, counted from 1 for each job; 0 if there was none.
    change: int = 0

    @property
    def text(self) -> str:
        """The progress as a sentence."""
        drained = f", without blocks on pserver {', '.join(map(str, self.drained))}" if self.drained else ""
        number = f"{self.pservers} pserver{'s' * (self.pservers != 1)}"
        if self.is_given_up:
            return f"the job has {number}; the last change ended early: {self.waiting_for}"
        if self.is_done:
            return f"the job has {number}{drained}"
        waits = f"; waiting: {self.waiting_for}" if self.waiting_for else ""
        change = f"to {self.wanted} pserver{'s' * (self.wanted != 1)}{drained}"
        return f"{change}: {self.moved} of {self.total} blocks moved{waits}"


class ScaleRecord(Reply, frozen=True, kw_only=True):
    """Target of the most recent change to the pservers, as stored in etcd."""

    #: Number of the change, counted from 1 for each job.
    change: Natural = 0
    #: Number of pservers that the job should have.
    pservers: int
    drained: list[int] = []
    total: int = 0
    moved: int = 0
    is_done: bool = False
    #: Reason why the change was given up; empty if it was not.
    given_up: str = ""
    #: (index, generation) of processes that will end and should have no blocks. Their successors get blocks again.
    leaving: list[tuple[int, int]] = []
    #: (index, generation) of processes whose pservers have left the job. These processes are about to exit, so they
    #: cannot join again.
    left: list[tuple[int, int]] = []

    @property
    def empty(self) -> list[int]:
        """Indexes of the pservers that should have no blocks."""
        leaving = {index for index, _ in self.leaving if index < self.pservers}
        return sorted(leaving.union(self.drained))
