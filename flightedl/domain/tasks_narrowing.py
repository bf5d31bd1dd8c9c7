"""Narrows a failing piece of work down to the batches that are at fault.

A failing piece goes back as it is until it failed ``limit`` times. From then on it is *suspect*: each failure splits
it, around the failing batch if that is known, else in halves, so n batches are narrowed in log2(n) failures. A
single suspect batch gets some more chances, each with a trainer that holds nothing else, and is then quarantined.

How many depends on how it fails. A failure that its trainer *reports* is the batch's own: ``confirmations`` of them
convict. A *loss* of the trainer that held it (it died, its lease ended, it took too long) may have any reason, and
where machines are taken away it has others. So a loss counts only if nobody who held no suspect was lost since the one
before it at that batch. Twice as many losses convict as reports, and more than twice the failures that any other piece
had which was done after all.

Not guaranteed: that no sound batch is set aside. Where every second piece of one batch is lost with its trainer, one of
about 2,000 is; where every third is, none of 2,000 was.
"""

from __future__ import annotations

from dataclasses import replace

from flightedl.domain.tasks_values import Piece

#: So many losses weigh as much as one reported failure, or as one that another piece survived.
_LOSSES_FOR_ONE = 2


class Losses:
    """What losses of trainers say of the single suspect batches that they held.

    Not stored: after a restart the next loss at a batch only begins the count again.
    """

    __slots__ = ("_elsewhere", "_seen", "_survived")

    def __init__(self) -> None:
        #: Losses of trainers that held no suspect.
        self._elsewhere = 0
        #: (epoch, position, batch) -> ``_elsewhere`` at the last loss of a trainer that held this suspect.
        self._seen: dict[tuple[int, int, int], int] = {}
        #: The most failures of a piece that was done after all.
        self._survived = 0

    def happened_elsewhere(self) -> None:
        """A trainer without suspects was lost."""
        self._elsewhere += 1

    def speaks_against(self, piece: Piece) -> bool:
        """A trainer was lost with this suspect batch: whether it counts, because nobody else was since the last one."""
        place = _place(piece)
        before, self._seen[place] = self._seen.get(place), self._elsewhere
        return before == self._elsewhere

    def confirmations(self, limit: int, reports: int) -> int:
        """How many losses over the limit convict a batch that so many reported failures would convict."""
        return max(_LOSSES_FOR_ONE * reports, _LOSSES_FOR_ONE * self._survived + 1 - limit)

    def done(self, piece: Piece) -> None:
        """The piece is done, however often it failed."""
        self._survived = max(self._survived, piece.failures)
        self.forget(piece)

    def forget(self, piece: Piece) -> None:
        """The piece is quarantined."""
        self._seen.pop(_place(piece), None)


def _place(piece: Piece) -> tuple[int, int, int]:
    return piece.epoch, piece.position, piece.first_batch


def after_failure(piece: Piece, batch: int | None, limit: int, confirmations: int) -> tuple[Piece, ...]:
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
