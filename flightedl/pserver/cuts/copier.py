"""Copies of a shard's blocks for one cut, and the memory for them.

The memory is touched before the first cut and reused for later ones, because faulting it in page by page takes several
times as long as copying.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from flightedl.domain.pserver.block_values import CopyBlocks
from flightedl.errors import UnavailableError
from flightedl.formats.shard_files import StoredBlock
from flightedl.messages.control import SnapshotRequest
from flightedl.pserver.stores.array_span import ArraySpan
from flightedl.pserver.stores.interface import SpanCopies
from flightedl.pserver.stores.row_span import RowSpan
from flightedl.pserver.stores.stored_rows import CutRows
from flightedl.rowstore.tables import ChangedSince
from flightedl.wire.rows import Array, Dtype

#: Number of blocks that the copying thread stays ahead of a push, so that it need not wait for the push's locks.
_LEAD = 4


class CopyMemory:
    """Memory for copies, reused for each snapshot. It contains one array for each array of a block."""

    def __init__(self) -> None:
        self._arrays: dict[tuple[int, int], Array] = {}

    def copy(self, number: int, arrays: Sequence[Array]) -> list[Array]:
        """Return copies of a block's arrays. The caller holds the lock of the block's span."""
        return [self._copied(number, place, array) for place, array in enumerate(arrays)]

    def reserve(self, number: int, place: int, size: int, dtype: Dtype) -> None:
        """Allocate and touch memory for the copy of one array of a block, unless this has been done."""
        if (number, place) not in self._arrays:
            array = np.empty(size, dtype)
            np.copyto(array, 0)
            self._arrays.setdefault((number, place), array)

    def _copied(self, number: int, place: int, array: Array) -> Array:
        known = self._arrays.get((number, place))
        if known is None or known.size != array.size or known.dtype != array.dtype:
            known = self._arrays[number, place] = np.empty_like(array)
        np.copyto(known, array)
        return known


class Copier(SpanCopies):
    """Progress of a cut: which blocks are due, and which have been copied. Thread-safe.

    Args:
        numbers: Numbers of the shard's blocks and buckets.
        at_round: Round at which the blocks are copied; None to copy them at once.
        replaces: Copies that are dropped when these copies begin; None if there are none.
    """

    def __init__(self, numbers: Sequence[int], at_round: int | None, replaces: Copier | None = None) -> None:
        #: Number that the block protocol gave to the cut; set when copying begins.
        self.cut = 0
        self.at_round = at_round
        self.replaces = replaces
        self._left = len(numbers)
        self._changed = threading.Condition()
        #: For each block number: 1 if the block is due and has not been copied.
        self._due = bytearray(max(numbers, default=-1) + 1)
        #: Block at which the copying thread resumes its search.
        self._next = 0
        #: Reason why the copies can never be completed; empty if they still can be.
        self._given_up = ""
        self.is_complete = threading.Event()
        if not numbers:
            self.is_complete.set()

    def note_due(self, numbers: Iterable[int]) -> None:
        """Record that these blocks may now be copied. The caller holds the lock of the blocks' span."""
        with self._changed:
            for number in numbers:
                self._due[number] = 1
            self._changed.notify_all()

    def _copied(self, numbers: Sequence[int], lead: int = 0) -> None:
        with self._changed:
            for number in numbers:
                self._due[number] = 0
            self._next = numbers[-1] + 1 + lead
            self._left -= len(numbers)
            if not self._left:
                self.is_complete.set()
                self._changed.notify_all()

    def resume_after(self, numbers: Sequence[int]) -> None:
        """Continue the search directly after these blocks, which the copying thread itself has copied."""
        # No lock is needed: every order of the blocks is correct.
        self._next = numbers[-1] + 1

    def next_due(self) -> int | None:
        """Return the next due block to copy, just ahead of the push in progress, or None if no block is due."""
        with self._changed:
            found = self._due.find(1, self._next)
            found = self._due.find(1) if found < 0 else found
        return None if found < 0 else found

    @property
    def is_abandoned(self) -> bool:
        return bool(self._given_up)

    def give_up(self, reason: str) -> None:
        with self._changed:
            self._given_up = reason
            self._changed.notify_all()

    def wait(self, timeout_s: float) -> bool:
        """Wait until a block is due, all blocks are copied, or the timeout expires. Return True if all are copied.

        Raises:
            UnavailableError: The copies were abandoned.
        """
        with self._changed:
            self._changed.wait_for(lambda: self.is_complete.is_set() or self._given_up or 1 in self._due, timeout_s)
            if self._given_up:
                raise UnavailableError(self._given_up)
            return self.is_complete.is_set()


class SnapshotCopier(Copier):
    """Copies for a snapshot in progress. Thread-safe.

    Args:
        numbers: Numbers of the shard's blocks and buckets.
        memory: Memory of the copies.
        command: The master's order.
        after: The file on which the snapshot builds if it is an increment; otherwise empty.
        replaces: Copies in the same memory, which are dropped when these copies begin; None if there are none.
        changed: Returns the changes in a span's rows since the previous copy for a standby; None to copy for a file.
        companion: Receives the same content at the same moments; None if there is none.
    """

    def __init__(
        self,
        numbers: Sequence[int],
        memory: CopyMemory,
        command: SnapshotRequest,
        after: str = "",
        replaces: SnapshotCopier | None = None,
        changed: Callable[[RowSpan], ChangedSince] | None = None,
        companion: Copier | None = None,
    ) -> None:
        super().__init__(numbers, command.round, replaces)
        self.after = after
        self._command = command
        self._memory = memory
        self._changed_in = changed
        self._companion = companion
        #: Copied blocks, by number.
        self._blocks: dict[int, StoredBlock] = {}
        self._rows: list[CutRows] = []
        self._are_rows_dropped = False

    def copy(self, span: ArraySpan, copy: CopyBlocks) -> None:
        for number in copy.numbers:
            place, at = span.places[number - span.numbers.start], span.part(number)
            values, *slots = self._memory.copy(number, [span.values[at], *(slot[at] for slot in span.slots)])
            self._blocks[number] = StoredBlock(
                number, place.parameter, place.start, place.stop, copy.version, copy.updates, values, tuple(slots)
            )
        if self._companion is not None:
            self._companion.copy(span, copy)
        self._copied(copy.numbers, _LEAD)

    def copy_rows(self, span: RowSpan, copy: CopyBlocks) -> None:
        changed = None if self._changed_in is None else self._changed_in(span)
        rows = CutRows(span, copy.version, copy.updates, self._command, is_base=not self.after, copy=changed)
        with self._changed:
            self._rows.append(rows)
            if self._are_rows_dropped:
                rows.cut.drop()
        if self._companion is not None:
            try:
                self._companion.copy_rows(span, copy)
            except (MemoryError, UnavailableError) as error:
                # The checkpoint is more important.
                self._companion.give_up(str(error) or "not enough memory")
        self._copied(span.numbers)

    @property
    def rows(self) -> Sequence[CutRows]:
        return sorted(self._rows, key=lambda rows: rows.span.first)

    def drop_rows(self) -> None:
        with self._changed:
            self._are_rows_dropped = True
            dropped = list(self._rows)
        for rows in dropped:
            rows.drop()

    def pop_blocks(self) -> list[StoredBlock]:
        """Return the copies of all blocks in ascending order, and drop the references to them."""
        blocks, self._blocks = self._blocks, {}
        return [blocks[number] for number in sorted(blocks)]
