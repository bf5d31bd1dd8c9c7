"""What is declared of a table."""

# ruff: noqa: RUF009 - number() makes a dataclass field, like field()

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from flightedl.domain.model.initial import Init, Zeros, stream_key
from flightedl.domain.model.optimizers import Optimizer
from flightedl.domain.model.parameters import ITEM_SIZES_BYTES, NAME_LENGTH_LIMIT
from flightedl.domain.model.settings import Limits, Setting, checked, number
from flightedl.domain.tables.evict import Evict
from flightedl.domain.tables.optimizers import check_row_optimizer, counts_updates
from flightedl.domain.tables.placement import BUCKETS, salt_of
from flightedl.errors import UsageError

MAX_DIM = 1 << 14
_WORD_BYTES = 4


@dataclass(frozen=True, slots=True)
class TableSpec(Setting):
    """An embedding table, as declared.

    Raises:
        UsageError: a setting is out of its limits, or the optimizer is none for rows.
    """

    name: str
    #: Elements of a row.
    dim: int
    optimizer: Optimizer
    init: Init = Zeros()
    #: Of the rows as they are kept; gradients and slots are float32.
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    #: How 16-bit rows are rounded: stochastically, by the identity of the batch, so that a retry rounds the same.
    rounding: Literal["stochastic", "nearest"] = "stochastic"
    #: Of the first values.
    seed: int = number(0, at_least=0, below=2**63)
    #: What a read of an id without a row gives: its first values, zeros, or an error.
    unknown: Literal["init", "zero", "error"] = "init"
    #: The row is made by this push of its id; the gradients of those before are dropped.
    admit_after: int = number(1, at_least=1, at_most=255)
    #: How pushes before admission are counted: exactly, in 24 bytes or less for each id, or by a count-min sketch.
    admission: Literal["exact", "sketch"] = "exact"
    #: Of a sketch, shared out among the buckets, at least 64 KiB: see ``sketch_error``.
    sketch_bytes: int = number(1 << 22, at_least=1 << 10, at_most=1 << 30)
    evict: Evict | None = None
    #: Path or URL of a Parquet file with the rows that are there before the first push; empty: none.
    first_rows: str = ""

    def check(self) -> None:
        if not 0 < len(self.name) <= NAME_LENGTH_LIMIT:
            raise UsageError(f"table name {self.name!r:.80} must be text of 1 to {NAME_LENGTH_LIMIT} characters")
        checked("TableSpec: dim", self.dim, int, Limits(at_least=1, at_most=MAX_DIM))
        check_row_optimizer(f"table {self.name!r}", self.optimizer)

    @property
    def salt(self) -> int:
        """Of its ids, see ``placement``."""
        return salt_of(self.name)

    @property
    def key(self) -> int:
        """Of its first values, see ``domain.model.initial``."""
        return stream_key(self.seed, self.salt)

    @property
    def counts_updates(self) -> bool:
        """Whether a row knows how many updates it has had."""
        return counts_updates(self.optimizer)

    @property
    def slot_count(self) -> int:
        """Numbers of all slots of a row."""
        return sum(slot.width(self.dim) for slot in self.optimizer.slots)

    def oldest_epoch(self, epoch: int) -> int:
        """The lowest epoch in which a row may have been updated last to exist in ``epoch``, see ``Evict``."""
        unused = None if self.evict is None else self.evict.unused_epochs
        return 0 if unused is None else max(0, epoch - unused)

    @property
    def row_words(self) -> int:
        """Words of 4 bytes that a row takes: id, what has to be known of its history, slots, values."""
        evict = self.evict
        history = (
            self.counts_updates,
            evict is not None and evict.goes_by_version,
            evict is not None and evict.goes_by_epoch,
        )
        values = -(-self.dim * ITEM_SIZES_BYTES[self.dtype] // _WORD_BYTES)
        return 2 + sum(history) + self.slot_count + values

    @property
    def bucket_limit(self) -> int | None:
        """Rows that ``evict`` allows in each bucket, at least one; None: any number."""
        if self.evict is None:
            return None
        limits = [
            self.evict.max_rows,
            None if self.evict.max_bytes is None else self.evict.max_bytes // (self.row_words * _WORD_BYTES),
        ]
        given = [limit for limit in limits if limit is not None]
        return -(-min(given) // BUCKETS) if given else None

    def sketch_error(self, pushes: int) -> float:
        """By how much a sketch counts an id too high at most, with a probability of 98 %, after so many pushes of ids.

        It is e / width for each push (Cormode & Muthukrishnan 2005), and less by conservative update.
        """
        return 2.718281828 * pushes / (self.sketch_bytes // 4)


def batch_seed(epoch: int, task: int, batch: int) -> int:
    """Return the seed of an update's stochastic rounding, from its batch or the first batch of a round."""
    return (epoch << 40 ^ task << 20 ^ batch) & ((1 << 64) - 1)
