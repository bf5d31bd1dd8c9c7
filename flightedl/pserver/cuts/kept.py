"""Cuts that are kept in memory, for readers of the whole model in one state.

A cut begins like a checkpoint: in sync mode each block is cut when the agreed round opens, otherwise at once. Values
are borrowed and rows are cut, so only those that training then changes take memory. A cut can be read any number of
times, until it is dropped.

One cut at a time is made on request of the master, and kept for ``KEPT_S`` seconds (``RequestedCuts``). The feed keeps
another one if a client wants to stop at a checkpoint (see ``readers.feed``).
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from flightedl.domain.checkpoint.snapshot import PserverSnapshots
from flightedl.domain.pserver.block_values import CopyBlocks
from flightedl.errors import NotFoundError, StalePlacementError, UnavailableError
from flightedl.messages.control import CutRequest, SnapshotReply
from flightedl.messages.reading import CutNumber, cut_name
from flightedl.ports import Clock
from flightedl.pserver.cuts.copier import Copier
from flightedl.pserver.cuts.copying import Copying
from flightedl.pserver.stores.array_span import ArraySpan
from flightedl.pserver.stores.row_span import RowSpan
from flightedl.rowstore.tables import RowCut, RowTables
from flightedl.wire.rows import Array

KEPT_S = 60.0
#: Seconds after which a cut that is not complete is given up if the master no longer asks for its progress.
_ASKED_S = 5.0
_NOT_HERE = "the cut was made before these rows moved here: request a new cut"


class KeptRows(NamedTuple):
    """Rows of a span in a kept cut."""

    lock: threading.Lock
    tables: RowTables
    numbers: range
    buckets: range
    cut: RowCut
    #: (buckets,) Feed number at which each bucket had arrived on this pserver.
    arrived: npt.NDArray[np.int64]
    #: (table, ids) of removed rows that had no feed number yet.
    removed: Sequence[tuple[int, npt.NDArray[np.uint64]]]


class KeptCut(Copier):
    """One state of all blocks and rows of a pserver. Thread-safe.

    Args:
        numbers: Numbers of the shard's blocks and buckets.
        at_round: Round at which the blocks are cut; None to cut them at once.
        number: Feed number of the cut if the feed stops at it; otherwise 0.
        placement: Version of the placement of the blocks.
    """

    def __init__(self, numbers: Sequence[int], at_round: int | None, number: int = 0, placement: int = 0) -> None:
        super().__init__(numbers, at_round)
        self.number = number
        self.placement = placement
        #: Block -> values and version.
        self.values: dict[int, tuple[Array, int]] = {}
        self.rows: list[KeptRows] = []
        self._is_dropped = False

    @property
    def versions(self) -> tuple[int, int]:
        """The lowest and the highest version of the blocks."""
        found = [version for _, version in self.values.values()] + [each.cut.version for each in self.rows]
        return min(found, default=0), max(found, default=0)

    def copy(self, span: ArraySpan, copy: CopyBlocks) -> None:
        for number in copy.numbers:
            self.values[number] = span.borrow(range(number, number + 1)), copy.version
        self._copied(copy.numbers)

    def copy_rows(self, span: RowSpan, copy: CopyBlocks) -> None:
        rows = span.rows
        cut = rows.keep_cut(copy.version, span.epoch, self.number)
        kept = KeptRows(span.lock, rows, span.numbers, span.buckets, cut, rows.arrived.copy(), tuple(rows.removed))
        with self._changed:
            self.rows.append(kept)
            if self._is_dropped:
                cut.drop()
        self._copied(span.numbers)

    def drop(self) -> None:
        """Free the memory. Readers that have begun can continue."""
        with self._changed:
            self._is_dropped = True
            dropped = list(self.rows)
        self.values = {}
        for each in dropped:
            with each.lock:
                each.cut.drop()

    def values_of(self, numbers: range) -> Sequence[Array]:
        """Return the values of adjacent blocks. Raises StalePlacementError if the cut lacks one of them."""
        found = self.values
        if not all(number in found for number in numbers):
            raise StalePlacementError(_NOT_HERE)
        return [found[number][0] for number in numbers]

    def begin_reading(
        self, tables: Collection[int], buckets: range = range(0), after: int | None = None
    ) -> Iterator[tuple[KeptRows, RowCut]]:
        """Yield cuts for one pass over the rows of some tables, which the caller drops.

        Args:
            tables: Numbers of the tables.
            buckets: Buckets that must be in the cut.
            after: As for ``RowTables.begin_again``.

        Raises:
            StalePlacementError: the kept cut lacks one of the buckets.
            MemoryError, UnavailableError: as for ``RowTables.begin_again``.
        """
        if not set(buckets).issubset(bucket for each in self.rows for bucket in each.buckets):
            raise StalePlacementError(_NOT_HERE)
        for each in self.rows:
            with each.lock:
                cut = each.tables.begin_again(each.cut, tables, after)
            cut.is_base = after is None
            cut.complete = [] if after is None else [bucket for bucket in each.buckets if each.arrived[bucket] > after]
            yield each, cut


class RequestedCuts:
    """Cuts of one shard that the master requests. Thread-safe.

    Args:
        copying: The shard's copies of blocks.
        clock: Clock that decides how long a cut is kept.
    """

    def __init__(self, copying: Copying, clock: Clock) -> None:
        self._copying = copying
        self._clock = clock
        self._lock = threading.Lock()
        self._state = PserverSnapshots()
        #: The newest cut and the time at which it was requested.
        self._kept: tuple[KeptCut, float] | None = None
        #: Time of the newest request.
        self._asked = 0.0

    def order(self, request: CutRequest) -> SnapshotReply:
        """Accept a request unless it is known or outdated. Return the progress of the newest one."""

        def begin(versions: Mapping[int, int], highest_open_round: int) -> KeptCut | None:
            is_taken = self._state.take(request, list(versions.values()), highest_open_round)
            return KeptCut(list(versions), request.round) if is_taken else None

        with self._lock:
            self._asked = self._clock.now()
            progress = self._state.progress
            if progress is None or request.order.is_newer_than(progress.order):
                self._drop()
                kept = self._copying.begin(begin)
                self._kept = None if kept is None else (kept, self._clock.now())
            self._advance()
            progress = self._state.progress
        assert progress is not None, "a request was not answered"
        return progress

    def _advance(self) -> None:
        progress = self._state.progress
        if self._kept is None or progress is None or progress.state != "waiting":
            return
        kept, _ = self._kept
        try:
            self._copying.copy_due(kept)
            if kept.wait(0.0):
                self._copying.drop(kept)
                self._state.taken(progress.order)
        except (MemoryError, UnavailableError) as error:
            self._state.failed(progress.order, str(error) or "not enough memory for the cut")
            self._drop()

    def kept(self, cut: CutNumber) -> KeptCut:
        """Return a cut. Raises NotFoundError if it is not kept (any more)."""
        with self._lock:
            progress = self._state.progress
            if self._kept is None or progress is None or progress.state != "taken" or cut != progress.order.cut:
                raise NotFoundError(f"{cut_name(cut)} is no longer kept: request a new one")
            return self._kept[0]

    def expire(self) -> None:
        """Drop the cut if it has been kept for long enough, or if it keeps blocks from moving for no reason."""
        with self._lock:
            now, progress = self._clock.now(), self._state.progress
            if self._kept is not None and progress is not None:
                if progress.state == "waiting" and now - self._asked >= _ASKED_S:
                    self._state.failed(progress.order, "the master has not asked for the cut's progress")
                    self._drop()
                elif now - self._kept[1] >= KEPT_S:
                    self._drop()

    def _drop(self) -> None:
        if self._kept is not None:
            self._copying.drop(self._kept[0])
            self._kept[0].drop()
            self._kept = None
