"""The content of a store of rows at one moment, while it is read; see ``store``.

A cut is made of the tables' parts: rows, and ids that wait. Each is read in two passes: the records that nobody has
changed since, up to the end, and then what was set aside of the others, of which there is no more then.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from flightedl.errors import UnavailableError
from flightedl.kernels import row_cuts, row_records
from flightedl.kernels.compiled_rows import row_kernel
from flightedl.pserver.rows.memory import reserved
from flightedl.pserver.rows.table import RowTable
from flightedl.pserver.rows.values import CutTable, RowChunk

_NO_IDS = _NO_BITS = np.empty(0, np.uint64)
_NO_WORDS = np.empty(0, np.uint32)
_WORD_BYTES = 4


class RowChanges(NamedTuple):
    """What has changed between two cuts of a store."""

    #: Of each part, a bit for each record.
    records: tuple[npt.NDArray[np.uint64], ...]
    #: Of each table, ids of rows that a cut removed.
    removed: tuple[npt.NDArray[np.uint64], ...]


def merged(older: RowChanges, newer: RowChanges) -> RowChanges:
    """All that has changed."""
    return RowChanges(
        tuple(_either(one, other) for one, other in zip(older.records, newer.records, strict=True)),
        tuple(np.union1d(one, other) for one, other in zip(older.removed, newer.removed, strict=True)),
    )


def _either(one: npt.NDArray[np.uint64], other: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    found = np.zeros(max(one.size, other.size), np.uint64)
    found[: one.size] = one
    found[: other.size] |= other
    return found


def _parts_of(tables: Iterable[RowTable]) -> list[tuple[RowTable, bool]]:
    """Tables, and whether it is the ids that wait in them."""
    return [(table, is_waiting) for table in tables for is_waiting in (False, True)]


def changes_of(tables: Sequence[RowTable], removed: Iterable[npt.NDArray[np.uint64]]) -> RowChanges:
    """What has changed since the cut before; these rows are removed by the one that is made now."""
    bits = []
    for table, is_waiting in _parts_of(tables):
        records = table.waiting if is_waiting else table.rows
        bits.append(records.dirty[: -(-int(records.state[row_records.HIGH]) // 64)].copy())
    return RowChanges(tuple(bits), tuple(removed))


class _Part:
    """Rows of one table, or the ids that wait in it; ``changed`` None: all of them are wanted."""

    def __init__(
        self, owner: RowTable, oldest: tuple[int, int], changed: npt.NDArray[np.uint64] | None, *, is_waiting: bool
    ) -> None:
        self._owner = owner
        self._is_waiting = is_waiting
        self._oldest = oldest
        self._undone = 0
        table = self._table
        self._high = int(table.state[row_records.HIGH])
        used = table.used[: -(-self._high // 64)]
        wanted = used.copy() if changed is None else used & changed
        count = int(np.bitwise_count(wanted).sum())
        self._row_bytes = int(table.layout[row_records.STRIDE]) * _WORD_BYTES
        undo = reserved(count * self._row_bytes, np.uint32) if count else _NO_WORDS
        self._ready = (wanted, undo)

    def begin(self) -> None:
        """Set aside from now on what changes before it was read."""
        table, (wanted, undo) = self._table, self._ready
        table.dirty[: -(-self._high // 64)] = 0
        table.state[[row_records.CURSOR, row_records.CUT_HIGH, row_records.UNDO]] = 0, self._high, 0
        self._table = table._replace(wanted=wanted, undo=undo)

    @property
    def _table(self) -> row_records.Table:
        return self._owner.waiting if self._is_waiting else self._owner.rows

    @_table.setter
    def _table(self, table: row_records.Table) -> None:
        if self._is_waiting:
            self._owner.waiting = table
        else:
            self._owner.rows = table

    def next_rows(self, max_bytes: int) -> RowChunk | None:
        table = self._table
        most = max(1, max_bytes // self._row_bytes)
        if table.state[row_records.CUT_HIGH]:
            records = np.empty(most, np.int64)
            records = records[: row_kernel(row_cuts.next_wanted)(table, *self._oldest, records)]
            if records.size:
                return self._chunk(table.words, records)
            table.state[[row_records.CURSOR, row_records.CUT_HIGH]] = 0
        left = int(table.state[row_records.UNDO]) - self._undone
        if not left:
            self.end()
            return None
        records = np.arange(self._undone, self._undone + min(left, most))
        self._undone += records.size
        chunk = self._chunk(table.undo, records)
        layout = table.layout
        exists: npt.NDArray[Any] = np.ones(records.size, np.bool_)
        for column, field, oldest in zip(
            (chunk.versions, chunk.epochs), (row_records.AT_VERSION, row_records.AT_EPOCH), self._oldest, strict=True
        ):
            if layout[field] >= 0:
                exists &= column >= oldest
        return chunk if exists.all() else self._chunk(table.undo, records[exists])

    def _chunk(self, words: npt.NDArray[np.uint32], records: npt.NDArray[np.int64]) -> RowChunk:
        return self._owner.chunk_of(words, records, is_waiting=self._is_waiting)

    def end(self) -> None:
        """Set nothing aside any more, and give back what was."""
        table = self._table
        table.state[[row_records.CURSOR, row_records.CUT_HIGH, row_records.UNDO]] = 0
        self._table = table._replace(wanted=_NO_BITS, undo=_NO_WORDS)
        self._ready = (_NO_BITS, _NO_WORDS)


class RowCut:
    """The content of a store at one moment. The lock of the span is held around each call.

    Args:
        tables: Of the store.
        version: Of the span.
        epoch: The highest of all batches applied so far.
        changes: What is in it; None: everything.

    Raises:
        MemoryError: nothing was done.
    """

    def __init__(self, tables: Sequence[RowTable], version: int, epoch: int, changes: RowChanges | None) -> None:
        self.version = version
        self.epoch = epoch
        self.is_base = changes is None
        #: All rows were given.
        self.is_read = False
        self._is_displaced = False
        #: By table number.
        removed = (_NO_IDS,) * len(tables) if changes is None else changes.removed
        self.tables: Sequence[CutTable] = [
            CutTable(*table.oldest(version, epoch), ids, table.sketch.copy())
            for table, ids in zip(tables, removed, strict=True)
        ]
        bits = (None,) * (2 * len(tables)) if changes is None else changes.records
        self._left = [
            _Part(table, table.oldest(version, epoch), changed, is_waiting=is_waiting)
            for (table, is_waiting), changed in zip(_parts_of(tables), bits, strict=True)
        ]
        for part in self._left:
            part.begin()

    def next_rows(self, max_bytes: int = 1 << 22) -> RowChunk | None:
        """The next rows, of about so many bytes; None: that was all, and the cut is complete, or it was dropped.

        A chunk may be empty. Its arrays are its own.

        Raises:
            UnavailableError: a later cut took its place, and the rest is not known any more.
        """
        if self._is_displaced:
            raise UnavailableError("a later cut of these rows has taken the place of this one")
        while self._left:
            chunk = self._left[0].next_rows(max_bytes)
            if chunk is not None:
                return chunk
            del self._left[0]
        self.is_read = True
        return None

    def displace(self) -> None:
        """Drop the rest for a later cut, and have the reader notice."""
        self._is_displaced = not self.is_read
        self.drop()

    def drop(self) -> None:
        """The rest is not wanted any more. Also after its end."""
        for part in self._left:
            part.end()
        self._left, self.is_read = [], True
