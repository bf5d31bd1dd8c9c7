"""Memory of rows: address space that is reserved at once and takes memory as it is touched.

So an array grows without being copied, and nothing in it ever moves. Beyond the first megabytes the kernel is asked for
huge pages: rows are looked up at random, and 4 KiB pages would make looking addresses up as slow as that.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
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
#: Of a container, by the two versions of cgroups; text where there is none.
_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def machine_bytes() -> int:
    """Memory of this machine, or of the container that this process may fill."""
    found = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for limit in _LIMITS:
        with contextlib.suppress(OSError, ValueError):
            found = min(found, int(limit.read_text()))
    return found


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
