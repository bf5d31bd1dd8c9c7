"""Search for the batches that cause a piece to fail.

A piece that has failed fewer than ``limit`` times is retried unchanged. After that it is *suspect* and is split at each
failure: around the failing batch if that batch is known, otherwise in halves, so that finding one of n batches takes
log2(n) failures. A single suspect batch is retried ``confirmations`` times, each time by a trainer that holds nothing
else, and is then quarantined. The confirmations are needed because the pieces of a trainer that dies for another reason
also count as failed.

A failure reported by the trainer is attributed to the batch. The loss of a trainer (it died, its lease ended, or it
exceeded the timeout) is weaker evidence, because machines are also removed for other reasons. A loss counts against a
single suspect batch only if no trainer without a suspect has been lost since the previous loss with that batch. It
takes twice as many losses as reported failures to quarantine a batch.
"""

from __future__ import annotations

from dataclasses import replace

from flightedl.domain.queue.values import BatchRange

#: Number of lost trainers that count as one reported failure.
LOSSES_PER_REPORT = 2


class Losses:
    """Counts losses of trainers with and without suspects.

    The first loss with a batch never counts, because nothing is known about the time before it. Losses are not stored,
    so after a restart of the master the next loss with a batch is treated as its first.
    """

    __slots__ = ("_elsewhere", "_seen")

    def __init__(self) -> None:
        #: Number of losses of trainers that held no suspect.
        self._elsewhere = 0
        #: (epoch, position, batch) -> value of ``_elsewhere`` when a trainer that held this suspect was last lost.
        self._seen: dict[tuple[int, int, int], int] = {}

    def happened_elsewhere(self) -> None:
        self._elsewhere += 1

    def counts(self, piece: BatchRange) -> bool:
        """True if the loss of a trainer that held this suspect batch counts against the batch."""
        place = piece.epoch, piece.position, piece.first_batch
        before, self._seen[place] = self._seen.get(place), self._elsewhere
        return before == self._elsewhere

    def forget(self, piece: BatchRange) -> None:
        self._seen.pop((piece.epoch, piece.position, piece.first_batch), None)


def after_failure(piece: BatchRange, batch: int | None, limit: int, confirmations: int) -> tuple[BatchRange, ...]:
    """Return the pieces to retry after a piece has failed; empty if it must be quarantined.

    Args:
        piece: The failed piece; its failures include this one.
        batch: Number of the batch, within the task, at which it failed; None if unknown.
        limit: Number of failures after which the piece is split.
        confirmations: Number of failures above the limit at which a single batch is quarantined.
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
        # The batches around a known failing batch are probably not at fault, so they are not suspects yet.
        stretches = [(first, batch, limit - 1), (batch, batch + 1, limit), (batch + 1, end, limit - 1)]
    return tuple(
        replace(piece, first_batch=start, end_batch=stop, failures=failures)
        for start, stop, failures in stretches
        if start < stop
    )
