"""Rounds of a group: the records that each rank gets in each round.

Rules:

* In a round, every rank gets one batch. The rounds are a pure function of the tasks' sizes, the seed, the start
  position, the world size, the batch size and the ``remainder``, so ranks need not communicate about records.
* A rank gets complete tasks. The next task goes to the rank with the fewest records so far; in a tie, to the lowest
  rank. Because records are compared, not rounds, the assignment does not depend on the batch size.
* No rank may get more than its share, ``records // world_size``. The first task that would exceed a rank's share, and
  all later tasks, form the *tail* of the epoch.
* When ranks have finished their own tasks, they divide the tail among themselves: rank 0 gets the first records of the
  tail, rank 1 the next ones, and so on. If tasks have equal sizes, the tail has fewer than ``world_size`` tasks.
* A position describes the rest of an epoch: the partly read tasks, each with its first unread record, and the first
  unopened task. It does not depend on the world size or the batch size. A resumed epoch assigns the rest of its open
  tasks first, so there are never more open tasks than the epoch's largest world size plus one.

The *remainder* setting determines what happens to records that do not fill a round of full batches:

* ``split``: the last round is divided evenly among the ranks. If it has fewer records than there are ranks, records of
  the previous round are moved to it, so that every rank has a record in every round. This is impossible with a batch
  size of one; some batches of the last round then have two records. In an epoch with fewer records than ranks, some
  ranks get none.
* ``drop``: the last records are skipped if they are too few for a complete round.
* ``pad``: every batch is full; the last ones repeat records from the start of the epoch.

A plan needs 8 bytes of memory per task, for the task's size, and a few integers per rank.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from heapq import heapify, heapreplace
from typing import Annotated, Literal

import msgspec
import numpy as np

from flightedl.domain.queue.permutation import Integers, KeyedPermutation, key_of

Remainder = Literal["split", "drop", "pad"]
_Natural = Annotated[int, msgspec.Meta(ge=0)]
#: Number of positions in the shuffled order that are computed at a time.
_BLOCK = 1024


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive records of one task, numbered in the order in which the task's records are read."""

    task: int
    first_record: int
    end_record: int


class Position(msgspec.Struct, frozen=True, array_like=True):
    """A position in the data. It does not depend on the number of ranks."""

    epoch: _Natural = 0
    #: Number of records in the epoch before this position.
    records: _Natural = 0
    #: Index in the epoch's order of the first unopened task.
    unopened: _Natural = 0
    #: (index in the epoch's order, first unread record) of each partly read task, in ascending order.
    opened: tuple[tuple[_Natural, _Natural], ...] = ()


#: Position of a group that has not read any records.
BEGINNING = Position()


class Round(msgspec.Struct, frozen=True, tag="round"):
    """A rank's part of a round. The part may be empty if the epoch has fewer records than there are ranks."""

    epoch: int
    #: Number of the round within its epoch, counted from the start position of this plan.
    number: int
    #: Number of the epoch's records in all earlier rounds, summed over all ranks.
    records: int
    pieces: tuple[Piece, ...]

    @property
    def record_count(self) -> int:
        return sum(piece.end_record - piece.first_record for piece in self.pieces)


class EpochEnd(msgspec.Struct, frozen=True, tag="epoch_end"):
    """Summary of an epoch. It is the same on every rank."""

    epoch: int
    #: Number of distinct records that ranks have received, including those before the start position.
    records: int
    #: Number of rounds since the start position.
    rounds: int
    #: Number of records that no rank has received (with ``drop``).
    left_out: int
    #: Number of repeated records (``pad``).
    repeated: int
    #: Maximum number of records that all ranks together decode after the start position. Every rank decodes the tail.
    decoded: int


class RoundPlan:
    """Rounds of all epochs, for one rank.

    Args:
        sizes: Number of records of each task, (task count,) int64.
        epochs: Number of epochs, or None if it is unlimited.
        seed: Seed with which each epoch's tasks are shuffled; None for their original order.
        world_size: Number of ranks.
        rank: Rank, counted from 0.
        batch_size: Maximum number of records in a batch.
        remainder: Handling of the last records, see the module's rules.
        start: Position from which to start.
    """

    def __init__(
        self,
        sizes: Integers,
        *,
        epochs: int | None,
        seed: int | None,
        world_size: int,
        rank: int,
        batch_size: int,
        remainder: Remainder = "split",
        start: Position = BEGINNING,
    ) -> None:
        if not 0 <= rank < world_size or batch_size < 1:
            raise ValueError(f"there is no rank {rank} of {world_size} with batches of {batch_size} records")
        self._sizes = sizes
        self._epochs = math.inf if epochs is None else epochs
        self._seed = seed
        self._world_size = world_size
        self._rank = rank
        self._batch_size = batch_size
        self._remainder = remainder
        self._record_count = int(sizes.sum())
        self._start = start
        self._epoch = self._begun(start) if start.epoch < self._epochs else None

    def next(self) -> Round | EpochEnd | None:
        """Return this rank's next round, the summary after an epoch's last round, or None after the last epoch."""
        if self._epoch is None:
            return None
        number, shares = self._epoch.round, self._epoch.shares
        if number < shares.rounds:
            records = self._start.records + shares.before_all(number)
            return Round(self._start.epoch, number, records, tuple(self._epoch.next_round()))
        end, decoded, left_out = self._start.epoch, self._epoch.decoded, self._epoch.records - shares.given
        self._start = Position(end + 1)
        self._epoch = self._begun(self._start) if end + 1 < self._epochs else None
        return EpochEnd(
            epoch=end,
            records=self._record_count - left_out,
            rounds=shares.rounds,
            left_out=left_out,
            repeated=shares.repeated,
            decoded=decoded,
        )

    def position(self) -> Position:
        """Return the position after the latest round. After an epoch's last round, it is the next epoch's start."""
        if self._epoch is None or not self._epoch.round:
            return self._start
        if self._epoch.round == self._epoch.shares.rounds:
            return Position(self._start.epoch + 1)
        return self._epoch.position(self._start)

    def _begun(self, start: Position) -> _Epoch:
        order = _Order(len(self._sizes), self._seed, start.epoch)
        records = self._record_count - start.records
        shares = Shares(records, self._world_size, self._batch_size, self._remainder)
        return _Epoch(self._sizes, order, records, shares, self._rank, start)


class Shares:
    """Number of records that each rank gets in each round of an epoch with ``records`` records."""

    def __init__(self, records: int, world_size: int, batch_size: int, remainder: Remainder) -> None:
        full, rest = divmod(records, world_size * batch_size)
        self.world_size = world_size
        self.batch_size = batch_size
        # The last round has too few records, and none can be moved to it, because each batch has only one record.
        is_short = remainder == "split" and rest < world_size and full > 0
        self.rounds = full if is_short and batch_size == 1 else full + (rest > 0 and remainder != "drop")
        self._records = records
        self._drops = remainder == "drop"
        self._pads = remainder == "pad"
        #: The last two rounds share their records evenly.
        self._halves = is_short and batch_size > 1

    @property
    def given(self) -> int:
        return self.rounds * self.world_size * self.batch_size if self._drops else self._records

    @property
    def repeated(self) -> int:
        """Number of repeated records in the last round."""
        return self.rounds * self.world_size * self.batch_size - self._records if self._pads else 0

    def before(self, number: int, rank: int) -> int:
        """Return the number of distinct records that a rank gets in the rounds before ``number``."""
        plain = number * self.batch_size
        if self._drops or number < self.rounds - 1:
            return plain
        quota = self._records // self.world_size + (rank < self._records % self.world_size)
        if number == self.rounds:
            return quota
        if self._halves:
            earlier = plain - self.batch_size
            return earlier + -(-(quota - earlier) // 2)
        return plain

    def before_all(self, number: int) -> int:
        """Return the number of distinct records that all ranks together get in the rounds before ``number``."""
        if self._halves and number == self.rounds - 1:
            return sum(self.before(number, rank) for rank in range(self.world_size))
        return min(number * self.world_size * self.batch_size, self.given)


class _Epoch:
    def __init__(
        self, sizes: Integers, order: _Order, records: int, shares: Shares, rank: int, start: Position
    ) -> None:
        self._sizes = sizes
        self._order = order
        self.records = records
        self.shares = shares
        self.round = 0
        self._rank = rank
        self._line = _Line(sizes, order, start)
        world_size = shares.world_size
        #: Heap of (number of records in a rank's tasks since the start position, rank).
        self._ends = [(0, rank) for rank in range(world_size)]
        heapify(self._ends)
        #: For each rank: the index in the order and the size of its newest task, and the number of records in all its
        #: tasks.
        self._last = [(0, 0, 0)] * world_size
        #: The rank's unfinished tasks: (task, first record, number of the rank's records before the task and after it).
        self._own: deque[tuple[int, int, int, int]] = deque()
        self._in_tail = False
        self._assigned = 0

    @property
    def decoded(self) -> int:
        tail = self.records - self._assigned if self._in_tail else 0
        return self.records + (self.shares.world_size - 1) * tail

    def next_round(self) -> list[Piece]:
        number = self.round
        self._assign(number)
        self.round += 1
        pieces = [*self._own_pieces(number), *self._tail_pieces(number)]
        if number == self.shares.rounds - 1 and self.shares.repeated:
            pieces += self._repeated(number)
        return pieces

    def position(self, start: Position) -> Position:
        opened = self._line.opened
        for rank, (number, size, end) in enumerate(self._last):
            before = self.shares.before(self.round, rank)
            if end > before:
                opened.append((number, size - (end - before)))
        return Position(
            start.epoch, start.records + self.shares.before_all(self.round), self._line.unopened, tuple(sorted(opened))
        )

    def _assign(self, round_number: int) -> None:
        share = self.records // self.shares.world_size
        while not self._in_tail:
            end, rank = self._ends[0]
            if end >= self.shares.before(round_number + 1, rank) or (head := self._line.head()) is None:
                return
            number, task, first = head
            new_end = end + int(self._sizes[task]) - first
            if new_end > share:
                self._in_tail = True
                return
            self._line.pass_on()
            heapreplace(self._ends, (new_end, rank))
            self._assigned += new_end - end
            self._last[rank] = (number, int(self._sizes[task]), new_end)
            if rank == self._rank:
                self._own.append((task, first, end, new_end))

    def _own_pieces(self, number: int) -> Iterator[Piece]:
        start, end = (self.shares.before(each, self._rank) for each in (number, number + 1))
        while self._own:
            task, first, task_start, task_end = self._own[0]
            yield Piece(task, first + max(start - task_start, 0), first + min(end, task_end) - task_start)
            if task_end > end:
                return
            self._own.popleft()

    def _tail_pieces(self, number: int) -> list[Piece]:
        pieces: list[Piece] = []
        if self._in_tail:
            for rank, (_, _, end) in enumerate(self._last):
                start, stop = (self.shares.before(each, rank) for each in (number, number + 1))
                taken = self._line.take(max(stop - max(start, end), 0))
                if rank == self._rank:
                    pieces = taken
        return pieces

    def _repeated(self, number: int) -> list[Piece]:
        missing = [
            self.shares.batch_size - self.shares.before(number + 1, rank) + self.shares.before(number, rank)
            for rank in range(self._rank + 1)
        ]
        skipped, wanted = sum(missing[:-1]) % int(self._sizes.sum()), missing[-1]
        pieces: list[Piece] = []
        while wanted:
            line = _Line(self._sizes, self._order, BEGINNING)
            line.take(skipped)
            skipped = 0
            pieces += line.take(wanted)
            wanted = missing[-1] - sum(piece.end_record - piece.first_record for piece in pieces)
        return pieces


class _Order:
    def __init__(self, task_count: int, seed: int | None, epoch: int) -> None:
        self.task_count = task_count
        self._permutation = None if seed is None else KeyedPermutation(task_count, key_of(seed, epoch))
        self._block_start = 0
        self._block: list[int] = []

    def task(self, number: int) -> int:
        """Return the task at an index of the order. Consecutive indices are computed in blocks."""
        if self._permutation is None:
            return number
        if not 0 <= number - self._block_start < len(self._block):
            self._block_start = number
            places = np.arange(number, min(number + _BLOCK, self.task_count))
            self._block = self._permutation.elements_at(places).tolist()
        return self._block[number - self._block_start]


class _Line:
    """Records that are not assigned to a rank: the rest of the opened tasks, then all unopened tasks."""

    def __init__(self, sizes: Integers, order: _Order, position: Position) -> None:
        self._sizes = sizes
        self._order = order
        #: (index in the order, first record) of opened tasks, in reverse order.
        self._opened = list(reversed(position.opened))
        self.unopened = position.unopened

    @property
    def opened(self) -> list[tuple[int, int]]:
        return self._opened[::-1]

    def head(self) -> tuple[int, int, int] | None:
        """Return the next task as (index in the order, task, first record), or None if there are no more."""
        while not self._opened:
            if self.unopened >= self._order.task_count:
                return None
            if self._sizes[self._order.task(self.unopened)]:
                self._opened.append((self.unopened, 0))
            self.unopened += 1
        number, first = self._opened[-1]
        return number, self._order.task(number), first

    def pass_on(self) -> None:
        self._opened.pop()

    def take(self, count: int) -> list[Piece]:
        """Remove and return the first ``count`` records, or all of them if there are fewer."""
        pieces: list[Piece] = []
        while count and (head := self.head()) is not None:
            number, task, first = head
            end = min(first + count, int(self._sizes[task]))
            pieces.append(Piece(task, first, end))
            count -= end - first
            self.pass_on()
            if end < self._sizes[task]:
                self._opened.append((number, end))
        return pieces
