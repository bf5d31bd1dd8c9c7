"""A trainer's rows between two calls of its script: pending gradients, current lookups and prefetched rows.

Prefetched rows arrive with the previous step. In synchronous mode, they belong to that step's round, and are valid
until a newer version is known. In other modes, their values are those at the time of that step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping

from flightedl.client.tables.requests import DistinctIds
from flightedl.client.tables.traffic import Lookup, PendingRows, RowMessages, RowSums
from flightedl.domain.model.sharding import ShardPlan
from flightedl.domain.trainer.batches import CurrentBatch, Pushed
from flightedl.domain.trainer.transfers import Push, Transfer

_PREFIX = "rows of table "


class TableRows:
    """The rows of one trainer. Only the script's thread may use this object.

    Args:
        plan: The job's plan.
    """

    def __init__(self, plan: ShardPlan) -> None:
        self._place(plan)
        self._numbers = {_PREFIX + table.name: number for number, table in enumerate(plan.tables)}
        #: Gradients of the current batch.
        self.pending = PendingRows()
        self.sums = RowSums()
        #: Returns the ids that the next batch will look up, by table number, or None if they cannot be determined.
        self.next_ids: Callable[[], Mapping[int, DistinctIds] | None] = lambda: None
        #: The lookup in progress.
        self._looking_up: Lookup | None = None
        #: Lookup that a step is carrying out, or has carried out, for the next batch.
        self._ahead: Lookup | None = None
        #: Messages for the current batch. A retry sends them unchanged.
        self._made: tuple[Pushed, RowMessages] | None = None

    def _place(self, plan: ShardPlan) -> None:
        self._plan = plan
        self._keys = [found.start for found in map(plan.buckets_of, range(plan.pserver_count)) if found]

    def place(self, plan: ShardPlan) -> None:
        """Use the new owners of the buckets, and drop prefetched rows."""
        self._place(plan)
        self._ahead = None
        if self._looking_up is not None:
            self._looking_up.place(plan)
        if self._made is not None:
            batch, made = self._made
            self._made = batch, made.placed(plan)

    def name_in_sums(self, table: int) -> str:
        return _PREFIX + self._plan.tables[table].name

    def is_sent(self, current: CurrentBatch) -> bool:
        """True if a pserver has answered for the rows of the batch, or if the batch is part of an unpushed sum."""
        return current.waits or not current.answered.keys().isdisjoint(self._keys)

    def forget(self) -> None:
        """Drop all data of the current batch, because the batch is over."""
        self.pending.clear()
        self._made = None

    @contextlib.contextmanager
    def looking_up(self, lookup: Lookup) -> Iterator[None]:
        """Make transfers without a push fetch these rows inside the ``with`` block."""
        self._looking_up = lookup
        try:
            yield
        finally:
            self._looking_up = None

    def prefetched(self, ids: Mapping[int, DistinctIds], versions: Mapping[int, int] | None) -> Lookup | None:
        """Return the prefetched rows. Return None if they have other ids or are older than ``versions``."""
        ahead = self._ahead
        if ahead is None or not ahead.has(ids) or ahead.missing():
            self._ahead = None
            return None
        asked = [pserver for pserver in range(self._plan.pserver_count) if ahead.is_asked(pserver)]
        if versions is not None and any(
            ahead.version(pserver) != versions[self._plan.buckets_of(pserver).start] for pserver in asked
        ):
            return None
        return ahead

    # --- messages of transfers ---

    def of(self, transfer: Transfer) -> RowMessages:
        """Return the messages of a transfer that does not push a sum."""
        batch = transfer.batch
        has_rows = any(isinstance(call, Push) and call.blocks[-1] in self._keys for call in transfer.calls)
        if self._looking_up is not None and not has_rows:
            return RowMessages(self._plan, {}, self._looking_up)
        if batch is not None and self._made is not None and self._made[0] == batch:
            return self._made[1]
        if batch is None or not has_rows:
            return RowMessages(self._plan, {})
        made = RowMessages(self._plan, self.pending.take(), self._begin_ahead(transfer))
        self._made = (batch, made)
        return made

    def of_sum(self, identity: object, divisors: Mapping[str, int]) -> RowMessages:
        """Return the messages of a transfer that pushes a sum."""
        by_number = {self._numbers[name]: divisor for name, divisor in divisors.items() if name in self._numbers}
        self._ahead = self._next_lookup()
        return RowMessages(self._plan, self.sums.take(identity, by_number), self._ahead)

    def _begin_ahead(self, transfer: Transfer) -> Lookup | None:
        self._ahead = self._next_lookup() if transfer.pull_after_push else None
        return self._ahead

    def _next_lookup(self) -> Lookup | None:
        ids = self.next_ids()
        return Lookup(self._plan, ids) if ids else None
