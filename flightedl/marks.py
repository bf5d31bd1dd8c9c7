"""Marks on paths that only faults reach. Tests count them, to find out which of these paths they take.

A mark is a sentence in the past tense about what happened. It never stands on the path of a step without faults. It
does nothing unless this process counts marks (``counting``), or ``FLIGHTEDL_MARKS`` names a directory. There, each
process appends every mark to its own file when it first reaches it, so that marks of killed processes are kept.
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
    """Count a mark."""
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
