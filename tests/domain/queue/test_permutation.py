"""The keyed permutation: bijective for every size, and constant."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flightedl.domain.queue.permutation import KeyedPermutation, key_of
from flightedl.domain.splitmix64 import mix

keys = st.integers(-(2**70), 2**70)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 300), keys)
def test_every_element_has_one_position(size, key):
    permutation = KeyedPermutation(size, key)

    elements = [permutation.at(position) for position in range(size)]

    assert sorted(elements) == list(range(size))
    assert [permutation.position_of(element) for element in elements] == list(range(size))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 2**62), keys, st.data())
def test_positions_and_elements_are_inverse_for_large_sizes(size, key, data):
    permutation = KeyedPermutation(size, key)
    position = data.draw(st.integers(0, size - 1))

    assert 0 <= permutation.at(position) < size
    assert permutation.position_of(permutation.at(position)) == position


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 5000), keys)
def test_arrays_and_integers_agree(size, key):
    permutation = KeyedPermutation(size, key)
    elements = np.arange(0, size, max(size // 50, 1))

    assert permutation.positions_of(elements).tolist() == [permutation.position_of(int(e)) for e in elements]
    assert permutation.elements_at(elements).tolist() == [permutation.at(int(e)) for e in elements]


def test_orders_have_golden_values():
    """Stored queues depend on these values: they must never change."""
    assert mix(1) == 6238072747940578789
    assert [key_of(), key_of(0), key_of(0, 1), key_of(-1)] == GOLDEN_KEYS
    assert [KeyedPermutation(10, key_of(0, 0)).at(position) for position in range(10)] == GOLDEN_TEN
    million = KeyedPermutation(1_000_000, key_of(42, 3))
    assert [million.at(position) for position in (0, 1, 2, 500_000, 999_999)] == GOLDEN_MILLION
    assert [KeyedPermutation(2**62, 7).at(position) for position in (0, 2**61)] == GOLDEN_HUGE


GOLDEN_KEYS = [0, 16294208416658607535, 7880943453193273481, 11923130667873509210]
GOLDEN_TEN = [3, 6, 7, 5, 1, 8, 9, 2, 4, 0]
GOLDEN_MILLION = [661014, 133764, 647508, 990700, 772257]
GOLDEN_HUGE = [1474068022528313800, 3132285368828289244]


def test_orders_look_shuffled():
    """Neighbors are far apart, epochs differ, and every place gets about every element."""
    permutation = KeyedPermutation(10_000, key_of(0, 0))
    order = np.array([permutation.at(position) for position in range(10_000)])
    assert abs(np.corrcoef(order, np.arange(10_000))[0, 1]) < 0.05
    assert 3000 < np.abs(np.diff(order)).mean() < 3700  # a third of the size
    assert np.mean(order == np.arange(10_000)) < 0.001

    firsts = np.array([[KeyedPermutation(8, key_of(0, epoch)).at(p) for p in range(8)] for epoch in range(2000)])
    for place in range(8):
        counts = np.bincount(firsts[:, place], minlength=8)
        assert counts.min() > 170, counts
        assert counts.max() < 330, counts


@pytest.mark.parametrize("position", [-1, 5, 2**70])
def test_numbers_outside_are_refused(position):
    permutation = KeyedPermutation(5, 0)
    with pytest.raises(IndexError, match="outside of 0 … 4"):
        permutation.at(position)
    with pytest.raises(IndexError, match="outside of 0 … 4"):
        permutation.position_of(position)
    with pytest.raises(IndexError, match="outside of 0 … 4"):
        permutation.positions_of(np.array([0, min(position, 5)]))


def test_arrays_outside_are_refused():
    with pytest.raises(IndexError, match="outside of 0 … 4"):
        KeyedPermutation(5, 0).positions_of(np.array([0, 5]))


def test_the_size_is_checked():
    with pytest.raises(ValueError, match="size"):
        KeyedPermutation(-1, 0)
