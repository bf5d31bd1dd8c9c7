"""The rows of a span: against the reference, and what a cut has of them."""

from __future__ import annotations

import numpy as np

from flightedl.domain.exactly_once.batches import Batch
from flightedl.domain.model.optimizers import SGD
from flightedl.domain.tables.spec import TableSpec
from flightedl.pserver.row_store import RowStore, TableGradients

SPEC = TableSpec("t", 2, SGD(1.0))


def ids(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.uint64)


def ones(count: int) -> np.ndarray:
    return np.ones((count, 2), np.float32)


def test_a_round_is_applied_once_and_split_among_stores_by_a_cut() -> None:
    store = RowStore([SPEC], range(1024))
    store.add([TableGradients(0, ids(1, 2), ones(2))], Batch(0, 0, 0), 2.0, is_first=True)
    store.add([TableGradients(0, ids(2, 3), ones(2))], Batch(0, 0, 1), 1.0, is_first=False)
    store.update_round(version=1, epoch=0, number=0, scale=0.5)
    cut = store.begin_cut(1, 0, is_base=True)
    halves = [RowStore([SPEC], range(512)), RowStore([SPEC], range(512, 1024))]
    while (chunk := cut.next_rows()) is not None:
        for half in halves:
            half.restore(chunk)
    assert sum(half.counts(0).rows for half in halves) == 3
    out = np.empty((4, 2), np.float32)
    assert store.read(0, ids(1, 2, 3, 4), 1, 0, out) == 3
    assert out[:, 0].tolist() == [-1, -1.5, -0.5, 0]
