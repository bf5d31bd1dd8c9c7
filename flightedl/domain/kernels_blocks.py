"""Loops over one received block that are no update rule, for numba to compile: sums, checks and 16-bit conversion.

See ``flightedl.domain.kernels_rules`` for what keeps such loops fast. 16-bit floats come as their bits, because NumPy
has no bfloat16: pass ``array.view(np.uint32)`` for float32.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from flightedl.domain.kernels_subnormals import flush_subnormals, restore_subnormals

Floats = npt.NDArray[Any]


def accumulate_first(total: Floats, gradient: Floats, weight: float) -> None:
    """``total = weight * gradient``: opens a sum without clearing it before."""
    state = flush_subnormals()
    for i in range(total.size):
        total[i] = weight * gradient[i]
    restore_subnormals(state)


def accumulate(total: Floats, gradient: Floats, weight: float) -> None:
    """``total += weight * gradient``."""
    state = flush_subnormals()
    for i in range(total.size):
        total[i] += weight * gradient[i]
    restore_subnormals(state)


def all_finite(gradient: Floats) -> bool:
    """Whether no element is NaN or infinite.

    0 * x is NaN for both, and a NaN stays in a sum. Compiled with reassociation, which lets the sum vectorize; nothing
    else is relaxed, so NaN keeps its meaning.
    """
    state = flush_subnormals()
    zero = gradient.dtype.type(0)
    total = gradient.dtype.type(0)
    for i in range(gradient.size):
        total += gradient[i] * zero
    restore_subnormals(state)
    return bool(total == zero)


def bfloat16_to_float32(bits: npt.NDArray[np.uint16], out: npt.NDArray[np.uint32]) -> None:
    """Exact: a bfloat16 is the upper half of a float32."""
    for i in range(out.size):
        out[i] = np.uint32(bits[i]) << np.uint32(16)


def float32_to_bfloat16(bits: npt.NDArray[np.uint32], out: npt.NDArray[np.uint16]) -> None:
    """Round to nearest, ties to even; NaN stays NaN, what is beyond the largest becomes infinite."""
    for i in range(out.size):
        b = bits[i]
        rounded = np.uint32(b + np.uint32(0x7FFF) + ((b >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        quiet = (b >> np.uint32(16)) | np.uint32(0x40)
        out[i] = np.uint16(quiet if (b & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000) else rounded)
