"""Return freed memory to the system, because the tuned allocator would keep it (see ``tuning``).

A server holds several copies of a request in memory before it can check the sender and the length, because gRPC has no
limit that Python could set. An unauthorized message of 100 MB, although rejected, would permanently enlarge a server by
350 MB. Memory that was kept for messages of the job is returned as well, and allocated again for the next messages.
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
    """Return freed memory to the system if it exceeds ``kept_bytes``. False if it does not, or if glibc is missing."""
    try:
        library = ctypes.CDLL(None)
        mallinfo, trim = library.mallinfo2, library.malloc_trim
    except (AttributeError, OSError, TypeError):
        return False
    mallinfo.restype = _Mallinfo
    trim.argtypes = (ctypes.c_size_t,)
    # Both functions hold the allocator's lock, but not the GIL.
    return bool(mallinfo().fordblks > kept_bytes and trim(0))
