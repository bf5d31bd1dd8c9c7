"""Gives freed memory back to the system, where the allocator is tuned to keep it (``tuning``).

A request is in memory as a whole, several times over, before a server can look at who sends it and how long it is; gRPC
has no limit that Python could set. So a stranger's message of 100 MB, refused as it is, would leave a server 350 MB
larger for good. What is kept for the messages of a job is given back with it, and comes again with the next ones.
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
    """Give back what is freed, if that is more than ``kept_bytes``; False: it is not, or this is not glibc."""
    try:
        library = ctypes.CDLL(None)
        mallinfo, trim = library.mallinfo2, library.malloc_trim
    except (AttributeError, OSError, TypeError):
        return False
    mallinfo.restype = _Mallinfo
    trim.argtypes = (ctypes.c_size_t,)
    # Both take the allocator's lock and not the interpreter's.
    return bool(mallinfo().fordblks > kept_bytes and trim(0))
