"""Pieces that wait: runs of whole tasks."""

from __future__ import annotations

from flightedl.domain.exactly_once.intervals import IntervalSet
from flightedl.domain.queue.waiting import Runs


def test_runs_know_their_positions() -> None:
    runs = Runs()
    runs.add(2, 5, 0)
    runs.add(7, 9, 1)
    assert [position for position in range(12) if position in runs] == [2, 3, 4, 7, 8]
    assert runs.size == 5


def test_neighbours_are_one_run_if_they_failed_as_often() -> None:
    runs = Runs()
    for start, end, failures in [(4, 6, 0), (2, 4, 0), (6, 7, 0), (7, 8, 1), (8, 9, 0)]:
        runs.add(start, end, failures)
    assert list(runs) == [(2, 7, 0), (7, 8, 1), (8, 9, 0)]


def test_what_never_failed_is_replaced_and_what_failed_stays() -> None:
    runs = Runs()
    runs.add(0, 2, 0)
    runs.add(4, 5, 2)
    runs.replace_unfailed(IntervalSet([(1, 3), (7, 9)]))
    assert list(runs) == [(1, 3, 0), (4, 5, 2), (7, 9, 0)]
    assert runs.size == 5
