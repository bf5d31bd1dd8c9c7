"""Steps with embedding tables: the trainer, and the ids and gradients that all sides use.

The kind of an order is the number of a workload. Adding ``len(workloads)`` selects the same workload with prefetched
rows (``data.prefetching``).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

import flightedl as fe

from .trainer import run_steps
from .workers import next_order, ready, report

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]

RATE, EPS = 0.05, 1e-8
#: Exponent of the skewed ids.
ZIPF = 1.05
#: Number of distinct steps, which are run again and again.
_STEPS = 8
#: Number of rows that each step adds while the tables are being filled.
_FILL = 1 << 16


@dataclass(frozen=True, slots=True)
class Group:
    """The tables that a step uses, with ``rows`` rows in total."""

    tables: int
    rows: int
    dim: int

    @property
    def rows_of_one(self) -> int:
        """Rows of each table."""
        return self.rows // self.tables


@dataclass(frozen=True, slots=True)
class TableWorkload:
    """Steps with a group of tables. ``ids`` is the number of ids per step in all tables, with repetitions."""

    group: Group
    ids: int
    is_skewed: bool = False

    @property
    def ids_of_one(self) -> int:
        """Ids per step and table."""
        return max(1, self.ids // self.group.tables)

    def __str__(self) -> str:
        group = self.group
        tables = "1 table" if group.tables == 1 else f"{group.tables} tables"
        kind = "Zipf 1.05" if self.is_skewed else "uniform"
        return f"{tables}, {group.rows / 1e6:g} M x {group.dim}, {self.ids:,} ids, {kind}"


def skewed(random: np.random.Generator, order: Ids, count: int) -> Ids:
    """Draw ids from a bounded power law by inverting its distribution. ``order`` lists the ids by rank."""
    rows, power = len(order), 1 - ZIPF
    ranks = ((random.random(count) * (rows**power - 1) + 1) ** (1 / power)).astype(np.int64)
    found: Ids = order[np.clip(ranks, 1, rows) - 1]
    return found


def steps_of(workload: TableWorkload) -> list[list[Ids]]:
    """Return the ids of each of ``_STEPS`` steps, by table."""
    random = np.random.default_rng(workload.ids + workload.group.tables)
    rows, count = workload.group.rows_of_one, workload.ids_of_one
    if not workload.is_skewed:
        return [[random.integers(0, rows, count) for _ in range(workload.group.tables)] for _ in range(_STEPS)]
    order = random.permutation(rows)
    return [[skewed(random, order, count) for _ in range(workload.group.tables)] for _ in range(_STEPS)]


def gradients_of(workload: TableWorkload) -> list[Floats]:
    """Return the gradients for the ids of each table. They are the same in every step."""
    random = np.random.default_rng(1)
    shape = (workload.ids_of_one, workload.group.dim)
    return [0.01 * random.standard_normal(shape, np.float32) for _ in range(workload.group.tables)]


def groups_of(workloads: Sequence[TableWorkload]) -> list[Group]:
    """Return each group once."""
    return list(dict.fromkeys(workload.group for workload in workloads))


class _Loop:
    def __init__(self, job: Any, tables: list[Any], workload: TableWorkload) -> None:
        self._job, self._tables = job, tables
        self._steps, self._gradients = itertools.cycle(steps_of(workload)), gradients_of(workload)
        self._ids = next(self._steps)

    def ahead(self) -> dict[Any, Callable[[object], Ids]]:
        """Return a function for each table that returns the ids of the next step."""
        return {table: partial(self._next_ids, place) for place, table in enumerate(self._tables)}

    def _next_ids(self, place: int, _batch: object) -> Ids:
        return self._ids[place]

    def step(self) -> None:
        """Look up rows, push their gradients, and step."""
        ids, self._ids = self._ids, next(self._steps)
        self._job.lookup(dict(zip(self._tables, ids, strict=True)))
        for table, some, gradients in zip(self._tables, ids, self._gradients, strict=True):
            table.push(some, gradients)
        self._job.step()


def train(workloads: list[TableWorkload], dataset: str) -> None:
    """Fill the tables, then run the requested steps."""
    with fe.connect() as job:
        data = job.dataset(dataset, batch_size=1, epochs=None)
        optimizer, groups = fe.RowAdagrad(lr=RATE, eps=EPS), dict[Group, list[Any]]()
        for group in groups_of(workloads):
            names = [f"t{len(groups)}-{number}" for number in range(group.tables)]
            groups[group] = [
                job.table(name, dim=group.dim, optimizer=optimizer, init=fe.Uniform(0.01)) for name in names
            ]
        fills = [
            (table, np.arange(first, min(first + _FILL, group.rows_of_one)))
            for group, tables in groups.items()
            for table in tables
            for first in range(0, group.rows_of_one, _FILL)
        ]
        left = iter(fills)

        def fill() -> None:
            table, ids = next(left)
            table.push(ids, np.full((len(ids), table.dim), 0.01, np.float32))
            job.step()

        run_steps(data, fill, len(fills))
        loops = [_Loop(job, groups[workload.group], workload) for workload in workloads]
        ready()
        while (order := next_order())[0]:
            count, choice = order
            is_ahead, number = divmod(choice, len(loops))
            data.prefetching(loops[number].ahead() if is_ahead else {})
            report(*run_steps(data, loops[number].step, count))
