"""Consistency modes: when a pushed gradient is applied, who waits for whom, and which version follows a push.

The classes are settings; rounds and views carry them out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from flightedl.domain.model.settings import Setting, family, number
from flightedl.errors import UsageError


class Mode(Setting):
    """Base of the modes."""

    __slots__ = ()

    def version_after(self, _base_version: int) -> int:
        """The lowest version of a block that has a gradient of this base: its sender waits for it.

        Whatever there is now, where gradients are applied on arrival.
        """
        return 0


family(Mode)


@dataclass(frozen=True, slots=True)
class Sync(Mode):
    """One update per round, when every member's gradient is in.

    Args:
        reduce: ``"mean"``: weighted by the batches' weights; ``"sum"``: the plain sum of the gradients.
        backup: A round closes when all but this many members arrived; what comes late is not lost.
        deterministic: Add contributions up in the order of batch identity, and put the same batches into each round, so
            that runs with the same number of trainers and without faults are bit-identical. Costs memory for the
            gradients of a round and the prefetching of tasks, and excludes ``backup``. The master has to know how many
            trainers there are, as it does under ``flightedl run``.
        push_every: The client adds up the gradients of this many batches, and brings them to one round; a task's end
            brings what there is. With ``reduce="mean"`` a round is the mean over the records of all of them. What a
            sum is when something dies: see ``Async``. Excludes ``backup`` and ``deterministic``.
    """

    reduce: Literal["mean", "sum"] = "mean"
    backup: int = number(0, at_least=0)
    deterministic: bool = False
    push_every: int = number(1, at_least=1, at_most=1024)

    def check(self) -> None:
        if self.push_every > 1 and (self.deterministic or self.backup):
            raise UsageError("Sync: push_every goes neither with deterministic nor with backup")
        if self.deterministic and self.backup:
            raise UsageError("Sync: deterministic needs every member's gradient in its round; set backup to 0")

    def version_after(self, base_version: int) -> int:
        return base_version + 1


@dataclass(frozen=True, slots=True)
class Async(Mode):
    """Each gradient is applied when it arrives; nobody waits.

    What "exactly once" means with ``push_every``: whatever dies, each block takes each batch once, with the weight that
    the batch had in the sum it was first pushed in. After a fault the same sum is pushed again, as one. Only where
    another trainer pushed a part of it meanwhile, some blocks take the rest by itself: under plain SGD it counts just
    what it would have, while an optimizer with a memory (momentum, Adam) makes an update more there. Gradients are
    computed from whatever values the trainer had, clipping is that of what is pushed together, and a batch that two
    trainers worked on counts as the first of them pushed it.

    Args:
        push_every: The client adds up the gradients of this many batches and pushes once. A task's end pushes what
            there is, so a push never has batches of two tasks: make tasks at least this many batches long.
        pull_every: Fresh values are pulled at each such step, whether or not it pushes.
        staleness_scaled: Divide the learning rate by 1 + the number of updates that the gradient did not see
            (Zhang et al. 2016, staleness-aware async SGD).
        reduce: What is pushed of several batches. ``"mean"``: their mean, weighted by records, as one batch of all
            their records would give. ``"sum"``: the plain sum, as that many pushes in a row would move plain SGD.
    """

    push_every: int = number(1, at_least=1, at_most=1024)
    pull_every: int = number(1, at_least=1)
    staleness_scaled: bool = False
    reduce: Literal["mean", "sum"] = "mean"


@dataclass(frozen=True, slots=True)
class Bounded(Mode):
    """Applied on arrival, but a trainer more than ``staleness`` versions ahead of the slowest member waits.

    ``staleness`` 0 makes the members take turns like a barrier (Ho et al. 2013, stale synchronous parallel).
    """

    staleness: int = number(at_least=0)
