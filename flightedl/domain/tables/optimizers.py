"""Optimizers of rows: which there are, and those that only tables have.

A row moves when a gradient for it comes, and then alone: a table's Adam is what others call *lazy* Adam. Averages of
rows without a gradient stay as they are, weight decay counts for touched rows only, and the step number of bias
corrections is the count of the row's own updates, so that what becomes of a row depends on its own history alone.
Settings otherwise mean what they mean for dense parameters, see ``flightedl.domain.model.optimizers``; a schedule goes
by the updates of the whole table.
"""

# ruff: noqa: RUF009 - number() makes a dataclass field, like field()

from __future__ import annotations

from dataclasses import dataclass

from flightedl.domain.model.optimizers import SGD, Adagrad, Adam, Ftrl, Momentum, Optimizer, SlotSpec
from flightedl.domain.model.schedules import Schedule
from flightedl.domain.model.settings import number
from flightedl.errors import UsageError


@dataclass(frozen=True, slots=True)
class RowAdagrad(Optimizer):
    """Row-wise Adagrad: one sum for each row, of the mean of the gradient's squares (FBGEMM's ``rowwise_adagrad``).

    As good as Adagrad for embeddings, at 1/dim of its memory.
    """

    lr: float | Schedule = number(0.01, at_least=0)
    eps: float = number(1e-8, at_least=0)
    initial_accumulator: float = number(0.0, at_least=0)

    @property
    def slots(self) -> tuple[SlotSpec, ...]:
        return (SlotSpec("square_sum", self.initial_accumulator, per_element=False),)


@dataclass(frozen=True, slots=True)
class RowAdam(Optimizer):
    """Adam with one average of squares for each row (FBGEMM's ``partial_rowwise_adam``)."""

    lr: float | Schedule = number(1e-3, at_least=0)
    beta1: float = number(0.9, at_least=0, below=1)
    beta2: float = number(0.999, at_least=0, below=1)
    eps: float = number(1e-8, at_least=0)

    @property
    def slots(self) -> tuple[SlotSpec, ...]:
        return (SlotSpec("average"), SlotSpec("square_average", per_element=False))


#: What a table can have.
ROW_OPTIMIZERS: tuple[type[Optimizer], ...] = (SGD, Momentum, Adagrad, RowAdagrad, Adam, RowAdam, Ftrl)


def counts_updates(optimizer: Optimizer) -> bool:
    """Whether the rule needs the number of the row's updates."""
    return isinstance(optimizer, Adam | RowAdam)


def check_row_optimizer(name: str, optimizer: Optimizer) -> None:
    """Raises UsageError, beginning with ``name``, when a table cannot have this optimizer."""
    kind = type(optimizer).__name__
    if type(optimizer) not in ROW_OPTIMIZERS:
        known = ", ".join(one.__name__ for one in ROW_OPTIMIZERS)
        raise UsageError(f"{name}: there is no {kind} for rows; choose one of {known}")
    if optimizer.overrides:
        raise UsageError(
            f"{name}: overrides are for the parameters of a dense model; give the table's optimizer its own"
        )
    if optimizer.clip_norm is not None:
        raise UsageError(f"{name}: clip_norm is for the gradient of a dense model; use clip_value")
    if isinstance(optimizer, Adam) and optimizer.amsgrad:
        raise UsageError(f"{name}: the Adam of a table has no amsgrad")
