"""Consistency modes: when a gradient is applied, and which trainers wait for which.

Modes are only settings; ``rounds`` and ``views`` implement them.
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
        """Return the lowest block version that includes a gradient with this base. The gradient's sender waits for it.

        Returns 0 if gradients are applied on arrival, because any version is then sufficient.
        """
        return 0


family(Mode)


@dataclass(frozen=True, slots=True)
class Sync(Mode):
    """Applies one update per round, when the gradients of all members have arrived.

    Args:
        reduce: ``"mean"`` for the mean, weighted by the batches' weights; ``"sum"`` for the plain sum.
        backup: A round closes when all but this many members have arrived. Late gradients are added to the next round.
        deterministic: Sum gradients in the order of batch identity, and put the same batches into each round, so that
            runs with the same number of trainers and without faults are bit-identical. Needs memory for the gradients
            of a round, disables prefetching of tasks, and excludes ``backup``. The master must know the number of
            trainers, as it does under ``flightedl run``.
        push_every: The client sums the gradients of this many batches and pushes them to one round; at the end of a
            task it pushes the rest. With ``reduce="mean"``, a round is the mean over the records of all batches.
            ``Async`` describes sums after faults. Excludes ``backup`` and ``deterministic``.
    """

    reduce: Literal["mean", "sum"] = "mean"
    backup: int = number(0, at_least=0)
    deterministic: bool = False
    push_every: int = number(1, at_least=1, at_most=1024)

    def check(self) -> None:
        if self.push_every > 1 and (self.deterministic or self.backup):
            raise UsageError("Sync: push_every cannot be combined with deterministic or backup")
        if self.deterministic and self.backup:
            raise UsageError("Sync: deterministic needs the gradients of all members in each round; set backup to 0")

    def version_after(self, base_version: int) -> int:
        return base_version + 1


@dataclass(frozen=True, slots=True)
class Async(Mode):
    """Applies each gradient when it arrives. Trainers do not wait for each other.

    With ``push_every``, "exactly once" means that, whatever fails, each block applies each batch once, with the weight
    that the batch had in the first pushed sum that contained it.

    After a failure the trainer pushes the same sum again. If another trainer has pushed part of it in the meantime,
    some blocks apply the rest separately. This makes no difference for plain SGD; stateful optimizers (momentum, Adam)
    make one more update in these blocks.

    Args:
        push_every: The client sums the gradients of this many batches and pushes once. At the end of a task it pushes
            the rest, so a push never contains batches of two tasks. Tasks should have at least this many batches.
        pull_every: Number of steps after which current values are pulled, whether or not the step pushes.
        staleness_scaled: Divide the learning rate by 1 + the number of pushes that the gradient did not see
            (Zhang et al. 2016, staleness-aware async SGD).
        reduce: ``"mean"`` pushes the mean of the batches, weighted by records, as for a single batch with all records.
            ``"sum"`` pushes the plain sum, which for plain SGD equals as many separate pushes.
    """

    push_every: int = number(1, at_least=1, at_most=1024)
    pull_every: int = number(1, at_least=1)
    staleness_scaled: bool = False
    reduce: Literal["mean", "sum"] = "mean"


@dataclass(frozen=True, slots=True)
class Bounded(Mode):
    """Applies each gradient when it arrives. A trainer more than ``staleness`` steps ahead of the slowest one waits.

    A ``staleness`` of 0 acts as a barrier after each step (stale synchronous parallel, Ho et al. 2013).
    """

    staleness: int = number(at_least=0)
