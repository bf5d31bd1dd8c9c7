"""One cut of a shard while its blocks are copied, and the memory that the copies lie in.

The memory is kept for the next cut and touched before the first one: to get it from the kernel page by page takes
several times as long as to copy.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from flightedl.domain.model.sharding import Block
from flightedl.domain.pserver.block_values import CopyBlocks
from flightedl.errors import UnavailableError
from flightedl.formats.shard_files import StoredBlock
from flightedl.messages.control import SnapshotRequest
from flightedl.pserver.rows.stored import CutRows

if TYPE_CHECKING:
    from flightedl.pserver.rows.span import RowSpan

#: The thread leaves this many blocks to a push that it runs ahead of, so as not to wait for it.
_LEAD = 4
Array = npt.NDArray[np.generic]


class CopyMemory:
    """Where the copies of blocks lie, from one snapshot to the next: one array for each array of a block."""

    def __init__(self) -> None:
        self._arrays: dict[tuple[int, int], Array] = {}

    def copy(self, number: int, arrays: Sequence[Array]) -> list[Array]:
        """Copies of a block's arrays; the lock of its span is held."""
        return [self._copied(number, place, array) for place, array in enumerate(arrays)]

    def reserve(self, number: int, place: int, size: int, dtype: np.dtype[np.generic]) -> None:
        """Make and touch what the copy of one array of a block will need, unless it is there."""
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


class SnapshotCopier:
    """One snapshot while its blocks are copied. Thread-safe.

    Args:
        numbers: Of the shard's blocks and buckets.
        memory: Where the copies lie.
        command: That it is for.
        after: The file that it is an increment on; empty: none.
        replaces: Copies in the same memory, which are dropped when these begin; None: there are none.
    """

    def __init__(
        self,
        numbers: Sequence[int],
        memory: CopyMemory,
        command: SnapshotRequest,
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
        #: By number.
        self._blocks: dict[int, StoredBlock] = {}
        self._rows: list[CutRows] = []
        self._are_rows_dropped = False
        self._left = len(numbers)
        self._changed = threading.Condition()
        #: By number, 1: due and not copied.
        self._due = bytearray(max(numbers, default=-1) + 1)
        #: Where the thread goes on.
        self._next = 0
        #: Why they are not going to be complete.
        self._given_up = ""
        self.is_complete = threading.Event()
        if not numbers:
            self.is_complete.set()

    def note_due(self, numbers: Iterable[int]) -> None:
        """These blocks may be copied from now on; the lock of their span is held."""
        with self._changed:
            for number in numbers:
                self._due[number] = 1
            self._changed.notify_all()

    def copy(self, place: Block, copy: CopyBlocks, arrays: Sequence[Array], lead: int | None = None) -> None:
        """Copy a block as the protocol says; the lock of its span is held.

        Args:
            place: Of the block in its parameter.
            copy: The decision.
            arrays: Values and slots as they are now.
            lead: Blocks behind this one that are left to a push which is coming to them; None: the usual number.
        """
        lead = _LEAD if lead is None else lead
        number = place.number
        values, *slots = self._memory.copy(number, arrays)
        self._blocks[number] = StoredBlock(
            number, place.parameter, place.start, place.stop, copy.version, copy.updates, values, tuple(slots)
        )
        with self._changed:
            self._due[number] = 0
            self._next = number + 1 + lead
            self._left -= 1
            if not self._left:
                self.is_complete.set()
                self._changed.notify_all()

    def copy_rows(self, span: RowSpan, version: int, updates: int) -> None:
        """Cut the rows of a span, as the protocol says: they are copied behind it. The span's lock is held."""
        rows = CutRows(span, version, updates, self._command, is_base=not self.after)
        if rows.is_base and self.after:
            self.give_up("rows do not know any more what has changed in them")
        with self._changed:
            self._rows.append(rows)
            if self._are_rows_dropped:
                rows.cut.drop()
            for number in span.numbers:
                self._due[number] = 0
            self._left -= len(span.numbers)
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
        """Give up what was cut of tables, and what a push is just cutting."""
        with self._changed:
            self._are_rows_dropped = True
            dropped = list(self._rows)
        for rows in dropped:
            rows.drop()

    def take_blocks(self) -> list[StoredBlock]:
        """The copies, once."""
        blocks, self._blocks = self._blocks, {}
        return [blocks[number] for number in sorted(blocks)]
