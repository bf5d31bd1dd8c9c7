"""Memory of rows: address space that is reserved at once and takes memory as it is touched, and its bound.

No new rows are made where those of a pserver have as much as it was given, or where the machine, or the container, is
about to have none left: other processes take memory, too. Rows that are there go on, and so does the pserver.

So an array grows without being copied, and nothing in it ever moves. Beyond the first megabytes the kernel is asked for
huge pages: rows are looked up at random, and 4 KiB pages would make looking addresses up as slow as that.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

#: Small tables shall stay small: so much has small pages.
_SMALL_BYTES = 1 << 20
_PAGE_BYTES = 1 << 12
#: Of the 2**47 that a process has.
ADDRESS_BYTES = 1 << 44
#: Linux's MAP_NORESERVE, which Python names since 3.13 only: what is reserved is no memory yet, so it is not counted.
_NO_RESERVE = 0x4000 if sys.platform == "linux" else 0
_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
_SYSTEM = Path("/proc/meminfo")
_USED, _STATISTICS = Path("/sys/fs/cgroup/memory.current"), Path("/sys/fs/cgroup/memory.stat")
#: What is there is looked at anew when rows have grown by so much, and always when no more than this is left.
_LOOK_BYTES = 64 << 20
#: What is left to others: so much, and on small machines this share.
_SPARE_BYTES, _SPARE_SHARE = 1 << 30, 0.05
#: Of a container, by the two versions of cgroups; text where there is none.
_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def machine_bytes() -> int:
    """Memory of this machine, or of the container that this process may fill."""
    found = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for limit in _LIMITS:
        with contextlib.suppress(OSError, ValueError):
            found = min(found, int(limit.read_text()))
    return found


def available_bytes() -> int:
    """Memory that may still be taken here; 0: that is not known."""
    found = [_number(_SYSTEM, "MemAvailable:", 1 << 10)]
    with contextlib.suppress(OSError, ValueError):
        used = int(_USED.read_text()) - (_number(_STATISTICS, "inactive_file", 1) or 0)
        found.append(int(_LIMITS[0].read_text()) - used)
    return max(0, min((each for each in found if each is not None), default=0))


def _number(path: Path, name: str, unit: int) -> int | None:
    """What a file of names and numbers says."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in path.read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1]) * unit
    return None


class RowMemory:
    """How much rows have, of what they may have. The stores that share it share a lock.

    Args:
        limit_bytes: That they may have; 0: no limit but what is there.
        available: Tells what is there.
    """

    def __init__(self, limit_bytes: int = 0, available: Callable[[], int] = available_bytes) -> None:
        self._limit_bytes = limit_bytes or ADDRESS_BYTES
        self._available = available
        #: That rows have now, and had when it was looked last how much is there.
        self.taken_bytes = self._looked_at_bytes = 0
        #: How much could be taken then.
        self._was_left_bytes = 0

    def room_bytes(self) -> int:
        """How much more may be taken now."""
        grown = self.taken_bytes - self._looked_at_bytes
        if not self._was_left_bytes or grown > _LOOK_BYTES or self._was_left_bytes - grown < _LOOK_BYTES:
            self._looked_at_bytes, grown = self.taken_bytes, 0
            there = self._available() or ADDRESS_BYTES
            self._was_left_bytes = there - min(_SPARE_BYTES, int(_SPARE_SHARE * machine_bytes()))
        return max(0, min(self._limit_bytes - self.taken_bytes, self._was_left_bytes - grown))


def reserved(size_bytes: int, dtype: npt.DTypeLike, *, may_be_less: bool = False) -> npt.NDArray[Any]:
    """An array of zeros of at least so many bytes; its memory goes with its last view.

    Args:
        size_bytes: Of the array.
        dtype: Likewise.
        may_be_less: Reserve what can be had, where a system counts what is reserved.

    Raises:
        MemoryError: so much cannot be reserved.
    """
    size_bytes = max(_PAGE_BYTES, min(size_bytes, ADDRESS_BYTES))
    while True:
        size_bytes = -(-size_bytes // _PAGE_BYTES) * _PAGE_BYTES
        try:
            memory = mmap.mmap(-1, size_bytes, flags=_FLAGS)
            break
        except OSError:
            size_bytes //= 2
            if size_bytes < _PAGE_BYTES or not may_be_less:
                raise MemoryError("no memory can be reserved for rows") from None
    if size_bytes > _SMALL_BYTES:
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE, _SMALL_BYTES, size_bytes - _SMALL_BYTES)
    return np.frombuffer(memory, dtype)
