"""A trainer's rows between the calls of its script: what waits for the step, what is looked up, what comes in advance.

In synchronous mode rows that came with a step in advance are those of the round that it was in: they are used only
while no newer version is known. In the other modes they are as old as that step.
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
    """The rows of one trainer. Belongs to the thread of the script.

    Args:
        plan: Of the job.
    """

    def __init__(self, plan: ShardPlan) -> None:
        self._place(plan)
        self._numbers = {_PREFIX + table.name: number for number, table in enumerate(plan.tables)}
        #: Of the current batch.
        self.pending = PendingRows()
        self.sums = RowSums()
        #: Which ids the next batch is going to look up, by table number; None: nobody knows.
        self.next_ids: Callable[[], Mapping[int, DistinctIds] | None] = lambda: None
        #: Looked up right now.
        self._looking_up: Lookup | None = None
        #: Came, or is to come, with a step.
        self._ahead: Lookup | None = None
        #: Made for the current batch: it is sent again as it was sent first.
        self._made: tuple[Pushed, RowMessages] | None = None

    def _place(self, plan: ShardPlan) -> None:
        self._plan = plan
        self._keys = [found.start for found in map(plan.buckets_of, range(plan.pserver_count)) if found]

    def place(self, plan: ShardPlan) -> None:
        """Let other pservers own the buckets. Rows that came in advance are looked up again."""
        self._place(plan)
        self._ahead = None
        if self._looking_up is not None:
            self._looking_up.place(plan)
        if self._made is not None:
            batch, made = self._made
            self._made = batch, made.placed(plan)

    def name_in_sums(self, table: int) -> str:
        """What a table is called among the parameters whose gradients are added up."""
        return _PREFIX + self._plan.tables[table].name

    def is_sent(self, current: CurrentBatch) -> bool:
        """Whether pservers have answered for the batch's rows, or it waits in a sum."""
        return current.waits or not current.answered.keys().isdisjoint(self._keys)

    def forget(self) -> None:
        """The current batch is over."""
        self.pending.clear()
        self._made = None

    @contextlib.contextmanager
    def looking_up(self, lookup: Lookup) -> Iterator[None]:
        """Transfers without a push bring these rows."""
        self._looking_up = lookup
        try:
            yield
        finally:
            self._looking_up = None

    def prefetched(self, ids: Mapping[int, DistinctIds], versions: Mapping[int, int] | None) -> Lookup | None:
        """Rows that came in advance; None: others are wanted, or they are older than ``versions``."""
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

    # what transfers bring

    def of(self, transfer: Transfer) -> RowMessages:
        """What a transfer sends and brings that is not of a sum."""
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
        """What the transfer of a sum sends."""
        by_number = {self._numbers[name]: divisor for name, divisor in divisors.items() if name in self._numbers}
        self._ahead = self._next_lookup()
        return RowMessages(self._plan, self.sums.take(identity, by_number), self._ahead)

    def _begin_ahead(self, transfer: Transfer) -> Lookup | None:
        self._ahead = self._next_lookup() if transfer.pull_after_push else None
        return self._ahead

    def _next_lookup(self) -> Lookup | None:
        ids = self.next_ids()
        return Lookup(self._plan, ids) if ids else None
