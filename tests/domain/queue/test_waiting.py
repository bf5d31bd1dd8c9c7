"""Waiting pieces: runs of complete tasks."""

from __future__ import annotations

from flightedl.domain.exactly_once.intervals import IntervalSet
from flightedl.domain.queue.values import BatchRange
from flightedl.domain.queue.waiting import Runs, WaitingPieces


def test_runs_know_their_positions() -> None:
    runs = Runs()
    runs.add(2, 5, 0)
    runs.add(7, 9, 1)
    assert [position for position in range(12) if position in runs] == [2, 3, 4, 7, 8]
    assert runs.size == 5


def test_adjacent_runs_are_merged_if_they_failed_equally_often() -> None:
    runs = Runs()
    for start, end, failures in [(4, 6, 0), (2, 4, 0), (6, 7, 0), (7, 8, 1), (8, 9, 0)]:
        runs.add(start, end, failures)
    assert list(runs) == [(2, 7, 0), (7, 8, 1), (8, 9, 0)]


def test_tasks_that_never_failed_are_replaced_and_failed_ones_remain() -> None:
    runs = Runs()
    runs.add(0, 2, 0)
    runs.add(4, 5, 2)
    runs.replace_unfailed(IntervalSet([(1, 3), (7, 9)]))
    assert list(runs) == [(1, 3, 0), (4, 5, 2), (7, 9, 0)]
    assert runs.size == 5


def test_one_position_is_removed_from_its_run() -> None:
    runs = Runs()
    runs.add(2, 5, 1)
    runs.add(7, 8, 0)
    assert [runs.take(position) for position in (3, 7)] == [1, 0]
    assert list(runs) == [(2, 3, 1), (4, 5, 1)]
    assert [runs.take(position) for position in (2, 4)] == [1, 1]
    assert (list(runs), runs.size) == ([], 0)


def test_a_complete_task_is_removed_once_and_only_if_it_waits() -> None:
    waiting = WaitingPieces(3, lambda _epoch, position: position + 1)
    waiting.put_run(4, 2, 4, 1)
    assert waiting.take_complete(4, 1) is None
    assert waiting.take_complete(5, 2) is None
    assert waiting.take_complete(4, 2) == BatchRange(4, 2, 0, 3, 3, 1)
    assert waiting.take_complete(4, 2) is None
    assert waiting.take_complete(4, 3) == BatchRange(4, 3, 0, 4, 4, 1)
    assert waiting.lowest_epoch is None


def test_tasks_promised_to_others_are_skipped() -> None:
    waiting = WaitingPieces(3, lambda _epoch, _position: 2)
    waiting.put_run(0, 1, 3, 0)
    waiting.put_run(0, 5, 6, 0)
    waiting.put(BatchRange(0, 4, 0, 1, 2))
    taken = [waiting.take_ready(0, {1, 2, 5}), waiting.take_ready(0, {1, 5}), waiting.take_ready(0, {1, 5})]
    assert [None if each is None else each.position for each in taken] == [4, 2, None]
    assert [waiting.take_ready(0), waiting.take_ready(0)] == [BatchRange(0, 1, 0, 2, 2), BatchRange(0, 5, 0, 2, 2)]
