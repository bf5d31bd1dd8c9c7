"""A trainer's backlog: the pieces of work that it holds, in the order in which it works on them.

Rules:

* Attempts rise along a backlog. The first piece *runs*; all others *wait* until those before them are reported.
* Whole tasks at positions that follow each other, with as many failures, given under attempts that follow each other,
  are one *row*: pieces that are given at once cost about 25 stored bytes, however many they are. A part of a task is a
  row of its own.
* Rows are as long as can be: they follow from the pieces, and equal backlogs have equal rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

from flightedl.domain.exactly_once.intervals import IntervalSet
from flightedl.domain.queue.values import BatchRange

#: [epoch, position, tasks, failures, attempt] of the first of them; for a part also [first batch, end batch], and the
#: ends of the stretches of it that are done. A whole task of which something is done is such a part, too.
Row = list[int]
_PART_LENGTH = 7


@dataclass(slots=True)
class Holder:
    """One trainer's hold of a piece."""

    trainer: str
    attempt: int
    generation: int = 0
    #: When it began to run, None: it waits, or its clock stands.
    since_s: float | None = None
    #: Time of the last sign that the trainer makes progress with it; of the start if there was none.
    progress_s: float | None = None
    #: False: it ran before ``since_s``, for an unknown time.
    is_timed: bool = True


@dataclass(slots=True, eq=False)
class Pending:
    """A piece that is out, with its one or two holders."""

    piece: BatchRange
    task: int
    holders: list[Holder] = field(default_factory=list)
    #: Its batches that are done, though the piece is not finished; only of data without a model.
    done: IntervalSet = field(default_factory=IntervalSet)

    def holder(self, attempt: int) -> Holder:
        return next(holder for holder in self.holders if holder.attempt == attempt)


class Backlog:
    """What one trainer holds."""

    __slots__ = ("generation", "pieces", "rows")

    def __init__(self, generation: int = 0) -> None:
        #: Of the registration that it was given to: whoever comes back under the same name holds nothing of it.
        self.generation = generation
        #: attempt -> piece, by rising attempt. Not to be changed from outside.
        self.pieces: dict[int, Pending] = {}
        #: All of ``pieces``, in their order.
        self.rows: list[Row] = []

    @property
    def first_attempt(self) -> int:
        """Of the piece that runs."""
        return next(iter(self.pieces))

    @property
    def number_count(self) -> int:
        """How many numbers are stored of it, but for done batches."""
        return sum(min(len(row), _PART_LENGTH) for row in self.rows)

    def waiting(self) -> Iterator[tuple[int, Pending]]:
        """(attempt, piece) of those that wait, the last one first."""
        return islice(reversed(self.pieces.items()), len(self.pieces) - 1)

    def append(self, attempt: int, pending: Pending) -> None:
        """One more, under the highest attempt so far."""
        self.pieces[attempt] = pending
        _add(self.rows, pending, attempt)

    def remove(self, attempt: int) -> None:
        is_first = attempt == self.first_attempt
        del self.pieces[attempt]
        if is_first:
            self._shorten()
        else:
            self.renew()

    def renew(self) -> None:
        self.rows = self.rows_anew()

    def rows_anew(self) -> list[Row]:
        """The rows that follow from the pieces."""
        rows: list[Row] = []
        for attempt, pending in self.pieces.items():
            _add(rows, pending, attempt)
        return rows

    def _shorten(self) -> None:
        row = self.rows[0]
        if row[2] == 1:
            del self.rows[0]
        else:
            row[1], row[2], row[4] = row[1] + 1, row[2] - 1, row[4] + 1


def _add(rows: list[Row], pending: Pending, attempt: int) -> None:
    """Make the last row longer, or begin another one."""
    piece = pending.piece
    if pending.done or not piece.is_whole:
        row = [piece.epoch, piece.position, 1, piece.failures, attempt, piece.first_batch, piece.end_batch]
        rows.append(row + [bound for stretch in pending.done for bound in stretch])
        return
    if rows and len(rows[-1]) == 5:
        epoch, position, count, failures, first_attempt = rows[-1]
        follows = (piece.epoch, piece.position, piece.failures, attempt)
        if follows == (epoch, position + count, failures, first_attempt + count):
            rows[-1][2] += 1
            return
    rows.append([piece.epoch, piece.position, 1, piece.failures, attempt])
