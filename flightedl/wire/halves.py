"""16-bit floats on the wire, converted by whole-array NumPy operations: trainers have no compiler.

bfloat16 is the upper half of a float32: the range of it, 8 bits of precision. float16 has 11 bits, and a range up to
65,504. Rounding is to nearest, ties to even. Both come as (n,) uint16, their bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from flightedl.errors import UsageError

Floats = npt.NDArray[np.float32]
Bits = npt.NDArray[np.uint16]

#: What ``wire`` can be; empty: as declared.
KINDS = ("", "bfloat16", "float16")
ITEM_BYTES = 2


def check_kind(kind: str) -> None:
    """UsageError unless there is such a wire format."""
    if kind not in KINDS:
        raise UsageError(f"wire is {kind!r:.40}, but it can be bfloat16, float16, or left out")


def item_bytes(kind: str, dtype: str) -> int:
    """Bytes of an element of a parameter on the wire; only float32 is shortened."""
    return ITEM_BYTES if kind and dtype == "float32" else np.dtype(dtype).itemsize


def shortened(values: Floats, kind: str) -> Bits:
    """Round (n,) finite float32 to (n,) 16-bit floats, as bits. What is beyond the range becomes infinite."""
    if kind == "float16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16).view(np.uint16)
    bits = values.view(np.uint32)
    rounded = bits >> np.uint32(16)
    rounded &= np.uint32(1)
    rounded += bits
    rounded += np.uint32(0x7FFF)
    return np.ascontiguousarray(rounded.view(np.uint16)[1::2])


def widened(data: memoryview, kind: str, out: npt.NDArray[Any]) -> None:
    """Exactly the 16-bit floats in ``data``, into (n,) float32."""
    if kind == "float16":
        out[:] = np.frombuffer(data, np.float16)
        return
    np.left_shift(np.frombuffer(data, np.uint16), np.uint32(16), out=out.view(np.uint32), dtype=np.uint32)
