"""Rows of embedding tables in a range of buckets, as a span of the block protocol in which buckets are blocks.

A batch is applied to the whole span, so its cost depends neither on the number of buckets nor on the number of tables.
This module determines when rows change; ``rowstore.tables`` stores, finds and updates rows.

To compute a mean, a table's sum is divided by the total weight of the batches that pushed to the table, wherever their
ids are stored. Likewise, a parameter block's sum is divided by the weight of the batches that have a gradient for the
block. So the mean does not depend on the number of pservers.

The caller must hold ``lock`` for every method. All spans of a pserver share one lock, but each span has its own tables.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import msgspec
import numpy as np

from flightedl.domain.exactly_once.batches import Batch
from flightedl.domain.pserver.block_values import AddGradient, CopyBlocks, Needs, SpanPlace, Update
from flightedl.domain.tables.spec import TableSpec, batch_seed
from flightedl.messages.parameters import Outcome
from flightedl.rowstore.tables import RowCut, RowTables, TableRows
from flightedl.rowstore.values import NO_ROWS, Floats, Numbers
from flightedl.wire.rows import OutgoingBlocks
from flightedl.wire.table_rows import NOTHING, Ids, Kind, Section, decode_sections, encode_sections, rows_payload

#: Maximum number of ids without a row that an answer lists.
_NAMED_UNKNOWN = 3


class RowCopies(Protocol):
    """Receives the rows of spans for a cut."""

    def copy_rows(self, span: RowSpan, copy: CopyBlocks) -> None:
        """Begin the cut of a span's rows, which are copied in the background. The caller holds the span's lock."""


class ReceivedRows(msgspec.Struct, frozen=True):
    """The validated content of a message about rows."""

    #: Gradients for each table to which the batch pushed, including tables that have no ids in this span.
    gradients: TableRows = NO_ROWS
    #: Ids of the rows that the sender requests, in this order and without gaps.
    wanted: TableRows = NO_ROWS

    def within(self, buckets: range, tables: Sequence[TableSpec]) -> ReceivedRows:
        return ReceivedRows(self.gradients.within(buckets, tables), self.wanted.within(buckets, tables))


class RowSpan(SpanPlace):
    """The rows of all tables in a range of buckets.

    Args:
        numbers: Positions of the buckets in the plan.
        first_bucket: Position of the plan's first bucket.
        rows: Rows of the tables.
        lock: Lock that is held during all calls.
    """

    #: Buckets have no fixed positions in a message.
    offsets: Sequence[int] = ()

    __slots__ = ("_first", "_kept", "_weights", "epoch", "lock", "rows")

    def __init__(self, numbers: range, first_bucket: int, rows: RowTables, lock: threading.Lock) -> None:
        super().__init__(numbers)
        self.rows = rows
        self.lock = lock
        #: Epoch by which rows expire: the highest of which a batch was applied after all batches of earlier epochs.
        self.epoch = 0
        self._first = first_bucket
        #: Contributions to the open round, which ``rows`` contains as well.
        self._kept: list[tuple[AddGradient, ReceivedRows]] = []
        #: Table -> total weight of the batches in the open round that pushed to it.
        self._weights: dict[int, float] = {}

    @property
    def buckets(self) -> range:
        return self.buckets_of(self.numbers)

    def buckets_of(self, numbers: range) -> range:
        return range(numbers.start - self._first, numbers.stop - self._first)

    def numbers_of(self, buckets: Iterable[int]) -> list[int]:
        return [number for bucket in buckets if (number := self._first + bucket) in self.numbers]

    def release(self) -> None:
        self.is_split = True
        self.rows.close()

    def parts(self, into: Sequence[range], version: int) -> list[RowSpan]:
        """Return a span for each range of buckets. The longest range keeps the tables; other ranges' rows are moved."""
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

    # pushes

    def get_ready(self, needs: Needs, received: ReceivedRows) -> ReceivedRows:
        if needs.has_sum and len(received.gradients):
            return ReceivedRows(received.gradients.copy(), received.wanted)
        return received

    def carry_out(self, effect: AddGradient | Update, received: ReceivedRows) -> None:
        if isinstance(effect, AddGradient):
            self._add(effect, received)
            return
        epochs = [batch.epoch for batch, _ in effect.batches]
        self.epoch = max(self.epoch, min(epochs if effect.open_epoch is None else (effect.open_epoch, *epochs)))
        if effect.is_of_round:
            self._update_of_round(effect, max(epochs))
            return
        self.rows.update(
            received.gradients,
            version=effect.to_version,
            epoch=max(epochs),
            clock=self.epoch,
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

    def _update_of_round(self, effect: Update, epoch: int) -> None:
        is_ordered = any(added.is_ordered for added, _ in self._kept)
        scales = {table: 1.0 / weight if weight else 0.0 for table, weight in self._weights.items()}
        self._kept.clear()
        self.rows.update_round(
            version=effect.to_version,
            epoch=epoch,
            clock=self.epoch,
            scale=scales if effect.is_mean else effect.scale,
            rate_factor=effect.rate_factor,
            seed=_seed_of(effect),
            is_ordered=is_ordered,
        )

    # answers

    def piece(self, numbers: range, version: int, outcome: Outcome, received: ReceivedRows) -> OutgoingBlocks:
        """Return the version and the current values of the requested rows."""
        wanted = received.wanted
        if not len(wanted):
            return OutgoingBlocks(numbers, version, outcome, NOTHING, ())
        payload, values = rows_payload(wanted.tables.tolist(), wanted.dims.tolist(), wanted.counts.tolist())
        found = self.rows.read_all(wanted, version, self.epoch, values)
        if wanted.optional.any():
            self._clear_optional(version, wanted, values)
        if unknown := list(self._unknown_of(version, wanted, found)):
            dims = np.array([spec.dim for spec in self.rows.specs], np.int64)
            sections = decode_sections(payload.data, dims, (Kind.ROWS,))
            payload = encode_sections([*sections, *unknown])
        return OutgoingBlocks(numbers, version, outcome, payload, ())

    def _clear_optional(self, version: int, wanted: TableRows, values: Floats) -> None:
        """Write zeros for optional ids that have no row."""
        for one, count, start in zip(wanted, wanted.optional.tolist(), wanted.value_starts.tolist(), strict=True):
            dim = self.rows.specs[one.table].dim
            row = np.empty((1, dim), np.float32)
            for place in range(count):
                if not self.rows.read(one.table, one.ids[place : place + 1], version, self.epoch, row):
                    values[start + place * dim : start + (place + 1) * dim] = 0

    def _unknown_of(self, version: int, wanted: TableRows, found: Numbers) -> Iterator[Section]:
        """Yield ids without a row in tables where this is an error. ``found`` counts the ids that have a row."""
        is_lacking = found < wanted.counts
        for place, one in enumerate(wanted) if is_lacking.any() else ():
            if is_lacking[place] and self.rows.specs[one.table].unknown == "error":
                others = one.ids[wanted.optional[place] if wanted.optional.size else 0 :]
                yield Section(Kind.UNKNOWN, one.table, self._unknown(version, one.table, others))

    def _unknown(self, version: int, table: int, ids: Ids) -> Ids:
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

    def cut(self, copies: RowCopies, copy: CopyBlocks) -> None:
        copies.copy_rows(self, copy)

    def begin_cut(self, version: int, *, file: str = "", after: str = "", is_base: bool = True) -> RowCut:
        """Cut the current rows, which have this ``version``; see ``RowTables.begin_cut``."""
        return self.rows.begin_cut(version, self.epoch, file=file, after=after, is_base=is_base)

    def begin_restore(self) -> None:
        """Drop all rows, including those from a checkpoint whose restore failed."""
        self.rows.close()
        self.rows = RowTables(self.rows.specs, self.buckets, self.rows.memory)
        self.epoch = 0


def _seed_of(effect: Update) -> int:
    """Return the seed for stochastic rounding. It depends only on the applied batches."""
    return batch_seed(*min((batch for batch, _ in effect.batches), default=Batch(0, 0, 0)))
