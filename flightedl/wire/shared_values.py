"""Values of messages in shared memory: the sender places them there, and the receiver reads them.

A message with values in shared memory contains an offset instead of a batch (see ``parts``). The sender copies the
values to free memory of its own (:class:`Outbox`). The receiver consumes values in the order in which they were sent,
and the sender then reuses their memory. The sender always chooses the lowest free offset, so it mostly reuses the same
few MiB, which stay in the processor's cache.

If the values are in the sender's *store*, they are lent instead of copied. The store is memory outside of any stream
that the receiver also maps. Lent values must not change until the receiver has consumed them.

A trainer reads the values in place. A pserver copies them first (:class:`CopyingInbox`), because the trainer could
change them after they have been checked.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from flightedl.errors import MessageError, UnavailableError
from flightedl.wire.shared_protocol import Loans

Bytes = npt.NDArray[np.uint8]

#: Smaller values are sent in the message, because placing them in shared memory would cost just as much.
SHARED_FROM_BYTES = 4096
#: Maximum bytes of unconsumed values. A single message may exceed it.
UNCONSUMED_LIMIT_BYTES = 8 << 20
_ALIGNMENT_BYTES = 64
#: Added to an offset to mark it as an offset in the store.
_IN_STORE = 1 << 63
#: Slightly less than the size above which glibc's copies bypass the cache; see ``config.tuned_environment``.
_PIECE_BYTES = 960 << 10
_PAGE_BYTES = 4096
_COLLISION_BYTES = 512


class Outbox:
    """The sender's end, which tracks values that the receiver has not consumed. Not thread-safe.

    Args:
        memory: (n,) bytes that both ends map.
        least_bytes: Minimum size of values that are placed in the memory.
        store: (n,) bytes that both ends map, from which values are lent; None if there is no store.
    """

    def __init__(self, memory: Bytes, least_bytes: int = SHARED_FROM_BYTES, store: Bytes | None = None) -> None:
        self._store = store
        self._store_at = 0 if store is None else store.ctypes.data
        self._memory = memory
        self.least_bytes = least_bytes
        #: For each message, oldest first: start, end and size of its values, and references to lent values.
        self._unconsumed: deque[tuple[int, int, int, list[memoryview]]] = deque()
        self.loans = Loans()
        self._unconsumed_bytes = 0

    def put(self, values: Sequence[memoryview], size_bytes: int) -> int | None:
        """Make values available to the receiver: lend them if they are in the store, otherwise copy them in order.

        Args:
            values: Bytes-like values.
            size_bytes: Total size of the values.

        Returns:
            Offset of the values; None if there is no room at present, or if they have fewer than ``least_bytes``.
        """
        start = self._free_place(size_bytes) if size_bytes >= self.least_bytes else None
        if start is None:
            return None
        self._unconsumed_bytes += size_bytes
        self.loans.lend()
        stored = self._place_in_store(values)
        if stored is not None:
            self._unconsumed.append((0, 0, size_bytes, list(values)))
            return _IN_STORE + stored
        self._unconsumed.append((start, start + size_bytes, size_bytes, []))
        place = start
        for part in values:
            copy_to_cache(self._memory[place : place + part.nbytes], np.frombuffer(part, np.uint8))
            place += part.nbytes
        return start

    def _place_in_store(self, values: Sequence[memoryview]) -> int | None:
        """Return the offset of the values in the store, or None if they are not contiguous there."""
        if self._store is None or not values:
            return None
        first = place = np.frombuffer(values[0], np.uint8).ctypes.data - self._store_at
        for part in values:
            if np.frombuffer(part, np.uint8).ctypes.data - self._store_at != place:
                return None
            place += part.nbytes
        return first if first >= 0 and place <= self._store.size else None

    def end(self) -> None:
        """Forget all values. The caller must have revoked the values that were lent."""
        self._unconsumed.clear()
        self.loans.end()

    def has_room(self, size_bytes: int) -> bool:
        return self._free_place(size_bytes) is not None

    def consumed(self, count: int) -> None:
        """Free the values of the ``count`` oldest messages, because their answers have arrived."""
        self._free(self.loans.answered(count))

    def counted(self, counter: int) -> None:
        """Free the values of the messages that the receiver's counter includes."""
        self._free(self.loans.counted(counter))

    def _free(self, count: int) -> None:
        for _ in range(count):
            self._unconsumed_bytes -= self._unconsumed.popleft()[2]

    def _free_place(self, size_bytes: int) -> int | None:
        """Return the offset of the first gap of at least ``size_bytes``, or None if there is none."""
        if self._unconsumed and self._unconsumed_bytes + size_bytes > UNCONSUMED_LIMIT_BYTES:
            return None
        place = 0
        for start, end in sorted(unconsumed[:2] for unconsumed in self._unconsumed):
            if place + size_bytes <= start:
                break
            place = -(-end // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        return place if place + size_bytes <= self._memory.size else None


class Inbox:
    """The receiver's end, which reads the sender's values in place.

    Args:
        memory: (n,) bytes of the sender.
        store: (n,) bytes from which the sender lends; None if it has no store.
    """

    #: True if the most recent values, read as 32-bit or 64-bit floats, are known to be finite.
    is_finite = False

    def __init__(self, memory: Bytes, store: Bytes | None = None) -> None:
        self._memory = memory
        self._store = store

    def take(self, start: int, size_bytes: int) -> memoryview:
        """Return the values that begin at an offset.

        Raises:
            MessageError: the values extend beyond the end of the memory.
        """
        return self._place(start, size_bytes).data.cast("B")

    def _place(self, start: int, size_bytes: int) -> Bytes:
        memory = self._memory
        if start >= _IN_STORE and self._store is not None:
            memory, start = self._store, start - _IN_STORE
        if start + size_bytes > memory.size or size_bytes > self._memory.size:  # Also limits lent values.
            raise MessageError(
                f"a message's values extend from {start} to {start + size_bytes} in {memory.size} shared bytes"
            )
        return memory[start : start + size_bytes]


class CopyingInbox(Inbox):
    """Receiving end that copies values before it checks and uses them. A copy is valid until the next ``take``.

    Args:
        memory: See ``Inbox``.
        copy: ``copy(target, source)`` copies bytes. Returns True if the target is known to contain only finite floats.
        store: See ``Inbox``.
        is_over: Returns True if the sender has revoked its loans, so that the values may have changed during the copy.
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
            raise UnavailableError("the stream ended while gradients were copied: they may have changed")
        return copy.data.cast("B")


def copy_to_cache(target: Bytes, source: Bytes) -> None:
    """Copy bytes through the processor's cache, because the target will be read soon."""
    for start in range(0, source.size, _PIECE_BYTES):
        target[start : start + _PIECE_BYTES] = source[start : start + _PIECE_BYTES]


def copy_past_cache(target: Bytes, source: Bytes) -> None:
    """Copy bytes past the cache, because the target will not be read soon (see ``config.tuned_environment``).

    If the target's offset within its page is slightly higher than the source's, the processor mistakes each read for a
    read of bytes that it has just written, and waits. On an AMD machine, such a copy runs at 2.6 instead of 26 GB/s. In
    this case, the bytes are copied through the cache.
    """
    if source.size > _PIECE_BYTES and 0 < (_address(target) - _address(source)) % _PAGE_BYTES < _COLLISION_BYTES:
        copy_to_cache(target, source)
    else:
        np.copyto(target, source)


def _address(array: Bytes) -> int:
    found: int = array.__array_interface__["data"][0]
    return found
