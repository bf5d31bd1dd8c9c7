"""The rows of embedding tables on one pserver, as a span of the block protocol: its positions are buckets.

Every batch covers the span wholly, so what it costs depends neither on the number of buckets nor on that of tables.
What is kept of the rows, and how they are found and updated, is the business of ``tables``; here is when.

In a mean each table is divided by the weight of the batches that pushed to it, wherever their ids lie, as each block of
a parameter is by the weight of those that had a gradient for it. So a mean does not depend on the number of pservers.

Everything here belongs to the thread that holds ``lock``. Spans that came from one share its lock, and have tables of
their own.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from flightedl.domain.exactly_once.batches import Batch
from flightedl.domain.pserver.block_values import AddGradient, CopyBlocks, Needs, SpanPlace, Update
from flightedl.domain.tables.spec import TableSpec, batch_seed
from flightedl.messages.parameters import Outcome
from flightedl.pserver.copier import SnapshotCopier
from flightedl.pserver.rows.tables import RowCut, RowTables, TableRows
from flightedl.pserver.rows.values import NO_ROWS, Numbers
from flightedl.wire.rows import OutgoingBlocks
from flightedl.wire.table_rows import NOTHING, Ids, Kind, Section, decode_sections, encode_sections, rows_payload

#: Ids without a row that an answer names.
_NAMED_UNKNOWN = 3


class ReceivedRows(NamedTuple):
    """What a trainer sent about rows, checked."""

    #: Of each table that the batch pushed to, maybe without rows.
    gradients: TableRows = NO_ROWS
    #: Whose rows the sender wants; they are to lie one after the other.
    wanted: TableRows = NO_ROWS

    def within(self, buckets: range, tables: Sequence[TableSpec]) -> ReceivedRows:
        """The same, of some buckets only."""
        return ReceivedRows(self.gradients.within(buckets, tables), self.wanted.within(buckets, tables))


class RowSpan(SpanPlace):
    """The rows in some buckets, of all tables.

    Args:
        numbers: Of the buckets, as positions of the plan.
        first_bucket: Number of the plan's first bucket.
        rows: Of the tables.
        lock: Held around everything.
    """

    #: Buckets have no fixed places in a message.
    offsets: Sequence[int] = ()

    __slots__ = ("_first", "_kept", "_weights", "epoch", "lock", "rows")

    def __init__(
        self,
        numbers: range,
        first_bucket: int,
        rows: RowTables,
        lock: threading.Lock,
    ) -> None:
        super().__init__(numbers)
        self.rows = rows
        self.lock = lock
        #: The highest of the batches in the rows.
        self.epoch = 0
        self._first = first_bucket
        #: The open round's contributions, which the tables have too.
        self._kept: list[tuple[AddGradient, ReceivedRows]] = []
        #: Table -> weight of the open round's batches that pushed to it.
        self._weights: dict[int, float] = {}

    @property
    def buckets(self) -> range:
        """Whose rows they are."""
        return self.buckets_of(self.numbers)

    def buckets_of(self, numbers: range) -> range:
        """Positions of the plan as buckets."""
        return range(numbers.start - self._first, numbers.stop - self._first)

    def numbers_of(self, buckets: Iterable[int]) -> list[int]:
        """Return the positions of those of the buckets that are in this span."""
        return [number for bucket in buckets if (number := self._first + bucket) in self.numbers]

    def release(self) -> None:
        """Give the memory back: the rows are in other spans, or nobody wants them."""
        self.is_split = True
        self.rows.close()

    def parts(self, into: Sequence[range], version: int) -> list[RowSpan]:
        """Return a span for each stretch of buckets. The longest keeps the tables, and only the rows of others move."""
        specs, longest = self.rows.specs, max(into, key=len)
        self.rows.drop_round()
        parts = []
        for numbers in into:
            rows = self.rows
            if numbers != longest:
                rows = RowTables(specs, self.buckets_of(numbers), self.rows.memory)
                rows.take(self.rows.release(rows.buckets, version, self.epoch), version)
            part = RowSpan(numbers, self._first, rows, self.lock)
            part.epoch = self.epoch
            parts.append(part)
        self.rows.buckets = self.buckets_of(longest)
        for part in parts:
            for effect, received in self._kept:
                part.carry_out(effect, received.within(part.buckets, specs))
        return parts

    def within(self, numbers: range, wanted: TableRows) -> TableRows:
        return wanted.within(self.buckets_of(numbers), self.rows.specs)

    # pushes

    def get_ready(self, needs: Needs, received: ReceivedRows) -> ReceivedRows:
        if needs.has_sum and len(received.gradients):
            return received._replace(gradients=received.gradients.copy())
        return received

    def carry_out(
        self, effect: AddGradient | Update, received: ReceivedRows | None, *, has_checksum: bool = False
    ) -> None:
        del has_checksum
        if isinstance(effect, AddGradient):
            assert received is not None, "what has no gradient is not added"
            self._add(effect, received)
            return
        self.epoch = max(self.epoch, *(batch.epoch for batch, _ in effect.batches))
        if effect.is_of_round:
            self._update_of_round(effect)
            return
        assert received is not None, "there is nothing to update from"
        self.rows.update(
            received.gradients,
            version=effect.to_version,
            epoch=self.epoch,
            number=effect.number,
            scale=effect.scale,
            rate_factor=effect.rate_factor,
            seed=_seed_of(effect),
        )

    def _add(self, effect: AddGradient, received: ReceivedRows) -> None:
        if effect.is_first:
            self._kept.clear()
            self._weights.clear()
        self._kept.append((effect, received))
        for table in received.gradients.tables.tolist():
            self._weights[table] = self._weights.get(table, 0.0) + effect.weight
        self.rows.add(received.gradients, effect.batch, effect.weight, is_first=effect.is_first)

    def _update_of_round(self, effect: Update) -> None:
        is_ordered = any(added.is_ordered for added, _ in self._kept)
        scales = {table: 1.0 / weight if weight else 0.0 for table, weight in self._weights.items()}
        self._kept.clear()
        self.rows.update_round(
            version=effect.to_version,
            epoch=self.epoch,
            number=effect.number,
            scale=scales if effect.is_mean else effect.scale,
            rate_factor=effect.rate_factor,
            seed=_seed_of(effect),
            is_ordered=is_ordered,
        )

    # what leaves

    def piece(
        self, numbers: range, version: int, outcome: Outcome, wanted: TableRows = NO_ROWS, *, is_for_many: bool = False
    ) -> OutgoingBlocks:
        """Return the present version, with the rows that are wanted as they are now."""
        del is_for_many
        if not len(wanted):
            return OutgoingBlocks(numbers, version, outcome, NOTHING, ())
        payload, values = rows_payload(wanted.tables.tolist(), wanted.dims.tolist(), wanted.counts.tolist())
        found = self.rows.read_all(wanted, version, self.epoch, values)
        if unknown := list(self._unknown_of(version, wanted, found)):
            dims = np.array([spec.dim for spec in self.rows.specs], np.int64)
            sections = decode_sections(payload.data, dims, (Kind.ROWS,))
            payload = encode_sections([*sections, *unknown])
        return OutgoingBlocks(numbers, version, outcome, payload, ())

    def _unknown_of(self, version: int, wanted: TableRows, found: Numbers) -> Iterator[Section]:
        """Ids that have no row, of tables where that is an error; ``found``: how many of each table have one."""
        is_lacking = found < wanted.counts
        for place, one in enumerate(wanted) if is_lacking.any() else ():
            if is_lacking[place] and self.rows.specs[one.table].unknown == "error":
                yield Section(Kind.UNKNOWN, one.table, self._unknown(version, one.table, one.ids))

    def _unknown(self, version: int, table: int, ids: Ids) -> Ids:
        """The first few of the ids that have no row."""
        value = np.empty((1, self.rows.specs[table].dim), np.float32)
        found: list[int] = []
        for place in range(len(ids)):
            one = ids[place : place + 1]
            if not self.rows.read(table, one, version, self.epoch, value):
                found.append(int(one[0]))
            if len(found) == _NAMED_UNKNOWN:
                break
        return np.array(found, np.uint64)

    # checkpoints

    def cut(self, copies: SnapshotCopier, copy: CopyBlocks, lead: int | None = None) -> None:
        """Cut all rows at once: they are copied behind whatever changes them."""
        del lead
        copies.copy_rows(self, copy.version, copy.updates)

    def begin_cut(self, version: int, *, file: str = "", after: str = "", is_base: bool = True) -> RowCut:
        """What is there now, at a version, to be read behind whatever changes it; see ``RowTables.begin_cut``."""
        return self.rows.begin_cut(version, self.epoch, file=file, after=after, is_base=is_base)

    def begin_restore(self) -> None:
        """Forget all rows: those of a checkpoint come, and what came before of another one does not count."""
        self.rows.close()
        self.rows = RowTables(self.rows.specs, self.buckets, self.rows.memory)
        self.epoch = 0


def _seed_of(effect: Update) -> int:
    """Of stochastic rounding: the same whenever the same batches are applied again."""
    return batch_seed(*min((batch for batch, _ in effect.batches), default=Batch(0, 0, 0)))
