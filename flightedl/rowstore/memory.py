"""Memory for rows: arrays that reserve address space and use memory only as they grow, and a limit on this memory.

An array grows without being copied, and its elements never move. Beyond its first megabyte, it uses huge pages: rows
are accessed at random, and with 4 KiB pages, address translation would take as long as the access itself.

No more rows are created when a pserver's rows have reached their limit, or when the machine or container has almost no
memory left because of other processes. Existing rows can still be updated.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

Scalar = TypeVar("Scalar", np.int32, np.uint32, np.uint64)
#: Size of the first part of an array, which has small pages, so that small tables use little memory.
_SMALL_BYTES = 1 << 20
_PAGE_BYTES = 1 << 12
#: Maximum address space for a pserver's rows; a process has 2**47 bytes in total.
ADDRESS_BYTES = 1 << 44
#: Linux's MAP_NORESERVE, which Python has defined since 3.13: reserved address space does not count as used memory.
_NO_RESERVE = 0x4000 if sys.platform == "linux" else 0
_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
_SYSTEM = Path("/proc/meminfo")
_USED, _STATISTICS = Path("/sys/fs/cgroup/memory.current"), Path("/sys/fs/cgroup/memory.stat")
#: Once the rows have grown by this much, the available memory is queried again. If less than this much is available,
#: every check queries it.
_LOOK_BYTES = 64 << 20
#: Memory left for other processes: in bytes and, on small machines, as a fraction of total memory.
_SPARE_BYTES, _SPARE_SHARE = 1 << 30, 0.05
#: Files with the container's memory limit, for both versions of cgroups. Without a limit, a file contains a word.
_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def machine_bytes() -> int:
    """Return the memory limit of the container, or the memory of the machine."""
    found = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for limit in _LIMITS:
        with contextlib.suppress(OSError, ValueError):
            found = min(found, int(limit.read_text()))
    return found


def available_bytes() -> int:
    """Return the memory that is still available on this machine or in this container; 0 if unknown."""
    found = [_number(_SYSTEM, "MemAvailable:", 1 << 10)]
    with contextlib.suppress(OSError, ValueError):
        used = int(_USED.read_text()) - (_number(_STATISTICS, "inactive_file", 1) or 0)
        found.append(int(_LIMITS[0].read_text()) - used)
    return max(0, min((each for each in found if each is not None), default=0))


def _number(path: Path, name: str, unit: int) -> int | None:
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in path.read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1]) * unit
    return None


class RowMemory:
    """A limit on the memory of rows, and its current use. Stores that share it must also share a lock.

    Args:
        limit_bytes: Maximum memory; 0 to use the memory of the machine.
        available: Returns the available memory of the machine.
    """

    def __init__(self, limit_bytes: int = 0, available: Callable[[], int] = available_bytes) -> None:
        self._limit_bytes = limit_bytes or ADDRESS_BYTES
        self._available = available
        #: Current size of the rows, and size of the rows when the available memory was last queried.
        self.taken_bytes = self._looked_at_bytes = 0
        #: Memory that was available then.
        self._was_left_bytes = 0

    def room_bytes(self) -> int:
        """Return the number of bytes that rows may still allocate."""
        grown = self.taken_bytes - self._looked_at_bytes
        if not self._was_left_bytes or grown > _LOOK_BYTES or self._was_left_bytes - grown < _LOOK_BYTES:
            self._looked_at_bytes, grown = self.taken_bytes, 0
            there = self._available() or ADDRESS_BYTES
            self._was_left_bytes = there - min(_SPARE_BYTES, int(_SPARE_SHARE * machine_bytes()))
        return max(0, min(self._limit_bytes - self.taken_bytes, self._was_left_bytes - grown))


def reserved(size_bytes: int, dtype: type[Scalar], *, may_be_less: bool = False) -> npt.NDArray[Scalar]:
    """Return an array of zeros of at least ``size_bytes``, whose memory is freed with the last view.

    Args:
        size_bytes: Size of the array.
        dtype: Type of the array's elements.
        may_be_less: True to reserve less if the system does not permit as much.

    Raises:
        MemoryError: The address space cannot be reserved.
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
