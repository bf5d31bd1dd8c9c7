"""Rows of the tables in a follower's copy.

This object has a store for each pserver. Each bucket has an owner, a pserver whose store is read. A base is built in a
new store, which then replaces the pserver's previous store. Before a moved bucket's owner changes, the bucket is
complete in the new owner's store, so no rows are copied between stores.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from flightedl.domain.model.optimizers import SGD
from flightedl.domain.tables.evict import Evict
from flightedl.domain.tables.placement import BUCKETS, buckets_of
from flightedl.domain.tables.spec import TableSpec
from flightedl.errors import BusyError, MessageError
from flightedl.rowstore.tables import RowTables
from flightedl.rowstore.values import RowChunk
from flightedl.wire.changes import Buffer, Change

Ids = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float32]

#: Number of versions or epochs that prevents rows from expiring in the copy, because the pserver removes them.
_NEVER = (1 << 31) - 1
_ALL = np.ones(BUCKETS, np.bool_)
_ITEM_TYPES: dict[str, npt.DTypeLike] = {"float32": np.float32, "float16": np.uint16, "bfloat16": np.uint16}


def followed(spec: TableSpec) -> TableSpec:
    """Return the spec that a follower uses: without slots, admission and limits, but with the ages of rows."""
    evict = spec.evict
    if evict is not None:
        unused = [_NEVER if needed else None for needed in (evict.needs_version, evict.needs_epoch)]
        evict = None if unused == [None, None] else Evict(unused_versions=unused[0], unused_epochs=unused[1])
    return replace(spec, optimizer=SGD(lr=1.0), admit_after=1, evict=evict, first_rows="")


def array_of(data: Buffer, dtype: npt.DTypeLike, name: str) -> npt.NDArray[Any]:
    """Return the numbers in some bytes of a change. Raises MessageError if the last number is incomplete."""
    try:
        return np.frombuffer(data, dtype)
    except ValueError:
        raise MessageError(f"a change of {name!r:.80} ends in the middle of a number") from None


class FollowedTables:
    """Rows of all tables. The caller must serialize all calls except ``begin`` and ``add``, which use a new store.

    Args:
        specs: The job's tables.
    """

    def __init__(self, specs: Sequence[TableSpec]) -> None:
        self._specs = [followed(spec) for spec in specs]
        self._numbers = {spec.name: number for number, spec in enumerate(specs)}
        self._stores: dict[int, RowTables] = {}
        #: (buckets,) Pserver whose store contains the bucket; -1 if no store contains it yet.
        self._owners = np.full(BUCKETS, -1, np.int64)

    def begin(self) -> RowTables:
        """Return a store without rows."""
        return RowTables(self._specs, range(BUCKETS))

    def check(self, change: Change) -> None:
        """Raise MessageError if a change does not match the tables."""
        if change.kind in {"clear", "expiry"} and not 0 <= change.start <= change.stop <= BUCKETS:
            raise MessageError(f"the job has no buckets {change.start} to {change.stop}")
        match change.kind:
            case "removed":
                self._number(change.name)
                array_of(change.ids, np.uint64, change.name)
            case "rows":
                self._chunk(change)
            case "expiry":
                self._number(change.name)
                if array_of(change.versions, np.int64, change.name).size != change.stop - change.start:
                    raise MessageError(f"the ages of table {change.name!r:.80} are not those of its buckets")

    def add(self, store: RowTables, change: Change) -> None:
        """Add the rows of a change to a store. Raises MessageError if they do not match the table."""
        chunk = self._chunk(change)
        store.restore(chunk, _ALL)
        if store.counts(chunk.table).refused:
            raise BusyError(f"this process has no memory left for the rows of table {change.name!r:.80}")

    def _chunk(self, change: Change) -> RowChunk:
        number = self._number(change.name)
        spec = self._specs[number]
        ids = array_of(change.ids, np.uint64, change.name)
        values = array_of(change.values, _ITEM_TYPES[spec.dtype], change.name)
        versions, epochs = (array_of(each, np.uint32, change.name) for each in (change.versions, change.epochs))
        if values.size != ids.size * spec.dim or {versions.size, epochs.size} != {ids.size}:
            raise MessageError(f"rows of table {spec.name!r:.80} have another size than declared")
        nothing = np.zeros(ids.size, np.uint32)
        slots = np.empty((ids.size, 0), np.float32)
        values = values.reshape(ids.size, spec.dim)
        return RowChunk(number, False, ids, nothing, versions, epochs, slots, values)

    def apply(
        self, server: int, changes: Sequence[Change], store: RowTables | None, owned: npt.NDArray[np.bool_]
    ) -> None:
        """Apply the changes of a message in order.

        Args:
            server: The pserver that sent it.
            changes: All changes about tables; of a base, without rows.
            store: New store with the rows of a base; None for an increment.
            owned: (buckets,): True for the buckets of which the pserver is the newest known owner.
        """
        if store is not None:
            self._stores[server] = store
            self._owners[self._owners == server] = -1
        elif server not in self._stores:
            self._stores[server] = self.begin()
        present = self._stores[server]
        for change in changes:
            buckets = range(change.start, change.stop)
            if change.kind == "clear":
                if store is None and buckets:
                    present.release(buckets, 0, 0)
                mine = np.zeros(BUCKETS, np.bool_)
                mine[buckets.start : buckets.stop] = True
                self._owners[mine & owned] = server
            elif change.kind == "removed":
                present.restore_removed(self._number(change.name), np.frombuffer(change.ids, np.uint64), _ALL)
            elif change.kind == "rows":
                self.add(present, change)
            elif change.kind == "expiry":
                oldest = np.frombuffer(change.versions, np.int64)
                present.expire(self._number(change.name), buckets, oldest, change.epoch)

    def _number(self, name: str) -> int:
        number = self._numbers.get(name)
        if number is None:
            raise MessageError(f"the job has no table {name!r:.80}")
        return number

    def read(self, name: str, ids: Ids) -> tuple[Floats, int]:
        """Return the (n, dim) values of distinct ids, and the number of ids that have a row."""
        number = self._number(name)
        spec, count = self._specs[number], 0
        owners = self._owners[buckets_of(ids, spec.salt)]
        out = np.empty((ids.size, spec.dim), np.float32)
        for owner in np.unique(owners).tolist():
            those = owners == owner
            part = np.empty((int(those.sum()), spec.dim), np.float32)
            store = self._stores.get(owner) or self.begin()
            count += store.read(number, np.ascontiguousarray(ids[those]), 0, 0, part)
            out[those] = part
        return out, count

    def rows(self, name: str) -> Iterator[RowChunk]:
        number = self._number(name)
        salt = self._specs[number].salt
        for server, store in self._stores.items():
            cut = store.begin_cut(0, 0, is_base=True, only=(number,))
            while (chunk := cut.next_rows()) is not None:
                yield chunk.chosen(self._owners[buckets_of(chunk.ids, salt)] == server)

    @property
    def is_complete(self) -> bool:
        """True if each bucket has an owner."""
        return not self._specs or bool((self._owners >= 0).all())
