"""Life cycle of a table's rows in plain Python, with the same semantics as the pserver's store but without its speed.

The push that admits an id creates its row and updates it; later pushes update it again. Reads change nothing: reading
an id without a row returns the initial values that its row would have. An update to version v stores v and the epoch in
each row and waiting id that it touches.

The version and epoch stored in a row, the declared rules (``Evict``) and ``oldest`` determine whether the row exists.
Rows that no longer exist are treated as if they had never existed. An update sees the same rows as its trainer.

Versions never decrease. Rows expire by ``epoch``, or by ``clock`` where an update has an epoch of its own.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from flightedl.domain.tables import placement
from flightedl.domain.tables.spec import TableSpec
from tests.support.reference_updates import initial_slots, update_row

Values = list[float]


@dataclass(slots=True)
class Row:
    """A row or, if ``values`` is empty, an id that waits for admission."""

    values: Values
    slots: list[Values]
    #: Number of updates to the row, or number of pushes of the waiting id.
    updates: int
    #: Version of the last update or push of the id.
    version: int
    #: Highest epoch among the updates or pushes of the id.
    epoch: int


class ReferenceTable:
    """The rows of one table on one pserver.

    Args:
        spec: The declared table. Unlike in the product, admission is exact and values are not rounded.
        bucket_of: Function from an id to its bucket; None uses the product's placement.
    """

    def __init__(self, spec: TableSpec, bucket_of: Callable[[int], int] | None = None) -> None:
        self.spec = spec
        self._limit = spec.bucket_limit
        self.bucket_of = bucket_of or partial(placement.bucket_of, salt=spec.salt)
        #: Rows and waiting ids by 64-bit id, possibly including expired rows.
        self.rows: dict[int, Row] = {}
        self.waiting: dict[int, Row] = {}
        #: Bucket -> lowest version of its rows. Rows with lower versions were evicted because of the limit.
        self.oldest: defaultdict[int, int] = defaultdict(int)

    def exists(self, row_id: int, row: Row, version: int, epoch: int) -> bool:
        evict = self.spec.evict
        if evict is None:
            return True
        if row.version < self.oldest[self.bucket_of(row_id)]:
            return False
        if evict.unused_versions is not None and version - row.version > evict.unused_versions:
            return False
        return evict.unused_epochs is None or epoch - row.epoch <= evict.unused_epochs

    def live(self, version: int, epoch: int) -> dict[int, Row]:
        return {row_id: row for row_id, row in self.rows.items() if self.exists(row_id, row, version, epoch)}

    def read(self, row_id: int, version: int, epoch: int) -> Values | None:
        """Return a row's values, or None if the row does not exist."""
        row = self.rows.get(row_id)
        return None if row is None or not self.exists(row_id, row, version, epoch) else list(row.values)

    def first_values(self, row_id: int) -> Values:
        """Return the initial values of this id's row."""
        return self.spec.init.first_values(self.spec.key, row_id, self.spec.dim)

    def update(
        self,
        gradients: Mapping[int, Sequence[float]],
        *,
        version: int,
        epoch: int,
        clock: int | None = None,
        scale: float = 1.0,
        rate_factor: float = 1.0,
    ) -> None:
        """Apply gradients by id.

        Args:
            gradients: Gradients of shape (dim,) by 64-bit id.
            version: Version that this update makes. Schedules give the rate of the version before it.
            epoch: Highest epoch of this update's batches.
            clock: Epoch by which rows expire, if it is not ``epoch``.
            scale: Factor of the gradients.
            rate_factor: Factor of the learning rate.
        """
        rate = self.spec.optimizer.rate_at(version - 1) * rate_factor
        updated: set[int] = set()
        for row_id, gradient in gradients.items():
            row = self._admitted(row_id, version, epoch, epoch if clock is None else clock)
            if row is None:
                continue
            values, slots = np.array(row.values), [np.array(slot) for slot in row.slots]
            update_row(self.spec.optimizer, values, np.array(gradient, float), slots, row.updates, rate, scale)
            row.values, row.slots = values.tolist(), [slot.tolist() for slot in slots]
            row.updates += 1
            row.version, row.epoch = version, max(row.epoch, epoch)
            updated.add(self.bucket_of(row_id))
        for bucket in updated:
            self._give_up_oldest(bucket, version)

    def _admitted(self, row_id: int, version: int, epoch: int, clock: int) -> Row | None:
        """Return the row of a pushed id, creating it if this push admits the id. None if the id is still waiting."""
        row = self.rows.get(row_id)
        if row is not None and self.exists(row_id, row, version - 1, clock):
            return row
        self.rows.pop(row_id, None)
        waiting = self.waiting.get(row_id)
        if waiting is None or not self.exists(row_id, waiting, version - 1, clock):
            waiting = self.waiting[row_id] = Row([], [], 0, version, epoch)
        waiting.updates += 1
        waiting.version, waiting.epoch = version, max(waiting.epoch, epoch)
        if waiting.updates < self.spec.admit_after:
            return None
        del self.waiting[row_id]
        slots = [slot.tolist() for slot in initial_slots(self.spec.optimizer, self.spec.dim, float)]
        row = self.rows[row_id] = Row(self.first_values(row_id), slots, 0, version, epoch)
        return row

    def _give_up_oldest(self, bucket: int, version: int) -> None:
        """Raise ``oldest`` of a bucket until the bucket's rows are within the limit."""
        if self._limit is None:
            return
        oldest = self.oldest_at(bucket, version)
        rows = (row for row_id, row in self.rows.items() if self.bucket_of(row_id) == bucket)
        kept = sorted((row.version for row in rows if row.version >= oldest), reverse=True)
        if len(kept) > self._limit:
            # Keep either all rows of a version or none.
            self.oldest[bucket] = max(oldest, min(kept[self._limit] + 1, version))

    def oldest_at(self, bucket: int, version: int) -> int:
        """Return the lowest version of an existing row in a bucket. Rows of lower versions no longer exist."""
        unused = None if self.spec.evict is None else self.spec.evict.unused_versions
        return self.oldest[bucket] if unused is None else max(self.oldest[bucket], version - unused)

    def remove_small(self, version: int, epoch: int) -> list[int]:
        """Remove the rows whose norm is too small, as a checkpoint does. Return their ids in ascending order."""
        evict = self.spec.evict
        if evict is None or evict.norm_below is None:
            return []
        live = self.live(version, epoch)
        small = [row_id for row_id, row in live.items() if math.hypot(*row.values) < evict.norm_below]
        for row_id in small:
            del self.rows[row_id]
        return sorted(small)

    # To restore a table, call ``remove`` and then ``restore`` for each checkpoint file, and ``expire`` for the newest.

    def remove(self, row_ids: Iterable[int]) -> None:
        for row_id in row_ids:
            self.rows.pop(row_id, None)
            self.waiting.pop(row_id, None)

    def restore(self, row_id: int, row: Row) -> None:
        """Restore a row or a waiting id. It replaces an older row or waiting id with the same id."""
        copied = replace(row, values=list(row.values), slots=[list(slot) for slot in row.slots])
        if row.values:
            self.waiting.pop(row_id, None)
            self.rows[row_id] = copied
        else:
            self.waiting[row_id] = copied

    def expire(self, oldest: Mapping[int, int], oldest_epoch: int) -> None:
        """Remove rows and waiting ids last updated before ``oldest`` (of their bucket) or ``oldest_epoch``."""
        for known in (self.rows, self.waiting):
            for row_id, row in list(known.items()):
                least = oldest.get(self.bucket_of(row_id))
                if least is not None and (row.version < least or row.epoch < oldest_epoch):
                    del known[row_id]
