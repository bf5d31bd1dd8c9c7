"""Optimizers for rows: the parameter optimizers that tables support, and two that exist only for tables.

An update changes only rows with a gradient (for Adam, this is known as *lazy* Adam). The averages of other rows do not
decay, weight decay applies only to updated rows, and the step number in bias corrections is the row's own number of
updates. So a row depends only on its own history.

Apart from this, settings mean the same as for dense parameters (see ``flightedl.domain.model.optimizers``). Schedules
use the number of updates of the table.
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
    """Row-wise Adagrad, which sums the mean of the squared gradient for each row (FBGEMM's ``rowwise_adagrad``).

    For embeddings, it works as well as Adagrad and needs only 1/dim of Adagrad's memory.
    """

    lr: float | Schedule = number(0.01, at_least=0)
    eps: float = number(1e-8, at_least=0)
    initial_accumulator: float = number(0.0, at_least=0)

    @property
    def slots(self) -> tuple[SlotSpec, ...]:
        return (SlotSpec("square_sum", self.initial_accumulator, per_element=False),)


@dataclass(frozen=True, slots=True)
class RowAdam(Optimizer):
    """Adam with a single average of squares per row (FBGEMM's ``partial_rowwise_adam``)."""

    lr: float | Schedule = number(1e-3, at_least=0)
    beta1: float = number(0.9, at_least=0, below=1)
    beta2: float = number(0.999, at_least=0, below=1)
    eps: float = number(1e-8, at_least=0)

    @property
    def slots(self) -> tuple[SlotSpec, ...]:
        return (SlotSpec("average"), SlotSpec("square_average", per_element=False))


#: Optimizers that tables support.
ROW_OPTIMIZERS: tuple[type[Optimizer], ...] = (SGD, Momentum, Adagrad, RowAdagrad, Adam, RowAdam, Ftrl)


def counts_updates(optimizer: Optimizer) -> bool:
    """True if the optimizer needs each row's number of updates."""
    return isinstance(optimizer, Adam | RowAdam)


def check_row_optimizer(name: str, optimizer: Optimizer) -> None:
    """Raise a UsageError that begins with ``name`` if tables do not support this optimizer."""
    kind = type(optimizer).__name__
    if type(optimizer) not in ROW_OPTIMIZERS:
        known = ", ".join(one.__name__ for one in ROW_OPTIMIZERS)
        raise UsageError(f"{name}: tables do not support {kind}; choose one of {known}")
    if optimizer.overrides:
        raise UsageError(f"{name}: tables do not support overrides; each table has its own optimizer")
    if optimizer.clip_norm is not None:
        raise UsageError(f"{name}: tables do not support clip_norm; use clip_value")
    if isinstance(optimizer, Adam) and optimizer.amsgrad:
        raise UsageError(f"{name}: tables do not support Adam with amsgrad")
