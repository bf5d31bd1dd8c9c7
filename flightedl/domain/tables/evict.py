"""Rules for evicting rows.

Expiry by age is *logical*: a row stops existing at the version or epoch that the rule determines, even if its memory is
freed later. Reads, pushes and replays therefore agree on which rows exist, even if no sweep has freed expired rows.

No part of an evicted row is kept. If its id is pushed again, the row is created from scratch, including admission.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from flightedl.domain.model.settings import Setting, number
from flightedl.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Evict(Setting):
    """Rules for evicting rows. A row is evicted if any of the given rules applies to it.

    Args:
        unused_versions: A row expires when more than this number of versions have passed since its last update.
        unused_epochs: A row expires when more than this number of epochs have begun since its last update. With 1, a
            row must be updated at least in every second epoch.
        max_rows: Each of the table's 1,024 buckets may contain its share of this limit, but at least one row. When an
            update leaves more rows in a bucket, the rows whose last update has the lowest version are evicted, always
            all rows with the same version, until the limit is met. Rows of the newest version are never evicted.
        max_bytes: The same for the rows' memory.
        norm_below: Rows with a smaller Euclidean norm are evicted when a checkpoint is made. If there are millions of
            such rows, each checkpoint evicts some of them.
    """

    unused_versions: int | None = number(None, at_least=1)
    unused_epochs: int | None = number(None, at_least=1)
    max_rows: int | None = number(None, at_least=1)
    max_bytes: int | None = number(None, at_least=1)
    norm_below: float | None = number(None, above=0)

    def check(self) -> None:
        names = [f.name for f in fields(self)]
        if all(getattr(self, name) is None for name in names):
            raise UsageError(f"Evict needs a rule: {', '.join(names)}")

    @property
    def needs_version(self) -> bool:
        """True if the rules depend on the version of a row's last update."""
        return not (self.unused_versions is None and self.max_rows is None and self.max_bytes is None)

    @property
    def needs_epoch(self) -> bool:
        """True if the rules depend on the epoch of a row's last update."""
        return self.unused_epochs is not None
