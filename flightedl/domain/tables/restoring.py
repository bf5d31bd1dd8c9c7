"""What files of checkpoints say of tables as a whole, and what follows for the rows that were taken over from them.

Files have rows by *spans*, which are ranges of buckets with one history. Rules:

* Of a chain of files the last one's word counts: what had expired when it was cut does not exist, whichever file of the
  chain has it.
* That is so in the buckets of the span that says it. Rows of another span may be older, and exist.
* Spans of one history become one, also where they come from several files: then all that one of them gave up has been
  removed, and the rule by which they go on is that of the one that has given up least.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

Cut = TypeVar("Cut")


class TakenSpans(Generic[Cut]):
    """What was said so far, of one pserver's buckets; ``Cut`` is what a file says of a table."""

    def __init__(self) -> None:
        #: Position -> (version, updates), of the buckets that were taken over.
        self.positions: dict[int, tuple[int, int]] = {}
        #: Position -> the highest epoch of the batches in its rows.
        self._epochs: dict[int, int] = {}
        #: By the first position of a span in a chain of files, and by table: the last file's word, with its ``oldest``.
        self._tables: dict[tuple[int, int], tuple[int, Cut]] = {}
        #: The positions of each such span.
        self._stored: dict[int, range] = {}

    def clear(self) -> None:
        """What was said is of a checkpoint that does not count."""
        for known in (self.positions, self._epochs, self._tables, self._stored):
            known.clear()

    def span(self, stored: range, own: range, version: int, updates: int, epoch: int) -> None:
        """A file has a span.

        Args:
            stored: Its positions.
            own: Those of this pserver.
            version: Of its rows.
            updates: Of the optimizer, so far.
            epoch: The highest of the batches in its rows.
        """
        self._stored[stored.start] = stored
        for number in stored:
            if number in own:
                self.positions[number] = (version, updates)
                self._epochs[number] = epoch

    def table(self, first: int, table: int, oldest: int, cut: Cut) -> None:
        """What a file says of a table, in the span with this first position; ``oldest``: that may exist in it."""
        self._tables[first, table] = (oldest, cut)

    def epoch_of(self, numbers: range) -> int:
        """The highest epoch of the batches in the rows of what is one span now."""
        return max((self._epochs.get(number, 0) for number in numbers), default=0)

    def cuts_of(self, table: int, numbers: range) -> list[tuple[range, Cut]]:
        """What expires by which file's word in what is one span now: in these positions, by this."""
        return [(stored, cut) for stored, _, cut in self._found(table, numbers)]

    def oldest_of(self, table: int, numbers: range) -> int:
        """Rows of what is one span now that a lower version updated last do not exist, in none of its files."""
        return min((oldest for _, oldest, _ in self._found(table, numbers)), default=0)

    def _found(self, table: int, numbers: range) -> Iterator[tuple[range, int, Cut]]:
        for first, stored in self._stored.items():
            is_inside = stored.start < numbers.stop and numbers.start < stored.stop
            if is_inside and (said := self._tables.get((first, table))) is not None:
                yield (stored, *said)
