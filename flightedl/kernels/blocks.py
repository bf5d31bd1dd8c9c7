"""Loops over one block, compiled by numba: updates, sums, checks and 16-bit conversion.

``flightedl.kernels.rules`` explains what keeps the loops fast. The conversions take all floats as their bits: 16-bit
floats because NumPy has no bfloat16, and float32 as ``array.view(np.uint32)``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from flightedl.kernels.rules import averaged, constants_in, update_element
from flightedl.kernels.subnormals import flush_subnormals, restore_subnormals

Floats = npt.NDArray[Any]
Loop = Callable[..., Any]

#: Number of elements to convert at a time, so that they stay in the processor's cache during all passes.
_PIECE = 1024
_TWO_TO_112 = np.float32(2.0**112)


@cache
def loop_of(rule: Loop, get: Loop, put: Loop) -> Loop:
    """Return the loop that applies a rule from ``rules`` to every element of a block."""

    def update(w: Floats, gradient: Floats, slots: Any, constants: Floats) -> None:
        state = flush_subnormals()
        c = constants_in(constants)
        for i in range(w.size):
            update_element(w, 0, gradient, 0, i, slots, 0, 0, c, rule, get, put)
        restore_subnormals(state)

    return update


def lamb(w: Floats, gradient: Floats, slots: Any, constants: Floats) -> None:
    """Update a block by LAMB, in two passes.

    The constants are the same as in ``rules.adam``, but the rate is uncorrected. The update is compiled with
    reassociation, because otherwise its sums would not be vectorized.
    """
    state = flush_subnormals()
    average, square_average = slots
    k = constants_in(constants)
    values_square = np.float64(0.0)
    direction_square = np.float64(0.0)
    for i in range(w.size):
        old = w[i]
        g = min(max(gradient[i] * k.scale, -k.clip), k.clip)
        mean = averaged(average[i], g, k.a)
        average[i] = mean
        square = k.b * square_average[i] + k.c * g * g
        square_average[i] = square
        direction = k.first * mean / (math.sqrt(square) * k.second + k.d) + k.decay * old
        values_square += np.float64(old) * np.float64(old)
        direction_square += np.float64(direction) * np.float64(direction)
    trust = 1.0
    if values_square > 0 and direction_square > 0:
        trust = math.sqrt(values_square) / math.sqrt(direction_square)
    factor = k.rate * w.dtype.type(trust)
    for i in range(w.size):
        old = w[i]
        direction = k.first * average[i] / (math.sqrt(square_average[i]) * k.second + k.d) + k.decay * old
        w[i] = old - factor * direction
    restore_subnormals(state)


def accumulate_first(total: Floats, gradient: Floats, weight: float) -> None:
    """Start a sum: ``total = weight * gradient``. The previous content of ``total`` is ignored."""
    state = flush_subnormals()
    for i in range(total.size):
        total[i] = weight * gradient[i]
    restore_subnormals(state)


def accumulate(total: Floats, gradient: Floats, weight: float) -> None:
    """Add to a sum: ``total += weight * gradient``."""
    state = flush_subnormals()
    for i in range(total.size):
        total[i] += weight * gradient[i]
    restore_subnormals(state)


def all_finite(gradient: Floats) -> bool:
    """Return True if no element is NaN or infinite.

    If x is NaN or infinite, 0 * x is NaN, and so is any sum that contains it. The loop is compiled with reassociation,
    so that the sum is vectorized, but with no other relaxation, so that NaN keeps its meaning.
    """
    state = flush_subnormals()
    zero = gradient.dtype.type(0)
    total = gradient.dtype.type(0)
    for i in range(gradient.size):
        total += gradient[i] * zero
    restore_subnormals(state)
    return bool(total == zero)


def copy_finite(words: npt.NDArray[np.uint32], copy: npt.NDArray[np.uint32]) -> bool:
    """Copy ``words``. Return True if no word, read as a float32, is NaN or infinite.

    If no word is NaN or infinite, no pair of words is NaN or infinite as a float64. The copy is checked instead of the
    source, because another process may change the source during the call. The check relies on the fact that adding one
    to an exponent of all ones carries into the sign bit.
    """
    found = np.uint32(0)
    for i in range(words.size):
        copy[i] = words[i]
        found |= np.uint32((copy[i] & np.uint32(0x7F800000)) + np.uint32(0x00800000))
    return bool(found & np.uint32(0x80000000) == 0)


def bfloat16_to_float32(bits: npt.NDArray[np.uint16], out: npt.NDArray[np.uint32]) -> None:
    """Convert exactly: a bfloat16 is the upper half of a float32."""
    for i in range(out.size):
        out[i] = np.uint32(bits[i]) << np.uint32(16)


def float32_to_bfloat16(bits: npt.NDArray[np.uint32], out: npt.NDArray[np.uint16]) -> None:
    """Round to nearest, ties to even. NaN remains NaN, and numbers that are out of range become infinite."""
    for i in range(out.size):
        b = bits[i]
        rounded = np.uint32(b + np.uint32(0x7FFF) + ((b >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        quiet = (b >> np.uint32(16)) | np.uint32(0x40)
        out[i] = np.uint16(quiet if (b & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000) else rounded)


def float16_to_float32(
    bits: npt.NDArray[np.uint16], out: npt.NDArray[np.uint32], floats: npt.NDArray[np.float32]
) -> None:
    """Convert exactly. ``floats`` is a view of ``out``. A multiplication corrects the exponents."""
    for start in range(0, out.size, _PIECE):
        short = bits[start : start + _PIECE]
        wide, wide_floats = out[start : start + _PIECE], floats[start : start + _PIECE]
        for i in range(wide.size):
            wide[i] = np.uint32(short[i] & np.uint16(0x7FFF)) << np.uint32(13)
        for i in range(wide.size):
            wide_floats[i] *= _TWO_TO_112
        for i in range(wide.size):
            b = np.uint32(short[i])
            special = np.uint32(0x7F800000) if (b & np.uint32(0x7C00)) == np.uint32(0x7C00) else np.uint32(0)
            wide[i] |= ((b & np.uint32(0x8000)) << np.uint32(16)) | special


def float32_to_float16(
    bits: npt.NDArray[np.uint32], floats: npt.NDArray[np.float32], out: npt.NDArray[np.uint16]
) -> None:
    """Round to nearest, ties to even. NaN remains NaN, and numbers that are out of range become infinite.

    ``floats`` is a view of the memory of ``bits``. Adding 0.5 rounds numbers that are subnormal in float16, because the
    last bit of 0.5 in float32 has the value of the smallest subnormal float16.
    """
    rounded = np.empty(_PIECE, np.float32)
    rounded_bits = rounded.view(np.uint32)
    for start in range(0, out.size, _PIECE):
        short = out[start : start + _PIECE]
        wide, wide_floats = bits[start : start + _PIECE], floats[start : start + _PIECE]
        for i in range(short.size):
            rounded[i] = abs(wide_floats[i]) + np.float32(0.5)
        for i in range(short.size):
            b = wide[i]
            magnitude = b & np.uint32(0x7FFFFFFF)
            odd = (magnitude >> np.uint32(13)) & np.uint32(1)
            normal = np.uint32(magnitude - np.uint32(0x38000000) + np.uint32(0x0FFF) + odd) >> np.uint32(13)
            subnormal = np.uint32(rounded_bits[i] - np.uint32(0x3F000000))
            half = subnormal if magnitude < np.uint32(0x38800000) else normal
            half = np.uint32(0x7C00) if magnitude >= np.uint32(0x47800000) else half
            half = np.uint32(0x7E00) if magnitude > np.uint32(0x7F800000) else half
            short[i] = np.uint16(((b >> np.uint32(16)) & np.uint32(0x8000)) | half)
