"""A second thread for the rows of one large message.

While a pserver works on rows, the trainer that sent them waits: so there is often a processor to spare. The thread is
one for the whole process; kernels run in it without the GIL.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

from flightedl.config import available_cores

#: Ids of a call from which on a second thread makes it shorter.
SPLIT_AT = 1 << 14
#: Its name begins so.
THREAD_NAME = "flightedl-rows"


@cache
def _second() -> ThreadPoolExecutor | None:
    """None: there is one processor."""
    if available_cores() < 2:
        return None
    return ThreadPoolExecutor(1, thread_name_prefix=THREAD_NAME)


def is_split(count: int) -> bool:
    """Whether this many ids are for two threads."""
    return count >= SPLIT_AT and _second() is not None


def in_halves(count: int, work: Callable[[slice, bool], int]) -> tuple[int, int, int]:
    """Do work on ``count`` things, in two threads.

    Args:
        count: Of things.
        work: Does it for some of them; the flag says that it runs beside another call.

    Returns:
        Where the second half begins, and what was returned for each half.
    """
    second = _second()
    assert second is not None, "see is_split"
    # A multiple of what the loops take together.
    half = count // 2 & ~63
    later = second.submit(work, slice(half, count), True)
    try:
        found = work(slice(0, half), False)
    finally:
        more = later.result()
    return half, found, more
