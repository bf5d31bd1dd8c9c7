"""Decisions of the master about moves: when to store, commit and cancel an intent.

The caller executes one transaction at a time, and reads owners and intent after each one, whatever its outcome: after
a failure or an unknown outcome, only a read shows what is stored.

Rules:

* At most one intent exists. A new master cancels the intent that it finds, because it cannot know the progress of the
  moves.
* An intent is stored only while every pserver is settled, no audit is open and no checkpoint is ordered. While it
  exists, no audit begins and no checkpoint is ordered. So the answers of an audit and the files of a checkpoint belong
  to one version of the owners.
* A commit compares the master's lock, the attempt, the version of the owners, and the generations of both pservers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flightedl.domain.moving.losses import Losses
from flightedl.domain.moving.values import NONE, Acknowledged, Intent, Move, Owners, StoredIntent, Transaction
from flightedl.errors import NotReadyError, UsageError


class Director:
    """One job's moves, as its master knows them. Not thread-safe.

    Args:
        master: Generation of the master.
        owners: Stored owners, read after the master acquired the lock.
        stored: Stored intent, read in the same transaction; None if there is none.
    """

    def __init__(self, master: int, owners: Owners, stored: StoredIntent | None) -> None:
        self._master = master
        self.owners = owners
        self.stored = stored

    def read(self, owners: Owners, stored: StoredIntent | None) -> None:
        """Replace owners and intent by the values that were read after a transaction."""
        self.owners, self.stored = owners, stored

    @property
    def is_moving(self) -> bool:
        """True while an intent exists; the caller then begins no audit and orders no checkpoint."""
        return self.stored is not None

    def begin(
        self,
        moves: Sequence[Move],
        seen: Mapping[int, int],
        losses: Losses,
        *,
        is_audit_open: bool,
        is_checkpoint_open: bool,
    ) -> Transaction:
        """Return the transaction that stores an intent.

        Args:
            moves: Moves of blocks; the source of each is the block's owner.
            seen: Index -> generation of the present pservers.
            losses: Loss numbers and settled processes.
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
        if not losses.is_settled(seen, [*indexes, *set(self.owners.pservers)]):
            raise NotReadyError("a pserver has not reported yet which batches it has applied")
        if is_audit_open or is_checkpoint_open:
            raise NotReadyError(f"{'an audit' if is_audit_open else 'a checkpoint'} is in progress")
        generations = tuple((index, seen[index]) for index in indexes)
        return self._transaction(NONE, Intent(self._master, tuple(moves), generations), None, generations)

    def _require_possible(self, moves: Sequence[Move], seen: Mapping[int, int]) -> None:
        if len({move.block for move in moves}) != len(moves):
            raise UsageError("a block cannot move to two pservers")
        for move in moves:
            if self.owners.pservers[move.block] != move.source or move.source == move.destination:
                raise UsageError(f"block {move.block} cannot move from pserver {move.source} to {move.destination}")
            if move.destination not in seen:
                raise NotReadyError(f"there is no pserver {move.destination}")

    def acknowledged(self, message: Acknowledged) -> Transaction | None:
        """Return the transaction that commits the move of a block; None if its attempt is over."""
        stored = self.stored
        if stored is None or stored.intent.master != self._master or message.attempt != stored.attempt:
            return None
        move = stored.intent.move_of(message.block)
        if move is None:
            return None
        rest = tuple(each for each in stored.intent.moves if each != move)
        intent = Intent(self._master, rest, stored.intent.generations) if rest else None
        both = {move.source, move.destination}
        generations = tuple(each for each in stored.intent.generations if each[0] in both)
        return self._transaction(stored.attempt, intent, self.owners.moved(move, stored.attempt), generations)

    def cancel_if_failed(self, seen: Mapping[int, int]) -> Transaction | None:
        """Return the transaction that cancels the intent if a predecessor stored it or one of its pservers is gone."""
        if self.stored is None:
            return None
        intent = self.stored.intent
        is_own = intent.master == self._master
        if is_own and all(seen.get(index) == generation for index, generation in intent.generations):
            return None
        return self._transaction(self.stored.attempt, None, None, ())

    def _transaction(
        self, attempt: int, intent: Intent | None, owners: Owners | None, generations: tuple[tuple[int, int], ...]
    ) -> Transaction:
        return Transaction(
            attempt=attempt,
            intent=intent,
            owners=owners,
            master=self._master,
            generations=generations,
            version=self.owners.version,
            excludes_checkpoint=attempt == NONE,
        )
