"""Parameters as declared: float arrays with names.

``dtype`` is the type in the user's program and in messages; ``storage_dtype`` is the type in which a pserver stores and
updates values. A pserver stores float16 and bfloat16 as float32 (a *master copy*), so that small updates are not lost.
Pulled values are rounded to nearest even; checkpoints contain the master copy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flightedl.errors import UsageError

#: dtype -> the dtype in which a pserver stores and updates values.
STORAGE_DTYPES = {"float32": "float32", "float64": "float64", "float16": "float32", "bfloat16": "float32"}
ITEM_SIZES_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
NAME_LENGTH_LIMIT = 256


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """One named array.

    Raises:
        UsageError: the name is empty or too long, the shape has no elements, or the dtype is not supported.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not 0 < len(self.name) <= NAME_LENGTH_LIMIT:
            raise UsageError(f"parameter name {self.name!r:.80} must be text of 1 to {NAME_LENGTH_LIMIT} characters")
        whole = all(isinstance(side, int) and not isinstance(side, bool) for side in self.shape)
        if not isinstance(self.shape, tuple) or not whole:
            raise UsageError(f"parameter {self.name!r}: shape {self.shape!r:.80} must be whole numbers")
        if any(side < 1 for side in self.shape):
            raise UsageError(
                f"parameter {self.name!r} has shape {self.shape}: an array without elements cannot be trained"
            )
        if self.dtype not in STORAGE_DTYPES:
            known = ", ".join(STORAGE_DTYPES)
            raise UsageError(f"parameter {self.name!r} has dtype {self.dtype}: convert it to one of {known}")

    @property
    def storage_dtype(self) -> str:
        """The dtype in which a pserver stores the values."""
        return STORAGE_DTYPES[self.dtype]

    @property
    def short_kind(self) -> str:
        """The dtype if it is "float16" or "bfloat16"; empty for other dtypes."""
        return "" if self.dtype == self.storage_dtype else self.dtype

    @property
    def seen_item_bytes(self) -> int:
        """Bytes of one element of the declared dtype."""
        return ITEM_SIZES_BYTES[self.dtype]

    @property
    def size(self) -> int:
        """Number of elements; 1 for a scalar."""
        return math.prod(self.shape)

    @property
    def item_size_bytes(self) -> int:
        """Bytes of one stored element."""
        return ITEM_SIZES_BYTES[self.storage_dtype]

    @property
    def size_bytes(self) -> int:
        return self.size * self.item_size_bytes

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "shape": list(self.shape), "dtype": self.dtype}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ParameterSpec:
        """Return the parameter encoded by ``to_json``. Raises UsageError for any other JSON."""
        if not isinstance(data, Mapping) or data.keys() != {"name", "shape", "dtype"}:
            raise UsageError(f"a parameter is an object of name, shape and dtype, got {data!r:.80}")
        if not isinstance(data["shape"], list | tuple):
            raise UsageError(f"parameter {data['name']!r:.80}: shape {data['shape']!r:.80} must be a list")
        return cls(data["name"], tuple(data["shape"]), data["dtype"])
