"""The life of a table's rows, in plain Python: the semantics of the pserver's store, without its speed.

A row is made by the push that admits its id, and updated by that push and later ones. Reads change nothing: an id
without a row reads as its first values would be. Ages follow applied pushes: an update that makes version v leaves
``version`` v and the epoch with each row (and each id that waits for admission) that it touched. Whether a row exists
at a version and an epoch follows from these, from the declared rules, and from ``oldest``, see ``Evict``; what does not
exist is as if it had never been there. An update that makes version v finds what existed at v - 1, which is what its
trainer has read.

Versions and epochs never go back. ``epoch`` is the highest of all batches applied so far.
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
from flightedl.testing.reference_updates import initial_slots, update_row

Values = list[float]


@dataclass(slots=True)
class Row:
    """A row, or, without values, an id that waits for admission."""

    values: Values
    slots: list[Values]
    #: Updates of the row; of an id that waits, its pushes.
    updates: int
    #: That the last of them made.
    version: int
    #: The highest of batches then.
    epoch: int


class ReferenceTable:
    """The rows of one table on one pserver.

    Args:
        spec: As declared; admission is exact here, and values are not rounded.
        bucket_of: The bucket of an id; None: as placed by the product.
    """

    def __init__(self, spec: TableSpec, bucket_of: Callable[[int], int] | None = None) -> None:
        self.spec = spec
        self._limit = spec.bucket_limit
        self.bucket_of = bucket_of or partial(placement.bucket_of, salt=spec.salt)
        #: By id as 64 bits; some of them may have expired.
        self.rows: dict[int, Row] = {}
        self.waiting: dict[int, Row] = {}
        #: By bucket: rows whose last update made a lower version have gone, so that no more than allowed are left.
        self.oldest: defaultdict[int, int] = defaultdict(int)

    def exists(self, row_id: int, row: Row, version: int, epoch: int) -> bool:
        """Whether it has not expired."""
        evict = self.spec.evict
        if evict is None:
            return True
        if row.version < self.oldest[self.bucket_of(row_id)]:
            return False
        if evict.unused_versions is not None and version - row.version > evict.unused_versions:
            return False
        return evict.unused_epochs is None or epoch - row.epoch <= evict.unused_epochs

    def live(self, version: int, epoch: int) -> dict[int, Row]:
        """The rows that exist."""
        return {row_id: row for row_id, row in self.rows.items() if self.exists(row_id, row, version, epoch)}

    def read(self, row_id: int, version: int, epoch: int) -> Values | None:
        """A row's values; None: there is no row."""
        row = self.rows.get(row_id)
        return None if row is None or not self.exists(row_id, row, version, epoch) else list(row.values)

    def first_values(self, row_id: int) -> Values:
        """What a row of this id begins with."""
        return self.spec.init.first_values(self.spec.key, row_id, self.spec.dim)

    def update(
        self,
        gradients: Mapping[int, Sequence[float]],
        *,
        version: int,
        epoch: int,
        number: int,
        scale: float = 1.0,
        rate_factor: float = 1.0,
    ) -> None:
        """Apply gradients by id.

        Args:
            gradients: (dim,) for each id, which is 64 bits.
            version: That this update makes.
            epoch: The highest of all batches applied so far, these included.
            number: Updates of the pserver's rows before this one, for the schedule.
            scale: The gradients are multiplied by it.
            rate_factor: The learning rate is multiplied by it.
        """
        rate = self.spec.optimizer.rate_at(number) * rate_factor
        updated: set[int] = set()
        for row_id, gradient in gradients.items():
            row = self._admitted(row_id, version, epoch)
            if row is None:
                continue
            values, slots = np.array(row.values), [np.array(slot) for slot in row.slots]
            update_row(self.spec.optimizer, values, np.array(gradient, float), slots, row.updates, rate, scale)
            row.values, row.slots = values.tolist(), [slot.tolist() for slot in slots]
            row.updates += 1
            row.version, row.epoch = version, epoch
            updated.add(self.bucket_of(row_id))
        for bucket in updated:
            self._give_up_oldest(bucket, version)

    def _admitted(self, row_id: int, version: int, epoch: int) -> Row | None:
        """The row of an id that is pushed, made now if this push admits it; None: it waits."""
        row = self.rows.get(row_id)
        if row is not None and self.exists(row_id, row, version - 1, epoch):
            return row
        self.rows.pop(row_id, None)
        waiting = self.waiting.get(row_id)
        if waiting is None or not self.exists(row_id, waiting, version - 1, epoch):
            waiting = self.waiting[row_id] = Row([], [], 0, version, epoch)
        waiting.updates += 1
        waiting.version, waiting.epoch = version, epoch
        if waiting.updates < self.spec.admit_after:
            return None
        del self.waiting[row_id]
        slots = [slot.tolist() for slot in initial_slots(self.spec.optimizer, self.spec.dim, float)]
        row = self.rows[row_id] = Row(self.first_values(row_id), slots, 0, version, epoch)
        return row

    def _give_up_oldest(self, bucket: int, version: int) -> None:
        """Raise ``oldest`` of a bucket until no more of its rows are left than allowed."""
        if self._limit is None:
            return
        oldest = self.oldest_at(bucket, version)
        rows = (row for row_id, row in self.rows.items() if self.bucket_of(row_id) == bucket)
        kept = sorted((row.version for row in rows if row.version >= oldest), reverse=True)
        if len(kept) > self._limit:
            # The highest version of which not all rows could stay goes wholly.
            self.oldest[bucket] = max(oldest, min(kept[self._limit] + 1, version))

    def oldest_at(self, bucket: int, version: int) -> int:
        """The lowest version that a row of a bucket may have been updated last at, and exist."""
        unused = None if self.spec.evict is None else self.spec.evict.unused_versions
        return self.oldest[bucket] if unused is None else max(self.oldest[bucket], version - unused)

    def remove_small(self, version: int, epoch: int) -> list[int]:
        """A checkpoint is made: rows whose norm is too small go; which ones, by rising id."""
        evict = self.spec.evict
        if evict is None or evict.norm_below is None:
            return []
        live = self.live(version, epoch)
        small = [row_id for row_id, row in live.items() if math.hypot(*row.values) < evict.norm_below]
        for row_id in small:
            del self.rows[row_id]
        return sorted(small)

    # from checkpoints: what a file says was removed goes, then its rows come; at last what the newest file says expired

    def remove(self, row_ids: Iterable[int]) -> None:
        """These were removed: rows, and ids that wait."""
        for row_id in row_ids:
            self.rows.pop(row_id, None)
            self.waiting.pop(row_id, None)

    def restore(self, row_id: int, row: Row) -> None:
        """Take a row, or an id that waits, over; what is there already of it is older."""
        copied = replace(row, values=list(row.values), slots=[list(slot) for slot in row.slots])
        if row.values:
            self.waiting.pop(row_id, None)
            self.rows[row_id] = copied
        else:
            self.waiting[row_id] = copied

    def expire(self, oldest: Mapping[int, int], oldest_epoch: int) -> None:
        """Remove what was updated last at a lower version, or in a lower epoch, from the buckets in ``oldest``."""
        for known in (self.rows, self.waiting):
            for row_id, row in list(known.items()):
                least = oldest.get(self.bucket_of(row_id))
                if least is not None and (row.version < least or row.epoch < oldest_epoch):
                    del known[row_id]
