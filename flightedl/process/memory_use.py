"""How much main memory this process has: so that a server can tell, wherever it runs, and without another library."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

_STATM = Path("/proc/self/statm")
_PAGE_BYTES = resource.getpagesize()


def resident_bytes() -> int:
    """Bytes in main memory now; where the system does not tell that, the most that there ever were."""
    try:
        return int(_STATM.read_bytes().split()[1]) * _PAGE_BYTES
    except (OSError, IndexError, ValueError):
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024
