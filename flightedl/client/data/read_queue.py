"""Queue of the batches that were read and not handed out yet, between the reader's thread and the user's.

It is bounded by the memory that its batches keep. Batches that are cut from one chunk share the memory of that chunk,
which counts once: so all batches of a chunk may wait, while the reader already has the next chunk, whatever its size.

A reader that has to wait goes on when an eighth of the memory is free, or when ``_REFILL_AT`` batches are left. To be
woken for each batch would cost small steps more than the reading, and to be preempted with the interpreter, too.
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

#: Memory for the batches that are read ahead, by default.
READ_AHEAD_MB = 64
#: Seconds after which a thread that waits looks whether it should stop.
SLICE_S = 0.5
_REFILL_AT = 2
#: Counts for a batch beside its values. More than it takes: steps would wait for thousands of small batches to be read.
_BATCH_BYTES = 512 << 10


class ReadQueue(Generic[Item]):
    """Items in their order. One thread puts, one gets.

    Args:
        limit_bytes: Memory of the items, at most; but a piece of memory that is in the queue may be shared by more
            items, and ``_REFILL_AT`` items are always allowed.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        #: For the thread that gets: it may look whether there are any. Each with the bytes that are free when it is
        #: taken.
        self.items: deque[tuple[Item, int]] = deque()
        self._changed = threading.Condition()
        #: Bytes of all items that were ever put and taken; each is written by one thread.
        self._put_bytes = self._taken_bytes = 0
        #: Of the values that the item put last keeps in memory.
        self._piece_bytes = 0
        #: Memory has to fall to this before the reader goes on; None: the reader does not wait.
        self._wait_until: int | None = None
        #: True while the thread that gets waits.
        self._is_waited_for = False

    def put(self, item: Item, timeout_s: float, new_bytes: int = 0, own_bytes: int = 0) -> bool:
        """Put an item in.

        Args:
            item: The item.
            timeout_s: Time to wait for room.
            new_bytes: Memory that the item keeps and the one before it does not; 0: it keeps the same.
            own_bytes: Memory that is free as soon as the item is taken.

        Returns:
            False if there was no room in time.
        """
        added = new_bytes + own_bytes
        with self._changed:
            # To keep an item back that shares the memory of the one before it would save nothing.
            shared = 0 if new_bytes else self._piece_bytes
            if self._wait_until is None and not self._has_room(self._limit_bytes + shared - added):
                # The other thread takes items without the lock: it may have seen the queue before this mark.
                self._wait_until = self._limit_bytes * 7 // 8 + shared
            if self._wait_until is not None:
                if not self._changed.wait_for(lambda: self._has_room(self._wait_until or 0), timeout_s):
                    return False
                self._wait_until = None
            self._put_bytes += added
            # The memory of a piece is free when the first item of the next one is taken.
            released = self._piece_bytes if new_bytes else 0
            self._piece_bytes = new_bytes or self._piece_bytes
            self.items.append((item, released + own_bytes))
            if self._is_waited_for:
                self._changed.notify_all()
            return True

    def put_unless(self, stopping: threading.Event, item: Item, new_bytes: int = 0, own_bytes: int = 0) -> None:
        """Put an item in as soon as there is room, or drop it once ``stopping`` is set."""
        while not stopping.is_set() and not self.put(item, SLICE_S, new_bytes, own_bytes):
            pass

    def _has_room(self, most_bytes: int) -> bool:
        return len(self.items) <= _REFILL_AT or self._put_bytes - self._taken_bytes <= most_bytes

    def get(self, timeout_s: float) -> Item:
        """Return the oldest item.

        Raises:
            Empty: there was none in time.
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
        """Return what ``get`` would return; None if there is nothing. For the thread that gets."""
        return self.items[0][0] if self.items else None


class KeptBytes:
    """Memory that batches keep, each compared with the one before it."""

    def __init__(self) -> None:
        #: Keeps its memory from being used for another batch.
        self._last: pa.RecordBatch | None = None

    def of(self, batch: pa.RecordBatch) -> tuple[int, int]:
        """Return ``new_bytes`` and ``own_bytes`` of the next batch, see ``ReadQueue.put``."""
        last, self._last = self._last, batch
        is_shared = last is not None and (place := _place(batch)) is not None and place == _place(last)
        return 0 if is_shared else batch.get_total_buffer_size(), _BATCH_BYTES


def _place(batch: pa.RecordBatch) -> int | None:
    """Return an address of the memory that holds the values of the first column."""
    if not batch.num_columns:
        return None
    return next((buffer.address for buffer in reversed(batch.column(0).buffers()) if buffer is not None), None)


def read_in_time(
    get: Callable[[float], Item], not_yet: type[Exception], waiting: Waiting, trouble_of_files: Callable[[], str]
) -> Item:
    """Return what a reader thread delivers, and tell the user for what the loop waits.

    Args:
        get: Returns it, or raises ``not_yet`` after so many seconds.
        not_yet: The exception.
        waiting: The user's wait. It is over afterwards.
        trouble_of_files: Returns the cause of a wait for files, or "".
    """
    try:
        while True:
            try:
                return get(SLICE_S)
            except not_yet:
                waiting.patiently(trouble_of_files() or "the next batch to be read")
    finally:
        waiting.over()
