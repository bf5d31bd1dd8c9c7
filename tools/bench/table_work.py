"""What one step of embedding tables is, for all sides: the same ids and gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]

RATE, EPS = 0.05, 1e-8
#: Exponent of the skewed ids.
ZIPF = 1.05
#: Different steps, which are repeated.
_STEPS = 8


@dataclass(frozen=True, slots=True)
class Group:
    """Tables that one step goes to. ``rows`` of all of them together."""

    tables: int
    rows: int
    dim: int

    @property
    def rows_of_one(self) -> int:
        """Of each table."""
        return self.rows // self.tables


@dataclass(frozen=True, slots=True)
class Workload:
    """Steps of some tables. ``ids`` of one step, of all tables together, with repetitions."""

    group: Group
    ids: int
    is_skewed: bool = False

    @property
    def ids_of_one(self) -> int:
        """Of each table."""
        return max(1, self.ids // self.group.tables)

    def __str__(self) -> str:
        group = self.group
        tables = "1 table" if group.tables == 1 else f"{group.tables} tables"
        kind = "Zipf 1.05" if self.is_skewed else "uniform"
        return f"{tables}, {group.rows / 1e6:g} M x {group.dim}, {self.ids:,} ids, {kind}"


def skewed(random: np.random.Generator, order: Ids, count: int) -> Ids:
    """Ids by a bounded power law: the inverse of its distribution. ``order``: the ids by rank."""
    rows, power = len(order), 1 - ZIPF
    ranks = ((random.random(count) * (rows**power - 1) + 1) ** (1 / power)).astype(np.int64)
    found: Ids = order[np.clip(ranks, 1, rows) - 1]
    return found


def steps_of(workload: Workload) -> list[list[Ids]]:
    """The ids of some steps, by table."""
    random = np.random.default_rng(workload.ids + workload.group.tables)
    rows, count = workload.group.rows_of_one, workload.ids_of_one
    if not workload.is_skewed:
        return [[random.integers(0, rows, count) for _ in range(workload.group.tables)] for _ in range(_STEPS)]
    order = random.permutation(rows)
    return [[skewed(random, order, count) for _ in range(workload.group.tables)] for _ in range(_STEPS)]


def gradients_of(workload: Workload) -> list[Floats]:
    """Of each table, of its ids."""
    random = np.random.default_rng(1)
    shape = (workload.ids_of_one, workload.group.dim)
    return [0.01 * random.standard_normal(shape, np.float32) for _ in range(workload.group.tables)]


def groups_of(workloads: Sequence[Workload]) -> list[Group]:
    """Each once."""
    return list(dict.fromkeys(workload.group for workload in workloads))


def workloads_of(found: Sequence[Sequence[int]]) -> list[Workload]:
    """From what ``as_numbers`` made."""
    return [Workload(Group(tables, rows, dim), ids, bool(skew)) for tables, rows, dim, ids, skew in found]


def as_numbers(workloads: Sequence[Workload]) -> list[list[int]]:
    """For a command line."""
    return [[w.group.tables, w.group.rows, w.group.dim, w.ids, int(w.is_skewed)] for w in workloads]
