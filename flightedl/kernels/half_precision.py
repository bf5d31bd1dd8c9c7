"""16-bit floats: limits, and conversions in NumPy without numba. ``kernels.compiled`` has faster conversions.

A bfloat16 is the upper half of a float32: it has the same range and 8 bits of precision. A float16 has 11 bits of
precision and a range up to 65,504. Conversions round to nearest, ties to even. Arrays of either kind contain the bits:
(n,) uint16.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from flightedl.errors import UsageError

Floats = npt.NDArray[np.float32]
Bits = npt.NDArray[np.uint16]

#: Values of the setting ``wire``. An empty string means the parameter's own dtype.
KINDS = ("", "bfloat16", "float16")
ITEM_BYTES = 2


#: Largest finite value of each kind, and smallest float32 that rounds to infinity.
_LARGEST = {"bfloat16": 3.3895313892515355e38, "float16": 65504.0, "float32": 3.4028234663852886e38}
_TOO_LARGE = {"bfloat16": 3.3961775292304601e38, "float16": 65520.0}
#: Bits of a 16-bit float that are all set in infinity and in NaN.
_EXPONENTS = {"bfloat16": 0x7F80, "float16": 0x7C00}


def largest(kind: str) -> float:
    """Return the largest finite value."""
    return _LARGEST[kind]


def too_large(kind: str) -> float:
    """Return the smallest float32 that rounds to infinity; infinity itself if ``kind`` is empty."""
    return _TOO_LARGE.get(kind, math.inf)


def array_dtype(name: str) -> np.dtype[Any]:
    """Return the NumPy dtype that corresponds to a parameter's dtype.

    Raises:
        UsageError: the dtype is bfloat16, and the package that adds this type to NumPy is not installed.
    """
    if name != "bfloat16":
        return np.dtype(name)
    try:
        import ml_dtypes
    except ImportError:
        raise UsageError("bfloat16 parameters need the package ml_dtypes here: pip install ml_dtypes") from None
    dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return dtype


def is_finite(bits: Bits, kind: str) -> bool:
    """Return True if all (n,) 16-bit floats are finite."""
    mask = np.uint16(_EXPONENTS[kind])
    return bool((np.bitwise_and(bits, mask) != mask).all())


def check_kind(kind: str) -> None:
    """Raise UsageError for an unknown wire format."""
    if kind not in KINDS:
        raise UsageError(f"wire is {kind!r:.40}, but it can be bfloat16, float16, or left out")


def item_bytes(kind: str, dtype: str) -> int:
    """Return the size on the wire of an element of type ``dtype``. Only float32 is shortened."""
    return ITEM_BYTES if kind and dtype == "float32" else np.dtype(dtype).itemsize


def shortened(values: Floats, kind: str) -> Bits:
    """Round (n,) finite float32 to 16-bit floats. Return their bits. Numbers that are out of range become infinite."""
    if kind == "float16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16).view(np.uint16)
    bits = values.view(np.uint32)
    rounded = bits >> np.uint32(16)
    rounded &= np.uint32(1)
    rounded += bits
    rounded += np.uint32(0x7FFF)
    return np.ascontiguousarray(rounded.view(np.uint16)[1::2])


def float32_of(bits: npt.NDArray[Any], kind: str) -> npt.NDArray[np.float32]:
    """Return the exact values of an array of 16-bit floats, in the same shape."""
    if kind == "float16":
        return bits.view(np.float16).astype(np.float32)
    return np.left_shift(bits.view(np.uint16), np.uint32(16), dtype=np.uint32).view(np.float32)
