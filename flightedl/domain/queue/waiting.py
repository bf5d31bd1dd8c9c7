"""Pieces of work that were handed out before and wait to be handed out again.

Rules:

* Whole tasks are kept as *runs* of positions with their count of failures, so that a million reopened tasks are one
  entry. Narrowed pieces, and those that failed often, are kept one by one.
* A piece is *suspect* from ``attempts_limit`` failures on. The caller gives suspects only to trainers that hold nothing
  else, so that the next failure tells about this piece and no other. All else is *ready* for anybody.
* Earlier epochs are asked for first; within an epoch the lowest position comes first, so that a narrowed task is
  brought to its end before the next one is begun: few pieces wait at any time.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Collection, Iterator

from flightedl.domain.exactly_once.intervals import IntervalSet
from flightedl.domain.queue.values import BatchRange


class Runs:
    """Disjoint half-open runs of positions, each with a count of failures; equal neighbours are one run."""

    __slots__ = ("_ends", "_failures", "_starts", "size")

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._failures: list[int] = []
        #: How many positions there are in all runs.
        self.size = 0

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        """(start, end, failures), rising."""
        return zip(self._starts, self._ends, self._failures, strict=True)

    def __contains__(self, position: int) -> bool:
        index = bisect_right(self._starts, position) - 1
        return index >= 0 and position < self._ends[index]

    def add(self, start: int, end: int, failures: int) -> None:
        """Put [start, end) in, none of which may be in a run yet."""
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
        """Take a position out that is in a run; its failures."""
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
        """Let ``positions``, disjoint from all runs that failed, be the ones that never failed."""
        kept = [run for run in self if run[2]]
        self.__init__()  # type: ignore[misc]
        for start, end, failures in sorted([*kept, *((start, end, 0) for start, end in positions)]):
            self.add(start, end, failures)


def _place(piece: BatchRange) -> tuple[int, int, int]:
    return piece.epoch, piece.position, piece.first_batch


class WaitingPieces:
    """All pieces that wait, of all epochs."""

    __slots__ = ("_batch_count", "_parts", "_runs", "_suspect_from", "_suspects")

    def __init__(self, suspect_from: int, batch_count: Callable[[int, int], int]) -> None:
        """``suspect_from``: failures; ``batch_count``: (epoch, position) -> batches of that task."""
        self._suspect_from = suspect_from
        self._batch_count = batch_count
        #: epoch -> whole tasks that are not suspect; never an empty one.
        self._runs: dict[int, Runs] = {}
        #: Narrowed pieces that are not suspect, by place.
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
        """(epoch, start, end, failures) of whole tasks that are not suspect, sorted."""
        return [(epoch, *run) for epoch in sorted(self._runs) for run in self._runs[epoch]]

    @property
    def pieces(self) -> list[BatchRange]:
        """All others, by place."""
        return sorted(self._parts + self._suspects, key=_place)

    def count_whole(self, epoch: int) -> int:
        """How many whole, unsuspicious tasks of ``epoch`` wait."""
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
        elif piece.is_whole:
            self.put_run(piece.epoch, piece.position, piece.position + 1, piece.failures)
        else:
            insort(self._parts, piece, key=_place)

    def put_run(self, epoch: int, start: int, end: int, failures: int) -> None:
        """Let the whole tasks at [start, end) wait, none of which waits yet; ``failures`` below suspicion."""
        self._runs.setdefault(epoch, Runs()).add(start, end, failures)

    def unfailed(self, epoch: int) -> IntervalSet:
        """Positions of the whole tasks of ``epoch`` that wait and never failed."""
        runs = self._runs.get(epoch, ())
        return IntervalSet((start, end) for start, end, failures in runs if failures == 0)

    def replace_unfailed(self, epoch: int, positions: IntervalSet) -> None:
        """Let exactly the whole tasks at ``positions``, none of which waits otherwise, be those that never failed."""
        self._runs.setdefault(epoch, Runs()).replace_unfailed(positions)
        if not self._runs[epoch].size:
            del self._runs[epoch]

    def take_ready(self, epoch: int, but: Collection[int] = ()) -> BatchRange | None:
        """Take the first piece of ``epoch`` that anybody may have; not a whole task at the positions ``but``."""
        runs = self._runs.get(epoch, ())
        whole = next((each for start, end, _ in runs for each in range(start, end) if each not in but), None)
        part = self._parts[0] if self._parts and self._parts[0].epoch == epoch else None
        if part is not None and (whole is None or part.position < whole):
            return self._parts.pop(0)
        return None if whole is None else self.take_whole(epoch, whole)

    def take_of(self, epoch: int, positions: IntervalSet, *, has_suspects: bool) -> BatchRange | None:
        """Take the first piece of ``epoch`` at one of ``positions``; a suspect only with ``has_suspects``."""
        runs = IntervalSet((start, end) for start, end, _ in self._runs.get(epoch, ()))
        if whole := runs.intersection(positions):
            return self.take_whole(epoch, next(iter(whole))[0])
        for pieces in (self._parts, self._suspects) if has_suspects else (self._parts,):
            for index, piece in enumerate(pieces):
                if piece.epoch == epoch and piece.position in positions:
                    return pieces.pop(index)
        return None

    def take_whole(self, epoch: int, position: int) -> BatchRange | None:
        """Take the task at a position, if all of it waits and is not suspect."""
        runs = self._runs.get(epoch)
        if runs is None or position not in runs:
            return None
        # The batch count is asked for first, as asking may fail and then nothing has changed.
        batch_count = self._batch_count(epoch, position)
        failures = runs.take(position)
        if not runs.size:
            del self._runs[epoch]
        return BatchRange(epoch, position, 0, batch_count, batch_count, failures)

    def take_suspect(self, epoch: int) -> BatchRange | None:
        if self._suspects and self._suspects[0].epoch == epoch:
            return self._suspects.pop(0)
        return None


def _slice(pieces: list[BatchRange], low: tuple[int, ...], high: tuple[int, ...]) -> tuple[int, int]:
    """(index, count) of the pieces whose place is from ``low`` to below ``high``."""
    start = bisect_left(pieces, low, key=_place)
    return start, bisect_left(pieces, high, key=_place) - start
