"""Checkpoint orders of a pserver: copies of its blocks, and the thread that writes the copies to files.

Theory of operation. For each order there is a ``SnapshotCopier``. The block protocol decides when a block is due, and
which applied batches the file lists. A thread copies the due blocks one at a time, under the lock of the block's span,
and then writes the file.

A push that is about to change a due block copies it first, unless the thread has done so; training waits only for these
copies. The thread then continues a few blocks beyond that block, to run ahead of the push on another processor.

The copies' memory is touched before the first checkpoint (``prepare``) and then reused, because faulting it in page by
page takes several times as long as copying. So a pserver that writes checkpoints needs twice the memory of its blocks.
A newer order takes over the memory of the previous one, even if the previous file is still being written. That file is
never reported, and its thread stops at the next block.

Lock order: the locks of blocks, then the lock of the applied batches. No lock is held while a file is written.

An order may remain incomplete, because a newer order replaces it or the storage fails. The master learns this from
``progress`` and sends a new order.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Protocol, TypeVar

from flightedl.domain.checkpoint.changes import increment_on
from flightedl.domain.checkpoint.snapshot import PserverSnapshots
from flightedl.domain.exactly_once.applied import AppliedBatches
from flightedl.domain.model.sharding import placement_of_hash
from flightedl.errors import FlightedlError
from flightedl.formats.shard_files import ShardHeader, write_shard
from flightedl.messages.control import OrderNumber, SnapshotReply, SnapshotRequest, WrittenFile
from flightedl.ports import Clock, Storage
from flightedl.process import tracing
from flightedl.process.background import Background
from flightedl.pserver.cuts.copier import CopyMemory, SnapshotCopier
from flightedl.pserver.cuts.copying import Copying
from flightedl.pserver.cuts.kept import KeptCut
from flightedl.recording.recorded import recorded
from flightedl.recording.writer import Recorder

_log = logging.getLogger(__name__)

_WAIT_SLICE_S = 0.2
_Stored = TypeVar("_Stored")


class Marks(Protocol):
    """The part of ``readers.feed.PserverFeed`` that marks the checkpoints at which clients may stop."""

    def reserve_mark(self) -> int: ...
    def begin_mark(self, checkpoint: OrderNumber, cut: KeptCut) -> None: ...


class Snapshots:
    """Checkpoint orders of one shard. Thread-safe.

    Args:
        copying: The shard's copies of blocks.
        storage: Storage of the files; None if this pserver was started without a storage.
        job: The job's name.
        index: Index of this pserver.
        pserver_count: Number of the job's pservers.
        clock: Clock for measurements.
        recorder: Recorder of the decisions; None to disable recording.
    """

    def __init__(
        self,
        copying: Copying,
        storage: Storage | None,
        job: str,
        index: int,
        pserver_count: int,
        clock: Clock,
        recorder: Recorder | None = None,
    ) -> None:
        self._copying = copying
        self._storage = storage
        self._job = job
        self._index = index
        #: Number of the job's pservers; changed when blocks have moved.
        self.pserver_count = pserver_count
        self._clock = clock
        #: Feed whose clients may stop at checkpoints; None if there are no clients.
        self.feed: Marks | None = None
        self._lock = threading.Lock()
        self._state = recorded(recorder, {}, PserverSnapshots)
        self._memory = CopyMemory()
        #: Copies of the newest order whose copying has begun; changed under the locks of all blocks.
        self._newest: SnapshotCopier | None = None
        #: Duration of copying the newest snapshot, in seconds.
        self.copied_s = 0.0
        #: Duration of writing the newest snapshot, in seconds.
        self.written_s = 0.0

    def prepare(self) -> None:
        """Allocate and touch the copies' memory before the first order. This is slow; call it in the background."""
        if self._storage is not None:
            for array in self._copying.held.dense.copied_arrays():
                self._memory.reserve(*array)

    def order(self, order: SnapshotRequest) -> SnapshotReply:
        """Accept an order unless it is known or outdated. Return the progress of the newest order."""
        feed, number = self.feed, 0
        copies: SnapshotCopier | None = None
        mark: KeptCut | None = None

        def begin(versions: Mapping[int, int], highest_open_round: int) -> SnapshotCopier | None:
            nonlocal mark
            with self._lock:
                if not self._state.take(order, list(versions.values()), highest_open_round):
                    return None
            after = increment_on(order.after, self._copying.held.rows.knows, is_base=order.is_base)
            placement = placement_of_hash(self._copying.plan_hash)
            mark = KeptCut(list(versions), None, number, placement) if number else None
            self._newest = SnapshotCopier(list(versions), self._memory, order, after, self._newest, companion=mark)
            return self._newest

        with self._lock:
            progress = self._state.progress
        if progress is None or order.order.is_newer_than(progress.order):
            number = 0 if feed is None else feed.reserve_mark()
            copies = self._copying.begin(begin)
        if feed is not None and mark is not None:
            feed.begin_mark(order.order, mark)
        if copies is not None:
            Background(
                "snapshot",
                tracing.bound(self._carry_out, order, copies),
                lambda outcome: self._end(order.order, copies, outcome),
            )
        with self._lock:
            progress = self._state.progress
        assert progress is not None
        return progress

    @property
    def progress(self) -> SnapshotReply | None:
        with self._lock:
            return self._state.progress

    # the thread

    def _carry_out(self, order: SnapshotRequest, copies: SnapshotCopier) -> WrittenFile | None:
        """Copy the blocks and write the file. Return None if a newer order has replaced this one."""
        with tracing.span("checkpoint.copy", pserver=self._index):
            applied = self._copy(order, copies)
        if applied is None:
            self._copying.drop(copies)
            copies.drop_rows()
            return None
        with tracing.span("checkpoint.write", pserver=self._index):
            return self._write(order, copies, applied)

    def _end(self, order: OrderNumber, copies: SnapshotCopier, outcome: WrittenFile | FlightedlError | None) -> None:
        if isinstance(outcome, FlightedlError):
            with self._lock:
                self._state.failed(order, str(outcome))
            self._copying.drop(copies)
            copies.drop_rows()
        elif outcome is not None:
            with self._lock:
                self._state.written(order, outcome)

    def _copy(self, order: SnapshotRequest, copies: SnapshotCopier) -> AppliedBatches | None:
        """Complete all copies. Return the batches that they contain, or None if a newer order has replaced this one."""
        began = self._clock.now()
        while not copies.wait(_WAIT_SLICE_S):
            if not self._is_current(order.order):
                return None
            self._copying.copy_due(copies)
        self.copied_s = self._clock.now() - began
        applied = self._copying.end(copies)
        with self._lock:
            return applied if applied is not None and self._state.taken(order.order) else None

    def _while_current(self, order: OrderNumber, blocks: Iterable[_Stored]) -> Iterator[_Stored]:
        for block in blocks:
            if not self._is_current(order):
                raise FlightedlError("a newer checkpoint order has replaced this one")
            yield block

    def _is_current(self, order: OrderNumber) -> bool:
        with self._lock:
            return self._state.is_current(order)

    def _write(self, order: SnapshotRequest, copies: SnapshotCopier, applied: AppliedBatches) -> WrittenFile:
        blocks, rows = copies.pop_blocks(), copies.rows
        if self._storage is None:
            raise FlightedlError("this pserver was started without --checkpoint: pass it the same URL as the master")
        began = self._clock.now()
        header = ShardHeader(
            job=self._job,
            number=order.order.number,
            index=self._index,
            pservers=self.pserver_count,
            plan_hash=self._copying.plan_hash,
            blocks=self._copying.held.dense.numbers,
            rows=[each.span for each in rows],
        )
        versions = [*(block.version for block in blocks), *(each.span.version for each in rows)]
        current = self._while_current(order.order, blocks)
        current_rows = self._while_current(order.order, chain.from_iterable(each.stored() for each in rows))
        written = write_shard(
            self._storage,
            order.name,
            header,
            applied.encode(),
            current,
            max((len(block.slots) for block in blocks), default=0),
            current_rows,
        )
        self.written_s = self._clock.now() - began
        _log.info(
            "wrote checkpoint=%d blocks=%d size_bytes=%d copied_s=%.3f written_s=%.3f",
            order.order.number,
            len(blocks),
            written.size_bytes,
            self.copied_s,
            self.written_s,
        )
        return WrittenFile(
            name=order.name,
            size_bytes=written.size_bytes,
            hash=written.hash,
            blocks=len(blocks),
            lowest_version=min(versions, default=0),
            highest_version=max(versions, default=0),
            row_bytes=sum(each.size_bytes for each in rows),
            after=copies.after,
        )
