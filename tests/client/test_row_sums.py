"""Sums of rows' gradients over several batches."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from flightedl.client.tables.traffic import RowSums


def gradients(*ids: int, value: float) -> dict[int, tuple[npt.NDArray[np.uint64], npt.NDArray[np.float32]]]:
    return {0: (np.array(ids, np.uint64), np.full((len(ids), 1), value, np.float32))}


def summed(sums: RowSums, identity: object, divisor: int = 1) -> dict[int, float]:
    found = sums.take(identity, {0: divisor})
    return {} if not found else dict(zip(found[0][0].tolist(), found[0][1][:, 0].tolist(), strict=True))


def test_gradients_of_one_sum_are_weighted_and_divided() -> None:
    sums = RowSums()
    sums.add("first", gradients(1, 2, value=1.0), 1)
    sums.add("first", gradients(2, 3, value=1.0), 3)
    assert summed(sums, "first", 4) == {1: 0.25, 2: 1.0, 3: 0.75}
    assert summed(sums, "first") == {}


def test_a_sum_that_was_dropped_leaves_nothing_in_the_next_one() -> None:
    sums = RowSums()
    sums.add("dropped", gradients(1, 2, value=1.0), 1)
    sums.add("next", gradients(2, value=1.0), 1)
    assert summed(sums, "next") == {2: 1.0}


def test_another_sum_is_not_taken() -> None:
    sums = RowSums()
    sums.add("first", gradients(1, value=1.0), 1)
    assert summed(sums, "other") == {}
    assert summed(sums, "first") == {}
