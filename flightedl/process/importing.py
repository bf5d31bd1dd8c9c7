"""Imports without garbage collection, which would take a sixth of a process's start.

Modules stay for the life of a process: while they are loaded, the collector looks through more and more objects and
finds none to free.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collection() -> Iterator[None]:
    """No automatic collection inside the block; after it the collector is enabled if it was before."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def of_a_server() -> Iterator[None]:
    """The same, and the collector never looks again at what was loaded: for processes that load all they need at once.

    Not for a trainer: what a user's program has made by then may be garbage later.
    """
    with without_collection():
        yield
        gc.freeze()
