"""Transactions that change where blocks are: the intent to move blocks, and the placement.

One thread executes the core's transactions, one at a time. A transaction whose outcome is unknown is repeated until
etcd answers. If an earlier attempt was executed, the conditions of the later ones fail. So when the core learns the
outcome, no attempt can take effect anymore.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TypeVar

from flightedl.coordination.keeper import HeldKey
from flightedl.coordination.keys import JobKeys
from flightedl.domain.master.effects import StoreMoves
from flightedl.domain.master.events import MovesRead
from flightedl.domain.moving.values import NONE, Intent, StoredIntent, Transaction
from flightedl.errors import FencedError, OutcomeUnknownError, UnavailableError
from flightedl.master.state import JobState
from flightedl.messages.base import decode, encode
from flightedl.messages.declarations import Placement
from flightedl.ports import (
    Absent,
    Condition,
    Coordinator,
    CreatedAt,
    Delete,
    Entry,
    ModifiedAt,
    Operation,
    Put,
    TransactionResult,
)

_RETRY_S = 0.1

Result = TypeVar("Result")


class MoveTransactions:
    """Executes transactions of moves. Thread-safe.

    Args:
        state: Receives the outcomes.
        held: Lock of the master.
        coordinator: Access to etcd.
        keys: The job's keys.
        placed_at: Revision at which the placement was last written; 0 if it is not stored.
        step_down: Called if the lock is lost.
    """

    def __init__(
        self,
        state: JobState,
        held: HeldKey,
        coordinator: Coordinator,
        keys: JobKeys,
        placed_at: int,
        step_down: Callable[[str], None],
    ) -> None:
        self._state = state
        self._held = held
        self._coordinator = coordinator
        self._keys = keys
        self._placed_at = placed_at
        self._step_down = step_down
        self._stop = threading.Event()
        self._due: queue.SimpleQueue[StoreMoves | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="flightedl-moves", daemon=True)
        self._thread.start()

    def do(self, effect: StoreMoves) -> None:
        self._due.put(effect)

    def close(self) -> None:
        self._stop.set()
        self._due.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while (effect := self._due.get()) is not None and not self._stop.is_set():
            if not self._state.becomes_durable(self._stop.is_set, effect.revision):
                return
            try:
                found = self._executed(effect.transaction)
            except FencedError:
                self._step_down("another master holds the lock")
                return
            if found is not None:
                self._state.apply(found)

    def _executed(self, transaction: Transaction) -> MovesRead | None:
        """Execute a transaction, and return its outcome; None if this master exits first.

        Raises:
            FencedError: the lock is lost.
        """
        conditions, operations = self._conditions(transaction), self._operations(transaction)
        result = self._repeated(lambda: self._held.write(operations, conditions))
        if result is None:
            return None
        if result.committed:
            return self._committed(transaction, result)
        entries = self._repeated(lambda: self._coordinator.list(self._keys.prefix))
        if entries is None:
            return None
        found = {entry.key: entry for entry in entries.entries}
        placed = found.get(self._keys.placement)
        self._placed_at = 0 if placed is None else placed.mod_revision
        return moves_in(placed, found.get(self._keys.moving), entries.revision, is_outcome=True)

    def _committed(self, transaction: Transaction, result: TransactionResult) -> MovesRead:
        placement, intent = transaction.placement, transaction.intent
        if placement is not None:
            self._placed_at = result.revision
        attempt = result.revision if transaction.attempt == NONE else transaction.attempt
        stored = None if intent is None else StoredIntent(attempt, intent)
        return MovesRead(placement, stored, result.revision, is_outcome=True)

    def _repeated(self, execute: Callable[[], Result]) -> Result | None:
        while not self._stop.is_set():
            try:
                return execute()
            except (UnavailableError, OutcomeUnknownError):
                self._state.clock.sleep(_RETRY_S)
        return None

    def _conditions(self, transaction: Transaction) -> list[Condition]:
        keys = self._keys
        conditions: list[Condition] = [ModifiedAt(keys.placement, self._placed_at)]
        if transaction.attempt == NONE:
            conditions.append(Absent(keys.moving))
        else:
            conditions.append(CreatedAt(keys.moving, transaction.attempt))
        if transaction.excludes_checkpoint:
            conditions.append(ModifiedAt(keys.checkpoint_latest, self._state.stored_at(keys.checkpoint_latest)))
        return conditions + [CreatedAt(keys.pserver(index), each) for index, each in transaction.generations]

    def _operations(self, transaction: Transaction) -> list[Operation]:
        keys, operations = self._keys, list[Operation]()
        if transaction.intent is not None:
            operations.append(Put(keys.moving, encode(transaction.intent)))
        elif transaction.attempt != NONE:
            operations.append(Delete(keys.moving))
        if transaction.placement is not None:
            operations.append(Put(keys.placement, encode(transaction.placement)))
        return operations


def moves_in(placed: Entry | None, moving: Entry | None, revision: int, *, is_outcome: bool = False) -> MovesRead:
    """Return the stored placement and intent.

    Args:
        placed: Entry of the placement.
        moving: Entry of the intent.
        revision: Revision at which they were read.
        is_outcome: See ``MovesRead``.
    """
    placement = None if placed is None else decode(placed.value, Placement)
    stored = None if moving is None else StoredIntent(moving.create_revision, decode(moving.value, Intent))
    return MovesRead(placement, stored, revision, is_outcome)
