"""The batch that the user's code is working on: its identity, its state, and the outcome that the loop is told."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from flightedl.domain.exactly_once.accumulation import SumAgain
from flightedl.errors import UnavailableError
from flightedl.messages.parameters import BatchIdentity


class Batch(msgspec.Struct, frozen=True):
    """One batch of an attempt at a task, as it is handed to the user's code."""

    epoch: int
    task: int
    attempt: int
    #: Number within its task.
    number: int
    #: Batches of the whole task.
    batch_count: int
    #: Its weight in a synchronous round.
    record_count: int
    #: Number of the ``AssignedTask``: an attempt that is told twice is read twice.
    reading: int = 0
    #: The sum that it has to be pushed in, because some block may have, or lacks, just these batches of it.
    again: SumAgain | None = None

    def __str__(self) -> str:
        return f"epoch {self.epoch + 1}, task {self.task}, batch {self.number}"


class Pushed(msgspec.Struct, frozen=True):
    """The batch, or the sum of several, that a transfer pushes, or at whose rounds it pulls."""

    identity: BatchIdentity
    #: Records, as the weight in a synchronous round.
    weight: int
    #: How many batches the trainer has begun since it was admitted, this one included.
    step: int = 0
    #: The other batches of a sum.
    further: tuple[BatchIdentity, ...] = ()


class BatchState(msgspec.Struct, frozen=True, omit_defaults=True):
    """State of a batch that the user's code is through with; the steps report it to the loop whenever it changes."""

    reading: int
    number: int
    #: Its gradients are in a sum that was not pushed yet.
    waits: bool = False
    #: It has to be handed out again, as a part of ``again`` if that is given.
    must_repeat: bool = False
    #: Pserver -> the oldest generation of it that answered a row of this batch.
    generations: dict[int, int] = {}
    again: SumAgain | None = None
    #: Error of its gradient, if the gradient was rejected.
    rejection: Exception | None = None

    @classmethod
    def of(cls, current: CurrentBatch) -> BatchState:
        """Return the state as the loop is told it."""
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
    """State of one batch from the moment it is handed out until all blocks have answered; only ``Steps`` changes it.

    ``place`` and ``has_gradient`` are notes of the driver; no decision depends on them.
    """

    batch: Batch
    pushed: Pushed
    #: The membership it is pushed under; also when a later answer says that it ended, so that pservers can tell.
    member: int = 0
    #: Blocks that have an answer for this batch -> the version that its gradient was computed at.
    answered: dict[int, int] = {}
    #: The one version that all of its gradients count as computed at; None: each block's own.
    base_version: int | None = None
    #: Pserver -> the oldest generation of it that answered a row of this batch.
    generations: dict[int, int] = {}
    #: Its gradient met a newer version or a lost membership: it has to be computed and pushed again.
    must_repeat: bool = False
    #: Its gradients are in a sum that was not pushed yet.
    waits: bool = False
    #: The sum that it has to be pushed in when it is handed out again.
    again: SumAgain | None = None
    #: The error that ended its push half-way, if trying again cannot help.
    failure: BaseException | None = None
    #: Error of the newest gradient, if the gradient was rejected before anything of it was sent.
    rejection: Exception | None = None
    #: Tells, for people, in which records of which files the batch lies.
    place: Callable[[], str] | None = None
    #: The user's code gave a gradient for the batch.
    has_gradient: bool = False

    @classmethod
    def of(cls, batch: Batch, member: int = 0, step: int = 0) -> CurrentBatch:
        """Return the state of a batch that is about to be handed out."""
        identity = BatchIdentity(epoch=batch.epoch, task=batch.task, batch=batch.number, batch_count=batch.batch_count)
        return cls(batch, Pushed(identity, batch.record_count, step), member, again=batch.again)

    @property
    def number(self) -> int:
        """Number within its task."""
        return self.batch.number

    @property
    def record_count(self) -> int:
        """Its weight in a synchronous round."""
        return self.batch.record_count

    @property
    def is_undone(self) -> bool:
        """True if the batch has to be handed out again."""
        return self.must_repeat or self.rejection is not None

    def note_sum(self, pushed: CurrentBatch) -> None:
        """Every block has it, by the sum that its gradients are in or from before."""
        self.waits = False
        for pserver, generation in pushed.generations.items():
            self.generations[pserver] = min(generation, self.generations.get(pserver, generation))

    def repeat(self, again: SumAgain | None) -> None:
        """It has to be done again: in that sum, or (None) as if it had not been begun."""
        self.waits = False
        self.must_repeat = True
        self.again = again

    def reject(self, error: Exception) -> None:
        """Hand the batch out again, because its gradient was rejected."""
        self.must_repeat = True
        self.rejection = error

    def push_failed(self, error: BaseException) -> None:
        """Some blocks may have it and others not: it is done again, whatever the user's code makes of the error."""
        self.must_repeat = True
        if not isinstance(error, UnavailableError | KeyboardInterrupt):
            self.failure = error

    def __str__(self) -> str:
        return str(self.batch) if self.place is None else f"{self.batch} ({self.place()})"
