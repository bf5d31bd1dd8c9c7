"""List of all kernels, so that they can be compiled to numba's cache in advance."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from flightedl.domain.model.optimizers import (
    LAMB,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Ftrl,
    Momentum,
    Optimizer,
    RMSprop,
)
from flightedl.domain.tables.optimizers import RowAdagrad, RowAdam
from flightedl.kernels.compiled import block_kernels, half_kernels, kernel_for
from flightedl.kernels.compiled_rows import all_row_kernels, distinct_kernels, row_kernel, row_update
from flightedl.kernels.examples import examples_kernel

_FOR_BOTH: tuple[Optimizer, ...] = (
    SGD(lr=1.0),
    Momentum(lr=1.0),
    Momentum(lr=1.0, nesterov=True),
    Adagrad(lr=1.0),
    Adam(lr=1.0),
    Ftrl(lr=1.0),
)
#: One optimizer for each distinct loop. AdamW uses Adam's loop, and Delta uses SGD's.
_FOR_BLOCKS: tuple[Optimizer, ...] = (
    *_FOR_BOTH,
    Adadelta(lr=1.0),
    *(RMSprop(lr=1.0, centered=centered, momentum=momentum) for centered in (False, True) for momentum in (0.0, 0.9)),
    Adam(lr=1.0, amsgrad=True),
    LAMB(lr=1.0),
)
_FOR_ROWS: tuple[Optimizer, ...] = (*_FOR_BOTH, RowAdagrad(lr=1.0), RowAdam(lr=1.0))


def all_kernels() -> list[Callable[[], object]]:
    """Return functions that each compile a kernel or read it from numba's cache. The slowest functions come first."""
    return [
        # float16 uses the same loop as bfloat16.
        *(
            partial(row_update, rule, dtype, is_stochastic=True)
            for rule in _FOR_ROWS
            for dtype in ("bfloat16", "float32")
        ),
        *(partial(kernel_for, rule, dtype) for rule in _FOR_BLOCKS for dtype in ("float32", "float64")),
        *(partial(row_kernel, loop) for loop in all_row_kernels()),
        distinct_kernels,
        examples_kernel,
        *(partial(block_kernels, dtype) for dtype in ("float32", "float64")),
        *(partial(half_kernels, kind) for kind in ("bfloat16", "float16")),
    ]
