"""Rows of embedding tables in a range of buckets: reads, updates, rounds, cuts.

``tests.support.reference_table`` specifies how a row behaves; this module is the fast and compact implementation.
All buckets of a store have the same history. A pserver has a separate store for each range of buckets with a different
history.

The caller ensures that ids, (n,) uint64, are contiguous, distinct within a call, and in the store's buckets.
``version`` is the span's version as defined by the reference. ``epoch`` is the epoch by which
rows expire; see ``RowSpan.epoch``.

**Rounds.** ``add`` stores contributions without copying them, so the caller must not change them. When the round
closes, they are summed by id, either in order of arrival or in order of their batches. The sum is then applied like a
push.

**Cuts.** ``begin_cut`` is immediate, and the cut contains the rows as they are at that moment. A cut is read in chunks
(``RowCut.next_rows``) of one or two milliseconds each; a row that is about to change before it has been read is copied
first. Several cuts may be read independently at the same time. A cut contains either all rows (a *base*) or the changes
since the cut of an earlier file (an *increment*, see ``domain.checkpoint.changes``).

To restore a base and its increments, a reader processes the files in order: for each increment, it drops the rows that
the increment lists as removed, and then adds the increment's rows, which replace earlier states. Finally it drops the
rows that are expired according to the last cut's ``oldest`` version and epoch.

**Memory** is limited (``memory``). At the limit, no rows are created: gradients for new rows are dropped and counted as
``refused``, and reads return the values that ``unknown`` defines. Existing rows can still be updated.

Not thread-safe: the caller must hold the span's lock during every call, including calls of ``RowCut``. The GIL is
released during calls.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

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
from flightedl.messages.status import COUNTERS, TableCounts
from flightedl.rowstore.calls import RowCalls
from flightedl.rowstore.cut import ChangedSince, RowChanges, RowCut, changes_of, merged, unsettled
from flightedl.rowstore.memory import ADDRESS_BYTES, RowMemory, machine_bytes
from flightedl.rowstore.table import RowTable
from flightedl.rowstore.values import (
    CutTable,
    Floats,
    Ids,
    MovedBuckets,
    Numbers,
    RowChunk,
    TableGradients,
    TableRows,
    either_bits,
)

__all__ = ["ChangedSince", "CutTable", "RowChunk", "RowCut", "RowTables", "TableGradients", "TableRows"]


_NO_IDS: Ids = np.empty(0, np.uint64)
_NO_BITS = np.empty(0, np.uint64)
#: Maximum number of removed ids that wait for the feed to be read.
_MOST_REMOVED = 1 << 20


@dataclass(slots=True)
class _Contribution:
    batch: Batch
    weight: float
    push: TableRows


class RowTables:
    """Rows of all tables in a range of buckets.

    Args:
        specs: The tables, by number.
        buckets: Buckets of the span.
        memory: Limit on the memory of rows. It does not apply to copies for a cut and to restored rows.
    """

    def __init__(self, specs: Sequence[TableSpec], buckets: range, memory: RowMemory | None = None) -> None:
        self.specs = list(specs)
        self.buckets = buckets
        self.memory = RowMemory() if memory is None else memory
        each = min(machine_bytes(), ADDRESS_BYTES // max(1, len(self.specs)))
        handles = np.zeros((len(self.specs), HANDLE_SIZE), np.int64)
        #: (buckets,) Difference between each bucket's version and the store's (see ``kernels.row_records``).
        self.shifts = np.zeros(BUCKETS, np.int64)
        #: (buckets,) True for buckets that have moved away, until their rows are discarded. Cuts and counts omit them.
        self.foreign = np.zeros(BUCKETS, np.bool_)
        self._tables = [
            RowTable(spec, number, each, handles[number], self.shifts, self.foreign)
            for number, spec in enumerate(self.specs)
        ]
        self._calls = RowCalls(self._tables, handles)
        #: Version and epoch of the most recent push.
        self._version = self._epoch = 0
        #: For each table: number of ids that were read, and how many of them had a row.
        self._reads, self._hits = np.zeros((2, len(self.specs)), np.int64)
        #: (tables, ``COUNTERS``) Counters that came with buckets of other spans, minus those that left with buckets.
        self.moved = np.zeros((len(self.specs), len(COUNTERS)), np.int64)
        #: First of some buckets -> their counters, as last sent to another pserver.
        self.sent: dict[int, Numbers] = {}
        self._size_bytes = 0
        self._note_size()
        self._round: list[_Contribution] = []
        #: Cuts in progress, by the index of their row in ``cuts``. A finished cut may still be listed.
        self._cuts: dict[int, RowCut] = {}
        self._changes: ChangesSince[RowChanges] = ChangesSince(merged)
        #: Copies in progress for which only changes remain to be read.
        self._copies: list[ChangedSince] = []
        #: (buckets,) True for buckets that were adopted since the newest cut for a file.
        self._adopted = np.zeros(BUCKETS, np.bool_)
        #: Feed number of the next changes; 0 until the feed is first read.
        self.feed_number = 0
        #: (buckets,) Feed number at which the bucket arrived on this pserver with all of its rows.
        self.arrived = np.zeros(BUCKETS, np.int64)
        #: (table, ids) of rows that cuts have removed since the feed was last read, and the number of these rows. The
        #: list is empty if there were more than ``_MOST_REMOVED``.
        self.removed: list[tuple[int, Ids]] = []
        self.removed_count = 0

    def read(self, table: int, ids: Ids, version: int, epoch: int, out: Floats) -> int:
        """Read the rows of (n,) ids into ``out``, (n, dim) float32. For ids without a row see ``spec.unknown``.

        Returns:
            The number of ids that had a row. If ``unknown`` is "error", ids without a row read as zeros.
        """
        wanted = TableRows.of([TableGradients(table, ids, np.empty((0, self.specs[table].dim), np.float32))])
        return int(self.read_all(wanted, version, epoch, out.reshape(-1))[0])

    def read_all(self, wanted: TableRows, version: int, epoch: int, out: Floats) -> Numbers:
        """Read rows of several tables into the positions given by ``value_starts``.

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
        clock: int | None = None,
        scale: float | Mapping[int, float] = 1.0,
        rate_factor: float = 1.0,
        seed: int = 0,
    ) -> None:
        """Apply gradients to tables. Each table may occur only once.

        Args:
            push: Gradients by table.
            version: Version after this update. Schedules give the rate of the version before it.
            epoch: Highest epoch of this update's batches.
            clock: Epoch by which rows expire, if it is not ``epoch``.
            scale: Factor of the gradients, or one factor for each table in the push.
            rate_factor: Factor of the learning rate.
            seed: Seed of stochastic rounding: the ``batch_seed`` of the batch.
        """
        pushed = push if isinstance(push, TableRows) else TableRows.of(push)
        clock = epoch if clock is None else clock
        common = RowPush(version, epoch, clock, rate_factor, seed)
        self._version, self._epoch = version, clock
        for table, gradients, missing in self._calls.update(pushed, common, scale):
            self._make(table, gradients, common, missing, scale)
        for table, count in zip(pushed.tables.tolist(), pushed.counts.tolist(), strict=True):
            if self._tables[table].expires:
                self._tables[table].grow_older(version, clock, count)

    def _make(
        self,
        table: RowTable,
        push: TableGradients,
        common: RowPush,
        missing: Numbers,
        scale: float | Mapping[int, float],
    ) -> None:
        before = table.size_bytes
        made = table.make(push.ids, common, missing, self.memory.room_bytes())
        if made.size:
            new = TableRows.of([TableGradients(push.table, push.ids[made], push.gradients[made])])
            none = list(self._calls.update(new, common, scale))
            assert not none, "a row that was just created is missing"
        taken = table.size_bytes - before
        self._size_bytes += taken
        self.memory.taken_bytes += taken

    def add(self, push: TableRows | Sequence[TableGradients], batch: Batch, weight: float, *, is_first: bool) -> None:
        """Store a contribution to the open round.

        Args:
            push: Gradients by table, which are not copied.
            batch: Batch of the gradients.
            weight: Factor of the gradients.
            is_first: True to drop earlier contributions, because they belong to an older round.
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
        clock: int | None = None,
        scale: float | Mapping[int, float] = 1.0,
        rate_factor: float = 1.0,
        seed: int = 0,
        is_ordered: bool = False,
    ) -> None:
        """Apply the sum of all contributions to the open round.

        Args:
            version: Version after this update. Schedules give the rate of the version before it.
            epoch: Highest epoch of the round's batches.
            clock: Epoch by which rows expire, if it is not ``epoch``.
            scale: Factor of the gradients, or one factor for each table in the round, because a mean includes only
                batches that pushed to the table.
            rate_factor: Factor of the learning rate.
            seed: Seed of stochastic rounding.
            is_ordered: True to sum in the order of the batches, False to sum in the order of arrival.
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
            clock=clock,
            scale={table: by[table] * weight for table, weight in weights.items()},
            rate_factor=rate_factor,
            seed=seed,
        )

    def counts(self, table: int) -> TableCounts:
        counts = self._tables[table].counts(self._version, self._epoch)
        counts = replace(counts, reads=int(self._reads[table]), hits=int(self._hits[table]))
        moved = zip(COUNTERS, self.moved[table].tolist(), strict=True)
        return replace(counts, **{name: getattr(counts, name) + number for name, number in moved})

    @property
    def counters(self) -> Numbers:
        """The counters of all tables, (tables, ``COUNTERS``)."""
        counts = map(self.counts, range(len(self.specs)))
        return np.array([[getattr(each, name) for name in COUNTERS] for each in counts], np.int64).reshape(
            self.moved.shape
        )

    @property
    def size_bytes(self) -> int:
        return sum(table.size_bytes for table in self._tables)

    def _note_size(self) -> None:
        before, self._size_bytes = self._size_bytes, self.size_bytes
        self.memory.taken_bytes += self._size_bytes - before

    def close(self) -> None:
        """Stop counting the rows in ``memory``. Called when the store is no longer used."""
        self.memory.taken_bytes -= self._size_bytes
        self._size_bytes = 0

    def knows(self, file: str) -> bool:
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
        only: Collection[int] | None = None,
    ) -> RowCut:
        """Cut the current content. Earlier cuts may still be in progress.

        Args:
            version: Version of the span.
            epoch: Epoch by which rows expire.
            file: Name of the file to which the cut is written, by which later cuts refer to it. Empty for a cut without
                a file, which does not remove rows with a small norm, and on which no increment builds.
            after: The newest file in a complete checkpoint. The cut contains the changes since this file, or everything
                if the changes are unknown.
            is_base: True to cut everything.
            most_bytes: As in ``RowCut``.
            only: As for ``RowCut``.

        Raises:
            MemoryError: there is not enough memory for the copies that the cut may need. No cut was made.
            UnavailableError: the maximum number of cuts are being read.
        """
        line = self._free_line()
        changes = None
        if file:
            removed = [each.remove_small(version, epoch) for each in self._tables]
            for copy in self._copies:
                copy.note_removed(removed)
            if self.feed_number:
                self._note_removed(removed)
            changes = self._changes.cut(file, after, changes_of(self._tables, removed, self._adopted))
            self._adopted = np.zeros(BUCKETS, np.bool_)
        cut = RowCut(self._tables, line, version, epoch, None if is_base else changes, most_bytes, only)
        self._begin(cut, is_for_file=bool(file))
        return cut

    def _note_removed(self, removed: Sequence[Ids]) -> None:
        """Keep the ids for the feed. If there are too many, the next increments contain all rows instead."""
        self.removed += [(number, ids) for number, ids in enumerate(removed) if ids.size]
        self.removed_count += sum(ids.size for ids in removed)
        if self.removed_count > _MOST_REMOVED:
            self.removed = []
            self.arrived[self.buckets] = self.feed_number
            for each in self._tables:
                each.note_all_changed(self.feed_number)

    def take_removed(self) -> Sequence[tuple[int, Ids]]:
        """Return ``removed``, which starts over."""
        found, self.removed, self.removed_count = self.removed, [], 0
        return found

    def keep_cut(self, version: int, epoch: int, number: int = 0) -> RowCut:
        """Cut all rows for readers that use ``begin_again``, as long as the cut is not dropped.

        Args:
            version: Version of the span.
            epoch: Epoch by which rows expire.
            number: Feed number of the cut if the feed stops at it; otherwise 0. Later changes have higher numbers.

        Raises:
            MemoryError, UnavailableError: as for ``begin_cut``.
        """
        if number and not self.feed_number:
            self.arrived[self.buckets] = self.feed_number = number
        cut = self.begin_cut(version, epoch, is_base=True, only=range(len(self._tables)))
        if number:
            self.feed_number = max(self.feed_number, number + 1)
        return cut

    def begin_again(self, kept: RowCut, only: Collection[int], after: int | None = None) -> RowCut:
        """Begin another cut with the content of a cut from ``keep_cut``.

        Args:
            kept: The cut.
            only: Tables whose rows are read.
            after: Feed number; rows that have not changed since are omitted. None to read all rows.

        Raises:
            MemoryError, UnavailableError: as for ``begin_cut``, or the kept cut had too little memory for changes.
        """
        changed = [None if after is None else each.changed_after(after) for each in self._tables]
        cut = kept.again(self._free_line(), only, changed)
        self._begin(cut, is_for_file=False)
        return cut

    def begin_feed_cut(self, version: int, epoch: int, number: int, after: int | None, most_bytes: int) -> RowCut:
        """Cut all rows, or only the rows whose last change has a higher feed number.

        Args:
            version: Version of the span.
            epoch: Epoch by which rows expire.
            number: Number of all changes until now that have none.
            after: Number after which changes are wanted; None for all rows.
            most_bytes: As for ``RowCut``.

        Raises:
            MemoryError, UnavailableError: as for ``begin_cut``.
        """
        line = self._free_line()
        if not self.feed_number:
            self.arrived[self.buckets] = number
        self.feed_number = number
        for each in self._tables:
            each.note_changes(number)
        changes = None
        if after is not None:
            bits = [part for each in self._tables for part in (each.changed_after(after), _NO_BITS)]
            changes = RowChanges(tuple(bits), (_NO_IDS,) * len(self._tables), self.arrived > after)
        cut = RowCut(self._tables, line, version, epoch, changes, most_bytes, range(len(self._tables)))
        self._begin(cut, is_for_file=False)
        self.feed_number = number + 1
        return cut

    def _free_line(self) -> int:
        self._cuts = {line: cut for line, cut in self._cuts.items() if not cut.is_over}
        line = next((line for line in range(MAX_CUTS) if line not in self._cuts), None)
        if line is None:
            raise UnavailableError(f"{MAX_CUTS} cuts of these rows are being read: try again later")
        return line

    def _begin(self, cut: RowCut, *, is_for_file: bool) -> None:
        for other in self._cuts.values():
            other.settle()
        if self._copies:
            changed = unsettled(self._tables)
            for copy in self._copies:
                copy.note(changed)
        for table in self._tables:
            if self.feed_number:
                table.note_changes(self.feed_number)
            table.begin_cut(is_for_file=is_for_file)
        cut.begin()
        self._cuts[cut.line] = cut

    # copying to another pserver while pushes continue

    def begin_copy(self, version: int, epoch: int, copy: ChangedSince) -> RowCut:
        """Cut all rows, or only those that have changed since the previous cut of the same copy.

        Args:
            version: Version of the span.
            epoch: Epoch by which rows expire.
            copy: Changes since the previous cut. The caller passes it to ``end_copy`` after the last cut.

        Raises:
            MemoryError, UnavailableError: as for ``begin_cut``.
        """
        if copy.records is not None:
            copy.note(unsettled(self._tables))
        else:
            self._copies.append(copy)
        changes = copy.next_changes()
        cut = RowCut(self._tables, self._free_line(), version, epoch, changes)
        self._begin(cut, is_for_file=False)
        copy.records = unsettled(self._tables)
        return cut

    def end_copy(self, copy: ChangedSince) -> None:
        """Stop recording changes for a copy."""
        self._copies = [other for other in self._copies if other is not copy]

    def changed_count(self, copy: ChangedSince) -> int:
        """Return the number of records that have changed since the previous cut of a copy."""
        assert copy.records is not None, "nothing was copied yet"
        pairs = zip(copy.records, unsettled(self._tables), strict=True)
        return sum(int(np.bitwise_count(either_bits(one, other)).sum()) for one, other in pairs)

    # moving buckets

    def release(self, buckets: Sequence[int], version: int, epoch: int) -> MovedBuckets:
        """Remove these buckets and return their rows. Cuts that are being read still contain the rows.

        Args:
            buckets: Some buckets of this store.
            version: Version of the span.
            epoch: Epoch by which rows expire.

        Raises:
            BusyError: a round is open. Retry when it has closed.
        """
        if self._round:
            raise BusyError("buckets of tables do not move while a round is open: retry when it has closed")
        those = list(buckets)
        found = [chunk for table in self._tables for chunk in table.release(those, table.oldest(version, epoch))]
        moved = self.state_of(those, version, epoch)._replace(chunks=tuple(found))
        self._reset(those)
        self.moved -= moved.counters
        return moved

    def state_of(self, buckets: Sequence[int], version: int, epoch: int) -> MovedBuckets:
        """Return the state of buckets without their rows; see ``release``."""
        those = list(buckets)
        given_up = np.array([table.given_up[those] for table in self._tables])
        sketches = tuple(table.sketch.reshape(BUCKETS, -1)[those] for table in self._tables)
        self.sent[those[0]] = counters = self.counters * len(those) // len(self.buckets)
        return MovedBuckets(tuple(those), version + self.shifts[those], epoch, given_up, sketches, (), counters)

    def _reset(self, buckets: Sequence[int]) -> None:
        self.shifts[buckets] = 0
        for table in self._tables:
            table.given_up[buckets] = table.sketch.reshape(BUCKETS, -1)[buckets] = 0

    def discard(self, bucket: int) -> None:
        """Remove the rows of a bucket that has moved to another pserver."""
        for table in self._tables:
            table.discard(bucket)
        self._reset([bucket])
        self.foreign[bucket] = False

    def stage_state(self, moved: MovedBuckets, version: int) -> None:
        """Set the state of buckets being copied from another pserver. Called before the first rows and at the end.

        Args:
            moved: Versions, epoch, ``given_up`` and counters of the buckets.
            version: Version of the span.
        """
        those = list(moved.buckets)
        self.shifts[those] = moved.versions - version
        for table, given_up in zip(self._tables, moved.given_up, strict=True):
            table.give_up(those, given_up)
        self._adopted[those] = True
        self.moved[:] = moved.counters
        self._version, self._epoch = version, max(self._epoch, moved.epoch)

    def staged(self) -> None:
        """Stop counting rows as live if they have expired since they were staged."""
        for table in self._tables:
            if table.expires:
                table.grow_older(self._version, self._epoch, 0)

    def stage_sketch(self, table: int, counters: npt.NDArray[np.uint8]) -> None:
        """Set the counters of ids that wait for admission, an array (buckets of this store, counters of a bucket)."""
        self._tables[table].sketch.reshape(BUCKETS, -1)[self.buckets.start : self.buckets.stop] = counters

    @property
    def epoch(self) -> int:
        """Epoch by which rows expire."""
        return self._epoch

    def stage(self, chunk: RowChunk) -> None:
        """Add rows that are being copied from another pserver; they replace earlier states of the same rows."""
        table = self._tables[chunk.table]
        table.allow(table.bytes_of(chunk))
        table.restore(chunk)
        self._note_size()

    def take(self, moved: MovedBuckets, version: int) -> None:
        """Add buckets that another store released. Their rows behave as if they had stayed in that store.

        Args:
            moved: The released buckets. From now on, their epoch also applies to the span.
            version: Version of the span.
        """
        those = list(moved.buckets)
        for copy in self._copies:
            # Rows that were removed elsewhere are unknown here.
            copy.records = None
        self._copies = []
        self.shifts[those] = moved.versions - version
        for table, given_up, sketch in zip(self._tables, moved.given_up, moved.sketches, strict=True):
            table.given_up[those] = given_up
            table.sketch.reshape(BUCKETS, -1)[those] = sketch
        for chunk in moved.chunks:
            self.stage(chunk)
        self.moved += moved.counters
        self._epoch = max(self._epoch, moved.epoch)
        self._adopted[those] = True
        self.arrived[those] = self.feed_number
        self._note_size()

    def charge(self, memory: RowMemory) -> None:
        """Count the rows in another ``RowMemory`` instead of the present one."""
        self.memory = memory
        memory.taken_bytes += self._size_bytes

    def drop_round(self) -> None:
        self._round.clear()

    def restore_shifts(self, shifts: Numbers, counting: npt.NDArray[np.bool_]) -> None:
        """Restore the shifts of the marked buckets, before their rows. ``shifts`` is empty if all shifts are zero."""
        if shifts.size:
            self.shifts[counting] = shifts[counting]

    def restore(self, chunk: RowChunk, counting: npt.NDArray[np.bool_] | None = None) -> None:
        """Add rows from a file. Must be called before the store is used.

        A base must be added before its increments, whose rows replace those of the base. All rows count as changed, so
        the next cut should be a base.

        Args:
            chunk: The rows.
            counting: (buckets,) True for the buckets whose rows to add; None for all buckets of the store.
        """
        if counting is None:
            counting = np.isin(np.arange(BUCKETS), self.buckets)
        found = buckets_of(chunk.ids, self.specs[chunk.table].salt)
        self._tables[chunk.table].restore(chunk.chosen(counting[found]))
        self._note_size()

    def restore_removed(self, table: int, removed: Ids, counting: npt.NDArray[np.bool_]) -> None:
        """Remove the rows that an increment lists as removed. Call this before adding the increment's rows."""
        found = buckets_of(removed, self.specs[table].salt)
        self._tables[table].remove(removed[counting[found]])

    def expire(self, table: int, buckets: range, oldest: Numbers, oldest_epoch: int) -> None:
        """Remove a table's expired rows; see ``RowTable.expire``. Used for rows copied from another store."""
        self._tables[table].expire(buckets, oldest, oldest_epoch)

    def restore_table(self, table: int, cut: CutTable, buckets: range = range(BUCKETS)) -> None:
        """Remove rows that had expired by the time of a cut. Call this after adding all rows of the cut and its chain.

        Args:
            table: Number of the table.
            cut: State of the table at the cut.
            buckets: Buckets of the store from which the cut was made.
        """
        self._tables[table].restore_table(cut, buckets)


def _summed(contributions: Sequence[_Contribution], specs: Sequence[TableSpec]) -> tuple[TableRows, dict[int, float]]:
    """Return the sum of the contributions by table and id, and a factor for each table.

    A table's only contribution is returned without being copied, and the factor is its weight.
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
    most = sum(part.ids.size for _, part in parts)
    index = np.full(index_size(most), -1, np.int64)
    unique, sums = np.empty(most, np.uint64), np.empty((most, dim), np.float32)
    count = 0
    for weight, part in parts:
        count = row_kernel(row_rules.combine)(part.ids, part.gradients, weight, index, unique, sums, count)
    return unique[:count], sums[:count]
