"""Queue of batches between the reader thread and the user's thread.

The queue is bounded by memory. Batches that were cut from one chunk share the chunk's memory, which is counted once. So
the batches of one chunk can all be queued while the next chunk is being read, regardless of its size.

A blocked reader continues when an eighth of the memory is free, or when only ``_REFILL_AT`` batches are left. If steps
are short, waking the reader for every batch would take longer than reading the batch.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from queue import Empty
from typing import Generic, TypeVar

import pyarrow as pa

from flightedl.client.waiting import Waiting

Item = TypeVar("Item")

#: Default limit on the memory used by batches that were read ahead.
READ_AHEAD_MB = 64
#: Polling interval, in seconds, of waiting threads, which check if they should stop.
SLICE_S = 0.5
_REFILL_AT = 2
#: Bytes counted per batch in addition to its values, to limit the number of small batches that are read ahead.
_BATCH_BYTES = 512 << 10


class ReadQueue(Generic[Item]):
    """A queue with one producer thread and one consumer thread.

    Args:
        limit_bytes: Maximum memory of the items. Items that share memory with the newest one, and ``_REFILL_AT``
            items in any case, may exceed it.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        #: Items, each with the number of bytes freed by removing it. Both threads may check if the deque is empty.
        self.items: deque[tuple[Item, int]] = deque()
        self._changed = threading.Condition()
        #: Total bytes of all items ever added, and of all items ever removed. Each counter is written by a single
        #: thread.
        self._put_bytes = self._taken_bytes = 0
        #: Bytes of memory that the most recently added item keeps in use.
        self._piece_bytes = 0
        #: The blocked reader may continue when at most this many bytes are in use; None if the reader is not blocked.
        self._wait_until: int | None = None
        self._is_waited_for = False

    def put(self, item: Item, timeout_s: float, new_bytes: int = 0, own_bytes: int = 0) -> bool:
        """Put an item in.

        Args:
            item: The item.
            timeout_s: Maximum time to wait for room.
            new_bytes: Memory that this item keeps and its predecessor does not; 0 if there is none.
            own_bytes: Memory that is freed as soon as the item is removed.

        Returns:
            False if there was no room before the timeout.
        """
        added = new_bytes + own_bytes
        with self._changed:
            # If the item shares memory with the previous item, holding it back would save nothing.
            shared = 0 if new_bytes else self._piece_bytes
            if self._wait_until is None and not self._has_room(self._limit_bytes + shared - added):
                # The consumer removes items without the lock, and may have checked the queue before this flag was set.
                self._wait_until = self._limit_bytes * 7 // 8 + shared
            if self._wait_until is not None:
                if not self._changed.wait_for(lambda: self._has_room(self._wait_until or 0), timeout_s):
                    return False
                self._wait_until = None
            self._put_bytes += added
            # This piece of memory is freed when the first item of the next piece is removed.
            released = self._piece_bytes if new_bytes else 0
            self._piece_bytes = new_bytes or self._piece_bytes
            self.items.append((item, released + own_bytes))
            if self._is_waited_for:
                self._changed.notify_all()
            return True

    def put_unless(self, stopping: threading.Event, item: Item, new_bytes: int = 0, own_bytes: int = 0) -> None:
        while not stopping.is_set() and not self.put(item, SLICE_S, new_bytes, own_bytes):
            pass

    def _has_room(self, most_bytes: int) -> bool:
        return len(self.items) <= _REFILL_AT or self._put_bytes - self._taken_bytes <= most_bytes

    def get(self, timeout_s: float) -> Item:
        """Return the oldest item.

        Raises:
            Empty: no item arrived before the timeout.
        """
        items = self.items
        if not items:
            with self._changed:
                self._is_waited_for = True
                self._changed.wait_for(lambda: items, timeout_s)
                self._is_waited_for = False
                if not items:
                    raise Empty
        item, released = items.popleft()
        self._taken_bytes += released
        if (until := self._wait_until) is not None and self._has_room(until):
            with self._changed:
                self._changed.notify_all()
        return item

    @property
    def first(self) -> Item | None:
        """The oldest item, not removed; None if the queue is empty. Only the consumer thread may read it."""
        return self.items[0][0] if self.items else None


class KeptBytes:
    """Measures the memory that each batch keeps in use, by comparing the batch with its predecessor."""

    def __init__(self) -> None:
        #: Reference to the previous batch. Prevents its memory from being reused for another batch.
        self._last: pa.RecordBatch | None = None

    def of(self, batch: pa.RecordBatch) -> tuple[int, int]:
        """Return ``new_bytes`` and ``own_bytes`` of the next batch; see ``ReadQueue.put``."""
        last, self._last = self._last, batch
        is_shared = last is not None and (place := _place(batch)) is not None and place == _place(last)
        return 0 if is_shared else batch.get_total_buffer_size(), _BATCH_BYTES


def _place(batch: pa.RecordBatch) -> int | None:
    if not batch.num_columns:
        return None
    return next((buffer.address for buffer in reversed(batch.column(0).buffers()) if buffer is not None), None)


def read_in_time(
    get: Callable[[float], Item], not_yet: type[Exception], waiting: Waiting, trouble_of_files: Callable[[], str]
) -> Item:
    """Return the next item of a reader thread. During a long wait, show the user the reason.

    Args:
        get: Returns the item, or raises ``not_yet`` after the given number of seconds.
        not_yet: Exception that ``get`` raises.
        waiting: The user's wait, which this function ends.
        trouble_of_files: Returns the cause of a wait for files; empty if there is none.
    """
    try:
        while True:
            try:
                return get(SLICE_S)
            except not_yet:
                waiting.patiently(trouble_of_files() or "the next batch to be read")
    finally:
        waiting.over()
