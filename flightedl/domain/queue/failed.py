"""Quarantined batches. They are not retried automatically.

Rules:

* A quarantined batch is in ``failed``, or in ``dropped`` if a user has dropped it. Both contain ranges of batches per
  task, so a task in which all batches failed is a single entry.
* The trainer and the error are kept for the newest ``DETAILS_LIMIT`` pieces, with the error cut to ``ERROR_LIMIT``
  characters. For older pieces only the ranges are kept. The master logs each piece when it quarantines it.
* If there are more than ``limit`` ranges, the oldest range of an earlier epoch is forgotten: its batches are then
  treated as done. The table keeps only the number of forgotten ranges.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from flightedl.domain.exactly_once.intervals import IntervalSet
from flightedl.domain.queue.values import FailedPiece

DETAILS_LIMIT = 100
ERROR_LIMIT = 200

#: (epoch, position)
Place = tuple[int, int]
#: (epoch, position, first batch, end batch, first batch, end batch, …)
Row = list[int]


def shortened(error: str) -> str:
    """Return an error's message, cut to the limit and without invalid characters."""
    text = error.encode("utf-8", "replace").decode()
    return text if len(text) <= ERROR_LIMIT else text[: ERROR_LIMIT - 1] + "…"


class BatchTable:
    """Ranges of batches by task."""

    __slots__ = ("_batches", "_interval_counts", "batch_count", "interval_count")

    def __init__(self) -> None:
        self._batches: dict[Place, IntervalSet] = {}
        #: Epoch -> number of ranges.
        self._interval_counts: dict[int, int] = {}
        self.interval_count = 0
        self.batch_count = 0

    def __iter__(self) -> Iterator[tuple[Place, IntervalSet]]:
        return iter(self._batches.items())

    def at(self, place: Place) -> IntervalSet:
        return self._batches.get(place, IntervalSet())

    def places(self) -> list[Place]:
        return list(self._batches)

    def epochs(self) -> list[int]:
        return list(self._interval_counts)

    def in_epoch(self, epoch: int) -> int:
        return self._interval_counts.get(epoch, 0)

    def add(self, place: Place, first: int, end: int) -> None:
        batches = self._batches.setdefault(place, IntervalSet())
        before = batches.interval_count
        self.batch_count += batches.add(first, end)
        self._count(place, batches.interval_count - before)

    def remove(self, place: Place, first: int, end: int) -> int:
        if (batches := self._batches.get(place)) is None:
            return 0
        before = batches.interval_count
        removed = batches.remove(first, end)
        self.batch_count -= removed
        self._count(place, batches.interval_count - before)
        if not batches:
            del self._batches[place]
        return removed

    def forget_first_before(self, epoch: int) -> bool:
        place = next((place for place in self._batches if place[0] < epoch), None)
        if place is None:
            return False
        batches = self._batches.pop(place)
        self.batch_count -= batches.size
        self._count(place, -batches.interval_count)
        return True

    def _count(self, place: Place, change: int) -> None:
        self.interval_count += change
        self._interval_counts[place[0]] = self._interval_counts.get(place[0], 0) + change
        if not self._interval_counts[place[0]]:
            del self._interval_counts[place[0]]

    @property
    def rows(self) -> list[Row]:
        return [[*place, *(number for stretch in batches for number in stretch)] for place, batches in self]

    @classmethod
    def from_rows(cls, rows: list[Row]) -> BatchTable:
        table = cls()
        for epoch, position, *numbers in rows:
            for first, end in zip(numbers[::2], numbers[1::2], strict=True):
                table.add((epoch, position), first, end)
        return table


class FailedPieces:
    """All quarantined batches."""

    __slots__ = ("details", "dropped", "encoded", "failed", "forgotten", "limit", "serial")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.failed = BatchTable()
        self.dropped = BatchTable()
        #: The newest pieces, oldest first.
        self.details: list[FailedPiece] = []
        #: Number of forgotten entries.
        self.forgotten = 0
        #: Incremented by every change.
        self.serial = 0
        #: Cache of the encoded table, as (serial, bytes). Most events do not change the table.
        self.encoded: tuple[int, bytes] | None = None

    def at(self, place: Place) -> tuple[IntervalSet, IntervalSet]:
        return self.failed.at(place), self.dropped.at(place)

    def quarantine(self, piece: FailedPiece) -> None:
        self.serial += 1
        self.failed.add((piece.epoch, piece.position), piece.first_batch, piece.end_batch)
        self.details.append(piece)
        del self.details[:-DETAILS_LIMIT]
        for table in (self.failed, self.dropped):
            while table.interval_count > self.limit and table.forget_first_before(piece.epoch):
                self.forgotten += 1
        self._forget_details()

    def forget_before(self, epoch: int) -> None:
        for table in (self.failed, self.dropped):
            while table.forget_first_before(epoch):
                self.forgotten += 1
                self.serial += 1
        self._forget_details()

    def _forget_details(self) -> None:
        self.details = [piece for piece in self.details if self.failed.at((piece.epoch, piece.position))]

    def select(self, is_selected: Callable[[Place], bool], batch: int | None) -> list[tuple[Place, int, int]]:
        """Return failed ranges of some tasks, or only ``batch`` if given, as (place, first batch, end batch)."""
        found: list[tuple[Place, int, int]] = []
        for place, batches in self.failed:
            if is_selected(place):
                if batch is None:
                    found += [(place, first, end) for first, end in batches]
                elif batch in batches:
                    found.append((place, batch, batch + 1))
        return found

    def release(self, place: Place, first: int, end: int) -> None:
        self.serial += 1
        self.failed.remove(place, first, end)
        self.details = [
            piece
            for piece in self.details
            if (piece.epoch, piece.position) != place or piece.first_batch >= end or piece.end_batch <= first
        ]

    def drop(self, place: Place, first: int, end: int) -> None:
        self.release(place, first, end)
        self.dropped.add(place, first, end)
