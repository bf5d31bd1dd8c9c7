"""A second thread that helps to process the rows of large messages.

While a pserver processes rows, the trainer that sent the rows waits, so one processor is often idle. All stores of a
process share the thread, which runs kernels without holding the GIL.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

from flightedl.config import available_cores

#: Minimum number of ids in a call for which a second thread saves time.
SPLIT_AT = 1 << 14
#: Prefix of the thread's name.
THREAD_NAME = "flightedl-rows"


@cache
def _second() -> ThreadPoolExecutor | None:
    """Return a pool with the second thread, or None on a machine with only one processor."""
    if available_cores() < 2:
        return None
    return ThreadPoolExecutor(1, thread_name_prefix=THREAD_NAME)


def is_split(count: int) -> bool:
    """Return True if a call with this many ids should use two threads."""
    return count >= SPLIT_AT and _second() is not None


def side_by_side(one: Callable[[], object], other: Callable[[], object]) -> None:
    """Run both functions concurrently, in two threads."""
    second = _second()
    assert second is not None, "see is_split"
    later = second.submit(other)
    try:
        one()
    finally:
        later.result()
