"""What was read and not handed out yet, between the reader's thread and the user's.

The reader stops when there is as much as there may be, and goes on when it is down to ``_REFILL_AT``: a thread that is
woken for each batch takes turns with the user's thread, which costs small steps more than the reading does.
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
        self._items: deque[Item] = deque()
        self._changed = threading.Condition()
        self._is_full = False
        #: The thread that gets waits.
        self._is_waited_for = False

    def put(self, item: Item, timeout_s: float) -> bool:
        """Put an item in; False: there was no room in time."""
        with self._changed:
            self._is_full = self._is_full or len(self._items) >= AHEAD
            if not self._changed.wait_for(lambda: not self._is_full, timeout_s):
                return False
            self._items.append(item)
            if self._is_waited_for:
                self._changed.notify_all()
            return True

    def get(self, timeout_s: float) -> Item:
        """The oldest item.

        Raises:
            Empty: there was none in time.
        """
        with self._changed:
            if not self._items:
                self._is_waited_for = True
                self._changed.wait_for(lambda: self._items, timeout_s)
                self._is_waited_for = False
                if not self._items:
                    raise Empty
            item = self._items.popleft()
            if self._is_full and len(self._items) <= _REFILL_AT:
                self._is_full = False
                self._changed.notify_all()
            return item

    @property
    def first(self) -> Item | None:
        """What ``get`` would give; None: nothing."""
        with self._changed:
            return self._items[0] if self._items else None
