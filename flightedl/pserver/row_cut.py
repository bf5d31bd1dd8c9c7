"""The content of a store of rows at one moment, while it is read; see ``row_store``.

A cut is made of the tables' parts: rows, and ids that wait. Each is read in two passes: the records that nobody has
changed since, up to the end, and then what was set aside of the others, of which there is no more then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from flightedl.kernels import rows
from flightedl.kernels.compiled_rows import row_kernel
from flightedl.pserver.row_memory import reserved
from flightedl.pserver.row_table import RowTable
from flightedl.pserver.row_values import CutTable, RowChunk

_NO_BITS = np.empty(0, np.uint64)
_NO_WORDS = np.empty(0, np.uint32)
_WORD_BYTES = 4


class _Part:
    """Rows of one table, or the ids that wait in it."""

    def __init__(self, owner: RowTable, oldest: tuple[int, int], *, is_waiting: bool, is_base: bool) -> None:
        self._owner = owner
        self._is_waiting = is_waiting
        self._oldest = oldest
        self._undone = 0
        table = self._table
        high = int(table.state[rows.HIGH])
        used, dirty = (bits[: -(-high // 64)] for bits in (table.used, table.dirty))
        #: What the next increment has, too, if this cut is dropped.
        self._changed = dirty.copy()
        wanted = used.copy() if is_base else used & dirty
        count = int(np.bitwise_count(wanted).sum())
        self._row_bytes = int(table.layout[rows.STRIDE]) * _WORD_BYTES
        # Before anything is changed, since it may fail.
        undo = reserved(count * self._row_bytes, np.uint32) if count else _NO_WORDS
        dirty.fill(0)
        table.state[[rows.CURSOR, rows.CUT_HIGH, rows.UNDO]] = 0, high, 0
        self._table = table._replace(wanted=wanted, undo=undo)

    @property
    def _table(self) -> rows.Table:
        return self._owner.waiting if self._is_waiting else self._owner.rows

    @_table.setter
    def _table(self, table: rows.Table) -> None:
        if self._is_waiting:
            self._owner.waiting = table
        else:
            self._owner.rows = table

    def next_rows(self, max_bytes: int) -> RowChunk | None:
        table = self._table
        most = max(1, max_bytes // self._row_bytes)
        if table.state[rows.CUT_HIGH]:
            records = np.empty(most, np.int64)
            records = records[: row_kernel(rows.next_wanted)(table, *self._oldest, records)]
            if records.size:
                return self._chunk(table.words, records)
            table.state[[rows.CURSOR, rows.CUT_HIGH]] = 0
        left = int(table.state[rows.UNDO]) - self._undone
        if not left:
            self.end()
            return None
        records = np.arange(self._undone, self._undone + min(left, most))
        self._undone += records.size
        chunk = self._chunk(table.undo, records)
        layout = table.layout
        exists: npt.NDArray[Any] = np.ones(records.size, np.bool_)
        for column, field, oldest in zip(
            (chunk.versions, chunk.epochs), (rows.AT_VERSION, rows.AT_EPOCH), self._oldest, strict=True
        ):
            if layout[field] >= 0:
                exists &= column >= oldest
        return chunk if exists.all() else self._chunk(table.undo, records[exists])

    def _chunk(self, words: npt.NDArray[np.uint32], records: npt.NDArray[np.int64]) -> RowChunk:
        return self._owner.chunk_of(words, records, is_waiting=self._is_waiting)

    def end(self) -> None:
        """Set nothing aside any more, and give back what was."""
        table = self._table
        table.state[[rows.CURSOR, rows.CUT_HIGH, rows.UNDO]] = 0
        self._table = table._replace(wanted=_NO_BITS, undo=_NO_WORDS)

    def note_changes(self) -> None:
        """What had changed before the cut has so for the next one, too."""
        self._table.dirty[: self._changed.size] |= self._changed


class RowCut:
    """The content of a store at one moment. The lock of the span is held around each call.

    Args:
        tables: Of the store.
        version: Of the span.
        epoch: The highest of all batches applied so far.
        is_base: Everything is in it; else what has changed since the cut before.
    """

    def __init__(self, tables: Sequence[RowTable], version: int, epoch: int, *, is_base: bool) -> None:
        self.version = version
        self.epoch = epoch
        self.is_base = is_base
        #: All rows were given.
        self.is_read = False
        found: list[CutTable] = []
        self._parts: list[_Part] = []
        for table in tables:
            removed = table.remove_small(version, epoch)
            oldest = table.oldest(version, epoch)
            found.append(CutTable(oldest[0], removed, table.sketch.copy(), oldest[1]))
            self._parts += [_Part(table, oldest, is_waiting=one, is_base=is_base) for one in (False, True)]
        #: By table number.
        self.tables: Sequence[CutTable] = found
        self._left = list(self._parts)

    def next_rows(self, max_bytes: int = 1 << 22) -> RowChunk | None:
        """The next rows, of about so many bytes; None: that was all, and the cut is complete, or it was dropped.

        A chunk may be empty. Its arrays are its own.
        """
        while self._left:
            chunk = self._left[0].next_rows(max_bytes)
            if chunk is not None:
                return chunk
            del self._left[0]
        self.is_read = True
        return None

    def drop(self) -> None:
        """The cut did not become part of a chain: the next increment has its changes, too. Also after its end."""
        for part in self._left:
            part.end()
        for part in self._parts:
            part.note_changes()
        self._left, self._parts, self.is_read = [], [], True
