"""Batches by number."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flightedl.domain.groups.numbered import NumberedBatches
from flightedl.domain.groups.plan import Order

ORDER = Order(1, 8)


def records_of(step):
    assert {piece.lane for piece in step.pieces} <= {0}
    return [n for piece in step.pieces for n in range(piece.first_record, piece.end_record)]


@given(st.integers(1, 300), st.integers(1, 40), st.integers(1, 3), st.randoms())
def test_the_batches_of_an_epoch_contain_each_record_once_in_any_order(records, batch_size, epochs, random):
    batches = NumberedBatches(records, epochs=epochs, order=ORDER, batch_size=batch_size)
    numbers = list(range(batches.count))
    random.shuffle(numbers)
    found = Counter()
    for number in numbers:
        step = batches.batch(number)
        assert 1 <= step.record_count <= batch_size
        assert step.record_count == len(records_of(step))
        found.update((step.epoch, record) for record in records_of(step))
    assert found == Counter((epoch, n) for epoch in range(epochs) for n in range(records))
    assert batches.batch(batches.count).pieces == batches.batch(batches.count + 100).pieces == ()


@given(st.lists(st.tuples(st.integers(1, 4), st.booleans()), max_size=60))
def test_a_model_has_each_batch_once_whichever_groups_take_part_and_votes_fail(steps):
    """Steps of changing numbers of replica groups, some of which are not committed."""
    batches = NumberedBatches(70, epochs=None, order=ORDER, batch_size=3)
    committed, model = 0, []
    for groups, is_committed in steps:
        given_out = [records_of(batches.batch(committed + rank)) for rank in range(groups)]
        if is_committed:
            model += [(number, record) for number, each in enumerate(given_out, committed) for record in each]
            committed += groups
    assert model == [(number, record) for number in range(committed) for record in records_of(batches.batch(number))]


def test_endless_data_has_no_count():
    assert NumberedBatches(50, epochs=None, order=ORDER, batch_size=100).count is None


def test_a_negative_number_is_refused():
    with pytest.raises(ValueError, match="from 0"):
        NumberedBatches(1, epochs=1, order=ORDER, batch_size=1).batch(-1)
