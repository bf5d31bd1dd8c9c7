"""The keys of the placement and of the intent: composes transactions, and interprets their outcomes.

A driver executes one transaction at a time, and repeats a transaction until etcd answers. If an earlier attempt was
executed, the conditions of the later ones fail, because the key of the placement or of the intent has changed. So once
the outcome is known, no attempt can take effect anymore.
"""

from __future__ import annotations

import msgspec

from flightedl.domain.master.events import MovesRead
from flightedl.domain.moving.values import NONE, Intent, StoredIntent, Transaction
from flightedl.messages.base import decode, encode
from flightedl.messages.declarations import Placement

#: Names of the two keys.
PLACEMENT, INTENT = "placement", "moving"


class StoredKey(msgspec.Struct, frozen=True, array_like=True):
    """An existing key, as read from etcd."""

    value: bytes
    #: Revisions of its creation and of its last change.
    created: int
    modified: int


class MovesWrite(msgspec.Struct, frozen=True):
    """One atomic transaction. The keys of the pservers in ``Transaction.generations`` are compared, too."""

    #: Name -> new value.
    puts: dict[str, bytes]
    deletes: tuple[str, ...]
    #: Name -> revision at which the key was created or last changed; 0 if the key must not exist.
    created: dict[str, int]
    modified: dict[str, int]


class StoredMoves:
    """The two keys, as known to the master that writes them.

    Args:
        placed_at: Revision at which the placement was last written; 0 if it is not stored.
    """

    def __init__(self, placed_at: int) -> None:
        self._placed_at = placed_at

    def write_of(self, transaction: Transaction) -> MovesWrite:
        puts: dict[str, bytes] = {}
        if transaction.intent is not None:
            puts[INTENT] = encode(transaction.intent)
        if transaction.placement is not None:
            puts[PLACEMENT] = encode(transaction.placement)
        is_deleted = transaction.intent is None and transaction.attempt != NONE
        return MovesWrite(
            puts=puts,
            deletes=(INTENT,) if is_deleted else (),
            created={INTENT: 0 if transaction.attempt == NONE else transaction.attempt},
            modified={PLACEMENT: self._placed_at},
        )

    def committed(self, transaction: Transaction, revision: int) -> MovesRead:
        """Return the outcome of a transaction that was executed at this revision."""
        if transaction.placement is not None:
            self._placed_at = revision
        attempt = revision if transaction.attempt == NONE else transaction.attempt
        stored = None if transaction.intent is None else StoredIntent(attempt, transaction.intent)
        return MovesRead(transaction.placement, stored, revision, is_outcome=True)

    def rejected(self, placed: StoredKey | None, moving: StoredKey | None, revision: int) -> MovesRead:
        """Return the outcome of a transaction whose conditions failed, given the keys as read after that."""
        self._placed_at = 0 if placed is None else placed.modified
        return moves_in(placed, moving, revision, is_outcome=True)


def moves_in(
    placed: StoredKey | None, moving: StoredKey | None, revision: int, *, is_outcome: bool = False
) -> MovesRead:
    """Return the stored placement and intent, read at this revision. For ``is_outcome`` see ``MovesRead``."""
    placement = None if placed is None else decode(placed.value, Placement)
    stored = None if moving is None else StoredIntent(moving.created, decode(moving.value, Intent))
    return MovesRead(placement, stored, revision, is_outcome)
