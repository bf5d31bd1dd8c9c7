"""Allocation of a shard plan's spans, which consist of adjacent blocks that one kernel call can update."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from flightedl.domain.model.optimizers import LAMB, Optimizer
from flightedl.domain.model.parameters import ParameterSpec
from flightedl.domain.model.sharding import ShardPlan, runs_of
from flightedl.domain.tables.spec import TableSpec
from flightedl.kernels import rows
from flightedl.kernels.compiled import Update, block_kernels, half_kernels, kernel_for
from flightedl.kernels.compiled_rows import all_row_kernels, row_kernel, row_update
from flightedl.pserver.stores.arena import Arena
from flightedl.pserver.stores.array_span import ArraySpan
from flightedl.rowstore.table import loops_of


class SpanMaker:
    """Factory for the spans of a pserver. All values are initially zero.

    Args:
        plan: Shard plan of the model.
        optimizer: Optimizer of the model.
        wire: "bfloat16" or "float16" if float32 elements are sent with 16 bits; otherwise empty.
        arena: Memory allocator.
    """

    def __init__(self, plan: ShardPlan, optimizer: Optimizer, wire: str, arena: Arena) -> None:
        self._plan = plan
        self._optimizer = optimizer
        self._wire = wire
        self._arena = arena
        self._updates: list[tuple[Optimizer, str, Update]] = []

    def spans_of(self, index: int) -> list[ArraySpan]:
        """Return the spans of a pserver's blocks, in ascending order."""
        return [
            self.span(numbers)
            for run in runs_of(self._plan, index)
            for numbers in _of_one_rule(self._plan, run, self._optimizer)
        ]

    def span(self, numbers: range) -> ArraySpan:
        """Return a span for blocks that a single kernel call can update."""
        plan, arena = self._plan, self._arena
        spec = plan.parameters[plan.block(numbers.start).parameter]
        rule, dtype = self._optimizer.for_parameter(spec.name), spec.storage_dtype
        update = next((known for r, d, known in self._updates if (r, d) == (rule, dtype)), None)
        if update is None:
            update = kernel_for(rule, dtype)
            self._updates.append((rule, dtype, update))
        places = [plan.block(number) for number in numbers]
        total = sum(place.size for place in places)
        return ArraySpan(
            numbers,
            places,
            arena.allocate(total, dtype, is_values=True),
            [arena.allocate(total, dtype, slot.initial) for slot in rule.slots],
            update,
            block_kernels(dtype),
            arena,
            threading.Lock(),
            spec.short_kind or self._wire,
        )


def kernels_of(
    parameters: Sequence[ParameterSpec], tables: Sequence[TableSpec], optimizer: Optimizer, wire: str
) -> tuple[list[Callable[[], object]], list[Callable[[], object]]]:
    """Return functions that each compile one of a model's kernels, or load it from numba's cache.

    The functions in the first list cover what a first batch needs, slowest first. Those in the second list cover all
    other kernels that a pserver runs, such as those for checkpoints, recovery and moves.
    """
    rules = dict.fromkeys((optimizer.for_parameter(spec.name), spec.storage_dtype) for spec in parameters)
    of_rows = dict.fromkeys((table.optimizer, table.dtype) for table in tables)
    kinds = {wire, *(spec.short_kind for spec in parameters), *(dtype for _, dtype in of_rows)} - {"", "float32"}
    dtypes = {dtype for _, dtype in rules} | ({"float32"} if tables else set())
    loops = dict.fromkeys(loop for table in tables for loop in loops_of(table))
    unused = {*loops, rows.wait, rows.count_in_sketch}
    others = [loop for loop in (all_row_kernels() if tables else ()) if loop not in unused]
    first: list[Callable[[], object]] = [
        *(partial(row_update, rule, dtype, is_stochastic=True) for rule, dtype in of_rows),
        *(partial(block_kernels, dtype) for dtype in sorted(dtypes)),
        *(partial(half_kernels, kind) for kind in sorted(kinds)),
        *(partial(kernel_for, rule, dtype) for rule, dtype in rules),
        *(partial(row_kernel, loop) for loop in loops),
    ]
    return first, [partial(row_kernel, loop) for loop in others]


def _of_one_rule(plan: ShardPlan, run: range, optimizer: Optimizer) -> Iterator[range]:
    if not optimizer.overrides and not isinstance(optimizer, LAMB):
        yield run
        return
    rules = [optimizer.for_parameter(plan.parameters[plan.block(n).parameter].name) for n in run]
    start = 0
    for place in range(1, len(run) + 1):
        # LAMB computes its norms per block.
        if place == len(run) or rules[place] != rules[start] or isinstance(rules[start], LAMB):
            yield run[start:place]
            start = place
