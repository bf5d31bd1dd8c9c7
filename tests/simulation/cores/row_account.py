"""Checks that the right rows exist, no matter what was killed, repeated, or restored on other pservers.

* Every block has a *history*: the updates of its rows, and the cuts that removed rows. The history alone determines the
  rows. The check computes them in a different way than the product does.
* Each id has a *stretch*: the pushes to it since it last ceased to exist. The first of these pushes, as many as
  admission requires, turn the id into a row; the others update the row. So the check finds a row that is missing, has
  reappeared, is too old, or has a wrong number of updates.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from flightedl.domain.tables.spec import TableSpec
from tests.simulation.cores.rows import Moment, SpanRows, block_of, touched
from tests.simulation.cores.store import StoredShard
from tests.simulation.cores.world import Violation


class _Touch(NamedTuple):
    version: int
    epoch: int
    amount: float


class _Stretches:
    """Stretches of all ids in a block."""

    def __init__(self, spec: TableSpec, block: int, history: Iterable[Moment]) -> None:
        self._spec, self._block = spec, block
        self._of: dict[int, list[_Touch]] = {}
        self._oldest = 0
        for moment in history:
            if moment.elements is None:
                self._cut(moment)
            else:
                self._update(moment, moment.elements)

    def _is_there(self, stretch: Sequence[_Touch], version: int, epoch: int) -> bool:
        evict, last = self._spec.evict, stretch[-1]
        if evict is None:
            return True
        age, epochs = version - last.version, epoch - last.epoch
        is_young = evict.unused_versions is None or age <= evict.unused_versions
        return is_young and last.version >= self._oldest and not (evict.unused_epochs and epochs > evict.unused_epochs)

    def _counted(self, stretch: Sequence[_Touch]) -> Sequence[_Touch]:
        """Return the updates of a row; empty if the id still waits for admission."""
        return stretch[self._spec.admit_after - 1 :]

    def _update(self, moment: Moment, elements: Sequence[int]) -> None:
        for row_id, amount in touched(elements, self._block).items():
            stretch = self._of.get(row_id, [])
            if not stretch or not self._is_there(stretch, moment.version - 1, moment.epoch):
                stretch = self._of[row_id] = []
            stretch.append(_Touch(moment.version, moment.epoch, amount))
        self._oldest = moment.oldest
        self._of = {row_id: each for row_id, each in self._of.items() if each[-1].version >= self._oldest}

    def _cut(self, moment: Moment) -> None:
        """Remove small rows."""
        least = self._spec.evict.norm_below if self._spec.evict else None
        for row_id, stretch in list(self._of.items()) if least else ():
            counted = self._counted(stretch)
            is_small = abs(sum(touch.amount for touch in counted)) < (least or 0.0)
            if counted and is_small and self._is_there(stretch, moment.version, moment.epoch):
                del self._of[row_id]

    def rows(self, version: int, epoch: int) -> dict[int, tuple[int, float | None]]:
        """Return id -> (updates, value) for rows, and id -> (pushes, None) for ids waiting for admission."""
        found: dict[int, tuple[int, float | None]] = {}
        for row_id, stretch in self._of.items():
            if self._is_there(stretch, version, epoch):
                counted = self._counted(stretch)
                value = -sum(touch.amount for touch in counted) if counted else None
                found[row_id] = (len(counted) or len(stretch), value)
        return found


def require_rows(name: str, rows: SpanRows, histories: Mapping[int, Sequence[Moment]], version: int) -> None:
    """Raise Violation unless a span has exactly the rows and waiting ids that follow from its blocks' histories.

    Args:
        name: Name of the pserver or file.
        rows: The span's rows.
        histories: Block -> its history.
        version: The span's version.
    """
    spec, epoch = rows.table.spec, rows.epoch
    last = max((histories[block][-1].epoch for block in rows.numbers if histories[block]), default=0)
    if epoch != last:
        raise Violation(f"{name}: rows of blocks {rows.numbers} are of epoch {epoch}, but had batches of {last}")
    found = {
        row_id: (row.updates, row.values[0] if row.values else None)
        for row_id, row in rows.content(version, 0).rows.items()
    }
    right: dict[int, tuple[int, float | None]] = {}
    for block in rows.numbers:
        right |= _Stretches(spec, block, histories[block]).rows(version, epoch)
    if found != right:
        wrong = sorted(row_id for row_id in found.keys() | right.keys() if found.get(row_id) != right.get(row_id))
        each = "; ".join(f"{row_id}: {found.get(row_id)}, not {right.get(row_id)}" for row_id in wrong[:5])
        raise Violation(f"{name}: rows of blocks {rows.numbers} at version {version}: (updates, value) of {each}")


def require_history(name: str, block: int, values: Sequence[int], history: Sequence[Moment]) -> None:
    """Raise Violation unless a block's history contains the same batches as its values."""
    updates = [moment.elements for moment in history if moment.elements is not None]
    for element, number in enumerate(values):
        if number and (number > len(updates) or element not in updates[number - 1]):
            raise Violation(f"{name}: the rows of block {block} lack batch {element} of update {number}")


def require_limit(rows: SpanRows, before: Mapping[int, int], version: int) -> None:
    """Raise Violation unless an update has evicted exactly as many rows as the limit requires.

    ``before`` maps a block to the oldest version that it kept before the update.
    """
    evict = rows.table.spec.evict
    limit = rows.table.spec.bucket_limit
    if evict is None or limit is None:
        return
    for block in rows.numbers:
        oldest = rows.table.oldest[block]
        versions = [row.version for row_id, row in rows.table.rows.items() if block_of(row_id) == block]
        kept = [each for each in versions if each >= oldest]
        if len(kept) > limit and min(kept) < version == max(kept):
            raise Violation(f"block {block} has {len(kept)} rows after version {version}, more than {limit}")
        if oldest > before[block] and len(kept) + versions.count(oldest - 1) <= limit:
            raise Violation(f"block {block} has {len(kept)} rows after version {version}: too many were evicted")


def require_stored_rows(name: str, spec: TableSpec | None, shard: StoredShard) -> None:
    """Raise Violation unless a file has the right rows, given the files on which it is based as an increment."""
    histories = dict(zip(shard.blocks, shard.histories, strict=True))
    if spec is None:
        return
    buckets = {number for stored in shard.tables for number in stored.numbers}
    for block, values in zip(shard.blocks, shard.values, strict=True):
        if block in buckets:
            require_history(name, block, values, histories[block])
    for stored in shard.tables:
        rows = SpanRows(spec, stored.numbers)
        rows.restore([shard.chain])
        require_rows(name, rows, histories, stored.version)
