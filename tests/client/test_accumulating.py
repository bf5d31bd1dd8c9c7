"""Gradients of several batches become one."""

from __future__ import annotations

import numpy as np

from flightedl.client.model.accumulation import GradientSums
from flightedl.domain.consistency.modes import Async
from flightedl.domain.trainer.batches import CurrentBatch
from flightedl.messages.tasks import Assignment

ASSIGNMENT = Assignment(epoch=0, position=0, task=0, attempt=1, first_batch=0, end_batch=9, batch_count=9, seed=None)


def summed(*batches: tuple[int, float]) -> dict[str, np.ndarray]:
    """What is pushed for batches of (records, gradient)."""
    sums = GradientSums(Async(push_every=len(batches)))
    for number, (records, value) in enumerate(batches):
        current = CurrentBatch(ASSIGNMENT, number, records)
        sums.add(current, {"w": np.full(3, value, np.float32)})
        sums.complete(current)
    assert sums.is_full
    return sums.take_all()[1]


def test_a_mean_is_weighted_by_records() -> None:
    np.testing.assert_array_equal(summed((1, 4.0), (3, 8.0))["w"], np.full(3, 7.0, np.float32))


def test_a_batch_without_records_has_no_part_in_a_mean() -> None:
    np.testing.assert_array_equal(summed((0, 99.0), (2, 8.0))["w"], np.full(3, 8.0, np.float32))


def test_a_mean_of_no_records_at_all_is_no_gradient() -> None:
    assert summed((0, 99.0), (0, 98.0)) == {}
