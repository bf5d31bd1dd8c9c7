"""Returns freed memory to the system, which the tuned allocator would keep (``tuning``).

A complete request is in memory, several times over, before a server can check its sender and its length; gRPC has no
limit that Python could set. An unauthorized message of 100 MB, although rejected, would enlarge a server permanently by
350 MB. Memory kept for the job's messages is returned as well, and is allocated again for the next messages.
"""

from __future__ import annotations

import ctypes


class _Mallinfo(ctypes.Structure):
    """struct mallinfo2 of malloc.h."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    )


def give_back(kept_bytes: int) -> bool:
    """Return freed memory to the system if it exceeds ``kept_bytes``. False if it does not, or without glibc."""
    try:
        library = ctypes.CDLL(None)
        mallinfo, trim = library.mallinfo2, library.malloc_trim
    except (AttributeError, OSError, TypeError):
        return False
    mallinfo.restype = _Mallinfo
    trim.argtypes = (ctypes.c_size_t,)
    # Both hold the allocator's lock, not the interpreter's.
    return bool(mallinfo().fordblks > kept_bytes and trim(0))
