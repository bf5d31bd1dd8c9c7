"""Gives back the memory that the compiler's own code takes once all kernels are compiled: about 50 MB of a pserver.

The pages of a library's code are those of its file: dropped, they come back by themselves when they are run again, so
that a kernel may still be compiled later. Linux keeps dropped pages in its cache for as long as it has room. Only
mappings that nobody can have written to are touched. Where there is no ``/proc`` nothing is done.
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

_LIBRARY = "libllvmlite"
_MAPPING = re.compile(rf"([0-9a-f]+)-([0-9a-f]+) r-xp .*{_LIBRARY}[^/]*$")
#: From sys/mman.h.
_MADV_DONTNEED = 4


def release_compiler_memory() -> int:
    """Drop the pages of the compiler's code; returns the bytes of its mappings."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
        madvise = ctypes.CDLL(None, use_errno=True).madvise
    except (OSError, AttributeError):
        return 0
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    madvise.restype = ctypes.c_int
    released = 0
    for found in filter(None, map(_MAPPING.match, lines)):
        start, end = (int(text, 16) for text in found.groups())
        if madvise(start, end - start, _MADV_DONTNEED) == 0:
            released += end - start
    return released
