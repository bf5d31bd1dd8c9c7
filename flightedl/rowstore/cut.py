"""Reads the content of the tables as of a single moment; see ``tables``.

A cut has two parts for each table: its rows, and its ids that wait for admission. Each part is read in two passes:
first the records that have not changed since the cut, then the copies of the changed records. After the first pass, no
more copies are made.

A cut that is never read itself can be read several times through other cuts with the same content (``again``). These
first read the records that have not changed since the cut, and then all copies.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from copy import copy
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from flightedl.domain.tables.placement import BUCKETS, buckets_of
from flightedl.errors import UnavailableError
from flightedl.kernels import row_cuts, row_records
from flightedl.kernels.compiled_rows import row_kernel
from flightedl.rowstore.memory import reserved
from flightedl.rowstore.table import RowTable
from flightedl.rowstore.values import CutTable, RowChunk, bit_words, either_bits

_NO_IDS = np.empty(0, np.uint64)
_WORD_BYTES = 4


class RowChanges(NamedTuple):
    """Changes to a store between two cuts."""

    #: For each part, one bit per record: set if the record has changed.
    records: tuple[npt.NDArray[np.uint64], ...]
    #: Ids of the rows that cuts removed, by table.
    removed: tuple[npt.NDArray[np.uint64], ...]
    #: (buckets,) True for buckets that came from another store. All of their rows count as changed.
    adopted: npt.NDArray[np.bool_]


def merged(older: RowChanges, newer: RowChanges) -> RowChanges:
    """Return the combined changes of two successive periods."""
    return RowChanges(
        tuple(either_bits(one, other) for one, other in zip(older.records, newer.records, strict=True)),
        tuple(np.union1d(one, other) for one, other in zip(older.removed, newer.removed, strict=True)),
        older.adopted | newer.adopted,
    )


class ChangedSince:
    """Records that have changed since the last cut of a copy; see ``RowTables.begin_copy``."""

    def __init__(self) -> None:
        #: A bit for each changed record, by part; None before the first cut.
        self.records: tuple[npt.NDArray[np.uint64], ...] | None = None
        #: Table -> ids of the rows that cuts for files have removed.
        self.removed: dict[int, npt.NDArray[np.uint64]] = {}

    def note(self, changed: Iterable[npt.NDArray[np.uint64]]) -> None:
        """Add records that have changed."""
        if self.records is not None:
            self.records = tuple(either_bits(one, other) for one, other in zip(self.records, changed, strict=True))

    def note_removed(self, removed: Iterable[npt.NDArray[np.uint64]]) -> None:
        """Add ids of removed rows, by table."""
        for table, ids in enumerate(removed):
            if ids.size:
                self.removed[table] = np.union1d(self.removed.get(table, _NO_IDS), ids)

    def next_changes(self) -> RowChanges | None:
        """Return the changes for the next cut and forget them; None if this is the first cut."""
        removed, self.removed = self.removed, {}
        if self.records is None:
            return None
        ids = tuple(removed.get(table, _NO_IDS) for table in range(len(self.records) // 2))
        return RowChanges(self.records, ids, np.zeros(BUCKETS, np.bool_))


def unsettled(tables: Iterable[RowTable]) -> tuple[npt.NDArray[np.uint64], ...]:
    """Return a bit for each record that has changed since the newest cut of any kind, by part."""
    parts = [table.part(is_waiting=is_waiting) for table, is_waiting in _parts_of(tables)]
    return tuple(part.dirty[: bit_words(part)].copy() for part in parts)


def _parts_of(tables: Iterable[RowTable]) -> list[tuple[RowTable, bool]]:
    return [(table, is_waiting) for table in tables for is_waiting in (False, True)]


def changes_of(
    tables: Sequence[RowTable], removed: Iterable[npt.NDArray[np.uint64]], adopted: npt.NDArray[np.bool_]
) -> RowChanges:
    """Return the changes since the newest cut for a file. ``removed`` are the ids that the current cut removes."""
    records = tuple(table.changed(is_waiting=is_waiting) for table, is_waiting in _parts_of(tables))
    return RowChanges(records, tuple(removed), adopted)


class _Part:
    """Rows of one table, or its waiting ids. The bits set in ``changed`` select the records; None selects all."""

    def __init__(
        self,
        owner: RowTable,
        line: int,
        oldest: tuple[int, int],
        changed: npt.NDArray[np.uint64] | None,
        most_bytes: int | None,
        *,
        is_waiting: bool,
    ) -> None:
        self._owner = owner
        self._is_waiting = is_waiting
        self.line = line
        self._oldest = owner.oldest_of_buckets(oldest[0]), oldest[1]
        self._given = 0
        self._foreign = owner.foreign.copy() if owner.foreign.any() else None
        self._table = table = owner.part(is_waiting=is_waiting)
        self.numbers = self._numbers_of(line)
        self._high = int(table.state[row_records.HIGH])
        self._row_bytes = int(table.layout[row_records.STRIDE]) * _WORD_BYTES
        used = table.used[: bit_words(table)]
        self.wanted = used.copy() if changed is None else used & changed
        #: (memory, number of records) of the copies that are read after all unchanged records.
        self.copies: list[tuple[npt.NDArray[np.uint32], int]] = []
        self.undo = _undo_for(self.wanted, self._row_bytes, most_bytes)

    def _numbers_of(self, line: int) -> npt.NDArray[np.int64]:
        return self._table.cuts[line * row_records.CUT_SIZE :][: row_records.CUT_SIZE]

    def again(self, line: int, changed: npt.NDArray[np.uint64] | None) -> _Part:
        """Return a part with the same content. ``changed`` selects among the records that have not changed since."""
        self._require_copies()
        found = copy(self)
        found.line, found.numbers = line, self._numbers_of(line)
        found.wanted = self.wanted & ~self._table.dirty[: self.wanted.size]
        if changed is not None:
            found.wanted &= changed[: self.wanted.size]
        found.copies = [(self.undo, int(self.numbers[row_records.UNDONE]))]
        found.undo = _undo_for(found.wanted, self._row_bytes, None)
        return found

    def begin(self) -> None:
        """Start copying records before they change, except records that this cut has already read."""
        arrays = [number for array in (self.wanted, self.undo) for number in (array.ctypes.data, array.size)]
        self.numbers[:] = [0, self._high, 0, *arrays]
        state = self._table.state
        state[row_records.CUTS] = max(int(state[row_records.CUTS]), self.line + 1)

    def settle(self) -> None:
        """Prepare for another cut: records that have changed so far are already copied and need not be copied again."""
        self.wanted &= ~self._table.dirty[: self.wanted.size]

    def next_rows(self, max_bytes: int) -> RowChunk | None:
        table, numbers = self._table, self.numbers
        self._require_copies()
        most = max(1, max_bytes // self._row_bytes)
        if numbers[row_records.END]:
            records = np.empty(most, np.int64)
            given = (table, self._owner.salt, self.line, *self._oldest, records)
            records = records[: row_kernel(row_cuts.next_wanted)(*given)]
            if records.size:
                return self._chunk(table.words, records)
            numbers[row_records.END] = 0
            self.copies.append((self.undo, int(numbers[row_records.UNDONE])))
        while self.copies:
            memory, count = self.copies[0]
            if self._given < count:
                records = np.arange(self._given, min(self._given + most, count))
                self._given += records.size
                return self._owner.existing(self._chunk(memory, records), *self._oldest)
            del self.copies[0]
            self._given = 0
        self.end()
        return None

    def _require_copies(self) -> None:
        if int(self.numbers[row_records.UNDONE]) * self._row_bytes > self.undo.nbytes:
            raise UnavailableError("more rows changed while a cut of them was read than it has memory to copy")

    def _chunk(self, words: npt.NDArray[np.uint32], records: npt.NDArray[np.int64]) -> RowChunk:
        chunk = self._owner.chunk_of(words, records, is_waiting=self._is_waiting)
        return chunk if self._foreign is None else chunk.chosen(~self._foreign[buckets_of(chunk.ids, self._owner.salt)])

    def end(self) -> None:
        self.numbers[:] = 0
        self.wanted, self.undo, self.copies = np.empty(0, np.uint64), np.empty(0, np.uint32), []


def _undo_for(wanted: npt.NDArray[np.uint64], row_bytes: int, most_bytes: int | None) -> npt.NDArray[np.uint32]:
    size_bytes = int(np.bitwise_count(wanted).sum()) * row_bytes
    if most_bytes is not None:
        size_bytes = min(size_bytes, max(most_bytes, row_bytes))
    return reserved(size_bytes, np.uint32) if size_bytes else np.empty(0, np.uint32)


class RowCut:
    """The tables' content as of one moment. The caller must hold the span's lock during each call.

    Args:
        tables: The store's tables.
        line: Number of this cut among those that are being read.
        version: Version of the span.
        epoch: Epoch by which rows expire.
        changes: Changes that the cut contains; None if it contains everything.
        most_bytes: Memory of each part for old contents of rows that change before they are read; None to fit all rows.
        only: Tables whose rows are read, without their waiting ids; None for everything.

    Raises:
        MemoryError: there is not enough memory for the copies. Nothing was changed.
    """

    def __init__(
        self,
        tables: Sequence[RowTable],
        line: int,
        version: int,
        epoch: int,
        changes: RowChanges | None,
        most_bytes: int | None = None,
        only: Collection[int] | None = None,
    ) -> None:
        self.version = version
        self.epoch = epoch
        self.line = line
        self.is_base = changes is None
        #: Buckets whose rows are all included, even in an incremental cut.
        self.complete: list[int] = [] if changes is None else np.flatnonzero(changes.adopted).tolist()
        #: True if all rows have been read.
        self.is_over = False
        #: State of each table, by its number.
        removed = (_NO_IDS,) * len(tables) if changes is None else changes.removed
        self.tables: Sequence[CutTable] = [
            CutTable(*each.oldest(version, epoch), ids, each.sketch.copy(), each.shifts(), each.given_up.copy())
            for each, ids in zip(tables, removed, strict=True)
        ]
        bits = (None,) * (2 * len(tables)) if changes is None else changes.records
        self.left = [
            _Part(part, line, part.oldest(version, epoch), changed, most_bytes, is_waiting=is_waiting)
            for (part, is_waiting), changed in zip(_parts_of(tables), bits, strict=True)
            if only is None or (part.number in only and not is_waiting)
        ]

    def again(self, line: int, only: Collection[int], changed: Sequence[npt.NDArray[np.uint64] | None]) -> RowCut:
        """Return a cut with the same rows of the tables in ``only``. This cut must not be read itself.

        Args:
            line: Number of the new cut among those that are being read.
            only: Tables whose rows are read.
            changed: For each table, a bit for each record that is read; None for all. All rows that have changed since
                this cut are read in any case.

        Raises:
            UnavailableError, MemoryError: there is not enough memory for the copies, or this cut was dropped.
        """
        if self.is_over:
            raise UnavailableError("the cut of these rows is no longer kept: read another one")
        found = copy(self)
        found.line = line
        found.left = [part.again(line, changed[number]) for number, part in enumerate(self.left) if number in only]
        return found

    def begin(self) -> None:
        for part in self.left:
            part.begin()

    def settle(self) -> None:
        for part in self.left:
            part.settle()

    def next_rows(self, max_bytes: int = 1 << 22) -> RowChunk | None:
        """Return the next rows, about ``max_bytes`` in total. Return None at the end, or if the cut has been dropped.

        A chunk may be empty. Its arrays are copies of the store's memory.

        Raises:
            UnavailableError: the memory for copies was insufficient, so the cut is incomplete.
        """
        while self.left:
            chunk = self.left[0].next_rows(max_bytes)
            if chunk is not None:
                return chunk
            del self.left[0]
        self.is_over = True
        return None

    def drop(self) -> None:
        """Free the cut, even if it has not been read to the end."""
        for part in self.left:
            part.end()
        self.left, self.is_over = [], True
