"""A pserver's side of checkpoints: the master's orders, when each block is copied, and what the copy contains.

``PserverSnapshots`` accepts orders and tracks their progress. ``SnapshotCut`` is one copy in progress.

* Only the newest order counts; orders are compared by (master generation, number, serial). Older ones, such as those of
  a deposed master, are ignored.
* A block is *cut* by copying its values, slots, version and update count under its lock. In sync mode this happens when
  the agreed round opens; otherwise, immediately. Training continues on the blocks that are not being cut.
* A block that skips rounds without updates ("catching up") may pass the agreed round in one step. It is then cut at
  once, because its values are still those of the agreed round.
* The applied set stored with a block contains the batches that were marked when the block was cut, except those in its
  accumulator. All blocks share these large sets, so the sets are copied only once, after all blocks have been cut.
  Batches that were marked on a block after its cut are then removed from the copy.

The caller holds the block's lock while it calls ``is_due``, ``cut`` and ``marked``, and while it carries out what the
calls record. It holds the lock of the applied sets while it marks a batch and calls ``marked`` for it, and while it
calls ``applied``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from flightedl.domain.exactly_once.applied import AppliedBatches
from flightedl.domain.exactly_once.batches import Batch
from flightedl.marks import sometimes
from flightedl.messages.control import CutRequest, OrderNumber, SnapshotReply, WrittenFile

#: Maximum length of a failure's reason, in characters.
REASON_LIMIT = 500


class SnapshotCut:
    """State of one snapshot in progress.

    Args:
        numbers: Numbers of this pserver's blocks.
        at_round: Round at which to cut; None to cut immediately.
    """

    __slots__ = ("_excluded", "_left", "_versions", "at_round")

    def __init__(self, numbers: Iterable[int], at_round: int | None) -> None:
        self.at_round = at_round
        #: Block -> version of its copy; None if the block has not been cut yet.
        self._versions: dict[int, int | None] = dict.fromkeys(numbers)
        self._left = len(self._versions)
        #: (blocks, batch, number of batches in its task) for each mark that the shared sets have but the copies lack.
        self._excluded: list[tuple[Sequence[int], Batch, int]] = []

    @property
    def is_complete(self) -> bool:
        return self._left == 0

    @property
    def versions(self) -> Sequence[int]:
        """Block -> version of its copy, once all blocks are cut."""
        return [version for version in self._versions.values() if version is not None]

    def is_due(self, block: int, version: int) -> bool:
        """True if the block must be cut now. Check this after the order, and after each update or closed round."""
        return self._versions[block] is None and (self.at_round is None or version >= self.at_round)

    def cut(self, blocks: Sequence[int], version: int, held: Iterable[tuple[Batch, int]]) -> int:
        """Record that the caller is now copying these blocks. The blocks must have the same history.

        Args:
            blocks: Numbers of the blocks.
            version: Their current version.
            held: Marked batches in their accumulator, each with the number of batches of its task.

        Returns:
            The version of the copies: the round of the order if the blocks have jumped past it.
        """
        kept = version if self.at_round is None else min(version, self.at_round)
        for block in blocks:
            assert self._versions[block] is None, "a block is cut twice"
            self._versions[block] = kept
        self._left -= len(blocks)
        self._excluded += [(blocks, batch, batch_count) for batch, batch_count in held]
        return kept

    def marked(self, blocks: Iterable[int], batches: Iterable[tuple[Batch, int]]) -> None:
        """Record newly marked batches. Must be called for every permanent mark until ``applied`` has been called."""
        cut = [block for block in blocks if self._versions[block] is not None]
        if cut:
            self._excluded += [(cut, batch, batch_count) for batch, batch_count in batches]

    def applied(self, current: AppliedBatches) -> AppliedBatches:
        """Derive the applied sets that belong to the copies from the current sets. Requires that all blocks are cut."""
        assert self.is_complete, "not all blocks are cut"
        copy = current.copy()
        for blocks, batch, batch_count in self._excluded:
            copy.unmark(blocks, batch, batch_count)
        return copy


class PserverSnapshots:
    """A pserver's newest order and its progress. ``take`` requires the locks of all blocks."""

    def __init__(self) -> None:
        self._newest: OrderNumber | None = None
        self._progress: SnapshotReply | None = None

    @property
    def progress(self) -> SnapshotReply | None:
        return self._progress

    def is_current(self, order: OrderNumber) -> bool:
        """True if the copies are still needed, because no newer order has arrived."""
        return order == self._newest

    def take(self, snapshot: CutRequest, versions: Sequence[int], highest_open_round: int) -> bool:
        """Handle an order.

        Args:
            snapshot: The order.
            versions: Versions of all blocks.
            highest_open_round: Reported to the master.

        Returns:
            True to begin a cut at the order's round, which replaces the previous one. ``progress`` is the answer.
        """
        if not snapshot.order.is_newer_than(self._newest):
            return False
        self._newest = snapshot.order
        at_round = snapshot.round
        if at_round is not None and any(version > at_round for version in versions):
            self._progress = SnapshotReply(snapshot.order, "refused", highest_open_round)
            return False
        self._progress = SnapshotReply(snapshot.order, "waiting", highest_open_round)
        return True

    def taken(self, order: OrderNumber) -> bool:
        """Record that all blocks are cut. False if a newer order has arrived; the copies must then be dropped."""
        return self._move(SnapshotReply(order, "taken"))

    def written(self, order: OrderNumber, file: WrittenFile) -> bool:
        """Record that the complete file is in the store. False if a newer order has arrived."""
        return self._move(SnapshotReply(order, "written", file=file))

    def failed(self, order: OrderNumber, reason: str) -> bool:
        """Record that the file could not be written. False if a newer order has arrived."""
        return self._move(SnapshotReply(order, "failed", reason=reason[:REASON_LIMIT]))

    def _move(self, progress: SnapshotReply) -> bool:
        if progress.order != self._newest:
            sometimes("a newer order replaced a snapshot")
            return False
        self._progress = progress
        return True
