"""Items between the reader's thread and the user's: their order, and when the reader goes on."""

from __future__ import annotations

import threading
from queue import Empty

import pytest

from flightedl.client.data.read_queue import AHEAD, ReadQueue


def filled(count: int = AHEAD) -> ReadQueue[int]:
    queue: ReadQueue[int] = ReadQueue()
    for number in range(count):
        assert queue.put(number, 0.0)
    return queue


def test_items_come_in_their_order() -> None:
    queue = filled(3)
    assert queue.first == 0
    assert [queue.get(0.0) for _ in range(3)] == [0, 1, 2]
    assert queue.first is None
    with pytest.raises(Empty):
        queue.get(0.0)


def test_a_full_queue_takes_nothing_until_most_of_it_is_gone() -> None:
    queue = filled()
    assert not queue.put(AHEAD, 0.0)
    while queue.first != AHEAD - 3:
        queue.get(0.0)
        assert not queue.put(AHEAD, 0.0)
    queue.get(0.0)
    assert all(queue.put(number, 0.0) for number in range(AHEAD, 2 * AHEAD - 2))
    assert not queue.put(-1, 0.0)
    assert [queue.get(0.0) for _ in range(AHEAD)] == list(range(AHEAD - 2, 2 * AHEAD - 2))


def test_a_queue_that_was_never_full_takes_more_at_once() -> None:
    queue = filled(AHEAD - 1)
    assert queue.put(AHEAD - 1, 0.0)


def test_each_side_wakes_the_other() -> None:
    queue: ReadQueue[int] = ReadQueue()
    count = 40 * AHEAD
    reader = threading.Thread(target=lambda: [queue.put(number, 20.0) for number in range(count)])
    reader.start()
    assert [queue.get(20.0) for _ in range(count)] == list(range(count))
    reader.join(20.0)
    assert not reader.is_alive()
