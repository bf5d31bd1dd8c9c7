"""Gives freed memory back to the system, which the tuned allocator keeps otherwise (``tuning``).

A request is in memory as a whole, several times over, before a server can check its sender and its length; gRPC has no
limit that Python could set. A stranger's message of 100 MB, although it is refused, would leave a server 350 MB larger
for good. Memory that is kept for the job's messages is given back, too, and is allocated again with the next ones.
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
    """Give freed memory back if it is more than ``kept_bytes``. False if it is not, or if this is not glibc."""
    try:
        library = ctypes.CDLL(None)
        mallinfo, trim = library.mallinfo2, library.malloc_trim
    except (AttributeError, OSError, TypeError):
        return False
    mallinfo.restype = _Mallinfo
    trim.argtypes = (ctypes.c_size_t,)
    # Both take the allocator's lock and not the interpreter's.
    return bool(mallinfo().fordblks > kept_bytes and trim(0))
