"""A standby: a process that keeps a copy of one pserver's blocks, to serve them if the pserver dies.

A thread requests a copy from the pserver, and repeats this every ``lag_s`` seconds. Each copy contains what has changed
since the one before. The blocks are in a ``Shard`` of their own, which is not served yet. ``take`` ends the thread and
returns the shard, with the values of the last copy that has arrived completely.

If the pserver's blocks or the model's mode change, the standby starts over with an empty shard, once no blocks are
moving anymore. Otherwise each move would make it copy everything again.

Limitation: ``take`` waits while an arrived copy is being added to the shard.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import NamedTuple

from flightedl.domain.exactly_once.applied import AppliedBatches
from flightedl.domain.moving.standby import StandbyCopy
from flightedl.domain.tables.restoring import FileBuckets
from flightedl.errors import CorruptError, FlightedlError, NotReadyError
from flightedl.formats.checkpoint_files import Record
from flightedl.formats.row_batches import StoredRows
from flightedl.formats.shard_files import StoredBlock
from flightedl.messages.base import encode
from flightedl.messages.moving import CopyTicket
from flightedl.ports import Clock
from flightedl.pserver.moving.parcels import SCHEMA, BlockState, CopyEnd, CopyHead, CopyRows, Digest, Parcel, decode
from flightedl.pserver.shard import Shard
from flightedl.rpc.client import Connection

_log = logging.getLogger(__name__)

_RETRY_S = 0.2
_COPY_S = 3600.0
_JOIN_S = 5.0
#: A standby removes expired rows after each group of this many copies.
_COPIES_PER_SWEEP = 16


class Followed(NamedTuple):
    """A pserver to follow: the facts that determine which blocks it has, and access to it."""

    #: Shard plan of the model, with the newest placement.
    plan_hash: str
    #: Positions of the pserver's blocks, and mode and declaration of the model. A change requires a new shard.
    layout: object
    connection: Connection
    #: Allocates a shard for the pserver's blocks.
    build: Callable[[], Shard]
    #: True while blocks of any pserver are moving.
    is_moving: bool = False


class Standby:
    """Copy of one pserver's blocks. Thread-safe.

    Args:
        index: Index of the pserver.
        generation: Generation of this process as a standby.
        followed: Returns the pserver; None if the model has no values yet. Raises an error if the pserver cannot be
            reached.
        lag_s: Seconds between two copies.
        clock: Clock for waits.
    """

    def __init__(
        self,
        index: int,
        generation: int,
        followed: Callable[[], Followed | None],
        lag_s: float,
        clock: Clock,
    ) -> None:
        self.index = index
        self._generation = generation
        self._followed = followed
        self._lag_s = lag_s
        self._clock = clock
        self._core = StandbyCopy()
        #: Guards the core and the shard's content.
        self._lock = threading.Lock()
        self._shard: Shard | None = None
        self._has_source = False
        #: Batches that the shard's values contain.
        self._applied = AppliedBatches(())
        self._connection: Connection | None = None
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="flightedl-standby", daemon=True)
        self._thread.start()

    @property
    def lacks_copy(self) -> bool:
        """True if there are values to copy, but no complete copy."""
        return self._has_source and self._core.has is None

    def close(self) -> None:
        self._is_over.set()
        if (connection := self._connection) is not None:
            connection.abort_calls()
        self._thread.join(_JOIN_S)

    def take(self, election: int | None, layout: object) -> Shard | None:
        """End the copying. Return the shard with the copied values, or None if there is no usable copy.

        Args:
            election: Election that gave the model its first values; None if it has none.
            layout: As for ``Followed``.
        """
        self.close()
        with self._lock:
            shard = self._shard
            if shard is None or not self._core.is_usable(election, layout):
                return None
            shard.restored(self._applied)
            _log.info("took over the blocks of pserver %d copy=%s", self.index, self._core.has)
            return shard

    def _run(self) -> None:
        trouble = ""
        while not self._is_over.is_set():
            began = self._clock.now()
            try:
                followed = self._followed()
                self._has_source = followed is not None
                if followed is not None:
                    self._follow(followed)
            except (FlightedlError, MemoryError) as error:
                if str(error) != trouble:
                    _log.info("no copy of pserver %d has arrived: %s", self.index, error)
                trouble = str(error)
                self._is_over.wait(_RETRY_S)
            else:
                trouble = ""
                self._is_over.wait(max(0.0, began + self._lag_s - self._clock.now()))

    def _follow(self, followed: Followed) -> None:
        with self._lock:
            if self._core.waits(followed.layout, followed.plan_hash, is_moving=followed.is_moving):
                raise NotReadyError("its blocks are moving")
            if self._core.follow(followed.layout):
                # Free the memory of the former shard first.
                self._shard = None
        if self._shard is None:
            shard = followed.build()
            with self._lock:
                self._shard = shard
        self._connection = followed.connection
        # Either ``close`` aborts the calls of this connection, or this thread sees that the copying is over.
        if self._is_over.is_set():
            raise NotReadyError("the copying is over")
        ticket = CopyTicket(plan_hash=followed.plan_hash, standby=self._generation, has=self._core.has)
        try:
            self._receive(followed.connection, ticket)
        finally:
            with self._lock:
                self._core.fail()

    def _receive(self, connection: Connection, ticket: CopyTicket) -> None:
        digest, kept, head = Digest(), list[Parcel](), None
        with connection.get(encode(ticket), timeout_s=_COPY_S, schema=SCHEMA) as download:
            for batch, metadata in download:
                if batch is None:
                    raise CorruptError("a part of a copy has no content")
                parcel = decode(batch.columns, metadata)
                if isinstance(parcel.content, CopyEnd):
                    if head is None or parcel.content.digest != digest.text:
                        raise CorruptError("a copy was damaged during the transfer")
                    self._complete(head, kept, parcel)
                    return
                digest.update(batch.columns, metadata)
                if isinstance(parcel.content, CopyHead):
                    head = parcel.content
                    self._begin(head)
                else:
                    kept.append(parcel)
                    if not self._core.is_kept_back:
                        self._add(kept)
        raise NotReadyError("a copy has ended early")

    def _begin(self, head: CopyHead) -> None:
        with self._lock:
            assert self._shard is not None, "there is no shard"
            if self._is_over.is_set() or not self._core.begin(head.copy):
                raise NotReadyError("the copy does not follow the previous one, or the blocks were taken over")
            if not head.copy.after:
                self._shard.begin_restore()
                self._describe(self._shard, head)

    def _add(self, parcels: list[Parcel]) -> None:
        """Add the parcels to the content, and remove them from the list, unless this standby is being closed."""
        with self._lock:
            if not self._is_over.is_set():
                self._fill(parcels)
                parcels.clear()

    def _fill(self, parcels: list[Parcel]) -> None:
        assert self._shard is not None, "there is no shard"
        for parcel in parcels:
            self._shard.restore(_record(parcel))

    def _complete(self, head: CopyHead, kept: list[Parcel], end: Parcel) -> None:
        """Make the arrived copy the content. Nothing of it is added if this standby is being closed."""
        with self._lock:
            shard = self._shard
            assert shard is not None, "there is no shard"
            if self._is_over.is_set():
                return
            if not head.copy.after:
                text = "a complete copy of pserver %d has arrived source=%d, size_bytes=%d"
                _log.info(text, self.index, head.copy.source, shard.size_bytes_total)
            else:
                self._core.overwrite()
                shard.dense.begin_restore()
                shard.rows.begin_changes()
                self._describe(shard, head)
            self._fill(kept)
            numbers = [*shard.dense.numbers, *shard.rows.numbers]
            applied = AppliedBatches.decode(end.arrays[0].tobytes(), numbers)
            if not self._core.end(numbers, sorted([*shard.dense.restored, *shard.rows.restored])):
                raise CorruptError("a copy does not contain the blocks that the placement assigns to the pserver")
            self._applied = applied
            if head.copy.number % _COPIES_PER_SWEEP == 0:
                shard.rows.finish_restore()

    @staticmethod
    def _describe(shard: Shard, head: CopyHead) -> None:
        if head.spans:
            buckets = frozenset(number for span in head.spans for number in span.numbers)
            shard.restore(FileBuckets(buckets, is_newest=True))
            for span in head.spans:
                shard.restore(span)


def _record(parcel: Parcel) -> Record:
    content, arrays = parcel
    if isinstance(content, BlockState):
        place = (content.number, content.parameter, content.start, content.stop)
        return StoredBlock(*place, content.version, content.updates, arrays[0], tuple(arrays[1:]))
    if isinstance(content, CopyRows) and len(arrays) == 6:
        ids, updates, versions, epochs, slots, values = arrays
        history = (updates, versions, epochs)
        return StoredRows(content.span, content.table, content.kind, ids, *history, slots, values, content.oldest)
    raise CorruptError(f"a copy contains {type(content).__name__}")
