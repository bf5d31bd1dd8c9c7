"""Identity of a batch."""

from __future__ import annotations

from typing import NamedTuple

#: Limits on the numbers in messages. Without these limits, bitmaps could use any amount of memory.
MAX_TASKS = 1 << 28
MAX_BATCHES_PER_TASK = 1 << 24


class Batch(NamedTuple):
    """Identity of a batch. It is the same in every attempt and on every trainer."""

    epoch: int
    task: int
    batch: int
