"""Narrows a failing piece of work down to the batches that are at fault.

A failing piece goes back as it is until it failed ``limit`` times. From then on it is *suspect*: each failure splits
it, around the failing batch if that is known, else in halves, so n batches are narrowed in log2(n) failures. A
single suspect batch gets ``confirmations`` more chances, each with a trainer that holds nothing else, and is then
quarantined: a trainer that is killed takes what it holds with it, so a failure alone convicts nobody.
"""

from __future__ import annotations

from dataclasses import replace

from flightedl.domain.queue.values import BatchRange


def after_failure(piece: BatchRange, batch: int | None, limit: int, confirmations: int) -> tuple[BatchRange, ...]:
    """What is to be handed out again of a piece that just failed; empty: it is to be quarantined.

    Args:
        piece: With this failure counted.
        batch: At which batch of the task it failed, where known.
        limit: Failures of a piece before it is split.
        confirmations: Failures of a single batch over the limit before it is quarantined.
    """
    if piece.failures < limit:
        return (piece,)
    if piece.size == 1:
        return (piece,) if piece.failures < limit + confirmations else ()
    first, end = piece.first_batch, piece.end_batch
    if batch is None or not first <= batch < end:
        middle = (first + end) // 2
        stretches = [(first, middle, limit), (middle, end, limit)]
    else:
        # What is beside a known failing batch is under less suspicion.
        stretches = [(first, batch, limit - 1), (batch, batch + 1, limit), (batch + 1, end, limit - 1)]
    return tuple(
        replace(piece, first_batch=start, end_batch=stop, failures=failures)
        for start, stop, failures in stretches
        if start < stop
    )
