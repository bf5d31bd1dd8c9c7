"""Rows of a table in the simulated pservers and in files. ``row_account`` checks them.

The product (``domain.tables``) decides which rows exist. Spans treat rows as a pserver does: they update, cut and split
them, and merge them from a base and its increments.

A batch touches two ids in each block. One of them gets gradients of both signs, so that its norm can fall to zero.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from flightedl.domain.checkpoint.changes import ChangesSince
from flightedl.domain.tables.restoring import RestoredSpans
from flightedl.domain.tables.spec import TableSpec
from flightedl.messages.control import SnapshotRequest
from tests.support.reference_table import ReferenceTable, Row

_IDS_OF_A_BLOCK = 100


class Moment(NamedTuple):
    """An event in the life of a block's rows."""

    #: Version that the update produced, or at which the cut was made.
    version: int
    #: Highest epoch of all batches applied so far.
    epoch: int
    #: Rows of the block with lower versions have been evicted; see ``ReferenceTable``.
    oldest: int
    #: The update's batches, as elements of the block. None for a cut, which removes small rows.
    elements: tuple[int, ...] | None


class Changed(NamedTuple):
    """Changes between two cuts."""

    #: (block, element).
    elements: frozenset[tuple[int, int]]
    ids: frozenset[int]
    removed: frozenset[int]

    @classmethod
    def merged(cls, older: Changed, newer: Changed) -> Changed:
        """Return the union of both changes."""
        return cls(older.elements | newer.elements, older.ids | newer.ids, older.removed | newer.removed)


@dataclass(frozen=True, slots=True)
class StoredTable:
    """The rows of one span in a file."""

    numbers: range
    version: int
    updates: int
    epoch: int
    #: Block -> oldest version among the rows that were not evicted.
    oldest: Mapping[int, int]
    removed: frozenset[int]
    #: Id -> its row. A row without values waits for admission.
    rows: Mapping[int, Row]


def block_of(row_id: int) -> int:
    """Return the block of an id."""
    return row_id // _IDS_OF_A_BLOCK


def touched(elements: Iterable[int], block: int) -> dict[int, float]:
    """Return the gradients of an update, by id."""
    found: dict[int, float] = {}
    first = block * _IDS_OF_A_BLOCK
    for element in elements:
        mixed = (element + 1) * 2654435761 % 4093 + block
        often, small = first + min(mixed % 3, mixed % 7), first + 10 + mixed % 4
        found[often] = found.get(often, 0.0) - 1.0
        found[small] = found.get(small, 0.0) + (1.0 if mixed // 7 % 2 else -1.0)
    return found


class SpanRows:
    """Rows of one span's blocks."""

    def __init__(self, spec: TableSpec, numbers: range) -> None:
        self.numbers = numbers
        self.table = ReferenceTable(spec, block_of)
        self.epoch = 0
        self.changes: ChangesSince[Changed] = ChangesSince(Changed.merged)
        self._changed: set[int] = set()
        #: Ids that have changed since the newest copy for a standby; None if there is no copy of these rows.
        self.uncopied: set[int] | None = None
        #: Ids that cuts have removed since that copy, even if they have returned.
        self._removed: set[int] = set()

    def update(self, elements: Sequence[int], epoch: int, version: int) -> None:
        """Apply batches to the rows as one update."""
        self.epoch = max(self.epoch, epoch)
        gradients = {row_id: [amount] for block in self.numbers for row_id, amount in touched(elements, block).items()}
        self._changed |= gradients.keys()
        if self.uncopied is not None:
            self.uncopied |= gradients.keys()
        self.table.update(gradients, version=version, epoch=self.epoch)

    def moment(self, block: int, version: int, elements: Sequence[int] | None) -> Moment:
        """Return a record of an event that has just happened to a block."""
        return Moment(version, self.epoch, self.table.oldest[block], None if elements is None else tuple(elements))

    def cut(
        self,
        command: SnapshotRequest,
        version: int,
        updates: int,
        elements: Collection[tuple[int, int]],
        *,
        is_increment: bool,
    ) -> tuple[Changed | None, StoredTable]:
        """Return the changes since the file that the order names (None if unknown), and the rows for the new file."""
        removed = self.table.remove_small(version, self.epoch)
        newest = Changed(frozenset(elements), frozenset(self._changed), frozenset(removed))
        self._changed.clear()
        self._removed.update(removed)
        changed = self.changes.cut(command.name, command.after, newest)
        found = self.content(version, updates)
        if is_increment and changed is not None:
            rows = {row_id: row for row_id, row in found.rows.items() if row_id in changed.ids}
            found = StoredTable(found.numbers, version, updates, found.epoch, found.oldest, changed.removed, rows)
        return changed, found

    def copied(self, version: int, updates: int, *, is_increment: bool) -> StoredTable:
        """Return all rows for a standby, or those that have changed since the previous copy."""
        changed, removed = self.uncopied, frozenset(self._removed)
        self.uncopied, self._removed = set(), set()
        found = self.content(version, updates)
        if not is_increment:
            return found
        assert changed is not None, "it is unknown what has changed"
        return replace(
            found,
            removed=removed,
            rows={row_id: row for row_id, row in found.rows.items() if row_id in changed},
        )

    def content(self, version: int, updates: int) -> StoredTable:
        """Return all rows that exist now."""
        table = self.table
        copy = ReferenceTable(table.spec, block_of)
        for known in (table.waiting, table.rows):
            for row_id, row in known.items():
                if table.exists(row_id, row, version, self.epoch):
                    copy.restore(row_id, row)
        oldest = {block: table.oldest_at(block, version) for block in self.numbers}
        rows = copy.waiting | copy.rows
        return StoredTable(self.numbers, version, updates, self.epoch, oldest, frozenset(), rows)

    def part(self, numbers: range) -> SpanRows:
        """Return the rows of some of the blocks."""
        part = SpanRows(self.table.spec, numbers)
        part.epoch, part.table.oldest = self.epoch, self.table.oldest.copy()
        for known in (self.table.waiting, self.table.rows):
            for row_id, row in known.items():
                if block_of(row_id) in numbers:
                    part.table.restore(row_id, row)
        return part

    def restore(self, chains: Iterable[Sequence[Sequence[StoredTable]]]) -> None:
        """Load rows from files, as ``pserver.rows.restoring`` does. Each chain begins with its base."""
        taken: RestoredSpans[Mapping[int, int]] = RestoredSpans()
        for chain in chains:
            for stored in (each for tables in chain for each in tables):
                self.table.remove(stored.removed)
                for row_id, row in stored.rows.items():
                    if block_of(row_id) in self.numbers:
                        self.table.restore(row_id, row)
                taken.table(stored.numbers.start, 0, stored.oldest)
            for stored in chain[-1]:
                taken.span(stored.numbers, self.numbers, stored.version, stored.updates, stored.epoch)
        self.epoch = taken.epoch_of(self.numbers)
        oldest_epoch = self.table.spec.oldest_epoch(self.epoch)
        for _, oldest in taken.cuts_of(0, self.numbers):
            self.table.expire(oldest, oldest_epoch)
            self.table.oldest.update(oldest)
