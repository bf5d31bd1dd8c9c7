"""Assigned pieces: their holders, their attempt numbers, and the times at which they began to run.

Rules:

* An attempt number identifies one holder of one piece. A piece has a second holder if a copy of it was assigned.
* A holder is one *registration* of a trainer, identified by its name and generation. All pieces held under a name
  belong to the same registration.
* A trainer works on its pieces in the order of their attempts: the first piece of its backlog *runs*, the others
  *wait*. A piece begins to run, and its clock starts, when it is assigned to an idle trainer, or when the piece before
  it is reported or taken back.
* After a restart of the master, the clocks of running pieces are stopped until ``start_clocks``, and the durations of
  these pieces remain unknown.

A trainer may already have begun a waiting piece, while its report about the running piece is still in flight.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace

from flightedl.domain.exactly_once.intervals import IntervalSet
from flightedl.domain.queue.backlog import Backlog, Holder, Pending
from flightedl.domain.queue.values import BatchRange

HOLDERS_LIMIT = 2

_NOTHING = Backlog()


class PendingPieces:
    """All assigned pieces."""

    __slots__ = ("_backlogs", "_by_attempt", "_by_place", "_epochs", "_has_standing", "_running")

    def __init__(self) -> None:
        #: Attempt -> its piece, in increasing order of attempts.
        self._by_attempt: dict[int, Pending] = {}
        #: Trainer -> its backlog, which is never empty.
        self._backlogs: dict[str, Backlog] = {}
        #: (epoch, position) -> the assigned pieces of that task, at least one.
        self._by_place: dict[tuple[int, int], list[Pending]] = {}
        #: Epoch -> number of assigned pieces, at least 1.
        self._epochs: dict[int, int] = {}
        #: Attempt -> holder, ordered by start time, for exactly those pieces whose clock is running.
        self._running: dict[int, Holder] = {}
        #: True if the clock of some running piece is stopped.
        self._has_standing = False

    def __iter__(self) -> Iterator[Pending]:
        for attempt, pending in self._by_attempt.items():
            if pending.holders[0].attempt == attempt:
                yield pending

    def __len__(self) -> int:
        return sum(self._epochs.values())

    @property
    def epochs(self) -> Collection[int]:
        return self._epochs.keys()

    @property
    def lowest_epoch(self) -> int | None:
        return min(self._epochs, default=None)

    @property
    def trainer_count(self) -> int:
        return len(self._backlogs)

    def is_open(self, epoch: int) -> bool:
        return epoch in self._epochs

    def at(self, epoch: int, position: int) -> list[Pending]:
        return self._by_place.get((epoch, position), [])

    def places(self) -> list[tuple[int, int]]:
        return list(self._by_place)

    def backlogs(self) -> dict[str, Backlog]:
        return self._backlogs

    def find(self, attempt: int) -> Pending | None:
        return self._by_attempt.get(attempt)

    def backlog_of(self, trainer: str) -> Backlog:
        return self._backlogs.get(trainer, _NOTHING)

    def held_by(self, trainer: str) -> dict[int, Pending]:
        return self.backlog_of(trainer).pieces

    def is_holder(self, trainer: str, generation: int, attempt: int) -> bool:
        backlog = self.backlog_of(trainer)
        return attempt in backlog.pieces and backlog.generation == generation

    def hand_out(
        self, piece: BatchRange, task: int, holder: Holder, now: float | None, done: Iterable[tuple[int, int]] = ()
    ) -> Pending:
        """Assign a piece to its first holder. ``now`` is None if the piece was assigned earlier, at an unknown time."""
        pending = Pending(piece, task, done=IntervalSet(done))
        self._by_place.setdefault((piece.epoch, piece.position), []).append(pending)
        self._epochs[piece.epoch] = self._epochs.get(piece.epoch, 0) + 1
        self.add_holder(pending, holder, now)
        return pending

    def add_holder(self, pending: Pending, holder: Holder, now: float | None) -> None:
        pending.holders.append(holder)
        self._by_attempt[holder.attempt] = pending
        backlog = self._backlogs.setdefault(holder.trainer, Backlog(holder.generation))
        assert backlog.generation == holder.generation, "pieces of an earlier registration are taken back first"
        backlog.append(holder.attempt, pending)
        if len(backlog.pieces) > 1:
            return
        if now is None:
            self._has_standing = True
        else:
            self._start(holder, now, is_timed=True)

    def set_done(self, pending: Pending, done: IntervalSet) -> None:
        pending.done = done
        for holder in pending.holders:
            self._backlogs[holder.trainer].renew()

    def drop_holder(self, pending: Pending, attempt: int, now: float, *, failed: bool) -> None:
        """Remove a holder, which then begins its next piece. A piece without holders is removed as well."""
        holder = pending.holder(attempt)
        pending.holders.remove(holder)
        del self._by_attempt[attempt]
        self._running.pop(attempt, None)
        backlog = self._backlogs[holder.trainer]
        is_first = attempt == backlog.first_attempt
        backlog.remove(attempt)
        if not backlog.pieces:
            del self._backlogs[holder.trainer]
        elif is_first:
            self._start(backlog.pieces[backlog.first_attempt].holder(backlog.first_attempt), now, is_timed=True)
        if failed:
            pending.piece = replace(pending.piece, failures=pending.piece.failures + 1)
        if pending.holders:
            # The rows must be rebuilt, because they contain the number of failures.
            self._backlogs[pending.holders[0].trainer].renew()
            return
        place = (pending.piece.epoch, pending.piece.position)
        self._by_place[place].remove(pending)
        if not self._by_place[place]:
            del self._by_place[place]
        self._epochs[pending.piece.epoch] -= 1
        if not self._epochs[pending.piece.epoch]:
            del self._epochs[pending.piece.epoch]

    def close(self, pending: Pending, now: float) -> None:
        for holder in tuple(pending.holders):
            self.drop_holder(pending, holder.attempt, now, failed=False)

    def start_clocks(self, now: float) -> None:
        if not self._has_standing:
            return
        for backlog in self._backlogs.values():
            attempt = backlog.first_attempt
            if attempt not in self._running:
                self._start(backlog.pieces[attempt].holder(attempt), now, is_timed=False)
        self._has_standing = False

    def progressed(self, trainer: str, now: float) -> None:
        """Record that a trainer has finished a batch of its running piece. Does nothing if it has no running piece."""
        if (backlog := self._backlogs.get(trainer)) is not None:
            backlog.pieces[backlog.first_attempt].holder(backlog.first_attempt).progress_s = now

    def _start(self, holder: Holder, now: float, *, is_timed: bool) -> None:
        holder.since_s, holder.progress_s, holder.is_timed = now, now, is_timed
        self._running[holder.attempt] = holder

    def running(self) -> Iterator[tuple[Holder, Pending]]:
        """Yield all running pieces whose clock is running, starting with the earliest."""
        for attempt, holder in self._running.items():
            yield holder, self._by_attempt[attempt]

    def copyable_waiting(self, epoch: int, failures_below: int) -> Pending | None:
        """Return the last copyable waiting piece of the longest backlog, or None."""
        found: Pending | None = None
        longest = 1
        for backlog in self._backlogs.values():
            if len(backlog.pieces) > longest:
                wanted = (each for _, each in backlog.waiting() if _is_copyable(each, epoch, failures_below))
                if (last := next(wanted, None)) is not None:
                    found, longest = last, len(backlog.pieces)
        return found

    def copyable_running(self, epoch: int, failures_below: int) -> tuple[Pending, float] | None:
        """Return the copyable piece that has been running longest, with its start time, or None."""
        for attempt, holder in self._running.items():
            pending = self._by_attempt[attempt]
            if _is_copyable(pending, epoch, failures_below) and holder.since_s is not None:
                return pending, holder.since_s
        return None

    def check(self) -> None:
        attempts = [holder.attempt for pending in self for holder in pending.holders]
        assert sorted(attempts) == list(self._by_attempt), "attempts are complete and in order"
        assert sum(len(backlog.pieces) for backlog in self._backlogs.values()) == len(attempts)
        for backlog in self._backlogs.values():
            assert backlog.pieces
            assert sorted(backlog.pieces) == list(backlog.pieces), "a backlog is in the order of its attempts"
            assert backlog.rows == backlog.computed_rows()
            held = [pending.holder(attempt) for attempt, pending in backlog.pieces.items()]
            assert {holder.generation for holder in held} == {backlog.generation}
        for pending in self:
            trainers = [holder.trainer for holder in pending.holders]
            assert 1 <= len(trainers) <= HOLDERS_LIMIT
            assert len(set(trainers)) == len(trainers)
            assert all(self._backlogs[holder.trainer].pieces[holder.attempt] is pending for holder in pending.holders)
            assert pending in self._by_place[(pending.piece.epoch, pending.piece.position)]
            piece = pending.piece
            assert pending.done.within(piece.first_batch, piece.end_batch) == pending.done, "done batches are its own"
            assert len(pending.holders) == 1 or not pending.done
            for holder in pending.holders:
                runs = self._backlogs[holder.trainer].first_attempt == holder.attempt
                assert runs or holder.since_s is None, "the clock of a waiting piece is stopped"
                assert self._has_standing or runs == (holder.since_s is not None)
                assert (self._running.get(holder.attempt) is holder) == (holder.since_s is not None)
        assert self._running.keys() <= self._by_attempt.keys()
        assert sum(map(len, self._by_place.values())) == len(self) == sum(1 for _ in self)


def _is_copyable(pending: Pending, epoch: int, failures_below: int) -> bool:
    return len(pending.holders) == 1 and pending.piece.epoch == epoch and pending.piece.failures < failures_below
