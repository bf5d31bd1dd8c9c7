"""The rows of embedding tables that lie in one span of buckets: reads, updates, rounds, cuts.

What becomes of a row is said in ``flightedl.domain.tables.reference``; this is the same, fast and in little memory. A
store is for buckets of one history: where a pserver's buckets differ in that, each range has a store of its own.

Ids are (n,) uint64, contiguous, without repetitions within a call (``check``), and in the store's buckets. ``version``
is the span's, see the reference; ``epoch`` the highest of all batches applied to the span so far.

**Rounds.** Contributions are kept as they came (``add``), not copied: whoever adds them leaves them alone. When the
round closes, they are summed by id, in the order of arrival, or of the batches, and the sum is applied like a push.

**Cuts.** ``begin_cut`` is instantaneous: the cut's content is what exists then, wherever its reading has got to. It is
read in chunks (``RowCut.next_rows``), each of which takes a millisecond or two; a row that changes before it was read
is set aside first. A cut has everything (a *base*) or what has changed since the cut before (an *increment*): whoever
reads a base and its increments takes the last of each row, drops those that are named as removed, and what does not
exist by the last cut's ``oldest``, version and epoch.

**Memory** is bounded by ``memory_bytes``: beyond it no new rows are made. Their gradients are dropped and counted as
``refused``; reads of them give what ``unknown`` says. Rows that are there are updated on.

Not thread-safe: the lock of the span is held around every call, here and of ``RowCut``. Calls release the GIL.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from flightedl.domain.exactly_once.batches import Batch
from flightedl.domain.tables.placement import buckets_of
from flightedl.domain.tables.reference import ReferenceTable, Row, combined
from flightedl.domain.tables.spec import TableSpec

Ids = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float32]


class TableGradients(NamedTuple):
    """What a push has for one table."""

    #: Its number: the place in the declaration.
    table: int
    #: (n,), without repetitions.
    ids: Ids
    #: (n, dim), contiguous; may be read-only and at any address.
    gradients: Floats


@dataclass(frozen=True, slots=True)
class RowCounts:
    """Figures of one table. What is counted from the store's beginning is not part of its state: it may be lost."""

    #: That exist as of the last update, and their memory with slots and the index.
    rows: int = 0
    size_bytes: int = 0
    #: Ids that wait for admission.
    waiting: int = 0
    #: Ids read, and those that had a row.
    reads: int = 0
    hits: int = 0
    #: Rows made.
    created: int = 0
    #: Gradients dropped because their id was not admitted yet, or no memory was left.
    not_admitted: int = 0
    refused: int = 0
    #: Rows found to have expired, or removed by a cut.
    evicted: int = 0


class RowChunk(NamedTuple):
    """Rows of one table as they were at a cut; n is any number."""

    table: int
    #: These are ids that wait for admission: without slots and values, ``updates`` are their pushes.
    is_waiting: bool
    #: (n,).
    ids: Ids
    #: (n,): of the row, that the last one made, and the highest epoch then; zeros where nothing depends on it.
    updates: npt.NDArray[np.uint32]
    versions: npt.NDArray[np.uint32]
    epochs: npt.NDArray[np.uint32]
    #: (n, numbers of all slots of a row), in their order.
    slots: Floats
    #: (n, dim) float32, or uint16: the bits of 16-bit floats.
    values: npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class CutTable:
    """What a cut says of a table as a whole."""

    #: See ``ReferenceTable``.
    oldest: int
    #: (n,): rows that the cut removed, see ``Evict``; also in increments, where they may be in what came before.
    removed: Ids
    #: Counters of a sketch of ids that wait; empty: there is none.
    sketch: npt.NDArray[np.uint8]


class RowCut:
    """The content of a store at one moment, while it is read."""

    def __init__(
        self, store: RowStore, version: int, epoch: int, chunks: list[RowChunk], tables: list[CutTable]
    ) -> None:
        self._store = store
        self.version = version
        self.epoch = epoch
        #: By table number.
        self.tables: Sequence[CutTable] = tables
        self._chunks = chunks

    def next_rows(self, max_bytes: int = 1 << 22) -> RowChunk | None:  # noqa: ARG002 - not yet
        """The next rows, of about so many bytes; None: that was all, and the cut is complete.

        A chunk may be empty. Its arrays are its own.
        """
        return self._chunks.pop() if self._chunks else None

    def drop(self) -> None:
        """The cut did not become part of a chain: the next increment has its changes, too. Also after its end."""


class RowStore:
    """The rows of all tables in a range of buckets.

    Args:
        specs: The tables, by number.
        buckets: Of the span.
        memory_bytes: Bound of all that the store holds; 0: most of the machine's memory.
    """

    def __init__(self, specs: Sequence[TableSpec], buckets: range, *, memory_bytes: int = 0) -> None:
        self.specs = list(specs)
        self.buckets = buckets
        self.memory_bytes = memory_bytes
        self._tables = [ReferenceTable(spec, len(buckets)) for spec in specs]
        self._round: list[tuple[Batch, float, Sequence[TableGradients]]] = []

    def check(self, table: int, ids: Ids, gradients: Floats | None = None) -> str:
        """Why these cannot be read, or pushed; empty: nothing is wrong with them."""
        if not 0 <= table < len(self.specs):
            return f"there is no table of number {table}"
        spec = self.specs[table]
        if np.unique(ids).size != ids.size:
            return f"table {spec.name!r}: an id is there twice"
        found = buckets_of(ids, spec.salt)
        if ((found < self.buckets.start) | (found >= self.buckets.stop)).any():
            return f"table {spec.name!r}: an id does not lie on this pserver"
        if gradients is not None and gradients.shape != (ids.size, spec.dim):
            return f"table {spec.name!r}: gradients have the shape {gradients.shape}, not {(ids.size, spec.dim)}"
        if gradients is not None and not np.isfinite(gradients).all():
            return f"table {spec.name!r}: a gradient is not finite"
        return ""

    def read(self, table: int, ids: Ids, version: int, epoch: int, out: Floats) -> int:
        """The rows of (n,) ids into ``out``, (n, dim) float32; what has no row as ``spec.unknown`` says.

        Returns:
            How many ids had a row. With ``unknown`` "error" those that had none are zeros.
        """
        rows, found = self._tables[table], 0
        for place, row_id in enumerate(ids.tolist()):
            values = rows.read(row_id, version, epoch)
            found += values is not None
            if values is None:
                is_first = rows.spec.unknown == "init"
                values = rows.first_values(row_id) if is_first else [0.0] * rows.spec.dim
            out[place] = values
        return found

    def update(
        self,
        push: Sequence[TableGradients],
        *,
        version: int,
        epoch: int,
        number: int,
        scale: float = 1.0,
        rate_factor: float = 1.0,
        seed: int = 0,  # noqa: ARG002 - not yet
    ) -> None:
        """Apply gradients, each table at most once.

        Args:
            push: By table.
            version: That this update makes.
            epoch: The highest of all batches applied so far, these included.
            number: Updates of the span before this one.
            scale: The gradients are multiplied by it.
            rate_factor: The learning rate is multiplied by it.
            seed: Of stochastic rounding: ``batch_seed`` of the batch; of the lowest one of a round.
        """
        for table, ids, gradients in push:
            by_id = dict(zip(ids.tolist(), gradients.tolist(), strict=True))
            self._tables[table].update(
                by_id, version=version, epoch=epoch, number=number, scale=scale, rate_factor=rate_factor
            )

    def add(self, push: Sequence[TableGradients], batch: Batch, weight: float, *, is_first: bool) -> None:
        """Keep a contribution to the open round.

        Args:
            push: By table. Kept, not copied.
            batch: Whose gradients they are.
            weight: They are multiplied by it.
            is_first: What was kept before is of an older round: drop it.
        """
        if is_first:
            self._round.clear()
        self._round.append((batch, weight, push))

    def update_round(
        self,
        *,
        version: int,
        epoch: int,
        number: int,
        scale: float = 1.0,
        rate_factor: float = 1.0,
        is_ordered: bool = False,
    ) -> None:
        """Apply the sum of all contributions to the open round; the arguments are those of ``update``.

        ``is_ordered``: add up in the order of the batches, not of arrival.
        """
        contributions, self._round = self._round, []
        if is_ordered:
            contributions.sort(key=lambda contribution: contribution[0])
        for table, rows in enumerate(self._tables):
            sums = combined(
                (weight, dict(zip(one.ids.tolist(), one.gradients.tolist(), strict=True)))
                for _, weight, push in contributions
                for one in push
                if one.table == table
            )
            if sums:
                rows.update(sums, version=version, epoch=epoch, number=number, scale=scale, rate_factor=rate_factor)

    def counts(self, table: int) -> RowCounts:
        """Figures of a table."""
        rows = self._tables[table]
        return RowCounts(len(rows.rows), len(rows.rows) * rows.spec.row_words * 4, len(rows.waiting))

    @property
    def size_bytes(self) -> int:
        """Memory of all tables."""
        return sum(self.counts(table).size_bytes for table in range(len(self.specs)))

    def begin_cut(self, version: int, epoch: int, *, is_base: bool) -> RowCut:  # noqa: ARG002 - not yet
        """What is there now, to be read from now on; one that is still being read ends.

        Args:
            version: Of the span.
            epoch: Likewise.
            is_base: Everything; else what has changed since the last cut that was not dropped.
        """
        chunks, tables = [], []
        for table, rows in enumerate(self._tables):
            removed = rows.remove_small(version, epoch)
            tables.append(CutTable(rows.oldest, np.array(removed, np.uint64), np.empty(0, np.uint8)))
            waiting = {key: row for key, row in rows.waiting.items() if rows.exists(row, version, epoch)}
            for is_waiting, found in ((False, rows.live(version, epoch)), (True, waiting)):
                chunks.append(_chunk(rows.spec, table, found, is_waiting=is_waiting))
        return RowCut(self, version, epoch, chunks, tables)

    def restore(self, rows: RowChunk) -> None:
        """Take rows over that exist, before anybody has seen the store; ids of other buckets are left out.

        A row that is there already is replaced, so that increments may follow their base.
        """
        table = self._tables[rows.table]
        spec = table.spec
        sizes = [spec.dim if slot.per_element else 1 for slot in spec.optimizer.slots]
        ends = np.cumsum(sizes)[:-1]
        found = buckets_of(rows.ids, spec.salt)
        kept = table.waiting if rows.is_waiting else table.rows
        for i in np.flatnonzero((found >= self.buckets.start) & (found < self.buckets.stop)):
            has_slots = sizes and not rows.is_waiting
            slots = [part.tolist() for part in np.split(rows.slots[i], ends)] if has_slots else []
            kept[int(rows.ids[i])] = Row(
                rows.values[i].tolist(), slots, int(rows.updates[i]), int(rows.versions[i]), int(rows.epochs[i])
            )

    def restore_table(self, table: int, cut: CutTable) -> None:
        """Take over what a cut says of a table, after the rows of that cut."""
        rows = self._tables[table]
        rows.oldest = max(rows.oldest, cut.oldest)
        for row_id in cut.removed.tolist():
            rows.rows.pop(row_id, None)


def _chunk(spec: TableSpec, table: int, rows: dict[int, Row], *, is_waiting: bool) -> RowChunk:
    def column(name: str) -> npt.NDArray[np.uint32]:
        return np.array([getattr(row, name) for row in rows.values()], np.uint32)

    slot_count = 0 if is_waiting else sum(spec.dim if slot.per_element else 1 for slot in spec.optimizer.slots)
    slots = [[number for slot in row.slots for number in slot] for row in rows.values()]
    values = [row.values for row in rows.values()]
    return RowChunk(
        table,
        is_waiting,
        np.fromiter(rows, np.uint64),
        column("updates"),
        column("version"),
        column("epoch"),
        np.array(slots, np.float32).reshape(len(rows), slot_count),
        np.array(values, np.float32).reshape(len(rows), 0 if is_waiting else spec.dim),
    )
