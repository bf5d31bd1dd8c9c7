"""Dispatch order: positions of an epoch that has grown, and the sizes of old epochs."""

from __future__ import annotations

import pytest

from flightedl.domain.exactly_once.intervals import IntervalSet
from flightedl.domain.queue.order import EpochOrder, EpochSizes
from flightedl.errors import NotFoundError


@pytest.mark.parametrize("key", [None, 7])
def test_tasks_that_join_a_running_epoch_are_last_in_the_order_of_their_arrival(key) -> None:
    order = EpochOrder(4, 6, key)
    assert [order.at(position) for position in (4, 5)] == [4, 5]
    assert [order.position_of(order.at(position)) for position in range(6)] == list(range(6))


def test_the_positions_of_a_set_are_those_of_its_tasks() -> None:
    order = EpochOrder(50, 60, 7)
    for tasks in ([(3, 20), (55, 57)], [(10, 11)], [(0, 50), (59, 60)], [(50, 60)], []):
        expected = IntervalSet.of(order.position_of(task) for start, end in tasks for task in range(start, end))
        assert order.positions(IntervalSet(tasks)) == expected


def test_only_changes_of_the_size_are_stored() -> None:
    sizes = EpochSizes([(0, 3, 3)])
    sizes.grow(0, 4, is_begun=True)
    sizes.grow(0, 5, is_begun=True)
    assert sizes.recent == [(0, 3, 5)]
    sizes.begin(1)
    sizes.grow(1, 6, is_begun=False)
    sizes.begin(2)
    assert sizes.recent == [(0, 3, 5), (1, 6, 6)]
    sizes.grow(2, 8, is_begun=True)
    assert [sizes.find(epoch) for epoch in range(4)] == [(3, 5), (6, 6), (6, 8), (6, 8)]


def rows(first: int, end: int) -> list[tuple[int, int, int]]:
    return [(epoch, epoch + 1, epoch + 1) for epoch in range(first, end)]


def test_half_of_many_recent_sizes_become_older_ones() -> None:
    few = EpochSizes(rows(0, 31))
    assert not few.put_away(31)
    assert few.older == []
    many = EpochSizes(rows(0, 32))
    assert many.put_away(32)
    assert (many.older, many.recent) == (rows(0, 16), rows(16, 32))


@pytest.mark.parametrize(("needed_epoch", "oldest"), [(5, 5), (100, 16)])
def test_the_oldest_sizes_are_forgotten_beyond_the_limit_unless_they_are_needed(
    needed_epoch, oldest, monkeypatch
) -> None:
    monkeypatch.setattr("flightedl.domain.queue.order.REMEMBERED", 16)
    sizes = EpochSizes(rows(16, 48), rows(0, 16))
    assert sizes.put_away(needed_epoch)
    assert sizes.oldest_epoch == oldest
    assert sizes.find(oldest) == (oldest + 1, oldest + 1)
    with pytest.raises(NotFoundError, match="was forgotten"):
        sizes.find(oldest - 1)
    kept = EpochSizes(rows(0, 32))
    assert kept.put_away(100)
    assert kept.oldest_epoch == 0, "as many as the limit"
