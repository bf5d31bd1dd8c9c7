"""A pserver's side of a checkpoint: which orders it carries out, when each block is copied, what is in the copy.

``PserverSnapshots`` takes orders and keeps the progress that the master is told. ``SnapshotCut`` is one copy under way.

* Only the newest order counts: (master generation, number, serial). An older one, of a deposed master, changes nothing.
* A block is *cut* when its values, slots, version and update count are copied, under its lock. In sync mode that is the
  moment when its round ``round`` opens; otherwise at once. Blocks are cut one by one while others are trained.
* Rounds that close without an update may take a block past the round in one step ("catching up"). It is cut then: its
  values are those that it had at the round.
* What goes into the file as applied is, for each block, what was marked when it was cut, without the batches that
  waited in its accumulator then. The sets are shared by all blocks, and large; so they are copied once, when all
  blocks are cut, and what was marked on a block between its cut and then is taken back out.

The caller holds the block's lock around ``is_due``, ``cut`` and ``marked``, together with what they are about, and the
lock of the applied sets around each mark with its ``marked``, and around ``applied``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from flightedl.domain.exactly_once.applied import AppliedBatches
from flightedl.domain.exactly_once.batches import Batch
from flightedl.messages.control import OrderNumber, SnapshotReply, SnapshotRequest, WrittenFile

#: Letters of why a snapshot failed.
REASON_LIMIT = 500


class SnapshotCut:
    """The state of one snapshot while it is taken.

    Args:
        numbers: Of the blocks of this pserver.
        at_round: The round to cut at; None: at once.
    """

    __slots__ = ("_excluded", "_left", "_versions", "at_round")

    def __init__(self, numbers: Iterable[int], at_round: int | None) -> None:
        self.at_round = at_round
        #: Block -> version of its copy; None: not cut yet.
        self._versions: dict[int, int | None] = dict.fromkeys(numbers)
        self._left = len(self._versions)
        #: Marks that are in the shared sets and not in the copies: (blocks, batch, batches of its task).
        self._excluded: list[tuple[Sequence[int], Batch, int]] = []

    @property
    def is_complete(self) -> bool:
        """Whether all blocks are cut."""
        return self._left == 0

    @property
    def versions(self) -> Sequence[int]:
        """Of the copies, by block; only when complete."""
        return [version for version in self._versions.values() if version is not None]

    def is_due(self, block: int, version: int) -> bool:
        """Whether the block is to be cut now; ask when the order came, and after each closed round or update."""
        return self._versions[block] is None and (self.at_round is None or version >= self.at_round)

    def cut(self, blocks: Sequence[int], version: int, held: Iterable[tuple[Batch, int]]) -> int:
        """Blocks of one history are copied now.

        Args:
            blocks: Their numbers.
            version: As it is.
            held: Batches, each with the count of its task, that are marked but wait in the accumulator.

        Returns:
            The version of the copies: the round itself where the blocks jumped past it.
        """
        kept = version if self.at_round is None else min(version, self.at_round)
        for block in blocks:
            assert self._versions[block] is None, "a block is cut twice"
            self._versions[block] = kept
        self._left -= len(blocks)
        self._excluded += [(blocks, batch, batch_count) for batch, batch_count in held]
        return kept

    def marked(self, blocks: Iterable[int], batches: Iterable[tuple[Batch, int]]) -> None:
        """Batches were newly marked on blocks; call it for every mark that stays, until ``applied`` was called."""
        cut = [block for block in blocks if self._versions[block] is not None]
        if cut:
            self._excluded += [(cut, batch, batch_count) for batch, batch_count in batches]

    def applied(self, current: AppliedBatches) -> AppliedBatches:
        """What is in the copies. Call it when complete, with the sets as they are now; they are not changed."""
        assert self.is_complete, "not all blocks are cut"
        copy = current.copy()
        for blocks, batch, batch_count in self._excluded:
            copy.unmark(blocks, batch, batch_count)
        return copy


class PserverSnapshots:
    """Which order a pserver is at. The caller holds the locks of all blocks around ``take``."""

    def __init__(self) -> None:
        self._newest: OrderNumber | None = None
        self._progress: SnapshotReply | None = None

    @property
    def progress(self) -> SnapshotReply | None:
        """What the master is told; None: nothing was ordered yet."""
        return self._progress

    def is_current(self, order: OrderNumber) -> bool:
        """Whether nothing newer was ordered: the copies are still wanted."""
        return order == self._newest

    def take(self, snapshot: SnapshotRequest, versions: Sequence[int], highest_open_round: int) -> bool:
        """An order came.

        Args:
            snapshot: The order.
            versions: Of all blocks.
            highest_open_round: To tell the master.

        Returns:
            Whether to begin a cut at the order's round, in place of the one before; ``progress`` tells the rest.
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
        """All blocks are cut; False: something newer was ordered meanwhile, drop the copies."""
        return self._move(SnapshotReply(order, "taken"))

    def written(self, order: OrderNumber, file: WrittenFile) -> bool:
        """The file is in the store, complete; False: nobody wants it any more."""
        return self._move(SnapshotReply(order, "written", file=file))

    def failed(self, order: OrderNumber, reason: str) -> bool:
        """The file could not be written; False: nobody waits for it any more."""
        return self._move(SnapshotReply(order, "failed", reason=reason[:REASON_LIMIT]))

    def _move(self, progress: SnapshotReply) -> bool:
        if progress.order != self._newest:
            return False
        self._progress = progress
        return True
