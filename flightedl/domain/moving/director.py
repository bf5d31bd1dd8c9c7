"""The master's decisions about moves: when to store, commit and cancel an intent.

The caller executes one transaction at a time, and reads the placement and the intent after each transaction, whatever
its outcome. After a failure or an unknown outcome, only a read shows the stored state.

Rules:

* At most one intent exists. A new master cancels an intent that it finds, because it cannot know how far the moves have
  progressed.
* An intent is stored only while every pserver is settled, no audit is in progress and no checkpoint is ordered. While
  the intent exists, no audit begins and no checkpoint is ordered. So all answers to an audit belong to the same
  placement, and so do all files of a checkpoint. The number of pservers changes under the same conditions.
* A commit compares the master's lock, the attempt, the version of the placement, and the generations of the pservers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from flightedl.domain.moving.values import NONE, Acknowledged, Intent, Move, StoredIntent, Transaction
from flightedl.errors import NotReadyError, UsageError
from flightedl.messages.declarations import Placement

Generations = tuple[tuple[int, int], ...]


class Director:
    """The moves of one job, as its master knows them. Not thread-safe.

    Args:
        master: Generation of the master.
        placement: Stored placement, read after the master acquired the lock.
        stored: Stored intent, read in the same transaction; None if there is none.
        pending: Transaction in progress. The caller sets it.
    """

    def __init__(
        self, master: int, placement: Placement, stored: StoredIntent | None, pending: Transaction | None = None
    ) -> None:
        self._master = master
        self.placement = placement
        self.stored = stored
        self.pending = pending

    def read(self, placement: Placement, stored: StoredIntent | None) -> None:
        """Replace the placement and the intent with values that were read after the latest transaction."""
        self.placement, self.stored, self.pending = placement, stored, None

    @property
    def is_moving(self) -> bool:
        """True while an intent may exist. The caller then begins no audit and orders no checkpoint."""
        return self.stored is not None or self.pending is not None

    @property
    def newest(self) -> Placement:
        """The newest placement that may be stored."""
        return (self.pending.placement if self.pending is not None else None) or self.placement

    @property
    def holders(self) -> frozenset[int]:
        """Indexes of the pservers that have blocks in a placement that may be stored."""
        return self.newest.holders | self.placement.holders

    def placement_for(self, index: int) -> int:
        """Return the newest version of the placement that may be stored.

        Returns 0 if this placement gives the pserver no blocks, or if no block has ever moved.
        """
        newest = self.newest
        return newest.version if newest.attempts and index in self.holders else 0

    def begin(
        self,
        moves: Sequence[Move],
        seen: Mapping[int, int],
        settled: Mapping[int, int],
        *,
        is_audit_open: bool,
        is_checkpoint_open: bool,
    ) -> Transaction:
        """Return the transaction that stores an intent.

        Args:
            moves: Moves of blocks; the source of each is the owner of its blocks.
            seen: Index -> generation of the present pservers.
            settled: Index -> generation of the pserver's last settled process.
            is_audit_open: True while the master collects the applied batches of pservers.
            is_checkpoint_open: True while a checkpoint is ordered.

        Raises:
            UsageError: the moves name a block twice, a source that is not the owner, or the source as destination.
            NotReadyError: the moves have to wait.
        """
        self._require_possible(moves, seen)
        indexes = sorted({index for move in moves for index in (move.source, move.destination)})
        if self.stored is not None:
            raise NotReadyError("other blocks are being moved")
        generations = self._require_quiet(
            indexes, seen, settled, is_audit_open=is_audit_open, is_checkpoint_open=is_checkpoint_open
        )
        return self._transaction(NONE, Intent(self._master, tuple(moves), generations), None, generations)

    def resize(
        self,
        pserver_count: int,
        seen: Mapping[int, int],
        settled: Mapping[int, int],
        *,
        is_audit_open: bool,
        is_checkpoint_open: bool,
    ) -> Transaction:
        """Return the transaction that adds pservers, or that removes pservers without blocks.

        Pservers that are being added need not be settled. See ``begin`` for the other arguments and the errors.
        """
        placement = self.placement
        assert max(placement.holders) < pserver_count, "a pserver with blocks is removed"
        for index in range(placement.pservers, pserver_count):
            if index not in seen:
                raise NotReadyError(f"there is no pserver {index}")
        generations = tuple((index, seen[index]) for index in range(placement.pservers, pserver_count))
        self._require_quiet((), seen, settled, is_audit_open=is_audit_open, is_checkpoint_open=is_checkpoint_open)
        return self._transaction(NONE, None, placement.resized(pserver_count), generations)

    def _require_quiet(
        self,
        indexes: Collection[int],
        seen: Mapping[int, int],
        settled: Mapping[int, int],
        *,
        is_audit_open: bool,
        is_checkpoint_open: bool,
    ) -> Generations:
        """Return (index, generation) of each pserver if blocks may move; otherwise raise an error."""
        for index in {*indexes, *self.placement.holders}:
            if index not in seen or settled.get(index) != seen[index]:
                raise NotReadyError("a pserver has not reported yet which batches it has applied")
        if is_audit_open or is_checkpoint_open:
            raise NotReadyError(f"{'an audit' if is_audit_open else 'a checkpoint'} is in progress")
        return tuple((index, seen[index]) for index in indexes)

    def _require_possible(self, moves: Sequence[Move], seen: Mapping[int, int]) -> None:
        owners = self.placement.owners
        blocks = [block for move in moves for block in move.blocks]
        if len(set(blocks)) != len(blocks):
            raise UsageError("a block cannot move to two pservers")
        for move in moves:
            if {owners[block] for block in move.blocks} != {move.source} or move.source == move.destination:
                raise UsageError(f"block {move.block} cannot move from pserver {move.source} to {move.destination}")
            if move.destination not in seen:
                raise NotReadyError(f"there is no pserver {move.destination}")

    def commit(self, acknowledged: Iterable[Acknowledged]) -> Transaction | None:
        """Return the transaction that commits the moves of acknowledged units, or None if their attempt is over."""
        stored = self.stored
        if stored is None or stored.intent.master != self._master:
            return None
        units = {message.block for message in acknowledged if message.attempt == stored.attempt}
        moves = [move for move in stored.intent.moves if move.block in units]
        if not moves:
            return None
        rest = tuple(move for move in stored.intent.moves if move.block not in units)
        intent = Intent(self._master, rest, stored.intent.generations) if rest else None
        both = {index for move in moves for index in (move.source, move.destination)}
        generations = tuple(each for each in stored.intent.generations if each[0] in both)
        moved = self.placement.moved([(move.blocks, move.destination) for move in moves], stored.attempt)
        return self._transaction(stored.attempt, intent, moved, generations)

    def cancel_if_failed(self, seen: Mapping[int, int]) -> Transaction | None:
        """Return the transaction that cancels a predecessor's intent, or an intent that names a missing pserver."""
        if self.stored is None:
            return None
        intent = self.stored.intent
        is_own = intent.master == self._master
        if is_own and all(seen.get(index) == generation for index, generation in intent.generations):
            return None
        return self.cancel()

    def cancel(self) -> Transaction:
        """Return the transaction that cancels the stored intent."""
        assert self.stored is not None, "there is no intent"
        return self._transaction(self.stored.attempt, None, None, ())

    def _transaction(
        self, attempt: int, intent: Intent | None, placement: Placement | None, generations: Generations
    ) -> Transaction:
        return Transaction(
            attempt=attempt,
            intent=intent,
            placement=placement,
            master=self._master,
            generations=generations,
            version=self.placement.version,
            excludes_checkpoint=attempt == NONE,
        )
