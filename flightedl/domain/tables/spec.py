"""Declaration of a table."""

# ruff: noqa: RUF009 - number() makes a dataclass field, like field()

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from flightedl.domain.model.initial import Init, Zeros, stream_key
from flightedl.domain.model.optimizers import Optimizer
from flightedl.domain.model.parameters import ITEM_SIZES_BYTES, NAME_LENGTH_LIMIT
from flightedl.domain.model.settings import Limits, Setting, checked, number
from flightedl.domain.tables.evict import Evict
from flightedl.domain.tables.optimizers import check_row_optimizer, counts_updates
from flightedl.domain.tables.placement import BUCKETS, Ids, buckets_of, salt_of
from flightedl.errors import UsageError

MAX_DIM = 1 << 14
_WORD_BYTES = 4


@dataclass(frozen=True, slots=True)
class TableSpec(Setting):
    """A declared embedding table.

    Raises:
        UsageError: A setting is out of its limits, or the optimizer does not support rows.
    """

    name: str
    #: Elements of a row.
    dim: int
    optimizer: Optimizer
    init: Init = Zeros()
    #: Type in which rows are stored; gradients and slots are always float32.
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    #: How 16-bit rows are rounded. Stochastic rounding is seeded with the batch's identity, so retries are identical.
    rounding: Literal["stochastic", "nearest"] = "stochastic"
    #: Seed of the first values.
    seed: int = number(0, at_least=0, below=2**63)
    #: Result of reading an id that has no row: its initial values, zeros, or an error.
    unknown: Literal["init", "zero", "error"] = "init"
    #: The push of an id that creates its row: 1 for the first push. The gradients of earlier pushes are dropped.
    admit_after: int = number(1, at_least=1, at_most=255)
    #: How pushes are counted before admission: exactly, with at most 24 bytes per id, or in a count-min sketch.
    admission: Literal["exact", "sketch"] = "exact"
    #: Size of the sketch, which the buckets share. With 98% confidence, it overestimates a count after n pushes by
    #: at most e * n / (size / 4) (Cormode & Muthukrishnan 2005). Conservative updates make the error smaller.
    sketch_bytes: int = number(1 << 22, at_least=1 << 10, at_most=1 << 30)
    evict: Evict | None = None
    #: Path or URL of a Parquet file with rows that exist before the first push; empty if there are none.
    first_rows: str = ""

    def check(self) -> None:
        if not 0 < len(self.name) <= NAME_LENGTH_LIMIT:
            raise UsageError(f"table name {self.name!r:.80} must be text of 1 to {NAME_LENGTH_LIMIT} characters")
        checked("TableSpec: dim", self.dim, int, Limits(at_least=1, at_most=MAX_DIM))
        check_row_optimizer(f"table {self.name!r}", self.optimizer)

    @property
    def salt(self) -> int:
        """Salt for the table's ids (see ``placement``)."""
        return salt_of(self.name)

    @property
    def key(self) -> int:
        """Key of the random stream of initial values (see ``domain.model.initial``)."""
        return stream_key(self.seed, self.salt)

    @property
    def counts_updates(self) -> bool:
        """True if rows store their number of updates."""
        return counts_updates(self.optimizer)

    @property
    def slot_count(self) -> int:
        """Number of elements in all slots of a row together."""
        return sum(slot.width(self.dim) for slot in self.optimizer.slots)

    def oldest_epoch(self, epoch: int) -> int:
        """Return the oldest epoch of the last update of any row that still exists in ``epoch`` (see ``Evict``)."""
        unused = None if self.evict is None else self.evict.unused_epochs
        return 0 if unused is None else max(0, epoch - unused)

    @property
    def row_words(self) -> int:
        """Number of 4-byte words in a row: id, slots and values, and the update count and ages if needed."""
        values = -(-self.dim * ITEM_SIZES_BYTES[self.dtype] // _WORD_BYTES)
        return 2 + sum(self.history) + self.slot_count + values

    @property
    def history(self) -> tuple[bool, bool, bool]:
        """True for each of a row's update count, version and epoch that the row has to store."""
        evict = self.evict
        is_aged = (False, False) if evict is None else (evict.needs_version, evict.needs_epoch)
        return (self.counts_updates, *is_aged)

    @property
    def bucket_limit(self) -> int | None:
        """Maximum number of rows that ``evict`` allows in a bucket, at least one; None if there is no limit."""
        if self.evict is None:
            return None
        limits = [
            self.evict.max_rows,
            None if self.evict.max_bytes is None else self.evict.max_bytes // (self.row_words * _WORD_BYTES),
        ]
        given = [limit for limit in limits if limit is not None]
        return -(-min(given) // BUCKETS) if given else None


def have_room(spec: TableSpec, ids: Ids, existing: Ids) -> npt.NDArray[np.bool_]:
    """Return which of (n,) new ids get a row if, in this order, each bucket gets as many rows as ``evict`` allows."""
    if spec.bucket_limit is None:
        return np.ones(ids.size, np.bool_)
    room = spec.bucket_limit - np.bincount(buckets_of(existing, spec.salt), minlength=BUCKETS)
    buckets = buckets_of(ids, spec.salt)
    order = np.argsort(buckets, kind="stable")
    #: Number of ids of the same bucket that precede an id.
    ranks = np.empty(ids.size, np.int64)
    ranks[order] = np.arange(ids.size) - np.searchsorted(buckets[order], buckets[order])
    return ranks < room[buckets]


def slots_of_new_rows(spec: TableSpec, count: int) -> npt.NDArray[np.float32]:
    """Return the slots of new rows before their first update, (count, elements of all slots)."""
    slots = spec.optimizer.slots
    whole = np.repeat(np.array([slot.initial for slot in slots], np.float32), [slot.width(spec.dim) for slot in slots])
    return np.tile(whole, (count, 1))


def batch_seed(epoch: int, task: int, batch: int) -> int:
    """Return the seed for the stochastic rounding of an update, from its batch or the first batch of its round."""
    return (epoch << 40 ^ task << 20 ^ batch) & ((1 << 64) - 1)
