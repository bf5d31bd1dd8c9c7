"""Pieces that have been assigned before and wait to be assigned again.

Rules:

* Complete tasks are stored as *runs* of positions with their number of failures, so a million reopened tasks can be a
  single entry. Parts of tasks and pieces that have failed often are stored individually.
* A piece that has failed at least ``attempts_limit`` times is *suspect*. The caller assigns suspects only to trainers
  that hold nothing else, so that the next failure must be due to the suspect. All other pieces are *ready* for any
  trainer.
* Earlier epochs are served first, and within an epoch lower positions first. Thus a split task is finished before the
  next one begins, and only a few pieces wait at any time.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Collection, Iterator

from flightedl.domain.exactly_once.intervals import IntervalSet
from flightedl.domain.queue.values import BatchRange


class Runs:
    """Disjoint half-open runs of positions, each with a number of failures. Adjacent equal runs are merged."""

    __slots__ = ("_ends", "_failures", "_starts", "size")

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._failures: list[int] = []
        #: Number of positions in all runs together.
        self.size = 0

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        return zip(self._starts, self._ends, self._failures, strict=True)

    def __contains__(self, position: int) -> bool:
        index = bisect_right(self._starts, position) - 1
        return index >= 0 and position < self._ends[index]

    def add(self, start: int, end: int, failures: int) -> None:
        """Add the positions [start, end), which must not be in any run."""
        index = bisect_left(self._starts, start)
        self.size += end - start
        low, high = index, index
        if index > 0 and self._ends[index - 1] == start and self._failures[index - 1] == failures:
            low, start = index - 1, self._starts[index - 1]
        if index < len(self._starts) and self._starts[index] == end and self._failures[index] == failures:
            high, end = index + 1, self._ends[index]
        self._starts[low:high] = [start]
        self._ends[low:high] = [end]
        self._failures[low:high] = [failures]

    def take(self, position: int) -> int:
        index = bisect_right(self._starts, position) - 1
        start, end, failures = self._starts[index], self._ends[index], self._failures[index]
        assert start <= position < end, "it is in a run"
        left = [(first, last) for first, last in ((start, position), (position + 1, end)) if first < last]
        self._starts[index : index + 1] = [first for first, _ in left]
        self._ends[index : index + 1] = [last for _, last in left]
        self._failures[index : index + 1] = [failures] * len(left)
        self.size -= 1
        return failures

    def replace_unfailed(self, positions: IntervalSet) -> None:
        """Replace the runs without failures with ``positions``, which must be disjoint from all other runs."""
        kept = [run for run in self if run[2]]
        self.__init__()  # type: ignore[misc]
        for start, end, failures in sorted([*kept, *((start, end, 0) for start, end in positions)]):
            self.add(start, end, failures)


def _place(piece: BatchRange) -> tuple[int, int, int]:
    return piece.epoch, piece.position, piece.first_batch


class WaitingPieces:
    """The waiting pieces of all epochs.

    Args:
        suspect_from: Number of failures at which a piece becomes suspect.
        batch_count: Function from (epoch, position) to the number of batches of that task.
    """

    __slots__ = ("_batch_count", "_parts", "_runs", "_suspect_from", "_suspects")

    def __init__(self, suspect_from: int, batch_count: Callable[[int, int], int]) -> None:
        self._suspect_from = suspect_from
        self._batch_count = batch_count
        #: Epoch -> complete tasks that are not suspect; no set is empty.
        self._runs: dict[int, Runs] = {}
        #: Parts of tasks that are not suspect, by place.
        self._parts: list[BatchRange] = []
        #: Suspect pieces, by place.
        self._suspects: list[BatchRange] = []

    @property
    def lowest_epoch(self) -> int | None:
        lowest = [min(self._runs)] if self._runs else []
        lowest += [pieces[0].epoch for pieces in (self._parts, self._suspects) if pieces]
        return min(lowest, default=None)

    @property
    def runs(self) -> list[tuple[int, int, int, int]]:
        """(epoch, start, end, failures) of the complete tasks that are not suspect, sorted."""
        return [(epoch, *run) for epoch in sorted(self._runs) for run in self._runs[epoch]]

    @property
    def pieces(self) -> list[BatchRange]:
        return sorted(self._parts + self._suspects, key=_place)

    def count_complete(self, epoch: int) -> int:
        return self._runs[epoch].size if epoch in self._runs else 0

    def suspect_count(self, epoch: int) -> int:
        return _slice(self._suspects, (epoch,), (epoch + 1,))[1]

    def is_open(self, epoch: int) -> bool:
        return epoch in self._runs or any(
            _slice(pieces, (epoch,), (epoch + 1,))[1] for pieces in (self._parts, self._suspects)
        )

    def at(self, epoch: int, position: int) -> list[BatchRange]:
        found: list[BatchRange] = []
        for pieces in (self._parts, self._suspects):
            start, count = _slice(pieces, (epoch, position), (epoch, position + 1))
            found += pieces[start : start + count]
        if epoch in self._runs and position in self._runs[epoch]:
            batch_count = self._batch_count(epoch, position)
            found.append(BatchRange(epoch, position, 0, batch_count, batch_count))
        return found

    def put(self, piece: BatchRange) -> None:
        if piece.failures >= self._suspect_from:
            insort(self._suspects, piece, key=_place)
        elif piece.is_complete_task:
            self.put_run(piece.epoch, piece.position, piece.position + 1, piece.failures)
        else:
            insort(self._parts, piece, key=_place)

    def put_run(self, epoch: int, start: int, end: int, failures: int) -> None:
        """Add the complete tasks at [start, end), none of which may be waiting or suspect."""
        self._runs.setdefault(epoch, Runs()).add(start, end, failures)

    def unfailed(self, epoch: int) -> IntervalSet:
        runs = self._runs.get(epoch, ())
        return IntervalSet((start, end) for start, end, failures in runs if failures == 0)

    def replace_unfailed(self, epoch: int, positions: IntervalSet) -> None:
        """Replace the complete tasks that never failed with the tasks at ``positions``, which must not be waiting."""
        self._runs.setdefault(epoch, Runs()).replace_unfailed(positions)
        if not self._runs[epoch].size:
            del self._runs[epoch]

    def take_ready(
        self, epoch: int, excluded: Collection[int] = (), avoided: Collection[int] = ()
    ) -> BatchRange | None:
        """Remove and return the first ready piece of ``epoch``.

        Excludes complete tasks at ``excluded`` positions, and all pieces at ``avoided`` positions.
        """
        runs = self._runs.get(epoch, ())
        places = (each for start, end, _ in runs for each in range(start, end))
        complete = next((each for each in places if each not in excluded and each not in avoided), None)
        start, count = _slice(self._parts, (epoch,), (epoch + 1,))
        parts = range(start, start + count)
        part = next((index for index in parts if self._parts[index].position not in avoided), None)
        if part is not None and (complete is None or self._parts[part].position < complete):
            return self._parts.pop(part)
        return None if complete is None else self.take_complete(epoch, complete)

    def take_of(self, epoch: int, positions: IntervalSet, *, has_suspects: bool) -> BatchRange | None:
        """Remove and return the first piece of ``epoch`` at ``positions``; a suspect only if ``has_suspects``."""
        runs = IntervalSet((start, end) for start, end, _ in self._runs.get(epoch, ()))
        if complete := runs.intersection(positions):
            return self.take_complete(epoch, next(iter(complete))[0])
        for pieces in (self._parts, self._suspects) if has_suspects else (self._parts,):
            for index, piece in enumerate(pieces):
                if piece.epoch == epoch and piece.position in positions:
                    return pieces.pop(index)
        return None

    def take_complete(self, epoch: int, position: int) -> BatchRange | None:
        """Remove and return the complete task at a position, if it is waiting and not suspect."""
        runs = self._runs.get(epoch)
        if runs is None or position not in runs:
            return None
        # Get the number of batches before making any change, because this may raise an error.
        batch_count = self._batch_count(epoch, position)
        failures = runs.take(position)
        if not runs.size:
            del self._runs[epoch]
        return BatchRange(epoch, position, 0, batch_count, batch_count, failures)

    def take_suspect(
        self, epoch: int, is_excluded: Callable[[BatchRange], bool] = lambda _: False
    ) -> BatchRange | None:
        start, count = _slice(self._suspects, (epoch,), (epoch + 1,))
        wanted = (index for index in range(start, start + count) if not is_excluded(self._suspects[index]))
        return None if (index := next(wanted, None)) is None else self._suspects.pop(index)


def _slice(pieces: list[BatchRange], low: tuple[int, ...], high: tuple[int, ...]) -> tuple[int, int]:
    """Return (index, number) for the pieces at places from ``low`` (inclusive) to ``high`` (exclusive)."""
    start = bisect_left(pieces, low, key=_place)
    return start, bisect_left(pieces, high, key=_place) - start
