"""Rounds of a group: the records that each rank gets in each round.

An epoch's records have numbers 0 to T - 1. Number i is record i div K of *lane* i mod K (see ``lanes``), so all lanes
are read at the same rate, and a position is the number of records before it.

Rules:

* In a round, every rank gets one batch. All these batches together form a *global batch* of B consecutive numbers. It
  depends on T, K, B, ``remainder`` and the start position, but not on the number of ranks.
* A global batch is ordered by lane, and each rank gets a section of it. Rank r of W gets the records at places
  ceil(r B / W) to ceil((r + 1) B / W), so it always reads the same lanes. In a smaller batch, each lane is divided at
  the same fractions of its records. If there are more ranks than lanes, or if the lanes do not divide B because the
  batch size has changed within the epoch, the batch itself is divided at these fractions.
* K is constant in an epoch, also if the epoch is resumed with another B.

The *remainder* determines what happens to the last T mod B records:

* ``split``: they form a smaller global batch. If they are fewer than K or B / 2, and there is a batch before them, the
  two batches share their records evenly. So no rank's batch is empty, unless B is less than 2 W, or the epoch has fewer
  records than ranks.
* ``drop``: they are left out.
* ``pad``: each rank repeats the last records of its lanes until it has ceil(B / W).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Annotated, Literal

import msgspec

Remainder = Literal["split", "drop", "pad"]
_Natural = Annotated[int, msgspec.Meta(ge=0)]


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive records of one lane, numbered in the order in which they are read."""

    lane: int
    first_record: int
    end_record: int


class Order(msgspec.Struct, frozen=True, array_like=True):
    """Settings of an epoch's order, apart from the data and the seed. See ``lanes``."""

    lanes: _Natural = 0
    #: Number of records of a lane that are shuffled together; 0 if records are not shuffled.
    window: _Natural = 0


class Position(msgspec.Struct, frozen=True, array_like=True):
    """A position in the data. It does not depend on the number of ranks."""

    epoch: _Natural = 0
    #: Number of records in the epoch before this position.
    records: _Natural = 0
    #: Order of this epoch; 0 lanes at the beginning of an epoch, whose order follows from the batch size.
    order: Order = Order()


#: Position of a group that has not read any records.
BEGINNING = Position()


class Round(msgspec.Struct, frozen=True, tag="round"):
    """A rank's part of a round. The part may be empty if the epoch has fewer records than there are ranks."""

    epoch: int
    #: Number of the round within its epoch, counted from the start position of this plan.
    number: int
    #: Number of the epoch's records in all earlier rounds, and in all rounds up to this one, summed over all ranks.
    records: int
    end: int
    order: Order
    pieces: tuple[Piece, ...]

    @property
    def record_count(self) -> int:
        return sum(piece.end_record - piece.first_record for piece in self.pieces)


class EpochEnd(msgspec.Struct, frozen=True, tag="epoch_end"):
    """Summary of an epoch."""

    epoch: int
    #: Number of distinct records that ranks have received, including those before the start position.
    records: int
    #: Number of rounds since the start position.
    rounds: int
    #: Number of records that no rank has received (with ``drop``).
    left_out: int
    #: Number of repeated records (``pad``).
    repeated: int
    #: Number of records that no rank has received because they killed ranks in earlier starts.
    lost_records: int = 0
    #: About how many chunks the records of a global batch came from.
    mixed_chunks: int = 0
    #: Most bytes of decoded records that this rank has held since its start, and number of records that it has decoded.
    held_bytes: int = 0
    decoded_records: int = 0


class RoundPlan:
    """Rounds of all epochs, for one rank.

    Args:
        record_count: Returns the number of records in an epoch with a number of lanes.
        epochs: Number of epochs, or None if it is unlimited.
        order: Order of an epoch that begins.
        world_size: Number of ranks.
        rank: Rank, counted from 0.
        batch_size: Number of records in a global batch; at least ``world_size``.
        remainder: Handling of the last records, see the module's rules.
        start: Position from which to start.
    """

    def __init__(
        self,
        record_count: Callable[[int], int],
        *,
        epochs: int | None,
        order: Order,
        world_size: int,
        rank: int,
        batch_size: int,
        remainder: Remainder = "split",
        start: Position = BEGINNING,
    ) -> None:
        if not 0 <= rank < world_size <= batch_size:
            raise ValueError(f"there is no rank {rank} of {world_size} with global batches of {batch_size} records")
        self._record_count = record_count
        self._epochs = math.inf if epochs is None else epochs
        self._order = order
        self._world_size = world_size
        self._rank = rank
        self._batch_size = batch_size
        self._remainder = remainder
        self._begin(start)

    def _begin(self, start: Position) -> None:
        self._start = start
        self._next = 0
        self._current = start.order if start.records else self._order
        self._total = self._record_count(self._current.lanes) if start.epoch < self._epochs else 0
        full, self._rest = divmod(max(self._total - start.records, 0), self._batch_size)
        is_short = self._rest < max(self._current.lanes, self._batch_size / 2)
        #: True if the last two batches share their records.
        self._shares = self._remainder == "split" and self._rest > 0 and is_short and full > 0
        self._rounds = full + (self._rest > 0 and self._remainder != "drop")
        # Lanes that do not begin together, or that do not divide the batch, give it different numbers of records.
        self._divides = start.records % self._current.lanes == 0 == self._batch_size % self._current.lanes
        self._by_lane = self._divides and self._world_size <= self._current.lanes
        #: Pieces of the first round, which full batches repeat in all lanes at once; empty if not computed yet.
        self._first: tuple[Piece, ...] = ()

    def next(self) -> Round | EpochEnd | None:
        """Return this rank's next round, the summary after an epoch's last round, or None after the last epoch."""
        start, number = self._start, self._next
        if start.epoch >= self._epochs:
            return None
        if number < self._rounds:
            self._next += 1
            first, end = self._before(number), self._before(number + 1)
            if self._divides and end - first == self._batch_size:
                self._first = self._first or tuple(self._pieces(start.records, start.records + self._batch_size))
                shift = number * (self._batch_size // self._current.lanes)
                pieces = tuple(Piece(p.lane, p.first_record + shift, p.end_record + shift) for p in self._first)
            else:
                pieces = tuple(self._pieces(first, end))
            return Round(start.epoch, number, first, end, self._current, pieces)
        left_out = self._total - self._before(number)
        is_padded = self._remainder == "pad" and self._rest
        repeated = -(-self._batch_size // self._world_size) * self._world_size - self._rest if is_padded else 0
        summary = EpochEnd(start.epoch, self._total - left_out, number, left_out, repeated)
        self._begin(Position(start.epoch + 1))
        return summary

    def count(self) -> None:
        """Pass the next round, of which there must be one, without computing its records."""
        while self._next == self._rounds:
            self._begin(Position(self._start.epoch + 1))
        self._next += 1

    def position(self) -> Position:
        """Return the position after the latest round. After an epoch's last round, it is the next epoch's start."""
        if not self._next:
            return self._start
        if self._next == self._rounds:
            return Position(self._start.epoch + 1)
        return Position(self._start.epoch, self._before(self._next), self._current)

    def _before(self, number: int) -> int:
        """Return the number of the epoch's records before a round."""
        plain = self._start.records + number * self._batch_size
        if self._shares and number == self._rounds - 1:
            return plain - self._batch_size + -(-(self._batch_size + self._rest) // 2)
        return min(plain, self._total)

    def _pieces(self, first: int, end: int) -> Iterator[Piece]:
        lanes, size, rank = self._current.lanes, self._world_size, self._rank
        # In a full batch, all lanes with records of this rank. Only these may have some of a smaller batch, too.
        own = range(rank * lanes // size, -(-(rank + 1) * lanes // size)) if self._by_lane else range(lanes)
        starts = [-((lane - first) // lanes) for lane in own]
        counts = [-((lane - end) // lanes) - start for lane, start in zip(own, starts, strict=True)]
        passed, taken = 0, 0
        for lane, start, count in zip(own, starts, counts, strict=True):
            # Places are those of a batch to which every lane gives as many records as this one, or of the batch itself.
            before, total = (lane * count, lanes * count) if self._by_lane else (passed, end - first)
            bounds = (min(max(-(-part * total // size) - before, 0), count) for part in (rank, rank + 1))
            low, high = bounds
            passed += count
            taken += high - low
            if low < high:
                yield Piece(lane, start + low, start + high)
        if self._remainder == "pad" and end - first < self._batch_size:
            yield from self._repeated(-(-self._batch_size // size) - taken)

    def _repeated(self, missing: int) -> Iterator[Piece]:
        lanes = self._current.lanes
        lane = first = self._rank * lanes // self._world_size
        while missing > 0:
            size = -((lane - self._total) // lanes)
            count = min(missing, size)
            yield Piece(lane, size - count, size)
            missing -= count
            lane = lane + 1 if lane + 1 < -(-(self._rank + 1) * lanes // self._world_size) else first
