"""Interval sets against plain sets."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from flightedl.domain.exactly_once.intervals import IntervalSet
from flightedl.errors import CorruptError

numbers = st.integers(0, 60)
stretches = st.tuples(numbers, numbers)
sets = st.frozensets(numbers, max_size=40)


class IntervalsAgainstSet(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.intervals = IntervalSet()
        self.model = set()

    @rule(stretch=stretches)
    def add(self, stretch):
        new = set(range(*stretch)) - self.model
        assert self.intervals.add(*stretch) == len(new)
        self.model |= new

    @rule(stretch=stretches)
    def remove(self, stretch):
        old = set(range(*stretch)) & self.model
        assert self.intervals.remove(*stretch) == len(old)
        self.model -= old

    @rule(stretch=stretches)
    def ask(self, stretch):
        asked = set(range(*stretch))
        assert self.intervals.covers(*stretch) == (asked <= self.model)
        assert self.intervals.overlaps(*stretch) == bool(asked & self.model)
        assert self.intervals.within(*stretch) == IntervalSet.of(asked & self.model)
        assert self.intervals.gaps(*stretch) == IntervalSet.of(asked - self.model)

    @rule()
    def store(self):
        decoded = IntervalSet.decode(self.intervals.encode())
        assert decoded == self.intervals
        self.intervals = decoded.copy()

    @invariant()
    def agrees(self):
        self.intervals.check()
        assert {n for start, end in self.intervals for n in range(start, end)} == self.model
        assert self.intervals.size == len(self.model)
        assert bool(self.intervals) == bool(self.model)
        assert all((n in self.intervals) == (n in self.model) for n in range(62))


IntervalsAgainstSet.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestIntervalsAgainstSet = IntervalsAgainstSet.TestCase


@settings(max_examples=100, deadline=None)
@given(sets, sets)
def test_operations_on_two_sets_match_plain_sets(one, other):
    first, second = IntervalSet.of(one), IntervalSet.of(other)

    assert first.intersection(second) == IntervalSet.of(one & other)
    union, difference = first.copy(), first.copy()
    union.update(second)
    difference.difference_update(second)
    for found, wanted in ((union, one | other), (difference, one - other), (first, one)):
        found.check()
        assert found == IntervalSet.of(wanted)
    assert (first == second) == (one == other)
    assert (first.encode() == second.encode()) == (one == other)


def test_touching_intervals_are_merged():
    intervals = IntervalSet([(0, 3), (5, 8)])
    intervals.add(3, 5)
    assert list(intervals) == [(0, 8)]
    assert intervals.interval_count == 1


def test_the_encoding_is_small_and_stable():
    assert IntervalSet().encode() == b"\x01"
    assert IntervalSet([(0, 1), (3, 300)]).encode() == bytes([1, 0, 0, 2, 0xA8, 2])
    assert len(IntervalSet([(0, 1_000_000)]).encode()) == 5


def test_numbers_of_one_and_more_bytes_are_decoded_as_encoded():
    for length in (127, 128, 129, 130, 1 << 14, (1 << 14) + 1, 1 << 62):
        intervals = IntervalSet([(length, 2 * length)])
        assert IntervalSet.decode(intervals.encode()) == intervals


def test_sets_that_begin_or_end_alike_are_not_equal():
    assert IntervalSet([(0, 3)]) != IntervalSet([(0, 5)])
    assert IntervalSet([(0, 5)]) != IntervalSet([(2, 5)])


def test_an_empty_range_inside_an_interval_is_nothing():
    intervals = IntervalSet([(0, 6)])
    assert [intervals.add(place, place) for place in (3, 6, 9)] == [0, 0, 0]
    assert intervals.remove(3, 3) == 0
    assert list(intervals) == [(0, 6)]
    assert list(intervals.within(3, 3)) == []


def test_many_intervals_are_fast():
    evens = IntervalSet.of(range(0, 20_000, 2))
    assert (evens.interval_count, evens.size) == (10_000, 10_000)
    assert IntervalSet.decode(evens.encode()) == evens
    evens.update(IntervalSet.of(range(1, 20_000, 2)))
    assert list(evens) == [(0, 20_000)]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x02",
        b"\x01\x00",  # half an interval
        b"\x01\x80",  # half a number
        b"\x01\x00\x80\x00",  # a number not in its shortest form
        b"\x01\x00\x00\x00\x00",  # touching intervals
        b"\x01" + b"\xff" * 11 + b"\x01\x00",  # an endless number
        b"\x01" + b"\xff" * 10 + b"\x01\x00",  # a number one byte too long
    ],
)
def test_damaged_bytes_are_refused(data):
    with pytest.raises(CorruptError):
        IntervalSet.decode(data)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=20))
def test_any_bytes_are_a_set_or_are_refused(tail):
    data = b"\x01" + tail
    try:
        found = IntervalSet.decode(data)
    except CorruptError:
        return
    found.check()
    assert found.encode() == data


def test_misuse_is_refused():
    with pytest.raises(ValueError, match="negative"):
        IntervalSet([(-1, 2)])
    with pytest.raises(TypeError):
        hash(IntervalSet())
    assert "[0, 1)" in repr(IntervalSet([(0, 1)]))


def test_queries_of_every_range_of_every_small_set_are_right():
    for bits in range(1 << 6):
        integers = {value for value in range(6) if bits >> value & 1}
        intervals = IntervalSet.of(integers)
        for start in range(8):
            for end in range(start, 8):
                asked = set(range(start, end))
                assert intervals.covers(start, end) == (asked <= integers)
                assert intervals.overlaps(start, end) == bool(asked & integers)
