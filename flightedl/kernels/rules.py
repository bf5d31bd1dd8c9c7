"""The update rules as loops, one pass over memory each, for numba to compile.

The formulas, in plain NumPy, are in ``flightedl.testing.reference_updates``.

These functions work compiled only. What keeps them fast and right:

* Every constant is an argument of the block's own type: a literal in a loop would be float64, and would make LLVM
  convert each float32 element forth and back. ``w.dtype.type(0)`` is a typed one.
* No fastmath: the loops vectorize without it, are bound by memory, and give the same bits on every machine. Only
  ``lamb`` is compiled with reassociation, because its sums do not vectorize otherwise.
* An argument that may be None (an optional slot) is None at compile time; numba removes its branch.
* ``clip`` infinite and ``weight_decay`` zero mean neither; both are free beside the memory traffic.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from flightedl.kernels.subnormals import flush_subnormals, restore_subnormals

Floats = npt.NDArray[Any]
Optional = npt.NDArray[Any] | None


def sgd(w: Floats, gradient: Floats, scale: float, clip: float, decay: float, rate: float) -> None:
    """Scalars: rate."""
    state = flush_subnormals()
    for i in range(w.size):
        old = w[i]
        new = old - rate * (min(max(gradient[i] * scale, -clip), clip) + decay * old)
        w[i] = new
    restore_subnormals(state)


def momentum(
    w: Floats,
    gradient: Floats,
    velocity: Floats,
    scale: float,
    clip: float,
    decay: float,
    rate: float,
    keep: float,
) -> None:
    """Scalars: rate, momentum."""
    state = flush_subnormals()
    for i in range(w.size):
        old = w[i]
        speed = keep * velocity[i] + (min(max(gradient[i] * scale, -clip), clip) + decay * old)
        velocity[i] = speed
        new = old - rate * speed
        w[i] = new
    restore_subnormals(state)


def nesterov(
    w: Floats,
    gradient: Floats,
    velocity: Floats,
    scale: float,
    clip: float,
    decay: float,
    rate: float,
    keep: float,
) -> None:
    """Scalars: rate, momentum."""
    state = flush_subnormals()
    for i in range(w.size):
        old = w[i]
        g = min(max(gradient[i] * scale, -clip), clip) + decay * old
        speed = keep * velocity[i] + g
        velocity[i] = speed
        new = old - rate * (g + keep * speed)
        w[i] = new
    restore_subnormals(state)


def adagrad(
    w: Floats,
    gradient: Floats,
    square_sum: Floats,
    scale: float,
    clip: float,
    decay: float,
    rate: float,
    eps: float,
) -> None:
    """Scalars: rate, eps."""
    state = flush_subnormals()
    for i in range(w.size):
        old = w[i]
        g = min(max(gradient[i] * scale, -clip), clip) + decay * old
        total = square_sum[i] + g * g
        square_sum[i] = total
        new = old - rate * g / (math.sqrt(total) + eps)
        w[i] = new
    restore_subnormals(state)


def adadelta(
    w: Floats,
    gradient: Floats,
    square_average: Floats,
    step_average: Floats,
    scale: float,
    clip: float,
    decay: float,
    rate: float,
    rho: float,
    rest: float,
    eps: float,
) -> None:
    """Scalars: rate, rho, 1 - rho, eps."""
    state = flush_subnormals()
    for i in range(w.size):
        old = w[i]
        g = min(max(gradient[i] * scale, -clip), clip) + decay * old
        square = rho * square_average[i] + rest * g * g
        square_average[i] = square
        mean = step_average[i]
        step = math.sqrt((mean + eps) / (square + eps)) * g
        step_average[i] = rho * mean + rest * step * step
        new = old - rate * step
        w[i] = new
    restore_subnormals(state)


def rmsprop(
    w: Floats,
    gradient: Floats,
    square_average: Floats,
    average: Optional,
    velocity: Optional,
    scale: float,
    clip: float,
    decay: float,
    rate: float,
    alpha: float,
    rest: float,
    eps: float,
    keep: float,
) -> None:
    """Scalars: rate, alpha, 1 - alpha, eps, momentum."""
    state = flush_subnormals()
    zero = w.dtype.type(0)
    for i in range(w.size):
        old = w[i]
        g = min(max(gradient[i] * scale, -clip), clip) + decay * old
        variance = alpha * square_average[i] + rest * g * g
        square_average[i] = variance
        if average is not None:
            mean = average[i]
            mean = mean + rest * (g - mean)
            average[i] = mean
            variance = max(variance - mean * mean, zero)
        step = g / (math.sqrt(variance) + eps)
        if velocity is not None:
            step = keep * velocity[i] + step
            velocity[i] = step
        new = old - rate * step
        w[i] = new
    restore_subnormals(state)


def adam(
    w: Floats,
    gradient: Floats,
    average: Floats,
    square_average: Floats,
    largest: Optional,
    scale: float,
    clip: float,
    decay: float,
    shrink: float,
    rate: float,
    rest1: float,
    beta2: float,
    rest2: float,
    correction: float,
    eps: float,
) -> None:
    """Scalars: those of the signature; ``shrink`` is AdamW's 1 - rate * decay, the others as ``lamb``'s."""
    state = flush_subnormals()
    for i in range(w.size):
        old = w[i]
        g = min(max(gradient[i] * scale, -clip), clip) + decay * old
        mean = average[i]
        mean = mean + rest1 * (g - mean)
        average[i] = mean
        square = beta2 * square_average[i] + rest2 * g * g
        square_average[i] = square
        if largest is not None:
            square = max(largest[i], square)
            largest[i] = square
        new = old * shrink - rate * mean / (math.sqrt(square) * correction + eps)
        w[i] = new
    restore_subnormals(state)


def ftrl(
    w: Floats,
    gradient: Floats,
    square_sum: Floats,
    linear: Floats,
    scale: float,
    clip: float,
    decay: float,
    inverse_rate: float,
    l1: float,
    beta: float,
    double_l2: float,
) -> None:
    """Scalars: 1 / rate, l1, beta, 2 * l2."""
    state = flush_subnormals()
    zero = w.dtype.type(0)
    for i in range(w.size):
        old = w[i]
        g = min(max(gradient[i] * scale, -clip), clip) + decay * old
        before = square_sum[i]
        total = before + g * g
        square_sum[i] = total
        root = math.sqrt(total)
        pull = linear[i] + (g - (root - math.sqrt(before)) * inverse_rate * old)
        linear[i] = pull
        step = math.copysign(max(abs(pull) - l1, zero), pull)
        # Where the divisor is zero, so is the step: 0 / 0 must stay 0.
        new = zero if step == zero else -step / ((root + beta) * inverse_rate + double_l2)
        w[i] = new
    restore_subnormals(state)


def lamb(
    w: Floats,
    gradient: Floats,
    average: Floats,
    square_average: Floats,
    scale: float,
    clip: float,
    decay: float,
    rate: float,
    rest1: float,
    beta2: float,
    rest2: float,
    first: float,
    correction: float,
    eps: float,
) -> None:
    """Two passes. Scalars: rate, 1 - beta1, beta2, 1 - beta2, 1 / (1 - beta1**t), 1 / sqrt(1 - beta2**t), eps."""
    state = flush_subnormals()
    values_square = np.float64(0.0)
    direction_square = np.float64(0.0)
    for i in range(w.size):
        old = w[i]
        g = min(max(gradient[i] * scale, -clip), clip)
        mean = average[i]
        mean = mean + rest1 * (g - mean)
        average[i] = mean
        square = beta2 * square_average[i] + rest2 * g * g
        square_average[i] = square
        direction = first * mean / (math.sqrt(square) * correction + eps) + decay * old
        values_square += np.float64(old) * np.float64(old)
        direction_square += np.float64(direction) * np.float64(direction)
    trust = 1.0
    if values_square > 0 and direction_square > 0:
        trust = math.sqrt(values_square) / math.sqrt(direction_square)
    factor = rate * w.dtype.type(trust)
    for i in range(w.size):
        old = w[i]
        direction = first * average[i] / (math.sqrt(square_average[i]) * correction + eps) + decay * old
        new = old - factor * direction
        w[i] = new
    restore_subnormals(state)
