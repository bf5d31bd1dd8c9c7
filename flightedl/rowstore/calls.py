"""Reads and updates of rows in several tables, with one call of compiled code per optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from flightedl.kernels import row_handles, rows
from flightedl.kernels.compiled import half_kernels
from flightedl.kernels.compiled_rows import RowPush, RowUpdate, row_kernel, row_update
from flightedl.kernels.row_records import GROUP
from flightedl.rowstore.table import RowTable
from flightedl.rowstore.threads import is_split, side_by_side
from flightedl.rowstore.values import Floats, Numbers, TableGradients, TableRows


class RowCalls:
    """Combined reads and updates of a store's tables. Not thread-safe.

    Args:
        tables: The tables, by number.
        handles: Handles of the tables, (tables, HANDLE_SIZE).
    """

    def __init__(self, tables: Sequence[RowTable], handles: npt.NDArray[np.int64]) -> None:
        self._tables = tables
        self._handles = handles.reshape(-1)
        specs = [table.spec for table in tables]
        rules = [(spec.optimizer, spec.dtype, spec.rounding == "stochastic") for spec in specs]
        #: Update functions, one for each distinct optimizer. ``_has_rule``, (rules, tables), is True where a table uses
        #: a function.
        self._updates: list[RowUpdate] = []
        known = {rule: number for number, rule in enumerate(dict.fromkeys(rules))}
        for optimizer, dtype, is_stochastic in known:
            self._updates.append(row_update(optimizer, dtype, is_stochastic=is_stochastic))
        self._has_rule = np.array([[rule == one for rule in rules] for one in known], np.bool_)
        self._is_half = np.array([bool(table.half) for table in tables], np.bool_)
        self._has_half = bool(self._is_half.any())
        #: Tables whose rows may expire. Their counts by age are shared, so these tables are not divided between
        #: threads.
        self._ages = np.array([table.expires for table in tables], np.bool_)
        self._has_ages = bool(self._ages.any())
        self._gather = row_kernel(rows.gather)

    def read(self, wanted: TableRows, version: int, epoch: int, out: Floats) -> Numbers:
        """Read rows into the flat array ``out``; see ``RowTables.read``.

        Returns:
            (n,) Number of ids of each table that had a row.
        """
        work = self._work(wanted, version, epoch)
        found = wanted.counts.copy()
        missing = np.empty(wanted.ids.size, np.int64)
        bits = out.view(np.uint32)

        def gather(some: row_handles.Work, is_beside: bool) -> int:
            return int(self._gather(self._handles, some, wanted.ids, bits, missing, is_beside))

        lacking = self._done(work, wanted, missing, gather, ~self._is_half)
        for place in np.flatnonzero(self._is_half[wanted.tables]).tolist() if self._has_half else ():
            lacking |= self._read_half(wanted, work[place : place + 1], missing, out)
        for place, table in enumerate(wanted.tables.tolist()) if lacking else ():
            if (some := lacking.get(table)) is not None:
                found[place] -= some.size
                self._fill(wanted, place, some - wanted.starts[place], out)
        return found

    def _read_half(
        self, wanted: TableRows, work: row_handles.Work, missing: Numbers, out: Floats
    ) -> dict[int, Numbers]:
        """Read rows of one table with 16-bit values. Return (the table's number -> positions of ids without a row)."""
        number, _, count, at = work[0, : row_handles.OLDEST_VERSION].tolist()
        table = self._tables[number]
        words = np.empty(count * table.value_words, np.uint32)
        work = work.copy()
        work[0, row_handles.VALUES] = 0
        total = self._gather(self._handles, work, wanted.ids, words, missing, False)
        dim = table.spec.dim
        bits = np.ascontiguousarray(words.view(np.uint16).reshape(count, 2 * table.value_words)[:, :dim]).reshape(-1)
        half_kernels(table.half).to_float32(bits, out[at : at + count * dim])
        return _missing(work, missing) if total else {}

    def _fill(self, wanted: TableRows, place: int, missing: Numbers, out: Floats) -> None:
        table = self._tables[int(wanted.tables[place])]
        start, count, at = (int(each[place]) for each in (wanted.starts, wanted.counts, wanted.value_starts))
        values = out[at : at + count * table.spec.dim].reshape(count, -1)
        table.fill(wanted.ids[start : start + count], missing, values)

    def update(
        self, push: TableRows, common: RowPush, scale: float | Mapping[int, float]
    ) -> Iterator[tuple[RowTable, TableGradients, Numbers]]:
        """Update the rows that exist.

        Yields:
            Each table with ids without a row, the gradients of these ids, and their positions.
        """
        work = self._work(push, common.version - 1, common.clock)
        numbers = push.tables.tolist()
        scales = [scale[table] for table in numbers] if isinstance(scale, Mapping) else [scale]
        distinct = sorted(set(scales))
        if len(distinct) > 1:
            work[:, row_handles.CONSTANTS] = [distinct.index(one) for one in scales]
        missing = np.empty(push.ids.size, np.int64)
        lacking: dict[int, Numbers] = {}
        for rule, update in enumerate(self._updates):

            def call(some: row_handles.Work, is_beside: bool, update: RowUpdate = update) -> int:
                given = (self._handles, some, push.ids, push.gradients, distinct, common, missing)
                return update(*given, is_beside=is_beside)

            lacking |= self._done(work, push, missing, call, self._has_rule[rule])
        for place, gradients in enumerate(push) if lacking else ():
            if (some := lacking.get(gradients.table)) is not None:
                yield self._tables[gradients.table], gradients, some - push.starts[place]

    def _work(self, rows_: TableRows, version: int, epoch: int) -> row_handles.Work:
        work = np.zeros((len(rows_), row_handles.WORK_SIZE), np.int64)
        work[:, row_handles.TABLE] = rows_.tables
        work[:, row_handles.FIRST] = rows_.starts
        work[:, row_handles.COUNT] = rows_.counts
        work[:, row_handles.VALUES] = rows_.value_starts
        for place in np.flatnonzero(self._ages[rows_.tables]).tolist() if self._has_ages else ():
            oldest = self._tables[int(rows_.tables[place])].oldest(version, epoch)
            work[place, row_handles.OLDEST_VERSION : row_handles.OLDEST_EPOCH + 1] = oldest
        return work

    def _done(
        self,
        work: row_handles.Work,
        whole: TableRows,
        missing: Numbers,
        call: Callable[[row_handles.Work, bool], int],
        chosen: npt.NDArray[np.bool_],
    ) -> dict[int, Numbers]:
        """Run ``call`` for these tables, in two threads if there are many ids.

        Returns:
            Table -> positions of its ids without a row, among all ids. Tables without such ids are omitted.
        """
        widths = whole.dims
        if not chosen.all():
            those = chosen[whole.tables]
            work, widths = work[those], widths[those]
            if not len(work):
                return {}
        if not is_split(whole.ids.size) or not is_split(int(work[:, row_handles.COUNT].sum())):
            return _missing(work, missing) if call(work, False) else {}
        one, other = self._halves(work, widths)
        side_by_side(lambda: call(one, False), lambda: call(other, True))
        return _missing(np.concatenate([one, other]), missing)

    def _halves(self, work: row_handles.Work, widths: Numbers) -> tuple[row_handles.Work, row_handles.Work]:
        """Divide the work between two threads. The middle table is either split or assigned to the second thread."""
        ends = np.cumsum(work[:, row_handles.COUNT])
        half = int(ends[-1]) // 2
        place = int(np.searchsorted(ends, half, "right"))
        # The compiled loops process ids in groups, so divide between groups.
        before = half - int(ends[place] - work[place, row_handles.COUNT])
        own = 0 if self._ages[work[place, row_handles.TABLE]] else before // GROUP * GROUP
        one, other = work[: place + 1].copy(), work[place:].copy()
        one[-1, row_handles.COUNT] = own
        other[0, [row_handles.FIRST, row_handles.COUNT]] += own, -own
        other[0, row_handles.VALUES] += own * widths[place]
        return one, other


def _missing(work: row_handles.Work, missing: Numbers) -> dict[int, Numbers]:
    """Return table -> positions, among all ids, of the table's ids that have no row. Tables without any are omitted."""
    found: dict[int, list[Numbers]] = {}
    for one in work[work[:, row_handles.MISSED] > 0].tolist():
        first = one[row_handles.FIRST]
        found.setdefault(one[row_handles.TABLE], []).append(missing[first : first + one[row_handles.MISSED]])
    return {table: np.concatenate(some) for table, some in found.items()}
