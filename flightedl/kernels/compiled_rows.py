"""Machine code of the loops over rows, including the updates by an optimizer. ``compiled`` explains how it works."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import types

from flightedl.domain.model.initial import Init, Normal, Uniform, Zeros
from flightedl.domain.model.optimizers import SGD, Adagrad, Adam, Ftrl, Momentum, Optimizer
from flightedl.domain.model.schedules import Constant
from flightedl.domain.tables.optimizers import RowAdagrad, RowAdam
from flightedl.errors import UsageError
from flightedl.kernels import distinct, row_cuts, row_handles, row_records, row_rules, row_updates, rows, rules
from flightedl.kernels.compiled import Rule, adam_constants, constants_of, machine_code, rule_of

Floats = npt.NDArray[np.float32]


def _own(number: Any, dimensions: int = 1) -> Any:
    return types.Array(number, dimensions, "C")


def _received(number: Any, dimensions: int = 1) -> Any:
    return types.Array(number, dimensions, "C", readonly=True, aligned=False)


_I32, _I64, _U8, _U16, _U32, _U64 = types.int32, types.int64, types.uint8, types.uint16, types.uint32, types.uint64
_F32, _F64 = types.float32, types.float64
_WORDS, _LONGS, _NUMBERS, _FLOATS = _own(_U32), _own(_U64), _own(_I64), _own(_F32)
_COUNTS = _own(_I32)
_IDS, _GRADIENTS = _received(_U64), _received(_F32, 2)
_WORK = _own(_I64, 2)
_TABLE = types.NamedTuple(  # type: ignore[no-untyped-call]
    [
        _WORDS,
        _LONGS,
        _WORDS,
        _WORDS,
        _COUNTS,
        _LONGS,
        _LONGS,
        _NUMBERS,
        _COUNTS,
        _COUNTS,
        _NUMBERS,
        _NUMBERS,
        _WORDS,
        _NUMBERS,
        _NUMBERS,
        _LONGS,
        _NUMBERS,
    ],
    row_records.Table,
)

_SIGNATURES: dict[Callable[..., Any], Any] = {
    rows.gather: _I64(_NUMBERS, _WORK, _IDS, _WORDS, _NUMBERS, types.boolean),
    rows.count_in_sketch: _I64(_TABLE, _own(_U8), _IDS, _U64, _I64, _NUMBERS),
    rows.wait: _I64(_TABLE, _IDS, _U64, _I64, _I64, _I64, _I64, _I64, _NUMBERS),
    rows.make: _I64(_TABLE, _IDS, _U64, _I64, _I64, _NUMBERS, _NUMBERS),
    rows.advance: types.void(_TABLE, _I64),
    rows.give_up: types.void(_TABLE, _I64, _NUMBERS, _I64, _I64),
    rows.sweep: types.void(_TABLE, _U64, _I64, _I64, _I64, _I64, _I64),
    row_cuts.place: types.void(_TABLE, _IDS, _U64, _NUMBERS),
    row_cuts.count_touches: types.void(_TABLE, _NUMBERS, _U64),
    row_cuts.those_in: _I64(_TABLE, _I64, _U64, _NUMBERS),
    row_cuts.look_up: types.void(_TABLE, _IDS, _U64, _NUMBERS),
    row_cuts.remove: types.void(_TABLE, _NUMBERS, _U64),
    row_cuts.scatter: types.void(_WORDS, _I64, _I64, _I64, _NUMBERS, _received(_U32)),
    row_cuts.collect: types.void(_WORDS, _I64, _I64, _I64, _NUMBERS, _WORDS),
    row_cuts.next_wanted: _I64(_TABLE, _U64, _I64, _NUMBERS, _I64, _NUMBERS),
    row_cuts.existing: _I64(_TABLE, _U64, _I64, _I64, _I64, _NUMBERS),
    rows.received: _I64(
        _received(_U32), _IDS, _NUMBERS, _LONGS, _NUMBERS, types.boolean, types.boolean, _COUNTS, _own(_I64, 2)
    ),
    row_rules.first_values: types.void(_IDS, _NUMBERS, _U64, _I64, _F64, _F64, _own(_F32, 2)),
    row_rules.combine: _I64(_IDS, _GRADIENTS, _F32, _NUMBERS, _LONGS, _own(_F32, 2), _I64),
}
_F32S = _received(_F32)
#: Loops that trainers need.
_DISTINCT: dict[Callable[..., Any], Any] = {
    distinct.number_ids: _I64(_IDS, _NUMBERS, _COUNTS, _LONGS, _NUMBERS),
    distinct.add_up: _I64(_GRADIENTS, _received(_U32, 2), _NUMBERS, _own(_F32, 2)),
    distinct.spread: types.void(_F32S, _NUMBERS, _I64, _FLOATS),
    distinct.spread_tables: types.void(_F32S, _NUMBERS, _NUMBERS, _NUMBERS, _NUMBERS, _FLOATS),
    distinct.are_equal: types.boolean(_IDS, _IDS),
    distinct.first_not_finite: _I64(_received(_U32), _I64),
}
_UPDATE = (
    _NUMBERS,
    _WORK,
    _IDS,
    _received(_F32),
    _I64,
    _I64,
    _own(_F32, 2),
    _FLOATS,
    _FLOATS,
    _NUMBERS,
    types.boolean,
)
_HALF = types.NamedTuple(  # type: ignore[no-untyped-call]
    [types.boolean, types.boolean, _U64, _FLOATS, _FLOATS, _WORDS], row_updates.Half
)


@cache
def row_kernel(loop: Callable[..., Any]) -> Any:
    """Return the machine code of a function in ``rows``, ``row_cuts``, ``row_rules`` or ``distinct``."""
    return machine_code(loop, _SIGNATURES.get(loop) or _DISTINCT[loop], allocates=False)


@cache
def distinct_kernels() -> Any:
    """Return the compiled functions of ``distinct``, as attributes of one object."""
    return SimpleNamespace(**{loop.__name__: row_kernel(loop) for loop in _DISTINCT})


def all_row_kernels() -> list[Callable[..., Any]]:
    """Return functions that each compile a kernel for pservers."""
    return list(_SIGNATURES)


#: Arguments of ``row_updates.loop_of``.
_Made = tuple[Callable[..., Any], ...]


@cache
def _loop(made: _Made, is_half: bool) -> Any:
    return machine_code(row_updates.loop_of(*made), _I64(*_UPDATE, _HALF if is_half else types.none), allocates=False)


#: Optimizer type -> its rule. SGD and row-wise optimizers have rules for entire rows; the others use the rules of
#: blocks.
_RULES: dict[type[Optimizer], Callable[[Any], Rule | None]] = {
    SGD: lambda _: Rule(row_rules.sgd, 0, lambda rate: (rate,)),
    RowAdagrad: lambda o: Rule(row_rules.row_adagrad, 1, lambda rate: (rate, o.eps)),
    RowAdam: lambda o: Rule(row_rules.row_adam, 2, adam_constants(o)),
    **dict.fromkeys((Momentum, Adagrad, Adam, Ftrl), rule_of),
}
_NOTHING: _Made = (row_rules.nothing,)
_CORRECTIONS_LIMIT = 1 << 18


class RowPush(NamedTuple):
    """Arguments that are common to all rows of an update; see ``RowTables.update``."""

    version: int
    epoch: int
    clock: int
    rate_factor: float
    seed: int


@dataclass(frozen=True, slots=True)
class RowUpdate:
    """The update of rows by an optimizer: its rule with constants, compiled for one dtype."""

    optimizer: Optimizer
    #: Dtype of the values if they are 16-bit floats; empty for float32.
    half: str
    is_stochastic: bool
    rule: Rule
    #: Bias corrections, by the row's number of updates so far.
    first: Floats
    second: Floats
    code: Any = field(compare=False, repr=False)

    def __call__(
        self,
        handles: row_handles.Handles,
        work: row_handles.Work,
        ids: npt.NDArray[np.uint64],
        gradients: Floats,
        scales: Sequence[float],
        push: RowPush,
        missing: npt.NDArray[np.int64],
        *,
        is_beside: bool,
    ) -> int:
        """Update the rows that exist; see ``RowTables.update``.

        Args:
            handles: Handles of all tables.
            work: Sections of ids and gradients; see ``row_handles``. All of their tables have this rule.
            ids: Ids of all sections.
            gradients: Flattened gradients of all sections.
            scales: Factors of gradients. ``CONSTANTS`` in ``work`` is an index into this array.
            push: Arguments that are common to all rows.
            missing: Filled with the positions of ids without a row; as long as ``ids``. See ``rows.gather``.
            is_beside: True in the second of two threads that work at the same time. It has its own scratch memory.

        Returns:
            The number of ids without a row.
        """
        rate = self.optimizer.rate_at(push.version - 1) * push.rate_factor
        is_frozen = rate == 0 and isinstance(self.optimizer, Ftrl)
        code = _loop(_NOTHING, False) if is_frozen else self.code
        numbers = self.rule.constants(1.0 if is_frozen else rate)
        constants = np.array([constants_of(self.optimizer, numbers, scale) for scale in scales], np.float32)
        half = None
        if self.half and not is_frozen:
            tables = handles.reshape(-1, row_handles.HANDLE_SIZE)[work[:, row_handles.TABLE]]
            values, box = np.empty(int(tables[:, row_handles.DIM].max()), np.float32), np.empty(1, np.float32)
            seed = np.uint64(push.seed)
            half = row_updates.Half(self.half == "bfloat16", self.is_stochastic, seed, values, box, box.view(np.uint32))
        given = (handles, work, ids, gradients, push.version, push.epoch, constants, self.first, self.second)
        return int(code(*given, missing, is_beside, half))


def row_update(optimizer: Optimizer, dtype: str, *, is_stochastic: bool) -> RowUpdate:
    """Return the compiled update for a table's rows.

    Raises:
        UsageError: there is no kernel for this optimizer.
    """
    bind = _RULES.get(type(optimizer))
    rule = None if bind is None else bind(optimizer)
    if rule is None:
        raise UsageError(f"there is no kernel for rows with {type(optimizer).__name__}")
    made: _Made = (rule.function,)
    if bind is rule_of:
        made = (rules.by_element, rule.function, rules.GETS[rule.slot_count], rules.PUTS[rule.slot_count])
    half = "" if dtype == "float32" else dtype
    first = second = np.ones(1)
    if isinstance(optimizer, Adam | RowAdam):
        first, second = _corrections(optimizer.beta1), np.sqrt(_corrections(optimizer.beta2))
        size = max(first.size, second.size)
        first, second = (np.pad(one, (0, size - one.size), constant_values=one[-1]) for one in (first, second))
    if isinstance(optimizer, Ftrl):
        _loop(_NOTHING, False)
    corrections = first.astype(np.float32), second.astype(np.float32)
    return RowUpdate(optimizer, half, is_stochastic, rule, *corrections, _loop(made, bool(half)))


def _corrections(beta: float) -> Any:
    """Return ``1 / (1 - beta**t)`` for t = 1, 2, …, up to the first value that rounds to 1 in float32."""
    count = 1 if beta == 0 else min(_CORRECTIONS_LIMIT, math.ceil(-18 / math.log(beta)) + 1)
    return 1 / (1 - np.power(beta, np.arange(1, count + 1)))


def init_numbers(init: Init) -> tuple[int, float, float]:
    """Return the arguments ``kind``, ``a`` and ``b`` of ``row_rules.first_values`` for an initializer."""
    if isinstance(init, Constant):
        return row_rules.CONSTANT, init.value, 0.0
    if isinstance(init, Uniform):
        return row_rules.UNIFORM, init.scale, 0.0
    if isinstance(init, Normal):
        return row_rules.NORMAL, init.std, init.mean
    assert isinstance(init, Zeros), f"there is no kernel for {type(init).__name__}"
    return row_rules.ZEROS, 0.0, 0.0
