"""Bitmaps of tasks, lowest task first."""

from __future__ import annotations


def tasks_in(bitmap: bytes) -> list[int]:
    return [task for task in range(8 * len(bitmap)) if bitmap[task >> 3] >> (task & 7) & 1]
