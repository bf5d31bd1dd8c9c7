"""A trainer of tables: looks rows up, pushes gradients of them, steps; as ordered, see ``orders``.

An order's number is that of a workload, or, behind all of them, of one whose rows come with the step before, as
``data.prefetching`` has it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import flightedl as fe

from .orders import ready, serve_batches
from .table_work import EPS, RATE, Floats, Group, Ids, gradients_of, groups_of, steps_of, workloads_of

#: New rows of one step while the tables are filled.
_FILL = 1 << 16


def _fills(groups: dict[Group, list[Any]]) -> list[tuple[Any, Ids]]:
    """Pushes that make all rows."""
    return [
        (table, np.arange(first, min(first + _FILL, group.rows_of_one)))
        for group, tables in groups.items()
        for table in tables
        for first in range(0, group.rows_of_one, _FILL)
    ]


class _Loops:
    """The workloads' steps, each from where it stopped."""

    def __init__(self, job: Any, groups: dict[Group, list[Any]], numbers: list[list[int]]) -> None:
        workloads = workloads_of(numbers)
        self._job = job
        self._tables = [groups[workload.group] for workload in workloads]
        self._ids: list[list[list[Ids]]] = [steps_of(workload) for workload in workloads]
        self._gradients: list[list[Floats]] = [gradients_of(workload) for workload in workloads]
        self._at = [0] * len(workloads)

    def ahead(self, number: int) -> dict[Any, Callable[[object], Ids]]:
        """What makes the ids of a workload's next step, by table; nothing: rows are not asked ahead."""
        number -= len(self._tables)
        if number < 0:
            return {}
        return {table: partial(self._next_ids, number, place) for place, table in enumerate(self._tables[number])}

    def _next_ids(self, number: int, place: int, _batch: object) -> Ids:
        steps = self._ids[number]
        return steps[self._at[number] % len(steps)][place]

    def step(self, number: int) -> None:
        """One of a workload."""
        number %= len(self._tables)
        tables, steps = self._tables[number], self._ids[number]
        ids = steps[self._at[number] % len(steps)]
        self._at[number] += 1
        self._job.lookup(dict(zip(tables, ids, strict=True)))
        for table, some, gradients in zip(tables, ids, self._gradients[number], strict=True):
            table.push(some, gradients)
        self._job.step()


def main(options: dict[str, Any]) -> None:
    """Train as ordered."""
    groups: dict[Group, list[Any]] = {}
    with fe.connect() as job:
        data = job.dataset(options["data"], batch_size=1, epochs=None)
        batches = iter(data)
        for group in groups_of(workloads_of(options["workloads"])):
            groups[group] = [
                job.table(
                    f"t{len(groups)}-{number}",
                    dim=group.dim,
                    optimizer=fe.RowAdagrad(lr=RATE, eps=EPS),
                    init=fe.Uniform(0.01),
                )
                for number in range(group.tables)
            ]
        for table, ids in _fills(groups):
            next(batches)
            table.push(ids, np.full((len(ids), table.dim), 0.01, np.float32))
            job.step()
        loops = _Loops(job, groups, options["workloads"])
        ready()
        serve_batches(batches, loops.step, lambda number: data.prefetching(loops.ahead(number)))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
