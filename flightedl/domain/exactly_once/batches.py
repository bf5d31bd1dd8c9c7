"""The identity of a batch: what makes a push happen once, whoever sends it and however often."""

from __future__ import annotations

from typing import NamedTuple

#: Sizes of bitmaps follow numbers that come over the wire, so these are limited.
MAX_TASKS = 1 << 28
MAX_BATCHES_PER_TASK = 1 << 24


class Batch(NamedTuple):
    """The identity of a batch."""

    epoch: int
    task: int
    batch: int
