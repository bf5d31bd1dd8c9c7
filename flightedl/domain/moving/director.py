"""Decisions of the master about moves: when an intent may stand, what is committed, and what is cancelled.

The caller writes one transaction at a time, and reads owners and intent after each one, whatever its outcome: a
transaction that failed or whose outcome is unknown says nothing about them.

Rules:

* At most one intent stands. A new master cancels the one that it finds: it does not know what became of its moves.
* An intent is stored only while every pserver is settled, no audit is open and no checkpoint is ordered. While it
  stands, no audit begins and no checkpoint is ordered. So the answers of an audit and the files of a checkpoint belong
  to one version of the owners.
* A commit compares the master's lock, the attempt, the version of the owners, and the generations of both pservers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flightedl.domain.moving.losses import Losses
from flightedl.domain.moving.values import NONE, Acknowledged, Intent, Move, Owners, Standing, Transaction
from flightedl.errors import NotReadyError, UsageError


class Director:
    """The moves of one job, as its master knows them. Not thread-safe.

    Args:
        master: Generation of the master.
        owners: As read after the lock was taken.
        standing: As read in the same transaction.
    """

    def __init__(self, master: int, owners: Owners, standing: Standing | None) -> None:
        self._master = master
        self.owners = owners
        self.standing = standing

    def read(self, owners: Owners, standing: Standing | None) -> None:
        """Take note of what is stored, after each transaction."""
        self.owners, self.standing = owners, standing

    @property
    def is_moving(self) -> bool:
        """True while an intent stands: no audit begins, and no checkpoint is ordered."""
        return self.standing is not None

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
            moves: Blocks, each with its owner as the source.
            seen: Index -> generation of the processes that are there.
            losses: What is settled.
            is_audit_open: True while pservers are asked what they have.
            is_checkpoint_open: True while a checkpoint is ordered.

        Raises:
            UsageError: the moves name a block twice, another source than the owner, or the source as destination.
            NotReadyError: they have to wait.
        """
        self._require_possible(moves, seen)
        indexes = sorted({index for move in moves for index in (move.source, move.destination)})
        if self.standing is not None:
            raise NotReadyError("other blocks are being moved")
        if not losses.is_settled(seen, [*indexes, *set(self.owners.pservers)]):
            raise NotReadyError("a pserver has not said yet what it has loaded")
        if is_audit_open or is_checkpoint_open:
            raise NotReadyError(f"{'an audit' if is_audit_open else 'a checkpoint'} is under way")
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
        standing = self.standing
        if standing is None or standing.intent.master != self._master or message.attempt != standing.attempt:
            return None
        move = standing.intent.move_of(message.block)
        if move is None:
            return None
        rest = tuple(each for each in standing.intent.moves if each != move)
        intent = Intent(self._master, rest, standing.intent.generations) if rest else None
        both = {move.source, move.destination}
        generations = tuple(each for each in standing.intent.generations if each[0] in both)
        return self._transaction(standing.attempt, intent, self.owners.moved(move, standing.attempt), generations)

    def cancel_what_cannot_go_on(self, seen: Mapping[int, int]) -> Transaction | None:
        """Return the transaction that cancels the standing intent, if it is a predecessor's or a pserver is gone."""
        if self.standing is None:
            return None
        intent = self.standing.intent
        is_own = intent.master == self._master
        if is_own and all(seen.get(index) == generation for index, generation in intent.generations):
            return None
        return self.cancel()

    def cancel(self) -> Transaction | None:
        """Return the transaction that cancels the standing intent; None if there is none."""
        return None if self.standing is None else self._transaction(self.standing.attempt, None, None, ())

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
