"""Order of an epoch's records: each record once, mixed across the data, and the same for any number of ranks."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec.structs import astuple

from flightedl.domain.groups.incarnation import excluded
from flightedl.domain.groups.lanes import EpochOrder, GroupData
from flightedl.domain.groups.plan import EpochEnd, Order, Piece, RoundPlan

from .calls import calls_of

layouts = st.lists(st.integers(0, 12), min_size=1, max_size=12).filter(any)
orders = st.builds(Order, st.integers(1, 8), st.sampled_from([1, 2, 5, 17, 1000]))


def data_of(sizes, seed=3, **more):
    records = np.array(sizes, np.int64)
    sources = np.array(more.pop("sources", [0] * len(sizes)), np.int64)
    return GroupData(records, 10 * records, sources, seed=seed, **more)


def records_of(order, piece):
    return [(chunk, int(number)) for chunk, numbers in order.chunk_records(piece) for number in numbers]


def lanes_of(data, settings, epoch=0, step=1):
    """Return the records of all lanes as (chunk, number), in the order of stretches of ``step`` records."""
    order, lanes = EpochOrder(data, epoch, settings), settings.lanes
    count = data.record_count(lanes)
    found = []
    for lane in range(lanes):
        length = count // lanes + (lane < count % lanes)
        whole = records_of(order, Piece(lane, 0, length)) if length else []
        parts = [range(first, min(first + step, length)) for first in range(0, length, step)]
        read = [records_of(order, Piece(lane, part.start, part.stop)) for part in parts]
        assert [len(each) for each in read] == [len(part) for part in parts]
        found.append([record for each in read for record in each])
        assert sorted(whole) == sorted(found[-1])
    return found


def all_records(sizes):
    return Counter((chunk, number) for chunk, size in enumerate(sizes) for number in range(size))


@settings(max_examples=60, deadline=None)
@given(layouts, orders, st.integers(0, 3))
def test_the_lanes_of_an_epoch_contain_each_record_once(sizes, settings, epoch):
    lanes = lanes_of(data_of(sizes), settings, epoch)
    assert Counter(record for lane in lanes for record in lane) == all_records(sizes)


def test_without_a_seed_lanes_are_in_the_order_of_the_files():
    sizes = [5, 0, 7, 1, 9]
    lanes = lanes_of(data_of(sizes, None), Order(3))
    assert sum(lanes, []) == sorted(all_records(sizes))  # noqa: RUF017 - a few lists
    assert [len(lane) for lane in lanes] == [8, 7, 7]
    source = EpochOrder(data_of(sizes, None), 0, Order(3)).sources[0]
    assert [source.window(1, number) for number in (0, 4, 5)] == [range(4), range(4, 5), range(5, 7)]


def test_orders_differ_between_epochs_and_seeds_and_mix_chunks():
    sizes = [20] * 40
    first = lanes_of(data_of(sizes), Order(4, 50))
    assert first != lanes_of(data_of(sizes), Order(4, 50), 1)
    assert first != lanes_of(data_of(sizes, 4), Order(4, 50))
    assert len({chunk for lane in first for chunk, _ in lane[:20]}) >= 6, "20 records of each lane"
    assert first == lanes_of(data_of(sizes), Order(4, 50))


def test_lanes_begin_their_windows_at_different_times():
    source = EpochOrder(data_of([4000]), 0, Order(4, 100)).sources[0]
    assert [source.window(lane, 0) for lane in range(4)] == [range(25), range(50), range(75), range(100)]
    assert [source.window(lane, 130) for lane in range(4)] == [range(n, n + 100) for n in (125, 50, 75, 100)]
    assert source.window(0, 999) == range(925, 1000)


def test_the_order_of_a_seed_never_changes():
    """Positions in users' checkpoints depend on it."""
    assert lanes_of(data_of([3, 2, 4], 42), Order(2, 3)) == GOLDEN


GOLDEN = [[(0, 1), (0, 0), (2, 1), (0, 2), (2, 0)], [(1, 0), (2, 2), (2, 3), (1, 1)]]


WEIGHTS = (0.6, 0.3, 0.1)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 20)), min_size=3, max_size=15),
    orders,
    st.sampled_from(["first", "all", "repeat"]),
)
def test_a_mixture_has_the_records_that_its_end_demands(chunks, settings, stop):
    sources, sizes = [source for source, _ in chunks], [size for _, size in chunks]
    assume(set(sources) == {0, 1, 2})
    data = data_of(sizes, sources=sources, weights=WEIGHTS, stop=stop)
    assume(data.sizes.min() >= settings.lanes)
    lanes = lanes_of(data, settings, step=7)
    found = Counter(record for lane in lanes for record in lane)

    if stop == "all":
        assert found == all_records(sizes)
    elif stop == "repeat":
        assert set(found) == set(all_records(sizes))
    else:
        assert max(found.values(), default=1) == 1
        taken = Counter(sources[chunk] for chunk, _ in found)
        assert any(data.sizes[source] - taken[source] < 2 * settings.lanes / min(WEIGHTS) for source in range(3))


@pytest.mark.parametrize("stop", ["first", "repeat"])
def test_each_stretch_of_a_mixtures_lane_has_the_shares_of_its_sources(stop):
    data = data_of([100] * 60, sources=[0] * 20 + [1] * 20 + [2] * 20, weights=WEIGHTS, stop=stop)
    for lane in lanes_of(data, Order(2, 300), step=16):
        for start in range(0, len(lane) - 64, 64):
            counts = Counter(chunk // 20 for chunk, _ in lane[start : start + 64])
            assert all(abs(counts[source] - 64 * weight) <= 2 for source, weight in enumerate(WEIGHTS))
        assert len({chunk // 20 for chunk, _ in lane[:32]}) == 3, "sources are mixed within a stretch"


def test_a_mixture_is_the_same_for_any_number_of_ranks():
    data = data_of([20] * 9, sources=[0, 1, 2] * 3, weights=WEIGHTS, stop="all")
    order = EpochOrder(data, 0, Order(4, 16))
    batches = []
    for world_size in (1, 2, 3, 8):
        plans = [
            RoundPlan(data.record_count, epochs=1, order=Order(4, 16), world_size=world_size, rank=rank, batch_size=16)
            for rank in range(world_size)
        ]
        batches.append([])
        while not isinstance((steps := [plan.next() for plan in plans])[0], EpochEnd):
            records = [record for step in steps for piece in step.pieces for record in records_of(order, piece)]
            batches[-1].append(sorted(records))
    assert batches == [batches[0]] * 4


def test_a_million_chunks_are_ordered_with_few_calls():
    data = data_of(np.full(1_000_000, 1000))
    order = EpochOrder(data, 0, Order(64, 4096))
    assert calls_of(lambda: EpochOrder(data, 0, Order(64, 4096))) < 2_000
    assert calls_of(lambda: list(order.chunk_records(Piece(5, 10_000_000, 10_000_010)))) < 1_000


@settings(max_examples=60, deadline=None)
@given(layouts, orders, orders, st.integers(0, 3), st.data())
def test_excluded_records_are_found_in_another_order(sizes, settings, other, epoch, draw):
    data, total = data_of(sizes), sum(sizes)
    assume(total >= max(settings.lanes, other.lanes))
    lane = draw.draw(st.integers(0, settings.lanes - 1))
    length = -((lane - total) // settings.lanes)
    first = draw.draw(st.integers(0, length - 1))
    piece = Piece(lane, first, draw.draw(st.integers(first + 1, length)))
    left_out = [(epoch, settings.lanes, settings.window, *astuple(piece)), (epoch + 1, 1, 0, 0, 0, 1)]
    found = excluded(left_out, data, epoch, other)
    assert {each[:3] for each in found} == {(epoch, other.lanes, other.window)}
    order = EpochOrder(data, epoch, other)
    there = [record for each in found for record in records_of(order, Piece(*each[3:]))]
    assert sorted(there) == sorted(records_of(EpochOrder(data, epoch, settings), piece))
