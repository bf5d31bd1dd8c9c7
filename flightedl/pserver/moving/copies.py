"""Copies of a pserver's blocks for its standby, as ``domain.moving.standby`` decides.

A copy is a cut like that of a checkpoint: each block is copied once, with the batches that it has applied. Dense blocks
are copied completely, and of the tables only the rows that have changed since the previous copy. Training waits only
for copies of blocks that are about to change. In sync modes, all blocks are copied at the same round.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from flightedl.domain.moving.standby import CopySource
from flightedl.errors import BusyError
from flightedl.formats.row_batches import AnyArray
from flightedl.messages.control import OrderNumber, SnapshotRequest
from flightedl.messages.moving import CopyId, CopyTicket
from flightedl.ports import Clock
from flightedl.pserver.cuts.copier import CopyMemory, SnapshotCopier
from flightedl.pserver.moving.parcels import SCHEMA, BlockState, CopyEnd, CopyHead, CopyRows, Digest, Parcel, encode
from flightedl.pserver.shard import Shard
from flightedl.pserver.stores.interface import distinct
from flightedl.pserver.stores.row_span import RowSpan
from flightedl.rowstore.tables import ChangedSince, RowTables
from flightedl.rpc.call import Call, Message
from flightedl.rpc.routes import Outgoing

_WAIT_SLICE_S = 0.02
#: Maximum number of seconds until all blocks have reached the round at which they are copied.
_LONGEST_CUT_S = 5.0


class Copies:
    """Copies that one pserver process sends. Thread-safe.

    Args:
        shard: The blocks.
        generation: Generation of the process.
        clock: Clock for waits.
        unmoved: Returns a context in which no blocks are about to move. Entering it may raise NotReadyError.
    """

    def __init__(
        self,
        shard: Shard,
        generation: int,
        clock: Clock,
        unmoved: Callable[[], contextlib.AbstractContextManager[None]],
    ) -> None:
        self._shard = shard
        self._clock = clock
        self._unmoved = unmoved
        self._source = CopySource(generation)
        self._memory = CopyMemory()
        self._sending = threading.Lock()
        #: Changes since the newest copy.
        self._changed: dict[RowTables, ChangedSince] = {}
        #: Times of the newest copy, and of the newest copy that the standby is known to have.
        self._copied_at = 0.0
        self._has_at: float | None = None

    @property
    def lag_s(self) -> float | None:
        """Age of the newest copy that the standby is known to have; None if it has none."""
        return None if self._has_at is None else self._clock.now() - self._has_at

    def copy(self, ticket: CopyTicket, election: int, call: Call) -> Outgoing:
        """Return a copy for a standby."""
        return Outgoing(SCHEMA, self._messages(ticket, election, call))

    def _messages(self, ticket: CopyTicket, election: int, call: Call) -> Iterator[Message]:
        """Yield the messages of a copy.

        Raises:
            BusyError: Another copy is being sent, or a round does not end.
            NotReadyError: Blocks are about to move.
            UnavailableError, MemoryError: There is no memory for the copy.
        """
        if not self._sending.acquire(blocking=False):
            raise BusyError("this pserver is sending a copy to another standby")
        copies: SnapshotCopier | None = None
        try:
            copy, copies = self._begin(ticket, election)
            applied = self._cut(copies, call)
            digest = Digest()
            for parcel in self._parcels(copy, copies):
                batch, metadata = encode(parcel)
                digest.update(batch.columns, metadata)
                yield batch, metadata
            yield encode(Parcel(CopyEnd(digest.text), [np.frombuffer(applied, np.uint8)]))
        finally:
            if copies is not None:
                self._shard.copying.drop(copies)
                copies.drop_rows()
            self._sending.release()

    def _begin(self, ticket: CopyTicket, election: int) -> tuple[CopyId, SnapshotCopier]:
        shard, newest = self._shard, self._source.newest
        if ticket.has is None:
            self._has_at = None
        elif newest is not None and ticket.has == newest.copy:
            self._has_at = self._copied_at

        def begin(versions: Mapping[int, int], highest_open_round: int) -> SnapshotCopier:
            self._copied_at = self._clock.now()
            copy = self._source.begin(ticket.standby, ticket.has, election, knows_changes=self._knows_changes())
            self._forget(everything=not copy.after)
            at_round = highest_open_round if shard.copying.held.protocol.is_synchronous else None
            order = SnapshotRequest(OrderNumber(0, 0, 0), at_round, "", plan_hash=ticket.plan_hash)
            return SnapshotCopier(list(versions), self._memory, order, changed=self._changes_in)

        with self._unmoved():
            copies = shard.copying.begin(begin)
        newest = self._source.newest
        assert copies is not None, "every request begins a cut"
        assert newest is not None, "every cut begins a copy"
        return newest.copy, copies

    def _knows_changes(self) -> bool:
        """True if all changes to rows since the newest copy are known. All spans are locked."""
        known = [self._changed.get(span.rows) for span in distinct(self._shard.rows.spans)]
        return all(changed is not None and changed.records is not None for changed in known)

    def _forget(self, *, everything: bool) -> None:
        """Stop recording changes of tables that are no longer in use, or of all tables. All spans are locked."""
        used = () if everything else {span.rows for span in distinct(self._shard.rows.spans)}
        for rows in [rows for rows in self._changed if rows not in used]:
            rows.end_copy(self._changed.pop(rows))

    def _changes_in(self, span: RowSpan) -> ChangedSince:
        return self._changed.setdefault(span.rows, ChangedSince())

    def _cut(self, copies: SnapshotCopier, call: Call) -> bytes:
        """Complete the copies. Return the applied batches that they contain."""
        deadline = self._clock.now() + _LONGEST_CUT_S
        while not copies.wait(_WAIT_SLICE_S):
            call.check()
            if self._clock.now() > deadline:
                raise BusyError("a round has not ended: request the copy again")
            self._shard.copying.copy_due(copies)
        applied = self._shard.copying.end(copies)
        if applied is None:
            raise BusyError("the copy was abandoned: request it again")
        return applied.encode()

    @staticmethod
    def _parcels(copy: CopyId, copies: SnapshotCopier) -> Iterator[Parcel]:
        rows = copies.rows
        yield Parcel(CopyHead(copy, [each.span for each in rows]), [])
        for block in copies.pop_blocks():
            place = (block.number, block.parameter, block.start, block.stop)
            yield Parcel(BlockState(*place, block.version, block.updates), [block.values, *block.slots])
        for each in rows:
            for one in each.stored():
                arrays: list[AnyArray] = [one.ids, one.updates, one.versions, one.epochs, one.slots, one.values]
                yield Parcel(CopyRows(one.span, one.table, one.kind, one.oldest), arrays)
