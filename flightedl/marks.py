"""Marks on paths that only faults reach. Tests count the marks to find out which of these paths they take.

A mark is a sentence in the past tense about what happened. Without faults, no mark is ever reached. Marks have no
effect unless this process counts them (``counting``), or ``FLIGHTEDL_MARKS`` names a directory. In that directory, each
process appends a mark to its own file when it first reaches the mark, so the marks of killed processes are kept.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

_DIRECTORY = os.environ.get("FLIGHTEDL_MARKS", "")  # noqa: TID251 - not a setting of a job
_counts: list[Counter[str]] = []
_written: set[str] = set()


def sometimes(mark: str) -> None:
    """Record that execution has reached a mark."""
    for counts in _counts:
        counts[mark] += 1
    if _DIRECTORY and mark not in _written:
        _written.add(mark)
        with contextlib.suppress(OSError), (Path(_DIRECTORY) / f"{os.getpid()}.marks").open("a") as file:
            file.write(f"{mark}\n")


@contextlib.contextmanager
def counting() -> Iterator[Counter[str]]:
    """Count the marks that this process reaches."""
    counts = Counter[str]()
    _counts.append(counts)
    try:
        yield counts
    finally:
        _counts.pop()
