"""The batch that the user's code is working on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from flightedl.domain.exactly_once.accumulation import SumAgain
from flightedl.errors import UnavailableError
from flightedl.messages.parameters import BatchIdentity
from flightedl.messages.tasks import Assignment


@dataclass(slots=True)
class CurrentBatch:
    """One batch from the moment it is handed to the user's code until the next one is asked for."""

    assignment: Assignment
    #: Number within its task.
    number: int
    #: Its weight in a synchronous round.
    record_count: int
    #: The membership it is pushed under; also when a later answer says that it ended, so that pservers can tell.
    member: int = 0
    #: How many batches the trainer has begun since it was admitted, this one included.
    step: int = 0
    #: Blocks that have an answer for this batch -> the version that its gradient was computed at.
    answered: dict[int, int] = field(default_factory=dict)
    #: The one version that all of its gradients count as computed at; None: each block's own.
    base_version: int | None = None
    #: Pserver -> the oldest generation of it that answered a row of this batch.
    generations: dict[int, int] = field(default_factory=dict)
    #: Its gradient met a newer version or a lost membership: it has to be computed and pushed again.
    must_repeat: bool = False
    #: The other batches of the sum that is pushed in its name.
    further: tuple[BatchIdentity, ...] = ()
    #: Its gradients are in a sum that was not pushed yet.
    waits: bool = False
    #: Tells, for people, in which records of which files it lies.
    place: Callable[[], str] | None = None
    #: The user's code gave a gradient for it.
    has_gradient: bool = False
    #: The sum that it has to be pushed in, because some block may have, or lacks, just these batches of it.
    again: SumAgain | None = None
    #: What ended its push half-way, where trying again cannot help.
    failure: BaseException | None = None
    #: Error of the newest gradient, if the gradient was rejected before anything of it was sent.
    rejection: Exception | None = None
    #: Times that the batch was handed out and ended with a rejected gradient.
    rejection_count: int = 0

    @property
    def turn(self) -> tuple[int, int]:
        """Batches that are done again come by this: those of one sum after each other."""
        return (self.number if self.again is None else self.again.first, self.number)

    @property
    def is_undone(self) -> bool:
        """True if the batch has to be handed out again."""
        return self.must_repeat or self.rejection is not None

    @property
    def identity(self) -> BatchIdentity:
        """What makes its push happen once."""
        return BatchIdentity(
            epoch=self.assignment.epoch,
            task=self.assignment.task,
            batch=self.number,
            batch_count=self.assignment.batch_count,
        )

    def begin(self) -> None:
        """The user's code is about to get it, for the first time or again."""
        self.must_repeat = False
        self.waits = False
        self.failure = self.rejection = None
        self.answered.clear()
        self.base_version = None
        self.generations.clear()

    def note_answers(self, base_versions: Mapping[int, int], pserver: int, generation: int) -> None:
        """Blocks of a pserver have the batch. One that was replaced meanwhile counts as what it was before."""
        self.answered.update(base_versions)
        self.generations[pserver] = min(generation, self.generations.get(pserver, generation))

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
        self.rejection_count += 1

    def push_failed(self, error: BaseException) -> None:
        """Some blocks may have it and others not: it is done again, whatever the user's code makes of the error."""
        self.must_repeat = True
        if not isinstance(error, UnavailableError | KeyboardInterrupt):
            self.failure = error

    def __str__(self) -> str:
        name = f"epoch {self.assignment.epoch + 1}, task {self.assignment.task}, batch {self.number}"
        return name if self.place is None else f"{name} ({self.place()})"
