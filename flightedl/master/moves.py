"""Transactions that change where blocks are: the intent to move blocks, and the placement.

One thread executes the core's transactions, one at a time, as ``domain.master.stored_moves`` describes.
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
from flightedl.domain.master.stored_moves import INTENT, PLACEMENT, StoredKey, StoredMoves, moves_in
from flightedl.domain.moving.values import Transaction
from flightedl.errors import FencedError, OutcomeUnknownError, UnavailableError
from flightedl.master.state import JobState
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
        self._stored = StoredMoves(placed_at)
        self._names = {PLACEMENT: keys.placement, INTENT: keys.moving}
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
        write, names = self._stored.write_of(transaction), self._names
        conditions: list[Condition] = [
            *(ModifiedAt(names[name], at) for name, at in write.modified.items()),
            *(CreatedAt(names[name], at) if at else Absent(names[name]) for name, at in write.created.items()),
            *(CreatedAt(self._keys.pserver(index), each) for index, each in transaction.generations),
        ]
        if transaction.excludes_checkpoint:
            latest = self._keys.checkpoint_latest
            conditions.append(ModifiedAt(latest, self._state.stored_at(latest)))
        operations: list[Operation] = [
            *(Put(names[name], value) for name, value in write.puts.items()),
            *(Delete(names[name]) for name in write.deletes),
        ]
        result = self._repeated(lambda: self._held.write(operations, conditions))
        if result is None:
            return None
        if result.committed:
            return self._stored.committed(transaction, result.revision)
        entries = self._repeated(lambda: self._coordinator.list(self._keys.prefix))
        if entries is None:
            return None
        found = {entry.key: entry for entry in entries.entries}
        placed, moving = (_stored_key(found.get(names[name])) for name in (PLACEMENT, INTENT))
        return self._stored.rejected(placed, moving, entries.revision)

    def _repeated(self, execute: Callable[[], Result]) -> Result | None:
        while not self._stop.is_set():
            try:
                return execute()
            except (UnavailableError, OutcomeUnknownError):
                self._state.clock.sleep(_RETRY_S)
        return None


def _stored_key(entry: Entry | None) -> StoredKey | None:
    return None if entry is None else StoredKey(entry.value, entry.create_revision, entry.mod_revision)


def read_moves(placed: Entry | None, moving: Entry | None, revision: int) -> MovesRead:
    """Return the stored placement and intent, given their entries at this revision."""
    return moves_in(_stored_key(placed), _stored_key(moving), revision)
