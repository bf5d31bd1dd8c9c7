"""The finalizer of splitmix64 (Steele, Lea & Flood 2014): a bijection of 64-bit numbers that mixes all of their bits.

Stored formats depend on it, so it must never change.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

MASK = (1 << 64) - 1
#: 2**64 divided by the golden ratio, which splitmix64 uses as its increment.
GOLDEN = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def mix(bits: int) -> int:
    """Return the mixed bits of an integer, which is taken modulo 2**64."""
    bits &= MASK
    bits = (bits ^ (bits >> 30)) * _FIRST & MASK
    bits = (bits ^ (bits >> 27)) * _SECOND & MASK
    return bits ^ (bits >> 31)


def mix_all(bits: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Mix the bits of each number in place, and return the array."""
    bits ^= bits >> np.uint64(30)
    bits *= np.uint64(_FIRST)
    bits ^= bits >> np.uint64(27)
    bits *= np.uint64(_SECOND)
    bits ^= bits >> np.uint64(31)
    return bits
