"""Queue between the reader's thread and the user's: order of items, limit of memory, and wake-ups."""

from __future__ import annotations

import threading
from queue import Empty

import pyarrow as pa
import pytest

from flightedl.client.data.read_queue import KeptBytes, ReadQueue

LIMIT = 1000


def filled(count: int, size_bytes: int = 100) -> ReadQueue[int]:
    """Return a queue of items that each own memory."""
    queue: ReadQueue[int] = ReadQueue(LIMIT)
    for number in range(count):
        assert queue.put(number, 0.0, own_bytes=size_bytes)
    return queue


def test_items_are_delivered_in_order() -> None:
    queue = filled(3)
    assert queue.first == 0
    assert [queue.get(0.0) for _ in range(3)] == [0, 1, 2]
    assert queue.first is None
    with pytest.raises(Empty):
        queue.get(0.0)


def test_a_full_queue_accepts_nothing_until_an_eighth_of_its_memory_is_free() -> None:
    queue = filled(40, size_bytes=25)
    assert not queue.put(40, 0.0, own_bytes=25)
    for number in range(4):
        assert queue.get(0.0) == number
        assert not queue.put(40, 0.0, own_bytes=25)
    assert queue.get(0.0) == 4
    assert all(queue.put(number, 0.0, own_bytes=25) for number in range(40, 45))
    assert not queue.put(45, 0.0, own_bytes=25)
    assert [queue.get(0.0) for _ in range(40)] == list(range(5, 45))


def test_a_queue_that_was_never_full_accepts_items_at_once() -> None:
    assert filled(9).put(9, 0.0, own_bytes=100)


def test_a_few_items_are_accepted_regardless_of_their_size() -> None:
    queue = filled(3, size_bytes=10 * LIMIT)
    assert not queue.put(3, 0.0, own_bytes=10 * LIMIT)
    assert queue.get(0.0) == 0
    assert queue.put(3, 0.0, own_bytes=10 * LIMIT)


@pytest.mark.parametrize("size_bytes", [LIMIT, 9 * LIMIT])
def test_all_batches_of_a_chunk_may_wait_but_not_those_of_two_chunks(size_bytes: int) -> None:
    queue: ReadQueue[int] = ReadQueue(LIMIT)
    assert queue.put(0, 0.0, new_bytes=size_bytes)
    assert all(queue.put(number, 0.0) for number in range(1, 500))
    assert not queue.put(500, 0.0, new_bytes=size_bytes)
    for _ in range(497):
        queue.get(0.0)
        assert not queue.put(500, 0.0, new_bytes=size_bytes)
    queue.get(0.0)
    assert queue.put(500, 0.0, new_bytes=size_bytes)
    assert [queue.get(0.0) for _ in range(3)] == [498, 499, 500]
    # The consumed chunk is free, and there is room for the batches of the new one.
    assert all(queue.put(number, 0.0) for number in range(501, 600))


def test_batches_of_a_chunk_are_held_back_for_memory_beyond_the_chunk() -> None:
    queue: ReadQueue[int] = ReadQueue(LIMIT)
    assert queue.put(0, 0.0, new_bytes=9 * LIMIT, own_bytes=100)
    assert all(queue.put(number, 0.0, own_bytes=100) for number in range(1, 10))
    assert not queue.put(10, 0.0, own_bytes=100)
    assert [queue.get(0.0) for _ in range(2)] == [0, 1]
    assert queue.put(10, 0.0, own_bytes=100)


def test_each_side_wakes_the_other() -> None:
    queue: ReadQueue[int] = ReadQueue(LIMIT)
    count = 400
    reader = threading.Thread(target=lambda: [queue.put(number, 20.0, own_bytes=200) for number in range(count)])
    reader.start()
    assert [queue.get(20.0) for _ in range(count)] == list(range(count))
    reader.join(20.0)
    assert not reader.is_alive()


def test_batches_cut_from_one_chunk_count_its_memory_once() -> None:
    chunk = pa.record_batch({"a": pa.array(range(1000)), "b": pa.array(range(1000))})
    kept = KeptBytes()
    assert kept.of(chunk.slice(0, 10))[0] == chunk.get_total_buffer_size() == 16_000
    assert [kept.of(chunk.slice(start, 10))[0] for start in range(10, 1000, 10)] == [0] * 99
    other = chunk.take(pa.array([1, 2, 3]))
    assert kept.of(other)[0] == other.get_total_buffer_size() < 100
    assert kept.of(chunk)[0] == 16_000
    assert kept.of(pa.record_batch({}, schema=pa.schema([])))[0] == 0
