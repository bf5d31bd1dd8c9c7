"""Pieces of work in trainers' hands: who holds what, under which attempt, since when.

Rules:

* An attempt number belongs to one holder of one piece. A piece has one holder, or two when one of them got a copy.
* Attempts rise, and so do the instants at which they began: the oldest is the first in order.
* After a restart nobody knows how long a piece was out; ``since_s`` is None until ``start_clocks`` says when to begin.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from flightedl.domain.tasks_values import Piece

HOLDERS_LIMIT = 2


@dataclass(slots=True)
class Holder:
    """One trainer's hold of a piece."""

    trainer: str
    attempt: int
    since_s: float | None
    #: False: it was out before ``since_s``, by an unknown time.
    is_timed: bool = True


@dataclass(slots=True, eq=False)
class Pending:
    """A piece that is out, with its one or two holders."""

    piece: Piece
    task: int
    holders: list[Holder] = field(default_factory=list)


class PendingPieces:
    """All pieces that are out."""

    __slots__ = ("_by_attempt", "_by_place", "_by_trainer", "_epochs", "_single", "_unstarted")

    def __init__(self) -> None:
        #: attempt -> its piece, by rising attempt.
        self._by_attempt: dict[int, Pending] = {}
        #: trainer -> its attempts; never an empty one.
        self._by_trainer: dict[str, dict[int, Pending]] = {}
        #: (epoch, position) -> the pieces of that task that are out; never an empty one.
        self._by_place: dict[tuple[int, int], list[Pending]] = {}
        #: epoch -> how many pieces are out; never 0.
        self._epochs: dict[int, int] = {}
        #: All and only the pieces with one holder, about by age: first attempt -> piece.
        self._single: dict[int, Pending] = {}
        self._unstarted = False

    def __iter__(self) -> Iterator[Pending]:
        """Every piece once, by age."""
        for attempt, pending in self._by_attempt.items():
            if pending.holders[0].attempt == attempt:
                yield pending

    def __len__(self) -> int:
        return sum(self._epochs.values())

    @property
    def lowest_epoch(self) -> int | None:
        """The earliest epoch of which something is out."""
        return min(self._epochs, default=None)

    def is_open(self, epoch: int) -> bool:
        """Whether anything of ``epoch`` is out."""
        return epoch in self._epochs

    def at(self, epoch: int, position: int) -> list[Pending]:
        """What is out of one task."""
        return self._by_place.get((epoch, position), [])

    def places(self) -> list[tuple[int, int]]:
        """(epoch, position) of every task of which something is out."""
        return list(self._by_place)

    def trainers(self) -> list[str]:
        """Who holds anything."""
        return list(self._by_trainer)

    def find(self, attempt: int) -> Pending | None:
        """The piece that is out under ``attempt``."""
        return self._by_attempt.get(attempt)

    def held_by(self, trainer: str) -> dict[int, Pending]:
        """What a trainer holds, by attempt. Not to be changed."""
        return self._by_trainer.get(trainer, {})

    def hand_out(self, piece: Piece, task: int, holder: Holder) -> Pending:
        """A piece goes out to its first holder."""
        pending = Pending(piece, task)
        self._by_place.setdefault((piece.epoch, piece.position), []).append(pending)
        self._epochs[piece.epoch] = self._epochs.get(piece.epoch, 0) + 1
        self.add_holder(pending, holder)
        return pending

    def add_holder(self, pending: Pending, holder: Holder) -> None:
        """Another trainer gets the piece too."""
        pending.holders.append(holder)
        self._by_attempt[holder.attempt] = pending
        self._by_trainer.setdefault(holder.trainer, {})[holder.attempt] = pending
        self._note_single(pending)

    def drop_holder(self, pending: Pending, attempt: int, failed: bool) -> None:
        """One holder is gone; if it was the last one, so is the piece."""
        index = next(number for number, holder in enumerate(pending.holders) if holder.attempt == attempt)
        holder = pending.holders.pop(index)
        del self._by_attempt[attempt]
        self._single.pop(attempt, None)
        held = self._by_trainer[holder.trainer]
        del held[attempt]
        if not held:
            del self._by_trainer[holder.trainer]
        if failed:
            pending.piece = replace(pending.piece, failures=pending.piece.failures + 1)
        if pending.holders:
            self._note_single(pending)
            return
        place = (pending.piece.epoch, pending.piece.position)
        self._by_place[place].remove(pending)
        if not self._by_place[place]:
            del self._by_place[place]
        self._epochs[pending.piece.epoch] -= 1
        if not self._epochs[pending.piece.epoch]:
            del self._epochs[pending.piece.epoch]

    def close(self, pending: Pending) -> None:
        """The piece is not out any more, whoever holds it."""
        for holder in tuple(pending.holders):
            self.drop_holder(pending, holder.attempt, failed=False)

    def start_clocks(self, now: float) -> None:
        """Holds of unknown age count from ``now``."""
        if not self._unstarted:
            return
        for pending in self:
            for holder in pending.holders:
                if holder.since_s is None:
                    holder.since_s = now
        self._unstarted = False

    def restored(self) -> None:
        """Holds were added whose age is unknown."""
        self._unstarted = True

    def oldest_since(self) -> tuple[int, float] | None:
        """(attempt, since when it is out) of the longest hold."""
        for attempt, pending in self._by_attempt.items():
            since_s = next(holder.since_s for holder in pending.holders if holder.attempt == attempt)
            return None if since_s is None else (attempt, since_s)
        return None

    def copyable(self, epoch: int, failures_below: int) -> tuple[Pending, float] | None:
        """About the longest held piece of ``epoch`` with one holder, and since when it is out."""
        for pending in self._single.values():
            holder = pending.holders[0]
            is_meant = pending.piece.epoch == epoch and pending.piece.failures < failures_below
            if is_meant and holder.since_s is not None:
                return pending, holder.since_s
        return None

    def _note_single(self, pending: Pending) -> None:
        if len(pending.holders) == 1:
            self._single[pending.holders[0].attempt] = pending
        else:
            self._single.pop(pending.holders[0].attempt, None)

    def check(self) -> None:
        """Assert that all tables say the same."""
        attempts = [holder.attempt for pending in self for holder in pending.holders]
        assert sorted(attempts) == list(self._by_attempt), "attempts are by age and complete"
        assert sum(len(held) for held in self._by_trainer.values()) == len(attempts)
        assert all(self._by_trainer.values())
        for pending in self:
            trainers = [holder.trainer for holder in pending.holders]
            assert 1 <= len(trainers) <= HOLDERS_LIMIT
            assert len(set(trainers)) == len(trainers)
            assert all(self._by_trainer[holder.trainer][holder.attempt] is pending for holder in pending.holders)
            assert pending in self._by_place[(pending.piece.epoch, pending.piece.position)]
            assert (self._single.get(pending.holders[0].attempt) is pending) == (len(trainers) == 1)
        assert sum(map(len, self._by_place.values())) == len(self) == sum(1 for _ in self)
        assert len(self._single) == sum(len(pending.holders) == 1 for pending in self)
