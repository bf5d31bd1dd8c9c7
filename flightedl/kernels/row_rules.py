"""Update rules that need an entire row, conversion of 16-bit values, initial values of rows, and sums of rounds.

The formulas are the same as in ``tests.support.reference_updates`` and ``domain.model.initial``, in float32.
Constants follow the conventions in ``flightedl.kernels.rules``.

A rule has the same arguments as ``rules.by_element``, which applies a rule for single elements. ``row_updates`` builds
the loops.
"""

# ruff: noqa: ARG001 - every rule has the same arguments, because the same loop calls them

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
from numba.extending import register_jitable

from flightedl.kernels.intrinsics import descend, square_sum
from flightedl.kernels.rules import averaged, divided, gradient_at

Floats = npt.NDArray[np.float32]
Records = npt.NDArray[np.int64]


_U1, _U3, _U11, _U27, _U30, _U31, _U40 = (np.uint64(n) for n in (1, 3, 11, 27, 30, 31, 40))
_FACTOR_1 = np.uint64(0xBF58476D1CE4E5B9)
_FACTOR_2 = np.uint64(0x94D049BB133111EB)
GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@register_jitable(forceinline=True)
def _mean_square(w: Any, at: Any, g: Any, row: Any, dim: Any, c: Any) -> Any:
    """Return the mean of a row's squared gradients. They are added in the same order on every machine."""
    eights = dim >> _U3
    total = square_sum(w, np.int64(at), g, np.int64(row), np.int64(eights), c.scale, c.clip, c.decay)
    for i in range(eights << _U3, dim):
        one = gradient_at(w, at, g, row, i, c)
        total += one * one
    return total / np.float32(dim)


@register_jitable(forceinline=True)
def _descend(w: Any, at: Any, g: Any, row: Any, dim: Any, c: Any, rate: Any) -> None:
    eights = dim >> _U3
    descend(w, np.int64(at), g, np.int64(row), np.int64(eights), c.scale, c.clip, c.decay, rate)
    for i in range(eights << _U3, dim):
        w[at + i] -= rate * gradient_at(w, at, g, row, i, c)


@register_jitable(forceinline=True)
def nothing(
    w: Any, at: Any, g: Any, row: Any, dim: Any, s: Any, slot: Any, stride: Any, c: Any, rule: Any, get: Any, put: Any
) -> None:
    """Change nothing, because the rate is zero and the optimizer's rule would divide by it."""


@register_jitable(forceinline=True)
def sgd(
    w: Any, at: Any, g: Any, row: Any, dim: Any, s: Any, slot: Any, stride: Any, c: Any, rule: Any, get: Any, put: Any
) -> None:
    """Gradient descent. It is vectorized by hand: compilers do not vectorize short rows in arrays that may overlap."""
    _descend(w, at, g, row, dim, c, c.rate)


@register_jitable(forceinline=True)
def row_adagrad(
    w: Any, at: Any, g: Any, row: Any, dim: Any, s: Any, slot: Any, stride: Any, c: Any, rule: Any, get: Any, put: Any
) -> None:
    """Slot: one number for the row, the sum of mean squares. Constant ``a``: eps."""
    total = s[0][slot] + _mean_square(w, at, g, row, dim, c)
    s[0][slot] = total
    divisor = math.sqrt(total) + c.a
    if divisor != np.float32(0):
        _descend(w, at, g, row, dim, c, c.rate / divisor)


@register_jitable(forceinline=True)
def row_adam(
    w: Any, at: Any, g: Any, row: Any, dim: Any, s: Any, slot: Any, stride: Any, c: Any, rule: Any, get: Any, put: Any
) -> None:
    """Slots: averages of gradients, and one average of mean squares. The constants are as in ``rules.adam``."""
    square = c.b * s[0][slot + dim] + c.c * _mean_square(w, at, g, row, dim, c)
    s[0][slot + dim] = square
    rate = divided(c.rate, math.sqrt(square) * c.second + c.d)
    for i in range(dim):
        mean = averaged(s[0][slot + i], gradient_at(w, at, g, row, i, c), c.a)
        s[0][slot + i] = mean
        w[at + i] -= rate * mean


@register_jitable(forceinline=True)
def scrambled(bits: Any) -> Any:
    """Scramble 64 bits, see ``domain.splitmix64``."""
    bits = (bits ^ (bits >> _U30)) * _FACTOR_1
    bits = (bits ^ (bits >> _U27)) * _FACTOR_2
    return bits ^ (bits >> _U31)


@register_jitable(forceinline=True)
def to_float32(bits: Any, is_bfloat16: Any, box: Any, box_bits: Any) -> Any:
    """Convert a 16-bit float exactly. ``box`` is scratch memory for one number, ``box_bits`` a view of its bits."""
    wide = np.uint32(bits)
    if is_bfloat16:
        box_bits[0] = wide << np.uint32(16)
        return box[0]
    if wide & np.uint32(0x7C00):
        box_bits[0] = (wide & np.uint32(0x7FFF)) << np.uint32(13)
        value = box[0] * np.float32(2.0**112)
    else:
        # The bits would represent a subnormal float32, which counts as zero here.
        value = np.float32(wide & np.uint32(0x3FF)) * np.float32(2.0**-24)
    return -value if wide & np.uint32(0x8000) else value


@register_jitable(forceinline=True)
def to_half(value: Any, chance: Any, is_bfloat16: Any, box: Any, box_bits: Any) -> Any:
    """Round a finite number to one of the two nearest 16-bit floats.

    A random ``chance`` in [0, 1) rounds stochastically; 0.5 rounds to nearest, ties away from zero. A number that is
    out of range becomes the largest finite number.
    """
    magnitude = abs(value)
    box[0] = magnitude
    sign = np.uint32(0x8000) if value < np.float32(0) else np.uint32(0)
    if is_bfloat16:
        wide = min(box_bits[0] + np.uint32(chance * np.float32(65536)), np.uint32(0x7F7FFFFF))
        return np.uint16(sign | np.uint32(wide) >> np.uint32(16))
    if magnitude < np.float32(2.0**-14):
        # Subnormal: multiples of 2**-24.
        return np.uint16(sign | np.uint32(magnitude * np.float32(2.0**24) + chance))
    wide = min(box_bits[0] + np.uint32(chance * np.float32(8192)), np.uint32(0x477FE000))
    return np.uint16(sign | (np.uint32(wide) - np.uint32(0x38000000)) >> np.uint32(13))


ZEROS, CONSTANT, UNIFORM, NORMAL = range(4)


def first_values(
    ids: npt.NDArray[np.uint64], places: Records, key: int, kind: int, a: float, b: float, out: Any
) -> None:
    """Write the initial values of ids to ``out`` at ``places``. ``a``: constant, scale or deviation; ``b``: mean."""
    dim = out.shape[1]
    for place in places:
        stream = scrambled(key ^ ids[place])
        for i in range(dim):
            if kind <= CONSTANT:
                out[place, i] = a
            elif kind == UNIFORM:
                bits = scrambled(stream + np.uint64(i + 1) * GOLDEN)
                out[place, i] = (np.float64(bits >> _U40) * 2.0**-23 - 1.0) * a
            elif i % 2 == 0:
                one = scrambled(stream + np.uint64(i + 1) * GOLDEN)
                other = scrambled(stream + np.uint64(i + 2) * GOLDEN)
                radius = math.sqrt(-2.0 * math.log(np.float64((one >> _U11) + _U1) * 2.0**-53)) * a
                angle = np.float64(other >> _U11) * 2.0**-53 * (2 * math.pi)
                out[place, i] = b + radius * math.cos(angle)
                if i + 1 < dim:
                    out[place, i + 1] = b + radius * math.sin(angle)


def combine(
    ids: npt.NDArray[np.uint64],
    gradients: Any,
    weight: float,
    index: Records,
    unique: npt.NDArray[np.uint64],
    sums: Any,
    count: int,
) -> int:
    """Add a contribution to the sums of a round, by id.

    Args:
        ids: (n,) ids of the contribution.
        gradients: (n, dim).
        weight: Factor of the gradients.
        index: Positions in ``unique`` by hash; -1 if free. Its size is a power of two that exceeds the number of ids.
        unique: The ids so far, of which the first ``count`` are valid.
        sums: (places, dim) sums of these ids.
        count: Number of ids so far.

    Returns:
        The new count.
    """
    mask = np.uint64(index.size - 1)
    dim = sums.shape[1]
    for i in range(ids.size):
        at = scrambled(ids[i]) & mask
        while index[np.int64(at)] >= 0 and unique[index[np.int64(at)]] != ids[i]:
            at = (at + _U1) & mask
        place = index[np.int64(at)]
        if place < 0:
            place = index[np.int64(at)] = count
            unique[count] = ids[i]
            count += 1
            for j in range(dim):
                sums[place, j] = weight * gradients[i, j]
        else:
            for j in range(dim):
                sums[place, j] += weight * gradients[i, j]
    return count
