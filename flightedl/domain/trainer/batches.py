"""The batch that the user's code is working on: its identity, its state, and its outcome."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from flightedl.domain.exactly_once.accumulation import SumAgain
from flightedl.errors import UnavailableError
from flightedl.messages.parameters import BatchIdentity

#: Key for the oldest placement of blocks, in a dict whose other keys are pserver indices.
PLACEMENT = -1


class Batch(msgspec.Struct, frozen=True):
    """A batch in an attempt at a task, as handed to the user's code."""

    epoch: int
    task: int
    attempt: int
    #: Number within the task.
    number: int
    #: Number of batches in the task.
    batch_count: int
    #: Weight in a synchronous round.
    record_count: int
    #: Number of the ``AssignedTask``. If an attempt is assigned twice, it is read twice.
    reading: int = 0
    #: The sum in which this batch must be pushed, because each block has applied either all of the sum's batches or
    #: none.
    again: SumAgain | None = None

    def __str__(self) -> str:
        return f"epoch {self.epoch + 1}, task {self.task}, batch {self.number}"


class Pushed(msgspec.Struct, frozen=True):
    """The batch or sum of batches that a transfer pushes, or whose rounds the transfer pulls."""

    identity: BatchIdentity
    #: Number of records, which is the batch's weight in a round.
    weight: int
    #: Number of batches that the trainer has begun since it became a member, including this one.
    step: int = 0
    #: The other batches of a sum.
    others: tuple[BatchIdentity, ...] = ()


class BatchState(msgspec.Struct, frozen=True, omit_defaults=True):
    """State of a batch that the user's code has finished. The steps report it to the loop whenever it changes."""

    reading: int
    number: int
    #: True if the batch's gradients are in a sum that has not been pushed.
    waits: bool = False
    #: True if the batch must be handed out again, as part of ``again`` if that is given.
    must_repeat: bool = False
    #: Pserver -> its oldest generation that has answered for this batch; ``PLACEMENT`` -> the oldest placement.
    generations: dict[int, int] = {}
    again: SumAgain | None = None
    #: Why the gradient was rejected, if it was.
    rejection: Exception | None = None

    @classmethod
    def of(cls, current: CurrentBatch) -> BatchState:
        """Return the state to report to the loop."""
        return cls(
            current.batch.reading,
            current.batch.number,
            current.waits,
            current.must_repeat,
            current.generations,
            current.again,
            current.rejection if current.must_repeat else None,
        )


class CurrentBatch(msgspec.Struct, eq=False):
    """State of a batch from when it is handed out until all blocks have answered. Only ``Steps`` changes it.

    The driver uses ``place`` and ``has_gradient``; no decision depends on them.
    """

    batch: Batch
    pushed: Pushed
    #: Membership with which the batch is pushed. Kept after the membership ends, so that pservers reject later pushes.
    member: int = 0
    #: Block that has answered for this batch -> the version at which its gradient was computed.
    answered: dict[int, int] = {}
    #: Version at which all blocks' gradients are assumed to have been computed; None for each block's own version.
    base_version: int | None = None
    #: Pserver -> its oldest generation that has answered for this batch; ``PLACEMENT`` -> the oldest placement.
    generations: dict[int, int] = {}
    #: True if the gradient must be computed and pushed again, because it was too late or the membership was lost.
    must_repeat: bool = False
    #: True if the batch's gradients are in a sum that has not been pushed.
    waits: bool = False
    #: The sum in which the batch must be pushed when it is handed out again.
    again: SumAgain | None = None
    #: The permanent error that interrupted the push.
    failure: BaseException | None = None
    #: Reason why the newest gradient was rejected before anything was sent; None if it was not rejected.
    rejection: Exception | None = None
    #: Returns a description, for users, of the batch's files and records.
    place: Callable[[], str] | None = None
    #: True if the user's code has pushed a gradient for the batch.
    has_gradient: bool = False

    @classmethod
    def of(cls, batch: Batch, member: int = 0, step: int = 0) -> CurrentBatch:
        """Return the state of a batch that is about to be handed out."""
        identity = BatchIdentity(epoch=batch.epoch, task=batch.task, batch=batch.number, batch_count=batch.batch_count)
        return cls(batch, Pushed(identity, batch.record_count, step), member, again=batch.again)

    @property
    def number(self) -> int:
        return self.batch.number

    @property
    def record_count(self) -> int:
        return self.batch.record_count

    @property
    def is_undone(self) -> bool:
        return self.must_repeat or self.rejection is not None

    def note_sum(self, pushed: CurrentBatch) -> None:
        """Record that every block has the batch, from this sum or an earlier push."""
        self.waits = False
        for pserver, generation in pushed.generations.items():
            self.generations[pserver] = min(generation, self.generations.get(pserver, generation))

    def repeat(self, again: SumAgain | None) -> None:
        """Repeat the batch in this sum. If ``again`` is None, the batch starts again from the beginning."""
        self.waits = False
        self.must_repeat = True
        self.again = again

    def reject(self, error: Exception) -> None:
        """Hand the batch out again, because its gradient was rejected."""
        self.must_repeat = True
        self.rejection = error

    def push_failed(self, error: BaseException) -> None:
        """Repeat the batch even if the user's code handles the error, because only some blocks may have it."""
        self.must_repeat = True
        if not isinstance(error, UnavailableError | KeyboardInterrupt | SystemExit):
            self.failure = error

    def __str__(self) -> str:
        return str(self.batch) if self.place is None else f"{self.batch} ({self.place()})"
