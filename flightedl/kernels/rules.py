"""Optimizers' update rules, which numba compiles into loops over blocks and over rows of tables.

``tests.support.reference_updates`` contains the formulas in plain NumPy.

A *rule* is a function for one element: ``rule(old, g, s, c)`` takes the old value, the gradient (scaled, clipped, and
with weight decay), a tuple of slots, and the constants. It returns the new value and a tuple of new slots.
``update_element`` applies a rule to an element of an array; ``GETS`` and ``PUTS`` contain functions that read and write
N slots. Rules that need an entire row, such as row-wise Adagrad, are in ``row_rules``. LAMB, which needs an entire
block, is in ``blocks``.

Rules work only in compiled code. Three conventions make them fast and exact:

* Every constant has the block's dtype. A literal in a loop would be float64, and LLVM would convert each float32
  element to float64 and back. ``_ZERO`` and ``_ONE`` are float32, which LLVM converts to float64 at compile time if
  necessary.
* No fastmath is used. The loops are vectorized without it, are limited by memory bandwidth, and give the same bits on
  every machine.
* An infinite ``clip`` disables clipping, and a zero ``decay`` disables weight decay, at negligible cost.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numba.extending import register_jitable

_ZERO, _ONE = np.float32(0), np.float32(1)


class Constants(NamedTuple):
    """Constants of an update, all in the block's dtype. Each rule's docstring defines ``a`` to ``d``."""

    scale: Any
    clip: Any
    decay: Any
    #: Learning rate. For Adam, it is multiplied by the bias correction of the average.
    rate: Any
    a: Any
    b: Any
    c: Any
    d: Any
    #: Bias corrections: for LAMB's average of gradients, and for averages of squares.
    first: Any
    second: Any
    #: ``1 - rate * decay`` for AdamW; 1 for all other rules.
    shrink: Any


@register_jitable(forceinline=True)
def constants_in(c: Any) -> Any:
    """Return the constants from an array, in the order of the fields."""
    return Constants(c[0], c[1], c[2], c[3], c[4], c[5], c[6], c[7], c[8], c[9], c[10])


@register_jitable(forceinline=True)
def gradient_at(w: Any, at: Any, g: Any, row: Any, i: Any, c: Any) -> Any:
    """Return the gradient of one element: scaled, clipped, and with weight decay."""
    return min(max(g[row + i] * c.scale, -c.clip), c.clip) + c.decay * w[at + i]


@register_jitable(forceinline=True)
def update_element(
    w: Any, at: Any, g: Any, row: Any, i: Any, s: Any, slot: Any, stride: Any, c: Any, rule: Any, get: Any, put: Any
) -> None:
    """Apply a rule to one element.

    The loop is in the caller, because LLVM vectorizes only loops in the outermost function.

    Args:
        w: Values, of which element ``at + i`` is updated.
        at: Offset. For rows it is unsigned, like all offsets, which avoids the check for negative indexes.
        g: Gradients, of which ``g[row + i]`` belongs to the element.
        row: Offset of the gradients.
        i: Number of the element.
        s: Tuple of arrays with the slots, which are updated. Slot n begins at ``slot + n * stride`` of array n.
        slot: See ``s``.
        stride: See ``s``.
        c: Constants.
        rule: A rule of this module.
        get: Function in ``GETS`` that reads the rule's slots.
        put: Function in ``PUTS`` that writes the rule's slots.
    """
    one = gradient_at(w, at, g, row, i, c)
    w[at + i], new = rule(w[at + i], one, get(s, slot, stride, i), c)
    put(s, slot, stride, i, new)


@register_jitable(forceinline=True)
def by_element(
    w: Any, at: Any, g: Any, row: Any, dim: Any, s: Any, slot: Any, stride: Any, c: Any, rule: Any, get: Any, put: Any
) -> None:
    """Apply a rule to each of a row's ``dim`` elements; see ``update_element``."""
    for i in range(dim):
        update_element(w, at, g, row, i, s, slot, stride, c, rule, get, put)


@register_jitable(forceinline=True)
def _get_0(_s: Any, _slot: Any, _stride: Any, _i: Any) -> Any:
    return ()


@register_jitable(forceinline=True)
def _get_1(s: Any, slot: Any, _stride: Any, i: Any) -> Any:
    return (s[0][slot + i],)


@register_jitable(forceinline=True)
def _get_2(s: Any, slot: Any, stride: Any, i: Any) -> Any:
    return s[0][slot + i], s[1][slot + stride + i]


@register_jitable(forceinline=True)
def _get_3(s: Any, slot: Any, stride: Any, i: Any) -> Any:
    return s[0][slot + i], s[1][slot + stride + i], s[2][slot + stride + stride + i]


@register_jitable(forceinline=True)
def _put_0(_s: Any, _slot: Any, _stride: Any, _i: Any, _new: Any) -> None:
    pass


@register_jitable(forceinline=True)
def _put_1(s: Any, slot: Any, _stride: Any, i: Any, new: Any) -> None:
    s[0][slot + i] = new[0]


@register_jitable(forceinline=True)
def _put_2(s: Any, slot: Any, stride: Any, i: Any, new: Any) -> None:
    s[0][slot + i], s[1][slot + stride + i] = new


@register_jitable(forceinline=True)
def _put_3(s: Any, slot: Any, stride: Any, i: Any, new: Any) -> None:
    s[0][slot + i], s[1][slot + stride + i], s[2][slot + stride + stride + i] = new


#: Functions that read and write an element's slots, by the number of slots.
GETS = _get_0, _get_1, _get_2, _get_3
PUTS = _put_0, _put_1, _put_2, _put_3


@register_jitable(forceinline=True)
def divided(dividend: Any, divisor: Any) -> Any:
    """Return the quotient, or 0 if both numbers are zero, as they are before the first gradient if eps is 0."""
    return dividend / (divisor if divisor != _ZERO else _ONE)


@register_jitable(forceinline=True)
def averaged(mean: Any, one: Any, rest: Any) -> Any:
    """Return the moving average in which ``one`` has the weight ``rest``."""
    return mean + rest * (one - mean)


@register_jitable(forceinline=True)
def sgd(old: Any, g: Any, _s: Any, c: Any) -> Any:
    """Gradient descent, which has no slots, and only the constants that all rules have."""
    return old - c.rate * g, ()


@register_jitable(forceinline=True)
def momentum(old: Any, g: Any, s: Any, c: Any) -> Any:
    """Slot: the velocity. Constant ``a``: the momentum."""
    speed = c.a * s[0] + g
    return old - c.rate * speed, (speed,)


@register_jitable(forceinline=True)
def nesterov(old: Any, g: Any, s: Any, c: Any) -> Any:
    """Slot: the velocity. Constant ``a``: the momentum."""
    speed = c.a * s[0] + g
    return old - c.rate * (g + c.a * speed), (speed,)


@register_jitable(forceinline=True)
def adagrad(old: Any, g: Any, s: Any, c: Any) -> Any:
    """Slot: the sum of squares. Constant ``a``: eps."""
    total = s[0] + g * g
    return old - divided(c.rate * g, math.sqrt(total) + c.a), (total,)


@register_jitable(forceinline=True)
def adadelta(old: Any, g: Any, s: Any, c: Any) -> Any:
    """Slots: the averages of squared gradients and of squared steps. Constants: a = rho, b = 1 - rho, c = eps."""
    square = c.a * s[0] + c.b * g * g
    step = math.sqrt((s[1] + c.c) / (square + c.c)) * g
    return old - c.rate * step, (square, c.a * s[1] + c.b * step * step)


@register_jitable(forceinline=True)
def rmsprop(old: Any, g: Any, s: Any, c: Any) -> Any:
    """Slot: the average of squares. In all four forms, a = alpha, b = 1 - alpha, c = eps, and d = momentum."""
    square = c.a * s[0] + c.b * g * g
    return old - c.rate * (g / (math.sqrt(square) + c.c)), (square,)


@register_jitable(forceinline=True)
def rmsprop_momentum(old: Any, g: Any, s: Any, c: Any) -> Any:
    """Slots: the average of squares, and the velocity."""
    square = c.a * s[0] + c.b * g * g
    speed = c.d * s[1] + g / (math.sqrt(square) + c.c)
    return old - c.rate * speed, (square, speed)


@register_jitable(forceinline=True)
def rmsprop_centered(old: Any, g: Any, s: Any, c: Any) -> Any:
    """Slots: the averages of squares and of gradients."""
    square, mean = c.a * s[0] + c.b * g * g, averaged(s[1], g, c.b)
    variance = max(square - mean * mean, _ZERO)
    return old - c.rate * (g / (math.sqrt(variance) + c.c)), (square, mean)


@register_jitable(forceinline=True)
def rmsprop_centered_momentum(old: Any, g: Any, s: Any, c: Any) -> Any:
    """Slots: the averages of squares and of gradients, and the velocity."""
    square, mean = c.a * s[0] + c.b * g * g, averaged(s[1], g, c.b)
    speed = c.d * s[2] + g / (math.sqrt(max(square - mean * mean, _ZERO)) + c.c)
    return old - c.rate * speed, (square, mean, speed)


@register_jitable(forceinline=True)
def adam(old: Any, g: Any, s: Any, c: Any) -> Any:
    """Slots: averages of gradients and of squares. Constants: a = 1 - beta1, b = beta2, c = 1 - beta2, d = eps."""
    mean, square = averaged(s[0], g, c.a), c.b * s[1] + c.c * g * g
    return old * c.shrink - divided(c.rate * mean, math.sqrt(square) * c.second + c.d), (mean, square)


@register_jitable(forceinline=True)
def amsgrad(old: Any, g: Any, s: Any, c: Any) -> Any:
    """Adam with a third slot, which is the largest average of squares so far."""
    mean, square = averaged(s[0], g, c.a), c.b * s[1] + c.c * g * g
    largest = max(s[2], square)
    return old * c.shrink - divided(c.rate * mean, math.sqrt(largest) * c.second + c.d), (mean, square, largest)


@register_jitable(forceinline=True)
def ftrl(old: Any, g: Any, s: Any, c: Any) -> Any:
    """Slots: the sum of squares, and the linear term. Constants: rate = 1 / rate, a = l1, b = beta, c = 2 * l2."""
    total = s[0] + g * g
    root = math.sqrt(total)
    pull = s[1] + (g - (root - math.sqrt(s[0])) * c.rate * old)
    step = math.copysign(max(abs(pull) - c.a, _ZERO), pull)
    # If the divisor is zero, the step must be zero, so 0 / 0 must yield 0.
    new = _ZERO if step == _ZERO else -step / ((root + c.b) * c.rate + c.c)
    return new, (total, pull)
