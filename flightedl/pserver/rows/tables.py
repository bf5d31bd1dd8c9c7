"""The rows of embedding tables in a range of buckets: reads, updates, rounds, cuts.

What becomes of a row is said in ``flightedl.testing.reference_table``; this is the same, fast and in little memory. A
store is for buckets of one history: where a pserver's buckets differ in that, each range has a store of its own.

Ids are (n,) uint64, contiguous, without repetitions within a call, and in the store's buckets (see ``incoming``).
``version`` is the span's, see the reference; ``epoch`` the highest of all batches applied to the span so far.

**Rounds.** Contributions are kept as they came (``add``), not copied: whoever adds them leaves them alone. When the
round closes, they are summed by id, in the order of arrival, or of the batches, and the sum is applied like a push.

**Cuts.** ``begin_cut`` is instantaneous: the cut's content is what exists then, wherever its reading has got to. It is
read in chunks (``RowCut.next_rows``), each of which takes a millisecond or two; a row that changes before it was read
is set aside first. Several cuts may be read at once, and none disturbs another. A cut has everything (a *base*) or what
has changed since the cut that some file was made of (an
*increment*, see ``domain.checkpoint.changes``): whoever reads a base and its increments drops before each of these what
it names as removed, takes the last of each row, and drops what does not exist by the last cut's ``oldest``, version and
epoch.

**Memory** is bounded (``memory``): beyond that no new rows are made. Their gradients are dropped and counted as
``refused``; reads of them give what ``unknown`` says. Rows that are there are updated on.

Not thread-safe: the lock of the span is held around every call, here and of ``RowCut``. Calls release the
GIL.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from flightedl.domain.checkpoint.changes import ChangesSince
from flightedl.domain.exactly_once.batches import Batch
from flightedl.domain.tables.placement import BUCKETS, buckets_of
from flightedl.domain.tables.spec import TableSpec
from flightedl.errors import BusyError, UnavailableError
from flightedl.kernels import row_rules
from flightedl.kernels.compiled_rows import RowPush, row_kernel
from flightedl.kernels.plain import index_size
from flightedl.kernels.row_handles import HANDLE_SIZE
from flightedl.kernels.row_records import MAX_CUTS
from flightedl.pserver.rows.calls import RowCalls
from flightedl.pserver.rows.cut import RowChanges, RowCut, changes_of, merged
from flightedl.pserver.rows.memory import ADDRESS_BYTES, RowMemory, machine_bytes
from flightedl.pserver.rows.table import RowTable
from flightedl.pserver.rows.values import (
    CutTable,
    Floats,
    Ids,
    MovedBuckets,
    Numbers,
    RowChunk,
    RowCounts,
    TableGradients,
    TableRows,
)

__all__ = ["CutTable", "RowChunk", "RowCounts", "RowCut", "RowTables", "TableGradients", "TableRows"]


@dataclass(slots=True)
class _Contribution:
    batch: Batch
    weight: float
    push: TableRows


class RowTables:
    """The rows of all tables in a range of buckets.

    Args:
        specs: The tables, by number.
        buckets: Of the span.
        memory: Bounds what is held, but not what a cut sets aside, nor what is restored.
    """

    def __init__(self, specs: Sequence[TableSpec], buckets: range, memory: RowMemory | None = None) -> None:
        self.specs = list(specs)
        self.buckets = buckets
        self.memory = RowMemory() if memory is None else memory
        each = min(machine_bytes(), ADDRESS_BYTES // max(1, len(self.specs)))
        handles = np.zeros((len(self.specs), HANDLE_SIZE), np.int64)
        #: By bucket, see ``kernels.row_records``.
        self.shifts = np.zeros(BUCKETS, np.int64)
        self._tables = [
            RowTable(spec, number, each, handles[number], self.shifts) for number, spec in enumerate(self.specs)
        ]
        self._calls = RowCalls(self._tables, handles)
        #: Of the newest push.
        self._version = self._epoch = 0
        #: Ids read by table, and those that had a row.
        self._reads, self._hits = np.zeros((2, len(self.specs)), np.int64)
        self._size_bytes = 0
        self._note_size()
        self._round: list[_Contribution] = []
        #: By line, those that are being read, or were.
        self._cuts: dict[int, RowCut] = {}
        self._changes: ChangesSince[RowChanges] = ChangesSince(merged)
        #: (buckets,): came since the newest cut for a file.
        self._adopted = np.zeros(BUCKETS, np.bool_)

    def read(self, table: int, ids: Ids, version: int, epoch: int, out: Floats) -> int:
        """Read the rows of (n,) ids into ``out``, (n, dim) float32. ``spec.unknown`` says what ids without a row get.

        Returns:
            The number of ids that had a row. With ``unknown`` "error", ids without one get zeros.
        """
        wanted = TableRows.of([TableGradients(table, ids, np.empty((0, self.specs[table].dim), np.float32))])
        return int(self.read_all(wanted, version, epoch, out.reshape(-1))[0])

    def read_all(self, wanted: TableRows, version: int, epoch: int, out: Floats) -> Numbers:
        """Read rows of several tables, each table's to where ``value_starts`` says.

        Returns:
            For each table, the number of ids that had a row.
        """
        found = self._calls.read(wanted, version, epoch, out)
        self._reads[wanted.tables] += wanted.counts
        self._hits[wanted.tables] += found
        return found

    def update(
        self,
        push: TableRows | Sequence[TableGradients],
        *,
        version: int,
        epoch: int,
        number: int,
        scale: float | Mapping[int, float] = 1.0,
        rate_factor: float = 1.0,
        seed: int = 0,
    ) -> None:
        """Apply gradients, each table at most once.

        Args:
            push: By table.
            version: That this update makes.
            epoch: The highest of all batches applied so far, these included.
            number: Updates of the span before this one.
            scale: The gradients are multiplied by it; or by table, of each in the push.
            rate_factor: The learning rate is multiplied by it.
            seed: Of stochastic rounding: ``batch_seed`` of the batch.
        """
        pushed = push if isinstance(push, TableRows) else TableRows.of(push)
        common = RowPush(version, epoch, number, rate_factor, seed)
        self._version, self._epoch = version, epoch
        for table, gradients, missing in self._calls.update(pushed, common, scale):
            self._make(table, gradients, common, missing, scale)
        for table, count in zip(pushed.tables.tolist(), pushed.counts.tolist(), strict=True):
            if self._tables[table].expires:
                self._tables[table].grow_older(version, epoch, count)

    def _make(
        self,
        table: RowTable,
        push: TableGradients,
        common: RowPush,
        missing: Numbers,
        scale: float | Mapping[int, float],
    ) -> None:
        """Make rows, as far as they are admitted and there is room, and update them."""
        before = table.size_bytes
        made = table.make(push.ids, common, missing, self.memory.room_bytes())
        if made.size:
            new = TableRows.of([TableGradients(push.table, push.ids[made], push.gradients[made])])
            none = list(self._calls.update(new, common, scale))
            assert not none, "they were made just now"
        taken = table.size_bytes - before
        self._size_bytes += taken
        self.memory.taken_bytes += taken

    def add(self, push: TableRows | Sequence[TableGradients], batch: Batch, weight: float, *, is_first: bool) -> None:
        """Keep a contribution to the open round.

        Args:
            push: By table. Kept, not copied.
            batch: Whose gradients they are.
            weight: They are multiplied by it.
            is_first: What was kept before is of an older round: drop it.
        """
        if is_first:
            self._round.clear()
        pushed = push if isinstance(push, TableRows) else TableRows.of(push)
        self._round.append(_Contribution(batch, weight, pushed))

    def update_round(
        self,
        *,
        version: int,
        epoch: int,
        number: int,
        scale: float | Mapping[int, float] = 1.0,
        rate_factor: float = 1.0,
        seed: int = 0,
        is_ordered: bool = False,
    ) -> None:
        """Apply the sum of all contributions to the open round.

        Args:
            version: That this update makes.
            epoch: The highest of all batches applied so far.
            number: Updates of the span before this one.
            scale: Or by table, of each that somebody pushed to: a mean is that of the batches that did.
            rate_factor: The learning rate is multiplied by it.
            seed: Of stochastic rounding.
            is_ordered: Add up in the order of the batches, not of arrival.
        """
        contributions, self._round = self._round, []
        if not contributions:
            return
        if is_ordered:
            contributions.sort(key=lambda one: one.batch)
        push, weights = _summed(contributions, self.specs)
        by = scale if isinstance(scale, Mapping) else dict.fromkeys(weights, scale)
        self.update(
            push,
            version=version,
            epoch=epoch,
            number=number,
            scale={table: by[table] * weight for table, weight in weights.items()},
            rate_factor=rate_factor,
            seed=seed,
        )

    def counts(self, table: int) -> RowCounts:
        """Figures of a table."""
        counts = self._tables[table].counts(self._version, self._epoch)
        return replace(counts, reads=int(self._reads[table]), hits=int(self._hits[table]))

    @property
    def size_bytes(self) -> int:
        """Memory of all tables."""
        return sum(table.size_bytes for table in self._tables)

    def _note_size(self) -> None:
        before, self._size_bytes = self._size_bytes, self.size_bytes
        self.memory.taken_bytes += self._size_bytes - before

    def close(self) -> None:
        """Nobody uses it any more: its memory is given back with it."""
        self.memory.taken_bytes -= self._size_bytes
        self._size_bytes = 0

    def knows(self, file: str) -> bool:
        """Whether there can be an increment on this file."""
        return self._changes.knows(file)

    def begin_cut(
        self,
        version: int,
        epoch: int,
        *,
        file: str = "",
        after: str = "",
        is_base: bool = False,
        most_bytes: int | None = None,
    ) -> RowCut:
        """Cut what is there now. The cut may be read while earlier ones are still being read.

        Args:
            version: Of the span.
            epoch: The highest of all batches applied so far.
            file: The file that is made of it, by which later cuts may name it; empty: none, so it removes nothing and
                later increments do not count from it.
            after: The newest file that counts; a cut has what has changed since, and everything where that is unknown.
            is_base: It has everything in any case.
            most_bytes: As for ``RowCut``.

        Raises:
            MemoryError: there is none for what the cut may have to set aside; no cut is made.
            UnavailableError: as many cuts are being read as can be.
        """
        self._cuts = {line: cut for line, cut in self._cuts.items() if not cut.is_over}
        line = next((line for line in range(MAX_CUTS) if line not in self._cuts), None)
        if line is None:
            raise UnavailableError(f"{MAX_CUTS} cuts of these rows are being read: ask again")
        changes = None
        if file:
            removed = [table.remove_small(version, epoch) for table in self._tables]
            changes = self._changes.cut(file, after, changes_of(self._tables, removed, self._adopted))
            self._adopted = np.zeros(BUCKETS, np.bool_)
        cut = RowCut(self._tables, line, version, epoch, None if is_base else changes, most_bytes)
        for other in self._cuts.values():
            other.settle()
        for table in self._tables:
            table.begin_cut(is_for_file=bool(file))
        cut.begin()
        self._cuts[line] = cut
        return cut

    # buckets that move

    def release(self, buckets: Sequence[int], version: int, epoch: int) -> MovedBuckets:
        """Take buckets out: the store has none of their rows afterwards. Cuts that are being read still give them.

        Args:
            buckets: Of this store.
            version: Of the span.
            epoch: The highest of all batches applied so far.

        Raises:
            BusyError: a round is open; ask again when it has closed.
        """
        self._require_no_round()
        those = list(buckets)
        found = [chunk for table in self._tables for chunk in table.release(those, table.oldest(version, epoch))]
        versions = version + self.shifts[those]
        given_up = np.array([table.given_up[those] for table in self._tables])
        sketches = tuple(table.sketch.reshape(BUCKETS, -1)[those] for table in self._tables)
        self.shifts[those] = 0
        for table in self._tables:
            table.given_up[those] = table.sketch.reshape(BUCKETS, -1)[those] = 0
        return MovedBuckets(tuple(buckets), versions, epoch, given_up, sketches, tuple(found))

    def adopt(self, moved: MovedBuckets, version: int) -> None:
        """Put buckets in that another store has released; all goes on as it would have there.

        Args:
            moved: As released. The epoch counts for the span from now on.
            version: Of the span.

        Raises:
            BusyError: a round is open, or there is no memory for the rows; nothing was done.
        """
        self._require_no_round()
        room_bytes = self.memory.room_bytes()
        if room_bytes < sum(self._tables[chunk.table].bytes_of(chunk) for chunk in moved.chunks):
            raise BusyError("there is no memory for the rows of buckets that are to move here: give it more")
        self.take(moved, version)

    def take(self, moved: MovedBuckets, version: int) -> None:
        """Put buckets in as ``adopt`` does, however much memory they need."""
        those = list(moved.buckets)
        self.shifts[those] = moved.versions - version
        for table, given_up, sketch in zip(self._tables, moved.given_up, moved.sketches, strict=True):
            table.given_up[those] = given_up
            table.sketch.reshape(BUCKETS, -1)[those] = sketch
        for chunk in moved.chunks:
            table = self._tables[chunk.table]
            table.allow(table.bytes_of(chunk))
            table.restore(chunk)
        self._epoch = max(self._epoch, moved.epoch)
        self._adopted[those] = True
        self._note_size()

    def charge(self, memory: RowMemory) -> None:
        """Count the rows in another memory from now on."""
        self.memory = memory
        memory.taken_bytes += self._size_bytes

    def drop_round(self) -> None:
        """Forget the contributions to the open round."""
        self._round.clear()

    def _require_no_round(self) -> None:
        if self._round:
            raise BusyError("buckets of tables do not move while a round is open: ask again when it has closed")

    def restore_shifts(self, shifts: Numbers, counting: npt.NDArray[np.bool_]) -> None:
        """Restore the shifts of the counting buckets before their rows. ``shifts`` is empty if all of them are zero."""
        if shifts.size:
            self.shifts[counting] = shifts[counting]

    def restore(self, chunk: RowChunk, counting: npt.NDArray[np.bool_] | None = None) -> None:
        """Add rows from a file, before the store is used.

        A base comes before its increments: a row that is known is replaced. All rows count as changed, so the next cut
        should be a base.

        Args:
            chunk: The rows.
            counting: (buckets,): the buckets whose rows are added; None for all of the store.
        """
        if counting is None:
            counting = np.isin(np.arange(BUCKETS), self.buckets)
        found = buckets_of(chunk.ids, self.specs[chunk.table].salt)
        self._tables[chunk.table].restore(chunk.chosen(counting[found]))
        self._note_size()

    def restore_removed(self, table: int, removed: Ids, counting: npt.NDArray[np.bool_]) -> None:
        """Remove the rows that were removed before an increment was cut; called before its rows are restored."""
        found = buckets_of(removed, self.specs[table].salt)
        self._tables[table].remove(removed[counting[found]])

    def restore_table(self, table: int, cut: CutTable, buckets: range = range(BUCKETS)) -> None:
        """Remove what had expired at a cut, after its rows and those that it is built on were restored.

        Args:
            table: Its number.
            cut: What it said of this table.
            buckets: Of the store that the cut is of.
        """
        self._tables[table].restore_table(cut, buckets)


def _summed(contributions: Sequence[_Contribution], specs: Sequence[TableSpec]) -> tuple[TableRows, dict[int, float]]:
    """The sum of contributions by table and id, and by table what it has to be multiplied by.

    What comes once is as it came: its weight is a factor.
    """
    first = contributions[0]
    if len(contributions) == 1:
        return first.push, dict.fromkeys(first.push.tables.tolist(), first.weight)
    by_table: dict[int, list[tuple[float, TableGradients]]] = {}
    for one in contributions:
        for part in one.push:
            by_table.setdefault(part.table, []).append((one.weight, part))
    sums: list[TableGradients] = []
    weights: dict[int, float] = {}
    for table, parts in sorted(by_table.items()):
        if len(parts) == 1:
            ((weights[table], part),) = parts
            sums.append(part)
        else:
            weights[table] = 1.0
            sums.append(TableGradients(table, *_combined(parts, specs[table].dim)))
    return TableRows.of(sums), weights


def _combined(parts: Sequence[tuple[float, TableGradients]], dim: int) -> tuple[Ids, Floats]:
    """The weighted sum of contributions, by id."""
    most = sum(part.ids.size for _, part in parts)
    index = np.full(index_size(most), -1, np.int64)
    unique, sums = np.empty(most, np.uint64), np.empty((most, dim), np.float32)
    count = 0
    for weight, part in parts:
        count = row_kernel(row_rules.combine)(part.ids, part.gradients, weight, index, unique, sums, count)
    return unique[:count], sums[:count]
