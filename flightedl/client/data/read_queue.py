"""Queue of the batches that were read and not handed out yet, between the reader's thread and the user's.

The reader stops at ``AHEAD`` batches, and goes on when ``_REFILL_AT`` are left: a thread that is woken for each batch
takes turns with the user's thread, which costs small steps more than the reading does.
"""

from __future__ import annotations

import threading
from collections import deque
from queue import Empty
from typing import Generic, TypeVar

Item = TypeVar("Item")

#: Batches read ahead of the user's code.
AHEAD = 5
_REFILL_AT = 2


class ReadQueue(Generic[Item]):
    """Items in their order. One thread puts, one gets."""

    def __init__(self) -> None:
        #: For the thread that gets: it may look whether there are any.
        self.items: deque[Item] = deque()
        self._changed = threading.Condition()
        self._is_full = False
        #: True while the thread that gets waits.
        self._is_waited_for = False

    def put(self, item: Item, timeout_s: float) -> bool:
        """Put an item in; False: there was no room in time."""
        with self._changed:
            if len(self.items) >= AHEAD:
                self._is_full = True
                # The other thread takes items without the lock: it may have seen the queue before it was full.
                self._is_full = len(self.items) > _REFILL_AT
            if not self._changed.wait_for(lambda: not self._is_full, timeout_s):
                return False
            self.items.append(item)
            if self._is_waited_for:
                self._changed.notify_all()
            return True

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
        item = items.popleft()
        if self._is_full and len(items) <= _REFILL_AT:
            with self._changed:
                self._is_full = False
                self._changed.notify_all()
        return item

    @property
    def first(self) -> Item | None:
        """Return what ``get`` would return; None if there is nothing. For the thread that gets."""
        return self.items[0] if self.items else None
