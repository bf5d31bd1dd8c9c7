"""When rows are given up.

By age, expiry is *logical*: a row does not exist any more from the version or epoch on at which the rule says so,
whether or not its memory was given back. So reads, pushes and replays agree without any sweep.

* ``unused_versions``: more than so many versions were made since its last update.
* ``unused_epochs``: more than so many epochs have begun since: with 1, a row must be updated at least in every second
  epoch.
* ``max_rows``, ``max_bytes``: each of the 1,024 buckets has its share of the limit, at least one row. When an update of
  rows of a bucket has left more, the bucket's rows whose last update has the lowest version go, with all of the same
  version, until no more are left than that; rows of the newest version stay in any case.
* ``norm_below``: rows whose values have a smaller Euclidean norm go when a checkpoint is made; where there are millions
  of them, some with each checkpoint.

What is left of a row that went is nothing: when its id is pushed again, it begins anew, with admission.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from flightedl.domain.model.settings import Setting, number
from flightedl.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Evict(Setting):
    """Rules by which rows go; each that is given counts. See the module."""

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
    def goes_by_version(self) -> bool:
        """Whether it must be known at which version a row was updated last."""
        return not (self.unused_versions is None and self.max_rows is None and self.max_bytes is None)

    @property
    def goes_by_epoch(self) -> bool:
        """Whether it must be known in which epoch a row was updated last."""
        return self.unused_epochs is not None
