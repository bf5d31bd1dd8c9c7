"""Rows of one table in a store. ``kernels.row_records`` defines their memory layout."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from flightedl.domain.tables.placement import BUCKETS, buckets_of
from flightedl.domain.tables.spec import TableSpec, slots_of_new_rows
from flightedl.kernels import row_cuts, row_handles, row_records, row_rules, rows
from flightedl.kernels.compiled import Loop, half_kernels
from flightedl.kernels.compiled_rows import RowPush, init_numbers, row_kernel
from flightedl.messages.status import TableCounts
from flightedl.rowstore.layout import layouts_of, new_table, size_of
from flightedl.rowstore.norms import SmallRows
from flightedl.rowstore.values import NO_SHIFTS, CutTable, Floats, Ids, RowChunk, Values, bit_words, either_bits

#: Number of new rows to initialize at a time, so that their records stay in the processor's cache.
_CHUNK = 2048
#: Number of records that an update checks for expiry, for each id in the update.
_SWEPT_BY_ID = 2
_WORD_BYTES = 4
#: Size of the index, in bytes per record.
_INDEX_BYTES = 14
#: Minimum number of counters in a sketch: 16 in each row of a bucket's sketch.
_LEAST_SKETCH_BYTES = 64 * BUCKETS
#: A version lower than any other, even after a bucket's shift is added.
_NEVER = -(1 << 62)


def loops_of(spec: TableSpec) -> list[Loop]:
    """Return the loops that lookups and pushes of a table call."""
    wanted: list[Loop] = [rows.gather, rows.received, rows.make, row_cuts.scatter]
    wanted += [row_rules.first_values, row_rules.combine]
    if spec.admit_after > 1:
        wanted.append(rows.wait if spec.admission == "exact" else rows.count_in_sketch)
    if spec.evict is not None:
        wanted += [rows.advance, rows.give_up, rows.sweep]
    return wanted


class RowTable:
    """Rows of one table, and its ids that wait for admission. Not thread-safe.

    Args:
        spec: Declaration of the table.
        number: Number of the table.
        memory_bytes: Maximum memory of the rows.
        handle: Filled with the table's handle; see ``kernels.row_handles``.
        shifts: Shifts of the store's buckets; see ``kernels.row_records``.
        foreign: As in ``RowTables``.
    """

    def __init__(
        self,
        spec: TableSpec,
        number: int,
        memory_bytes: int,
        handle: npt.NDArray[np.int64],
        shifts: npt.NDArray[np.int64],
        foreign: npt.NDArray[np.bool_],
    ) -> None:
        self.spec = spec
        self.number = number
        self.foreign = foreign
        self._limit = spec.bucket_limit or 0
        #: See ``kernels.row_records``.
        self.ages = np.zeros(row_records.AGES * BUCKETS, np.int64)
        evict = spec.evict
        self._unused_versions = (evict.unused_versions if evict else None) or 0
        self._first_slots = slots_of_new_rows(spec, 1)[0]
        layout, waiting = layouts_of(spec, self._first_slots.size)
        self.value_words = layout[0] - layout[row_records.AT_VALUES]
        self.half = "" if spec.dtype == "float32" else spec.dtype
        self.salt, self._key = spec.salt, spec.key
        self._beside = np.empty(row_records.SCRATCH_SIZE, np.uint64), np.empty(row_records.SCRATCH_SIZE, np.int64)
        #: Records of the rows, and their index.
        self.rows = new_table(layout, memory_bytes, shifts, self.ages, self._limit, is_counted_by_age=True)
        row_handles.write_handle(handle, self.rows, self._beside, self.salt, spec.dim, self.value_words)
        is_counting = spec.admit_after > 1 and spec.admission == "exact"
        waiting_bytes = memory_bytes if is_counting else 0
        self.waiting = new_table(waiting, waiting_bytes, shifts, self.ages, is_counted_by_age=False)
        sketch_bytes = max(_LEAST_SKETCH_BYTES, 1 << (spec.sketch_bytes.bit_length() - 1))
        has_sketch = spec.admit_after > 1 and not is_counting
        #: Counters of all buckets, one bucket after the other.
        self.sketch = np.zeros(sketch_bytes if has_sketch else 0, np.uint8)
        self._init = init_numbers(spec.init)
        self._small = None if evict is None or evict.norm_below is None else SmallRows(evict.norm_below)
        self._removed = 0
        #: Set of buckets -> oldest epoch of the rows that ``expire`` has kept in these buckets.
        self._expired: dict[range, int] = {}
        #: One bit per record, for rows and for waiting ids: set if the record changed between the newest cut for a file
        #: and the newest cut of any kind.
        self._changed = [np.empty(0, np.uint64), np.empty(0, np.uint64)]
        #: For each record, the feed number of its last change; None until the feed is first read.
        self._numbers: npt.NDArray[np.uint32] | None = None
        for loop in loops_of(spec):
            row_kernel(loop)
        #: True if rows may expire.
        self.expires = evict is not None and (evict.needs_version or evict.needs_epoch)

    # reads

    def oldest(self, version: int, epoch: int) -> tuple[int, int]:
        """Return the lowest version and the lowest epoch of rows that have not expired by age."""
        return version - self._unused_versions if self._unused_versions else _NEVER, self.spec.oldest_epoch(epoch)

    def oldest_of_buckets(self, oldest: int) -> npt.NDArray[np.int64]:
        """Return, for each bucket, the lowest version of an unexpired row. ``oldest`` is a version of the store."""
        return np.maximum(oldest + self.rows.shifts, self.given_up)

    @property
    def given_up(self) -> npt.NDArray[np.int64]:
        """(buckets,) Rows with versions lower than this were evicted, because their bucket had too many rows."""
        return self.ages[row_records.GIVEN_UP : row_records.GIVEN_UP + BUCKETS]

    def fill(self, ids: Ids, missing: npt.NDArray[np.int64], out: Floats) -> None:
        """Write the values that a read returns for ids without a row. ``missing``: positions of these ids."""
        if self.spec.unknown == "init":
            self._first_values(ids, missing, out)
        else:
            out[missing] = 0

    def _first_values(self, ids: Ids, places: npt.NDArray[np.int64], out: Floats) -> None:
        row_kernel(row_rules.first_values)(ids, places, self._key, *self._init, out)
        if self.half:
            out[places] = self._from_bits(self._to_bits(out[places]))

    def _to_bits(self, values: Floats) -> npt.NDArray[np.uint16]:
        bits = np.empty(values.shape, np.uint16)
        half_kernels(self.half).to_half(np.ascontiguousarray(values).reshape(-1), bits.reshape(-1))
        return bits

    def _from_bits(self, bits: npt.NDArray[np.uint16]) -> Floats:
        values = np.empty(bits.shape, np.float32)
        half_kernels(self.half).to_float32(bits.reshape(-1), values.reshape(-1))
        return values

    # pushes

    def make(self, ids: Ids, push: RowPush, missing: npt.NDArray[np.int64], room_bytes: int) -> npt.NDArray[np.int64]:
        """Create rows for newly admitted ids, with initial values and slots.

        Args:
            ids: (n,) ids of a push.
            push: Parameters of the push that are common to all tables.
            missing: Positions of ids without a row.
            room_bytes: Maximum memory of the new rows.

        Returns:
            Positions of the ids for which rows were created.
        """
        self.allow(room_bytes)
        return self._make(ids, push, self.oldest(push.version - 1, push.clock), missing)

    def grow_older(self, version: int, epoch: int, count: int) -> None:
        """Evict rows and free expired rows, after an update of ``count`` ids."""
        oldest, _ = self.oldest(version, epoch)
        if self._limit:
            row_kernel(rows.give_up)(self.rows, version, self.oldest_of_buckets(oldest), self._limit, self._limit)
        elif self.rows.by_version.size:
            row_kernel(rows.advance)(self.rows, max(oldest, 0))
        self._sweep(version, epoch, _SWEPT_BY_ID * count)

    def allow(self, room_bytes: int) -> None:
        """Return only as many new records as fit into ``room_bytes``."""
        for table in (self.rows, self.waiting):
            size = int(table.layout[row_records.STRIDE])
            more = max(0, room_bytes) // (size * _WORD_BYTES + _INDEX_BYTES)
            table.state[row_records.RECORD_LIMIT] = min(
                table.words.size // size, int(table.state[row_records.HIGH]) + more
            )

    def _make(
        self, ids: Ids, push: RowPush, oldest: tuple[int, int], missing: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        after, admitted = self.spec.admit_after, missing.size
        if self.sketch.size:
            admitted = row_kernel(rows.count_in_sketch)(self.rows, self.sketch, ids, self.salt, after, missing)
        elif after > 1:
            age = (push.version, push.epoch, *oldest)
            admitted = row_kernel(rows.wait)(self.waiting, ids, self.salt, *age, after, missing)
        records = np.empty(admitted, np.int64)
        make = row_kernel(rows.make)
        made = make(self.rows, ids, self.salt, push.version, push.epoch, missing[:admitted], records)
        for start in range(0, made, _CHUNK):
            some, new = missing[start : start + _CHUNK][: made - start], records[start : start + _CHUNK][: made - start]
            values = np.empty((some.size, self.spec.dim), np.float32)
            row_kernel(row_rules.first_values)(ids[some], np.arange(some.size), self._key, *self._init, values)
            self._write(row_records.AT_VALUES, new, self._to_bits(values) if self.half else values)
            if self._first_slots.size:
                self._write(
                    row_records.AT_SLOTS, new, np.broadcast_to(self._first_slots, (some.size, self._first_slots.size))
                )
        return missing[:made]

    def _write(self, field: int, records: npt.NDArray[np.int64], source: Values) -> None:
        _write(self.rows, field, records, source)

    def _sweep(self, version: int, epoch: int, count: int) -> None:
        oldest = self.oldest(version, epoch)
        for table in (self.rows, self.waiting):
            if table.state[row_records.HIGH]:
                row_kernel(rows.sweep)(table, self.salt, *oldest, 0, 1024, count)

    # contents

    @property
    def size_bytes(self) -> int:
        return size_of(self.rows) + size_of(self.waiting) + self.sketch.nbytes

    def counts(self, version: int, epoch: int) -> TableCounts:
        """Return the table's statistics, without reads. ``version`` and ``epoch`` are those of the last push."""
        state, waiting = self.rows.state, self.waiting.state
        live = int(state[row_records.USED])
        if self._limit:
            expired = self.oldest_of_buckets(self.oldest(version, epoch)[0])
            row_kernel(rows.give_up)(self.rows, version, expired, 0, live)
            live = min(live, int(self.ages[row_records.LIVING : row_records.LIVING + BUCKETS].sum()))
        elif self.rows.by_version.size:
            live = min(live, int(state[row_records.LIVE]))
        if self.rows.by_epoch.size:
            first_epoch = self.oldest(0, epoch)[1]
            live = min(live, int(self.rows.by_epoch[first_epoch:].sum()))
        # Ids that wait are counted even if they have expired, as long as they are in memory.
        waiting_count = int(waiting[row_records.USED])
        if self.foreign.any():
            buckets, oldest = np.flatnonzero(self.foreign).tolist(), self.oldest(version, epoch)
            records = self._those_in(self.rows, buckets)
            chunk = self.chunk_of(self.rows.words, records, is_waiting=False, has_values=False)
            live -= self.existing(chunk, self.oldest_of_buckets(oldest[0]), oldest[1]).ids.size
            waiting_count -= self._those_in(self.waiting, buckets).size
        return TableCounts(
            name=self.spec.name,
            rows=live,
            size_bytes=self.size_bytes,
            waiting=waiting_count,
            created=int(state[row_records.CREATED]),
            not_admitted=int(state[row_records.NOT_ADMITTED] + waiting[row_records.NOT_ADMITTED]),
            refused=int(state[row_records.REFUSED] + waiting[row_records.REFUSED]),
            evicted=int(state[row_records.EVICTED]) + self._removed,
        )

    def remove_small(self, version: int, epoch: int) -> Ids:
        """Remove rows with a small norm (see ``SmallRows``). Return their ids."""
        if self._small is None:
            return np.empty(0, np.uint64)
        found = self._small.found(self, self.oldest(version, epoch))
        ids = read_records(self.rows, self.rows.words, 0, 2, found).view(np.uint64).reshape(-1)
        row_kernel(row_cuts.remove)(self.rows, found, self.salt)
        self._removed += found.size
        return ids

    def floats_of(self, records: npt.NDArray[np.int64]) -> Floats:
        values = self.values_of(self.rows.words, records)
        return self._from_bits(values.view(np.uint16)) if self.half else values.view(np.float32)

    def values_of(self, words: npt.NDArray[np.uint32], records: npt.NDArray[np.int64]) -> Values:
        """Return the records' values, (n, dim), in the table's dtype. ``words``: raw memory that holds all records."""
        found = read_records(self.rows, words, int(self.rows.layout[row_records.AT_VALUES]), self.value_words, records)
        if self.half:
            return np.ascontiguousarray(found.view(np.uint16)[:, : self.spec.dim])
        return found.view(np.float32)

    # cuts

    def shifts(self) -> npt.NDArray[np.int64]:
        """Return a copy of the buckets' shifts, or an empty array if all of them are zero."""
        return self.rows.shifts.copy() if self.rows.shifts.any() else NO_SHIFTS

    def part(self, *, is_waiting: bool) -> row_records.Table:
        return self.waiting if is_waiting else self.rows

    def changed(self, *, is_waiting: bool) -> npt.NDArray[np.uint64]:
        """Return one bit per record, set if the record has changed since the newest cut for a file."""
        table = self.part(is_waiting=is_waiting)
        return either_bits(table.dirty[: bit_words(table)], self._changed[is_waiting])

    def note_changes(self, number: int) -> None:
        """Assign a feed number to rows changed since the newest cut. The first call assigns it to all rows."""
        high = int(self.rows.state[row_records.HIGH])
        if self._numbers is None:
            self._numbers = np.full(high, number, np.uint32)
        if self._numbers.size < high:
            self._numbers = np.append(self._numbers, np.full(high, number, np.uint32))
        dirty = self.rows.dirty[: bit_words(self.rows)].view(np.uint8)
        self._numbers[np.flatnonzero(np.unpackbits(dirty, count=high, bitorder="little"))] = number

    def note_all_changed(self, number: int) -> None:
        """Assign a feed number to all rows."""
        self._numbers = None
        self.note_changes(number)

    def changed_after(self, number: int) -> npt.NDArray[np.uint64]:
        """Return one bit per row, set if the row's last change has a higher feed number; see ``note_changes``."""
        assert self._numbers is not None, "changes are noted first"
        words = bit_words(self.rows)
        bits = np.zeros(words * 8, np.uint8)
        found = np.packbits(self._numbers[: int(self.rows.state[row_records.HIGH])] > number, bitorder="little")
        bits[: found.size] = found
        return bits.view(np.uint64)

    def begin_cut(self, *, is_for_file: bool) -> None:
        """Start recording changes for a new cut. The cuts in progress no longer need the record of earlier changes."""
        for is_waiting in (False, True):
            self._changed[is_waiting] = np.empty(0, np.uint64) if is_for_file else self.changed(is_waiting=is_waiting)
            table = self.part(is_waiting=is_waiting)
            table.dirty[: bit_words(table)] = 0

    def chunk_of(
        self, words: row_records.Words, records: row_records.Records, *, is_waiting: bool, has_values: bool = True
    ) -> RowChunk:
        """Return the content of records. Waiting ids have no values. ``has_values=False`` omits those of rows, too."""
        table = self.part(is_waiting=is_waiting)
        layout = table.layout

        def column(field: int) -> npt.NDArray[np.uint32]:
            if layout[field] < 0:
                return np.zeros(records.size, np.uint32)
            return read_records(table, words, int(layout[field]), 1, records).reshape(-1)

        ids = read_records(table, words, 0, 2, records).view(np.uint64).reshape(-1)
        has_values = has_values and not is_waiting
        slot_count = self._first_slots.size if has_values else 0
        slots = read_records(table, words, int(layout[row_records.AT_SLOTS]), slot_count, records)
        nothing = (records.size, 0)
        values: Values = np.empty(nothing, np.uint16) if self.half else np.empty(nothing, np.float32)
        return RowChunk(
            self.number,
            is_waiting,
            ids,
            column(row_records.AT_UPDATES),
            column(row_records.AT_VERSION),
            column(row_records.AT_EPOCH),
            slots.view(np.float32),
            self.values_of(words, records) if has_values else values,
        )

    def restore(self, chunk: RowChunk) -> None:
        """Add rows in the store's buckets. They replace existing rows with the same ids."""
        table = self.part(is_waiting=chunk.is_waiting)
        records = np.empty(chunk.ids.size, np.int64)
        if not chunk.is_waiting and self.waiting.state[row_records.USED]:
            row_kernel(row_cuts.look_up)(self.waiting, chunk.ids, self.salt, records)
            row_kernel(row_cuts.remove)(self.waiting, records, self.salt)
        row_kernel(row_cuts.place)(table, chunk.ids, self.salt, records)
        table.state[row_records.REFUSED] += np.count_nonzero(records < 0)
        columns = {
            row_records.AT_UPDATES: chunk.updates,
            row_records.AT_VERSION: chunk.versions,
            row_records.AT_EPOCH: chunk.epochs,
        }
        for field, column in columns.items():
            if table.layout[field] >= 0:
                _write(table, field, records, column.reshape(-1, 1))
        if not chunk.is_waiting:
            self._write(row_records.AT_VALUES, records, chunk.values)
            if self._first_slots.size:
                self._write(row_records.AT_SLOTS, records, chunk.slots)
        row_kernel(row_cuts.count_touches)(table, records, self.salt)

    def release(self, buckets: Iterable[int], oldest: tuple[int, int]) -> list[RowChunk]:
        """Remove and return the rows and waiting ids of these buckets, except those that have expired by ``oldest``."""
        found = []
        for is_waiting in (False, True):
            table = self.part(is_waiting=is_waiting)
            records = self._those_in(table, buckets)
            chunk = self.chunk_of(table.words, records, is_waiting=is_waiting)
            found.append(self.existing(chunk, self.oldest_of_buckets(oldest[0]), oldest[1]))
            row_kernel(row_cuts.remove)(table, records, self.salt)
        return found

    def _those_in(self, table: row_records.Table, buckets: Iterable[int]) -> npt.NDArray[np.int64]:
        records, count = np.empty(int(table.state[row_records.USED]), np.int64), 0
        for bucket in buckets if records.size else ():
            count += row_kernel(row_cuts.those_in)(table, bucket, self.salt, records[count:])
        return records[:count]

    def discard(self, bucket: int) -> None:
        """Remove the rows and waiting ids of a bucket."""
        for table in (self.rows, self.waiting):
            row_kernel(row_cuts.remove)(table, self._those_in(table, [bucket]), self.salt)

    def give_up(self, buckets: Sequence[int], versions: npt.NDArray[np.int64]) -> None:
        """In each of these buckets, evict the rows whose version is lower than the given one."""
        if self._limit:
            given_up = self.given_up.copy()
            given_up[buckets] = versions
            row_kernel(rows.give_up)(self.rows, 0, given_up, 0, 1 << 62)
            np.maximum(self.given_up, given_up, out=self.given_up)

    def bytes_of(self, chunk: RowChunk) -> int:
        stride = int(self.part(is_waiting=chunk.is_waiting).layout[row_records.STRIDE])
        return int(chunk.ids.size) * (stride * _WORD_BYTES + _INDEX_BYTES)

    def existing(self, chunk: RowChunk, oldest: npt.NDArray[np.int64], oldest_epoch: int) -> RowChunk:
        """Return the unexpired rows of a chunk. ``oldest`` contains one version per bucket."""
        if not self.expires:
            return chunk
        layout = self.part(is_waiting=chunk.is_waiting).layout
        exists = np.ones(chunk.ids.size, np.bool_)
        if layout[row_records.AT_VERSION] >= 0:
            exists &= chunk.versions >= oldest[buckets_of(chunk.ids, self.salt)]
        if layout[row_records.AT_EPOCH] >= 0:
            exists &= chunk.epochs >= oldest_epoch
        return chunk.chosen(exists)

    def remove(self, ids: Ids) -> None:
        records = np.empty(ids.size, np.int64)
        for table in (self.rows, self.waiting):
            row_kernel(row_cuts.look_up)(table, ids, self.salt, records)
            row_kernel(row_cuts.remove)(table, records, self.salt)

    def expire(self, buckets: range, oldest: npt.NDArray[np.int64], oldest_epoch: int) -> None:
        """Remove rows whose version is lower than ``oldest`` for their bucket, or whose epoch is too low."""
        known = self.given_up[buckets.start : buckets.stop]
        if self.expires and not (self._expired.get(buckets) == oldest_epoch and np.array_equal(known, oldest)):
            known[:], self._expired[buckets] = oldest, oldest_epoch
            self.rows.state[row_records.SWEPT] = 0
            bounds, count = (buckets.start, buckets.stop), int(self.rows.state[row_records.HIGH])
            row_kernel(rows.sweep)(self.rows, self.salt, _NEVER, oldest_epoch, *bounds, count)

    def restore_table(self, cut: CutTable, buckets: range) -> None:
        """Remove rows of these buckets that had expired by the time of a cut. Restore the cut's sketch counters."""
        if self._limit:
            self.give_up(list(buckets), cut.given_up[buckets.start : buckets.stop])
        for table in (self.rows, self.waiting) if self.expires else ():
            table.state[row_records.SWEPT] = 0
            oldest, count = (cut.oldest, cut.oldest_epoch), int(table.state[row_records.HIGH])
            row_kernel(rows.sweep)(table, self.salt, *oldest, buckets.start, buckets.stop, count)
        if cut.sketch.size == self.sketch.size:
            own = self.sketch.reshape(BUCKETS, -1)[buckets.start : buckets.stop]
            np.maximum(own, cut.sketch.reshape(BUCKETS, -1)[buckets.start : buckets.stop], out=own)


def read_records(
    table: row_records.Table, words: npt.NDArray[np.uint32], at: int, width: int, records: npt.NDArray[np.int64]
) -> npt.NDArray[np.uint32]:
    """Return an (n, width) array: ``width`` words of each of the n records in ``words``, starting at word ``at``."""
    out = np.empty((records.size, width), np.uint32)
    if width:
        row_kernel(row_cuts.collect)(words, int(table.layout[row_records.STRIDE]), at, width, records, out.reshape(-1))
    return out


def _write(
    table: row_records.Table, field: int, records: npt.NDArray[np.int64], source: Values | row_records.Words
) -> None:
    is_odd = source.dtype == np.uint16 and source.shape[1] % 2
    padded = np.pad(source, ((0, 0), (0, 1))) if is_odd else source
    words = np.ascontiguousarray(padded).view(np.uint32)
    stride = int(table.layout[row_records.STRIDE])
    width = words.shape[1]
    row_kernel(row_cuts.scatter)(table.words, stride, int(table.layout[field]), width, records, words.reshape(-1))
