"""Rules for restoring tables' rows from the files of checkpoints.

A file stores rows by *spans*, which are ranges of buckets with the same history. These rules apply:

* A bucket's rows are in one chain of files: the chain whose newest file contains the bucket. Older files of other
  chains may also contain it, from before it moved to another pserver; those rows are ignored.
* In its chain, a bucket's rows begin with the newest file that contains all of them. This is the base or, for a bucket
  that another pserver had at the time of the previous file, an increment.
* The newest file of a chain determines which rows have expired, whichever file of the chain contains them. It does so
  only for the buckets in its spans, because rows of other buckets may be older and still exist.
* Spans with the same history are joined, even if they come from several files. Each bucket keeps the expiry of its own
  file.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Generic, NamedTuple, TypeVar

Cut = TypeVar("Cut")


class FileBuckets(NamedTuple):
    """The buckets whose rows are read from one file of a chain."""

    numbers: frozenset[int]
    #: True if the file is the newest of its chain, which determines expiry.
    is_newest: bool


def buckets_of_chain(files: Sequence[tuple[Collection[int], Collection[int]]]) -> list[FileBuckets]:
    """Return, for each file of a chain, the buckets whose rows are read from it.

    Args:
        files: Oldest first, of each file the positions of its buckets, and of those of which it has all rows although
            it is an increment.
    """
    found: list[FileBuckets] = []
    left = set(files[-1][0])
    for numbers, complete in reversed(files):
        found.append(FileBuckets(frozenset(left.intersection(numbers)), is_newest=not found))
        left.difference_update(complete)
    return found[::-1]


class RestoredSpans(Generic[Cut]):
    """Contents of the files read so far for one pserver's buckets. ``Cut`` is a file's description of a table."""

    def __init__(self) -> None:
        #: Position -> (version, updates) of the restored buckets.
        self.positions: dict[int, tuple[int, int]] = {}
        #: Position -> the highest epoch of the batches in its rows.
        self._epochs: dict[int, int] = {}
        #: (first position of a span in a chain of files, table) -> description in the chain's last file.
        self._tables: dict[tuple[int, int], Cut] = {}
        #: First position of a span -> positions of the span.
        self._stored: dict[int, range] = {}

    def clear(self) -> None:
        """Forget everything, because the checkpoint cannot be used."""
        for known in (self.positions, self._epochs, self._tables, self._stored):
            known.clear()

    def span(self, stored: range, own: range, version: int, updates: int, epoch: int) -> None:
        """Record a span of a file.

        Args:
            stored: Positions of the span.
            own: Positions of this pserver.
            version: Version of the span's rows.
            updates: Number of updates by the optimizer.
            epoch: Highest epoch of the batches in the rows.
        """
        self._stored[stored.start] = stored
        for number in stored:
            if number in own:
                self.positions[number] = (version, updates)
                self._epochs[number] = epoch

    def table(self, first: int, table: int, cut: Cut) -> None:
        """Record a file's description of a table in the span with this first position."""
        self._tables[first, table] = cut

    def epoch_of(self, numbers: range) -> int:
        """Return the highest epoch of the batches in the rows of a restored span."""
        return max((self._epochs.get(number, 0) for number in numbers), default=0)

    def cuts_of(self, table: int, numbers: range) -> list[tuple[range, Cut]]:
        """Return the descriptions of a table that determine expiry in a restored span, each with its positions."""
        return [
            (stored, self._tables[first, table])
            for first, stored in self._stored.items()
            if stored.start < numbers.stop and numbers.start < stored.stop and (first, table) in self._tables
        ]
