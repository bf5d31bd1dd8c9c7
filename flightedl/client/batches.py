"""The batch that the user's code is working on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from flightedl.wire.messages_parameters import BatchIdentity
from flightedl.wire.messages_work import Assignment


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
    #: It is pushed for itself, not in a sum with others.
    is_alone: bool = False

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
        self.answered.clear()
        self.base_version = None
        self.generations.clear()

    def note_answers(self, base_versions: Mapping[int, int], pserver: int, generation: int) -> None:
        """Blocks of a pserver have the batch. One that was replaced meanwhile counts as what it was before."""
        self.answered.update(base_versions)
        self.generations[pserver] = min(generation, self.generations.get(pserver, generation))

    def note_sum(self, pushed: CurrentBatch, *, must_repeat: bool) -> None:
        """The sum that its gradients are in was pushed."""
        self.waits = False
        self.must_repeat = must_repeat
        for pserver, generation in pushed.generations.items():
            self.generations[pserver] = min(generation, self.generations.get(pserver, generation))

    def __str__(self) -> str:
        return f"epoch {self.assignment.epoch}, task {self.assignment.task}, batch {self.number}"
