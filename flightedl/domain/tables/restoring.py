"""Rules for restoring the rows of tables from checkpoint files.

A file stores rows by *spans*, which are ranges of buckets with the same history. The rules are:

* Only one chain of files counts for a bucket: the chain whose newest file contains the bucket. Older files of other
  chains may also contain it, if it has moved here from another pserver; their rows are ignored.
* The rows of a bucket start with the newest file of the chain that contains all of them. This is the base, or an
  increment if the bucket was on another pserver when the previous file was written.
* The newest file of a chain determines which rows have expired, in all files of the chain. This file decides only about
  buckets in its own spans, because other buckets may contain older rows that still exist.
* Spans with the same history are joined, even if they come from different files. The expiry of a bucket's rows is still
  determined by the bucket's own file.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Generic, NamedTuple, TypeVar

Cut = TypeVar("Cut")


class FileBuckets(NamedTuple):
    """Buckets whose rows are read from one file of a chain."""

    numbers: frozenset[int]
    #: True if the file is the newest in its chain, and therefore determines expiry.
    is_newest: bool


def buckets_of_chain(files: Sequence[tuple[Collection[int], Collection[int]]]) -> list[FileBuckets]:
    """Return the buckets whose rows are read from each file of a chain.

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
    """Contents of the files read so far, for one pserver's buckets. ``Cut`` is a file's description of a table."""

    def __init__(self) -> None:
        #: Position -> (version, updates) of the restored buckets.
        self.positions: dict[int, tuple[int, int]] = {}
        #: Position -> epoch by which its rows expire.
        self._epochs: dict[int, int] = {}
        #: (first position of a span in a chain of files, table) -> description in the chain's newest file.
        self._tables: dict[tuple[int, int], Cut] = {}
        #: First position of a span -> positions of the span.
        self._stored: dict[int, range] = {}

    def clear(self) -> None:
        """Forget everything that was read, because the checkpoint is unusable."""
        for known in (self.positions, self._epochs, self._tables, self._stored):
            known.clear()

    def span(self, stored: range, own: range, version: int, updates: int, epoch: int) -> None:
        """Record a span that a file contains.

        Args:
            stored: Positions of the span.
            own: Positions of this pserver.
            version: Version of the span's rows.
            updates: Number of updates by the optimizer.
            epoch: Epoch by which the rows expire.
        """
        self._stored[stored.start] = stored
        for number in stored:
            if number in own:
                self.positions[number] = (version, updates)
                self._epochs[number] = epoch

    def table(self, first: int, table: int, cut: Cut) -> None:
        """Record a file's description of a table, for the span with this first position."""
        self._tables[first, table] = cut

    def epoch_of(self, numbers: range) -> int:
        """Return the epoch by which the rows of a restored span expire."""
        return max((self._epochs.get(number, 0) for number in numbers), default=0)

    def cuts_of(self, table: int, numbers: range) -> list[tuple[range, Cut]]:
        """Return the descriptions of a table that determine expiry in a restored span, each with its positions."""
        return [
            (stored, self._tables[first, table])
            for first, stored in self._stored.items()
            if stored.start < numbers.stop and numbers.start < stored.stop and (first, table) in self._tables
        ]
