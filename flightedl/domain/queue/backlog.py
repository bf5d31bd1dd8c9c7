"""A trainer's backlog: the pieces that it holds, in the order in which it works on them.

Rules:

* Attempt numbers increase along a backlog. The first piece *runs*; the others *wait* until all pieces before them have
  been reported.
* Complete tasks form one *row* if their positions and attempts are consecutive and they have failed equally often.
  Pieces that were assigned together therefore take up about 25 bytes in storage, however many there are. A part of a
  task is a separate row.
* Rows are as long as possible, so equal backlogs are stored as equal rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

from flightedl.domain.exactly_once.intervals import IntervalSet
from flightedl.domain.queue.values import BatchRange

#: [epoch, first position, number of tasks, failures, first attempt]. If the row is a part of a task, or a task of which
#: some batches are done, it also has [first batch, end batch, first done batch, end of done batches, …].
Row = list[int]
_PART_LENGTH = 7


@dataclass(slots=True)
class Holder:
    """A trainer that holds an assigned piece."""

    trainer: str
    attempt: int
    generation: int = 0
    #: Time at which the piece began to run; None if it waits or its clock has stopped.
    since_s: float | None = None
    #: Time of the last known progress, or the start time if there has been no progress.
    progress_s: float | None = None
    #: False if the piece had already been running for an unknown time at ``since_s``.
    is_timed: bool = True


@dataclass(slots=True, eq=False)
class Pending:
    """An assigned piece and its one or two holders."""

    piece: BatchRange
    task: int
    holders: list[Holder] = field(default_factory=list)
    #: Batches of the unfinished piece that are done. Used only for data without a model.
    done: IntervalSet = field(default_factory=IntervalSet)

    def holder(self, attempt: int) -> Holder:
        return next(holder for holder in self.holders if holder.attempt == attempt)


class Backlog:
    """The pieces of one trainer."""

    __slots__ = ("generation", "pieces", "rows")

    def __init__(self, generation: int = 0) -> None:
        #: Generation of the registration that holds the pieces. Later registrations under the same name do not hold
        #: these pieces.
        self.generation = generation
        #: Attempt -> piece, in increasing order of attempts. Other classes must not change this dict.
        self.pieces: dict[int, Pending] = {}
        #: ``pieces`` in compact form and in the same order.
        self.rows: list[Row] = []

    @property
    def first_attempt(self) -> int:
        return next(iter(self.pieces))

    @property
    def number_count(self) -> int:
        return sum(min(len(row), _PART_LENGTH) for row in self.rows)

    def waiting(self) -> Iterator[tuple[int, Pending]]:
        return islice(reversed(self.pieces.items()), len(self.pieces) - 1)

    def append(self, attempt: int, pending: Pending) -> None:
        """Append a piece. Its attempt number must be above all others."""
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
        self.rows = self.computed_rows()

    def computed_rows(self) -> list[Row]:
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
    piece = pending.piece
    if pending.done or not piece.is_complete_task:
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
