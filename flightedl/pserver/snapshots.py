"""Copies of a pserver's blocks, and the files that they become.

Theory of operation. An order makes a ``SnapshotCopier``. A thread copies the blocks that are due, one at a time under
the lock of its span, then writes the file. A push that is about to change a block that is due and not copied yet copies
it first; so training waits for such blocks, and for nothing else. The thread goes on a few blocks behind the one that a
push had to copy: so it runs ahead of this push, on another processor, and is mostly faster. When a block is due, and
what the file says is applied to it, is decided by the protocol of the blocks.

The memory of the copies is kept for the next ones and touched before the first ones (``prepare``): to get it from the
kernel page by page takes several times as long as to copy. So a pserver that makes checkpoints takes twice the memory
of its blocks. An order that replaces another takes over its memory, while that one's file may still be being written:
such a file is never reported, and is given up at its next block.

Lock order: blocks, then the applied batches. Nothing is written under a lock.

Not guaranteed: that an order is carried out; a newer one replaces it at any point, and a store that fails ends it. The
master is told (``progress``) and orders anew.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from flightedl.domain.checkpoint.changes import increment_on
from flightedl.domain.checkpoint.manifest import ShardFile
from flightedl.domain.checkpoint.snapshot import PserverSnapshots
from flightedl.domain.checkpoint.values import OrderNumber, SnapshotCommand, SnapshotProgress
from flightedl.domain.exactly_once.applied import AppliedBatches
from flightedl.domain.model.sharding import Block
from flightedl.domain.pserver.block_values import CopyBlocks
from flightedl.errors import FlightedlError, UnavailableError
from flightedl.formats.shard_files import ShardHeader, StoredBlock, write_shard
from flightedl.ports import Clock, Storage
from flightedl.process import tracing
from flightedl.process.background import Background
from flightedl.pserver.rows.stored import CopiedSpan, CutRows
from flightedl.recording.recorded import recorded
from flightedl.recording.writer import Recorder

_log = logging.getLogger(__name__)

_WAIT_SLICE_S = 0.2
#: The thread leaves this many blocks to a push that it runs ahead of, so as not to wait for it.
_LEAD = 4
Array = npt.NDArray[np.generic]
_Stored = TypeVar("_Stored")


class CopyMemory:
    """Where the copies of blocks lie, from one snapshot to the next: one array for each array of a block."""

    def __init__(self) -> None:
        self._arrays: dict[tuple[int, int], Array] = {}

    def copy(self, local: int, arrays: Sequence[Array]) -> list[Array]:
        """Copies of a block's arrays; the lock of its span is held."""
        return [self._copied(local, place, array) for place, array in enumerate(arrays)]

    def reserve(self, local: int, place: int, size: int, dtype: np.dtype[np.generic]) -> None:
        """Make and touch what the copy of one array of a block will need, unless it is there."""
        if (local, place) not in self._arrays:
            array = np.empty(size, dtype)
            np.copyto(array, 0)
            self._arrays.setdefault((local, place), array)

    def _copied(self, local: int, place: int, array: Array) -> Array:
        known = self._arrays.get((local, place))
        if known is None or known.size != array.size or known.dtype != array.dtype:
            known = self._arrays[local, place] = np.empty_like(array)
        np.copyto(known, array)
        return known


class SnapshotCopier:
    """One snapshot while its blocks are copied. Thread-safe.

    Args:
        block_count: Of the shard.
        memory: Where the copies lie.
        command: That it is for.
        after: The file that it is an increment on; empty: none.
        replaces: Copies in the same memory, which are dropped when these begin; None: there are none.
    """

    def __init__(
        self,
        block_count: int,
        memory: CopyMemory,
        command: SnapshotCommand,
        after: str = "",
        replaces: SnapshotCopier | None = None,
    ) -> None:
        #: Number of the cut, which the protocol of the blocks knows; set when they begin.
        self.cut = 0
        self.at_round = command.round
        self.after = after
        self.replaces = replaces
        self._command = command
        self._memory = memory
        self._blocks: list[StoredBlock | None] = [None] * block_count
        self._rows: list[CutRows] = []
        self._left = block_count
        self._changed = threading.Condition()
        #: By block, 1: due and not copied.
        self._due = bytearray(block_count)
        #: Where the thread goes on.
        self._next = 0
        #: Why they are not going to be complete.
        self._given_up = ""
        self.is_complete = threading.Event()
        if not block_count:
            self.is_complete.set()

    def note_due(self, positions: Iterable[int]) -> None:
        """These blocks may be copied from now on; the lock of their span is held."""
        with self._changed:
            for local in positions:
                self._due[local] = 1
            self._changed.notify_all()

    def copy(
        self, place: Block, copy: CopyBlocks, local: int, arrays: Sequence[Array], lead: int | None = None
    ) -> None:
        """Copy a block as the protocol says; the lock of its span is held.

        Args:
            place: Of the block in its parameter.
            copy: The decision.
            local: Position of the block.
            arrays: Values and slots as they are now.
            lead: Blocks behind this one that are left to a push which is coming to them; None: the usual number.
        """
        lead = _LEAD if lead is None else lead
        values, *slots = self._memory.copy(local, arrays)
        self._blocks[local] = StoredBlock(
            place.number, place.parameter, place.start, place.stop, copy.version, copy.updates, values, tuple(slots)
        )
        with self._changed:
            self._due[local] = 0
            self._next = local + 1 + lead
            self._left -= 1
            if not self._left:
                self.is_complete.set()
                self._changed.notify_all()

    def copy_rows(self, span: CopiedSpan, version: int, updates: int) -> None:
        """Cut the rows of a span, as the protocol says: they are copied behind it. The span's lock is held."""
        rows = CutRows(span, version, updates, self._command, is_base=not self.after)
        self._rows.append(rows)
        if rows.is_base and self.after:
            self.give_up("rows do not know any more what has changed in them")
        with self._changed:
            for local in span.local:
                self._due[local] = 0
            self._left -= len(span.local)
            if not self._left:
                self.is_complete.set()
                self._changed.notify_all()

    def next_due(self) -> int | None:
        """The block that should be copied next: one that a push will come to soon."""
        with self._changed:
            found = self._due.find(1, self._next)
            found = self._due.find(1) if found < 0 else found
        return None if found < 0 else found

    def give_up(self, reason: str) -> None:
        """A block that is about to change cannot be copied."""
        with self._changed:
            self._given_up = reason
            self._changed.notify_all()

    def wait(self, timeout_s: float) -> bool:
        """Return when a block is due, or all are copied, or the time is over; whether all are copied.

        Raises:
            UnavailableError: they were given up.
        """
        with self._changed:
            self._changed.wait_for(lambda: self.is_complete.is_set() or self._given_up or 1 in self._due, timeout_s)
            if self._given_up:
                raise UnavailableError(self._given_up)
            return self.is_complete.is_set()

    @property
    def rows(self) -> Sequence[CutRows]:
        """What was cut of tables."""
        return sorted(self._rows, key=lambda rows: rows.span.first)

    def drop_rows(self) -> None:
        """What was cut of tables is not wanted any more."""
        for rows in self._rows:
            rows.drop()

    def take_blocks(self) -> list[StoredBlock]:
        """The copies, once."""
        blocks, self._blocks = self._blocks, []
        return [block for block in blocks if block is not None]


class CopiedShard(Protocol):
    """The part of a shard that snapshots need."""

    plan_hash: str

    @property
    def numbers(self) -> list[int]:
        """Of the blocks, rising; without buckets."""
        ...

    @property
    def slot_count(self) -> int:
        """The most slots of any block."""
        ...

    def begin(self, begin: Callable[[Sequence[int], int], SnapshotCopier | None]) -> None:
        """Call ``begin(versions, highest open round)`` under all locks; keep its copies."""
        ...

    def has_changes_since(self, file: str) -> bool:
        """Return True if all rows know what has changed since this file's cut; under all locks."""
        ...

    def copy_due(self, copies: SnapshotCopier) -> None:
        """Copy every block that is due now, each under its lock, as long as the copies are not dropped."""
        ...

    def copied_arrays(self) -> Sequence[tuple[int, int, int, np.dtype[np.generic]]]:
        """Return (position, number of the array, elements, dtype) of each array that a copy of all blocks has."""
        ...

    def end(self, copies: SnapshotCopier) -> AppliedBatches | None:
        """Return the applied sets of complete copies, and note no more marks; None if the copies were dropped."""
        ...

    def drop(self, copies: SnapshotCopier) -> None:
        """Copy nothing more for these."""
        ...


class Snapshots:
    """Carries out a master's orders for one shard. Thread-safe.

    Args:
        shard: The copies of its blocks.
        storage: Where files go; None: this pserver was given none.
        job: The job's name.
        index: Of this pserver.
        pserver_count: Of the job.
        generation: Of this pserver.
        clock: Measures.
        recorder: Records what is decided; None: nothing does.
    """

    def __init__(
        self,
        shard: CopiedShard,
        storage: Storage | None,
        job: str,
        index: int,
        pserver_count: int,
        generation: int,
        clock: Clock,
        recorder: Recorder | None = None,
    ) -> None:
        self._shard = shard
        self._storage = storage
        self._job = job
        self._index = index
        self._pserver_count = pserver_count
        self._generation = generation
        self._clock = clock
        self._lock = threading.Lock()
        self._state = recorded(recorder, {}, PserverSnapshots)
        self._memory = CopyMemory()
        #: Those of the newest order that began any; changed under all locks of the blocks.
        self._newest: SnapshotCopier | None = None
        #: Of the newest snapshot: how long the copies took, and the writing.
        self.copied_s = 0.0
        self.written_s = 0.0

    def prepare(self) -> None:
        """Have the memory of the copies ready before they are wanted; takes a while, and nobody waits for it."""
        if self._storage is not None:
            for array in self._shard.copied_arrays():
                self._memory.reserve(*array)

    def order(self, order: SnapshotCommand) -> SnapshotProgress:
        """Take an order, unless it is known or old; how far the newest one is."""
        taken: list[SnapshotCopier] = []

        def begin(versions: Sequence[int], highest_open_round: int) -> SnapshotCopier | None:
            with self._lock:
                if not self._state.take(order, versions, highest_open_round):
                    return None
            after = increment_on(order.after, self._shard.has_changes_since, is_base=order.is_base)
            self._newest = SnapshotCopier(len(versions), self._memory, order, after, self._newest)
            taken.append(self._newest)
            return self._newest

        with self._lock:
            progress = self._state.progress
        if progress is None or order.order.is_newer_than(progress.order):
            self._shard.begin(begin)
        if taken:
            copies = taken[0]
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
    def progress(self) -> SnapshotProgress | None:
        """How far the newest order is."""
        with self._lock:
            return self._state.progress

    # the thread

    def _carry_out(self, order: SnapshotCommand, copies: SnapshotCopier) -> ShardFile | None:
        """Return the file, or None if nobody wants it any more."""
        with tracing.span("checkpoint.copy", pserver=self._index):
            applied = self._copy(order, copies)
        if applied is None:
            self._shard.drop(copies)
            copies.drop_rows()
            return None
        with tracing.span("checkpoint.write", pserver=self._index):
            return self._write(order, copies, applied)

    def _end(self, order: OrderNumber, copies: SnapshotCopier, outcome: ShardFile | FlightedlError | None) -> None:
        if isinstance(outcome, FlightedlError):
            with self._lock:
                self._state.failed(order, str(outcome))
            self._shard.drop(copies)
            copies.drop_rows()
        elif outcome is not None:
            with self._lock:
                self._state.written(order, outcome)

    def _copy(self, order: SnapshotCommand, copies: SnapshotCopier) -> AppliedBatches | None:
        """What is applied to the copies, when all are made; None: nobody wants them any more."""
        began = self._clock.now()
        while not copies.wait(_WAIT_SLICE_S):
            if not self._is_wanted(order.order):
                return None
            self._shard.copy_due(copies)
        self.copied_s = self._clock.now() - began
        applied = self._shard.end(copies)
        with self._lock:
            return applied if applied is not None and self._state.taken(order.order) else None

    def _while_wanted(self, order: OrderNumber, blocks: Iterable[_Stored]) -> Iterator[_Stored]:
        for block in blocks:
            if not self._is_wanted(order):
                raise FlightedlError("a newer checkpoint was ordered meanwhile")
            yield block

    def _is_wanted(self, order: OrderNumber) -> bool:
        with self._lock:
            return self._state.is_current(order)

    def _write(self, order: SnapshotCommand, copies: SnapshotCopier, applied: AppliedBatches) -> ShardFile:
        blocks, rows = copies.take_blocks(), copies.rows
        if self._storage is None:
            raise FlightedlError("this pserver was started without --checkpoint: give it the same URL as the master")
        began = self._clock.now()
        header = ShardHeader(
            job=self._job,
            number=order.order.number,
            index=self._index,
            pservers=self._pserver_count,
            plan_hash=self._shard.plan_hash,
            blocks=self._shard.numbers,
            rows=[each.span for each in rows],
        )
        versions = [*(block.version for block in blocks), *(each.span.version for each in rows)]
        wanted = self._while_wanted(order.order, blocks)
        wanted_rows = self._while_wanted(order.order, chain.from_iterable(each.stored() for each in rows))
        written = write_shard(
            self._storage, order.name, header, applied.encode(), wanted, self._shard.slot_count, wanted_rows
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
        return ShardFile(
            index=self._index,
            generation=self._generation,
            name=order.name,
            size_bytes=written.size_bytes,
            hash=written.hash,
            blocks=len(blocks),
            lowest_version=min(versions, default=0),
            highest_version=max(versions, default=0),
            row_bytes=sum(each.size_bytes for each in rows),
            after=copies.after,
        )
