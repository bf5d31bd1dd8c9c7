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


def side_by_side(one: Callable[[], object], other: Callable[[], object]) -> None:
    """Do both, in two threads."""
    second = _second()
    assert second is not None, "see is_split"
    later = second.submit(other)
    try:
        one()
    finally:
        later.result()
