"""Memory of rows: arrays that reserve address space and use memory only as they grow, and the limit on this memory.

An array grows without being copied, and its elements never move. Beyond the first megabyte, huge pages are requested:
rows are accessed at random, and with 4 KiB pages address translation would take as long as the access itself.

No rows are created once a pserver's rows have reached its limit, or when the memory of the machine or container is
nearly exhausted, because other processes use memory, too. Existing rows can still be updated.
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

#: Size of the part of an array that uses small pages, so that small tables stay small.
_SMALL_BYTES = 1 << 20
_PAGE_BYTES = 1 << 12
#: Maximum address space for a pserver's rows; a process has 2**47 bytes.
ADDRESS_BYTES = 1 << 44
#: Linux's MAP_NORESERVE, defined by Python since 3.13: reserved address space does not count as memory.
_NO_RESERVE = 0x4000 if sys.platform == "linux" else 0
_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
_SYSTEM = Path("/proc/meminfo")
_USED, _STATISTICS = Path("/sys/fs/cgroup/memory.current"), Path("/sys/fs/cgroup/memory.stat")
#: The available memory is queried whenever rows have grown by this size, and always if less than this is left.
_LOOK_BYTES = 64 << 20
#: Memory left to other processes, and the share left on small machines.
_SPARE_BYTES, _SPARE_SHARE = 1 << 30, 0.05
#: Files with the container's limit, in both versions of cgroups; they contain a word if there is no limit.
_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def machine_bytes() -> int:
    """Return the memory of this machine, or the limit of the container."""
    found = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for limit in _LIMITS:
        with contextlib.suppress(OSError, ValueError):
            found = min(found, int(limit.read_text()))
    return found


def available_bytes() -> int:
    """Return the memory still available on this machine or in this container; 0 if unknown."""
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
    """Limit on the memory of rows, and its use. All stores that share one must share a lock.

    Args:
        limit_bytes: Maximum memory; 0 for the memory of the machine.
        available: Returns the available memory of the machine.
    """

    def __init__(self, limit_bytes: int = 0, available: Callable[[], int] = available_bytes) -> None:
        self._limit_bytes = limit_bytes or ADDRESS_BYTES
        self._available = available
        #: Current memory of the rows, and their memory when the available memory was last queried.
        self.taken_bytes = self._looked_at_bytes = 0
        #: Memory that was available then.
        self._was_left_bytes = 0

    def room_bytes(self) -> int:
        """Return the memory that rows may still allocate."""
        grown = self.taken_bytes - self._looked_at_bytes
        if not self._was_left_bytes or grown > _LOOK_BYTES or self._was_left_bytes - grown < _LOOK_BYTES:
            self._looked_at_bytes, grown = self.taken_bytes, 0
            there = self._available() or ADDRESS_BYTES
            self._was_left_bytes = there - min(_SPARE_BYTES, int(_SPARE_SHARE * machine_bytes()))
        return max(0, min(self._limit_bytes - self.taken_bytes, self._was_left_bytes - grown))


def reserved(size_bytes: int, dtype: npt.DTypeLike, *, may_be_less: bool = False) -> npt.NDArray[Any]:
    """Return an array of zeros of at least ``size_bytes``. Its memory is freed with its last view.

    Args:
        size_bytes: Size of the array.
        dtype: Type of its elements.
        may_be_less: Reserve less if the system does not allow as much.

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
