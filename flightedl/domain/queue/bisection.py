"""Narrows a failing piece of work down to the batches that are at fault.

A failing piece goes back as it is until it failed ``limit`` times. From then on it is *suspect*: each failure splits
it, around the failing batch if that is known, else in halves, so n batches are narrowed in log2(n) failures. A
single suspect batch gets ``confirmations`` more chances, each with a trainer that holds nothing else, and is then
quarantined: a trainer that is killed takes what it holds with it, so a failure alone convicts nobody.

A reported failure is the batch's own. The loss of a trainer (it died, its lease ended, or it took too long) is weak
evidence, because machines do get taken away. It counts against a single suspect batch only if no trainer without a
suspect was lost since the previous loss with that batch, and twice as many losses as reports are needed.
"""

from __future__ import annotations

from dataclasses import replace

from flightedl.domain.queue.values import BatchRange

#: Losses of trainers that weigh as much as one reported failure.
LOSSES_PER_REPORT = 2


class Losses:
    """Losses of trainers with and without suspects. Not stored: after a restart, the next loss with a batch is a first.

    The first loss with a batch never counts, because nothing is known about the time before it.
    """

    __slots__ = ("_elsewhere", "_seen")

    def __init__(self) -> None:
        #: Losses of trainers that held no suspect.
        self._elsewhere = 0
        #: (epoch, position, batch) -> ``_elsewhere`` at the last loss of a trainer that held this suspect.
        self._seen: dict[tuple[int, int, int], int] = {}

    def happened_elsewhere(self) -> None:
        """Count the loss of a trainer that held no suspect."""
        self._elsewhere += 1

    def counts(self, piece: BatchRange) -> bool:
        """True if the loss of a trainer that held this suspect batch counts against the batch."""
        place = piece.epoch, piece.position, piece.first_batch
        before, self._seen[place] = self._seen.get(place), self._elsewhere
        return before == self._elsewhere

    def forget(self, piece: BatchRange) -> None:
        """Forget a batch that is done or quarantined."""
        self._seen.pop((piece.epoch, piece.position, piece.first_batch), None)


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
