"""Accumulation of the gradients of several batches."""

from __future__ import annotations

import numpy as np

from flightedl.client.model.kept import GradientSums
from flightedl.domain.trainer.batches import Batch, CurrentBatch
from flightedl.domain.trainer.sums import BatchSums


def summed(*batches: tuple[int, float]) -> dict[str, np.ndarray]:
    """Return the gradient that is pushed for batches of (records, gradient)."""
    sums, arrays = BatchSums(len(batches)), GradientSums()
    for number, (records, value) in enumerate(batches):
        current = CurrentBatch.of(Batch(0, 0, 1, number, 9, records))
        weight = sums.add(current, {"w"})
        arrays.add(sums.identity, {"w": np.full(3, value, np.float32)}, weight)
        sums.complete(current)
    assert sums.is_full
    _, divisors = sums.take()
    return arrays.take(sums.identity, divisors)


def test_a_mean_is_weighted_by_records() -> None:
    np.testing.assert_array_equal(summed((1, 4.0), (3, 8.0))["w"], np.full(3, 7.0, np.float32))


def test_a_batch_without_records_does_not_count_in_a_mean() -> None:
    np.testing.assert_array_equal(summed((0, 99.0), (2, 8.0))["w"], np.full(3, 8.0, np.float32))


def test_a_mean_of_no_records_has_no_gradient() -> None:
    assert summed((0, 99.0), (0, 98.0)) == {}


def test_gradients_of_a_discarded_sum_are_in_no_other_sum() -> None:
    arrays = GradientSums()
    arrays.add("first", {"w": np.ones(3, np.float32)}, 1)
    arrays.add("second", {"v": np.ones(3, np.float32)}, 1)
    assert arrays.take("second", {}).keys() == {"v"}
    arrays.add("third", {"w": np.ones(3, np.float32)}, 1)
    assert arrays.take("fourth", {}) == {}


def test_gradients_of_a_pushed_sum_are_not_pushed_again() -> None:
    arrays = GradientSums()
    gradient = np.ones(3, np.float32)
    arrays.add("first", {"w": gradient}, 1)
    arrays.add("first", {"w": gradient}, 1)
    pushed = arrays.take("first", {"w": 2})["w"]
    assert arrays.take("first", {}) == {}
    arrays.add("first", {"w": gradient}, 3)
    # Neither the caller's gradient nor the pushed one belongs to the next sum.
    assert arrays.take("first", {})["w"].tolist() == [3.0] * 3
    assert (pushed == 1).all()
    assert (gradient == 1).all()


def test_sums_are_as_exact_as_their_gradients_and_those_of_16_bits_as_float32() -> None:
    arrays = GradientSums()
    for value in (1.0, 2.0**-40):
        arrays.add("first", {"w": np.full(2, value)}, 1)
    assert arrays.take("first", {})["w"].tolist() == [1.0 + 2.0**-40] * 2
    for _ in range(3):
        arrays.add("second", {"v": np.full(2, 2.0**-11 + 1.0, np.float16)}, 1)
    for _ in range(4096):
        arrays.add("second", {"w": np.ones(2, np.float16)}, 1)
    found = arrays.take("second", {"w": 4096})
    assert found["w"].dtype == np.float16
    assert found["w"].tolist() == [1.0, 1.0], "a sum of 16 bits would stop at 2048"


def test_new_values_replace_earlier_ones_in_a_sum() -> None:
    arrays = GradientSums({"set"})
    for value, weight in ((1.0, 3), (2.0, 5)):
        arrays.add(1, {"set": np.full(2, value), "sum": np.full(2, value)}, weight)
    taken = arrays.take(1, {"set": 8, "sum": 8})
    assert (taken["set"].tolist(), taken["sum"].tolist()) == ([2, 2], [13 / 8, 13 / 8])
