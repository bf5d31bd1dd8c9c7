"""What files of checkpoints say of tables as a whole, and what follows for the rows that were taken over from them.

Files have rows by *spans*, which are ranges of buckets with one history. Rules:

* Of a chain of files the last one's word counts: what had expired when it was cut does not exist, whichever file of the
  chain has it.
* That is so in the buckets of the span that says it. Rows of another span may be older, and exist.
* Spans of one history become one, also if they come from several files: each bucket goes on by what its own file says.
"""

from __future__ import annotations

from typing import Generic, TypeVar

Cut = TypeVar("Cut")


class TakenSpans(Generic[Cut]):
    """What was said so far, of one pserver's buckets; ``Cut`` is what a file says of a table."""

    def __init__(self) -> None:
        #: Position -> (version, updates), of the buckets that were taken over.
        self.positions: dict[int, tuple[int, int]] = {}
        #: Position -> the highest epoch of the batches in its rows.
        self._epochs: dict[int, int] = {}
        #: By the first position of a span in a chain of files, and by table: the last file's word.
        self._tables: dict[tuple[int, int], Cut] = {}
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

    def table(self, first: int, table: int, cut: Cut) -> None:
        """Note the word of a file on a table, in the span with this first position."""
        self._tables[first, table] = cut

    def epoch_of(self, numbers: range) -> int:
        """The highest epoch of the batches in the rows of what is one span now."""
        return max((self._epochs.get(number, 0) for number in numbers), default=0)

    def cuts_of(self, table: int, numbers: range) -> list[tuple[range, Cut]]:
        """What expires by which file's word in what is one span now: in these positions, by this."""
        return [
            (stored, self._tables[first, table])
            for first, stored in self._stored.items()
            if stored.start < numbers.stop and numbers.start < stored.stop and (first, table) in self._tables
        ]
