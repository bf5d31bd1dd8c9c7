"""The optimizers' formulas for one row, in plain Python floats: what the kernels of rows must agree with.

With g the gradient after scaling, clipping and weight decay, w the row's values, and t the number of the row's own
updates, this one included. Where a rule is not row-wise it is the one of ``flightedl.domain.model.optimizers``, element
by element.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from flightedl.domain.model.optimizers import SGD, Adagrad, Adam, Ftrl, Momentum, Optimizer
from flightedl.domain.tables.optimizers import RowAdagrad, RowAdam

Values = list[float]


def first_slots(optimizer: Optimizer, dim: int) -> list[Values]:
    """The slots of a row before its first update."""
    return [[slot.initial] * slot.width(dim) for slot in optimizer.slots]


def update_row(
    optimizer: Optimizer,
    values: Values,
    gradient: Sequence[float],
    slots: Sequence[Values],
    updates: int,
    rate: float,
    scale: float = 1.0,
) -> None:
    """Apply a gradient to a row, in place.

    Args:
        optimizer: Of the table.
        values: Of the row, changed.
        gradient: As long.
        slots: Of the row, changed; see ``first_slots``.
        updates: Of this row, before this one.
        rate: Learning rate: ``optimizer.rate_at(updates of the table) * rate_factor``.
        scale: The gradient is multiplied by it.
    """
    limit = math.inf if optimizer.clip_value is None else optimizer.clip_value
    decay = optimizer.weight_decay
    g = [min(max(one * scale, -limit), limit) + decay * old for one, old in zip(gradient, values, strict=True)]
    _RULES[type(optimizer)](optimizer, values, g, slots, updates + 1, rate)


def _sgd(_o: SGD, w: Values, g: Values, _slots: Sequence[Values], _t: int, rate: float) -> None:
    """``w -= rate * g``."""
    w[:] = [old - rate * one for old, one in zip(w, g, strict=True)]


def _momentum(o: Momentum, w: Values, g: Values, slots: Sequence[Values], _t: int, rate: float) -> None:
    """``u = momentum * u + g``; ``w -= rate * u``, or Nesterov's ``w -= rate * (g + momentum * u)``."""
    (velocity,) = slots
    velocity[:] = [o.momentum * speed + one for speed, one in zip(velocity, g, strict=True)]
    steps = [one + o.momentum * speed for one, speed in zip(g, velocity, strict=True)] if o.nesterov else velocity
    w[:] = [old - rate * step for old, step in zip(w, steps, strict=True)]


def _adagrad(o: Adagrad, w: Values, g: Values, slots: Sequence[Values], _t: int, rate: float) -> None:
    """``s += g**2``; ``w -= rate * g / (sqrt(s) + eps)``."""
    (square_sum,) = slots
    square_sum[:] = [total + one * one for total, one in zip(square_sum, g, strict=True)]
    w[:] = [
        old - _divided(rate * one, math.sqrt(total) + o.eps) for old, one, total in zip(w, g, square_sum, strict=True)
    ]


def _row_adagrad(o: RowAdagrad, w: Values, g: Values, slots: Sequence[Values], _t: int, rate: float) -> None:
    """``s += mean(g**2)``; ``w -= rate * g / (sqrt(s) + eps)``."""
    (square_sum,) = slots
    square_sum[0] += _mean_square(g)
    divisor = math.sqrt(square_sum[0]) + o.eps
    w[:] = [old - _divided(rate * one, divisor) for old, one in zip(w, g, strict=True)]


def _adam(o: Adam, w: Values, g: Values, slots: Sequence[Values], t: int, rate: float) -> None:
    """``m += (1-beta1)(g - m)``; ``v = beta2 v + (1-beta2) g**2``; ``w -= rate * m' / (sqrt(v') + eps)``.

    ``m' = m / (1 - beta1**t)``, ``v' = v / (1 - beta2**t)``.
    """
    average, square_average = slots
    average[:] = [mean + (1 - o.beta1) * (one - mean) for mean, one in zip(average, g, strict=True)]
    square_average[:] = [
        o.beta2 * square + (1 - o.beta2) * one * one for square, one in zip(square_average, g, strict=True)
    ]
    first, second = rate / (1 - o.beta1**t), 1 / math.sqrt(1 - o.beta2**t)
    w[:] = [
        old - _divided(first * mean, math.sqrt(square) * second + o.eps)
        for old, mean, square in zip(w, average, square_average, strict=True)
    ]


def _row_adam(o: RowAdam, w: Values, g: Values, slots: Sequence[Values], t: int, rate: float) -> None:
    """As Adam, with ``v = beta2 v + (1-beta2) mean(g**2)``."""
    average, square_average = slots
    average[:] = [mean + (1 - o.beta1) * (one - mean) for mean, one in zip(average, g, strict=True)]
    square_average[0] = o.beta2 * square_average[0] + (1 - o.beta2) * _mean_square(g)
    divisor = math.sqrt(square_average[0]) / math.sqrt(1 - o.beta2**t) + o.eps
    first = rate / (1 - o.beta1**t)
    w[:] = [old - _divided(first * mean, divisor) for old, mean in zip(w, average, strict=True)]


def _ftrl(o: Ftrl, w: Values, g: Values, slots: Sequence[Values], _t: int, rate: float) -> None:
    """``n' = n + g**2``; ``z += g - (sqrt(n') - sqrt(n)) / rate * w``; ``w`` minimizes the sum so far.

    ``w = 0`` where ``|z| <= l1``, else ``(sign(z) l1 - z) / ((beta + sqrt(n')) / rate + 2 l2)``. At a rate of zero
    nothing changes.
    """
    if rate == 0:
        return
    square_sum, linear = slots
    for i, one in enumerate(g):
        before = math.sqrt(square_sum[i])
        square_sum[i] += one * one
        root = math.sqrt(square_sum[i])
        linear[i] += one - (root - before) / rate * w[i]
        pull = math.copysign(max(abs(linear[i]) - o.l1, 0.0), linear[i])
        w[i] = 0.0 if pull == 0 else -pull / ((root + o.beta) / rate + 2 * o.l2)


def _mean_square(g: Values) -> float:
    return sum(one * one for one in g) / len(g)


def _divided(dividend: float, divisor: float) -> float:
    """Without gradients so far, and without eps, both are zero: then nothing moves."""
    return dividend / divisor if divisor else 0.0


_RULES: dict[type[Optimizer], Callable[[Any, Values, Values, Sequence[Values], int, float], None]] = {
    SGD: _sgd,
    Momentum: _momentum,
    Adagrad: _adagrad,
    RowAdagrad: _row_adagrad,
    Adam: _adam,
    RowAdam: _row_adam,
    Ftrl: _ftrl,
}
