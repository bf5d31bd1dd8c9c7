"""Reference implementation of every update rule, in plain NumPy. The kernels must agree with it.

``update`` advances a block from ``version`` to ``version + 1`` in place; ``update_row`` does the same for a row of a
table. Constants are computed in float64, and then rounded once to the block's dtype. All other arithmetic uses the
block's dtype, in the order written here. In bias corrections, the step number t is ``version + 1``.

Each rule's docstring gives the formula and its source. In the formulas, g is the gradient after scaling, clipping and
coupled weight decay, and w stands for the values. Rules that torch.optim contains give the same results as torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from flightedl.domain.model.optimizers import (
    LAMB,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    AdamW,
    Delta,
    Ftrl,
    Momentum,
    Optimizer,
    RMSprop,
)
from flightedl.domain.tables.optimizers import RowAdagrad, RowAdam

Floats = npt.NDArray[Any]


def initial_slots(optimizer: Optimizer, size: int, dtype: npt.DTypeLike) -> tuple[Floats, ...]:
    """Return the initial slots of a block or row of ``size`` elements. All slots have this ``dtype``."""
    return tuple(np.full(slot.width(size), slot.initial, dtype) for slot in optimizer.slots)


def update(
    optimizer: Optimizer,
    values: Floats,
    gradient: Floats,
    slots: Sequence[Floats],
    version: int,
    number: int,
    scale: float = 1.0,
    rate_factor: float = 1.0,
) -> None:
    """Apply one gradient to a block, in place.

    Args:
        optimizer: Settings of this parameter (``Optimizer.for_parameter``).
        values: (n,) float32 or float64; updated in place.
        gradient: (n,) of the same dtype; not changed.
        slots: One (n,) array for each of ``optimizer.slots``; updated in place.
        version: Version of the block before this update, for schedules.
        number: Number of updates applied to the block before this one, for bias corrections.
        scale: Factor of the gradient; 1 / total weight makes a mean.
        rate_factor: Factor of the learning rate, for stale gradients.
    """
    rate = optimizer.rate_at(version) * rate_factor
    _apply(optimizer, values, gradient, slots, rate, number + 1, scale)


def update_row(
    optimizer: Optimizer,
    values: Floats,
    gradient: Floats,
    slots: Sequence[Floats],
    updates: int,
    rate: float,
    scale: float = 1.0,
) -> None:
    """Apply a gradient to a row of a table, in place.

    Args:
        optimizer: Settings of the table.
        values: (dim,); updated in place.
        gradient: (dim,).
        slots: Arrays as returned by ``initial_slots``; updated in place.
        updates: Number of updates of this row before this one.
        rate: Learning rate: ``optimizer.rate_at(version of the table) * rate_factor``.
        scale: Factor of the gradient.
    """
    _apply(optimizer, values, gradient, slots, rate, updates + 1, scale)


def _apply(
    optimizer: Optimizer, w: Floats, gradient: Floats, slots: Sequence[Floats], rate: float, t: int, scale: float
) -> None:
    g = gradient * w.dtype.type(scale)
    if optimizer.clip_value is not None:
        g = np.clip(g, -optimizer.clip_value, optimizer.clip_value)
    if optimizer.weight_decay and not isinstance(optimizer, AdamW | LAMB):
        g = g + optimizer.weight_decay * w
    with np.errstate(under="ignore"):
        _RULES[type(optimizer)](optimizer, w, g, slots, rate, t)


def _sgd(optimizer: SGD | Delta, w: Floats, g: Floats, slots: Sequence[Floats], rate: float, t: int) -> None:
    """``w -= rate * g``. For Delta, the rate is -1."""
    w -= rate * g


def _momentum(optimizer: Momentum, w: Floats, g: Floats, slots: Sequence[Floats], rate: float, t: int) -> None:
    """``u = momentum * u + g``; ``w -= rate * u``, or Nesterov's ``w -= rate * (g + momentum * u)``.

    Sutskever et al. 2013 in torch's form, in which the rate is not part of the velocity.
    """
    (velocity,) = slots
    velocity[:] = optimizer.momentum * velocity + g
    w -= rate * (g + optimizer.momentum * velocity if optimizer.nesterov else velocity)


def _adagrad(optimizer: Adagrad, w: Floats, g: Floats, slots: Sequence[Floats], rate: float, t: int) -> None:
    """``s += g**2``; ``w -= rate * g / (sqrt(s) + eps)``. From Duchi et al. 2011, diagonal form."""
    (square_sum,) = slots
    square_sum += g * g
    w -= _divided(rate * g, np.sqrt(square_sum) + optimizer.eps)


def _row_adagrad(optimizer: RowAdagrad, w: Floats, g: Floats, slots: Sequence[Floats], rate: float, t: int) -> None:
    """``s += mean(g**2)``; ``w -= rate * g / (sqrt(s) + eps)``."""
    (square_sum,) = slots
    square_sum += np.mean(g * g)
    w -= _divided(rate * g, np.sqrt(square_sum) + optimizer.eps)


def _adadelta(optimizer: Adadelta, w: Floats, g: Floats, slots: Sequence[Floats], rate: float, t: int) -> None:
    """``s = rho s + (1-rho) g**2``; ``d = sqrt(a + eps) / sqrt(s + eps) * g``; ``w -= rate * d``.

    Finally ``a = rho a + (1-rho) d**2``. From Zeiler 2012, algorithm 1, with torch's rate.
    """
    square_average, step_average = slots
    square_average[:] = optimizer.rho * square_average + (1 - optimizer.rho) * g * g
    step = np.sqrt((step_average + optimizer.eps) / (square_average + optimizer.eps)) * g
    step_average[:] = optimizer.rho * step_average + (1 - optimizer.rho) * step * step
    w -= rate * step


def _rmsprop(optimizer: RMSprop, w: Floats, g: Floats, slots: Sequence[Floats], rate: float, t: int) -> None:
    """``s = alpha s + (1-alpha) g**2``; ``d = g / (sqrt(s) + eps)``; ``w -= rate * d``.

    If centered (Graves 2013, eq. 38-45), ``a = a + (1-alpha)(g - a)``, and ``s - a**2`` replaces s. With momentum, ``u
    = momentum u + d`` and ``w -= rate * u``. Both are torch's forms. If rounding makes ``s - a**2`` negative, it is 0.
    """
    rest = list(slots)
    square_average = rest.pop(0)
    square_average[:] = optimizer.alpha * square_average + (1 - optimizer.alpha) * g * g
    variance = square_average
    if optimizer.centered:
        average = rest.pop(0)
        average += (1 - optimizer.alpha) * (g - average)
        variance = np.maximum(square_average - average * average, 0)
    step = g / (np.sqrt(variance) + optimizer.eps)
    if optimizer.momentum:
        velocity = rest.pop(0)
        velocity[:] = optimizer.momentum * velocity + step
        step = velocity
    w -= rate * step


def _adam(optimizer: Adam, w: Floats, g: Floats, slots: Sequence[Floats], rate: float, t: int) -> None:
    """``m += (1-beta1)(g - m)``; ``v = beta2 v + (1-beta2) g**2``; ``w -= rate * m' / (sqrt(v') + eps)``.

    ``m' = m / (1 - beta1**t)``, ``v' = v / (1 - beta2**t)``, from Kingma & Ba 2015, algorithm 1. AMSGrad (Reddi et al.
    2018) uses the largest v so far; like torch, it takes the maximum before the bias correction. AdamW (Loshchilov &
    Hutter 2019, algorithm 2) first computes ``w *= 1 - rate * weight_decay``.
    """
    average, square_average = slots[:2]
    average += (1 - optimizer.beta1) * (g - average)
    square_average[:] = optimizer.beta2 * square_average + (1 - optimizer.beta2) * g * g
    largest = square_average
    if optimizer.amsgrad:
        largest = slots[2]
        np.maximum(largest, square_average, out=largest)
    if isinstance(optimizer, AdamW):
        w *= 1 - rate * optimizer.weight_decay
    correction = 1 / math.sqrt(1 - optimizer.beta2**t)
    w -= _divided(rate / (1 - optimizer.beta1**t) * average, np.sqrt(largest) * correction + optimizer.eps)


def _row_adam(optimizer: RowAdam, w: Floats, g: Floats, slots: Sequence[Floats], rate: float, t: int) -> None:
    """Like Adam, but with ``v = beta2 v + (1-beta2) mean(g**2)``."""
    average, square_average = slots
    average += (1 - optimizer.beta1) * (g - average)
    square_average[:] = optimizer.beta2 * square_average + (1 - optimizer.beta2) * np.mean(g * g)
    correction = 1 / math.sqrt(1 - optimizer.beta2**t)
    w -= _divided(rate / (1 - optimizer.beta1**t) * average, np.sqrt(square_average) * correction + optimizer.eps)


def _divided(dividend: Floats, divisor: Floats) -> Floats:
    """Return the quotient, or 0 where the divisor is 0: if eps = 0, a value without gradients does not change."""
    return np.divide(dividend, divisor, out=np.zeros_like(dividend), where=divisor != 0)


def _ftrl(optimizer: Ftrl, w: Floats, g: Floats, slots: Sequence[Floats], rate: float, t: int) -> None:
    """``n' = n + g**2``; ``z += g - (sqrt(n') - sqrt(n)) / rate * w``; then ``w`` minimizes the sum so far.

    So ``w = 0`` where ``|z| <= l1``, and ``w = (sign(z) l1 - z) / ((beta + sqrt(n')) / rate + 2 l2)`` elsewhere:
    McMahan et al. 2013, algorithm 1, with TensorFlow's factor of 2 for l2. If the rate is zero, nothing changes.
    """
    if rate == 0:
        return
    square_sum, linear = slots
    root = np.sqrt(square_sum)
    square_sum += g * g
    new_root = np.sqrt(square_sum)
    linear += g - (new_root - root) * (1 / rate) * w
    pull = np.copysign(np.maximum(np.abs(linear) - w.dtype.type(optimizer.l1), 0), linear)
    divisor = (new_root + optimizer.beta) * (1 / rate) + 2 * optimizer.l2
    w[:] = np.where(pull == 0, 0, -pull / np.where(divisor == 0, 1, divisor))


def _lamb(optimizer: LAMB, w: Floats, g: Floats, slots: Sequence[Floats], rate: float, t: int) -> None:
    """With Adam's m' and v': ``d = m' / (sqrt(v') + eps) + weight_decay * w``; ``w -= rate * |w| / |d| * d``.

    From You et al. 2020, algorithm 2, with the identity as phi. Norms are over the block; if one is 0, the ratio is 1.
    """
    average, square_average = slots
    average += (1 - optimizer.beta1) * (g - average)
    square_average[:] = optimizer.beta2 * square_average + (1 - optimizer.beta2) * g * g
    correction = 1 / math.sqrt(1 - optimizer.beta2**t)
    direction = 1 / (1 - optimizer.beta1**t) * average / (np.sqrt(square_average) * correction + optimizer.eps)
    direction += optimizer.weight_decay * w
    values_norm, direction_norm = (math.sqrt(float(np.sum(np.square(x, dtype=np.float64)))) for x in (w, direction))
    w -= rate * trust_ratio(values_norm, direction_norm) * direction


def trust_ratio(values_norm: float, direction_norm: float) -> float:
    """Return LAMB's ratio of the two norms, or 1 if one of them is zero."""
    return values_norm / direction_norm if values_norm > 0 and direction_norm > 0 else 1.0


_RULES: dict[type[Optimizer], Callable[[Any, Floats, Floats, Sequence[Floats], float, int], None]] = {
    SGD: _sgd,
    Delta: _sgd,
    Momentum: _momentum,
    Adagrad: _adagrad,
    RowAdagrad: _row_adagrad,
    Adadelta: _adadelta,
    RMSprop: _rmsprop,
    Adam: _adam,
    AdamW: _adam,
    RowAdam: _row_adam,
    Ftrl: _ftrl,
    LAMB: _lamb,
}
