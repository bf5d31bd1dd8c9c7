"""Batches by number."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flightedl.domain.groups.numbered import NumberedBatches

layouts = st.lists(st.integers(0, 30), min_size=1, max_size=20)


def records_of(step):
    return [(piece.task, n) for piece in step.pieces for n in range(piece.first_record, piece.end_record)]


@given(layouts, st.integers(1, 40), st.none() | st.integers(0, 9), st.integers(1, 3), st.randoms())
def test_the_batches_of_an_epoch_contain_each_record_once_in_any_order(sizes, batch_size, seed, epochs, random):
    batches = NumberedBatches(np.array(sizes, np.int64), epochs=epochs, seed=seed, batch_size=batch_size)
    numbers = list(range(batches.count))
    random.shuffle(numbers)
    found = Counter()
    for number in numbers:
        step = batches.batch(number)
        assert 1 <= step.record_count <= batch_size
        assert step.record_count == len(records_of(step))
        assert all(piece.first_record < piece.end_record for piece in step.pieces)
        found.update((step.epoch, *record) for record in records_of(step))
    assert found == Counter(
        (epoch, task, n) for epoch in range(epochs) for task, size in enumerate(sizes) for n in range(size)
    )
    assert batches.batch(batches.count).pieces == batches.batch(batches.count + 100).pieces == ()


@given(st.lists(st.tuples(st.integers(1, 4), st.booleans()), max_size=60))
def test_a_model_has_each_batch_once_whichever_groups_take_part_and_votes_fail(steps):
    """Steps of changing numbers of replica groups, some of which are not committed."""
    batches = NumberedBatches(np.full(7, 10, np.int64), epochs=None, seed=1, batch_size=3)
    committed, model = 0, []
    for groups, is_committed in steps:
        given_out = [records_of(batches.batch(committed + rank)) for rank in range(groups)]
        if is_committed:
            model += [(number, record) for number, each in enumerate(given_out, committed) for record in each]
            committed += groups
    assert model == [(number, record) for number in range(committed) for record in records_of(batches.batch(number))]


def test_orders_of_epochs_differ_and_endless_data_has_no_count():
    batches = NumberedBatches(np.full(50, 2, np.int64), epochs=None, seed=3, batch_size=100)
    assert batches.count is None
    assert records_of(batches.batch(0)) != records_of(batches.batch(1))
    assert sorted(records_of(batches.batch(0))) == sorted(records_of(batches.batch(1)))


def test_empty_tasks_have_no_pieces_and_endless_data_without_records_has_empty_batches():
    batches = NumberedBatches(np.array([2, 0, 2]), epochs=1, seed=None, batch_size=4)
    assert [piece.task for piece in batches.batch(0).pieces] == [0, 2]
    assert NumberedBatches(np.array([0]), epochs=None, seed=None, batch_size=4).batch(3).pieces == ()


def test_a_negative_number_is_refused():
    with pytest.raises(ValueError, match="from 0"):
        NumberedBatches(np.array([1]), epochs=1, seed=None, batch_size=1).batch(-1)
