"""Search for the batches that make a piece fail.

A piece that has failed fewer than ``limit`` times is retried unchanged. After that it is *suspect* and is split at each
failure: around the failing batch if that batch is known, otherwise in halves. Finding one of n batches thus takes
log2(n) failures.

A single suspect batch is retried ``confirmations`` times, each time by a trainer that holds nothing else, and is then
quarantined. These retries are needed because a trainer's pieces also count as failed if the trainer dies for another
reason.

A failure that a trainer reports is blamed on the batch. The loss of a trainer (it died, its lease ended, or it exceeded
the timeout) is weaker evidence, because machines also disappear for other reasons.

A loss therefore counts against a single suspect batch only if no trainer without a suspect has been lost since the
previous loss with that batch. It takes twice as many losses as reported failures to quarantine a batch.
"""

from __future__ import annotations

from dataclasses import replace

from flightedl.domain.queue.values import BatchRange

#: Number of trainer losses that weigh as much as one reported failure.
LOSSES_PER_REPORT = 2


class Losses:
    """Counts losses of trainers, with and without suspect batches.

    The first loss with a batch never counts, because nothing is known about the time before it. Losses are not stored,
    so after a restart of the master the next loss with a batch counts as the first one.
    """

    __slots__ = ("_elsewhere", "_seen")

    def __init__(self) -> None:
        #: Number of losses of trainers that held no suspect batch.
        self._elsewhere = 0
        #: (epoch, position, batch) of a suspect -> ``_elsewhere`` at the latest loss of a trainer with that suspect.
        self._seen: dict[tuple[int, int, int], int] = {}

    def happened_elsewhere(self) -> None:
        self._elsewhere += 1

    def counts(self, piece: BatchRange) -> bool:
        """Record the loss of a trainer that held this suspect batch. True if the loss counts against the batch."""
        place = piece.epoch, piece.position, piece.first_batch
        before, self._seen[place] = self._seen.get(place), self._elsewhere
        return before == self._elsewhere

    def forget(self, piece: BatchRange) -> None:
        self._seen.pop((piece.epoch, piece.position, piece.first_batch), None)


def after_failure(piece: BatchRange, batch: int | None, limit: int, confirmations: int) -> tuple[BatchRange, ...]:
    """Return the pieces to retry instead of a failed piece; empty if the piece must be quarantined.

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
        # The batches before and after a failing batch are probably not at fault, so they are not suspect yet.
        stretches = [(first, batch, limit - 1), (batch, batch + 1, limit), (batch + 1, end, limit - 1)]
    return tuple(
        replace(piece, first_batch=start, end_batch=stop, failures=failures)
        for start, stop, failures in stretches
        if start < stop
    )
