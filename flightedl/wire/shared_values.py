"""Values that lie in memory which the receiver maps, too: where they are put, and how they are read.

A message then has an offset in place of a batch (see ``parts``). Its sender copies the values to free memory of its
own (:class:`Outbox`), and has that memory again when the receiver has taken them, which it does in the order in which
they left. The lowest free place is used: mostly the same few MiB, which so stay in the processor's cache.

Or it lends them, where they lie in memory for good that the receiver maps (its *store*) and stay as they are until the
receiver has taken them.

The receiver reads them where they lie, or, where it decides by what it reads, from a copy: whoever owns the memory may
change it at any moment (:class:`CopyingInbox`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from flightedl.errors import MessageError, UnavailableError

Bytes = npt.NDArray[np.uint8]

#: What is smaller travels in the message: making a place for it costs as much.
SHARED_FROM_BYTES = 4096
#: Values that are not taken yet; a single message may have more.
UNTAKEN_LIMIT_BYTES = 8 << 20
_ALIGNMENT_BYTES = 64
#: Added to an offset: it is one of the store.
_IN_STORE = 1 << 63
#: Below what glibc copies past the cache, see ``config.tuned_environment``: the other side reads it soon.
_PIECE_BYTES = 960 << 10
_PAGE_BYTES = 4096
_COLLISION_BYTES = 512


class Outbox:
    """Values on their way to the other side. For one thread.

    Args:
        memory: (n,) bytes that both sides map.
        least_bytes: Of values that are worth a place there.
        store: (n,) bytes that both sides map; values that lie there are lent.
    """

    def __init__(self, memory: Bytes, least_bytes: int = SHARED_FROM_BYTES, store: Bytes | None = None) -> None:
        self._store = store
        self._store_at = 0 if store is None else store.ctypes.data
        self._memory = memory
        self.least_bytes = least_bytes
        #: Where each message's values lie, how many there are, and what is lent, oldest first.
        self._untaken: deque[tuple[int, int, int, list[memoryview]]] = deque()
        #: Number of messages whose values are there.
        self.untaken = 0
        self._untaken_bytes = 0

    def put(self, values: Sequence[memoryview], size_bytes: int) -> int | None:
        """Copy values there, one after the other, or lend them where they are.

        Args:
            values: Bytes.
            size_bytes: Of all of them.

        Returns:
            Where they begin; None: there is no room now, or they are too few.
        """
        start = self._free_place(size_bytes) if size_bytes >= self.least_bytes else None
        if start is None:
            return None
        self._untaken_bytes += size_bytes
        self.untaken += 1
        stored = self._place_in_store(values)
        if stored is not None:
            self._untaken.append((0, 0, size_bytes, list(values)))
            return _IN_STORE + stored
        self._untaken.append((start, start + size_bytes, size_bytes, []))
        place = start
        for part in values:
            copy_to_cache(self._memory[place : place + part.nbytes], np.frombuffer(part, np.uint8))
            place += part.nbytes
        return start

    def _place_in_store(self, values: Sequence[memoryview]) -> int | None:
        """Where they begin; None: they do not lie there one after the other."""
        if self._store is None or not values:
            return None
        first = place = np.frombuffer(values[0], np.uint8).ctypes.data - self._store_at
        for part in values:
            if np.frombuffer(part, np.uint8).ctypes.data - self._store_at != place:
                return None
            place += part.nbytes
        return first if first >= 0 and place <= self._store.size else None

    def end(self) -> None:
        """Nothing is lent any more."""
        self._untaken.clear()
        self.untaken = 0

    def has_room(self, size_bytes: int) -> bool:
        """Whether so many bytes could be put there now."""
        return self._free_place(size_bytes) is not None

    def taken(self, count: int) -> None:
        """The receiver has taken the values of so many more messages."""
        for _ in range(min(count, len(self._untaken))):
            self._untaken_bytes -= self._untaken.popleft()[2]
        self.untaken = len(self._untaken)

    def _free_place(self, size_bytes: int) -> int | None:
        """The first gap that is wide enough."""
        if self._untaken and self._untaken_bytes + size_bytes > UNTAKEN_LIMIT_BYTES:
            return None
        place = 0
        for start, end in sorted(untaken[:2] for untaken in self._untaken):
            if place + size_bytes <= start:
                break
            place = -(-end // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        return place if place + size_bytes <= self._memory.size else None


class Inbox:
    """Values from the other side, read where they lie.

    Args:
        memory: (n,) bytes of the other side.
        store: (n,) bytes from which it lends; None: it does not.
    """

    #: Whether what was taken last is known to be finite floats of 32 or 64 bits.
    is_finite = False

    def __init__(self, memory: Bytes, store: Bytes | None = None) -> None:
        self._memory = memory
        self._store = store

    def take(self, start: int, size_bytes: int) -> memoryview:
        """What lies there.

        Raises:
            MessageError: it is beyond the memory's end.
        """
        return self._place(start, size_bytes).data.cast("B")

    def _place(self, start: int, size_bytes: int) -> Bytes:
        memory = self._memory
        if start >= _IN_STORE and self._store is not None:
            memory, start = self._store, start - _IN_STORE
        if start + size_bytes > memory.size:
            raise MessageError(
                f"values are said to lie at {start} to {start + size_bytes} of {memory.size} shared bytes"
            )
        return memory[start : start + size_bytes]


class CopyingInbox(Inbox):
    """Values from the other side, copied before they are checked and used. The copy is valid until the next ``take``.

    Args:
        memory: (n,) bytes of the other side.
        copy: ``copy(target, source)`` copies bytes, and returns True if the target is known to hold finite floats.
        store: As of ``Inbox``.
        is_over: True if the other side has ended what it lent. The copy may then be of several gradients.
    """

    def __init__(
        self,
        memory: Bytes,
        copy: Callable[[Bytes, Bytes], bool],
        store: Bytes | None = None,
        is_over: Callable[[], bool] | None = None,
    ) -> None:
        super().__init__(memory, store)
        self._copy_values = copy
        self._is_over = is_over
        self._copy: Bytes = np.empty(0, np.uint8)

    def take(self, start: int, size_bytes: int) -> memoryview:
        place = self._place(start, size_bytes)
        if size_bytes > self._copy.size:
            self._copy = np.empty(size_bytes, np.uint8)
        copy = self._copy[:size_bytes]
        self.is_finite = self._copy_values(copy, place)
        if start >= _IN_STORE and self._is_over is not None and self._is_over():
            raise UnavailableError("the stream ended while values were copied: they may be of two gradients")
        return copy.data.cast("B")


def copy_to_cache(target: Bytes, source: Bytes) -> None:
    """Copy bytes to where they are read soon."""
    for start in range(0, source.size, _PIECE_BYTES):
        target[start : start + _PIECE_BYTES] = source[start : start + _PIECE_BYTES]


def copy_past_cache(target: Bytes, source: Bytes) -> None:
    """Copy bytes to where they are not read soon, see ``config.tuned_environment``.

    Where the target begins a little behind the source, as pages count, a processor takes what it reads for what it has
    just written, and waits until that is there: 2.6 GB/s instead of 26 on an AMD machine. Then it goes by the cache.
    """
    if source.size > _PIECE_BYTES and 0 < (_address(target) - _address(source)) % _PAGE_BYTES < _COLLISION_BYTES:
        copy_to_cache(target, source)
    else:
        np.copyto(target, source)


def _address(array: Bytes) -> int:
    found: int = array.__array_interface__["data"][0]
    return found
