"""The loops of ``distinct`` compiled; see ``compiled`` for how."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from numba import types

from flightedl.kernels import distinct
from flightedl.kernels.compiled import machine_code


class DistinctKernels(NamedTuple):
    """The functions of ``distinct`` as machine code."""

    number_ids: Any
    add_up: Any
    spread: Any
    spread_tables: Any
    first_not_finite: Any


def _own(number: Any, dimensions: int = 1) -> Any:
    return types.Array(number, dimensions, "C")


def _given(number: Any, dimensions: int = 1) -> Any:
    return types.Array(number, dimensions, "C", readonly=True, aligned=False)


@cache
def distinct_kernels() -> DistinctKernels:
    """Compiled, or read from numba's cache, when this is first called."""
    ids, places, floats = _own(types.uint64), _own(types.int64), _own(types.float32, 2)
    gradients = _given(types.float32, 2), _given(types.uint32, 2)
    signatures = (
        (distinct.number_ids, types.int64(_given(types.uint64), places, _own(types.int32), ids, places)),
        (distinct.add_up, types.int64(*gradients, places, floats)),
        (distinct.spread, types.void(_given(types.float32), places, types.int64, _own(types.float32))),
        (
            distinct.spread_tables,
            types.void(_given(types.float32), places, places, places, places, _own(types.float32)),
        ),
        (distinct.first_not_finite, types.int64(_given(types.uint32), types.int64)),
    )
    return DistinctKernels(*(machine_code(loop, signature, allocates=False) for loop, signature in signatures))
